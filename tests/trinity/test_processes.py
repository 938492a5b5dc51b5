"""A run is a chain of processes: none imports what only another one needs, so that each starts as soon as it can."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"agentscope", "openai", "pandas", "tinker", "torch", "transformers", "transformers.modeling_utils"}


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        pytest.param("backends.trinity.recording", set(), id="recorder"),
        pytest.param("backends.trinity.stage", set(), id="stage"),
        pytest.param("backends.trinity.run", {"agentscope"}, id="run"),
        pytest.param("backends.trinity.algorithm", {"torch"}, id="trainer"),
        pytest.param("backends.trinity.adapter", {"torch", "transformers"}, id="explorer"),
        pytest.param("tinker_service.serve", HEAVY - {"agentscope", "openai", "pandas"}, id="service"),
    ],
)
def test_a_process_imports_what_it_needs(module: str, needed: set[str]) -> None:
    code = f"import sys, agentscope_tuner.{module}\nprint(*sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= needed
