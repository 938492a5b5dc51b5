"""The rules of the game, as data and functions. No agents here; whatever is random comes from the game's seed.

`Game` is the state; functions change it and return what became of it. They take names that were checked with `named`,
so an answer that makes no sense never reaches the rules.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

NAMES = tuple(f"Player{i}" for i in range(1, 10))
ROLES = (*["werewolf"] * 3, *["villager"] * 3, "seer", "witch", "hunter")
WEREWOLF = "werewolf"
NOBODY = "nobody"
LAST_DAY = 6
"""A lone werewolf that kills every night, with one victim saved by the witch, has won by the sixth night."""

Side = Literal["werewolves", "village"]


@dataclass
class Game:
    """Who is who, who lives, and what the witch has left."""

    roles: dict[str, str]
    """Role of each name, in the order of the seats."""
    rng: random.Random
    living: list[str] = field(default_factory=lambda: list(NAMES))
    """In the order of the seats."""
    day: int = 0
    can_save: bool = True
    can_poison: bool = True

    def players(self, role: str) -> list[str]:
        """The living players of a role."""
        return [name for name in self.living if self.roles[name] == role]

    def others(self, *names: str) -> list[str]:
        """The living players but these."""
        return [name for name in self.living if name not in names]

    @property
    def prey(self) -> list[str]:
        """Whom the werewolves may attack: they do not attack each other."""
        return [name for name in self.living if self.roles[name] != WEREWOLF]


def new_game(seed: int) -> Game:
    """Deal the roles."""
    rng = random.Random(f"werewolves-{seed}")
    roles = rng.sample(ROLES, len(ROLES))
    return Game(dict(zip(NAMES, roles, strict=True)), rng)


def named(answer: object, allowed: Sequence[str]) -> str | None:
    """The one allowed name that an answer holds; None when it holds none, several, or another player's as well."""
    found = set(re.findall(r"\b(?:player\s*\d+|nobody)\b", str(answer), re.IGNORECASE))
    names = {name.replace(" ", "").capitalize() if name.lower() != NOBODY else NOBODY for name in found}
    return names.pop() if len(names) == 1 and names <= {*allowed} else None


def attacked(game: Game, targets: Mapping[str, str | None]) -> str | None:
    """Whom the werewolves attack: the most named, by lot among equals; nobody if none was named."""
    top = _most_named(targets)
    return game.rng.choice(top) if top else None


def end_night(game: Game, victim: str | None, *, save: bool = False, poison: str | None = None) -> list[str]:
    """Who dies this night, in the order of the seats.

    The witch has each potion once and uses one a night; where both are asked for, she saves.
    """
    doomed = [victim]
    if save and game.can_save and victim is not None:
        game.can_save = False
        doomed = []
    elif poison is not None and game.can_poison:
        game.can_poison = False
        doomed.append(poison)
    game.day += 1
    dead = [name for name in game.living if name in doomed]
    game.living = game.others(*dead)
    return dead


def voted_out(game: Game, votes: Mapping[str, str | None]) -> str | None:
    """Who leaves by the vote of the day: the most named; on a tie, nobody."""
    top = _most_named(votes)
    if len(top) != 1:
        return None
    game.living.remove(top[0])
    return top[0]


def shoots(game: Game, name: str, *, poisoned: bool) -> bool:
    """Whether a player who has just died may take somebody along: the hunter, unless poisoned."""
    return game.roles[name] == "hunter" and not poisoned and bool(game.living)


def shot(game: Game, target: str | None) -> None:
    """The hunter's shot."""
    if target is not None:
        game.living.remove(target)


def speakers(game: Game) -> list[str]:
    """Today's order of speech: round the table from a drawn seat."""
    start = game.rng.randrange(len(game.living))
    return game.living[start:] + game.living[:start]


def winner(game: Game, *, evening: bool = False) -> Side | None:
    """Who has won: the village without werewolves, the werewolves once they are as many as the others.

    On the evening of the last day the village has held out, and wins: werewolves who do not kill must not gain by it.
    """
    wolves = len(game.players(WEREWOLF))
    if wolves == 0:
        return "village"
    if 2 * wolves >= len(game.living):
        return "werewolves"
    return "village" if evening and game.day == LAST_DAY else None


def rewards(side: Side) -> dict[str, float]:
    """1 for each role of the winning side, 0 for the others."""
    return {role: float((role == WEREWOLF) == (side == "werewolves")) for role in dict.fromkeys(ROLES)}


def _most_named(votes: Mapping[str, str | None]) -> list[str]:
    counts = Counter(name for name in votes.values() if name not in (None, NOBODY))
    most = max(counts.values(), default=0)
    return sorted(name for name, count in counts.items() if count == most)
