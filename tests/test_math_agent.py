"""The shipped model and the first example: what is recorded is what is trained, and the agent learns."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch

from agentscope_tuner import MathJudge, tune
from agentscope_tuner.backends.local import start_engines
from agentscope_tuner.config import AlgorithmConfig, EngineConfig, load_config
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.readers import load_tasks
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.types import Episode
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "math_agent"
DATA = [f"train_dataset.path={EXAMPLE}/data/train.jsonl", f"eval_dataset.path={EXAMPLE}/data/test.jsonl"]


@pytest.fixture
def math_agent(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop("workflow", None)
    from workflow import MathAgent

    return MathAgent


def questions(name: str) -> set[str]:
    return {json.loads(line)["question"] for line in (EXAMPLE / "data" / f"{name}.jsonl").read_text().splitlines()}


def test_held_out_problems_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from problems import make_problems

    held_out = questions("test")
    assert len(held_out) == 256
    assert not held_out & questions("train")
    # The warm-up draws from the same generator with other seeds.
    assert not held_out & {problem.question for problem in make_problems(5000, 1001, held_out=False)}


def test_tiny_agent_is_small_and_has_a_card(tiny_agent_dir: Path) -> None:
    files = list(tiny_agent_dir.iterdir())
    assert sum(file.stat().st_size for file in files) <= 12e6
    assert not [file for file in files if file.suffix in (".bin", ".pt", ".pkl", ".py")]
    card = (tiny_agent_dir / "README.md").read_text()
    assert "Trained on" in card
    assert "| math_agent | 256 |" in card


def test_a_thousand_calls_of_real_episodes_are_trained_as_they_were_sampled(math_agent: type) -> None:
    config = load_config(EXAMPLE / "config.yaml", overrides=DATA)
    engine, _ = start_engines(config)
    judge = JudgeRunner(MathJudge())
    rollout = Rollout(WorkflowRunner(math_agent), judge, engine.model, config.workflow, 0, {})
    groups = asyncio.run(rollout.run(load_tasks(config.train_dataset)[:46], 8, phase="parity"))
    episodes: list[Episode] = [episode for group in groups for episode in group.episodes]
    assert not [episode.error for episode in episodes if episode.error]
    calls = [call for episode in episodes for call in episode.calls]
    extends = [(i, call.extends) for episode in episodes for i, call in enumerate(episode.calls[1:])]
    assert len(calls) >= 1000
    assert sum(call == previous for previous, call in extends) > len(extends) / 2  # several turns, one sequence
    assert sum(call != previous for previous, call in extends) > 5  # and histories that were rewritten: branches
    for episode in episodes:
        for call in episode.calls:
            if call.extends is not None:
                before = episode.calls[call.extends]
                beginning = before.prompt_ids + before.completion_ids
                assert call.prompt_ids[: len(beginning)] == beginning
    learner = Learner(engine.loaded, AlgorithmConfig(), EngineConfig(), 48)

    def gap() -> float:
        found = learner.logprobs(calls)
        return max(
            (torch.tensor(call.logprobs) - ours).abs().max().item() for call, ours in zip(calls, found, strict=True)
        )

    assert gap() < 1e-4
    calls[500].completion_ids[0] = (calls[500].completion_ids[0] + 1) % 900
    assert gap() > 1e-4


def test_it_learns(math_agent: type, tmp_path: Path) -> None:
    result = tune(
        math_agent,
        EXAMPLE / "config.yaml",
        judge_func=MathJudge(),
        overrides=[
            *DATA,
            "train_dataset.total_steps=10",
            "algorithm.eval_interval_steps=10",
            f"output_dir={tmp_path}",
        ],
    )
    before, after = result.eval_before["sampled"], result.eval_after["sampled"]
    assert before.reward_mean <= 0.5
    assert after.reward_mean >= before.reward_mean + 0.15
    assert result.eval_after["greedy"].reward_mean > result.eval_before["greedy"].reward_mean
    assert (result.run_dir / "reward.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    required = {
        "step", "reward_mean", "reward_std", "eval_reward_mean", "eval_reward_sampled_mean", "episodes",
        "episodes_failed", "zero_variance_groups", "tokens_sampled", "tokens_trained", "time_rollout_s", "time_train_s",
    }  # fmt: skip
    assert [row["step"] for row in rows] == list(range(11))
    assert all(required <= row.keys() for row in rows)
