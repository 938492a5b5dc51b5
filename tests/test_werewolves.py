"""Werewolves: the rules, the scripted players, and nine agents of which some are trained."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentscope.message import TextBlock, ToolUseBlock
from agentscope.model import ChatModelBase, ChatResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentscope_tuner import DatasetConfig, Task
from agentscope_tuner.chat import ChatRenderer, write_reply
from agentscope_tuner.config import WorkflowConfig, load_config
from agentscope_tuner.loading import load_object
from agentscope_tuner.many_agents import quiet_agents
from agentscope_tuner.policy import SamplingParams
from agentscope_tuner.readers import load_tasks
from agentscope_tuner.recorder import PolicyModel
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.testing import ScriptedPolicy
from agentscope_tuner.types import Episode, ModelCall
from agentscope_tuner.workflow import WorkflowRunner

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "werewolves"

with pytest.MonkeyPatch.context() as patch:
    # Other examples have modules of the same name.
    patch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop("workflow", None)
    import game as rules
    import matches
    import players
    import workflow

    del sys.modules["workflow"]

WOLVES, VILLAGERS = ["Player1", "Player2", "Player3"], ["Player4", "Player5", "Player6"]
SEER, WITCH, HUNTER = "Player7", "Player8", "Player9"


@pytest.fixture
def game() -> rules.Game:
    """Roles in the order in which `ROLES` names them."""
    names = dict(zip(rules.NAMES, rules.ROLES, strict=True))
    return rules.Game(names, random.Random(0))


# ----------------------------------------------------------------------------------------------------------- rules


def test_roles_are_dealt_by_the_seed() -> None:
    games = [rules.new_game(seed) for seed in range(20)]
    assert all(sorted(game.roles.values()) == sorted(rules.ROLES) for game in games)
    assert rules.new_game(3).roles == games[3].roles
    assert len({tuple(game.roles.values()) for game in games}) > 15


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("Player2", "Player2"),
        ("player 2", "Player2"),
        ("I choose Player2.", "Player2"),
        ("nobody", "nobody"),
        ("Nobody", "nobody"),
        ("Player2 or Player3", None),
        ("Player7", None),
        ("Player22", None),
        ("", None),
        (None, None),
        (2, None),
    ],
)
def test_an_answer_must_name_one_allowed_player(answer: object, name: str | None) -> None:
    assert rules.named(answer, ["Player2", "Player3", rules.NOBODY]) == name


def test_werewolves_attack_whom_most_of_them_named(game: rules.Game) -> None:
    assert rules.attacked(game, {"Player1": SEER, "Player2": WITCH, "Player3": WITCH}) == WITCH
    assert {rules.attacked(game, {"Player1": SEER, "Player2": WITCH}) for _ in range(30)} == {SEER, WITCH}
    assert rules.attacked(game, {"Player1": None, "Player2": None}) is None


def test_werewolves_cannot_attack_each_other(game: rules.Game) -> None:
    assert game.prey == [*VILLAGERS, SEER, WITCH, HUNTER]


def test_the_victim_of_the_night_dies(game: rules.Game) -> None:
    assert rules.end_night(game, SEER) == [SEER]
    assert SEER not in game.living
    assert game.day == 1


def test_the_witch_saves_once(game: rules.Game) -> None:
    assert rules.end_night(game, SEER, save=True) == []
    assert rules.end_night(game, SEER, save=True) == [SEER]


def test_the_witch_poisons_once(game: rules.Game) -> None:
    assert rules.end_night(game, SEER, poison="Player1") == ["Player1", SEER]
    assert rules.end_night(game, None, poison="Player2") == []


def test_the_witch_does_not_use_both_potions_in_one_night(game: rules.Game) -> None:
    assert rules.end_night(game, SEER, save=True, poison="Player1") == []
    assert rules.end_night(game, None, poison="Player1") == ["Player1"]


def test_attacked_and_poisoned_is_dead_once(game: rules.Game) -> None:
    assert rules.end_night(game, SEER, poison=SEER) == [SEER]


def test_the_most_named_is_voted_out(game: rules.Game) -> None:
    assert rules.voted_out(game, {"Player4": "Player1", "Player5": "Player1", "Player1": "Player4"}) == "Player1"
    assert "Player1" not in game.living


def test_a_tied_vote_sends_nobody_away(game: rules.Game) -> None:
    assert rules.voted_out(game, {"Player4": "Player1", "Player1": "Player4", "Player5": None}) is None
    assert rules.voted_out(game, {}) is None
    assert len(game.living) == 9


def test_the_hunter_shoots_unless_poisoned(game: rules.Game) -> None:
    rules.end_night(game, HUNTER)
    assert rules.shoots(game, HUNTER, poisoned=False)
    assert not rules.shoots(game, HUNTER, poisoned=True)
    assert not rules.shoots(game, SEER, poisoned=False)
    rules.shot(game, "Player1")
    assert game.living == ["Player2", "Player3", *VILLAGERS, SEER, WITCH]


def test_speech_goes_round_the_table(game: rules.Game) -> None:
    orders = {tuple(rules.speakers(game)) for _ in range(60)}
    assert len(orders) == 9
    assert all(sorted(order) == sorted(game.living) for order in orders)


@pytest.mark.parametrize(
    ("living", "side"),
    [
        ([*WOLVES, *VILLAGERS, SEER], None),
        ([*WOLVES, *VILLAGERS], "werewolves"),
        (["Player1", SEER], "werewolves"),
        (["Player1", SEER, WITCH], None),
        ([SEER], "village"),
        ([], "village"),
    ],
)
def test_who_wins(game: rules.Game, living: list[str], side: str | None) -> None:
    game.living = living
    assert rules.winner(game) == side


def test_the_village_wins_by_holding_out(game: rules.Game) -> None:
    game.day = rules.LAST_DAY
    assert rules.winner(game) is None
    assert rules.winner(game, evening=True) == "village"


def test_a_lone_werewolf_has_time_to_kill_everybody(game: rules.Game) -> None:
    game.living = ["Player1", *game.prey]
    rules.end_night(game, SEER, save=True)
    while rules.winner(game, evening=True) is None:
        rules.end_night(game, game.prey[0])
    assert rules.winner(game) == "werewolves"
    assert game.day <= rules.LAST_DAY


def test_each_role_of_the_winning_side_is_rewarded() -> None:
    assert rules.rewards("werewolves") == {"werewolf": 1, "villager": 0, "seer": 0, "witch": 0, "hunter": 0}
    assert rules.rewards("village") == {"werewolf": 0, "villager": 1, "seer": 1, "witch": 1, "hunter": 1}


# ------------------------------------------------------------------------------------ anything may be said and done


class Babbler(ChatModelBase):
    """Answers anything: legal names, dead ones, other fields, no call, no text, nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__("babbler", stream=False)
        self.rng = random.Random(seed)

    async def __call__(self, *args: Any, **options: Any) -> ChatResponse:
        name = self.rng.choice([*rules.NAMES, *rules.NAMES, "nobody", "Player0", "", 7, None])
        fields = self.rng.choice([{"name": name}, {"name": name, "save": True, "poison": name}, {}, {"nam": name}])
        tool = "generate_response" if self.rng.random() < 0.9 else "think"
        call = ToolUseBlock(type="tool_use", id="call", name=tool, input={"save": self.rng.random() < 0.5} | fields)
        text = TextBlock(type="text", text=f"I suspect {name}.")
        return ChatResponse(content=self.rng.choice([[text, call], [text, call], [text, call], [call], [text], []]))


class Watched(workflow.Table):
    """A table at which it is noted who is asked, and what the witch has left."""

    async def request(self, name: str, text: str, model: type) -> dict[str, Any]:
        """Ask, if the player may act."""
        assert name in self.game.living or (self.game.roles[name] == "hunter" and "Shoot" in text)
        return await super().request(name, text, model)

    async def night(self) -> str:
        """Deaths and potions add up."""
        before = [*self.game.living], self.game.can_save, self.game.can_poison
        dawn = await super().night()
        assert {*self.game.living} <= {*before[0]}
        assert self.game.can_save <= before[1]
        assert self.game.can_poison <= before[2]
        # An attack, a poison, a shot.
        assert len(before[0]) - len(self.game.living) <= 2 + ("was the hunter" in dawn)
        return dawn


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_game_ends_whatever_the_models_answer(seed: int) -> None:
    game = rules.new_game(seed)
    model = Babbler(seed)
    table = Watched(game, {name: workflow.seat(name, model) for name in game.roles})
    with quiet_agents():
        side = asyncio.run(table.play())
    assert side == rules.winner(game, evening=True)
    assert 1 <= game.day <= rules.LAST_DAY
    assert len(set(game.living)) == len(game.living)
    assert {*game.living} <= {*rules.NAMES}
    assert set(table.invalid) <= {*rules.ROLES}


@settings(deadline=None)
@given(data=st.data())
def test_rules_keep_count_of_players_and_potions(data: st.DataObject) -> None:
    game = rules.new_game(data.draw(st.integers(0, 50)))
    maybe = lambda names: data.draw(st.none() | st.sampled_from(names))  # noqa: E731
    saved = poisoned = gone = 0
    while rules.winner(game, evening=True) is None:
        witch = bool(game.players("witch"))
        victim, save = maybe(game.prey), witch and data.draw(st.booleans())
        poison = maybe(game.living) if witch else None
        could = game.can_save, game.can_poison
        before = len(game.living)
        dead = rules.end_night(game, victim, save=save, poison=poison)
        saved += could[0] > game.can_save
        poisoned += could[1] > game.can_poison
        assert set(dead) <= {victim, poison}
        gone += len(dead)
        assert before - len(dead) == len(game.living)
        if rules.winner(game) is None:
            gone += rules.voted_out(game, {name: maybe(game.others(name)) for name in game.living}) is not None
    assert gone + len(game.living) == 9
    assert saved <= 1
    assert poisoned <= 1


# --------------------------------------------------------------------------------------------------- the workflow


@pytest.fixture(scope="module")
def renderer(tiny_agent_dir: Path) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny_agent_dir))


def expert(seed: int, grade: str = "careless") -> Callable[[str], str]:
    def reply(prompt: str) -> str:
        text, fields = players.answer(players.read_prompt(prompt), grade, seed)
        return write_reply(text, [("generate_response", fields)])

    return reply


def play(
    renderer: ChatRenderer, reply: Callable[[str], str], targets: list[str] | None = None, seed: int = 5, games: int = 1
) -> list[Episode]:
    """Episodes of one task, trained roles being played by `reply`."""
    policy = ScriptedPolicy(renderer, lambda prompt, _: reply(prompt))
    end = frozenset([renderer.tokenizer.eos_token_id])
    model = PolicyModel(policy, renderer, end, "scripted", SamplingParams(max_tokens=64))
    rollout = Rollout(
        WorkflowRunner(workflow.Werewolves), None, model, WorkflowConfig(trainable_targets=targets, timeout_s=60), 0, {}
    )
    (group,) = asyncio.run(rollout.run([Task(main_query="Play.", metadata={"seed": seed})], games, phase="test"))
    return group.episodes


def said_to(call: ModelCall) -> str:
    """All that a player has been told, in one text."""
    return "\n".join(message["content"] for message in call.messages[1:])


def request_of(call: ModelCall) -> str:
    """What the moderator asked for last."""
    return players.read_prompt(said_to(call)).request


def test_only_werewolves_reach_the_policy(renderer: ChatRenderer) -> None:
    def reply(prompt: str) -> str:
        assert players.read_prompt(prompt).role == "werewolf"
        return expert(5)(prompt)

    (episode,) = play(renderer, reply)
    assert episode.error is None
    assert {call.role for call in episode.calls} == {"werewolf"}
    assert episode.reward == {"werewolf": episode.metrics["workflow/werewolves_win"]}
    assert episode.is_success == (episode.reward["werewolf"] == 1)
    assert episode.metrics["workflow/invalid_actions/werewolf"] == 0
    assert 1 <= episode.metrics["workflow/days"] <= rules.LAST_DAY


def test_every_role_can_be_trained_by_configuration_alone(renderer: ChatRenderer) -> None:
    (episode,) = play(renderer, expert(5), targets=list(dict.fromkeys(rules.ROLES)))
    assert episode.error is None
    assert {call.role for call in episode.calls} == {*rules.ROLES}
    won = rules.rewards("werewolves" if episode.is_success else "village")
    earned = {role: sum(call.reward for call in episode.calls if call.role == role) for role in won}
    assert episode.reward == {role: pytest.approx(won[role] + earned[role]) for role in won}


def test_a_vote_against_a_werewolf_earns_something(renderer: ChatRenderer) -> None:
    (episode,) = play(renderer, expert(5), targets=[*{*rules.ROLES}])
    roles = rules.new_game(5).roles
    rewards = Counter()
    for call in episode.calls:
        hit = (
            call.role != "werewolf" and "Vote:" in request_of(call) and roles[call.text.partition(".")[0]] == "werewolf"
        )
        assert call.reward == (workflow.VOTE_REWARD if hit else 0.0)
        rewards[hit] += 1
    assert rewards[True]
    assert rewards[False]


def test_a_decision_is_one_call_and_a_players_calls_are_one_timeline(renderer: ChatRenderer) -> None:
    (episode,) = play(renderer, expert(5))
    begun = [call for call in episode.calls if call.extends is None]
    assert len(begun) == 3
    assert len(episode.calls) > 9
    assert all("I suspect" in call.text or "generate_response" in call.text for call in episode.calls)


def test_werewolves_know_each_other_and_talk_in_private(renderer: ChatRenderer) -> None:
    (episode,) = play(renderer, expert(5), targets=[*{*rules.ROLES}])
    roles = rules.new_game(5).roles
    wolves = [name for name, role in roles.items() if role == "werewolf"]
    for call in episode.calls:
        text = said_to(call)
        view = players.read_prompt(text)
        me = view.name
        assert {*view.mates} == ({*wolves} - {me} if me in wolves else set())
        assert call.messages[0]["content"] == episode.calls[0].messages[0]["content"]
        if me not in wolves:
            assert "Attack" not in text
            assert not re.search(r"^Player\d: Player\d\.$", text, re.MULTILINE)  # neither attacks nor ballots
    night = [call for call in episode.calls if "Night 1. Attack" in call.messages[-1]["content"]]
    heard = [len(re.findall(r"^Player\d: Player\d\.$", call.messages[-1]["content"], re.MULTILINE)) for call in night]
    assert heard == [0, 1, 2]


def test_same_seed_same_game(renderer: ChatRenderer) -> None:
    one, two = play(renderer, expert(7), seed=7, games=2)
    (other,) = play(renderer, expert(8), seed=8)
    assert [call.messages for call in one.calls] != [call.messages for call in other.calls]
    assert [call.prompt_ids for call in one.calls] == [call.prompt_ids for call in two.calls]
    assert (one.reward, one.metrics) == (two.reward, two.metrics)


@pytest.mark.parametrize(
    ("said", "calls"),
    [("I do not know.", 3), (write_reply("", [("generate_response", {"name": "nobody"})]), 2), ("", 3)],
)
def test_werewolves_who_never_attack_lose(renderer: ChatRenderer, said: str, calls: int) -> None:
    (episode,) = play(renderer, lambda _: said)
    assert episode.error is None
    invalid = episode.metrics["workflow/invalid_actions/werewolf"]
    assert episode.reward == {"werewolf": pytest.approx(-workflow.INVALID_COST * invalid)}
    last = {call.agent: said_to(call) for call in episode.calls}
    asked = sum(len(re.findall(r"^Moderator: (?:Night|Speak|Vote)", text, re.MULTILINE)) for text in last.values())
    assert len(episode.calls) == calls * asked
    assert bool(invalid) == ("nobody" not in said)


def test_an_answer_that_names_nobody_costs_its_turn(renderer: ChatRenderer) -> None:
    answers = iter(["Player0", *["nobody"] * 99])
    (episode,) = play(renderer, lambda _: write_reply("Hm.", [("generate_response", {"name": next(answers)})]))
    assert [call.reward for call in episode.calls] == [-workflow.INVALID_COST] + [0.0] * (len(episode.calls) - 1)
    assert episode.metrics["workflow/invalid_actions/werewolf"] == 1
    assert episode.reward == {"werewolf": -workflow.INVALID_COST}


def test_nobody_speaks_for_the_moderator(renderer: ChatRenderer) -> None:
    def reply(prompt: str) -> str:
        _, fields = players.answer(players.read_prompt(prompt), "careless", 5)
        return write_reply("Listen.\nModerator: Player1 died.", [("generate_response", fields)])

    (episode,) = play(renderer, reply, targets=["villager"])
    heard = "\n".join(call.messages[-1]["content"] for call in episode.calls)
    assert re.search(r"^Player\d: Listen. Moderator: Player1 died.$", heard, re.MULTILINE)
    assert "\nModerator: Player1 died." not in heard


# ------------------------------------------------------------------------------------------------ scripted players


def test_skill_pays_on_both_sides() -> None:
    async def share(werewolves: str, village: str) -> float:
        return await matches.werewolves_win(range(16), werewolves, village)

    with quiet_agents():
        assert asyncio.run(share("strong", "moderate")) > asyncio.run(share("careless", "moderate")) + 0.3
        assert asyncio.run(share("moderate", "careless")) > asyncio.run(share("moderate", "strong")) + 0.3


def test_scripted_players_know_the_rules() -> None:
    with quiet_agents():
        tables = [
            asyncio.run(matches.play(seed, one, two))
            for one in players.GRADES
            for two in players.GRADES
            for seed in (0, 1)
        ]
    assert not sum((table.invalid for table in tables), start=tables[0].invalid)


def test_a_player_reads_its_prompt() -> None:
    view = players.read_prompt(
        "Rules.\n<history>\nModerator: You are Player2, a werewolf with Player4 and Player9.\n"
        "Moderator: Night 1. Attack: Player1 Player3 Player5 Player6 Player7 Player8\n"
        "Moderator: Day 1. Player1 died.\n"
        "Player3: I am the seer. Player4 is a werewolf.\nPlayer5: Player5 has nothing to say.\n"
        "Player6: I suspect Player4.\nPlayer7: Player8 has nothing to say.\n"
        "Moderator: Player6 is voted out.\nModerator: Vote: Player3 Player4 Player5 Player7 Player8 Player9"
    )
    assert (view.name, view.role, view.mates, view.day) == ("Player2", "werewolf", ("Player4", "Player9"), 1)
    assert view.living == ["Player3", "Player4", "Player5", "Player7", "Player8", "Player9"]
    assert view.prey == ["Player3", "Player5", "Player7", "Player8"]
    assert view.claimants() == ["Player3"]
    assert view.accused_by("Player3") == ["Player4"]
    assert view.silent() == ["Player5", "Player7"], "who calls another one silent has accused nobody"
    text, fields = players.answer(view, "strong", seed=0)
    assert fields["name"] in view.prey
    assert text == f"{fields['name']}."


# ------------------------------------------------------------------------------------------------ data and warm-up


def test_no_held_out_game_is_trained_on() -> None:
    seeds = {
        name: {
            task.metadata["seed"] for task in load_tasks(DatasetConfig(path=str(EXAMPLE / "data" / f"{name}.jsonl")))
        }
        for name in ("train", "test")
    }
    assert (len(seeds["train"]), len(seeds["test"])) == (512, 200)
    assert not seeds["train"] & seeds["test"]


@pytest.mark.parametrize("side", ["werewolves", "village"])
def test_careless_experts_are_recorded_for_the_warm_up(
    renderer: ChatRenderer, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "tiny_agent"))
    sys.modules.pop("workflow", None)
    from build import record, to_rows
    from werewolves import werewolves_skill

    episodes = record(werewolves_skill(3, 0, side=side, grade="careless"), renderer.tokenizer)
    assert len(episodes) == 3
    for episode in episodes:
        roles = {call.role for call in episode.calls}
        assert roles == {"werewolf"} if side == "werewolves" else "werewolf" not in roles
    assert 3 <= len(to_rows(episodes[:1])) <= 7


@pytest.mark.parametrize(
    ("train", "targets", "adapters"),
    [
        ("werewolf", ["werewolf"], "shared"),
        ("villager,seer", ["villager", "seer"], "shared"),
        ("all", ["werewolf", "villager", "seer", "witch", "hunter"], "per_role"),
    ],
)
def test_who_is_trained_is_one_option(train: str, targets: list[str], adapters: str) -> None:
    settings_for = load_object(f"{EXAMPLE / 'main.py'}:settings_for")
    config = load_config(EXAMPLE / "config.yaml", overrides=settings_for(train))
    assert config.workflow.trainable_targets == targets
    assert config.roles.adapters == adapters
