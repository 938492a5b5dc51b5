"""The doctor: it finds what is wrong, says the command that puts it right, and keeps secrets."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from agentscope_tuner import doctor
from agentscope_tuner.doctor import Check
from agentscope_tuner.engine import products, trial

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def by_name(checks: list[Check]) -> dict[str, Check]:
    names = [check.name for check in checks]
    assert len(names) == len(set(names))
    return {check.name: check for check in checks}


def shown(checks: list[Check]) -> str:
    out = io.StringIO()
    doctor.show(checks, Console(file=out, width=60))
    return out.getvalue()


# ------------------------------------------------------------------------------------------------------ the whole


def test_a_sound_installation(tmp_path: Path, tiny_agent_dir: Path) -> None:
    checks = by_name(doctor.diagnose(folder=tmp_path))
    assert [check for check in checks.values() if check.status == "missing"] == []
    assert checks["torch"].found == version("torch")
    assert checks["agentscope"].found == version("agentscope")
    assert re.search(r"samples [\d,]+ tokens/s", checks["engine"].found)
    assert str(tmp_path / "runs") in checks["run folder"].found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("slow", "told"), [(True, "saves memory, not time"), (False, "faster than float32")])
def test_it_says_what_bfloat16_would_gain(monkeypatch: pytest.MonkeyPatch, slow: bool, told: str) -> None:
    monkeypatch.setattr(products, "bfloat16_is_slow", lambda: slow)
    assert told in doctor.check_bfloat16().found


def test_quick_runs_no_model_and_imports_little() -> None:
    code = (
        "import sys; from agentscope_tuner.doctor import diagnose; names = {c.name for c in diagnose(quick=True)}; "
        "assert 'torch' in names and 'engine' not in names, names; "
        "assert not {'transformers', 'datasets', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_doctor_imports_nothing_heavy() -> None:
    code = "import sys, agentscope_tuner.doctor; assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_secrets_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASHSCOPE_API_KEY", "hush-hush-1234")
    monkeypatch.setenv("OPENAI_API_KEY", "")
    checks = doctor.diagnose(quick=True, folder=tmp_path)
    assert by_name(checks)["DASHSCOPE_API_KEY"].found == "set"
    assert by_name(checks)["OPENAI_API_KEY"].found.startswith("not set")
    assert "1234" not in shown(checks) + repr(checks)


def test_every_check_that_is_not_ok_has_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the worst of places: no packages, no model, no disk, no memory."""

    def nowhere(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", nowhere)
    monkeypatch.setattr(doctor, "files", lambda package: tmp_path)
    monkeypatch.setattr(doctor, "_MIN_FREE_GB", 1e9)
    checks = doctor.diagnose(folder=tmp_path)
    ill = [check for check in checks if check.status != "ok"]
    assert {check.name for check in ill} >= {"torch", "agentscope", "tiny-agent", "free disk"}
    assert all(check.remedy for check in ill)
    assert not any(check.remedy for check in checks if check.status == "ok")
    # Where torch is missing nothing is said of GPUs, and nothing is run.
    assert {"GPU", "engine"}.isdisjoint(check.name for check in checks)
    for check in ill:
        assert f"{check.remedy}\n" in shown(checks)  # on a line of its own, not wrapped


def test_the_rendering_of_health() -> None:
    text = shown([Check("torch", "ok", "2.9 [cpu]")])
    assert re.search(r"ok +torch +2\.9 \[cpu\]", text)
    assert "Everything a run needs is here." in text


# ------------------------------------------------------------------------------------------------------- packages


def test_requirements_are_those_of_the_package() -> None:
    declared = {requirement.split(";")[0].strip() for requirement in PYPROJECT["dependencies"]}
    assert {doctor.TORCH, *doctor.REQUIREMENTS.values()} <= declared
    extras = PYPROJECT["optional-dependencies"]
    assert {*doctor.TRINITY.values()} <= {*extras["tinker"], *extras["trinity"]}


def test_tested_pythons_are_those_of_the_package() -> None:
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(PYPROJECT["classifiers"]))
    assert [f"{major}.{minor}" for major, minor in doctor._TESTED_PYTHON] == [classified[0], classified[-1]]
    assert PYPROJECT["requires-python"] == f">={classified[0]}"


@pytest.mark.parametrize(
    ("found", "requirement", "expected"),
    [
        ("1.0.19", "agentscope>=1.0.19,<2", True),
        ("1.0.21.post1", "agentscope>=1.0.19,<2", True),
        ("1.0.9", "agentscope>=1.0.19,<2", False),
        ("2.0.0", "agentscope>=1.0.19,<2", False),
        ("2.0rc1", "agentscope>=1.0.19,<2", False),
        ("2.13.0+cpu", "torch>=2.6", True),
        ("2.5.1", "torch>=2.6", False),
        ("5", "transformers>=5,<6", True),
        ("5.0.0", "transformers>=5,<6", True),
        ("unknown", "datasets>=4", False),
    ],
)
def test_versions(found: str, requirement: str, expected: bool) -> None:
    assert doctor.satisfies(found, requirement) is expected


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = doctor.check_package("no-such-package-here>=3,<4")
    assert (absent.status, absent.remedy) == ("missing", 'pip install "no-such-package-here>=3,<4"')
    old = doctor.check_package("pytest>=1000")
    assert (old.status, old.remedy) == ("missing", 'pip install "pytest>=1000"')
    assert old.found == f"{version('pytest')}, needed is >=1000"
    (tmp_path / "broken_build.py").write_text("raise OSError('libsomething.so: cannot open shared object file')")
    (tmp_path / "noisy.py").write_text("import warnings\nwarnings.warn('old', DeprecationWarning)")
    monkeypatch.syspath_prepend(tmp_path)
    broken = doctor.check_package("pytest>=1", "broken_build")
    assert broken.status == "missing"
    assert "cannot be imported: OSError: libsomething.so" in broken.found
    assert broken.remedy == 'pip install --force-reinstall "pytest>=1"'
    assert doctor.check_package("pytest>=1", "noisy").status == "ok"


@pytest.mark.parametrize(
    ("python", "status"),
    [((3, 10), "missing"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "ok"), ((3, 99), "warn")],
)
def test_pythons(python: tuple[int, int], status: str) -> None:
    check = doctor.check_python(python)
    assert check.status == status
    assert check.remedy == ("" if status == "ok" else "python3.13 -m venv .venv")


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_kernels() == Check("compiled kernels", "ok", "built")
    monkeypatch.setattr(trial, "native_kernels", lambda: None)
    refused = doctor.check_kernels()
    assert refused.status == "ok"
    assert "wrong or slow" in refused.found
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    absent = doctor.check_kernels()
    assert (absent.status, absent.remedy) == ("warn", "apt-get install g++")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert doctor.check_kernels().status == "ok"


# -------------------------------------------------------------------------------------------- model, folder, engine


def test_the_model_that_ships_is_looked_for_where_it_is(tiny_agent_dir: Path) -> None:
    assert doctor.check_model_files(tiny_agent_dir).status == "ok"
    assert tiny_agent_dir == Path(doctor.__file__).parent / "assets" / "tiny-agent"


def test_files_of_the_model_that_are_missing_or_empty(tiny_model_dir: Path, tmp_path: Path) -> None:
    for name in doctor.MODEL_FILES:
        (tmp_path / name).write_bytes((tiny_model_dir / name).read_bytes())
    assert doctor.check_model_files(tmp_path).status == "ok"
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").unlink()
    check = doctor.check_model_files(tmp_path)
    assert check.status == "missing"
    assert check.found == f"no model.safetensors, tokenizer.json in {tmp_path}"


def test_the_engine_is_measured(tiny_model_dir: Path) -> None:
    check = doctor.measure_speed(str(tiny_model_dir), seconds=0.0)
    assert check.status == "ok"
    assert re.search(r"samples [1-9][\d,]* tokens/s", check.found)


def test_an_engine_that_fails_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check = doctor.measure_speed(str(tmp_path))
    assert check.status == "missing"
    assert check.found.startswith("ModelError: model `")
    assert check.remedy


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    assert doctor.check_writable(tmp_path).status == "ok"
    (tmp_path / "runs").write_text("a file, not a folder")
    check = doctor.check_writable(tmp_path)
    assert check.status == "missing"
    assert "output_dir=" in check.remedy
    assert doctor.check_writable(tmp_path / "nowhere").status == "missing"
