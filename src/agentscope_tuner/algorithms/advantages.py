"""From rewards to advantages, and from groups of episodes to what the learner reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from agentscope_tuner.types import EpisodeGroup, ModelCall, Trajectory

_EPSILON = 1e-4
"""Added to the standard deviation, as TRL does, so that tiny differences do not become large advantages."""


@dataclass(slots=True)
class Datum:
    """One call with everything its loss needs."""

    call: ModelCall
    advantage: float
    weight: float
    """Factor of each of its tokens' losses; set for one optimizer step by `weigh`."""
    trajectory: int
    """Which episode and role it belongs to."""


def compute_advantages(
    groups: Sequence[EpisodeGroup], mode: Literal["group_std", "mean_only"]
) -> list[list[tuple[Trajectory, float]]]:
    """One advantage per episode and role, for every group, however many calls the episode made.

    Rewards are compared within a task and role (GRPO, arXiv:2402.03300, section 4.1.2). Failed episodes take no part;
    a role that fewer than two episodes played, or whose rewards are all equal, teaches nothing and is left out.
    """
    result = []
    for group in groups:
        by_role: dict[str, list[Trajectory]] = defaultdict(list)
        for episode in group.succeeded:
            for trajectory in episode.trajectories():
                by_role[trajectory.role].append(trajectory)
        compared: list[tuple[Trajectory, float]] = []
        for trajectories in by_role.values():
            rewards = [trajectory.reward for trajectory in trajectories]
            if len(rewards) < 2 or max(rewards) == min(rewards):
                continue
            mean = fmean(rewards)
            scale = 1 / (stdev(rewards) + _EPSILON) if mode == "group_std" else 1.0
            compared.extend((t, (t.reward - mean) * scale) for t in trajectories)
        result.append(compared)
    return result


def build_datums(advantages: Sequence[Sequence[tuple[Trajectory, float]]], updates: int = 1) -> list[list[Datum]]:
    """Deal the groups out among `updates` optimizer steps; an update without any datum is left out."""
    dealt: list[list[Datum]] = [[] for _ in range(updates)]
    trajectory = 0
    teaching = [group for group in advantages if group]
    for i, group in enumerate(teaching):
        for one, advantage in group:
            datums = [Datum(call, advantage, 0.0, trajectory) for call in one.calls if call.trainable]
            dealt[i * updates // len(teaching)].extend(datums)
            trajectory += 1
    return [datums for datums in dealt if datums]


def weigh(datums: Sequence[Datum], weighting: Literal["token", "episode", "constant"], max_tokens: int) -> None:
    """Set the weights so that the update's loss is the weighted sum over its tokens.

    `token`: one over the number of tokens. `episode`: the mean over trajectories of the mean over a trajectory's
    tokens. `constant`: one over trajectories times `max_tokens`.
    """
    tokens = Counter[int]()
    for datum in datums:
        tokens[datum.trajectory] += len(datum.call.completion_ids)
    total = sum(tokens.values())
    for datum in datums:
        if weighting == "token":
            datum.weight = 1 / total
        elif weighting == "episode":
            datum.weight = 1 / (len(tokens) * tokens[datum.trajectory])
        else:
            datum.weight = 1 / (len(tokens) * max_tokens)
