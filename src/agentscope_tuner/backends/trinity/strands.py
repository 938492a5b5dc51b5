"""From what episodes recorded to Trinity's experiences: calls that extend one another become one."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentscope_tuner.algorithms import Credit
from agentscope_tuner.types import ModelCall


@dataclass(slots=True)
class Strand:
    """Calls of one role, each beginning with everything before it: N tokens, of which P are the first prompt."""

    tokens: list[int]
    """(N,)"""
    prompt_length: int
    """P."""
    sampled: list[bool] = field(default_factory=list)
    """(N - P,) whether the policy wrote the token, and it was not counted in another strand."""
    logprobs: list[float] = field(default_factory=list)
    """(N - P,) 0 where it did not."""
    advantages: list[float] = field(default_factory=list)
    """(N - P,) 0 where it did not, or there is nothing to learn."""
    taught: int = 0
    """Tokens there is something to learn from."""

    def add(self, call: ModelCall, advantage: float | None) -> None:
        """Append a call whose prompt begins with all tokens so far."""
        between = call.prompt_ids[len(self.tokens) :]
        n, m = len(between), len(call.completion_ids)
        self.tokens += between + call.completion_ids
        self.sampled += [False] * n + [True] * m
        self.logprobs += [0.0] * n + call.logprobs
        self.advantages += [0.0] * n + [advantage or 0.0] * m
        self.taught += m if advantage is not None else 0


def strands_of(credit: Credit) -> list[Strand]:
    """One strand as long as every call extends the last; where a prompt does not, another begins.

    Every sampled token is in exactly one strand as such; a branch repeats what it shares as prompt.
    """
    strands: list[Strand] = []
    for call, advantage in zip(credit.trajectory.calls, credit.advantages, strict=True):
        if not call.trainable:
            continue
        begun = [one for one in strands if call.prompt_ids[: len(one.tokens)] == one.tokens]
        strand = max(begun, key=lambda one: len(one.tokens), default=None)
        if strand is None:
            strand = Strand(list(call.prompt_ids), len(call.prompt_ids))
            strands.append(strand)
        strand.add(call, advantage)
    return strands
