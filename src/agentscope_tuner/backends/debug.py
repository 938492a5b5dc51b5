"""Running a workflow to look at it: every role is played by its default model, nothing is trained, no torch is loaded.

One episode at a time, without time limits and without a live display, so that breakpoints work.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rich.console import Console
from rich.markup import escape

from agentscope_tuner.errors import RoleError, TunerError
from agentscope_tuner.model_tuner import ModelTuner
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.recorder import PolicyModel, Recorder
from agentscope_tuner.types import Episode, EpisodeError, Task, WorkflowTask
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner


class _NoPolicy:
    """There is no model to train."""

    def open_episode(self, episode_id: str) -> None: ...

    def close_episode(self, episode_id: str) -> None: ...

    def pause_episode(self, episode_id: str) -> None: ...

    def resume_episode(self, episode_id: str) -> None: ...

    async def sample(self, *args: Any, **options: Any) -> Sample:
        raise RuntimeError("backend `debug` has no policy")


class _DefaultsOnly(Recorder):
    """No role is trained; those without a default model are played by a stand-in."""

    def __init__(self, stand_in: Any, *, episode_id: str, seed: int, on_answer: Callable[..., None]) -> None:
        name = getattr(stand_in, "model_name", "none")
        nobody = PolicyModel(_NoPolicy(), cast(Any, None), frozenset(), name, SamplingParams())
        super().__init__(nobody, episode_id=episode_id, seed=seed, trainable_targets=(), on_answer=on_answer)
        self._stand_in = stand_in

    def default_model(self, role: str) -> Any:
        self.require(role)
        model = self.roles.get(role) or self._stand_in
        if model is None:
            raise RoleError(
                f"role `{role}` has no default model, so nobody can play it here; register one, or give a model that "
                "stands in (`astuner debug --model file.py:name`), such as `agentscope_tuner.testing.ScriptedModel`"
            )
        return model


@dataclass(slots=True)
class DebugRun:
    """Runs episodes and prints what is said."""

    workflow: WorkflowRunner
    judge: JudgeRunner | None
    stand_in: Any = None
    """An AgentScope chat model for roles that have no default model."""
    seed: int = 0
    console: Console = field(default_factory=Console)

    async def run(self, tasks: Sequence[Task]) -> list[Episode]:
        """One episode per task, one after the other; a failed one is shown and the next begins.

        Raises:
            TunerError: something that is wrong with the run, not with an episode.
        """
        return [await self._episode(index, task) for index, task in enumerate(tasks)]

    async def _episode(self, index: int, task: Task) -> Episode:
        episode_id = f"debug-{index}"
        workflow_task = WorkflowTask(task=task, episode_id=episode_id, seed=self.seed + index)
        episode = Episode(workflow_task)
        shown: dict[str, int] = {}

        def show(role: str, agent: str, messages: Sequence[Mapping[str, Any]], answer: Any) -> None:
            # An agent's messages grow; what was shown to it before is not shown again.
            new = messages[shown.get(agent, 0) :] if len(messages) > shown.get(agent, 0) else messages[-1:]
            shown[agent] = len(messages)
            for message in new:
                self._line(f"{message['role']} to {agent}", message_text(message), "dim")
            who = role if agent == role else f"{role} {agent}"
            for block in answer.content:
                self._line(who, block_text(block), "bold cyan")

        self.console.rule(f"{episode_id}  {escape(task.main_query[:60] or task.task_id)}", align="left")
        recorder = _DefaultsOnly(self.stand_in, episode_id=episode_id, seed=workflow_task.seed, on_answer=show)
        begun = time.perf_counter()
        try:
            output = await self.workflow.run(workflow_task, ModelTuner(recorder), {})
            reward = output.reward
            if reward is None and self.judge is not None:
                reward = (await self.judge.run(workflow_task, output, {})).reward
            spoke = list(recorder.roles) or ["default"]
            if reward is not None:
                episode.reward = reward if isinstance(reward, dict) else dict.fromkeys(spoke, float(reward))
            episode.metrics = dict(output.metrics or {})
            episode.is_success = output.is_success
        except TunerError as exc:
            if isinstance(exc, RoleError):
                raise
            episode.error = EpisodeError(type(exc).__name__, str(exc))
        except Exception as exc:
            episode.error = EpisodeError(type(exc).__name__, str(exc), traceback.format_exc())
        finally:
            recorder.close()
        episode.time_s = time.perf_counter() - begun
        self._close(episode)
        return episode

    def _line(self, who: str, text: str, style: str) -> None:
        self.console.print(f"[{style}]{escape(who)}:[/] {escape(text)}", soft_wrap=True)

    def _close(self, episode: Episode) -> None:
        if episode.error is not None:
            self.console.print(f"[bold red]failed:[/] {escape(str(episode.error))}", soft_wrap=True)
            self.console.print(escape(episode.error.traceback), style="dim", soft_wrap=True)
            return
        rewards = ", ".join(f"{role} {reward:g}" for role, reward in (episode.reward or {}).items())
        self.console.print(f"[bold green]reward:[/] {escape(rewards) or 'none; a judge is needed'}")


def message_text(message: Mapping[str, Any]) -> str:
    """A message in OpenAI's or DashScope's form, as text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(block.get("text", block)) for block in content)
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (content, *calls) if part)


def block_text(block: Mapping[str, Any]) -> str:
    """A block of an answer, as text."""
    if block["type"] == "tool_use":
        return f"{block['name']}({json.dumps(block['input'], ensure_ascii=False)})"
    return str(block.get("text") or block.get("thinking") or block)
