"""Tasks from JSONL files and hub datasets, and the order in which training draws them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from agentscope_tuner.config import DatasetConfig
from agentscope_tuner.errors import ConfigError, DataError, MissingDependencyError
from agentscope_tuner.types import Task

QUERY = "question"
"""The column under which function workflows find the query."""
ANSWER = "answer"
"""The column under which workflows and judges find the reference answer."""

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

_Row = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and its columns."""


def load_tasks(dataset: DatasetConfig) -> list[Task]:
    """Read every task of a dataset, in the dataset's own order.

    `Task.main_query` is the query column. `Task.metadata` holds the row's other columns, unchanged, and under
    `"answer"` the answer column: a column that happens to be called `answer` gives way to the one that was named. A
    query column that is not called `question` stays in `metadata` as well, so that no name of the row is lost.
    Columns `task_id` (text), `init_messages` (a list of objects) and `env_type` (text) also fill the fields of their
    name; of another type they are columns like any other. A row without an id gets `<dataset>-<index>`.

    Raises:
        ConfigError: a setting of `dataset` has no effect for this kind of path, or is missing.
        DataError: the dataset is missing or empty, a row is malformed, or two rows share a `task_id`.
        MissingDependencyError: a hub dataset is asked for and `datasets` is not installed.
    """
    stem, rows = _open(dataset)
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for index, (where, row) in enumerate(islice(rows, dataset.limit)):
        task = _to_task(row, dataset, where=where, default_id=f"{stem}-{index}")
        if task.task_id in places:
            raise DataError(
                f"{where}: `task_id` `{task.task_id}` is already taken by {places[task.task_id]}; give every row its "
                "own, or leave the column out"
            )
        places[task.task_id] = where
        tasks.append(task)
    if not tasks:
        raise DataError(f"dataset `{dataset.path}` is empty; it must hold at least one row")
    if dataset.sets("answer_column") and not any(ANSWER in task.metadata for task in tasks):
        raise ConfigError(
            f"`answer_column` has no effect: no row of `{dataset.path}` has a column `{dataset.answer_column}`; "
            "name one of its columns, or remove it"
        )
    return tasks


def task_to_row(task: Task) -> dict[str, Any]:
    """The plain dict that function workflows receive.

    It is the row that `load_tasks` read, with every column under its own name; `question` and `answer` are always
    there under these names too, whatever `query_column` and `answer_column` are (`answer` where the row has one).
    """
    return {**task.metadata, QUERY: task.main_query}


def planned_steps(dataset: DatasetConfig, n_tasks: int, batch_size: int) -> int:
    """How many steps a run takes: `total_steps`, or else as many as `total_epochs` passes fill.

    A last batch that the passes do not fill counts as a step; the stream goes on into the next epoch for it.
    """
    if dataset.total_steps is not None:
        return dataset.total_steps
    return ceil(dataset.total_epochs * n_tasks / batch_size)


class TaskStream:
    """Tasks without end, epoch after epoch, each epoch holding every task once.

    The order of an epoch depends on `seed` and the epoch's number alone, so `position` restores a stream exactly.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, shuffle: bool = True, position: int = 0) -> None:
        """Start after the first `position` tasks of the stream.

        Raises:
            DataError: there are no tasks.
            ValueError: `position` is negative.
        """
        if not tasks:
            raise DataError("there are no tasks to draw from, got an empty list; pass at least one task")
        if position < 0:
            raise ValueError(f"`position` must be at least 0, got {position}; it counts the tasks taken so far")
        self.tasks = list(tasks)
        self._seed = seed
        self._shuffle = shuffle
        self._position = position
        self._order = self._order_of(self.epoch)

    @property
    def position(self) -> int:
        """Tasks taken so far."""
        return self._position

    @property
    def epoch(self) -> int:
        """The number, from 0, of the epoch that the next task belongs to."""
        return self._position // len(self.tasks)

    def take(self, n: int) -> list[Task]:
        """The next `n` tasks. They may reach into further epochs, and then a task may be among them twice.

        Raises:
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"`n` must be at least 0, got {n}; a stream does not run backwards")
        taken: list[Task] = []
        while len(taken) < n:
            start = self._position % len(self.tasks)
            part = self._order[start : start + n - len(taken)]
            taken.extend(self.tasks[i] for i in part)
            self._position += len(part)
            if start + len(part) == len(self.tasks):
                self._order = self._order_of(self.epoch)
        return taken

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.tasks)))
        if self._shuffle:
            # Text seeds are hashed with SHA-512, so neighbouring seeds and epochs are unrelated on every machine.
            random.Random(f"{self._seed}-{epoch}").shuffle(order)
        return order


# ---------------------------------------------------------------------------------------------------- reading rows


def _open(dataset: DatasetConfig) -> tuple[str, Iterator[_Row]]:
    """What to call the tasks, and the rows."""
    path = Path(dataset.path).expanduser()
    if path.is_dir():
        path = _split_of_folder(path, dataset)
    elif path.is_file() or path.suffix == ".jsonl":
        for key in ("name", "split"):
            if dataset.sets(key):
                raise ConfigError(f"`{key}` has no effect: `{dataset.path}` is a file; remove it")
    elif _HUB_NAME.fullmatch(dataset.path):
        return dataset.path.rpartition("/")[2], _read_hub(dataset)
    if not path.is_file():
        raise DataError(
            f"dataset `{dataset.path}` does not exist (looked for `{path.absolute()}`); give a `.jsonl` file, a "
            "folder that holds `<split>.jsonl`, or the name of a hub dataset"
        )
    if path.suffix != ".jsonl":
        raise DataError(f"dataset `{path}` must be a `.jsonl` file, got `{path.name}`; write one JSON object per line")
    return path.stem, _read_jsonl(path)


def _split_of_folder(folder: Path, dataset: DatasetConfig) -> Path:
    if dataset.name is not None:
        raise ConfigError(f"`name` has no effect: `{dataset.path}` is a folder; remove it")
    there = ", ".join(f"`{file.stem}`" for file in sorted(folder.glob("*.jsonl"))) or "none"
    if dataset.split is None:
        raise ConfigError(f"`split` is required for the folder `{dataset.path}`, got None; its splits are: {there}")
    path = folder / f"{dataset.split}.jsonl"
    if not path.is_file():
        raise DataError(
            f"folder `{dataset.path}` holds no `{dataset.split}.jsonl`; its splits are: {there}; set `split`, or add "
            "the file"
        )
    return path


def _read_jsonl(path: Path) -> Iterator[_Row]:
    # Read as bytes: a line that is not UTF-8 is then reported by its number, like any other malformed line.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"`{path}`, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as exc:
                raise DataError(f"{where}: not valid JSON: {exc}; every line must be one JSON object") from exc
            if not isinstance(row, dict):
                raise DataError(f"{where}: every line must be one JSON object, got {_kind(row)}; name its columns")
            yield where, row


def _read_hub(dataset: DatasetConfig) -> Iterator[_Row]:
    if dataset.split is None:
        raise ConfigError(f"`split` is required for the hub dataset `{dataset.path}`, got None; name one, as `train`")
    try:
        from datasets import load_dataset
    except ImportError as exc:
        raise MissingDependencyError(
            f"reading `{dataset.path}` from the hub needs the package `datasets`; install it with `pip install "
            "datasets`, or set `path` to a `.jsonl` file"
        ) from exc
    try:
        rows = load_dataset(dataset.path, name=dataset.name, split=dataset.split)
    except Exception as exc:  # many kinds: unknown name, configuration or split, no network, no permission
        raise DataError(
            f"hub dataset `{dataset.path}` (`name` {dataset.name!r}, `split` {dataset.split!r}) cannot be loaded: "
            f"{type(exc).__name__}: {exc}\nIf a local file or folder was meant: `{Path(dataset.path).absolute()}` "
            "does not exist. If not: check the names, and that the hub can be reached"
        ) from exc
    for index, row in enumerate(rows):
        yield f"`{dataset.path}`, split `{dataset.split}`, row {index}", dict(row)


def _to_task(row: dict[str, Any], dataset: DatasetConfig, *, where: str, default_id: str) -> Task:
    if dataset.query_column not in row:
        columns = ", ".join(f"`{column}`" for column in row) or "none"
        raise DataError(
            f"{where}: there is no column `{dataset.query_column}`; its columns are: {columns}; set `query_column` to "
            "the one that holds the query"
        )
    query = row[dataset.query_column]
    if not isinstance(query, str):
        raise DataError(
            f"{where}: column `{dataset.query_column}` must be text, got {_kind(query)}; correct the row, or set "
            "`query_column` to another column"
        )
    hidden = {ANSWER, QUERY} if dataset.query_column == QUERY else {ANSWER}
    metadata = {column: value for column, value in row.items() if column not in hidden}
    if dataset.answer_column in row:
        metadata[ANSWER] = row[dataset.answer_column]
    task_id, messages, env_type = row.get("task_id"), row.get("init_messages"), row.get("env_type")
    fields: dict[str, Any] = {"task_id": task_id if isinstance(task_id, str) and task_id else default_id}
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        fields["init_messages"] = messages
    if isinstance(env_type, str):
        fields["env_type"] = env_type
    return Task(main_query=query, metadata=metadata, **fields)


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} `{value!r:.60}`"
