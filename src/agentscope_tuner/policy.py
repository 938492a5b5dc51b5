"""The weights being trained, as an agent's model sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from agentscope_tuner.errors import PromptTooLongError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw one completion."""

    temperature: float = 1.0
    """0 decodes greedily."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    """Stop once the text contains one of these; the text ends before it, the recorded tokens include it."""
    seed: int = 0
    """Fixes the random numbers of this completion, whatever else runs in the same batch."""
    stop_ids: frozenset[int] = frozenset()
    """Stop after one of these tokens, as after one that ends a turn."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are excluded, however they are drawn."""
        return self.top_k > 0 or self.top_p < 1

    def greedy(self) -> SamplingParams:
        """The same, always with the likeliest token."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    token_ids: list[int]
    """(T,)"""
    logprobs: list[float]
    """(T,) under the distribution each token was drawn from: tempered, truncated, renormalised."""
    finish_reason: str
    """`stop` or `length`."""
    policy_version: int


class Policy(Protocol):
    """Anything that completes token ids.

    A caller announces its episodes: a policy that batches may wait for all open episodes to ask before it
    computes the next batch.
    """

    def open_episode(self, episode_id: str) -> None:
        """An episode begins and will call `sample`."""

    def close_episode(self, episode_id: str) -> None:
        """The episode is over; whatever it still waits for is dropped."""

    def pause_episode(self, episode_id: str) -> None:
        """The episode waits for somebody else, such as a model behind an API; do not wait for it."""

    def resume_episode(self, episode_id: str) -> None:
        """The episode goes on."""

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        episode_id: str,
        adapter: str = "",
        on_token: Callable[[int], None] | None = None,
    ) -> Sample:
        """Complete `prompt_ids` with one of the policy's adapters; `on_token` sees each token as it is drawn.

        Raises:
            PromptTooLongError: the prompt leaves no room in the context.
        """


def room_for_tokens(prompt_ids: list[int], max_model_len: int) -> int:
    """How many tokens may follow a prompt.

    Raises:
        PromptTooLongError: none.
        ValueError: the prompt is empty.
    """
    if not prompt_ids:
        raise ValueError("a prompt must have at least one token, got none")
    room = max_model_len - len(prompt_ids)
    if room < 1:
        raise PromptTooLongError(
            f"a prompt has {len(prompt_ids)} tokens, and `model.max_model_len` is {max_model_len}; raise it, or let "
            "the agent send less"
        )
    return room
