"""What the documentation shows is true: its code runs, its settings load, its commands exist."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from omegaconf import OmegaConf

import agentscope_tuner
from agentscope_tuner import check_judge, check_workflow, errors
from agentscope_tuner.cli import app
from agentscope_tuner.config import TunerConfig, load_config, parse_config
from agentscope_tuner.errors import ConfigError
from agentscope_tuner.loading import load_object

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
MINIMAL = {"experiment_name": "docs", "model": {"model_path": "tiny-agent"}}
"""What a YAML block that shows a part of a configuration is put upon."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_SHOWN = {"text", "diff"}
"""Languages of blocks that are only shown."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    """Of its first line of code, from 1."""
    language: str
    title: str | None
    """The file it stands for; later blocks find that file in the working directory."""
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    content = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(content):
        language = match["info"].partition(" ")[0]
        title = _TITLE.search(match["info"])
        line = content.count("\n", 0, match.start("body")) + 1
        yield Block(page, line, language, title and title[1], textwrap.dedent(match["body"]))


def run_page(page: Path) -> None:
    """Check every block of a page in the working directory; Python blocks share one namespace."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            run_python(block, namespace)
        elif block.language == "yaml":
            check_yaml(block)
        elif block.language == "bash":
            for command in commands(block.text):
                check_command(command, block)
        elif block.language == "json":
            assert [json.loads(line) for line in block.text.splitlines()], f"{block}: holds no row"
        else:
            assert block.language in _SHOWN, f"{block}: blocks in {block.language!r} are not checked; name another"


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block; what it prints must be what its `#>` lines show, however they are wrapped."""
    # Leading newlines make tracebacks point into the page.
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    shown = " ".join(line.strip().removeprefix("#>") for line in block.text.splitlines() if line.strip().startswith("#>"))
    if shown:
        assert printed.getvalue().split() == shown.split(), f"{block}: it printed\n{printed.getvalue()}"


def check_yaml(block: Block) -> TunerConfig:
    """Load a block as a configuration; one that shows only a part is put upon a minimal one."""
    given = OmegaConf.create(block.text)
    config = OmegaConf.to_container(OmegaConf.merge(MINIMAL, given), resolve=True)
    try:
        return parse_config(config, where=str(block))
    except ConfigError as exc:
        raise AssertionError(str(exc)) from exc


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def check_command(words: list[str], block: Block) -> None:
    """Check that a command exists, and that what it names does."""
    program, *arguments = words
    if program == "astuner":
        check_astuner(arguments, block)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in arguments if "=" not in word and word not in targets]
        assert not unknown, f"{block}: the Makefile has no target `{unknown[0]}`"
    elif program == "python":
        assert find(arguments[0]).is_file(), f"{block}: there is no `{arguments[0]}`"
        if overrides := [word for word in arguments[1:] if "=" in word]:
            load_config(overrides=[f"{key}={value}" for key, value in flat(MINIMAL)] + overrides)
    else:
        assert program in ("pip", "export"), f"{block}: `{program}` is not checked; use another command"


def check_astuner(arguments: list[str], block: Block) -> None:
    """Parse a command line as `astuner` does, and load what it names."""
    name, *rest = arguments
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    assert name in group.commands, f"{block}: `astuner` has no command `{name}`"
    given = group.commands[name].make_context(name, rest).params
    if given.get("config"):
        load_config(find(given["config"]), overrides=given["overrides"] or [], defaults={"experiment_name": "docs"})
    for option, check in (("workflow", check_workflow), ("judge", check_judge)):
        if given.get(option):
            where, _, what = given[option].rpartition(":")
            check(load_object(f"{find(where)}:{what}" if where.endswith(".py") else given[option]))


def find(path: str) -> Path:
    """A file that the page made, or one of the repository."""
    return Path(path) if Path(path).exists() else ROOT / path


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, threads = set(sys.modules), torch.get_num_threads()
    # With several threads, anything else that runs on this machine would slow a tiny model down many times.
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, workplace: Path) -> None:
    run_page(page)
