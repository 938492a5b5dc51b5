"""Roles: who is trained, who plays the others, and what each of them earns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIMultiAgentFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase, ChatResponse
from agentscope.pipeline import MsgHub
from pydantic import BaseModel
from transformers import AutoTokenizer

from agentscope_tuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask, tune
from agentscope_tuner.algorithms import compute_advantages
from agentscope_tuner.chat import ChatRenderer
from agentscope_tuner.config import WorkflowConfig
from agentscope_tuner.errors import RoleError
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.recorder import PolicyModel, Recorder
from agentscope_tuner.reporting import read_episodes
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.testing import ScriptedPolicy
from agentscope_tuner.types import Episode, Task
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner

HELLO = [{"role": "user", "content": "Hello."}]


class Stock(ChatModelBase):
    """A model that is not trained."""

    def __init__(self, model_name: str = "stock-1", stream: bool = False, line: str = "I am the default.") -> None:
        super().__init__(model_name, stream)
        self.line = line
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        self.asked.append({"messages": messages, **options})
        response = ChatResponse(content=[TextBlock(type="text", text=self.line)], metadata={"from": self.model_name})
        return self._chunks(response) if self.stream else response

    async def _chunks(self, response: ChatResponse) -> AsyncGenerator[ChatResponse, None]:
        yield ChatResponse(content=[TextBlock(type="text", text=self.line[:4])])
        yield response


class OtherStock(Stock):
    """Another kind of model."""


class Forbidden(Stock):
    """A default model of a role that is trained."""

    async def __call__(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("the default model of a trained role was asked")


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> PolicyModel:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny_model_dir))
    policy = ScriptedPolicy(renderer, lambda prompt, episode_id: "I am trained.")
    end = frozenset([renderer.tokenizer.eos_token_id])
    return PolicyModel(policy, renderer, end, "trained-model", SamplingParams(max_tokens=64))


@pytest.fixture
def tuner_of(model: PolicyModel) -> Callable[..., ModelTuner]:
    """Makes the `ModelTuner` of an episode."""

    def make(targets: list[str] | None = None) -> ModelTuner:
        return ModelTuner(Recorder(model, episode_id="e", seed=0, trainable_targets=targets))

    return make


def text_of(response: ChatResponse) -> str:
    return "".join(block["text"] for block in response.content)


def run(
    model: PolicyModel, workflow: Any, *, judge: Any = None, targets: list[str] | None = None, episodes: int = 1
) -> list[Episode]:
    """Run one group of episodes."""
    rollout = Rollout(
        WorkflowRunner(workflow),
        None if judge is None else JudgeRunner(judge),
        model,
        WorkflowConfig(trainable_targets=targets, timeout_s=30),
        0,
        {},
    )
    (group,) = asyncio.run(rollout.run([Task(main_query="Play.")], episodes, phase="test"))
    return group.episodes


# ---------------------------------------------------------------------------------------------------- registration


def test_registered_roles_are_chat_models(tuner_of: Callable[..., ModelTuner]) -> None:
    tuner = tuner_of()
    tuner.register_model("wolf", default_model=Stock())
    tuner.register_model("seer")
    for role in ("wolf", "seer"):
        assert isinstance(tuner.get_model(role), ChatModelBase)
        assert text_of(asyncio.run(tuner.get_model(role)(HELLO))) == "I am trained."
    assert text_of(asyncio.run(tuner.get_model("default")(HELLO))) == "I am trained."
    assert tuner.get_model("wolf").model_name == "trained-model"


def test_nine_players_of_five_roles(tuner_of: Callable[..., ModelTuner]) -> None:
    tuner = tuner_of(["wolf"])
    first: dict[str, Stock] = {}
    for role in ("wolf", "wolf", "wolf", "seer", "witch", "hunter", "villager", "villager", "villager"):
        default = Stock()
        tuner.register_model(role, default_model=default)
        first.setdefault(role, default)
    asyncio.run(tuner.get_model("villager")(HELLO))
    assert [len(default.asked) for default in first.values()] == [0, 0, 0, 0, 1]


def test_a_role_has_one_kind_of_default_model(tuner_of: Callable[..., ModelTuner]) -> None:
    tuner = tuner_of()
    tuner.register_model("wolf", default_model=Stock("stock-1"))
    tuner.register_model("wolf", default_model=Stock("stock-1", stream=True))
    for other, shown in [
        (Stock("stock-2"), "Stock(stock-2)"),
        (OtherStock("stock-1"), "OtherStock(stock-1)"),
        (None, "none"),
    ]:
        with pytest.raises(RoleError) as caught:
            tuner.register_model("wolf", default_model=other)
        assert f"role `wolf` is already registered with Stock(stock-1) as its default model, got {shown};" in str(
            caught.value
        )
    tuner.register_model("seer")
    tuner.register_model("seer", default_model=None)
    with pytest.raises(RoleError, match=r"role `seer` is already registered with none .*, got Stock\(stock-1\)"):
        tuner.register_model("seer", default_model=Stock())


@pytest.mark.parametrize("role", ["", None, 3, ["wolf"]])
def test_a_role_needs_a_name(tuner_of: Callable[..., ModelTuner], role: Any) -> None:
    with pytest.raises(RoleError, match="a role must be a non-empty string, got"):
        tuner_of().register_model(role, default_model=Stock())


@pytest.mark.parametrize("targets", [None, ["wolf"], ["sear"]])
def test_an_unknown_role_names_the_registered_ones(
    tuner_of: Callable[..., ModelTuner], targets: list[str] | None
) -> None:
    tuner = tuner_of(targets)
    with pytest.raises(RoleError, match="role `sear` is not registered; registered: none"):
        tuner.get_model("sear")
    tuner.register_model("seer", default_model=Stock())
    tuner.register_model("wolf", default_model=Stock())
    with pytest.raises(RoleError, match=r"role `sear` is not registered; registered: `seer`, `wolf`\. Call"):
        tuner.get_model("sear")


def test_an_untrained_role_needs_a_default_model(tuner_of: Callable[..., ModelTuner]) -> None:
    tuner = tuner_of(["wolf"])
    tuner.register_model("seer")
    with pytest.raises(RoleError, match=r"role `seer` is not in `trainable_targets` \(wolf\) and has no default model"):
        tuner.get_model("seer")
    with pytest.raises(RoleError, match=r"role `default` is not in `trainable_targets` \(wolf\)"):
        asyncio.run(tuner(HELLO))
    tuner.register_model("default", default_model=Stock())
    assert text_of(asyncio.run(tuner(HELLO))) == "I am the default."


# ------------------------------------------------------------------------------------------------- untrained roles


class Answer(BaseModel):
    """Some structure."""

    result: str


def test_everything_is_handed_to_the_default_model(tuner_of: Callable[..., ModelTuner]) -> None:
    tuner, default = tuner_of(["wolf"]), Stock()
    tuner.register_model("seer", default_model=default)
    seer = tuner.get_model("seer")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    plain = asyncio.run(seer(HELLO))
    assert (text_of(plain), plain.metadata) == ("I am the default.", {"from": "stock-1"})
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/cat.png"}}]}]
    asyncio.run(seer(image, tools=tools, tool_choice="look", structured_model=Answer, presence_penalty=1.0))
    asyncio.run(seer(HELLO, tools))
    assert default.asked == [
        {"messages": HELLO},
        {
            "messages": image,
            "tools": tools,
            "tool_choice": "look",
            "structured_model": Answer,
            "presence_penalty": 1.0,
        },
        {"messages": HELLO, "tools": tools},
    ]
    assert tuner._recorder.calls == []


def test_the_default_model_s_streaming_is_its_own(tuner_of: Callable[..., ModelTuner]) -> None:
    tuner, streams, plain = tuner_of(["wolf"]), Stock(stream=True), Stock()
    tuner.register_model("seer", default_model=streams)
    tuner.register_model("witch", default_model=plain)
    tuner.register_model("wolf", default_model=Stock(stream=True))
    seer, witch, wolf = (tuner.get_model(role) for role in ("seer", "witch", "wolf"))
    assert (streams.stream, plain.stream) == (True, False), "asking for a role changes no one's model"
    assert (seer.stream, witch.stream, wolf.stream) == (True, False, False)

    async def chunks() -> list[str]:
        return [text_of(chunk) async for chunk in await seer(HELLO)]

    assert asyncio.run(chunks()) == ["I am", "I am the default."]
    seer.stream = False  # as agents do for a while
    assert text_of(asyncio.run(seer(HELLO))) == "I am the default."
    assert streams.stream is False
    seer.stream = True
    wolf.stream = True
    assert (streams.stream, plain.stream, tuner.get_model("wolf").stream) == (True, False, False)


async def village(task: dict[str, Any], model: ModelTuner) -> WorkflowOutput:
    """A wolf and two villagers talk."""
    for role in ("wolf", "villager", "villager"):
        model.register_model(role, default_model=VILLAGE[role])
    agents = [
        ReActAgent(name, f"You are {name}, a {role}.", model.get_model(role), OpenAIMultiAgentFormatter())
        for name, role in (("Ann", "wolf"), ("Bob", "villager"), ("Cid", "villager"))
    ]
    async with MsgHub(agents, announcement=Msg("host", "Speak.", "assistant")):
        for _ in range(2):
            for agent in agents:
                await agent()
    return WorkflowOutput(reward=0.5)


VILLAGE: dict[str, Any] = {}
"""The default models of the next game."""


@pytest.mark.parametrize(
    ("targets", "trained"), [(None, ["wolf", "villager"]), (["wolf"], ["wolf"]), (["villager"], ["villager"])]
)
def test_only_trained_roles_are_recorded_and_only_others_reach_their_default(
    model: PolicyModel, targets: list[str] | None, trained: list[str]
) -> None:
    VILLAGE.update({role: Forbidden() if role in trained else Stock() for role in ("wolf", "villager")})
    (episode,) = run(model, village, targets=targets)
    assert episode.error is None, episode.error.traceback
    turns = {"wolf": 2, "villager": 4}
    assert [call.role for call in episode.calls] == [
        role for _ in range(2) for role in ("wolf", "villager", "villager") if role in trained
    ]
    assert episode.reward == dict.fromkeys(trained, 0.5)
    for role in turns:
        assert len(VILLAGE[role].asked) == (0 if role in trained else turns[role])
    # What the others said is read by the trained ones, and never trained on.
    assert all(call.text == "I am trained." for call in episode.calls)
    if trained != ["wolf", "villager"]:
        assert "I am the default." in str(episode.calls[-1].messages)


# --------------------------------------------------------------------------------------------- trainable targets


class TwoRoles(Workflow):
    """Asks a wolf and a seer."""

    silent: bool = False

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        for role in ("wolf", "seer"):
            model_tuner.register_model(role, default_model=Stock())
            await model_tuner.get_model(role)(HELLO)
        return WorkflowOutput(reward=1.0)


class WolfLearns(TwoRoles):
    """Trains the wolf."""

    trainable_targets: list[str] | None = ["wolf"]  # noqa: RUF012


@pytest.mark.parametrize(
    ("workflow", "configured", "trained"),
    [
        (TwoRoles, None, ["wolf", "seer"]),
        (TwoRoles(trainable_targets=["seer"]), None, ["seer"]),
        (WolfLearns, None, ["wolf"]),
        (WolfLearns, ["seer"], ["seer"]),
        (WolfLearns, ["seer", "wolf"], ["wolf", "seer"]),
        (TwoRoles, ["seer"], ["seer"]),
    ],
)
def test_targets_of_workflow_and_configuration(
    model: PolicyModel, workflow: Any, configured: list[str] | None, trained: list[str]
) -> None:
    (episode,) = run(model, workflow, targets=configured)
    assert [call.role for call in episode.calls] == trained
    assert episode.reward == dict.fromkeys(trained, 1.0)


def test_targets_of_a_function_are_the_configuration_s(model: PolicyModel) -> None:
    async def workflow(task, model):
        model.register_model("wolf", default_model=Stock())
        model.register_model("default", default_model=Stock())
        await model(HELLO)
        await model.get_model("wolf")(HELLO)
        return 1.0

    (episode,) = run(model, workflow)
    assert [call.role for call in episode.calls] == ["default", "wolf"]
    (episode,) = run(model, workflow, targets=["wolf"])
    assert [call.role for call in episode.calls] == ["wolf"]
    (episode,) = run(model, workflow, targets=["default"])
    assert [call.role for call in episode.calls] == ["default"]


@pytest.mark.parametrize("targets", [["werewolf"], ["werewolf", "wolf"], ["wolf", "seer", "werewolf"]])
def test_a_target_that_nobody_registers_ends_the_run(model: PolicyModel, targets: list[str]) -> None:
    with pytest.raises(RoleError, match=r"`werewolf`.* registered; registered: `(seer`, `wolf|wolf`, `seer)`"):
        run(model, TwoRoles, targets=targets, episodes=4)


def test_a_role_may_be_missing_from_some_episodes(model: PolicyModel) -> None:
    class Sometimes(Workflow):
        trainable_targets: list[str] | None = ["wolf", "seer"]  # noqa: RUF012

        async def execute(self, task, model_tuner):
            for role in ("wolf", "seer") if task.group_index == 2 else ("wolf",):
                model_tuner.register_model(role)
                await model_tuner.get_model(role)(HELLO)
            return WorkflowOutput(reward=1.0)

    episodes = run(model, Sometimes, episodes=4)
    assert [list(episode.reward) for episode in episodes] == [["wolf"], ["wolf"], ["wolf", "seer"], ["wolf"]]


@pytest.mark.parametrize("how", ["unknown role", "no default model"])
def test_a_role_that_cannot_be_played_ends_the_run(model: PolicyModel, how: str) -> None:
    async def workflow(task, model):
        model.register_model("wolf", default_model=Stock())
        model.register_model("seer")
        await model.get_model("wolf")(HELLO)
        await model.get_model("seer" if how == "no default model" else "witch")(HELLO)
        return 1.0

    with pytest.raises(RoleError, match="`seer`" if how == "no default model" else "`witch` is not registered"):
        run(model, workflow, targets=["wolf"], episodes=3)


# ---------------------------------------------------------------------------------------------------------- rewards


class Earns(Workflow):
    """Lets wolf and seer speak, registers a witch who does not, and returns a reward."""

    trainable_targets: list[str] | None = ["wolf", "seer", "witch"]  # noqa: RUF012
    reward: Any = None

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        for role in ("wolf", "seer", "witch"):
            model_tuner.register_model(role, default_model=Stock())
        model_tuner.register_model("host", default_model=Stock())
        await model_tuner.get_model("wolf")(HELLO)
        await model_tuner.get_model("seer")(HELLO)
        return WorkflowOutput(reward=self.reward)


class Says(Judge):
    """Gives a reward that was agreed upon."""

    def __init__(self, reward: Any) -> None:
        self.reward = reward

    async def judge(self, task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        return JudgeOutput(reward=self.reward)


def both_ways(model: PolicyModel, reward: Any) -> list[Episode]:
    """The same reward, once from the workflow and once from the judge."""
    return [*run(model, Earns(reward=reward)), *run(model, Earns(), judge=Says(reward))]


@pytest.mark.parametrize(
    ("reward", "earned"),
    [
        (2, {"wolf": 2.0, "seer": 2.0}),
        ({"wolf": 1.0, "seer": -1.0}, {"wolf": 1.0, "seer": -1.0}),
        ({"seer": 0, "wolf": 1, "witch": 5.0}, {"wolf": 1.0, "seer": 0.0}),
        ({"wolf": 1.0, "seer": 0.5, "host": 3.0, "default": 9.0}, {"wolf": 1.0, "seer": 0.5}),
    ],
)
def test_each_role_that_spoke_earns_its_own(model: PolicyModel, reward: Any, earned: dict[str, float]) -> None:
    for episode in both_ways(model, reward):
        assert episode.error is None, episode.error.traceback
        assert episode.reward == earned
        assert {t.role: (t.reward, len(t.calls)) for t in episode.trajectories()} == {
            role: (value, 1) for role, value in earned.items()
        }
        assert episode.reward_mean == pytest.approx(sum(earned.values()) / 2)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"wolf": 1.0}, "role `seer` is trained and spoke, but the reward names only ['wolf']"),
        ({}, "role `wolf` is trained and spoke, but the reward names only []"),
        ({"wolf": 1.0, "seer": 1.0, "werewolf": 1.0}, "there is a reward for role `werewolf`, which is not registered"),
        ({"wolf": 1.0, "seer": float("nan")}, "`reward` of role `seer` must be a finite number, got nan"),
        ({"wolf": float("inf"), "seer": 0.0}, "`reward` of role `wolf` must be a finite number, got inf"),
        ({"wolf": None, "seer": 0.0}, "valid number"),
        ({"wolf": "high", "seer": 0.0}, "valid number"),
        ([1.0, 0.0], "valid"),
    ],
)
def test_a_reward_that_does_not_fit_the_roles_fails_the_episode(model: PolicyModel, reward: Any, message: str) -> None:
    by_workflow, by_judge = both_ways(model, reward)
    for episode in (by_workflow, by_judge):
        assert message in episode.error.message
        assert episode.reward is None
        assert list(episode.trajectories()) == []
        assert len(episode.calls) == 2, "what was sampled is kept, to be looked at"
    assert by_judge.error.kind == "RewardError"


def test_roles_compare_with_their_own_kind(model: PolicyModel) -> None:
    class Alternates(Earns):
        async def execute(self, task, model_tuner):
            self.reward = {"wolf": float(task.group_index % 2), "seer": 0.25}
            return await super().execute(task, model_tuner)

    rollout = Rollout(WorkflowRunner(Alternates), None, model, WorkflowConfig(), 0, {})
    groups = asyncio.run(rollout.run([Task()], 4, phase="test"))
    (advantages,) = compute_advantages(groups, "mean_only")
    assert [(credit.trajectory.role, credit.advantages[0]) for credit in advantages] == [
        ("wolf", -0.5),
        ("wolf", 0.5),
        ("wolf", -0.5),
        ("wolf", 0.5),
    ]


# ------------------------------------------------------------------------------------------------- auxiliary models


def test_auxiliary_models_are_asked_and_never_recorded(model: PolicyModel) -> None:
    said: list[str] = []
    helper = PolicyModel(
        ScriptedPolicy(model.renderer, lambda prompt, episode_id: f"Helping {episode_id}."),
        model.renderer,
        model.end_of_turn_ids,
        "helper",
        SamplingParams(max_tokens=64),
    )

    async def workflow(task, model, auxiliary_models):
        await model(HELLO)
        said.append(text_of(await auxiliary_models["judge"](HELLO)))
        return WorkflowOutput(response="x")

    async def judge(task, response, auxiliary_models):
        said.append(text_of(await auxiliary_models["judge"]([{"role": "user", "content": response}])))
        return JudgeOutput(reward=1.0)

    rollout = Rollout(WorkflowRunner(workflow), JudgeRunner(judge), model, WorkflowConfig(), 0, {"judge": helper})
    (group,) = asyncio.run(rollout.run([Task()], 1, phase="test"))
    (episode,) = group.episodes
    assert episode.error is None, episode.error.traceback
    assert said == ["Helping test-0-0/judge."] * 2
    assert [call.text for call in episode.calls] == ["I am trained."]


def test_auxiliary_models_draw_numbers_of_their_own(model: PolicyModel) -> None:
    seeds: list[int] = []

    class Noting(ScriptedPolicy):
        async def sample(self, prompt_ids: list[int], params: SamplingParams, **options: Any) -> Sample:
            seeds.append(params.seed)
            return await super().sample(prompt_ids, params, **options)

    policy = Noting(model.renderer, lambda prompt, episode_id: "Yes.")
    noting = replace(model, policy=policy)

    async def workflow(task, model, auxiliary_models):
        for each in (model, *auxiliary_models.values()):
            await each(HELLO)
        return WorkflowOutput(reward=1.0)

    for _ in range(2):
        rollout = Rollout(WorkflowRunner(workflow), None, noting, WorkflowConfig(), 0, {"a": noting, "b": noting})
        asyncio.run(rollout.run([Task()], 1, phase="test"))
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3


# --------------------------------------------------------------------------------------------------------- training


class Game(Workflow):
    """The wolf is trained by what it says; the seer always has the same part."""

    trainable_targets: list[str] | None = ["seer"]  # noqa: RUF012

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        words = []
        for role in ("wolf", "seer"):
            model_tuner.register_model(role, default_model=Stock())
            words.append(text_of(await model_tuner.get_model(role)(HELLO)))
        letters = sum(letter.isalpha() for letter in words[0])
        return WorkflowOutput(reward={"wolf": letters / 8, "seer": 0.0}, metrics={"seer_words": len(words[1].split())})


def test_a_role_is_trained_beside_an_untrained_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"Game {i}"}) + "\n" for i in range(2)))
    result = tune(
        Game,
        overrides={
            "model.model_path": tiny_model_dir,
            "model.max_model_len": 256,
            "model.max_tokens": 8,
            "algorithm.group_size": 4,
            "algorithm.batch_size": 2,
            "train_dataset.path": data,
            "output_dir": tmp_path / "runs",
            "workflow.trainable_targets": "[wolf]",
            "engine.threads": 1,
        },
    )
    (metrics,) = result.history
    assert metrics.tokens_trained > 0
    assert metrics.episodes_failed == 0
    assert metrics.extra["reward_mean/wolf"] == pytest.approx(metrics.reward_mean)
    assert "reward_mean/seer" not in metrics.extra
    assert metrics.extra["workflow/seer_words"] == 4
    rows = read_episodes(result.run_dir / "episodes" / "train_000001.jsonl")
    assert {call["role"] for row in rows for call in row["calls"]} == {"wolf"}
    assert all(set(row["reward"]) == {"wolf"} for row in rows)
