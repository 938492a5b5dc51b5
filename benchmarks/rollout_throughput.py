"""Rollout throughput against transformers' `generate`: `python benchmarks/rollout_throughput.py`.

The workload is one training batch of the math agent: 16 tasks, 8 episodes each, tiny-agent in float32, at most 48 new
tokens per call. Ours is everything a rollout does: agents, tools, rendering, recording, sampling. Theirs is `generate`
alone, batched the usual way: all calls of a turn in one left-padded batch, sampled at temperature 1 with
log-probabilities; the prompts are those that our episodes had, so agents cost it nothing.

Both sides run in turn within one process; the figure is the median of the ratios of their tokens per second.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import GROUP, NEW_TOKENS, TASKS, generate
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "math_agent"))

from workflow import MathAgent  # noqa: E402

from agentscope_tuner import MathJudge  # noqa: E402
from agentscope_tuner.backends.local import start_engines  # noqa: E402
from agentscope_tuner.config import load_config  # noqa: E402
from agentscope_tuner.engine.models import model_directory  # noqa: E402
from agentscope_tuner.readers import load_tasks  # noqa: E402
from agentscope_tuner.rollout import Rollout  # noqa: E402
from agentscope_tuner.types import Episode  # noqa: E402
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner  # noqa: E402


def main(
    model: Annotated[str, typer.Option(help="Model to run.")] = "tiny-agent",
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
) -> None:
    """Measure and print."""
    os.chdir(ROOT)
    config = load_config("examples/math_agent/config.yaml", overrides=[f"model.model_path={model}"])
    engine, _ = start_engines(config)
    rollout = Rollout(
        WorkflowRunner(MathAgent), JudgeRunner(MathJudge()), engine.model, config.workflow, config.seed, {}
    )
    tasks = load_tasks(config.train_dataset)
    reference = AutoModelForCausalLM.from_pretrained(model_directory(model), dtype=torch.float32).eval()
    end = sorted(engine.loaded.end_of_turn_ids)

    def ours(number: int) -> tuple[list[Episode], float]:
        engine.sampler.weights_changed(number)  # an empty cache, as after every update
        begun = time.perf_counter()
        batch = tasks[number * TASKS : (number + 1) * TASKS]
        groups = asyncio.run(rollout.run(batch, GROUP, phase=f"round{number}"))
        return [episode for group in groups for episode in group.episodes], time.perf_counter() - begun

    ratios = []
    for number in range(rounds + 1):
        episodes, seconds = ours(number)
        turns: dict[int, list[list[int]]] = defaultdict(list)
        for episode in episodes:
            for turn, call in enumerate(episode.calls):
                turns[turn].append(call.prompt_ids)
        speed = sum(episode.tokens_sampled for episode in episodes) / seconds
        begun = time.perf_counter()
        completions = [generate(reference, prompts, NEW_TOKENS, end) for prompts in turns.values()]
        theirs = sum(int((new != 0).sum()) for new in completions) / (time.perf_counter() - begun)
        if number == 0:
            continue  # warm-up
        ratios.append(speed / theirs)
        print(f"round {number}: ours {speed:,.0f} tokens/s, generate {theirs:,.0f} tokens/s, ratio {ratios[-1]:.2f}")
    print(f"median ratio {statistics.median(ratios):.2f} over {rounds} rounds, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    typer.run(main)
