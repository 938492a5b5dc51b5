"""For tests of your own workflows, and for scripted experts."""

from __future__ import annotations

from collections.abc import Callable

from agentscope_tuner.chat import ChatRenderer
from agentscope_tuner.policy import Sample, SamplingParams


class ScriptedPolicy:
    """A policy whose replies come from a function of the prompt's text.

    Everything around it is real: agents, chat template, parsing, recording. Its tokens have log-probability 0.
    """

    def __init__(self, renderer: ChatRenderer, reply: Callable[[str, str], str]) -> None:
        """`reply(prompt_text, episode_id)` returns what the model says, without its end-of-turn token."""
        self._renderer = renderer
        self._reply = reply

    def open_episode(self, episode_id: str) -> None:
        """Nothing to prepare."""

    def close_episode(self, episode_id: str) -> None:
        """Nothing to drop."""

    def pause_episode(self, episode_id: str) -> None:
        """Nothing waits for it."""

    def resume_episode(self, episode_id: str) -> None:
        """Nothing waited for it."""

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        episode_id: str,
        on_token: Callable[[int], None] | None = None,
    ) -> Sample:
        """Say what the script says, cut to `params.max_tokens`."""
        text = self._reply(self._renderer.decode(prompt_ids), episode_id)
        ids = [*self._renderer.encode(text), self._renderer.tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        for token in ids if on_token is not None else ():
            on_token(token)  # type: ignore[misc]
        return Sample(ids, [0.0] * len(ids), reason, policy_version=0)
