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
    params = rollout.model.params
    view.phase("evaluation", len(tasks) * len(DECODINGS))
    begun = time.perf_counter()
    ways = {"greedy": params.greedy(), "sampled": params}
    groups = await rollout.run_phases(tasks, 1, {f"eval_{decoding}": ways[decoding] for decoding in DECODINGS})
    time_s = time.perf_counter() - begun
    results = {}
    for decoding in DECODINGS:
        episodes = [episode for group in groups[f"eval_{decoding}"] for episode in group.episodes]
        check_failures(episodes, max_failed_fraction)
        results[decoding] = summarize([episode.reward_mean for episode in episodes], time_s)
        results[decoding].metrics = mean_metrics(episodes)
    return results
