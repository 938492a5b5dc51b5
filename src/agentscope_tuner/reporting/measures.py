"""What the episodes of a batch say: means, failures, evaluations."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev

from agentscope_tuner.errors import TooManyFailuresError
from agentscope_tuner.reporting.run_folder import RunFolder, read_episodes
from agentscope_tuner.types import Episode, EpisodeGroup, EvalResult, ModelCall, StepMetrics

DECODINGS = ("greedy", "sampled")
"""How held-out tasks are run."""
_EVAL_FIELDS = {"greedy": "eval_reward_mean", "sampled": "eval_reward_sampled_mean"}


def check_failures(episodes: Sequence[Episode], limit: float, where: Path | None = None) -> None:
    """Stop when too much fails; `where` is the folder that the episodes are in.

    Raises:
        TooManyFailuresError: names the commonest cause.
    """
    errors = [episode.error for episode in episodes if episode.error is not None]
    if len(errors) > limit * len(episodes):
        commonest, count = Counter(str(error) for error in errors).most_common(1)[0]
        trace = next(error.traceback for error in errors if str(error) == commonest)
        raise TooManyFailuresError(
            f"{len(errors)} of {len(episodes)} episodes failed, more than `algorithm.max_failed_fraction` ({limit:g}) "
            f"allows; the commonest error ({count} times) is {commonest}"
            + (f"\nAll episodes are in `{where}`" if where else "")
            + (f"\n{trace}" if trace else "")
        )


def summarize(rewards: Sequence[float | None], time_s: float = 0.0) -> EvalResult:
    """Mean reward with its 95% confidence interval; None stands for a failed episode, which has no reward.

    Wilson's score interval for rewards that are all 0 or 1 (it stays sensible near the ends), the normal approximation
    for others.
    """
    scored = [reward for reward in rewards if reward is not None]
    failed = len(rewards) - len(scored)
    if not scored:
        return EvalResult(math.nan, math.nan, math.nan, len(rewards), failed, time_s=time_s)
    n, mean, z = len(scored), fmean(scored), NormalDist().inv_cdf(0.975)
    if all(reward in (0.0, 1.0) for reward in scored):
        center = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    else:
        center, half = mean, z * (stdev(scored) / math.sqrt(n) if n > 1 else math.inf)
    return EvalResult(mean, center - half, center + half, len(rewards), failed, time_s=time_s)


def describe_evaluation(results: Mapping[str, EvalResult], metrics: StepMetrics) -> None:
    """Fill in what an evaluation found."""
    for decoding, result in results.items():
        setattr(metrics, _EVAL_FIELDS[decoding], result.reward_mean)
        metrics.extra |= {f"eval_{decoding}/{name}": value for name, value in result.metrics.items()}
    metrics.time_eval_s = max((result.time_s for result in results.values()), default=0.0)


def stored_evaluation(folder: RunFolder, step: int) -> dict[str, EvalResult]:
    """What the evaluation after a step found, from its episodes; nothing where there was none."""
    found = {}
    for decoding in DECODINGS:
        path = folder.episodes_dir / f"eval_{decoding}_{step:06d}.jsonl"
        if path.exists():
            rewards = [row["reward"] for row in read_episodes(path)]
            found[decoding] = summarize([fmean(reward.values()) if reward else None for reward in rewards])
    return found


def with_continuations(episodes: Sequence[Episode]) -> list[Episode]:
    """All episodes that were run, those that continue another one included."""
    more = [other for episode in episodes if episode.branch is not None for other in episode.branch.continuations]
    return [*episodes, *more]


def describe(groups: list[EpisodeGroup], metrics: StepMetrics) -> None:
    """Fill in what the episodes of a batch say."""
    episodes = [episode for group in groups for episode in group.episodes]
    metrics.episodes = len(episodes)
    metrics.episodes_failed = sum(episode.error is not None for episode in episodes)
    metrics.tokens_sampled = sum(episode.tokens_sampled for episode in with_continuations(episodes))
    rewards = [episode.reward_mean for episode in episodes if episode.reward_mean is not None]
    if rewards:
        metrics.reward_mean = fmean(rewards)
        metrics.reward_std = stdev(rewards) if len(rewards) > 1 else 0.0
    metrics.extra = mean_metrics(episodes)


def mean_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Averages over the episodes that have them.

    Workflow and judge metrics; of each role the reward, the calls, and the tokens it wrote; the calls of each of its
    players, where there are several.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            values[name].append(value)
        for role, reward in (episode.reward or {}).items():
            values[f"reward_mean/{role}"].append(reward)
        for role, calls in _grouped(episode.calls[episode.replayed :], lambda call: call.role).items():
            values[f"calls/{role}"].append(len(calls))
            values[f"tokens/{role}"].append(sum(len(call.completion_ids) for call in calls))
            players = _grouped(calls, lambda call: call.agent)
            for agent, own in players.items() if len(players) > 1 else ():
                values[f"calls/{role}/{agent}"].append(len(own))
    return {name: fmean(found) for name, found in sorted(values.items())}


def _grouped(calls: Sequence[ModelCall], key: Callable[[ModelCall], str]) -> dict[str, list[ModelCall]]:
    groups: dict[str, list[ModelCall]] = defaultdict(list)
    for call in calls:
        groups[key(call)].append(call)
    return groups
