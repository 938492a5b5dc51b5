"""Games of Werewolves for tiny-agent's warm-up: experts of some grade play one side, moderate players the other."""

from __future__ import annotations

from pathlib import Path

from skills import Reply, Skill

from agentscope_tuner import Task
from agentscope_tuner.chat import write_reply
from agentscope_tuner.loading import load_object

_EXAMPLE = Path(__file__).parents[2] / "examples" / "werewolves"
# Several examples have a `workflow.py`; this way of importing tells them apart, and finds the neighbours of this one.
Werewolves = load_object(f"{_EXAMPLE / 'workflow.py'}:Werewolves")
from game import ROLES, WEREWOLF, Side  # noqa: E402
from players import Grade, answer, read_prompt  # noqa: E402

SIDES: dict[Side, list[str]] = {
    "werewolves": [WEREWOLF],
    "village": [role for role in dict.fromkeys(ROLES) if role != WEREWOLF],
}
"""The roles of each side."""


class _WerewolvesSide(Werewolves):
    trainable_targets: list[str] | None = SIDES["werewolves"]


class _VillageSide(Werewolves):
    trainable_targets: list[str] | None = SIDES["village"]


def game_expert(seed: int, grade: Grade) -> Reply:
    """Plays whichever player it is asked to be."""

    def reply(prompt: str) -> str:
        text, fields = answer(read_prompt(prompt), grade, seed)
        return write_reply(text, [("generate_response", fields)])

    return reply


def werewolves_skill(count: int, seed: int, *, side: Side, grade: Grade) -> Skill:
    """One side of `count` games; none of them is a game of the example's data."""
    first = 1_000_000 * (seed + 1)
    tasks = [Task(task_id=str(i), metadata={"seed": first + i}) for i in range(count)]
    workflow = _WerewolvesSide if side == "werewolves" else _VillageSide
    return Skill(side, workflow, tasks, lambda i: game_expert(first + i, grade))
