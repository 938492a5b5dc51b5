"""For tests of your own workflows: a model that says what you wrote, as a default model or as the policy itself.

Everything around it is real: agents, formatters, chat template, parsing, recording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from agentscope.model import ChatModelBase, ChatResponse
from pydantic import BaseModel

from agentscope_tuner.agentscope_face import respond
from agentscope_tuner.chat import ChatRenderer, write_reply
from agentscope_tuner.config import WorkflowConfig
from agentscope_tuner.event_loop import run_to_end
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.recorder import PolicyModel
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.types import Episode, Task, WorkflowTask
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner


def call_tool(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool, for a script."""
    return write_reply("", [(name, arguments)])


class ScriptedModel(ChatModelBase):
    """An AgentScope chat model whose replies are a list, or a function of what it is asked.

    ```python
    model_tuner.register_model("seer", default_model=ScriptedModel(["I check Player2."]))
    episode = run_episode(MyWorkflow, Task(main_query="2 + 2?"), ScriptedModel([call_tool("add", a=2, b=2), "4"]))
    ```
    """

    def __init__(self, replies: Iterable[str] | Callable[[str], str], name: str = "scripted") -> None:
        """Take the script.

        Args:
            replies: one reply after the other, or a function from the text of a prompt to the reply. `call_tool` writes
                tool calls.
            name: the model's.
        """
        super().__init__(name, stream=False)
        self._say = replies if callable(replies) else None
        self._replies = [] if callable(replies) else list(replies)
        self._said = 0

    def reply(self, prompt: str) -> str:
        """What the script says next.

        Raises:
            IndexError: it is at its end.
        """
        if self._say is not None:
            return self._say(prompt)
        if self._said == len(self._replies):
            raise IndexError(
                f"the script of `{self.model_name}` has {len(self._replies)} replies, and was asked for one more; the "
                f"prompt ends with: {prompt[-300:]}"
            )
        self._said += 1
        return self._replies[self._said - 1]

    async def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | None = None,
        structured_model: type[BaseModel] | None = None,
        **options: Any,
    ) -> ChatResponse:
        """Say what the script says. As default model it gets the messages as lines of `role: content`."""
        prompt = "\n".join(f"{message['role']}: {_text(message)}" for message in messages)
        return respond(self.reply(prompt), tools, tool_choice, structured_model)


def _text(message: Mapping[str, Any]) -> str:
    parts = [message.get("content"), message.get("tool_calls")]
    return " ".join(part if isinstance(part, str) else json.dumps(part) for part in parts if part)


def run_episode(
    workflow: Any,
    task: Task,
    model: ScriptedModel,
    *,
    judge: Any = None,
    trainable_targets: list[str] | None = None,
    seed: int = 0,
) -> Episode:
    """Run a workflow once, with a script in place of the model to train.

    Args:
        workflow: of any form that `tune()` takes.
        task: what to do.
        model: speaks for the trained roles, and is given their prompts as tiny-agent's template writes them.
        judge: gives the reward where the workflow gives none.
        trainable_targets: roles to train, instead of the workflow's own.
        seed: the episode's.

    Returns:
        The episode as it would be trained, `error` included if it failed.

    Raises:
        ConfigError: workflow, judge or roles are not as they must be.
    """
    renderer = _renderer()
    policy = ScriptedPolicy(renderer, lambda prompt, _: model.reply(prompt))
    rollout = Rollout(
        WorkflowRunner(workflow),
        None if judge is None else JudgeRunner(judge),
        PolicyModel(policy, renderer, frozenset([renderer.tokenizer.eos_token_id]), model.model_name, SamplingParams()),
        WorkflowConfig(trainable_targets=trainable_targets),
        seed,
        {},
    )
    return run_to_end(rollout.run_episode(WorkflowTask(task=task, episode_id="scripted", seed=seed)))


@cache
def _renderer() -> ChatRenderer:
    from transformers import AutoTokenizer

    return ChatRenderer(AutoTokenizer.from_pretrained(str(files("agentscope_tuner") / "assets" / "tiny-agent")))


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
        adapter: str = "",
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
