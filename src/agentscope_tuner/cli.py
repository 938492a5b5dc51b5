"""The command line: `astuner train`, `eval`, `debug`, `doctor`, `serve-tinker`.

Exit status: 0 done; 1 the run failed; 2 the command or its configuration is wrong; 130 interrupted.

What runs workflows is imported inside the commands that run them: `--help` answers at once, and the doctor needs no
AgentScope to say that there is none.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentscope_tuner.config import TunerConfig, load_config
from agentscope_tuner.doctor import diagnose, show
from agentscope_tuner.errors import ConfigError, MissingDependencyError, TunerError
from agentscope_tuner.garbage import rare_collections
from agentscope_tuner.loading import load_object
from agentscope_tuner.types import EvalResult

INTERRUPTED = 130
"""What shells report for a program that Ctrl-C ended."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # Plain tracebacks for what is not a `TunerError`: they can be copied into a report, and show no values.
    pretty_exceptions_enable=False,
)

_Workflow = Annotated[
    str,
    typer.Option("--workflow", "-w", metavar="WHERE:NAME", help="What to run: path/to/file.py:Name or module:Name."),
]
_Judge = Annotated[
    str | None,
    typer.Option("--judge", "-j", metavar="WHERE:NAME", help="What gives rewards where the workflow gives none."),
]
_Config = Annotated[str, typer.Option("--config", "-c", metavar="FILE", help="A YAML file of settings.")]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="Settings on top of the file, such as algorithm.batch_size=8."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the `astuner` command."""
    with rare_collections():
        app(prog_name="astuner")


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"astuner {version('agentscope-tuner')}")
    except PackageNotFoundError:
        print("astuner, of a version unknown: `agentscope-tuner` is imported here, but not installed")
    raise typer.Exit


@app.callback()
def _astuner(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning for AgentScope agents."""


@app.command()
def train(
    workflow: _Workflow,
    config: _Config,
    judge: _Judge = None,
    overrides: _Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run; fail where there is none.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run aside and start anew.")] = False,
) -> None:
    """Train a workflow's model. An earlier run of the same name is continued."""
    with _one_message("interrupted before the run began"):
        settings = [*(overrides or []), *_resume_setting(resume, fresh, overrides or [])]
        # Made here, so that an interrupted run can be named.
        default_name = f"Experiment-{datetime.now():%Y%m%d%H%M%S}"
        resolved = load_config(config, overrides=settings, defaults={"experiment_name": default_name})
        workflow_func, judge_func = _load(workflow, judge)
    with _one_message(_how_to_continue(resolved, named=resolved.experiment_name != default_name)):
        from agentscope_tuner.tune import tune

        tune(
            workflow_func,
            config,
            judge_func=judge_func,
            experiment_name=resolved.experiment_name,
            overrides=settings,
        )


@app.command("eval")
def evaluate_held_out(
    workflow: _Workflow,
    config: _Config,
    judge: _Judge = None,
    overrides: _Overrides = None,
    as_json: _Json = False,
) -> None:
    """Measure held-out reward, greedy and sampled. Give a checkpoint as model.model_path=DIR."""
    with _one_message("interrupted"):
        # What the workflow and the progress bars print must not come between a reader and the JSON.
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            load_config(config, overrides=overrides or [], defaults={"experiment_name": "evaluation"})
            workflow_func, judge_func = _load(workflow, judge)
            from agentscope_tuner.evaluate import evaluate

            results = evaluate(workflow_func, config, judge_func=judge_func, overrides=overrides or [])
        if as_json:
            print(json.dumps({name: _plain(asdict(result)) for name, result in results.items()}, indent=2))
        else:
            Console().print(_table(results))


@app.command()
def debug(
    workflow: _Workflow,
    config: Annotated[str | None, typer.Option("--config", "-c", metavar="FILE", help="Takes its tasks.")] = None,
    judge: _Judge = None,
    overrides: _Overrides = None,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="A task's text, instead of --config.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many tasks to run.")] = 3,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="WHERE:NAME", help="Chat model for roles that have no default model."),
    ] = None,
) -> None:
    """Run a few episodes with the default models, and show what is said. Nothing is trained; breakpoints work."""
    with _one_message("interrupted"):
        if (config is None) == (not task):
            raise ConfigError("give tasks either by `--config` (its `train_dataset`) or by `--task`")
        if config is None and overrides:
            raise ConfigError(f"`{overrides[0]}` has no effect without `--config`; remove it")
        workflow_func, judge_func = _load(workflow, judge)
        stand_in = None if model is None else load_object(model)
        from agentscope_tuner.backends.debug import DebugRun
        from agentscope_tuner.event_loop import run_to_end
        from agentscope_tuner.readers import load_tasks
        from agentscope_tuner.types import Task
        from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner

        tasks = [Task(main_query=text, task_id=f"task-{i}") for i, text in enumerate(task or ())]
        if config is not None:
            settings = load_config(config, overrides=overrides or [], defaults={"experiment_name": "debug"})
            dataset = settings.train_dataset or settings.eval_dataset
            if dataset is None:
                raise ConfigError(f"`{config}` names no `train_dataset`; add one, or give tasks by `--task`")
            tasks = load_tasks(dataset)
        runner = DebugRun(
            WorkflowRunner(workflow_func), None if judge_func is None else JudgeRunner(judge_func), stand_in
        )
        run_to_end(runner.run(tasks[:limit]))


@app.command("doctor")
def check_installation(
    as_json: _Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the trial run, and trust what packages say.")] = False,
) -> None:
    """Check this installation, and say how to repair it. Ends with status 1 where something needed is missing."""
    with _one_message("interrupted"):
        checks = diagnose(quick=quick)
        healthy = all(check.status != "missing" for check in checks)
        if as_json:
            print(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
        else:
            show(checks, Console())
    if not healthy:
        raise typer.Exit(1)


# ----------------------------------------------------------------------------------------------------- the parts


@app.command("serve-tinker")
def serve_tinker(
    model: Annotated[str, typer.Option("--model", "-m", help="A directory, a hub name, or tiny-agent.")],
    folder: Annotated[Path, typer.Option(help="Where checkpoints go.")] = Path("tinker"),
    full_weights: Annotated[bool, typer.Option("--full-weights", help="Train all weights, no adapters.")] = False,
    host: Annotated[str, typer.Option(help="The interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    overrides: _Overrides = None,
) -> None:
    """Serve the embedded engine to clients of the Tinker SDK; the key is TINKER_API_KEY, or a new one."""
    with _one_message("stopped"):
        settings = [f"model.model_path={model}", "experiment_name=tinker", *(overrides or [])]
        config = load_config(overrides=settings)
        try:
            from agentscope_tuner.tinker_service.serve import serve
        except ImportError as exc:
            raise MissingDependencyError(
                f"`{exc.name}` is not installed; install it with `pip install 'agentscope-tuner[tinker]'`"
            ) from exc
        given = os.environ.get("TINKER_API_KEY")
        key = given or f"tml-{secrets.token_urlsafe(24)}"
        shown = "the key in TINKER_API_KEY" if given else f"TINKER_API_KEY={key}"

        def ready(url: str, name: str) -> None:
            print(f"serving {name}\nTINKER_BASE_URL={url}\n{shown}", flush=True)

        serve(config, folder, key, host=host, port=port, full_weights=full_weights, on_ready=ready)


@contextmanager
def _one_message(on_interrupt: str) -> Iterator[None]:
    """What goes wrong inside, and was foreseen, becomes a message and an exit status."""
    try:
        yield
    except TunerError as exc:
        _complain(Text.assemble(("error: ", "bold red"), (str(exc), "red")))
        raise typer.Exit(2 if isinstance(exc, ConfigError) else 1) from None
    except OSError as exc:  # a full disk, or a folder that may not be written
        _complain(Text.assemble(("error: ", "bold red"), (f"{exc}; run the same command again to continue", "red")))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _complain(Text(on_interrupt, style="yellow"))
        raise typer.Exit(INTERRUPTED) from None


def _complain(text: Text) -> None:
    # A message that is wrapped by hand cannot be searched for, and its paths cannot be copied.
    Console(stderr=True).print(text, soft_wrap=True)


def _load(workflow: str, judge: str | None) -> tuple[Any, Any]:
    return load_object(workflow), None if judge is None else load_object(judge)


def _resume_setting(resume: bool, fresh: bool, overrides: list[str]) -> list[str]:
    given = [flag for flag, on in (("--resume", resume), ("--fresh", fresh)) if on]
    given += [setting for setting in overrides if setting.startswith("checkpoint.resume=")]
    if len(given) > 1:
        raise ConfigError(f"`{given[0]}` and `{given[1]}` say different things of an earlier run; give one of them")
    return [f"checkpoint.resume={'must' if resume else 'never'}"] if resume or fresh else []


def _how_to_continue(config: TunerConfig, *, named: bool) -> str:
    changes = []
    if not named:
        changes.append(f"`experiment_name={config.experiment_name}`")
    if config.checkpoint.resume == "never":
        changes.append("`--resume` (not `--fresh`)")
    how = f"the same command with {' and '.join(changes)}" if changes else "the same command"
    return (
        f"interrupted; {how} continues the run in `{Path(config.output_dir) / config.experiment_name}` from its newest "
        "checkpoint"
    )


def _table(results: dict[str, EvalResult]) -> Table:
    table = Table(title="held-out", title_justify="left", title_style="bold")
    table.add_column("")
    for decoding in results:
        table.add_column(decoding, justify="right")
    columns = list(results.values())
    table.add_row("reward", *(f"{result.reward_mean:.3f}" for result in columns))
    table.add_row("95% interval", *(f"{result.ci_low:.3f} to {result.ci_high:.3f}" for result in columns))
    table.add_row("episodes", *(f"{result.episodes}" for result in columns))
    table.add_row("failed", *(f"{result.episodes_failed}" for result in columns))
    for name in dict.fromkeys(name for result in columns for name in result.metrics):
        values = [result.metrics.get(name) for result in columns]
        # With a single role, its reward is the reward.
        if values != [result.reward_mean for result in columns]:
            table.add_row(name, *("-" if value is None else f"{value:.3f}" for value in values))
    table.add_row("seconds", *(f"{result.time_s:.1f}" for result in columns))
    return table


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
