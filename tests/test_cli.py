"""The `astuner` command: what it accepts, what it says, and a run from beginning to end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from agentscope_tuner.cli import app
from agentscope_tuner.reporting import RunFolder

WORKFLOWS = '''
from agentscope_tuner import Judge, JudgeOutput, Workflow, WorkflowOutput

class Parity(Workflow):
    """One for a reply of odd length; leaves the rest to nobody."""

    async def execute(self, task, model_tuner):
        reply = await model_tuner([{"role": "user", "content": task.task.main_query}])
        text = "".join(block["text"] for block in reply.content if block["type"] == "text")
        print("a workflow that prints")
        return WorkflowOutput(reward=float(len(text) % 2), response=text)

class Unscored(Parity):
    async def execute(self, task, model_tuner):
        output = await super().execute(task, model_tuner)
        return output.model_copy(update={"reward": None})

class Length(Judge):
    async def judge(self, task, output):
        return JudgeOutput(reward=0.1 + len(output.response), metrics={"characters": len(output.response)})

class Broken(Workflow):
    async def execute(self, task, model_tuner):
        raise RuntimeError("the [environment] is down")

async def misspelt(taks, model):
    return 1.0
'''

PATIENT = '''
import asyncio
from pathlib import Path
from workflows import Parity

class Patient(Parity):
    """Its third step does not end, the first time."""

    async def execute(self, task, model_tuner):
        if task.episode_id.startswith("train3") and not Path("reached").exists():
            Path("reached").touch()
            await asyncio.sleep(600)
        return await super().execute(task, model_tuner)
'''


@pytest.fixture(autouse=True)
def _as_if_nothing_was_loaded() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        # Heavy packages can be imported only once.
        if name in ("workflows", "patient"):
            del sys.modules[name]


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as users have it: workflows, tasks, a configuration."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    # A width that would break messages in the middle, if they were wrapped.
    monkeypatch.setenv("COLUMNS", "60")
    Path("workflows.py").write_text(WORKFLOWS)
    Path("patient.py").write_text(PATIENT)
    rows = [{"question": f"Say something about {number}."} for number in range(6)]
    Path("tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "experiment_name": "parity",
        "model": {"model_path": str(tiny_model_dir), "max_model_len": 128, "max_tokens": 8},
        "algorithm": {"group_size": 4, "batch_size": 2, "learning_rate": 1e-4, "max_resampled_groups": 0},
        "train_dataset": {"path": "tasks.jsonl", "total_steps": 2},
        "eval_dataset": {"path": "tasks.jsonl", "limit": 3},
        # For so small a model, a second thread is only in the way of others.
        "engine": {"device": "cpu", "threads": 1},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    yield tmp_path
    torch.set_num_threads(threads)


def astuner(*arguments: str, status: int = 0) -> tuple[str, str]:
    """Standard output and standard error."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


# ---------------------------------------------------------------------------------------------------- from outside


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from agentscope_tuner.cli import main\n"
        "sys.argv = ['astuner', '--help']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('heavy:', sorted({'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("train", "eval", "doctor", "--version"))
    assert done.stdout.endswith("heavy: []\n")


def test_version() -> None:
    out, _ = astuner("--version")
    assert out.startswith("astuner")
    try:
        assert version("agentscope-tuner") in out
    except PackageNotFoundError:
        assert "not installed" in out


def test_no_command_shows_the_help() -> None:
    result = CliRunner().invoke(app, [])
    assert "train" in result.output
    assert result.exit_code == 2


def test_commands_and_options_that_do_not_exist(project: Path) -> None:
    _, err = astuner("trian", status=2)
    assert "trian" in err
    _, err = astuner("train", "--workflow", "workflows.py:Parity", status=2)
    assert "--config" in err


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_can_be_continued(project: Path) -> None:
    arguments = ["train", "-w", "patient.py:Patient", "-c", "config.yaml"]
    arguments += ["train_dataset.total_steps=3", "algorithm.save_interval_steps=1"]
    command = [sys.executable, "-m", "agentscope_tuner.cli", *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not Path("reached").exists():
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, err
    folder = Path("runs", "parity")
    assert err.endswith(f"interrupted; the same command continues the run in `{folder}` from its newest checkpoint\n")
    assert "Traceback" not in err
    out, _ = astuner(*arguments)
    assert re.findall(r"step (\d)/3", out) == ["3"]
    assert [metrics.step for metrics in RunFolder(folder).read_metrics()] == [0, 1, 2, 3]


# --------------------------------------------------------------------------------------------- beginning to end


def test_train_resume_and_evaluate(project: Path) -> None:
    arguments = ("--workflow", "workflows.py:Parity", "--config", "config.yaml")
    out, err = astuner("train", *arguments)
    assert "error" not in err
    assert "step 2/2" in out
    run = RunFolder(project / "runs" / "parity")
    assert [metrics.step for metrics in run.read_metrics()] == [0, 1, 2]
    assert [metrics.episodes for metrics in run.read_metrics()] == [0, 8, 8]
    assert all(metrics.eval_reward_mean is not None for metrics in run.read_metrics() if metrics.step in (0, 2))
    assert run.config_path.is_file()
    assert run.reward_png.is_file()
    assert len((run.episodes_dir / "train_000001.jsonl").read_text().splitlines()) == 8
    checkpoint = run.checkpoints_dir / "step_2"
    assert (checkpoint / "model.safetensors").is_file()

    # More steps, on top of the file.
    astuner("train", *arguments, "--resume", "train_dataset.total_steps=3")
    assert [metrics.step for metrics in run.read_metrics()] == [0, 1, 2, 3]

    # The trained model is what evaluation finds in its checkpoint, exactly.
    at_end = run.read_metrics()[-1]
    model = f"model.model_path={run.checkpoints_dir / 'step_3'}"
    out, err = astuner("eval", *arguments, model, "--json")
    results = json.loads(out)
    assert results["greedy"]["reward_mean"] == at_end.eval_reward_mean
    assert results["sampled"]["reward_mean"] == at_end.eval_reward_sampled_mean
    for decoding in ("greedy", "sampled"):
        held_out = {name: v for name, v in at_end.extra.items() if name.startswith(f"eval_{decoding}/")}
        assert held_out == {f"eval_{decoding}/{name}": v for name, v in results[decoding]["metrics"].items()} != {}
    assert results["greedy"]["episodes"] == 3
    assert 0 <= results["greedy"]["ci_low"] <= results["greedy"]["reward_mean"] <= results["greedy"]["ci_high"] <= 1
    assert "a workflow that prints" in err

    # `--fresh` moves the run aside.
    astuner("train", *arguments, "--fresh", "train_dataset.total_steps=1")
    assert [metrics.step for metrics in run.read_metrics()] == [0, 1]
    assert (project / "runs" / "parity.1" / "checkpoints" / "step_3").is_dir()


def test_evaluation_as_a_table_with_a_judge(project: Path) -> None:
    (project / "judges_of_mine.py").write_text("from workflows import Length\njudge = Length()")
    out, _ = astuner("eval", "-w", "workflows.py:Unscored", "-c", "config.yaml", "--judge", "judges_of_mine:judge")
    sys.modules.pop("judges_of_mine")
    assert re.search(r"│ +│ +greedy │ +sampled │", out.replace("┃", "│"))
    number = r"-?\d+\.\d{3}"
    assert re.search(rf"reward +│ +{number} │ +{number} │", out)
    assert re.search(rf"95% interval +│ +{number} to {number} │ +{number} to {number} │", out)
    assert re.search(r"episodes +│ +3 │ +3 │", out)
    assert re.search(rf"judge/characters +│ +{number} │ +{number} │", out)
    assert "reward_mean/default" not in out  # there is but one role


def test_numbers_that_json_has_not_become_null(project: Path) -> None:
    """A single reward that is not 0 or 1 has no interval."""
    arguments = ("-w", "workflows.py:Unscored", "-j", "workflows.py:Length", "-c", "config.yaml")
    out, _ = astuner("eval", *arguments, "eval_dataset.limit=1", "--json")
    results = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert results["sampled"]["reward_mean"] > 0
    assert results["sampled"]["ci_low"] is results["sampled"]["ci_high"] is None


def test_an_evaluation_in_which_everything_fails(project: Path) -> None:
    arguments = ("eval", "-w", "workflows.py:Broken", "-c", "config.yaml")
    out, err = astuner(*arguments, status=1)
    assert out == ""
    assert "the commonest error (3 times) is RuntimeError: the [environment] is down" in err
    # Unless that was allowed.
    allowed = (*arguments, "algorithm.max_failed_fraction=1")
    out, _ = astuner(*allowed)
    assert re.search(r"failed +│ +3 │ +3 │", out)
    out, _ = astuner(*allowed, "--json")
    assert json.loads(out)["greedy"]["reward_mean"] is None


# ------------------------------------------------------------------------------------------------------- messages


def test_configuration_errors_end_with_2_and_no_traceback(project: Path) -> None:
    arguments = ("--workflow", "workflows.py:Parity", "--config")
    cases = {
        ("nope.yaml",): "error: configuration file `nope.yaml` does not exist\n",
        ("config.yaml", "algorithm.group_sice=8"): "did you mean `algorithm.group_size`?\n",
        ("config.yaml", "group_size"): "error: override must have the form `key=value`, got `group_size`\n",
        ("config.yaml", "--resume"): "`checkpoint.resume=must`, but there is no run in `runs/parity`",
    }
    for given, expected in cases.items():
        out, err = astuner("train", *arguments, *given, status=2)
        assert expected in err
        assert "Traceback" not in err
        assert out == ""


def test_wrong_workflows_end_with_2(project: Path) -> None:
    for spec, expected in {
        "workflows.py:Parrity": "error: `workflows.py` has no `Parrity`; did you mean `Parity`?\n",
        "workflows.py:misspelt": "lacks the parameter `task`",
        "workflows.py": "error: expected `path/to/file.py:Name` or `package.module:Name`, got `workflows.py`\n",
    }.items():
        for name in ("train", "eval"):
            _, err = astuner(name, "--workflow", spec, "--config", "config.yaml", status=2)
            assert expected in err
    _, err = astuner("eval", "-w", "workflows.py:Parity", "-j", "workflows.py:Parity", "-c", "config.yaml", status=2)
    assert "does not inherit from `Judge`" in err


def test_other_errors_end_with_1(project: Path) -> None:
    arguments = ("-w", "workflows.py:Parity", "-c", "config.yaml")
    _, err = astuner("train", *arguments, "train_dataset.path=nowhere.jsonl", status=1)
    assert "nowhere.jsonl" in err
    _, err = astuner("train", "-w", "workflows.py:Broken", "-c", "config.yaml", "eval_dataset=null", status=1)
    # Brackets are not taken for markup.
    assert "the commonest error (8 times) is RuntimeError: the [environment] is down" in err


def test_settings_of_an_earlier_run_are_said_once(project: Path) -> None:
    arguments = ("train", "-w", "workflows.py:Parity", "-c", "config.yaml")
    _, err = astuner(*arguments, "--resume", "--fresh", status=2)
    assert err.startswith("error: `--resume` and `--fresh` say different things")
    _, err = astuner(*arguments, "--fresh", "checkpoint.resume=must", status=2)
    assert err.startswith("error: `--fresh` and `checkpoint.resume=must` say different things")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), f"the same command continues the run in `{Path('runs', 'parity')}`"),
        (("--fresh",), "the same command with `--resume` (not `--fresh`) continues"),
        (("experiment_name=other",), f"the same command continues the run in `{Path('runs', 'other')}`"),
    ],
)
def test_how_to_continue(
    project: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    Path("workflows.py").write_text(
        WORKFLOWS + "class Stop(Parity):\n    def __init__(self):\n        raise KeyboardInterrupt"
    )
    _, err = astuner("train", "-w", "workflows.py:Stop", "-c", "config.yaml", *arguments, status=130)
    assert err.startswith("interrupted; ")
    assert expected in err


def test_a_run_without_a_name_is_named_when_it_is_interrupted(project: Path) -> None:
    config = yaml.safe_load(Path("config.yaml").read_text())
    del config["experiment_name"]
    Path("config.yaml").write_text(yaml.safe_dump(config))
    Path("workflows.py").write_text(
        WORKFLOWS + "class Stop(Parity):\n    def __init__(self):\n        raise KeyboardInterrupt"
    )
    _, err = astuner("train", "-w", "workflows.py:Stop", "-c", "config.yaml", status=130)
    match = re.search(r"the same command with `experiment_name=(Experiment-\d{14})` continues the run in `(.*?)`", err)
    assert match
    assert Path(match[2]) == Path("runs", match[1])


# --------------------------------------------------------------------------------------------------------- doctor


def test_doctor(project: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--quick", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["healthy"] else 1)
    assert {"name": "torch", "status": "ok", "found": version("torch"), "remedy": ""} in found["checks"]
    assert found["healthy"] == all(check["status"] != "missing" for check in found["checks"])
    result = CliRunner().invoke(app, ["doctor", "--quick"])
    assert re.search(r"ok +torch", result.stdout)


def test_a_doctor_that_finds_something_ends_with_1(project: Path) -> None:
    Path("runs").write_text("a file")
    out, _ = astuner("doctor", "--quick", status=1)
    assert re.search(r"missing +run folder", out)
    assert "astuner train ... output_dir=" in out
