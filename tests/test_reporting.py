"""Reporting: what is written is read back, what is shown is right, and a killed run can go on."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentscope_tuner.config import TunerConfig, load_config, parse_config
from agentscope_tuner.errors import ConfigError, DataError
from agentscope_tuner.reporting import (
    ProgressView,
    RunFolder,
    TensorBoardWriter,
    draw_reward,
    read_episodes,
    terminal_curve,
)
from agentscope_tuner.types import (
    Episode,
    EpisodeError,
    EvalResult,
    ModelCall,
    StepMetrics,
    Task,
    TuneResult,
    WorkflowTask,
)


def make_config(**changes: Any) -> TunerConfig:
    content: dict[str, Any] = {
        "experiment_name": "demo",
        "model": {"model_path": "tiny-agent"},
        "train_dataset": {"path": "tasks.jsonl"},
    }
    for key, value in changes.items():
        block = content
        *blocks, last = key.split("__")
        for name in blocks:
            block = block.setdefault(name, {})
        block[last] = value
    return parse_config(content)


def make_call(messages: list[dict[str, Any]], prompt_ids: list[int], **changes: Any) -> ModelCall:
    call = ModelCall(
        role="default",
        messages=messages,
        tools=None,
        prompt_ids=prompt_ids,
        completion_ids=[7, 8, 9],
        logprobs=[-0.5, -1.25, -0.0000004],
        temperature=1.0,
        top_p=0.9,
        top_k=5,
        finish_reason="stop",
        text="hello",
        policy_version=2,
        agent="Friday",
        reward=0.25,
    )
    return replace(call, **changes)


def make_episode(calls: list[ModelCall], **changes: Any) -> Episode:
    task = WorkflowTask(task=Task(main_query="2 + 2?", task_id="t1"), episode_id="step1-t1-0", group_index=3)
    return replace(Episode(task, calls, reward={"default": 1.0}, time_s=0.5), **changes)


# ------------------------------------------------------------------------------------------------- run folder


def test_a_new_run_stores_its_configuration(tmp_path: Path) -> None:
    config = make_config(algorithm__learning_rate=1e-5, algorithm__adam_betas=[0.8, 0.99], workflow__timeout_s=3)
    folder = RunFolder(tmp_path / "deep" / "demo")
    assert folder.prepare(config) is False
    assert load_config(folder.config_path) == config


@given(st.lists(st.text(alphabet="${}\\x:a#'\n é1", min_size=1), max_size=3), st.text(alphabet="${\\}y", min_size=1))
@settings(max_examples=150, deadline=None)
def test_any_text_in_the_configuration_survives(
    tmp_path_factory: pytest.TempPathFactory, stop: list[str], path: str
) -> None:
    config = make_config(model__stop=stop, model__model_path=path)
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.prepare(config)
    assert load_config(folder.config_path) == config


def test_resume_accepts_what_changes_no_result(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "demo")
    folder.prepare(make_config(train_dataset__total_steps=10))
    folder.append_metrics(StepMetrics(1))
    longer = make_config(
        train_dataset__total_steps=20,
        algorithm__save_interval_steps=5,
        algorithm__eval_interval_steps=5,
        eval_dataset__path="tasks.jsonl",
    )
    with pytest.raises(ConfigError, match="`eval_dataset`: stored null, given"):
        folder.prepare(longer)
    longer = make_config(
        train_dataset__total_steps=20,
        algorithm__save_interval_steps=5,
        checkpoint__resume="must",
        checkpoint__keep=7,
        monitor_type="none",
        output_dir="elsewhere",
        project_name="other",
        workflow__timeout_s=9,
        engine__threads=1,
    )
    assert folder.prepare(longer) is True
    assert load_config(folder.config_path) == longer


def test_settings_of_a_start_that_failed_do_not_bind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "demo")
    folder.prepare(make_config(engine__device="cuda"))
    corrected = make_config(engine__device="cpu")
    assert folder.prepare(corrected) is False
    assert load_config(folder.config_path) == corrected


def test_resume_lists_every_setting_that_changes_results(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "demo")
    folder.prepare(make_config(seed=1, auxiliary_models__judge={"model_path": "a"}))
    folder.append_metrics(StepMetrics(1))
    stored = folder.config_path.read_bytes()
    given_config = make_config(seed=2, algorithm__learning_rate=0.5, workflow__timeout_s=9, model__stop=["é"])
    with pytest.raises(ConfigError) as caught:
        folder.prepare(given_config)
    lines = str(caught.value).splitlines()
    assert lines[1:5] == [
        "  - `seed`: stored 1, given 2",
        '  - `model.stop`: stored [], given ["é"]',
        next(line for line in lines if line.startswith("  - `auxiliary_models.judge`: stored {")),
        "  - `algorithm.learning_rate`: stored 1e-06, given 0.5",
    ]
    assert "`experiment_name`" in lines[5]
    assert "`checkpoint.resume=never`" in lines[5]
    assert folder.config_path.read_bytes() == stored


def test_never_moves_the_old_run_aside(tmp_path: Path) -> None:
    (tmp_path / "demo.1").mkdir()
    folder = RunFolder(tmp_path / "demo")
    folder.prepare(make_config(seed=1))
    folder.append_metrics(StepMetrics(1, reward_mean=0.5))
    assert folder.prepare(make_config(seed=2, checkpoint__resume="never")) is False
    assert folder.read_metrics() == []
    assert RunFolder(tmp_path / "demo.2").read_metrics() == [StepMetrics(1, reward_mean=0.5)]
    assert load_config(tmp_path / "demo.2" / "config.yaml").seed == 1


def test_must_needs_a_run(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    for name in ("demo", "absent"):
        with pytest.raises(ConfigError, match=r"no run in .*resume=auto"):
            RunFolder(tmp_path / name).prepare(make_config(checkpoint__resume="must"))


@pytest.mark.parametrize("content", ["model: [", "seed: -1\n", None])
def test_an_unreadable_stored_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics(StepMetrics(1))
    if content is not None:
        folder.config_path.write_text(content)
    with pytest.raises(ConfigError, match=r"(?s)cannot be continued: .*resume=never"):
        folder.prepare(make_config())


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "demo").prepare(make_config())


def test_no_environment_variable_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_API_KEY", "sk-do-not-write-me")
    with RunFolder(tmp_path / "demo") as folder:
        folder.prepare(make_config())
        folder.append_metrics(StepMetrics(1))
        folder.write_episode(make_episode([make_call([], [1])]), phase="train", step=1)
    writer = TensorBoardWriter(folder.tensorboard_dir)
    writer.write(StepMetrics(1, reward_mean=1.0))
    writer.close()
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert not any(b"sk-do-not-write-me" in path.read_bytes() for path in files)


# ---------------------------------------------------------------------------------------------------- metrics

numbers = st.floats(allow_nan=False, allow_infinity=False)
step_metrics = st.builds(
    StepMetrics,
    step=st.integers(0, 10**7),
    reward_mean=st.none() | numbers,
    eval_reward_mean=st.none() | numbers,
    episodes=st.integers(0, 10**6),
    time_rollout_s=numbers,
    loss=st.none() | numbers,
    extra=st.dictionaries(st.text(min_size=1).map(lambda name: f"workflow/{name}"), numbers),
)


@given(st.lists(step_metrics, max_size=4))
@settings(max_examples=60, deadline=None)
def test_metrics_come_back_as_they_went(tmp_path_factory: pytest.TempPathFactory, history: list[StepMetrics]) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    for metrics in history:
        folder.append_metrics(metrics)
    assert folder.read_metrics() == history


def test_metrics_are_flat_and_strict_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics(
        StepMetrics(3, reward_mean=math.nan, loss=math.inf, extra={"workflow/a": 1.5, "judge/b": math.nan})
    )
    (line,) = folder.metrics_path.read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert (row["step"], row["reward_mean"], row["loss"], row["grad_norm"]) == (3, None, None, None)
    assert (row["workflow/a"], row["judge/b"]) == (1.5, None)
    assert "extra" not in row
    assert folder.read_metrics() == [StepMetrics(3, extra={"workflow/a": 1.5})]


def test_extra_must_not_hide_a_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got loss"):
        RunFolder(tmp_path).append_metrics(StepMetrics(1, extra={"loss": 1.0}))


def test_a_line_cut_by_a_kill_is_skipped_and_then_replaced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    history = [StepMetrics(step, reward_mean=step / 10) for step in (1, 2, 3)]
    for metrics in history:
        folder.append_metrics(metrics)
    whole = folder.metrics_path.read_bytes()
    last_line = whole.rindex(b"\n", 0, -1) + 1
    for end in (last_line + 1, len(whole) - 9, len(whole) - 1):
        folder.metrics_path.write_bytes(whole[:end])
        assert folder.read_metrics() == history[:2]
        folder.append_metrics(history[2])
        assert folder.metrics_path.read_bytes() == whole


def test_a_broken_line_elsewhere_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for broken in (b'{"step": 1\n', b"[]\n", b'{"loss": 1}\n'):
        folder.metrics_path.write_bytes(broken + b'{"step": 2}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl"):
            folder.read_metrics()


def test_rewind_forgets_later_steps(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        for step in range(4):
            folder.append_metrics(StepMetrics(step, reward_mean=step / 10))
            folder.write_episode(make_episode([]), phase="eval_greedy", step=step)
            folder.write_episode(make_episode([]), phase="train", step=step + 1)
        with folder.metrics_path.open("ab") as file:
            file.write(b'{"step": 4, "rew')
        folder.rewind(2)
        assert [metrics.step for metrics in folder.read_metrics()] == [0, 1, 2]
        assert sorted(path.name for path in folder.episodes_dir.iterdir()) == [
            "eval_greedy_000000.jsonl",
            "eval_greedy_000001.jsonl",
            "eval_greedy_000002.jsonl",
            "train_000001.jsonl",
            "train_000002.jsonl",
        ]
        folder.write_episode(make_episode([]), phase="train", step=3)
        assert len(read_episodes(folder.episodes_dir / "train_000003.jsonl")) == 1
        folder.rewind(-1)
        assert folder.read_metrics() == []
        assert list(folder.episodes_dir.iterdir()) == []


def test_rewind_of_an_empty_folder_does_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path / "absent").rewind(0)
    assert not (tmp_path / "absent").exists()


# --------------------------------------------------------------------------------------------------- episodes


@st.composite
def call_lists(draw: st.DrawFn) -> list[ModelCall]:
    """Calls as an agent makes them: each starts anew, extends an earlier one, or claims to and does not."""
    ids = st.lists(st.integers(0, 200_000), max_size=5)
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool"]), "content": st.none() | st.text(max_size=5)},
        optional={"tool_calls": st.lists(st.dictionaries(st.text(max_size=3), st.integers()), max_size=2)},
    )
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(0, 4))):
        new = draw(st.lists(message, max_size=3))
        extends = draw(st.none() | st.integers(0, index - 1)) if index else None
        prompt_ids, messages = draw(ids), new
        if extends is not None:
            base = calls[extends]
            reply = draw(st.just({"role": "assistant", "content": base.text}) | message)
            messages = draw(st.sampled_from([[*base.messages, reply, *new], base.messages[:1] + new]))
            if draw(st.booleans()):
                prompt_ids = base.prompt_ids + base.completion_ids + prompt_ids
        call = make_call(copy.deepcopy(messages), prompt_ids, extends=extends, completion_ids=draw(ids))
        calls.append(replace(call, text=draw(st.text(max_size=5))))
    return calls


@given(call_lists())
@settings(max_examples=150, deadline=None)
def test_episodes_come_back_in_full(tmp_path_factory: pytest.TempPathFactory, calls: list[ModelCall]) -> None:
    with RunFolder(tmp_path_factory.mktemp("run")) as folder:
        folder.write_episode(make_episode(calls), phase="train", step=1)
    (row,) = read_episodes(folder.episodes_dir / "train_000001.jsonl")
    read = [(c["messages"], c["prompt_ids"], c["completion_ids"], c["text"], c["extends"]) for c in row["calls"]]
    assert read == [(c.messages, c.prompt_ids, c.completion_ids, c.text, c.extends) for c in calls]


def test_an_episode_line_holds_what_is_needed_to_understand_it(tmp_path: Path) -> None:
    error = EpisodeError("RewardError", "no reward", "Traceback ...")
    episode = make_episode([make_call([{"role": "user", "content": "hi"}], [1, 2])], metrics={"workflow/x": 1.0})
    with RunFolder(tmp_path) as folder:
        folder.write_episode(episode, phase="eval_sampled", step=12)
        folder.write_episode(make_episode([], reward=None, error=error), phase="eval_sampled", step=12)
        # Still open: what a crash leaves behind is what is on disk now.
        good, failed = read_episodes(tmp_path / "episodes" / "eval_sampled_000012.jsonl")
    (call,) = good.pop("calls")
    assert good == {
        "episode_id": "step1-t1-0",
        "group_index": 3,
        "task": {"query": "2 + 2?", "id": "t1"},
        "reward": {"default": 1.0},
        "is_success": None,
        "error": None,
        "metrics": {"workflow/x": 1.0},
        "opponents": {},
        "replayed": 0,
        "time_s": 0.5,
    }
    assert call == {
        "role": "default",
        "agent": "Friday",
        "adapter": "",
        "reward": 0.25,
        "finish_reason": "stop",
        "text": "hello",
        "policy_version": 2,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "extends": None,
        "completion_ids": [7, 8, 9],
        "logprobs": [-0.5, -1.25, 0.0],
        "prompt_ids": [1, 2],
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert failed["reward"] is None
    assert failed["error"] == {"kind": "RewardError", "message": "no reward", "traceback": "Traceback ..."}


def test_a_long_conversation_is_stored_once(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "x" * 2000}]
    calls: list[ModelCall] = []
    prompt_ids = list(range(1000))
    for turn in range(8):
        calls.append(make_call(messages, prompt_ids, extends=turn - 1 if turn else None))
        messages = [*messages, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "next"}]
        prompt_ids = [*prompt_ids, 7, 8, 9, 10, 11]
    with RunFolder(tmp_path) as folder:
        folder.write_episode(make_episode(calls[:1]), phase="train", step=1)
        folder.write_episode(make_episode(calls), phase="train", step=2)
    one, eight = (len(path.read_bytes()) for path in sorted(folder.episodes_dir.iterdir()))
    assert eight < one + 8 * 400
    (row,) = read_episodes(folder.episodes_dir / "train_000002.jsonl")
    assert row["calls"][-1]["prompt_ids"] == calls[-1].prompt_ids
    assert row["calls"][-1]["messages"] == calls[-1].messages


def test_what_json_cannot_hold_does_not_end_the_run(tmp_path: Path) -> None:
    odd: dict[Any, Any] = {"role": "user", "content": "\ud800", 1: {2}, "path": Path("a"), "nan": math.nan}
    with RunFolder(tmp_path) as folder:
        folder.write_episode(make_episode([make_call([odd], [1])]), phase="train", step=1)
    (row,) = read_episodes(folder.episodes_dir / "train_000001.jsonl")
    expected = {"role": "user", "content": "\ud800", "1": "{2}", "path": "a", "nan": None}
    assert row["calls"][0]["messages"] == [expected]


def test_episodes_cut_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "episodes" / "train_000001.jsonl"
    with RunFolder(tmp_path) as folder:
        for _ in range(2):
            folder.write_episode(make_episode([make_call([], [1])]), phase="train", step=1)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_episodes(path)) == 1
    with RunFolder(tmp_path) as folder:
        folder.write_episode(make_episode([make_call([], [1])]), phase="train", step=1)
    assert len(read_episodes(path)) == 2


# ------------------------------------------------------------------------------------------------ tensorboard


def scalars(logdir: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(logdir))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "tb")
    writer.write(StepMetrics(0, eval_reward_mean=0.25, eval_reward_sampled_mean=0.5))
    metrics = StepMetrics(1, reward_mean=0.75, loss=math.nan, tokens_sampled=100, extra={"workflow/turns": 2.0})
    writer.write(metrics)
    # Before it is closed: TensorBoard watches running runs.
    read = scalars(tmp_path / "tb")
    writer.close()
    assert read["eval/reward_greedy"] == [(0, 0.25)]
    assert read["eval/reward_sampled"] == [(0, 0.5)]
    assert read["reward/mean"] == [(1, 0.75)]
    assert read["train/tokens_sampled"] == [(0, 0.0), (1, 100.0)]
    assert read["workflow/turns"] == [(1, 2.0)]
    assert "train/loss" not in read
    assert {tag.split("/")[0] for tag in read} == {"reward", "eval", "time", "train", "workflow"}


def test_a_resumed_run_supersedes_later_events(tmp_path: Path) -> None:
    for steps, reward in (((1, 2, 3, 4), 0.0), ((3, 4), 1.0)):
        writer = TensorBoardWriter(tmp_path)
        for step in steps:
            writer.write(StepMetrics(step, reward_mean=reward))
        writer.close()
        time.sleep(0.002)
    assert scalars(tmp_path)["reward/mean"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]


def test_a_writer_that_wrote_nothing_leaves_no_file(tmp_path: Path) -> None:
    TensorBoardWriter(tmp_path / "tb").close()
    assert not (tmp_path / "tb").exists()


# ----------------------------------------------------------------------------------------------------- curves


def make_history(steps: int) -> list[StepMetrics]:
    history = [StepMetrics(0, eval_reward_mean=0.0, eval_reward_sampled_mean=0.0)]
    for step in range(1, steps + 1):
        held_out = step / steps if step % 5 == 0 else None
        history.append(
            StepMetrics(
                step,
                reward_mean=step / steps,
                eval_reward_mean=held_out,
                eval_reward_sampled_mean=held_out,
                episodes=8,
                episodes_failed=1,
                groups=4,
                zero_variance_groups=step % 4,
            )
        )
    return history


@pytest.mark.parametrize("steps", [0, 1, 5, 60])
def test_the_picture_has_its_size_and_shows_the_curve(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "reward.png"
    draw_reward(make_history(steps), path, "demo $x_1$ \u5b9e")
    with Image.open(path) as image:
        assert image.size == (1000, 700)
        colors = {color for _, color in image.convert("RGB").getcolors(700_000) or []}
    assert (0xD1, 0x49, 0x5B) in colors
    assert ((0x4C, 0x78, 0xA8) in colors) == (steps > 0)
    assert os.listdir(tmp_path) == ["reward.png"]


def test_roles_are_drawn_where_there_are_several(tmp_path: Path) -> None:
    def picture(*roles: str) -> bytes:
        rewards = {f"reward_mean/{role}": 0.1 * n for n, role in enumerate(roles)}
        history = [StepMetrics(step, reward_mean=0.5, extra=rewards) for step in range(3)]
        draw_reward(history, tmp_path / "reward.png", "roles")
        return (tmp_path / "reward.png").read_bytes()

    assert picture() == picture("default"), "the only role's reward is the reward"
    assert len({picture(), picture("seer", "witch"), picture("seer", "hunter")}) == 3


def test_a_picture_without_rewards_is_drawn(tmp_path: Path) -> None:
    draw_reward([], tmp_path / "reward.png", "empty")
    assert (tmp_path / "reward.png").stat().st_size > 0


def test_the_terminal_curve_rises_with_the_reward() -> None:
    lines = terminal_curve(make_history(20), width=50, height=8).splitlines()
    assert len(lines) == 10
    assert max(len(line) for line in lines) == 50
    assert lines[0].startswith("1.0")
    assert lines[7].startswith("0.0")
    assert lines[8].split() == ["0", "step", "20"]
    braille = [
        (row, column) for row, line in enumerate(lines[:8]) for column, c in enumerate(line) if "\u2800" < c <= "\u28ff"
    ]
    leftmost, rightmost = min(braille, key=lambda dot: dot[1]), max(braille, key=lambda dot: dot[1])
    assert leftmost[0] == 7
    assert rightmost[0] <= 1
    # Held-out points at steps 0, 5, 10, 15, 20 rise, too.
    marks = [(column, row) for row, line in enumerate(lines[:8]) for column, c in enumerate(line) if c == "●"]
    assert len(marks) == 5
    assert [row for _, row in sorted(marks)] == sorted((row for _, row in marks), reverse=True)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(30, 100), st.integers(1, 20), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_terminal_curve_fits_its_box(rewards: list[float], width: int, height: int, held_out: bool) -> None:
    history = [
        StepMetrics(step, reward_mean=reward, eval_reward_mean=reward if held_out else None)
        for step, reward in enumerate(rewards)
    ]
    lines = terminal_curve(history, width, height).splitlines()
    assert len(lines) == height + 2
    assert max(map(len, lines[:-1])) <= width


def test_a_run_without_rewards_has_no_curve() -> None:
    assert terminal_curve([StepMetrics(0, reward_mean=math.nan)]) == "no rewards to draw"


# --------------------------------------------------------------------------------------------------- progress


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal_console() -> Console:
    return Console(force_terminal=True, file=io.StringIO(), width=100, color_system=None, _environ={"TERM": "xterm"})


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_output_is_one_line_per_step() -> None:
    console, clock = plain_console(), Clock()
    with ProgressView(50, console, clock=clock) as view:
        clock.now += 60
        view.step_done(StepMetrics(0, eval_reward_mean=0.125))
        for step in range(1, 13):
            view.phase("rollout", 128)
            clock.now += 1.5 if step > 2 else 100.0
            view.tokens(1000)
            view.episode_done(failed=False)
            metrics = StepMetrics(step, reward_mean=0.714, episodes=128, groups=16, zero_variance_groups=3)
            metrics = replace(metrics, tokens_sampled=24_690, time_rollout_s=2.0)
            if step == 12:
                metrics = replace(metrics, eval_reward_mean=0.8, eval_reward_sampled_mean=0.76, reward_mean=0.0123)
            view.step_done(metrics)
        view.message("saved [step_12] :smile:")
    lines = output(console).splitlines()
    assert len(lines) == 14
    assert lines[0] == "step 0/50  held-out 0.12/-"
    # (100 + 100) / 2 s for each of 48 steps
    assert lines[2] == (
        "step 2/50  reward 0.71  episodes 128 (0 failed)  zero-variance 3/16  12,345 tok/s  100.0 s/step  1:20:00 left"
    )
    # Ten steps later the slow ones are forgotten: 38 steps of 1.5 s.
    assert lines[12] == (
        "step 12/50  reward 0.012  held-out 0.80/0.76  episodes 128 (0 failed)  zero-variance 3/16  12,345 tok/s  "
        "1.5 s/step  0:57 left"
    )
    assert lines[13] == "saved [step_12] :smile:"


def test_a_terminal_shows_both_bars() -> None:
    console, clock = terminal_console(), Clock()
    with ProgressView(4, console, clock=clock) as view:
        view.phase("rollout", 8)
        clock.now += 2
        view.step_done(StepMetrics(1, reward_mean=0.5, eval_reward_mean=0.9, eval_reward_sampled_mean=0.8))
        view.tokens(4000)
        for failed in (True, False):
            view.episode_done(failed)
        before = output(console)
        clock.now += 2
        view.episode_done(failed=False)
        shown = output(console)[len(before) :]
        assert "step" in shown
        assert "1/4  reward 0.50  held-out 0.90/0.80  0:06 left" in shown
        assert "rollout" in shown
        assert "3/8  1 failed  1,000 tok/s" in shown
        view.message("a line [above] the bars")
        assert "a line [above] the bars\n" in output(console)
    assert "rollout" not in output(console).rsplit("\x1b[2K", 1)[-1]


def test_a_terminal_is_refreshed_at_most_four_times_a_second() -> None:
    console, clock = terminal_console(), Clock()
    with ProgressView(4, console, clock=clock) as view:
        view.phase("rollout", 1000)
        written = 0
        for _ in range(1000):
            size = len(output(console))
            view.episode_done(failed=False)
            written += len(output(console)) > size
            clock.now += 0.001
    assert 3 <= written <= 4


def test_a_failing_run_gives_the_terminal_back() -> None:
    console = terminal_console()
    with pytest.raises(RuntimeError, match="boom"), ProgressView(4, console) as view:
        view.phase("train", 2)
        raise RuntimeError("boom")
    assert output(console).rstrip().endswith("\x1b[?25h")


def test_the_summary_says_what_came_out_and_how_to_load_it(tmp_path: Path) -> None:
    console = plain_console()
    checkpoint = tmp_path / ("a-long-name-" * 10) / "step_20"
    before = {"greedy": EvalResult(0.1, 0.05, 0.15, 100, 0), "sampled": EvalResult(0.2, 0.1, 0.3, 100, 0)}
    after = {"greedy": EvalResult(0.9, 0.85, 0.95, 100, 3)}
    ProgressView(20, console).summary(TuneResult(checkpoint, make_history(20), tmp_path, before, after))
    text = output(console)
    lines = [" ".join(line.strip("│ ").split()) for line in text.splitlines()]
    assert "greedy 0.100 [0.050, 0.150] 0.900 [0.850, 0.950] 3/100 failed" in lines
    assert "sampled 0.200 [0.100, 0.300] -" in lines
    assert "●" in text
    assert "reward.png" in text
    # Whole lines, however long the path: they are there to be copied.
    assert f"model = transformers.AutoModelForCausalLM.from_pretrained('{checkpoint}')" in text
    assert f"tokenizer = transformers.AutoTokenizer.from_pretrained('{checkpoint}')" in text


def test_the_summary_needs_no_evaluation_and_no_unicode(tmp_path: Path) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    ProgressView(2, Console(file=file, width=80)).summary(TuneResult(Path("c"), make_history(2), Path("r")))
    file.seek(0)
    text = file.read()
    assert "held-out" not in text
    assert "checkpoint" in text
