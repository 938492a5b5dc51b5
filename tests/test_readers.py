"""Reading tasks, and drawing them in an order that can be restored."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentscope_tuner.config import DatasetConfig
from agentscope_tuner.errors import ConfigError, DataError, MissingDependencyError
from agentscope_tuner.readers import TaskStream, load_tasks, planned_steps, task_to_row
from agentscope_tuner.types import Task

GSM8K_ROWS = [
    {"question": "How many?", "answer": "6 * 7 = 42\n#### 42"},
    {"question": "Wie viele Äpfel? 🍎\u2028", "answer": "#### 3", "level": 2, "tags": ["a", None]},
]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def read(path: Path | str, **settings: Any) -> list[Task]:
    return load_tasks(DatasetConfig(path=str(path), **settings))


# ------------------------------------------------------------------------------------------------------------ files


def test_rows_become_tasks(tmp_path: Path) -> None:
    first, second = read(write(tmp_path / "gsm.jsonl", *GSM8K_ROWS))
    assert first == Task(main_query="How many?", task_id="gsm-0", metadata={"answer": "6 * 7 = 42\n#### 42"})
    assert second.task_id == "gsm-1"
    assert second.main_query == "Wie viele Äpfel? 🍎\u2028"
    assert second.metadata == {"answer": "#### 3", "level": 2, "tags": ["a", None]}


def test_function_workflows_get_the_row_back(tmp_path: Path) -> None:
    assert [task_to_row(task) for task in read(write(tmp_path / "a.jsonl", *GSM8K_ROWS))] == GSM8K_ROWS


def test_custom_columns_keep_their_names_beside_the_usual_ones(tmp_path: Path) -> None:
    row = {"problem": "1+1?", "solution": "2", "answer": "unused", "question": "unused"}
    (task,) = read(write(tmp_path / "a.jsonl", row), query_column="problem", answer_column="solution")
    assert task.main_query == "1+1?"
    assert task.metadata["answer"] == "2"
    assert task_to_row(task) == {"problem": "1+1?", "solution": "2", "answer": "2", "question": "1+1?"}


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"question": "seen"})
    write(tmp_path / "test.jsonl", {"question": "held out"})
    assert [task.main_query for task in read(tmp_path)] == ["seen"]
    (task,) = read(tmp_path, split="test")
    assert (task.main_query, task.task_id) == ("held out", "test-0")


def test_columns_named_like_fields_fill_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    row = {"question": "q", "task_id": "t7", "init_messages": messages, "env_type": "shop"}
    (task,) = read(write(tmp_path / "a.jsonl", row))
    assert (task.task_id, task.init_messages, task.env_type) == ("t7", messages, "shop")
    assert task_to_row(task) == row


def test_columns_named_like_fields_but_of_another_type_stay_columns(tmp_path: Path) -> None:
    row = {"question": "q", "task_id": 7, "init_messages": "hi", "env_type": None}
    (task,) = read(write(tmp_path / "a.jsonl", row))
    assert (task.task_id, task.init_messages, task.env_type) == ("a-0", [], "no_env")
    assert task_to_row(task) == row


def test_an_answer_is_optional(tmp_path: Path) -> None:
    (task,) = read(write(tmp_path / "a.jsonl", {"question": "q"}))
    assert "answer" not in task.metadata


def test_blank_lines_and_a_byte_order_mark_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a"}\r\n\r\n   \n{"question": "b"}')
    assert [(task.main_query, task.task_id) for task in read(path)] == [("a", "a-0"), ("b", "a-1")]


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "a"}, {"question": "b"}, "broken")
    assert [task.main_query for task in read(path, limit=2)] == ["a", "b"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
rows = st.fixed_dictionaries(
    {"question": st.text()}, optional={"answer": json_values, "env_type": json_values, "init_messages": json_values}
)
extra_columns = st.dictionaries(st.text().filter(lambda name: name != "task_id"), json_values, max_size=3)


@given(st.lists(st.builds(lambda row, extra: {**extra, **row}, rows, extra_columns), min_size=1, max_size=5))
def test_any_jsonl_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, table: list[Any]) -> None:
    path = write(tmp_path_factory.mktemp("data") / "a.jsonl", *table)
    tasks = read(path)
    assert [task_to_row(task) for task in tasks] == table
    assert [task.main_query for task in tasks] == [row["question"] for row in table]


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "a"', "not valid JSON: Expecting"),
        ('["a"]', "must be one JSON object, got list"),
        ("null", "must be one JSON object, got null"),
        ("[" * 100_000, "not valid JSON"),
        ('{"Question": "a", "id": 1}', "no column `question`; its columns are: `Question`, `id`; set `query_column`"),
        ("{}", "no column `question`; its columns are: none"),
        ('{"question": 3}', "column `question` must be text, got int `3`"),
        ('{"question": null}', "column `question` must be text, got null"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "fine"}, "", line, {"question": "fine"})
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"`{path}`, line 3: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "a"}\n{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 2: .*utf-8"):
        read(path)


def test_two_rows_with_one_id_are_refused(tmp_path: Path) -> None:
    row = {"question": "q", "task_id": "a-2"}
    path = write(tmp_path / "a.jsonl", row, {"question": "q"}, {"question": "q"})
    with pytest.raises(DataError, match=r"line 3: `task_id` `a-2` is already taken by .*line 1"):
        read(path)


def test_missing_and_empty_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl` does not exist"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is empty"):
        read(write(tmp_path / "a.jsonl", ""))
    (tmp_path / "a.csv").write_text("question\nq\n")
    with pytest.raises(DataError, match=r"must be a `\.jsonl` file, got `a\.csv`"):
        read(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"holds no `dev\.jsonl`; its splits are: `a`"):
        read(tmp_path, split="dev")


def test_settings_without_effect_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", {"question": "q"})
    with pytest.raises(ConfigError, match="`name` has no effect"):
        read(path, name="main")
    with pytest.raises(ConfigError, match="`split` has no effect"):
        read(path, split="test")
    with pytest.raises(ConfigError, match="`name` has no effect"):
        read(tmp_path, name="main")
    with pytest.raises(ConfigError, match=r"`split` is required .* its splits are: `train`"):
        read(tmp_path, split=None)
    with pytest.raises(ConfigError, match="`answer_column` has no effect"):
        read(path, answer_column="solution")


# -------------------------------------------------------------------------------------------------------------- hub


def test_a_hub_dataset_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"question": f"q{i}", "answer": f"#### {i}"} for i in range(5)])
    splits = {("openai/gsm8k", "main", "test"): table}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *, name, split: splits[path, name, split])
    tasks = read("openai/gsm8k", name="main", split="test", limit=2)
    assert [task_to_row(task) for task in tasks] == table.to_list()[:2]
    assert [task.task_id for task in tasks] == ["gsm8k-0", "gsm8k-1"]


def test_a_hub_dataset_that_cannot_be_had_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        read("nobody/no-such-dataset")
    for part in ("`nobody/no-such-dataset`", "`split` 'train'", "local file or folder", "does not exist", "reached"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="`split` is required"):
        read("nobody/no-such-dataset", split=None)


def test_the_hub_without_its_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install datasets"):
        read("openai/gsm8k")


# ----------------------------------------------------------------------------------------------------------- stream

streams = st.fixed_dictionaries({"seed": st.integers(0, 2**32), "shuffle": st.booleans()})


def numbered(n: int) -> list[Task]:
    return [Task(task_id=str(i)) for i in range(n)]


def ids(tasks: list[Task]) -> list[int]:
    return [int(task.task_id) for task in tasks]


@given(streams, st.integers(1, 12), st.lists(st.integers(0, 30), max_size=6))
def test_chunks_do_not_change_the_order(kind: dict[str, Any], n_tasks: int, chunks: list[int]) -> None:
    whole = TaskStream(numbered(n_tasks), **kind).take(sum(chunks))
    stream = TaskStream(numbered(n_tasks), **kind)
    assert [task for n in chunks for task in stream.take(n)] == whole
    assert stream.position == sum(chunks)


@given(streams, st.integers(1, 12), st.integers(0, 40), st.integers(0, 40))
def test_position_restores_a_stream(kind: dict[str, Any], n_tasks: int, before: int, after: int) -> None:
    stream = TaskStream(numbered(n_tasks), **kind)
    stream.take(before)
    restored = TaskStream(numbered(n_tasks), **kind, position=stream.position)
    assert restored.epoch == stream.epoch == before // n_tasks
    assert restored.take(after) == stream.take(after)


@given(streams, st.integers(1, 12), st.integers(1, 4))
def test_every_epoch_holds_every_task_once(kind: dict[str, Any], n_tasks: int, epochs: int) -> None:
    stream = TaskStream(numbered(n_tasks), **kind)
    for _ in range(epochs):
        assert Counter(ids(stream.take(n_tasks))) == Counter(range(n_tasks))


def test_epochs_and_seeds_differ_and_are_fixed() -> None:
    stream = TaskStream(numbered(8), seed=3)
    first, second = ids(stream.take(8)), ids(stream.take(8))
    # Written out: resuming a run with another version of Python, or of this package, must not reorder its tasks.
    assert first == [1, 4, 3, 0, 5, 2, 7, 6]
    assert second != first
    assert ids(TaskStream(numbered(8), seed=4).take(8)) != first


def test_without_shuffling_the_order_is_the_dataset_s() -> None:
    assert ids(TaskStream(numbered(3), shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_stream_refuses_what_makes_no_sense() -> None:
    with pytest.raises(DataError, match="no tasks"):
        TaskStream([])
    with pytest.raises(ValueError, match="`position` must be at least 0, got -1"):
        TaskStream(numbered(1), position=-1)
    with pytest.raises(ValueError, match="`n` must be at least 0, got -1"):
        TaskStream(numbered(1)).take(-1)


@pytest.mark.parametrize(
    ("settings", "n_tasks", "batch_size", "steps"),
    [
        ({}, 10, 5, 2),
        ({}, 10, 4, 3),
        ({}, 3, 32, 1),
        ({"total_epochs": 3}, 10, 4, 8),
        ({"total_steps": 7}, 10, 4, 7),
    ],
)
def test_planned_steps(settings: dict[str, int], n_tasks: int, batch_size: int, steps: int) -> None:
    assert planned_steps(DatasetConfig(path="x", **settings), n_tasks, batch_size) == steps
