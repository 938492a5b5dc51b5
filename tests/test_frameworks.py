"""The agents of examples/frameworks: what they send is what AgentScope's agent sends, and they are trained."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from agentscope_tuner import MathJudge, tune
from agentscope_tuner.chat import ChatRenderer, write_reply
from agentscope_tuner.config import WorkflowConfig
from agentscope_tuner.loading import load_object
from agentscope_tuner.policy import SamplingParams
from agentscope_tuner.recorder import PolicyModel
from agentscope_tuner.reporting import read_episodes
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.testing import ScriptedPolicy
from agentscope_tuner.types import Episode, Task
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner

EXAMPLES = Path(__file__).parents[1] / "examples"
AGENTS = ["openai_agent.py:OpenAIAgent", "langgraph_agent.py:LangGraphAgent", "httpx_agent.py:HttpxAgent"]


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples' folders are searched during a test only."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield


def perform(workflow: Any, model_dir: Path, *lines: str) -> Episode:
    """One episode of an agent whose model says these lines."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    renderer = ChatRenderer(tokenizer)
    rest = iter(lines)
    policy = ScriptedPolicy(renderer, lambda prompt, episode_id: next(rest))
    model = PolicyModel(policy, renderer, frozenset([tokenizer.eos_token_id]), "scripted", SamplingParams())
    task = Task(main_query="What is 2 + 2?", metadata={"answer": "4"})

    async def run() -> Episode:
        judge = JudgeRunner(MathJudge())
        rollout = Rollout(WorkflowRunner(workflow), judge, model, WorkflowConfig(), 0, {})
        async with aclosing(rollout):
            (group,) = await rollout.run([task], 1, phase="test")
        return group.episodes[0]

    episode = asyncio.run(run())
    assert episode.error is None, episode.error.traceback or episode.error
    return episode


def prompts(episode: Episode, model_dir: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [tokenizer.decode(call.prompt_ids) for call in episode.calls]


def call(name: str, **arguments: str) -> str:
    return write_reply("", [(name, arguments)])


@pytest.mark.parametrize("agent", AGENTS)
def test_prompts_are_those_of_the_math_agent(agent: str, tiny_agent_dir: Path) -> None:
    lines = [call("calculator", expression="2 / 0"), call("calculator", expression="2 + 2")]
    lines.append(call("generate_response", result="4"))
    episode = perform(load_object(f"{EXAMPLES}/frameworks/{agent}"), tiny_agent_dir, *lines)
    original = perform(load_object(f"{EXAMPLES}/math_agent/workflow.py:MathAgent"), tiny_agent_dir, *lines, "It is 4.")
    assert episode.reward == original.reward == {"default": 1.0}
    assert prompts(episode, tiny_agent_dir) == prompts(original, tiny_agent_dir)[:3]
    assert [recorded.extends for recorded in episode.calls] == [None, 0, 1]


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize(
    ("lines", "calls"),
    [
        (["It is 4."], 1),
        ([call("calculator", expression="2 + 2"), "It is 4."], 2),
        ([call("calculator", expression="2 + 2")] * 5, 5),
        ([call("search", query="2 + 2"), call("calculator", sum="2"), call("generate_response"), "Well."], None),
    ],
)
def test_what_a_model_gets_wrong_earns_nothing(
    agent: str, lines: list[str], calls: int | None, tiny_agent_dir: Path
) -> None:
    episode = perform(load_object(f"{EXAMPLES}/frameworks/{agent}"), tiny_agent_dir, *lines)
    assert episode.reward == {"default": 0.0}
    assert calls is None or len(episode.calls) == calls


@pytest.mark.parametrize("agent", AGENTS)
def test_it_is_trained(agent: str, tiny_agent_dir: Path, tmp_path: Path) -> None:
    result = tune(
        load_object(f"{EXAMPLES}/frameworks/{agent}"),
        EXAMPLES / "frameworks" / "config.yaml",
        judge_func=MathJudge(),
        overrides=[
            f"train_dataset.path={EXAMPLES}/math_agent/data/train.jsonl",
            f"eval_dataset.path={EXAMPLES}/math_agent/data/test.jsonl",
            "eval_dataset.limit=2",
            "train_dataset.total_steps=2",
            "algorithm.batch_size=4",
            "algorithm.group_size=4",
            "algorithm.warmup_steps=0",
            "engine.threads=1",
            f"output_dir={tmp_path}",
        ],
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_agent_dir, result.checkpoint))
    assert any(not before[name].equal(after[name]) for name in before), "no weight changed"
    steps = result.history[1:]
    assert [metrics.step for metrics in steps] == [1, 2]
    assert sum(metrics.episodes_failed for metrics in result.history) == 0
    assert sum(metrics.reward_mean for metrics in steps) > 0
    assert sum(metrics.tokens_trained for metrics in steps) > 0
    rows = [row for path in (result.run_dir / "episodes").glob("train_*.jsonl") for row in read_episodes(path)]
    assert len(rows) == 32
    assert all(row["calls"] for row in rows)
