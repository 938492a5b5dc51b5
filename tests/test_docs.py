"""What the documentation shows is true: its code runs, its settings load, its commands exist."""

from __future__ import annotations

import asyncio
import importlib.util
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
from transformers import AutoTokenizer

import agentscope_tuner
from agentscope_tuner import (
    ModelTuner,
    Task,
    TunerConfig,
    TunerModelConfig,
    Workflow,
    WorkflowOutput,
    WorkflowTask,
    check_judge,
    check_workflow,
    errors,
    tune,
)
from agentscope_tuner.chat import ChatRenderer
from agentscope_tuner.cli import app
from agentscope_tuner.config import EngineConfig, WorkflowConfig, load_config, parse_config
from agentscope_tuner.engine.models import load_model
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.errors import ConfigError, PromptTooLongError, ReplayError, TunerError
from agentscope_tuner.loading import load_object
from agentscope_tuner.policy import SamplingParams
from agentscope_tuner.recorder import PolicyModel, Recorder
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.testing import ScriptedPolicy
from agentscope_tuner.workflow import WorkflowRunner

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
    """Run a block; what it prints must be what its `# >` lines show, however they are wrapped."""
    printed: list[str] = []
    # Its own `print`, since progress goes to standard output as well.
    namespace["print"] = lambda *values: printed.append(" ".join(map(str, values)))
    # Leading newlines make tracebacks point into the page.
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
    exec(code, namespace)
    shown = [line.removeprefix("# >") for line in block.text.splitlines() if line.startswith("# >")]
    got = "\n".join(printed)
    assert got.split() == " ".join(shown).split(), f"{block}: it printed\n{got}"


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
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, workplace: Path) -> None:
    run_page(page)


# -------------------------------------------------------------------------------------------------- whole pages


def test_the_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == module.render(), "run `make docs`"


def test_every_public_name_is_on_the_api_page() -> None:
    page = (DOCS / "api.md").read_text()
    assert [name for name in agentscope_tuner.__all__ if not re.search(rf"(\.|`){name}\b", page)] == []


def test_the_error_tree_is_the_one_in_the_code() -> None:
    tree = next(block.text for block in blocks(DOCS / "errors.md"))
    documented = textwrap.dedent(str(errors.__doc__).split("\n\n")[1])
    assert tree.strip() == documented.strip()


@pytest.mark.parametrize("page", [ROOT / "README.md", *ROOT.glob("examples/*/README.md")], ids=str)
def test_links_of_readmes_lead_somewhere(page: Path) -> None:
    links = [match[1] for match in _LINK.finditer(page.read_text())]
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


# ------------------------------------------------------------------------------------------------ shown messages


def table(section: str) -> list[list[str]]:
    """The cells of a table in a section of the page about errors."""
    text = (DOCS / "errors.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 1, f"section `{section}` has no table"
    return rows[1:]


@pytest.mark.parametrize(("setting", "message"), [row[:2] for row in table("Settings")])
def test_a_bad_setting_has_the_message_that_is_shown(setting: str, message: str) -> None:
    given = [f"{key}={value}" for key, value in flat(MINIMAL)] + ["train_dataset.path=train.jsonl"]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[*given, *setting.strip("`").split()])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "column"), [("Settings that do not fit", 0), ("Roles", 0), ("Episodes that fail", 1)]
)
def test_shown_messages_are_the_real_ones(section: str, column: int, workplace: Path) -> None:
    shown = [row[column] for row in table(section)]
    patterns = [re.compile(".*".join(map(re.escape, message.split("...")))) for message in shown]
    real = list(PROVOKE[section]())
    fits = [[bool(pattern.search(message)) for message in real] for pattern in patterns]
    assert [message for message, found in zip(shown, fits, strict=True) if not any(found)] == [], real
    assert [message for message, found in zip(real, zip(*fits, strict=True), strict=True) if not any(found)] == []


def provoke_misfits() -> Iterator[str]:
    """Settings that are wrong for this model, this machine, or the run that is there."""
    Path("tasks.jsonl").write_text('{"question": "What is 2 + 2?", "answer": "4"}')

    def failure(*settings: str, name: str) -> str:
        given = ["model.model_path=tiny-agent", "train_dataset.path=tasks.jsonl", "algorithm.batch_size=1"]
        with pytest.raises(TunerError) as caught:
            tune(calls_nobody, experiment_name=name, overrides=[*given, *settings])
        return str(caught.value)

    yield failure("model.max_model_len=9999", name="a")
    yield failure("model.enable_thinking=true", name="b")
    yield failure("model.lora.target_modules=[nothing]", name="c")
    yield failure("engine.kv_cache_gb=0.0001", name="d")
    yield failure("engine.step_memory_gb=0.001", name="d")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield failure("engine.device=cuda", name="e")
    yield failure("checkpoint.resume=must", name="f")
    failure(name="g")  # every episode fails, but the run is there
    yield failure("seed=1", name="g")


class Witch(Workflow):
    """Lets the witch speak, and then does something with the tuner."""

    then: Any

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        model_tuner.register_model("witch")
        await model_tuner.get_model("witch")([{"role": "user", "content": "Hello"}])
        self.then(model_tuner)
        return WorkflowOutput(reward=1.0)


def provoke_role_errors() -> Iterator[str]:
    """What a workflow in which the witch is trained may get wrong."""

    def register_twice(tuner: ModelTuner) -> None:
        tuner.register_model("seer", default_model="one")
        tuner.register_model("seer", default_model=2)

    def register_only(tuner: ModelTuner) -> None:
        tuner.register_model("seer")
        tuner.get_model("seer")

    for then in (lambda tuner: tuner.get_model("seer"), register_only, register_twice):
        yield failure_of(Witch(then=then), trainable_targets=["witch"])
    yield failure_of(replies_with({"witch": 1.0}), trainable_targets=["witch"])
    yield failure_of(Witch(then=bool), trainable_targets=["witch", "sear"])


def provoke_episode_failures() -> Iterator[str]:
    """What one episode may get wrong."""

    async def nothing(task: dict[str, Any], model: Any) -> float:
        await model([{"role": "user", "content": "Hello"}])

    async def image(task: dict[str, Any], model: Any) -> float:
        await model([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}])

    async def slow(task: dict[str, Any], model: Any) -> float:
        await asyncio.sleep(60)

    class TwoRoles(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            for role in ("witch", "seer"):
                model_tuner.register_model(role)
                await model_tuner.get_model(role)([{"role": "user", "content": "Hello"}])
            return WorkflowOutput(reward={"witch": 1.0})

    yield failure_of(calls_nobody)
    yield failure_of(replies_with(None))
    yield failure_of(nothing)
    yield failure_of(TwoRoles)
    yield failure_of(replies_with({"default": 1.0, "sear": 1.0}))

    class TooSoon(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            model_tuner.register_model("seer")
            model_tuner.reward("seer", 1.0)
            return WorkflowOutput(reward=1.0)

    yield failure_of(TooSoon)
    with pytest.raises(ReplayError) as diverged:
        raise Recorder(scripted(), episode_id="e", seed=0).diverged(0)
    yield str(diverged.value)
    yield failure_of(slow, timeout_s=0.01)
    yield failure_of(image)
    with pytest.raises(PromptTooLongError) as caught:
        loaded = load_model(TunerModelConfig(model_path="tiny-agent", max_model_len=16), EngineConfig(device="cpu"))
        asyncio.run(Sampler(loaded, EngineConfig(device="cpu")).sample([1] * 16, SamplingParams(), episode_id="long"))
    yield str(caught.value)


PROVOKE = {
    "Settings that do not fit": provoke_misfits,
    "Roles": provoke_role_errors,
    "Episodes that fail": provoke_episode_failures,
}


async def calls_nobody(task: dict[str, Any], model: Any) -> float:
    return 1.0


def replies_with(reward: Any) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        await model([{"role": "user", "content": "Hello"}])
        return WorkflowOutput(reward=reward)

    return workflow


def scripted() -> PolicyModel:
    """A policy that says hello."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory("tiny-agent"))
    renderer = ChatRenderer(tokenizer)
    policy = ScriptedPolicy(renderer, lambda prompt, episode_id: "Hello")
    return PolicyModel(policy, renderer, frozenset([tokenizer.eos_token_id]), "scripted", SamplingParams())


def failure_of(workflow: Any, **settings: Any) -> str:
    """The message of what ends a scripted episode of a workflow, or the run it is in."""
    rollout = Rollout(WorkflowRunner(workflow), None, scripted(), WorkflowConfig(**settings), 0, {})
    try:
        [group] = asyncio.run(rollout.run([Task(main_query="Hello")], 1, phase="docs"))
    except TunerError as exc:
        return str(exc)
    error = group.episodes[0].error
    assert error is not None
    return error.message


# ----------------------------------------------------------------------------------------- the checker, checked


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        pytest.param("```python\nprint(1 + 1)\n# > 3\n```", "it printed", id="wrong output"),
        pytest.param("```python\nprint(1)\n```", "it printed", id="output that is not shown"),
        pytest.param("```python\nfrom agentscope_tuner import train\n```", "cannot import name", id="wrong name"),
        pytest.param("```python\nx = 1\n```\n\n```python\nprint(y)\n```", "name 'y' is not", id="namespace"),
        pytest.param("```yaml\nmodel:\n  temprature: 1\n```", "did you mean `model.temperature`", id="wrong key"),
        pytest.param("```bash\nmake it\n```", "no target `it`", id="wrong target"),
        pytest.param("```bash\nastuner fly\n```", "no command `fly`", id="wrong command"),
        pytest.param("```bash\nastuner eval --fast\n```", "No such option", id="wrong option"),
        pytest.param("```bash\nrm -rf /\n```", "`rm` is not checked", id="other program"),
        pytest.param("```\nsomething\n```", "are not checked", id="no language"),
    ],
)
def test_a_page_that_is_wrong_fails(page: str, complaint: str, workplace: Path) -> None:
    path = workplace / "page.md"
    path.write_text(page)
    with pytest.raises(Exception, match=re.escape(complaint)):
        run_page(path)


# ----------------------------------------------------------------------------------------------------- examples


def test_the_math_agent_trains_from_any_folder(workplace: Path) -> None:
    settings = [
        "train_dataset.total_steps=1", "algorithm.batch_size=2", "algorithm.group_size=2", "eval_dataset.limit=2",
        "engine.threads=1",
    ]  # fmt: skip
    script = ROOT / "examples" / "math_agent" / "main.py"
    done = subprocess.run([sys.executable, script, *settings], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (workplace / "runs" / "math_agent" / "checkpoints" / "step_1" / "model.safetensors").is_file()


def test_the_api_agent_asks_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASHSCOPE_API_KEY", raising=False)
    script = ROOT / "examples" / "math_agent" / "api_agent.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("`DASHSCOPE_API_KEY` is not set")


def test_the_two_agents_differ_in_their_model() -> None:
    folder = ROOT / "examples" / "math_agent"

    def agent(file: str) -> list[str]:
        found = re.search(r"agent = ReActAgent\((.*?)\n +\)\n", (folder / file).read_text(), re.DOTALL)
        assert found is not None
        return [line.strip() for line in found[1].splitlines()]

    pairs = zip(agent("api_agent.py"), agent("workflow.py"), strict=True)
    changed = [old.partition("=")[0] for old, new in pairs if old.replace("DashScopeChatF", "OpenAIChatF") != new]
    assert changed == ["model"]
