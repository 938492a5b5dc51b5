"""Scripted players: chat models that read their prompt as any model would, and answer by rules.

They know nothing but what the prompt says: who they are, what the moderator announced, what was said. Three grades
play on either side. `careless` knows the rules and little else: random choices and empty talk. `moderate` plays the
roles that are not trained. `strong` shows how much there is to win.

The village takes silence for guilt, and believes whoever claims to be the seer. So werewolves win by naming others, the
same ones, and by killing the seer who came forward.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from agentscope.message import TextBlock, ToolUseBlock
from agentscope.model import ChatModelBase, ChatResponse
from game import NOBODY, WEREWOLF

Grade = Literal["careless", "moderate", "strong"]
GRADES: tuple[Grade, ...] = ("careless", "moderate", "strong")
Answer = tuple[str, dict[str, Any]]
"""What a player says, and the fields of its decision."""

_IDENTITY = re.compile(r"You are (Player\d), (?:a|the) (\w+)(?: with ([\w ]+))?\.")
_LINE = re.compile(r"^(Moderator|Player\d): (.*)$", re.MULTILINE)
_CLAIM = "I am the seer."
_SILENCE = "has nothing to say"
_WOLF = re.compile(r"(Player\d) is a werewolf")
_GOOD = re.compile(r"(Player\d) is good")
_PLAYER = re.compile(r"Player\d")


@dataclass(frozen=True)
class View:
    """What a player knows."""

    name: str
    role: str
    mates: tuple[str, ...]
    lines: list[tuple[str, str]]
    """(speaker, text), the last one being the request."""

    @property
    def request(self) -> str:
        """What the moderator asks for."""
        return self.lines[-1][1]

    @property
    def living(self) -> list[str]:
        """Who may be chosen: everybody else who lives, or less."""
        return _PLAYER.findall(self.request.partition(": ")[2].partition(".")[0])

    @property
    def prey(self) -> list[str]:
        """Living players who are not werewolves, to a werewolf's knowledge."""
        return [name for name in self.living if name not in self.mates]

    @property
    def day(self) -> int:
        """How many days have dawned."""
        return sum(text.startswith("Day ") for _, text in self.moderator())

    @property
    def can_save(self) -> bool:
        """Whether the witch is told of a victim."""
        return "Save" in self.request and "Nobody" not in self.request

    def moderator(self) -> list[tuple[str, str]]:
        """The moderator's lines."""
        return [line for line in self.lines if line[0] == "Moderator"]

    def said(self) -> list[tuple[str, str]]:
        """What the other players said."""
        return [line for line in self.lines if line[0] != "Moderator"]

    def said_today(self) -> list[tuple[str, str]]:
        """What they said since dawn."""
        dawn = max((i for i, (_, text) in enumerate(self.lines) if text.startswith("Day ")), default=len(self.lines))
        return [line for line in self.lines[dawn:] if line[0] != "Moderator"]

    def claimants(self) -> list[str]:
        """Who claimed to be the seer, first come first."""
        return list(dict.fromkeys(speaker for speaker, text in self.said() if _CLAIM in text))

    def accused_by(self, claimant: str) -> list[str]:
        """Living players of whom a claimant said that they are werewolves."""
        found = [name for speaker, text in self.said() if speaker == claimant for name in _WOLF.findall(text)]
        return [name for name in dict.fromkeys(found) if name in self.living]

    def silent(self) -> list[str]:
        """Who spoke today and accused nobody else."""
        said = [(name, _SILENCE not in text and {*_PLAYER.findall(text)} - {name}) for name, text in self.said_today()]
        return [name for name, accused in said if name in self.living and not accused]

    def checked(self, pattern: re.Pattern[str]) -> list[str]:
        """What the moderator told the seer."""
        return [name for _, text in self.moderator() for name in pattern.findall(text)]


def read_prompt(text: str) -> View:
    """Find a player's knowledge in the text of its prompt."""
    identity = _IDENTITY.search(text)
    if identity is None:
        raise ValueError(f"a scripted player needs `You are PlayerN, a <role>.` in its prompt, got {text[:80]!r}")
    name, role, mates = identity.groups()
    return View(name, role, tuple((mates or "").split(" and ")) if mates else (), _LINE.findall(text))


def answer(view: View, grade: Grade, seed: int) -> Answer:
    """What a player of a grade says and does; the same for the same seed and knowledge."""
    rng = random.Random(f"{seed}/{view.name}/{view.day}/{view.request}")
    side = _WEREWOLVES if view.role == WEREWOLF else _VILLAGE
    return side[grade](view, rng)


class ScriptedPlayer(ChatModelBase):
    """A scripted player as a chat model."""

    def __init__(self, grade: Grade, seed: int) -> None:
        super().__init__(f"scripted-{grade}", stream=False)
        self.grade = grade
        self.seed = seed

    async def __call__(self, messages: list[dict[str, Any]], *args: Any, **options: Any) -> ChatResponse:
        """One sentence, and the call that holds the decision."""
        texts = [block["text"] for message in messages for block in message.get("content") or () if "text" in block]
        text, fields = answer(read_prompt("\n".join(texts)), self.grade, self.seed)
        call = ToolUseBlock(type="tool_use", id="call", name="generate_response", input=fields)
        return ChatResponse(content=[TextBlock(type="text", text=text), call])


def scripted_model(role: str, seed: int) -> ChatModelBase:
    """The player of any untrained role."""
    return ScriptedPlayer("moderate", seed)


# -------------------------------------------------------------------------------------------------- ways to play


def _name(name: str) -> Answer:
    return f"{name}.", {"name": name}


def _suspect(name: str) -> Answer:
    return f"I suspect {name}.", {"name": name}


def _claim(name: str) -> Answer:
    return f"{_CLAIM} {name} is a werewolf.", {"name": name}


def _silence(view: View) -> Answer:
    # With the name, so that whoever looks for the silent finds it next to the fact, as with an accusation.
    return f"{view.name} {_SILENCE}.", {"name": NOBODY}


def _potion(*, save: bool, poison: str | None) -> Answer:
    text = "I save." if save else f"I poison {poison}." if poison else "I wait."
    return text, {"save": save, "poison": poison or NOBODY}


def _strong_werewolf(view: View) -> Answer:
    """Attacks who claims to be the seer, is never silent, spares its mates, and joins in what they began."""
    seers = [name for name in view.claimants() if name in view.prey]
    if "Attack" in view.request:
        return _name([*seers, *view.prey][0])
    named = [name for speaker, text in view.said_today() if speaker in view.mates for name in _PLAYER.findall(text)]
    joined = [name for name in named[::-1] if name in view.prey]
    name = [*joined, *seers, *view.prey][0]
    return _suspect(name) if "Speak" in view.request else _name(name)


def _moderate_werewolf(view: View, rng: random.Random) -> Answer:
    """Plays well at times, and else attacks anybody, and is silent too often."""
    if rng.random() < 0.2:
        return _strong_werewolf(view)
    if "Speak" in view.request:
        return _silence(view)
    return _name(rng.choice(view.prey))


def _careless_werewolf(view: View, rng: random.Random) -> Answer:
    """Plays well now and then, and else is silent and takes the first choice there is."""
    if rng.random() < 0.25:
        return _strong_werewolf(view)
    return _silence(view) if "Speak" in view.request else _name(view.living[0])


def _strong_villager(view: View) -> Answer:
    """Saves the first victim, checks one after the other, tells what it found, and heeds the evidence."""
    accused = [name for seer in view.claimants() for name in view.accused_by(seer)]
    if "Night" in view.request and view.role == "witch":
        poison = accused[-1] if accused and "Poison" in view.request and not view.can_save else None
        return _potion(save=view.can_save, poison=poison)
    found = [name for name in view.checked(_WOLF) if name in view.living]
    known = view.checked(_GOOD) + view.checked(_WOLF)
    unknown = [name for name in view.living if name not in known] or view.living
    if "Check" in view.request:
        return _name(unknown[0])
    # What was said last counts most: after the last speech, everybody remembers the same.
    silent = [name for name in view.silent()[::-1] if name in unknown]
    name = [*found[::-1], *accused[::-1], *silent, *unknown][0]
    if "Speak" in view.request:
        return _claim(name) if found else _suspect(name)
    return _name(name)


def _moderate_villager(view: View, rng: random.Random) -> Answer:
    """Plays well more often than not, and else names anybody."""
    if rng.random() < 0.6 or "Save" in view.request or "Poison" in view.request:
        return _strong_villager(view)
    name = rng.choice(view.living)
    return _suspect(name) if "Speak" in view.request else _name(name)


def _careless_villager(view: View, rng: random.Random) -> Answer:
    """Plays well more often than not, and else takes the first choice there is.

    With fewer good decisions it would hardly ever win, and nobody learns from games that are always lost.
    """
    if rng.random() < 0.6:
        return _strong_villager(view)
    if view.role == "witch" and "Night" in view.request:
        return _potion(save=False, poison=None)
    name = view.living[0]
    return _suspect(name) if "Speak" in view.request else _name(name)


_Player = Callable[[View, random.Random], Answer]
_WEREWOLVES: dict[Grade, _Player] = {
    "careless": _careless_werewolf,
    "moderate": _moderate_werewolf,
    "strong": lambda view, rng: _strong_werewolf(view),
}
_VILLAGE: dict[Grade, _Player] = {
    "careless": _careless_villager,
    "moderate": _moderate_villager,
    "strong": lambda view, rng: _strong_villager(view),
}
