"""A script in place of a policy, which remembers what it was asked."""

from __future__ import annotations

from typing import Any

from agentscope_tuner.chat import ChatRenderer
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.testing import ScriptedPolicy


class Script(ScriptedPolicy):
    """Says one line after the other, and remembers what it was asked."""

    def __init__(self, renderer: ChatRenderer, *lines: str) -> None:
        self.renderer = renderer
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        rest = iter(lines)

        def reply(prompt: str, episode_id: str) -> str:
            self.prompts.append(prompt)
            return next(rest)

        super().__init__(renderer, reply)

    async def sample(self, prompt_ids: list[int], params: SamplingParams, **rest: Any) -> Sample:
        self.params.append(params)
        return await super().sample(prompt_ids, params, **rest)
