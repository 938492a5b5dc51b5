"""The folder of one run: its settings, its numbers, and every episode it saw.

    runs/<experiment>/
    ├── config.yaml                     every setting, as the run uses it
    ├── metrics.jsonl                   one `StepMetrics` per line
    ├── episodes/<phase>_<step>.jsonl   one `Episode` per line
    ├── checkpoints/step_<N>/           written by the engine
    ├── reward.png
    └── tensorboard/

Both kinds of lines are flushed one by one. A run that is killed leaves at most one broken last line, which readers
skip and the next append removes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from omegaconf import OmegaConf
from pydantic_core import to_json

from agentscope_tuner.config import TunerConfig, load_config
from agentscope_tuner.errors import ConfigError, DataError
from agentscope_tuner.types import Episode, ModelCall, StepMetrics

FREE_ON_RESUME = (
    "train_dataset.total_steps",
    "train_dataset.total_epochs",
    "algorithm.save_interval_steps",
    "algorithm.eval_interval_steps",
    "checkpoint",
    "monitor_type",
    "output_dir",
    "project_name",
    "experiment_name",
    "workflow.timeout_s",
    "engine.threads",
)
"""Settings, or blocks of them, that may change when a run is continued: they do not change what it computes."""

_METRIC_FIELDS = tuple(f.name for f in dataclasses.fields(StepMetrics) if f.name != "extra")
_EPISODE_FILE = re.compile(r"[a-z_]+_(\d{6,})\.jsonl")
_ABSENT = object()


class RunFolder:
    """Reads and writes one run's folder. Close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._episodes: BinaryIO | None = None
        self._episodes_path: Path | None = None

    @property
    def config_path(self) -> Path:
        """Every setting, as the run uses it."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """One `StepMetrics` per line."""
        return self.path / "metrics.jsonl"

    @property
    def episodes_dir(self) -> Path:
        """One file per phase and step, one `Episode` per line."""
        return self.path / "episodes"

    @property
    def checkpoints_dir(self) -> Path:
        """Where the engine writes `step_<N>`."""
        return self.path / "checkpoints"

    @property
    def reward_png(self) -> Path:
        """The reward curve."""
        return self.path / "reward.png"

    @property
    def tensorboard_dir(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    # ------------------------------------------------------------------------------------------------- settings

    def prepare(self, config: TunerConfig) -> bool:
        """Create the folder, or open the one that is there as `checkpoint.resume` says, and store `config` in it.

        Returns:
            Whether an earlier run is continued.

        Raises:
            ConfigError: `checkpoint.resume` is `must` and there is no run; or the stored configuration cannot be
                read, or has other values than `config` in settings that change results.
        """
        resume = config.checkpoint.resume
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"run folder `{self.path}` is a file; choose another `experiment_name` or `output_dir`")
        # A folder with settings alone is left by a start that failed, perhaps because of these settings.
        kept = list(self.path.iterdir()) if self.path.is_dir() else []
        holds_run = any(path != self.config_path and not path.name.startswith(".") for path in kept)
        if holds_run and resume == "never":
            self.close()
            self.path.rename(_first_free(self.path))
            holds_run = False
        if holds_run:
            self._compare(config)
        elif resume == "must":
            raise ConfigError(
                f"`checkpoint.resume=must`, but there is no run in `{self.path}`; check `experiment_name` and "
                "`output_dir`, or set `checkpoint.resume=auto` to start one"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        _write_atomically(self.config_path, OmegaConf.to_yaml(_escaped(config.model_dump(mode="json"))).encode())
        return holds_run

    def _compare(self, config: TunerConfig) -> None:
        remedy = "choose another `experiment_name`, or set `checkpoint.resume=never` to move the old run aside"
        try:
            stored = load_config(self.config_path)
        except ConfigError as exc:
            raise ConfigError(f"run folder `{self.path}` cannot be continued: {exc}; {remedy}") from exc
        differences = [
            f"  - `{key}`: stored {_shown(old)}, given {_shown(new)}"
            for key, old, new in _differences(stored.model_dump(mode="json"), config.model_dump(mode="json"))
            if not any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)
        ]
        if differences:
            lines = "\n".join(differences)
            raise ConfigError(f"run folder `{self.path}` was made with other settings:\n{lines}\n{remedy}")

    # -------------------------------------------------------------------------------------------------- metrics

    def append_metrics(self, metrics: StepMetrics) -> None:
        """Add one line to `metrics.jsonl`; `extra` is merged in, numbers that are not finite become null."""
        if taken := set(metrics.extra) & set(_METRIC_FIELDS):
            raise ValueError(
                f"`extra` must not use names of `StepMetrics`, got {', '.join(sorted(taken))}; prefix them"
            )
        row = {name: getattr(metrics, name) for name in _METRIC_FIELDS} | metrics.extra
        with _open_for_append(self.metrics_path) as file:
            file.write(_encode(row))

    def read_metrics(self) -> list[StepMetrics]:
        """The lines of `metrics.jsonl`, in order; keys that `StepMetrics` has not are found in `extra`.

        Raises:
            DataError: a line other than the last is broken.
        """
        if not self.metrics_path.exists():
            return []
        return [_to_metrics(row, self.metrics_path) for row in _rows(self.metrics_path)]

    # ------------------------------------------------------------------------------------------------- episodes

    def write_episode(self, episode: Episode, *, phase: str, step: int) -> None:
        """Add one line to `episodes/<phase>_<step>.jsonl`.

        Args:
            episode: what to store. Of a call that extends another, only what is new is written; `read_episodes`
                restores the rest.
            phase: `train`, `eval_greedy` or `eval_sampled`.
            step: the training step the episode belongs to.
        """
        path = self.episodes_dir / f"{phase}_{step:06d}.jsonl"
        if self._episodes is None or path != self._episodes_path:
            self.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._episodes, self._episodes_path = _open_for_append(path), path
        self._episodes.write(_encode(_episode_row(episode)))
        self._episodes.flush()

    # ------------------------------------------------------------------------------------------------ lifecycle

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`, as a run does that goes on from the checkpoint of `step`.

        -1 forgets everything, for a run that was stopped before its first checkpoint.
        """
        self.close()
        # Episodes go first: a kill between the two leaves metrics without episodes, and the next rewind ends the work.
        if self.episodes_dir.is_dir():
            for path in self.episodes_dir.iterdir():
                match = _EPISODE_FILE.fullmatch(path.name)
                if match and int(match[1]) > step:
                    path.unlink()
        if self.metrics_path.exists():
            rows = _rows(self.metrics_path)
            kept = [_encode(row) for row in rows if _to_metrics(row, self.metrics_path).step <= step]
            _write_atomically(self.metrics_path, b"".join(kept))

    def close(self) -> None:
        """Close the episode file; the next `write_episode` opens it again."""
        if self._episodes is not None:
            self._episodes.close()
        self._episodes = self._episodes_path = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """Read an episode file, with the `prompt_ids` and `messages` of every call in full.

    Raises:
        DataError: a line other than the last is broken.
    """
    rows = list(_rows(path))
    for row in rows:
        calls = row["calls"]
        for call in calls:
            base = calls[call["extends"]] if call["extends"] is not None else {}
            if "prompt_tail_ids" in call:
                call["prompt_ids"] = base["prompt_ids"] + base["completion_ids"] + call.pop("prompt_tail_ids")
            if "messages_from" in call:
                shared = _with_reply(base["messages"], base["text"])[: call.pop("messages_from")]
                call["messages"] = shared + call.pop("messages_tail")
    return rows


# ----------------------------------------------------------------------------------------------- records to rows


def _episode_row(episode: Episode) -> dict[str, Any]:
    task, error = episode.workflow_task, episode.error
    return {
        "episode_id": task.episode_id,
        "group_index": task.group_index,
        "task": {"query": task.task.main_query, "id": task.task.task_id},
        "reward": episode.reward,
        "is_success": episode.is_success,
        "error": error and {"kind": error.kind, "message": error.message, "traceback": error.traceback},
        "metrics": episode.metrics,
        "opponents": episode.opponents,
        "replayed": episode.replayed,
        "time_s": round(episode.time_s, 4),
        "calls": [_call_row(call, episode.calls[:index]) for index, call in enumerate(episode.calls)],
    }


def _call_row(call: ModelCall, earlier: list[ModelCall]) -> dict[str, Any]:
    row = {
        "role": call.role,
        "agent": call.agent,
        "adapter": call.adapter,
        "reward": call.reward,
        "finish_reason": call.finish_reason,
        "text": call.text,
        "policy_version": call.policy_version,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_k": call.top_k,
        "extends": call.extends,
        "completion_ids": call.completion_ids,
        "logprobs": np.round(call.logprobs, 6).tolist(),
    }
    base = earlier[call.extends] if call.extends is not None and 0 <= call.extends < len(earlier) else None
    if base is None:
        return row | {"prompt_ids": call.prompt_ids, "messages": call.messages}
    # A record is for finding mistakes, so a prompt that does not extend what it claims to is shown as it was.
    base_ids = base.prompt_ids + base.completion_ids
    if call.prompt_ids[: len(base_ids)] == base_ids:
        row["prompt_tail_ids"] = call.prompt_ids[len(base_ids) :]
    else:
        row["prompt_ids"] = call.prompt_ids
    shared = 0
    for old, new in zip(_with_reply(base.messages, base.text), call.messages, strict=False):
        if old != new:
            break
        shared += 1
    return row | {"messages_from": shared, "messages_tail": call.messages[shared:]}


def _with_reply(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """What the next call's messages start with, if the reply was plain text; other replies are stored as they are."""
    return [*messages, {"role": "assistant", "content": text}]


def _to_metrics(row: dict[str, Any], path: Path) -> StepMetrics:
    if not isinstance(row.get("step"), int):
        raise DataError(f"`{path}` holds a line without `step`: {json.dumps(row)[:200]}")
    known = {name: row[name] for name in _METRIC_FIELDS if row.get(name) is not None}
    extra = {name: value for name, value in row.items() if name not in _METRIC_FIELDS and value is not None}
    return StepMetrics(**known, extra=extra)


# ------------------------------------------------------------------------------------------------ lines and files


def _encode(row: dict[str, Any]) -> bytes:
    try:
        return to_json(row, inf_nan_mode="null", fallback=_plain) + b"\n"
    except ValueError:  # not UTF-8
        return json.dumps(_plain(row), separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    """The nearest thing JSON can hold: agents put anything into messages, and recording must never end a run."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    try:
        number = float(value)  # NumPy's scalars, too
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as exc:
                raise DataError(f"line {number} of `{path}` is not JSON: {exc}; remove the line") from exc
            if not isinstance(row, dict):
                raise DataError(f"line {number} of `{path}` must hold an object, got {line[:80]!r}; remove the line")
            yield row


def _open_for_append(path: Path) -> BinaryIO:
    """Open at the end of the last whole line."""
    file = path.open("ab+")
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
    return file


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _first_free(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


# --------------------------------------------------------------------------------------------------- settings


def _escaped(value: Any) -> Any:
    """Keep OmegaConf from reading a literal `${` as an interpolation when it loads the file again."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def _differences(old: Any, new: Any, key: str = "") -> Iterable[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            where = f"{key}.{name}" if key else name
            yield from _differences(old.get(name, _ABSENT), new.get(name, _ABSENT), where)
    elif old != new:
        yield key, old, new


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
