"""What goes wrong inside an episode becomes its record; what is wrong with the run ends it, by its own name."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse
from pydantic import Field
from transformers import AutoTokenizer

from agentscope_tuner import Judge, JudgeOutput, ModelTuner, TuneResult, Workflow, WorkflowOutput, WorkflowTask, tune
from agentscope_tuner.backends.evaluation import evaluate_policy
from agentscope_tuner.chat import ChatRenderer, write_reply
from agentscope_tuner.config import WorkflowConfig
from agentscope_tuner.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    TooManyFailuresError,
)
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.recorder import PolicyModel
from agentscope_tuner.reporting import ProgressView, read_episodes
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.testing import ScriptedPolicy
from agentscope_tuner.types import Episode, EpisodeGroup, ModelCall, Task
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner

HELLO = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny_model_dir))


class Watched(ScriptedPolicy):
    """Knows which episodes are open, and can be made to wait."""

    def __init__(self, renderer: ChatRenderer, reply: str = "Fine.") -> None:
        super().__init__(renderer, lambda prompt, episode_id: reply)
        self.open: set[str] = set()
        self.gate: asyncio.Event | None = None
        self.asked = 0

    def open_episode(self, episode_id: str) -> None:
        assert episode_id not in self.open
        self.open.add(episode_id)

    def close_episode(self, episode_id: str) -> None:
        self.open.remove(episode_id)

    async def sample(self, prompt_ids: list[int], params: SamplingParams, **rest: Any) -> Sample:
        self.asked += 1
        if self.gate is not None:
            await self.gate.wait()
        return await super().sample(prompt_ids, params, **rest)


def rollout_of(renderer: ChatRenderer, workflow: Any, judge: Any = None, **config: Any) -> tuple[Rollout, Watched]:
    policy = Watched(renderer, config.pop("reply", "Fine."))
    end = frozenset([renderer.tokenizer.eos_token_id])
    model = PolicyModel(policy, renderer, end, "tiny", SamplingParams(max_tokens=128))
    runner = None if judge is None else JudgeRunner(judge)
    return Rollout(WorkflowRunner(workflow), runner, model, WorkflowConfig(**config), 0, {}), policy


def run(renderer: ChatRenderer, workflow: Any, judge: Any = None, *, episodes: int = 4, **config: Any) -> list[Episode]:
    """Run one group of episodes, in which nothing may be left over."""
    rollout, policy = rollout_of(renderer, workflow, judge, **{"timeout_s": 30, **config})

    async def group() -> list[Episode]:
        (one,) = await rollout.run([Task(main_query="Go.", task_id="t")], episodes, phase="test")
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return one.episodes

    found = asyncio.run(group())
    assert policy.open == set()
    return found


class Second(Workflow):
    """Every second episode of a group does something of its own."""

    how: Any = None

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner(HELLO)
        if task.group_index % 2:
            return await self.how(model_tuner)
        return WorkflowOutput(reward=1.0, metrics={"fine": 1.0})


def test_an_agent_that_outlives_its_episode_keeps_nothing_of_it(renderer: ChatRenderer) -> None:
    kept = []

    class Keeps(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            kept.append(model_tuner)  # as agents do until Python looks for garbage in cycles
            first = await model_tuner(HELLO)
            answer = {"role": "assistant", "content": first.content[0]["text"]}
            await model_tuner([*HELLO, answer, {"role": "user", "content": "And?"}])
            return WorkflowOutput(reward=1.0)

    episodes = run(renderer, Keeps)
    assert [len(episode.calls) for episode in episodes] == [2] * 4
    numbers = {id(call) for episode in episodes for call in episode.calls}
    del episodes
    left = [one for one in gc.get_objects() if id(one) in numbers and isinstance(one, ModelCall)]
    assert len(kept) == 4 and not left


# ---------------------------------------------------------------------------------------------- failing workflows


async def divides_by_zero(model: ModelTuner) -> Any:
    return 1 / 0


async def returns_nothing(model: ModelTuner) -> Any:
    return None


async def returns_text(model: ModelTuner) -> Any:
    return "1.0"


async def returns_true(model: ModelTuner) -> Any:
    return True


async def returns_nan(model: ModelTuner) -> Any:
    return float("nan")


async def returns_an_output_of_nan(model: ModelTuner) -> Any:
    return WorkflowOutput(reward=float("nan"))


async def returns_no_reward(model: ModelTuner) -> Any:
    return WorkflowOutput(response="x")


async def cancels_itself(model: ModelTuner) -> Any:
    raise asyncio.CancelledError


async def shows_an_image(model: ModelTuner) -> Any:
    await model([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


async def shows_an_image_in_a_task_group(model: ModelTuner) -> Any:
    async with asyncio.TaskGroup() as group:
        group.create_task(shows_an_image(model))
        group.create_task(asyncio.sleep(30))


async def misuses_the_template(model: ModelTuner) -> Any:
    await model([{"content": "no role"}])


async def parses_badly(model: ModelTuner) -> Any:
    return WorkflowTask.model_validate({"episode_id": 3})


async def stops_iterating(model: ModelTuner) -> Any:
    raise StopIteration


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (divides_by_zero, "ZeroDivisionError", "division by zero"),
        (returns_nothing, "RewardError", "the workflow returned `None` of type `NoneType`"),
        (returns_text, "RewardError", "the workflow returned `'1.0'` of type `str`"),
        (returns_true, "RewardError", "the workflow returned `True` of type `bool`"),
        (returns_nan, "RewardError", "the workflow returned the reward nan; a reward must be a finite number"),
        (returns_an_output_of_nan, "RewardError", "`reward` must be a finite number, got nan"),
        (returns_no_reward, "RewardError", "the workflow returned `reward=None` and there is no judge; return a rew"),
        (cancels_itself, "EpisodeFailure", "the workflow cancelled itself"),
        (shows_an_image, "UnsupportedContentError", "holds a block of type `image_url`"),
        (shows_an_image_in_a_task_group, "UnsupportedContentError", "holds a block of type `image_url`"),
        (misuses_the_template, "KeyError", "role"),
        (parses_badly, "ValidationError", "episode_id"),
        (stops_iterating, "RuntimeError", "StopIteration"),
    ],
)
def test_a_workflow_that_fails_is_data(
    renderer: ChatRenderer, how: Callable[[ModelTuner], Awaitable[Any]], kind: str, message: str
) -> None:
    episodes = run(renderer, Second(how=how))
    for episode in episodes[::2]:
        assert episode.error is None
        assert episode.reward == {"default": 1.0}
        assert episode.metrics == {"workflow/fine": 1.0}
    for episode in episodes[1::2]:
        assert episode.error.kind == kind
        assert message in episode.error.message
        assert str(episode.error) == f"{kind}: {episode.error.message}"
        assert episode.reward is None
        assert episode.reward_mean is None
        assert [call.text for call in episode.calls] == ["Fine."], "what was sampled before is kept"
    own_code = how.__name__ in episodes[1].error.traceback
    assert own_code == (kind not in ("RewardError", "EpisodeFailure", "UnsupportedContentError"))


def test_a_workflow_that_calls_no_model_is_told_how(renderer: ChatRenderer) -> None:
    async def idle(task, model):
        return 1.0

    (episode,) = run(renderer, idle, episodes=1)
    assert episode.error.kind == "NoTrainedCallError"
    assert "registered: none; trained: every role" in episode.error.message
    assert "give its agents `model=model_tuner`" in episode.error.message
    assert (episode.calls, episode.reward) == ([], None)


def test_every_episode_is_reported_once(renderer: ChatRenderer) -> None:
    rollout, _ = rollout_of(renderer, Second(how=divides_by_zero))
    seen: list[tuple[str, bool, str]] = []
    rollout.on_episode = lambda episode, phase: seen.append(
        (episode.workflow_task.episode_id, episode.error is None, phase)
    )
    tasks = [Task(task_id="a"), Task(task_id="b")]
    groups = asyncio.run(rollout.run(tasks, 2, phase="train3", first=5))
    assert sorted(seen) == [
        ("train3-5-0", True, "train3"),
        ("train3-5-1", False, "train3"),
        ("train3-6-0", True, "train3"),
        ("train3-6-1", False, "train3"),
    ]
    assert [group.task for group in groups] == tasks
    assert [[e.workflow_task.group_index for e in group.episodes] for group in groups] == [[0, 1], [0, 1]]
    assert [len(group.succeeded) for group in groups] == [1, 1]


# --------------------------------------------------------------------------------------------------------- time-outs


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentscope_tuner.rollout._GRACE_S", 0.2)


def in_time(work: Callable[[], Any], limit_s: float = 20) -> Any:
    """Run something that, were it broken, might never end."""
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append(work())
        except BaseException as exc:
            outcome.append(exc)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert outcome, f"not done after {limit_s} s"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def test_a_workflow_that_hangs_is_stopped(renderer: ChatRenderer, short_grace: None) -> None:
    cleaned: list[str] = []

    async def hangs(model):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("up")

    episodes = in_time(lambda: run(renderer, Second(how=hangs), timeout_s=0.3))
    assert [episode.error and episode.error.kind for episode in episodes] == [None, "EpisodeTimeoutError"] * 2
    assert "the workflow did not return within 0.3 s; raise `workflow.timeout_s`" in episodes[1].error.message
    assert 0.3 <= episodes[1].time_s < 5
    assert len(episodes[1].calls) == 1
    assert cleaned == ["up", "up"]


def test_an_agent_that_apologises_for_being_cancelled_is_late_all_the_same(
    renderer: ChatRenderer, short_grace: None
) -> None:
    replies: list[str] = []

    async def slow() -> ToolResponse:
        """Take long."""
        await asyncio.sleep(60)
        return ToolResponse(content=[TextBlock(type="text", text="done")])

    async def workflow(task, model):
        toolkit = Toolkit()
        toolkit.register_tool_function(slow)
        agent = ReActAgent("Friday", "Be slow.", model, OpenAIChatFormatter(), toolkit)
        replies.append((await agent(Msg("user", "Go.", "user"))).get_text_content())
        return 1.0

    reply = write_reply("", [("slow", {})])
    (episode,) = in_time(lambda: run(renderer, workflow, episodes=1, timeout_s=0.3, reply=reply))
    assert "interrupted me" in replies[0], "AgentScope's agents answer a cancellation"
    assert episode.error.kind == "EpisodeTimeoutError"
    assert episode.reward is None
    assert len(episode.calls) == 1


@pytest.mark.parametrize("patience", [1, 3, None])
def test_a_workflow_that_ignores_its_cancellation_is_abandoned(
    renderer: ChatRenderer, short_grace: None, patience: int | None
) -> None:
    ignored: list[int] = []

    async def stubborn(model):
        while patience is None or len(ignored) < patience:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ignored.append(1)
        return WorkflowOutput(reward=1.0)

    episodes = in_time(lambda: run(renderer, Second(how=stubborn), timeout_s=0.3, episodes=2))
    assert ignored
    assert [episode.error and episode.error.kind for episode in episodes] == [None, "EpisodeTimeoutError"]
    assert len(episodes[1].calls) == 1


def test_a_late_workflow_is_not_heard_of_again(
    renderer: ChatRenderer, short_grace: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def sulks(model):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError("I was not done") from None

    episodes = in_time(lambda: run(renderer, Second(how=sulks), timeout_s=0.3, episodes=2))
    gc.collect()
    assert episodes[1].error.kind == "EpisodeTimeoutError"
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_after_the_end_nothing_is_recorded(renderer: ChatRenderer) -> None:
    left: list[asyncio.Task[Any]] = []
    go_on = asyncio.Event()

    async def leaves_work_behind(task, model):
        await model(HELLO)
        policy.gate = go_on

        async def later() -> None:
            await go_on.wait()
            await model(HELLO)

        left.extend([asyncio.create_task(model(HELLO)), asyncio.create_task(later())])
        await asyncio.sleep(0.01)  # the first of them is under way now
        return 1.0

    rollout, policy = rollout_of(renderer, leaves_work_behind)

    async def everything() -> Episode:
        (group,) = await rollout.run([Task()], 1, phase="test")
        assert policy.asked == 2
        go_on.set()
        errors = await asyncio.gather(*left, return_exceptions=True)
        assert [type(error).__name__ for error in errors] == ["EpisodeTimeoutError"] * 2
        assert "episode `test-0-0` is over" in str(errors[0])
        return group.episodes[0]

    episode = asyncio.run(everything())
    assert policy.asked == 2, "a closed episode does not reach the policy"
    assert episode.error is None
    assert len(episode.calls) == 1


# ------------------------------------------------------------------------------------------------------------ judges


async def judge_nan(task, response):
    return JudgeOutput(reward=float("nan"))


async def judge_none(task, response):
    return None


async def judge_float(task, response):
    return 1.0


async def judge_raises(task, response):
    raise LookupError("no rubric")


async def judge_without_number(task, response):
    return JudgeOutput(reward=None)


async def judge_hangs(task, response):
    await asyncio.sleep(60)


async def judge_parses_badly(task, response):
    return WorkflowTask.model_validate({"episode_id": 3})


class JudgeOfOutput(Judge):
    async def judge(self, task, output):
        return WorkflowOutput(reward=1.0)


async def unscored(task, model):
    await model(HELLO)
    return WorkflowOutput(response="four", metrics={"turns": 2.0}, is_success=True)


@pytest.mark.parametrize(
    ("judge", "kind", "message"),
    [
        (judge_nan, "RewardError", "`reward` must be a finite number, got nan"),
        (judge_none, "RewardError", "the judge returned `None` of type `NoneType`; return a `JudgeOutput`"),
        (judge_float, "RewardError", "the judge returned `1.0` of type `float`"),
        (JudgeOfOutput, "RewardError", "the judge returned `WorkflowOutput("),
        (judge_without_number, "RewardError", "valid number"),
        (judge_raises, "LookupError", "no rubric"),
        (judge_parses_badly, "ValidationError", "episode_id"),
        (judge_hangs, "EpisodeTimeoutError", "the judge did not return within 0.3 s"),
    ],
)
def test_a_judge_that_fails_is_data(
    renderer: ChatRenderer, short_grace: None, judge: Any, kind: str, message: str
) -> None:
    (episode,) = in_time(lambda: run(renderer, unscored, judge, episodes=1, timeout_s=0.3))
    assert episode.error.kind == kind
    assert message in episode.error.message
    assert episode.reward is None
    assert len(episode.calls) == 1
    assert ("judge_raises" in episode.error.traceback) == (judge is judge_raises)


def test_a_judge_sees_the_task_and_the_output(renderer: ChatRenderer) -> None:
    seen: list[tuple[WorkflowTask, WorkflowOutput]] = []

    class Sees(Judge):
        async def judge(self, task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
            seen.append((task, output))
            return JudgeOutput(reward=0.25, metrics={"strict": 1.0})

    (episode,) = run(renderer, unscored, Sees, episodes=1)
    assert episode.reward == {"default": 0.25}
    assert episode.metrics == {"workflow/turns": 2.0, "judge/strict": 1.0}
    assert episode.is_success is True
    ((task, output),) = seen
    assert task is episode.workflow_task
    assert output.response == "four"


def test_nobody_waits_for_a_verdict(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[str] = []
    monkeypatch.setattr(Watched, "pause_episode", lambda self, episode_id: paused.append(episode_id))

    async def judge(task: WorkflowTask, response: Any) -> JudgeOutput:
        assert paused == ["test-0-0"]
        return JudgeOutput(reward=0.5)

    (episode,) = run(renderer, unscored, judge, episodes=1)
    assert episode.reward == {"default": 0.5}


def test_a_judge_is_asked_only_where_there_is_no_reward(renderer: ChatRenderer) -> None:
    async def scored(task, model):
        await model(HELLO)
        return 0.0

    (episode,) = run(renderer, scored, judge_raises, episodes=1)
    assert episode.error is None
    assert episode.reward == {"default": 0.0}


# ------------------------------------------------------------------------------------------- what ends the whole run


async def asks_wrongly(model: ModelTuner) -> None:
    await model(HELLO, logit_bias={})


async def asks_wrongly_in_a_task_group(model: ModelTuner) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(shows_an_image(model))
        group.create_task(asks_wrongly(model))


async def asks_wrongly_in_nested_groups(model: ModelTuner) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asks_wrongly_in_a_task_group(model))


async def wants_a_package(model: ModelTuner) -> None:
    raise MissingDependencyError("install it with `pip install it`")


async def reads_badly(model: ModelTuner) -> None:
    raise DataError("no such file")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (asks_wrongly, ConfigError, "does not honour `logit_bias`"),
        (asks_wrongly_in_a_task_group, ConfigError, "does not honour `logit_bias`"),
        (asks_wrongly_in_nested_groups, ConfigError, "does not honour `logit_bias`"),
        (wants_a_package, MissingDependencyError, "pip install it"),
        (reads_badly, DataError, "no such file"),
    ],
)
def test_what_is_wrong_with_the_run_ends_it_by_its_own_name(
    renderer: ChatRenderer, short_grace: None, how: Any, error: type[Exception], message: str
) -> None:
    cleaned: list[str] = []

    class OneIsWrong(Workflow):
        async def execute(self, task, model_tuner):
            await model_tuner(HELLO)
            if task.group_index == 2:
                await asyncio.sleep(0.05)
                await how(model_tuner)
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append(task.episode_id)

    rollout, policy = rollout_of(renderer, OneIsWrong)

    async def everything() -> None:
        try:
            await rollout.run([Task()], 4, phase="test")
        finally:
            assert policy.open == set()
            await asyncio.sleep(0.01)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    with pytest.raises(error) as caught:
        in_time(lambda: asyncio.run(everything()))
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert sorted(cleaned) == ["test-0-0", "test-0-1", "test-0-3"], "the others were stopped, and could clean up"


def test_a_judge_can_end_the_run(renderer: ChatRenderer) -> None:
    async def judge(task, response):
        raise MissingDependencyError("install it with `pip install it`")

    with pytest.raises(MissingDependencyError, match="pip install it"):
        run(renderer, unscored, judge)


def test_workflows_that_resist_cannot_hold_up_the_end_of_a_run(renderer: ChatRenderer, short_grace: None) -> None:
    class Resists(Workflow):
        async def execute(self, task, model_tuner):
            if task.group_index == 0:
                await asyncio.sleep(0.05)
                await asks_wrongly(model_tuner)
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)

    with pytest.raises(ConfigError, match="logit_bias"):
        in_time(lambda: run(renderer, Resists, episodes=3))


# ----------------------------------------------------------------------------------------- numbers, limits, sampling


def test_equal_runs_have_equal_tasks_and_seeds(renderer: ChatRenderer) -> None:
    def tasks_of(phase: str, seed: int) -> list[WorkflowTask]:
        rollout, _ = rollout_of(renderer, unscored, judge_raises)
        rollout.seed = seed
        groups = asyncio.run(rollout.run([Task(task_id="a"), Task(task_id="b")], 3, phase=phase))
        return [episode.workflow_task for group in groups for episode in group.episodes]

    first = tasks_of("train1", 0)
    assert tasks_of("train1", 0) == first
    everybody = [*first, *tasks_of("train2", 0), *tasks_of("train1", 1)]
    assert len({task.seed for task in everybody}) == 18
    assert len({task.episode_id for task in first}) == 6


def test_no_more_episodes_at_once_than_allowed(renderer: ChatRenderer) -> None:
    running: Counter[str] = Counter()
    most: list[int] = []

    async def workflow(task, model):
        running["now"] += 1
        most.append(running["now"])
        await model(HELLO)
        await asyncio.sleep(0.01)
        running["now"] -= 1
        return 1.0

    episodes = run(renderer, workflow, episodes=7, max_concurrency=3)
    assert max(most) == 3
    assert [episode.error for episode in episodes] == [None] * 7


def test_an_evaluation_samples_as_it_is_told(renderer: ChatRenderer) -> None:
    async def scored(task, model):
        await model(HELLO, temperature=0.7)
        return 1.0

    rollout, _ = rollout_of(renderer, scored)
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    for params, expected in ((greedy, (0.0, "Fin")), (None, (0.7, "Fine."))):
        (group,) = asyncio.run(rollout.run([Task()], 1, phase="eval_greedy", params=params))
        ((call,),) = (episode.calls for episode in group.episodes)
        assert (call.temperature, call.text) == expected


def test_an_evaluation_runs_all_ways_of_decoding_at_once(renderer: ChatRenderer) -> None:
    tasks = [Task(task_id=name) for name in "abc"]
    begun: dict[str, list[str]] = {task.task_id: [] for task in tasks}
    finished: list[tuple[str, str]] = []
    together = {name: asyncio.Barrier(2) for name in begun}

    class Waits(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            begun[task.task.task_id].append(task.episode_id)
            async with asyncio.timeout(5):
                await together[task.task.task_id].wait()
            await model_tuner(HELLO)
            return WorkflowOutput(reward=1.0)

    rollout, _ = rollout_of(renderer, Waits, max_concurrency=2)
    rollout.on_episode = lambda episode, phase: finished.append((phase, episode.workflow_task.task.task_id))
    results = asyncio.run(evaluate_policy(rollout, tasks, ProgressView(0), max_failed_fraction=0.0))
    assert {decoding: result.episodes for decoding, result in results.items()} == {"greedy": 3, "sampled": 3}
    assert results["greedy"].time_s == results["sampled"].time_s > 0
    assert begun == {name: [f"eval_greedy-{n}-0", f"eval_sampled-{n}-0"] for n, name in enumerate("abc")}
    assert sorted(finished) == [(f"eval_{decoding}", name) for decoding in ("greedy", "sampled") for name in "abc"]


def test_a_group_is_replaced_while_others_still_run(renderer: ChatRenderer) -> None:
    replaced = asyncio.Event()

    class Waits(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            await model_tuner(HELLO)
            if task.task.task_id == "slow":
                async with asyncio.timeout(5):
                    await replaced.wait()
            if task.task.task_id == "more":
                replaced.set()
            return WorkflowOutput(reward=1.0)

    def refill(index: int, group: EpisodeGroup) -> Task | None:
        over.append((index, group.task.task_id, len(group.succeeded)))
        return Task(task_id="more") if group.task.task_id == "quick" else None

    over: list[tuple[int, str | None, int]] = []
    rollout, _ = rollout_of(renderer, Waits)
    tasks = [Task(task_id="slow"), Task(task_id="quick")]
    groups = asyncio.run(rollout.run(tasks, 2, phase="test", first=3, refill=refill))
    assert over == [(4, "quick", 2), (5, "more", 2), (3, "slow", 2)]
    assert [group.task.task_id for group in groups] == ["slow", "quick", "more"]
    assert [episode.workflow_task.episode_id for episode in groups[2].episodes] == ["test-5-0", "test-5-1"]


# ------------------------------------------------------------------------------------------------- through tune()


def letters(response: Any) -> float:
    text = "".join(block.get("text", "") for block in response.content)
    return sum(letter.isalpha() for letter in text) / 8


class Unreliable(Workflow):
    """Some members of each group fail, each in its own way."""

    failing: dict[int, str] = Field(default_factory=dict)

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        how = self.failing.get(task.group_index)
        if how == "talks too long":
            await model_tuner([{"role": "user", "content": "word " * 200}])
        response = await model_tuner(HELLO)
        if how == "leaves a call behind":
            await asyncio.gather(model_tuner(HELLO), divides_by_zero(model_tuner))
        if how == "raises":
            raise ValueError(f"boom in {task.task.main_query}")
        if how == "raises always the same":
            raise KeyError("same")
        return WorkflowOutput(reward=letters(response))


def train(model: Path, tmp_path: Path, workflow: Any, **overrides: Any) -> TuneResult:
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"task {i}"}) + "\n" for i in range(4)))
    return tune(
        workflow,
        experiment_name="unreliable",
        overrides={
            "model.model_path": model,
            "model.max_model_len": 256,
            "model.max_tokens": 8,
            "algorithm.group_size": 4,
            "algorithm.batch_size": 2,
            "train_dataset.path": data,
            "output_dir": tmp_path / "runs",
            "monitor_type": "none",
            "engine.threads": 1,
            **{key.replace("__", "."): value for key, value in overrides.items()},
        },
    )


def episodes_on_disk(tmp_path: Path, step: int = 1) -> list[dict[str, Any]]:
    return read_episodes(tmp_path / "runs" / "unreliable" / "episodes" / f"train_{step:06d}.jsonl")


def test_training_goes_on_with_two_of_a_group(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = train(tiny_model_dir, tmp_path, Unreliable(failing={0: "raises", 2: "talks too long"}))
    assert len(result.history) == 2
    for metrics in result.history:
        assert metrics.episodes == 2 * metrics.episodes_failed > 0
        assert metrics.groups - metrics.zero_variance_groups > 0
        assert metrics.tokens_trained > 0
    rows = episodes_on_disk(tmp_path)
    assert len(rows) == result.history[0].episodes
    kinds = {row["group_index"]: row["error"] and row["error"]["kind"] for row in rows}
    assert kinds == {0: "ValueError", 1: None, 2: "PromptTooLongError", 3: None}
    (too_long,) = {row["error"]["message"] for row in rows if row["group_index"] == 2}
    assert "`model.max_model_len` is 256; raise it, or let the agent send less" in too_long
    trained = [row for row in rows if row["error"] is None]
    assert result.history[0].reward_mean == pytest.approx(
        sum(row["reward"]["default"] for row in trained) / len(trained)
    )


def test_one_left_of_each_group_teaches_nothing_and_the_run_goes_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    workflow = Unreliable(failing=dict.fromkeys((0, 1, 3), "raises"))
    result = train(tiny_model_dir, tmp_path, workflow, algorithm__max_failed_fraction=0.8)
    for metrics in result.history:
        assert metrics.tokens_trained == 0
        assert metrics.loss is None
        assert metrics.zero_variance_groups == metrics.groups
        assert metrics.episodes_failed * 4 == metrics.episodes * 3
    assert result.checkpoint.is_dir()


def test_a_call_that_was_left_behind_does_not_stop_training(tiny_model_dir: Path, tmp_path: Path) -> None:
    # `asyncio.gather` leaves the other agents running when one of them fails.
    result = in_time(
        lambda: train(tiny_model_dir, tmp_path, Unreliable(failing={1: "leaves a call behind"})), limit_s=60
    )
    assert [metrics.episodes_failed * 4 == metrics.episodes for metrics in result.history] == [True, True]
    assert all(metrics.tokens_trained for metrics in result.history)
    failed = [row for row in episodes_on_disk(tmp_path) if row["error"]]
    assert {(row["error"]["kind"], len(row["calls"])) for row in failed} == {("ZeroDivisionError", 1)}


def test_failures_are_not_counted_while_only_those_that_fail_are_over(tiny_model_dir: Path, tmp_path: Path) -> None:
    replaced = asyncio.Event()

    class Some(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            group = int(task.episode_id.split("-")[1])
            await model_tuner(HELLO)
            if group in (0, 4, 5):
                raise ValueError("boom")
            if group == 6:
                replaced.set()
            async with asyncio.timeout(30):
                await replaced.wait()
            return WorkflowOutput(reward=float(task.group_index))

    (metrics,) = train(tiny_model_dir, tmp_path, Some, algorithm__batch_size=4, algorithm__group_size=2).history
    assert (metrics.groups, metrics.resampled_groups, metrics.episodes_failed) == (7, 3, 6)


def test_too_many_failures_stop_the_run_and_name_the_commonest(tiny_model_dir: Path, tmp_path: Path) -> None:
    failing = {0: "raises", 1: "raises always the same", 3: "raises always the same"}
    with pytest.raises(TooManyFailuresError) as caught:
        train(tiny_model_dir, tmp_path, Unreliable(failing=failing))
    message = str(caught.value)
    assert "6 of 8 episodes failed, more than `algorithm.max_failed_fraction` (0.5) allows" in message
    assert "the commonest error (4 times) is KeyError: 'same'" in message
    assert 'raise KeyError("same")' in message, "with the place where it happened"
    rows = episodes_on_disk(tmp_path)
    assert len(rows) == 8
    assert Counter(row["error"] and row["error"]["kind"] for row in rows) == {"KeyError": 4, "ValueError": 2, None: 2}
    assert all("boom in task" in row["error"]["message"] for row in rows if row["group_index"] == 0)
    assert all(len(row["calls"]) == 1 for row in rows), "what was sampled is there to be looked at"
    # Mended, the same experiment goes on from where it stood.
    result = train(tiny_model_dir, tmp_path, Unreliable())
    assert [metrics.step for metrics in result.history] == [1, 2]
    assert [row["error"] for row in episodes_on_disk(tmp_path)] == [None] * result.history[0].episodes


def test_an_error_of_the_run_comes_out_of_tune_itself(tiny_model_dir: Path, tmp_path: Path) -> None:
    class Wrong(Workflow):
        async def execute(self, task, model_tuner):
            await model_tuner(HELLO, logit_bias={})

    with pytest.raises(ConfigError, match="does not honour `logit_bias`") as caught:
        train(tiny_model_dir, tmp_path, Wrong)
    assert type(caught.value) is ConfigError
