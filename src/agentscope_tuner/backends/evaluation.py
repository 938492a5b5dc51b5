"""Evaluating whatever plays the trained roles."""

from __future__ import annotations

import time

from agentscope_tuner.reporting import DECODINGS, ProgressView, check_failures, mean_metrics, summarize
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.types import EvalResult, Task


async def evaluate_policy(
    rollout: Rollout, tasks: list[Task], view: ProgressView, max_failed_fraction: float
) -> dict[str, EvalResult]:
    """Run every task once greedily and once sampled, with the same random numbers each time it is called.

    Raises:
        TooManyFailuresError: too many episodes failed for the mean to mean anything.
    """
    results = {}
    for decoding in DECODINGS:
        view.phase(f"eval {decoding}", len(tasks))
        params = rollout.model.params
        if decoding == "greedy":
            params = params.greedy()
        begun = time.perf_counter()
        groups = await rollout.run(tasks, 1, phase=f"eval_{decoding}", params=params)
        episodes = [episode for group in groups for episode in group.episodes]
        check_failures(episodes, max_failed_fraction)
        results[decoding] = summarize([e.reward_mean for e in episodes], time.perf_counter() - begun)
        results[decoding].metrics = mean_metrics(episodes)
    return results
