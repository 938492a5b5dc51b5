"""How long batches wait for episodes that act, and how those get on that are not waited for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from engine_tools import load, start

from agentscope_tuner.chat import ChatRenderer
from agentscope_tuner.config import WorkflowConfig
from agentscope_tuner.engine import fast_forms
from agentscope_tuner.policy import SamplingParams
from agentscope_tuner.recorder import PolicyModel
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.types import JudgeOutput, Task, WorkflowOutput
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner


def test_waiting_in_vain_is_unlearned_only_by_waiting_with_success(tiny_model_dir: Path) -> None:
    sampler = start(load(tiny_model_dir), patience_ms=200)

    async def episode(name: str, pause: float) -> None:
        sampler.open_episode(name)
        await asyncio.sleep(pause)
        await sampler.sample([5, 6, 7], SamplingParams(max_tokens=30), episode_id=name)
        sampler.close_episode(name)

    async def everything(*pauses: float) -> None:
        await asyncio.gather(*(episode(f"e{i}", pause) for i, pause in enumerate(pauses)))

    asyncio.run(everything(0.0, 0.6))  # the second one calls a slow tool first
    assert sampler._patience.seconds == pytest.approx(0.1)
    asyncio.run(everything(0.0, 0.0, 0.001))  # so little time would have been given anyway
    assert sampler._patience.seconds == pytest.approx(0.1)
    asyncio.run(everything(0.0, 0.02))
    assert sampler._patience.seconds == pytest.approx(0.2)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("other", ["other episode", "with tool"], ids=["of another episode", "of another agent"])
def test_slow_tools_get_on_while_a_step_is_computed(
    other: str, kernels: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(fast_forms, "native_kernels", lambda: None)
    sampler = start(load(tiny_model_dir), patience_ms=4)
    assert sampler._runner.small == kernels
    plan, steps = sampler._plan, 0

    def plan_slow_step() -> object:
        step = plan()

        def compute() -> None:
            nonlocal steps
            steps += 1
            time.sleep(0.1)
            step.compute()

        return step._replace(compute=compute)

    monkeypatch.setattr(sampler, "_plan", plan_slow_step)

    async def ask(name: str, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens)
        await sampler.sample([5, 6, 7], params, episode_id=name, on_token=lambda token: None)  # so a step draws one

    async def others() -> None:
        for _ in range(10):
            await ask(other, 2)

    async def with_tool() -> int:
        await ask("with tool", 1)
        await asyncio.sleep(0.1)  # patience ends
        begun = steps
        for _ in range(20):  # as a call over a network has to wait several times
            await asyncio.sleep(0.001)
        taken = steps - begun
        await ask("with tool", 1)
        return taken

    async def both() -> int:
        sampler.open_episode(other)
        sampler.open_episode("with tool")
        _, taken = await asyncio.gather(others(), with_tool())
        sampler.close_episode(other)
        sampler.close_episode("with tool")
        return taken

    assert asyncio.run(both()) <= 3
    assert not sampler._patience.ended


@pytest.mark.parametrize("kernels", [True, False])
def test_the_next_episode_begins_before_the_next_step(
    kernels: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `max_concurrency` makes it wait; one is judged before."""
    if not kernels:
        monkeypatch.setattr(fast_forms, "native_kernels", lambda: None)
    sampler = start(load(tiny_model_dir))
    steps, done, begun = 0, [], []
    begin, pause, open_episode = sampler._begin, sampler.pause_episode, sampler.open_episode

    def begin_step() -> None:
        nonlocal steps
        steps += 1
        begin()

    def pause_episode(episode_id: str) -> None:
        done.append(steps)
        pause(episode_id)

    def open_episode_now(episode_id: str) -> None:
        begun.append(steps)
        open_episode(episode_id)

    monkeypatch.setattr(sampler, "_begin", begin_step)
    monkeypatch.setattr(sampler, "pause_episode", pause_episode)
    monkeypatch.setattr(sampler, "open_episode", open_episode_now)

    async def workflow(task, model):
        await model([{"role": "user", "content": "Hello"}], max_tokens=task["tokens"])
        return WorkflowOutput()

    async def judge(task, response):
        await asyncio.sleep(0)
        return JudgeOutput(reward=1.0)

    renderer = ChatRenderer(sampler._loaded.tokenizer)
    model = PolicyModel(sampler, renderer, frozenset(), "tiny", SamplingParams())
    config = WorkflowConfig(max_concurrency=4)
    rollout = Rollout(WorkflowRunner(workflow), JudgeRunner(judge), model, config, 0, {})
    tasks = [Task(metadata={"tokens": 5 + 9 * number % 37}) for number in range(20)]
    groups = asyncio.run(rollout.run(tasks, 1, phase="test"))
    assert [episode.error for group in groups for episode in group.episodes] == [None] * 20
    assert begun == [0] * 4 + done[:16]
    assert len({*done}) > 10
