"""Fails where we have become slower: `python benchmarks/guard.py`.

Two ratios that the benchmarks recorded are measured again: sampling against transformers' `generate`, and training on
episodes of ten turns against one sequence per call. One that is more than a quarter below the recorded figure is
measured once more, and then an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import multi_turn
import rollout
from common import RESULTS, compare

TURNS, HISTORY = 10, "append-only"
SLOWER = 0.75
ROUNDS = 5


def recorded(name: str, ratio: str, **which: object) -> float:
    """A figure of `docs/performance`."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    (row,) = [row for row in rows if all(row.get(key) == value for key, value in which.items())]
    return float(row[ratio])


def sampling() -> float:
    """Our speed over that of `generate`."""
    batch = rollout.Batch("S", "float32")
    sides = {"ours": batch.ours, "generate": batch.generate}
    return compare(sides, ROUNDS).ratio("generate", "ours")


def training() -> float:
    """The time of one sequence per call over that of a tree."""
    return float(multi_turn.measure("S", "float32", TURNS, HISTORY, ROUNDS)["per call / tree, time"])


def check(name: str, measure: Callable[[], float], expected: float) -> bool:
    """Whether a ratio is what it was."""
    for _ in range(2):
        found = measure()
        print(f"{name}: {found:.2f}, recorded {expected:.2f}", flush=True)
        if found >= SLOWER * expected:
            return True
    return False


def main() -> None:
    """Measure and compare."""
    which = {"model": "S", "dtype": "float32"}
    turns = {"turns": TURNS, "history": HISTORY}
    passed = [
        check("ours / generate", sampling, recorded("rollout", "ours / generate", **which)),
        check("per call / tree", training, recorded("multi_turn", "per call / tree, time", **which, **turns)),
    ]
    if not all(passed):
        raise SystemExit("slower than recorded by more than a quarter; see docs/performance")


if __name__ == "__main__":
    main()
