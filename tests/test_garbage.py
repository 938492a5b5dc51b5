"""When Python looks for garbage."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentscope_tuner import cli, evaluate, tune
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.garbage import rare_collections


@pytest.mark.parametrize(("before", "inside"), [(700, 50_000), (200_000, 200_000), (0, 0)])
def test_garbage_is_looked_for_rarely_and_then_as_before(before: int, inside: int) -> None:
    whole = gc.get_threshold()
    try:
        gc.set_threshold(before, 7, 3)
        with suppress(ValueError), rare_collections():
            assert gc.get_threshold() == (inside, 7, 3)
            raise ValueError
        assert gc.get_threshold() == (before, 7, 3)
    finally:
        gc.set_threshold(*whole)


def test_what_a_batch_leaves_behind_is_not_looked_through_before_it_is_learned_from(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[int] = []
    learn = Learner.train

    def train(*args: Any, **options: Any) -> Any:
        inside.append(gc.get_threshold()[0])
        return learn(*args, **options)

    async def longer(task: dict[str, Any], model: Any) -> float:
        response = await model([{"role": "user", "content": task["question"]}])
        inside.append(gc.get_threshold()[0])
        return float(len(str(response.content)))

    monkeypatch.setattr(Learner, "train", train)
    before = gc.get_threshold()
    (tmp_path / "tasks.jsonl").write_text('{"question": "Say much"}\n')
    model = [f"model.model_path={tiny_model_dir}", "model.max_tokens=10", "model.max_model_len=400"]
    tune(
        longer,
        overrides=[
            *model, f"output_dir={tmp_path}", f"train_dataset.path={tmp_path}/tasks.jsonl",
            "train_dataset.total_steps=1", "algorithm.batch_size=1", "algorithm.group_size=4",
        ],
    )  # fmt: skip
    evaluate(longer, overrides=[*model, f"eval_dataset.path={tmp_path}/tasks.jsonl"])
    assert len(inside) > 5
    assert set(inside) == {50_000}
    assert gc.get_threshold() == before


def test_neither_is_what_commands_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "seen.py").write_text("import gc\nraise ValueError(gc.get_threshold())\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "Say much"}\n')
    (tmp_path / "config.yaml").write_text(
        f"model: {{model_path: tiny-agent}}\ntrain_dataset: {{path: {tmp_path}/tasks.jsonl}}\n"
    )
    command = ["astuner", "train", "--workflow", f"{tmp_path}/seen.py:agent", "--config", f"{tmp_path}/config.yaml"]
    monkeypatch.setattr(sys, "argv", command)
    before = gc.get_threshold()
    with pytest.raises(SystemExit):
        cli.main()
    assert "(50000, " in capsys.readouterr().err
    assert gc.get_threshold() == before


PROGRAM = """
import sys

from agentscope_tuner.garbage import keep_what_is_loaded


class Itself:
    def __init__(self, path):
        self.itself, self.file = self, open(path, "w")
        self.file.write("said")

    def __del__(self):
        print("taken apart", flush=True)


made = [Itself(sys.argv[1])]
if len(sys.argv) > 2:
    Meta = type("nb_meta", (type,), {"__module__": "nanobind"})
keep_what_is_loaded()
Itself(sys.argv[1] + "2")
print("ends", flush=True)
"""


@pytest.mark.parametrize("complains", [False, True])
def test_what_was_loaded_is_not_taken_apart_in_the_end_and_what_was_written_is_not_lost(
    complains: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), *(["nanobind"] if complains else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:-1] == ["ends", *(["taken apart"] * 2 if complains else [])]
    assert [(tmp_path / name).read_text() for name in ("file", "file2")] == ["said", "said"]
