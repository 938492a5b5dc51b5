"""How well scripted players do: `python examples/werewolves/matches.py [games]`.

Prints how often the werewolves win, for each grade of werewolves against each grade of village.
"""

from __future__ import annotations

import asyncio
import sys
import time

from game import WEREWOLF, new_game, winner
from players import GRADES, Grade, ScriptedPlayer
from workflow import Table, seat

from agentscope_tuner.garbage import rare_collections
from agentscope_tuner.many_agents import quiet_agents, relieve_agents


async def play(seed: int, werewolves: Grade, village: Grade) -> Table:
    """One game between two grades; returns the table when it is over."""
    game = new_game(seed)

    def model(role: str) -> ScriptedPlayer:
        return ScriptedPlayer(werewolves if role == WEREWOLF else village, seed)

    table = Table(game, {name: seat(name, model(role)) for name, role in game.roles.items()})
    await table.play()
    return table


async def werewolves_win(seeds: range, werewolves: Grade, village: Grade) -> float:
    """Share of the games of these seeds."""
    tables = await asyncio.gather(*[play(seed, werewolves, village) for seed in seeds])
    return sum(winner(table.game, evening=True) == "werewolves" for table in tables) / len(seeds)


async def main(games: int) -> None:
    """Every grade against every grade."""
    begun = time.perf_counter()
    print("| werewolves | " + " | ".join(f"{village} village" for village in GRADES) + " |")
    print("|---" * (len(GRADES) + 1) + "|")
    for werewolves in GRADES:
        shares = [await werewolves_win(range(games), werewolves, village) for village in GRADES]
        print(f"| {werewolves} | " + " | ".join(f"{share:.3f}" for share in shares) + " |", flush=True)
    seconds = time.perf_counter() - begun
    print(f"\n{games} games each, {games * len(GRADES) ** 2 / seconds:.1f} games per second")


if __name__ == "__main__":
    relieve_agents()
    with quiet_agents(), rare_collections():
        asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400))
