"""Makes the tasks of this example: `python examples/werewolves/tasks.py` writes `data/`.

A task is the seed of a game.
"""

from __future__ import annotations

import json
from pathlib import Path

SEEDS = {"train": range(1000, 1512), "test": range(200)}


def main() -> None:
    """Write the training and the held-out seeds."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    for name, seeds in SEEDS.items():
        rows = (json.dumps({"question": f"Game {seed}", "seed": seed}) for seed in seeds)
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
