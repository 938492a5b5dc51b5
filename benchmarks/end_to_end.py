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
from collections.abc import Sequence
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
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.types import EpisodeGroup, StepMetrics
from agentscope_tuner.workflow import JudgeRunner

GOAL = 0.9
PARTS = "sampling", "training", "judging"


def helping() -> float:
    """Seconds that each of the other threads has computed: they sample, but in the learner's turn."""
    return (time.process_time() - time.thread_time()) / max(1, torch.get_num_threads() - 1)


class SamplingWatch(Stopwatch):
    """Seconds in which somebody samples: other threads while agents act, and this one while they do not."""

    def __init__(self) -> None:
        super().__init__(lambda: time.perf_counter() - helping())
        for method in ("_admit", "_begin", "_complete"):
            self.time(Sampler, method, "sampling")
        self._run = Rollout.run

        async def run(rollout: Rollout, *args: Any, **options: Any) -> list[EpisodeGroup]:
            before = helping()
            try:
                return await self._run(rollout, *args, **options)
            finally:
                self.seconds["sampling"] += helping() - before

        Rollout.run = run

    def stop(self) -> None:
        """Count no more."""
        super().stop()
        Rollout.run = self._run


def train(watches: Sequence[Stopwatch], seed: int, folder: str) -> TuneResult:
    """One run. Evaluations are not counted."""
    evaluate = LocalRun._evaluate

    async def uncounted(self: LocalRun, metrics: StepMetrics) -> None:
        before = [dict(watch.seconds) for watch in watches]
        await evaluate(self, metrics)
        for watch, seconds in zip(watches, before, strict=True):
            watch.seconds.clear()
            watch.seconds.update(seconds)

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
    watch, sampling = Stopwatch(), SamplingWatch()
    watch.time(Learner, "train", "training")
    watch.time(JudgeRunner, "run", "judging")
    with tempfile.TemporaryDirectory() as folder:
        history = train([watch, sampling], seed, folder).history
    for one in (watch, sampling):
        one.stop()
    spent = {**sampling.seconds, **watch.seconds}
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
        **{part: spent[part] / seconds for part in PARTS},
        "agents and the rest": 1 - sum(spent[part] for part in PARTS) / seconds,
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
