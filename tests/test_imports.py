"""What the package's names are, and that nobody imports what they do not need: processes start that much sooner."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module

import agentscope_tuner

HEAVY = {"agentscope", "datasets", "matplotlib", "starlette", "torch", "transformers", "uvicorn"}


def run(code: str) -> str:
    """What code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def heavy(module: str) -> str:
    """Which heavy packages a module imports."""
    return run(f"import sys, {module}\nprint(*sorted({HEAVY} & set(sys.modules)))")


def test_every_public_name_is_there_and_is_what_its_module_holds() -> None:
    assert set(agentscope_tuner.__all__) <= set(dir(agentscope_tuner))
    for name in agentscope_tuner.__all__:
        value = getattr(agentscope_tuner, name)
        assert value is getattr(import_module(value.__module__), name)
        assert value.__name__ == name
        assert pickle.loads(pickle.dumps(value)) is value
    assert not hasattr(agentscope_tuner, "tuna")


def test_tune_and_evaluate_are_functions_whatever_was_imported_before() -> None:
    code = (
        "import agentscope_tuner.tune, agentscope_tuner.evaluate\n"
        "from agentscope_tuner.cli import main\n"
        "import agentscope_tuner as package\n"
        "from agentscope_tuner import *\n"
        "print(callable(package.tune), package.tune is tune)\n"
        "print(callable(package.evaluate), package.evaluate is evaluate)\n"
    )
    assert run(code).splitlines() == ["True True", "True True"]


def test_the_package_imports_nothing_heavy() -> None:
    assert heavy("agentscope_tuner") == ""
    assert heavy("agentscope_tuner.cli") == ""
