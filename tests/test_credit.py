"""Credit for single turns, on a game whose true advantages are computed exactly."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentscope_tuner import ModelTuner, Task, Workflow, WorkflowOutput, WorkflowTask
from agentscope_tuner.algorithms import compute_advantages
from agentscope_tuner.chat import ChatRenderer, write_reply
from agentscope_tuner.config import BranchingConfig, WorkflowConfig
from agentscope_tuner.errors import ReplayError
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.recorder import PolicyModel
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.testing import ScriptedModel, ScriptedPolicy
from agentscope_tuner.types import Episode, EpisodeGroup, ModelCall
from agentscope_tuner.workflow import WorkflowRunner

# The game: say `a` or `b` up to three times; `b` at the first turn ends it. Which words said so far earn what:
FINAL = {"b": 0.5, "aaa": 1.0, "aab": 0.0, "aba": 0.25, "abb": 2.0}
AT_ONCE = {"a": -0.25, "ab": 0.5, "aba": 0.125}
"""What the last of these words earned by itself."""
CHANCE = {"": 0.6, "a": 0.3, "aa": 0.5, "ab": 0.7}
"""How likely the policy is to say `a` next."""


def chance(said: str, word: str) -> float:
    return CHANCE[said] if word == "a" else 1 - CHANCE[said]


def value(said: str, discount: float) -> float:
    """Expected return from here on, the reward for coming here not counted."""
    return 0.0 if said in FINAL else sum(chance(said, word) * worth(said, word, discount) for word in "ab")


def worth(said: str, word: str, discount: float) -> float:
    """Expected return of saying `word` now."""
    now = said + word
    return AT_ONCE.get(now, 0.0) + FINAL.get(now, 0.0) + discount * value(now, discount)


class Coin(ScriptedPolicy):
    """Plays with the chances above; its random numbers are the recorder's, as the engine's are."""

    async def sample(self, prompt_ids: list[int], params: SamplingParams, **options: Any) -> Sample:
        prompt = self._renderer.decode(prompt_ids)
        said = prompt.rpartition("said ")[2].partition(".")[0]
        word = "a" if random.Random(params.seed).random() < CHANCE[said] else "b"
        ids = [*self._renderer.encode(word), self._renderer.tokenizer.eos_token_id]
        return Sample(ids, [math.log(chance(said, word)), 0.0], "stop", 0)


class Game(Workflow):
    """Plays it, with rewards for turns or at the end only."""

    by_turn: bool = True

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        said, earned = "", 0.0
        while said not in FINAL:
            answer = await model_tuner([{"role": "user", "content": f"You said {said}. Go on."}])
            said += answer.content[0]["text"]
            if self.by_turn:
                model_tuner.reward("default", AT_ONCE.get(said, 0.0))
            earned += AT_ONCE.get(said, 0.0)
        return WorkflowOutput(reward=FINAL[said] + (0.0 if self.by_turn else earned))


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> PolicyModel:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny_model_dir))
    end = frozenset([renderer.tokenizer.eos_token_id])
    return PolicyModel(Coin(renderer, lambda *_: ""), renderer, end, "coin", SamplingParams())


def play(
    model: PolicyModel,
    workflow: Any,
    *,
    groups: int,
    size: int,
    branching: BranchingConfig | None = None,
    seed: int = 0,
) -> list[EpisodeGroup]:
    rollout = Rollout(WorkflowRunner(workflow), None, model, WorkflowConfig(), seed, {})
    tasks = [Task(task_id=str(i)) for i in range(groups)]
    return asyncio.run(rollout.run(tasks, size, phase="test", branching=branching))


def position(call: ModelCall) -> str:
    return str(call.messages[-1]["content"]).removeprefix("You said ").partition(".")[0]


def check(estimates: dict[tuple[str, str], list[float]], exact: dict[tuple[str, str], float]) -> None:
    """Every mean lies within four standard errors of the truth, and the errors are small enough to mean something."""
    assert set(estimates) == set(exact)
    for key, found in estimates.items():
        error = stdev(found) / math.sqrt(len(found))
        assert error < 0.1, (key, error)
        assert abs(fmean(found) - exact[key]) < 4 * error, (key, fmean(found), exact[key], error)


DECISIONS = list(itertools.product(CHANCE, "ab"))


@pytest.mark.parametrize("by_turn", [True, False])
def test_continuations_estimate_the_advantage_of_a_turn_without_bias(model: PolicyModel, by_turn: bool) -> None:
    branching = BranchingConfig(continuations=3)
    groups = play(model, Game(by_turn=by_turn), groups=600, size=1, branching=branching)
    estimates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group, credits in zip(groups, compute_advantages(groups, "leave_one_out"), strict=True):
        (episode,) = group.episodes
        assert episode.branch is not None
        for one in (episode, *episode.branch.continuations):
            call = one.calls[episode.branch.call]
            at = next(
                (c.advantages[episode.branch.call] for c in credits if c.trajectory.calls[0] is one.calls[0]), 0.0
            )
            estimates[position(call), call.text].append(at or 0.0)
    check(estimates, {(s, w): worth(s, w, 1.0) - value(s, 1.0) for s, w in DECISIONS})


@pytest.mark.parametrize("discount", [1.0, 0.8])
def test_what_follows_a_turn_is_compared_with_what_follows_it_elsewhere(model: PolicyModel, discount: float) -> None:
    groups = play(model, Game, groups=800, size=4)
    estimates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group, credits in zip(groups, compute_advantages(groups, "leave_one_out", discount), strict=True):
        found = {id(c.trajectory.calls[0]): c.advantages for c in credits}
        for episode in group.episodes:
            for turn, call in enumerate(episode.calls):
                if sum(len(other.calls) > turn for other in group.episodes) > 1:  # there is something to compare with
                    advantages = found.get(id(episode.calls[0]))
                    estimates[position(call), call.text].append((advantages[turn] if advantages else 0.0) or 0.0)
    # Whoever got as far as turn t, on average.
    mean = dict.fromkeys(range(3), 0.0)
    reached = dict(mean)
    for said, word in DECISIONS:
        here = math.prod(chance(said[:i], said[i]) for i in range(len(said))) * chance(said, word)
        reached[len(said)] += here
        mean[len(said)] += here * worth(said, word, discount)
    check(estimates, {(s, w): worth(s, w, discount) - mean[len(s)] / reached[len(s)] for s, w in DECISIONS})


# ----------------------------------------------------------------------------------------- baselines, by enumeration


def all_episodes() -> list[tuple[float, Episode]]:
    """Every way the game can go, with its probability; reward at the end only."""
    found = []
    for words in FINAL:
        calls, likely = [], 1.0
        for i, word in enumerate(words):
            message = {"role": "user", "content": f"You said {words[:i]}. Go on."}
            calls.append(ModelCall("r", [message], None, [1], [2], [0.0], 1.0, 1.0, 0, "stop", word, 0))
            likely *= chance(words[:i], word)
        found.append((likely, Episode(WorkflowTask(task=Task()), calls, {"r": FINAL[words]})))
    return found


def score(call: ModelCall) -> tuple[str, float]:
    """Derivative of the log-probability of what was said, by the logit of `a` at its position."""
    return position(call), (call.text == "a") - CHANCE[position(call)]


def expected_gradient(baseline: str) -> dict[str, float]:
    """The exact expectation of the estimated policy gradient, over all groups of two episodes."""
    total = dict.fromkeys(CHANCE, 0.0)
    for (p, first), (q, second) in itertools.product(all_episodes(), repeat=2):
        group = EpisodeGroup(Task(), [first, second])
        if baseline == "mean over calls":
            rows = [(call, e.reward["r"]) for e in group.episodes for call in e.calls]  # type: ignore[index]
            mean = fmean(reward for _, reward in rows)
            pairs = [(call, reward - mean) for call, reward in rows]
        else:
            (credits,) = compute_advantages([group], baseline)  # type: ignore[arg-type]
            pairs = [
                (call, advantage)
                for credit in credits
                for call, advantage in zip(credit.trajectory.calls, credit.advantages, strict=True)
                if advantage is not None
            ]
        for call, advantage in pairs:
            at, slope = score(call)
            total[at] += p * q * slope * advantage / 2
    return total


def true_gradient() -> dict[str, float]:
    """By finite differences of the expected reward."""
    result = {}
    for at, before in CHANCE.items():
        ends = []
        for step in (1e-4, -1e-4):
            odds = math.log(before / (1 - before)) + step
            CHANCE[at] = 1 / (1 + math.exp(-odds))
            ends.append(sum(p * e.reward["r"] for p, e in all_episodes()))  # type: ignore[index]
            CHANCE[at] = before
        result[at] = (ends[0] - ends[1]) / 2e-4
    return result


def test_a_baseline_over_episodes_is_unbiased_and_one_over_calls_is_not() -> None:
    truth = true_gradient()
    assert expected_gradient("leave_one_out") == pytest.approx(truth, abs=1e-6)
    assert expected_gradient("mean_only") == pytest.approx({at: g / 2 for at, g in truth.items()}, abs=1e-6)
    naive = expected_gradient("mean over calls")
    # Not merely another length: another direction, since some decisions are scaled down more than others.
    scales = [naive[at] / truth[at] for at in truth]
    assert max(scales) > 1.3 * min(scales) > 0


# ----------------------------------------------------------------------------------------------------- branching


def test_a_branched_episode_repeats_itself_up_to_the_branch(model: PolicyModel) -> None:
    (group,) = play(model, Game, groups=1, size=3, branching=BranchingConfig(episodes=3, continuations=2, turns=[1]))
    branched = [episode for episode in group.episodes if episode.branch is not None]
    assert [episode for episode in group.episodes if len(episode.calls) > 1] == branched != []
    for episode in branched:
        branch = episode.branch
        assert branch is not None and branch.call == 1
        for other in branch.continuations:
            assert other.error is None
            assert other.workflow_task.seed == episode.workflow_task.seed
            assert other.calls[0].completion_ids == episode.calls[0].completion_ids
            assert other.calls[1].prompt_ids == episode.calls[1].prompt_ids
            assert other.replayed == 1
            assert other.tokens_sampled == sum(len(call.completion_ids) for call in other.calls[1:])


@pytest.mark.parametrize("insists", [False, True])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_workflow_that_does_not_repeat_itself_says_so(turn: int, insists: bool, model: PolicyModel) -> None:
    """Also where the turn that is sampled anew is the first that differs, and where it tries again."""
    counter = itertools.count()

    class Forgetful(Game):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            for _ in range(3 if insists else 1):
                try:
                    await model_tuner([{"role": "user", "content": f"Try {next(counter)}. You said . Go on."}])
                    break
                except ReplayError:
                    if not insists:
                        raise
            try:
                return await super().execute(task, model_tuner)
            except ReplayError:
                if not insists:
                    raise
                return WorkflowOutput(reward=1.0)

    (group,) = play(model, Forgetful, groups=1, size=1, branching=BranchingConfig(turns=[turn]))
    assert group.episodes[0].error is None
    assert group.episodes[0].branch is not None
    for other in group.episodes[0].branch.continuations:
        assert other.error is not None and other.error.kind == "ReplayError"
        assert "WorkflowTask.seed" in other.error.message


def test_ids_of_tool_calls_are_the_same_again(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    plain = tokenizer.chat_template
    # As Mistral's templates do.
    tokenizer.chat_template = plain.replace("message.content + '\\n</tool", "message.tool_call_id + '\\n</tool")
    assert tokenizer.chat_template != plain
    renderer = ChatRenderer(tokenizer)
    calls = ScriptedPolicy(renderer, lambda *_: write_reply("", [("now", {})]))
    model = PolicyModel(calls, renderer, frozenset([tokenizer.eos_token_id]), "caller", SamplingParams())
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]

    class Caller(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "What time is it?"}]
            for _ in range(3):
                (call,) = (await model_tuner(messages, tools)).content
                function = {"name": call["name"], "arguments": json.dumps(call["input"])}
                asked = [{"id": call["id"], "type": "function", "function": function}]
                messages += [{"role": "assistant", "content": None, "tool_calls": asked}]
                messages += [{"role": "tool", "content": "noon", "tool_call_id": call["id"]}]
            return WorkflowOutput(reward=1.0)

    branching = BranchingConfig(continuations=1, turns=[2])
    (first, second) = (play(model, Caller, groups=1, size=1, branching=branching)[0] for _ in range(2))
    (episode,) = first.episodes
    assert episode.error is None
    assert episode.branch is not None
    assert [other.error for other in episode.branch.continuations] == [None]
    asked = renderer.decode(episode.calls[2].prompt_ids)
    assert [call["id"] in asked for m in episode.calls[2].messages for call in m.get("tool_calls", ())] == [True] * 2
    assert [c.prompt_ids for c in episode.calls] == [c.prompt_ids for c in second.episodes[0].calls]


def test_default_models_are_not_asked_again(model: PolicyModel) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return f"Hint {len(asked)}."

    class Helped(Workflow):
        trainable_targets: list[str] | None = ["player"]  # noqa: RUF012

        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            model_tuner.register_model("player")
            model_tuner.register_model("helper", default_model=ScriptedModel(answer))
            for said in ("", "a"):
                hint = await model_tuner.get_model("helper")([{"role": "user", "content": f"Help {said}"}])
                text = f"{hint.content[0]['text']} You said {said}. Go on."
                await model_tuner.get_model("player")([{"role": "user", "content": text}])
            return WorkflowOutput(reward=1.0)

    (group,) = play(model, Helped, groups=1, size=1, branching=BranchingConfig(continuations=2, turns=[1]))
    assert len(asked) == 2, "everything before the branch is known"
    branch = group.episodes[0].branch
    assert branch is not None
    assert [other.error for other in branch.continuations] == [None, None]


def test_auxiliary_models_repeat_themselves(model: PolicyModel) -> None:
    async def helped(task: dict[str, Any], model: Any, auxiliary_models: dict[str, Any]) -> WorkflowOutput:
        for said in ("", "a"):
            hint = await auxiliary_models["helper"]([{"role": "user", "content": "You said . Go on."}])
            text = f"Hint: {hint.content[0]['text']} You said {said}. Go on."
            await model([{"role": "user", "content": text}])
        return WorkflowOutput(reward=1.0)

    rollout = Rollout(WorkflowRunner(helped), None, model, WorkflowConfig(), 0, {"helper": model})
    branching = BranchingConfig(episodes=8, continuations=2, turns=[1])
    (group,) = asyncio.run(rollout.run([Task()], 8, phase="test", branching=branching))
    assert len({episode.calls[0].messages[0]["content"] for episode in group.episodes}) == 2, "hints differ"
    for episode in group.episodes:
        assert episode.branch is not None
        assert [other.error for other in episode.branch.continuations] == [None, None]


def test_continuations_that_all_fail_take_nothing_away(model: PolicyModel) -> None:
    class Fragile(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            said = ""
            for _ in range(2):
                answer = await model_tuner([{"role": "user", "content": "You said . Go on."}])
                said += answer.content[0]["text"]
            if "again" in task.episode_id:
                raise ValueError("no")
            return WorkflowOutput(reward=float(len(said.replace("b", ""))))

    groups = play(model, Fragile, groups=1, size=6, branching=BranchingConfig(episodes=6, continuations=2, turns=[1]))
    plain = play(model, Fragile, groups=1, size=6)
    advantages = [
        [credit.advantages for credit in credits] for credits in compute_advantages([*groups, *plain], "mean_only")
    ]
    assert advantages[0] == advantages[1] != []


# -------------------------------------------------------------------------------------------------- turn rewards


def test_rewards_of_turns_add_up(model: PolicyModel) -> None:
    (group,) = play(model, Game, groups=1, size=8)
    for episode in group.episodes:
        words = "".join(call.text for call in episode.calls)
        earned = [AT_ONCE.get(words[: i + 1], 0.0) for i in range(len(words))]
        assert [call.reward for call in episode.calls] == earned
        assert episode.reward == {"default": pytest.approx(sum(earned) + FINAL[words])}
        (trajectory,) = episode.trajectories()
        assert trajectory.returns(1.0)[0] == pytest.approx(episode.reward["default"])
        assert trajectory.returns(0.5)[-1] == pytest.approx(earned[-1] + FINAL[words])


def test_turn_rewards_alone_are_enough(model: PolicyModel) -> None:
    class Paid(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            await model_tuner([{"role": "user", "content": "You said . Go on."}])
            model_tuner.reward("default", 0.5)
            model_tuner.reward("default", 0.25)
            return WorkflowOutput()

    (group,) = play(model, Paid, groups=1, size=2)
    assert [episode.reward for episode in group.episodes] == [{"default": 0.75}] * 2


def test_turns_that_earned_nothing_were_rewarded_as_well(model: PolicyModel) -> None:
    class Poor(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            for value in (0.5, -0.5):
                await model_tuner([{"role": "user", "content": "You said . Go on."}])
                model_tuner.reward("default", value if task.group_index else 0.0)
            return WorkflowOutput()

    (group,) = play(model, Poor, groups=1, size=2)
    assert [(episode.error, episode.reward) for episode in group.episodes] == [(None, {"default": 0.0})] * 2


@pytest.mark.parametrize(("amount", "first", "message"), [(math.nan, False, "finite"), (1.0, True, "first turn")])
def test_a_turn_reward_that_cannot_be_given_is_explained(
    model: PolicyModel, amount: float, first: bool, message: str
) -> None:
    class Wrong(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            if not first:
                await model_tuner([{"role": "user", "content": "You said . Go on."}])
            model_tuner.reward("default", amount)
            return WorkflowOutput(reward=1.0)

    (group,) = play(model, Wrong, groups=1, size=1)
    error = group.episodes[0].error
    assert error is not None and error.kind == "RewardError" and message in error.message
