"""`load_object`: users' files and modules are found, and what is wrong with them is said in one message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentscope_tuner.errors import ConfigError
from agentscope_tuner.loading import load_object


@pytest.fixture(autouse=True)
def _as_if_nothing_was_loaded() -> Iterator[None]:
    """Imports of users' code last as long as the process; between tests they must not."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_loaded_with_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "helpers_of_mine.py", "ANSWER = 42")
    file = write(tmp_path / "flow.py", "from helpers_of_mine import ANSWER\nclass Flow:\n    answer = ANSWER")
    assert load_object(f"{file}:Flow").answer == 42


def test_a_relative_path_starts_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "code" / "flow.py", "x = 1")
    monkeypatch.chdir(tmp_path)
    assert load_object("code/flow.py:x") == 1
    monkeypatch.chdir(tmp_path / "code")
    assert load_object("flow.py:x") == 1


def test_two_names_of_one_file_share_one_import(tmp_path: Path) -> None:
    file = write(tmp_path / "flow.py", "class A:\n    pass\nclass B(A):\n    pass")
    assert issubclass(load_object(f"{file}:B"), load_object(f"{file}:A"))
    neighbour = write(tmp_path / "judge.py", "from flow import A")
    assert load_object(f"{neighbour}:A") is load_object(f"{file}:A")


@pytest.mark.parametrize("name", ["json.py", "tomllib.py", "pytest.py", "agentscope_tuner.py", "my flow.py"])
def test_a_file_never_replaces_a_module_of_its_name(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, "x = 1")
    before = dict(sys.modules)
    assert load_object(f"{file}:x") == 1
    assert {key: sys.modules[key] for key in before} == before
    assert file.stem not in set(sys.modules) - set(before)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    files = [write(tmp_path / folder / "main.py", f"x = '{folder}'\nbox = []") for folder in "abc"]
    assert [load_object(f"{file}:x") for file in files] == ["a", "b", "c"]
    assert load_object(f"{files[2]}:box") is load_object(f"{files[2]}:box")


def test_types_of_a_loaded_file_can_be_resolved(tmp_path: Path) -> None:
    """Pydantic and `get_type_hints` look modules up by name."""
    text = """
from __future__ import annotations
from pydantic import BaseModel
class Part(BaseModel):
    n: int
class Whole(BaseModel):
    part: Part
"""
    whole = load_object(f"{write(tmp_path / 'types.py', text)}:Whole")
    assert whole.model_validate({"part": {"n": 3}}).part.n == 3


def test_a_module_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "package_of_mine" / "__init__.py", "")
    write(tmp_path / "package_of_mine" / "judges.py", "strict = 'yes'")
    monkeypatch.chdir(tmp_path)
    assert load_object("package_of_mine.judges:strict") == "yes"


def test_an_installed_module() -> None:
    from agentscope_tuner.judges import MathJudge

    assert load_object("agentscope_tuner.judges:MathJudge") is MathJudge


@pytest.mark.parametrize("spec", ["", "flow.py", "flow.py:", ":Flow", "flow.py:not-a-name", "package.module"])
def test_a_spec_of_another_form_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"expected `path/to/file\.py:Name` or `package\.module:Name`, got") as caught:
        load_object(spec)
    assert f"`{spec}`" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(
            "flwo.py:Flow", r"`flwo\.py` of `flwo\.py:Flow` does not exist; did you mean `flow\.py`\?", id="near"
        ),
        pytest.param("nothing/x.py:Flow", r"does not exist; relative paths start at `", id="missing"),
        pytest.param("folder.py:Flow", r"`folder\.py` of `folder\.py:Flow` is a folder", id="folder"),
        pytest.param("code/notes.txt:Flow", r"is not a Python file; its name must end in `\.py`", id="not Python"),
        pytest.param("flow.py:Flwo", r"`flow\.py` has no `Flwo`; did you mean `Flow`\?", id="near name"),
        pytest.param("flow.py:Zebra", r"has no `Zebra`; it defines `Flow`, `judge`$", id="no near name"),
        pytest.param("empty.py:Zebra", r"has no `Zebra`; it defines no class or function", id="empty"),
        pytest.param(
            "no_such_module_here:x", r"module `no_such_module_here` of `.*` does not exist; install", id="module"
        ),
        pytest.param("json.no_such:x", r"module `json\.no_such` of `json\.no_such:x` does not exist", id="submodule"),
        pytest.param("json:laods", r"`json` has no `laods`; did you mean `loads`", id="module's name"),
    ],
)
def test_what_cannot_be_found_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, expected: str
) -> None:
    write(tmp_path / "flow.py", "import json\nfrom pathlib import Path\nclass Flow:\n    pass\ndef judge():\n    pass")
    write(tmp_path / "empty.py", "")
    write(tmp_path / "code" / "notes.txt", "")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=expected):
        load_object(spec)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "import no_such_package_here.inner",
            r"ModuleNotFoundError: .* \(.*flow\.py, line 1\); install `no_such_package_here` into this environment",
            id="missing package",
        ),
        pytest.param("x = 1\nx = = 2", r"SyntaxError: invalid syntax: x = = 2 \(.*flow\.py, line 2\)", id="syntax"),
        pytest.param("\n\n1 / 0", r"ZeroDivisionError: division by zero \(.*flow\.py, line 3\); correct it", id="bug"),
        # The user's own line, not the one inside json.
        pytest.param(
            "import json\njson.loads('{')", r"JSONDecodeError: .* \(.*flow\.py, line 2\)", id="bug in a library"
        ),
        pytest.param(
            "import sys\nsys.exit('usage')",
            r'ends the program when it is imported \(.*flow\.py, line 2\); .*if __name__ == "__main__":',
            id="a script",
        ),
    ],
)
def test_an_import_that_fails_names_the_line(tmp_path: Path, text: str, expected: str) -> None:
    file = write(tmp_path / "flow.py", text)
    with pytest.raises(ConfigError, match=expected):
        load_object(f"{file}:Flow")
    assert "flow" not in sys.modules
    # Once it is corrected, it can be loaded.
    write(file, "Flow = 'a flow that works'")
    assert load_object(f"{file}:Flow") == "a flow that works"


def test_a_module_that_fails_inside_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "outer_module.py", "import inner_module_that_is_missing")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"module `outer_module` cannot be imported: ModuleNotFoundError.*line 1"):
        load_object("outer_module:x")
