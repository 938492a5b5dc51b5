"""`astuner debug`: default models only, nothing trained, nothing in the way of a debugger."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GAME = """
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIMultiAgentFormatter
from agentscope.message import Msg
from agentscope_tuner import JudgeOutput, Judge, Workflow, WorkflowOutput
from agentscope_tuner.testing import ScriptedModel

stand_in = ScriptedModel(lambda prompt: "I stand in.")


class Pays(Judge):
    async def judge(self, task, output):
        return JudgeOutput(reward=0.75)


class Game(Workflow):
    async def execute(self, task, model_tuner):
        said = task.task.main_query
        for role in ("seer", "witch"):
            model_tuner.register_model(role, default_model=ScriptedModel([f"The {role} speaks."]))
            agent = ReActAgent(role.title(), "Play.", model_tuner.get_model(role), OpenAIMultiAgentFormatter())
            said = (await agent.reply(Msg("host", said, "user"))).get_text_content()
        if task.task.main_query == "fail":
            raise ValueError("lost")
        return WorkflowOutput(reward={"seer": 1.0, "witch": 0.0})


class Alone(Workflow):
    async def execute(self, task, model_tuner):
        answer = await model_tuner([{"role": "user", "content": task.task.main_query}])
        return WorkflowOutput(response=answer.content[0]["text"])


class Stops(Workflow):
    async def execute(self, task, model_tuner):
        secret = 6 * 7
        breakpoint()
        return WorkflowOutput(reward=1.0)
"""


def debug(tmp_path: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    (tmp_path / "game.py").write_text(GAME)
    command = [sys.executable, "-m", "agentscope_tuner.cli", "debug", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=tmp_path, input=typed, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def test_the_transcript_shows_roles_and_rewards(tmp_path: Path) -> None:
    done = debug(tmp_path, "-w", "game.py:Game", "-t", "Begin.", "-t", "fail", "-t", "never reached", "--limit", "2")
    assert done.returncode == 0, done.stderr
    first, _, second = done.stdout.partition("debug-1")
    assert "seer: The seer speaks." in first
    assert "witch: The witch speaks." in first
    assert "reward: seer 1, witch 0" in first
    assert "failed: ValueError: lost" in second
    assert "never reached" not in done.stdout


def test_somebody_stands_in_where_there_is_no_default_model(tmp_path: Path) -> None:
    done = debug(tmp_path, "-w", "game.py:Alone", "-t", "Hi", "-m", "game.py:stand_in", "-j", "game.py:Pays")
    assert done.returncode == 0, done.stderr
    assert "default: I stand in." in done.stdout
    assert "reward: default 0.75" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-w", "game.py:Alone", "-t", "Hi"], "nobody can play it here"),
        (["-w", "game.py:Alone"], "either by `--config`"),
        (["-w", "game.py:Alone", "-t", "Hi", "seed=1"], "`seed=1` has no effect without `--config`"),
        (["-w", "game.py:Alone", "-t", "Hi", "-m", "game.py:nobody"], "has no `nobody`"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = debug(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_breakpoints_work(tmp_path: Path) -> None:
    done = debug(tmp_path, "-w", "game.py:Stops", "-t", "Hi", typed="p secret\nc\n")
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    assert "reward: default 1" in done.stdout


def test_torch_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')")
    done = debug(tmp_path, "-w", "game.py:Game", "-t", "Begin.")
    assert done.returncode == 0, done.stderr
    assert "reward: seer 1, witch 0" in done.stdout
