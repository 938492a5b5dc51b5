"""From rewards to advantages, and from groups of episodes to what the learner reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, TypeVar

from agentscope_tuner.types import Branch, Episode, EpisodeGroup, ModelCall, Trajectory

K = TypeVar("K", bound=Hashable)

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


@dataclass(slots=True)
class Credit:
    """What the turns of one role in one episode were worth, compared with their like."""

    trajectory: Trajectory
    advantages: list[float | None]
    """One per call; None where there is nothing to compare it with, so nothing to learn from it."""


Mode = Literal["group_std", "mean_only", "leave_one_out"]
Weighting = Literal["token", "episode", "constant"]


def compute_advantages(groups: Sequence[EpisodeGroup], mode: Mode, discount: float = 1.0) -> list[list[Credit]]:
    """What every call of every group is worth.

    Rewards are compared within a task and role (GRPO, arXiv:2402.03300, section 4.1.2): one advantage per episode and
    role, however many calls the episode made. Failed episodes take no part; a role that fewer than two episodes
    played, or whose rewards are all equal, teaches nothing and is left out.

    Where turns earn rewards of their own, or `discount` is below 1, what follows a turn is compared with what follows
    the same turn of the other episodes. Where an episode was branched, what follows the branch is compared among its
    continuations: they share everything before, so the difference is due to that turn and what comes after it.
    """
    result = []
    for group in groups:
        by_role: dict[str, list[Credit]] = defaultdict(list)
        branched: list[tuple[Episode, Branch, list[Credit]]] = []
        for episode in group.succeeded:
            own = [_uncompared(trajectory) for trajectory in episode.trajectories()]
            for credit in own:
                by_role[credit.trajectory.role].append(credit)
            if episode.branch is not None:
                branched.append((episode, episode.branch, own))
        for members in by_role.values():
            _compare(members, 0, mode, discount)
        credits = [credit for members in by_role.values() for credit in members]
        for episode, branch, own in branched:
            credits += _compare_continuations(episode, branch, own, mode, discount)
        result.append([credit for credit in credits if any(value is not None for value in credit.advantages)])
    return result


def _uncompared(trajectory: Trajectory) -> Credit:
    return Credit(trajectory, [None] * len(trajectory.calls))


def _compare_continuations(
    episode: Episode, branch: Branch, own: Sequence[Credit], mode: Mode, discount: float
) -> list[Credit]:
    """Credits of the continuations; those of the episode itself are changed from the branch on."""
    found: list[Credit] = []
    for credit in own:
        role = credit.trajectory.role
        others = [
            _uncompared(trajectory)
            for one in branch.continuations
            if one.error is None
            for trajectory in one.trajectories()
            if trajectory.role == role
        ]
        first = sum(call.role == role for call in episode.calls[: branch.call])
        if others:
            _compare([credit, *others], first, mode, discount)
        found += others
    return found


def _compare(members: Sequence[Credit], first: int, mode: Mode, discount: float) -> None:
    """Set the advantages from call `first` on."""
    returns = [credit.trajectory.returns(discount)[first:] for credit in members]
    per_turn = discount < 1 or any(call.reward for credit in members for call in credit.trajectory.calls[first:])
    for credit in members:
        credit.advantages[first:] = [None] * (len(credit.advantages) - first)
    for turn in range(max(map(len, returns))) if per_turn else [0]:
        there = [i for i, one in enumerate(returns) if turn < len(one)]
        for i, value in zip(there, _center([returns[i][turn] for i in there], mode), strict=True):
            end = first + turn + 1 if per_turn else None
            calls = members[i].advantages[first + turn : end]
            members[i].advantages[first + turn : end] = [value] * len(calls)


def _center(values: list[float], mode: Mode) -> list[float | None]:
    """Values minus their mean; None where there is nothing to compare.

    The mean is over episodes, whatever number of calls each made. A mean over calls would depend on how long an episode
    made itself, and so be a biased baseline. The value itself in the mean only scales the gradient, by `1 - 1/n`;
    `leave_one_out` makes up for it.
    """
    if len(values) < 2 or max(values) == min(values):
        return [None] * len(values)
    mean = fmean(values)
    scale = {
        "group_std": 1 / (stdev(values) + _EPSILON),
        "mean_only": 1.0,
        "leave_one_out": len(values) / (len(values) - 1),
    }[mode]
    return [(value - mean) * scale for value in values]


def build_datums(credits: Sequence[Sequence[Credit]], updates: int = 1) -> list[list[Datum]]:
    """Deal the groups out among `updates` optimizer steps; an update without any datum is left out."""
    dealt: list[list[Datum]] = [[] for _ in range(updates)]
    trajectory = 0
    teaching = [group for group in credits if group]
    for i, group in enumerate(teaching):
        for credit in group:
            dealt[i * updates // len(teaching)].extend(
                Datum(call, advantage, 0.0, trajectory)
                for call, advantage in zip(credit.trajectory.calls, credit.advantages, strict=True)
                if advantage is not None and call.trainable
            )
            trajectory += 1
    return [datums for datums in dealt if datums]


def weigh(datums: Sequence[Datum], weighting: Weighting, max_tokens: int) -> None:
    """Set the weights so that the update's loss is the weighted sum over its tokens.

    `token`: one over the number of tokens. `episode`: the mean over trajectories of the mean over a trajectory's
    tokens. `constant`: one over trajectories times `max_tokens`. Roles with adapters of their own are policies of their
    own, each with its own mean.
    """
    by_adapter: dict[str, list[Datum]] = defaultdict(list)
    for datum in datums:
        by_adapter[datum.call.adapter].append(datum)
    for members in by_adapter.values():
        _weigh(members, weighting, max_tokens)


def _weigh(datums: Sequence[Datum], weighting: Weighting, max_tokens: int) -> None:
    tokens = Counter[int]()
    for datum in datums:
        tokens[datum.trajectory] += len(datum.call.completion_ids)
    weights = token_weights(tokens, weighting, max_tokens)
    for datum in datums:
        datum.weight = weights[datum.trajectory]


def token_weights(tokens: Mapping[K, int], weighting: Weighting, max_tokens: int) -> dict[K, float]:
    """The weight of each token's loss, by trajectory (see `weigh`).

    Args:
        tokens: how many each trajectory has to learn from, at least one.
        weighting: which tokens count the same.
        max_tokens: the constant of `constant`.
    """
    if weighting == "token":
        return dict.fromkeys(tokens, 1 / sum(tokens.values()))
    if weighting == "episode":
        return {trajectory: 1 / (len(tokens) * count) for trajectory, count in tokens.items()}
    return dict.fromkeys(tokens, 1 / (len(tokens) * max_tokens))
