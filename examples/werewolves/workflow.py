"""Nine agents play Werewolves; any of the five roles can be trained.

An agent answers each request with a short text and, in the same message, a call that holds its decision; `ReActAgent`
then needs one model call per request. A model that gives the call alone is asked once more, for the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIMultiAgentFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase
from agentscope.pipeline import MsgHub
from game import (
    NOBODY,
    ROLES,
    WEREWOLF,
    Game,
    Side,
    attacked,
    end_night,
    named,
    new_game,
    rewards,
    shoots,
    shot,
    speakers,
    voted_out,
    winner,
)
from players import scripted_model
from pydantic import BaseModel, Field

from agentscope_tuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

RULES = (
    "The game is Werewolves: 3 werewolves, 3 villagers, seer, witch, hunter. The werewolves win when they are half of "
    "the living, the others when no werewolf is left. Say one short sentence, and call."
)
INVALID_COST = 0.1
"""What a turn loses that named no allowed player. Who won the game says little about one answer of fifty."""
VOTE_REWARD = 0.1
"""What a vote against a werewolf earns its villager, seer, witch or hunter."""
NAME = Field(description=f"A living player, or {NOBODY}.")


class Choice(BaseModel):
    """One player. All choices have one schema, so that each prompt of a player begins with the one before."""

    name: str = NAME


class Suspicion(Choice):
    """Whom a player suspects, beside what it says."""


class Vote(Choice):
    """Whom a player wants to leave."""


class Target(Choice):
    """Whom a werewolf wants to attack."""


class Check(Choice):
    """Whom the seer wants to know about."""


class Shot(Choice):
    """Whom the hunter takes along."""


class Potion(BaseModel):
    """What the witch does."""

    save: bool = Field(description="Save the victim.")
    poison: str = NAME


def identity(game: Game, name: str) -> str:
    """Who a player is. All system prompts are the same, so that all prompts begin alike and this is run only once."""
    role = game.roles[name]
    mates = [mate for mate in game.players(role) if mate != name] if role == WEREWOLF else []
    article = "a" if ROLES.count(role) > 1 else "the"
    return f"You are {name}, {article} {role}{' with ' + ' and '.join(mates) if mates else ''}."


def seat(name: str, model: ChatModelBase) -> ReActAgent:
    """The agent that plays for a name."""
    agent = ReActAgent(
        name=name,
        sys_prompt=RULES,
        model=model,
        formatter=OpenAIMultiAgentFormatter(),
        # The call, and the text if it came without one.
        max_iters=2,
    )
    agent.register_instance_hook("post_reply", "one_line", _in_one_line)
    return agent


@dataclass
class Table:
    """A game, its players, and what they did wrong."""

    game: Game
    agents: dict[str, ReActAgent]
    earns: Callable[[str, float], None] = lambda role, value: None
    """Hears what the last turn of a role was worth by itself."""
    invalid: Counter[str] = field(default_factory=Counter)
    """How often each role did."""

    async def play(self) -> Side:
        """Nights and days until one side has won."""
        for name, agent in self.agents.items():
            await agent.observe(_moderator(identity(self.game, name)))
        while True:
            dawn = await self.night()
            if side := winner(self.game):
                return side
            await self.day(dawn)
            if side := winner(self.game, evening=True):
                return side

    async def night(self) -> str:
        """Werewolves, seer and witch act; returns what is announced at dawn."""
        game, night = self.game, f"Night {self.game.day + 1}."
        wolves = game.players(WEREWOLF)
        async with MsgHub([self.agents[name] for name in wolves]):
            # One after the other: each hears whom the others named.
            targets = {name: await self.ask(name, f"{night} Attack", Target, game.prey) for name in wolves}
        victim = attacked(game, targets)
        for name in game.players("seer"):
            checked = await self.ask(name, f"{night} Check", Check, game.others(name))
            if checked is not None:
                what = "a werewolf" if game.roles[checked] == WEREWOLF else "good"
                await self.agents[name].observe(_moderator(f"{checked} is {what}."))
        save, poison = False, None
        for name in game.players("witch"):
            save, poison = await self.brew(name, night, victim)
        dead = end_night(game, victim, save=save, poison=poison)
        news = f"{' and '.join(dead) or 'Nobody'} died."
        for name in dead:
            news += await self.last_shot(name, news, poisoned=name == poison)
        return f"Day {game.day}. {news}"

    async def brew(self, witch: str, night: str, victim: str | None) -> tuple[bool, str | None]:
        """What the witch does with the potions that are left. She learns of the victim while she can save."""
        game = self.game
        if not (game.can_save or game.can_poison):
            return False, None
        news = f" {victim or 'Nobody'} is attacked. Save?" if game.can_save else ""
        targets = game.others(witch) if game.can_poison else []
        answer = await self.request(witch, f"{night}{news}{_choice(' Poison', targets) if targets else ''}", Potion)
        save = bool(answer.get("save"))
        poison = named(answer.get("poison"), [*targets, NOBODY])
        if poison is None or (save and (victim is None or not game.can_save)):
            self.count_invalid("witch")
        return save, None if poison == NOBODY else poison

    async def day(self, dawn: str) -> None:
        """Everybody speaks once, then votes."""
        game = self.game
        async with MsgHub([self.agents[name] for name in game.living], announcement=_moderator(dawn)) as hub:
            for name in speakers(game):
                await self.ask(name, "Speak. Suspects", Suspicion, game.others(name))
            # The ballot is secret. One after the other all the same: the order of calls fixes their random numbers.
            hub.set_auto_broadcast(False)
            votes = {name: await self.vote(name) for name in game.living}
            out = voted_out(game, votes)
            news = f"{out or 'Nobody'} is voted out."
            if out is not None:
                news += await self.last_shot(out, news, poisoned=False)
            await hub.broadcast(_moderator(news))

    async def vote(self, name: str) -> str | None:
        """Whom a player wants to leave."""
        game = self.game
        chosen = await self.ask(name, "Vote", Vote, game.others(name))
        if chosen is not None and game.roles[chosen] == WEREWOLF != game.roles[name]:
            self.earns(game.roles[name], VOTE_REWARD)
        return chosen

    async def last_shot(self, name: str, news: str, *, poisoned: bool) -> str:
        """The shot of a hunter who has just died, and its announcement."""
        if not shoots(self.game, name, poisoned=poisoned):
            return ""
        target = await self.ask(name, f"{news} Shoot", Shot, self.game.living)
        shot(self.game, target)
        return f" {name} was the hunter and shot {target or NOBODY}."

    async def ask(self, name: str, text: str, model: type[Choice], allowed: Sequence[str]) -> str | None:
        """The player chosen; None where the answer is `nobody`, or where it is none and the action is lost."""
        # Whoever is asked is named last, so that nobody has to look up who it is.
        answer = await self.request(name, f"{_choice(text, allowed)}. {name}?", model)
        chosen = named(answer.get("name"), [*allowed, NOBODY])
        if chosen is None:
            self.count_invalid(self.game.roles[name])
        return None if chosen == NOBODY else chosen

    def count_invalid(self, role: str) -> None:
        """The last answer of a role made no sense."""
        self.invalid[role] += 1
        self.earns(role, -INVALID_COST)

    async def request(self, name: str, text: str, model: type[BaseModel]) -> dict[str, Any]:
        """The fields of a player's answer; empty when it gave none that are valid."""
        reply = await self.agents[name](_moderator(text), structured_model=model)
        return reply.metadata or {}


class Werewolves(Workflow):
    """One game; the task's seed deals the roles."""

    name: str = "werewolves"
    trainable_targets: list[str] | None = ["werewolf"]  # noqa: RUF012 (a pydantic field: every instance has its own)
    default_model: Callable[[str, int], ChatModelBase] = scripted_model
    """The model of a role that is not trained, in the game of a seed."""

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Play, and reward the roles of the winning side."""
        seed = task.task.metadata["seed"]
        game = new_game(seed)
        agents = {}
        for name, role in game.roles.items():
            model_tuner.register_model(role, default_model=self.default_model(role, seed))
            agents[name] = seat(name, model_tuner.get_model(role))
        table = Table(game, agents, model_tuner.reward)
        side = await table.play()
        return WorkflowOutput(
            reward=rewards(side),
            response=side,
            is_success=side == "werewolves",
            metrics={
                "werewolves_win": float(side == "werewolves"),
                "days": float(game.day),
                **{f"invalid_actions/{role}": float(table.invalid[role]) for role in dict.fromkeys(ROLES)},
            },
        )


def _choice(text: str, names: Sequence[str]) -> str:
    return f"{text}: {' '.join(names)}"


def _moderator(text: str) -> Msg:
    return Msg("Moderator", text, "user")


def _in_one_line(agent: ReActAgent, request: dict[str, Any], reply: Msg) -> Msg:
    """What others hear. On a line of its own, a sentence could pass for one of the moderator's."""
    text = " ".join((reply.get_text_content() or "").split())
    reply.content = [TextBlock(type="text", text=text)]
    return reply
