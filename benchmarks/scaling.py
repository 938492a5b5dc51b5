"""Time and memory against the amount of work: `python benchmarks/scaling.py`.

Groups of 8 episodes of several turns: a prompt, then in every turn 32 sampled tokens and 24 of the environment. One of
four things grows, the others stay: episodes (16 to 1,024, of 4 turns), turns (1 to 20, 64 episodes), tokens of the
prompt (100 to 8,000, 64 episodes of 2 turns), and the model's parameters (S, M and L, 16 episodes of 2 turns).
`exponent` is the slope of a straight line through the points on logarithmic axes: 1 is linear. `work` is how many
multiplications a forward pass takes in products of matrices: with longer episodes it grows by more than their tokens,
since each of them attends to all before it. Every point is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import linear_regression
from typing import Annotated, Any

import typer
from common import (
    GROUP,
    SIZES,
    forget_peak_memory,
    half_good,
    load,
    make_call,
    peak_memory,
    tokens_and_work,
    write_results,
)

from agentscope_tuner.config import AlgorithmConfig
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.event_loop import run_to_end
from agentscope_tuner.policy import SamplingParams
from agentscope_tuner.types import ModelCall

SAMPLED, OBSERVED = 32, 24
SWEEPS: dict[str, list[int]] = {
    "episodes": [16, 64, 256, 1024],
    "turns": [1, 2, 5, 10, 20],
    "prompt": [100, 500, 2000, 8000],
}
USUAL = {"episodes": {"turns": 4, "prompt": 100}, "turns": {"episodes": 64, "prompt": 100},
         "prompt": {"episodes": 64, "turns": 2}, "parameters": {"episodes": 16, "turns": 2, "prompt": 100}}  # fmt: skip


async def play(sampler: Sampler, episodes: int, turns: int, prompt: int) -> list[ModelCall]:
    """The calls of all episodes."""
    rng = random.Random(0)
    starts = [[rng.randrange(3, 1000) for _ in range(prompt)] for _ in range(-(-episodes // GROUP))]
    calls: list[ModelCall] = []

    async def one(number: int) -> None:
        name, own = f"{number}", random.Random(number)
        ids = starts[number // GROUP]
        sampler.open_episode(name)
        for turn in range(turns):
            params = SamplingParams(max_tokens=SAMPLED, seed=100 * number + turn)
            sample = await sampler.sample(ids, params, episode_id=name)
            calls.append(make_call(ids, sample.token_ids, sample.logprobs))
            ids = ids + sample.token_ids + [own.randrange(3, 1000) for _ in range(OBSERVED)]
        sampler.close_episode(name)

    await asyncio.gather(*map(one, range(episodes)))
    return calls


def measure_here(size: str, dtype: str, episodes: int, turns: int, prompt: int) -> dict[str, float]:
    """One point, in this process."""
    context = prompt + turns * (SAMPLED + OBSERVED) + 8
    loaded, settings = load(size, dtype, context)
    learner = Learner(loaded, AlgorithmConfig(), settings, SAMPLED)
    sampler = Sampler(loaded, settings)
    learner.accumulate(half_good(run_to_end(play(sampler, 8, 1, 64))))  # warm-up
    learner.optimizer.zero_grad()
    sampler.weights_changed(1)
    before, begun = forget_peak_memory(), time.perf_counter()
    calls = run_to_end(play(sampler, episodes, turns, prompt))
    rollout_s, rollout_gb = time.perf_counter() - begun, peak_memory() - before
    datums = half_good(calls)
    begun = time.perf_counter()
    learner.accumulate(datums)
    return {
        "parameters": loaded.model.num_parameters(),
        "rollout_s": rollout_s,
        "train_s": time.perf_counter() - begun,
        "rollout_gb": rollout_gb,
        "total_gb": peak_memory() - before,
        "work": tokens_and_work(size, calls)[1],
    }


def measure(*given: str) -> dict[str, float]:
    """One point, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *given], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def sweep(size: str, dtype: str, what: str) -> Iterator[dict[str, Any]]:
    """The rows of one quantity, the exponents last."""
    if what == "parameters":
        points = [(one, USUAL[what]) for one in SIZES]
    else:
        points = [(size, {**USUAL[what], what: value}) for value in SWEEPS[what]]
    rows: list[dict[str, Any]] = []
    for model, work in points:
        options = [part for name, number in work.items() for part in (f"--{name}", str(number))]
        rows.append({"grows": what, **work, **measure("--size", model, "--dtype", dtype, *options)})
        yield rows[-1]
    exponents = {
        key: linear_regression([math.log(row[what]) for row in rows], [math.log(row[key]) for row in rows]).slope
        for key in ("rollout_s", "train_s", "total_gb", "work")
    }
    yield {"grows": what, what: "exponent", **exponents}


def main(
    size: Annotated[str, typer.Option(help="S, M or L.")] = "S",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    episodes: Annotated[int, typer.Option(help="One point only, with so many episodes.")] = 0,
    turns: Annotated[int, typer.Option(help="Of that point.")] = 1,
    prompt: Annotated[int, typer.Option(help="Of that point.")] = 100,
) -> None:
    """Measure, print and keep."""
    if episodes:
        print(json.dumps(measure_here(size, dtype, episodes, turns, prompt)))
        return
    write_results("scaling", (row for what in USUAL for row in sweep(size, dtype, what)))


if __name__ == "__main__":
    typer.run(main)
