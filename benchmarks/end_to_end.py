"""The math agent from start to skill: `python benchmarks/end_to_end.py [--rounds 3]`.

`tune()` as `make demo` calls it, with an evaluation after every second step: the seconds of training (rollouts and
updates, without evaluations) until the greedy held-out reward is 0.9, and where the time of the steps went. `sampling`
is the sampler's work, also while agents act, `training` the learner's, `judging` the judge's, and `agents and the rest`
everything else in which nobody samples: AgentScope, tools, rendering and recording.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from common import ROOT, Stopwatch, write_results

sys.path.insert(0, str(ROOT / "examples" / "math_agent"))

from workflow import MathAgent

from agentscope_tuner import MathJudge, TuneResult, tune
from agentscope_tuner.backends.local import LocalRun
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.types import StepMetrics
from agentscope_tuner.workflow import JudgeRunner

GOAL = 0.9
PARTS: dict[str, tuple[type, list[str]]] = {
    "sampling": (Sampler, ["_admit", "_begin", "_join", "_end"]),
    "training": (Learner, ["train"]),
    "judging": (JudgeRunner, ["run"]),
}


def helping() -> float:
    """Seconds that each of the other threads has computed: they sample, but in the learner's turn."""
    return (time.process_time() - time.thread_time()) / max(1, torch.get_num_threads() - 1)


def count_overlap(watch: Stopwatch) -> Callable[[], None]:
    """Count as sampling what is sampled while agents act; returns what ends that."""
    settle = Sampler._settle

    async def settled(self: Sampler) -> None:
        before = helping()
        await settle(self)
        watch.seconds["sampling"] += helping() - before

    Sampler._settle = settled
    return lambda: setattr(Sampler, "_settle", settle)


def train(watch: Stopwatch, seed: int, folder: str) -> TuneResult:
    """One run. Evaluations are not counted."""
    evaluate = LocalRun._evaluate

    async def uncounted(self: LocalRun, metrics: StepMetrics) -> None:
        before = dict(watch.seconds)
        await evaluate(self, metrics)
        watch.seconds.clear()
        watch.seconds.update(before)

    LocalRun._evaluate = uncounted
    try:
        return tune(
            MathAgent,
            "examples/math_agent/config.yaml",
            judge_func=MathJudge(),
            overrides=[f"seed={seed}", f"output_dir={folder}", "algorithm.eval_interval_steps=2"],
        )
    finally:
        LocalRun._evaluate = evaluate


def measure(seed: int) -> dict[str, Any]:
    """A row of the table."""
    watch = Stopwatch()
    for part, (owner, methods) in PARTS.items():
        for method in methods:
            watch.time(owner, method, part)
    stop = count_overlap(watch)
    with tempfile.TemporaryDirectory() as folder:
        history = train(watch, seed, folder).history
    stop()
    watch.stop()
    seconds, reached = 0.0, None
    for step in history:
        seconds += step.time_rollout_s + step.time_train_s
        if reached is None and (step.eval_reward_mean or 0.0) >= GOAL:
            reached = (step.step, seconds)
    return {
        "seed": seed,
        f"steps to {GOAL}": reached and reached[0],
        f"seconds to {GOAL}": reached and reached[1],
        "steps": history[-1].step,
        "seconds": seconds,
        "held-out reward": history[-1].eval_reward_mean,
        **{part: watch.seconds[part] / seconds for part in PARTS},
        "agents and the rest": 1 - sum(watch.seconds[part] for part in PARTS) / seconds,
    }


def main(rounds: Annotated[int, typer.Option(help="Runs, with a seed for each.")] = 3) -> None:
    """Measure, print and keep."""
    os.chdir(ROOT)
    rows = [measure(seed) for seed in range(rounds)]
    middle = statistics.median(row[f"seconds to {GOAL}"] or float("inf") for row in rows)
    print(f"median {middle:.1f} s of training to a held-out reward of {GOAL}")
    write_results("end_to_end", rows)


if __name__ == "__main__":
    typer.run(main)
