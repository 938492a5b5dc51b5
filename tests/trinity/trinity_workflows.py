"""Workflows that Trinity's runners import."""

from __future__ import annotations

import asyncio
from typing import Any

from agentscope_tuner import JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from agentscope_tuner.testing import ScriptedModel


def letters(text: str) -> float:
    """Share of the characters that are letters: something that any model can learn."""
    return sum(character.isalpha() for character in text) / max(1, len(text))


def text_of(response: Any) -> str:
    return "".join(block.get("text", "") for block in response.content)


async def scored(task: dict[str, Any], model: Any) -> float:
    """AgentScope's first form."""
    return letters(text_of(await model([{"role": "user", "content": task["question"]}])))


async def answered(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """AgentScope's second form."""
    return WorkflowOutput(response=text_of(await model([{"role": "user", "content": task["question"]}])))


async def judged(task: dict[str, Any], response: Any) -> JudgeOutput:
    """And its judge."""
    return JudgeOutput(reward=letters(response), metrics={"length": float(len(response))})


class Pair(Workflow):
    """A writer that learns, and a critic that does not."""

    trainable_targets: list[str] | None = ["writer"]  # noqa: RUF012

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        for role in ("writer", "critic"):
            model_tuner.register_model(role, default_model=ScriptedModel(lambda messages: "Shorter."))
        messages = [{"role": "user", "content": task.task.main_query}]
        first = text_of(await model_tuner.get_model("writer")(messages))
        messages.append({"role": "assistant", "content": first})
        advice = text_of(await model_tuner.get_model("critic")(messages))
        messages.append({"role": "user", "content": advice})
        second = text_of(await model_tuner.get_model("writer")(messages))
        return WorkflowOutput(reward={"writer": letters(second)}, metrics={"advice": float(advice == "Shorter.")})


class HalfBroken(Workflow):
    """Raises in every second episode."""

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        said = text_of(await model_tuner([{"role": "user", "content": task.task.main_query}]))
        if task.group_index % 2:
            raise RuntimeError("broken on purpose")
        return WorkflowOutput(reward=letters(said))


class Broken(Workflow):
    """Raises always."""

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner([{"role": "user", "content": "Hello."}])
        raise RuntimeError("broken on purpose")


class Slow(Workflow):
    """Takes its time, so that something can happen meanwhile."""

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        said = text_of(await model_tuner([{"role": "user", "content": task.task.main_query}]))
        await asyncio.sleep(2)
        return WorkflowOutput(reward=letters(said))
