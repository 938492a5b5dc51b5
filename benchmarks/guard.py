"""Whether speed is still what was recorded: `python benchmarks/guard.py`.

A few ratios of small benchmarks, against those in `docs/performance`. One that is more than a quarter lower fails; as
machines are noisy, only where the best of three tries does.

How much faster than other libraries we are depends on the kind of processor, so that is asked for only where a machine
with the same instructions is on record, of the same family or one on which products in bfloat16 are about as much
faster than in float32. The other ratios have our own code on both sides: they tell whether batches, passes and what
they share are still put together as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpo_step
import multi_turn
import rollout
from common import machine, read_results

FLOOR = 0.75
TRIES = 3
ROUNDS = 3
Row = dict[str, Any]


def recorded(name: str, **which: Any) -> tuple[Row, bool]:
    """A row of a benchmark's results, and whether it is of this kind of processor."""

    def strangeness(measured: Row) -> float:
        there, here = measured["machine"], machine()
        if there["instructions"] != here["instructions"]:
            return math.inf
        if there["processor"] == here["processor"]:
            return 0.0
        faster = [one["matmul_gflops"]["bfloat16"] / one["matmul_gflops"]["float32"] for one in (there, here)]
        return abs(math.log(faster[0] / faster[1]))

    known = (one for one in read_results(name) if any(row.items() >= which.items() for row in one["rows"]))
    nearest = min(known, key=strangeness)
    return next(row for row in nearest["rows"] if row.items() >= which.items()), strangeness(nearest) < math.log(3 / 2)


def check(measure: Callable[[], Row], expected: Row, *ratios: str) -> list[str]:
    """What is too slow, however often it is tried."""
    best = dict.fromkeys(ratios, 0.0)
    for _ in range(TRIES):
        row = measure()
        best = {ratio: max(best[ratio], row[ratio]) for ratio in ratios}
        if all(best[ratio] >= FLOOR * expected[ratio] for ratio in ratios):
            break
    for ratio in ratios:
        print(f"{ratio}: {best[ratio]:.2f}, recorded {expected[ratio]:.2f}", flush=True)
    return [ratio for ratio in ratios if best[ratio] < FLOOR * expected[ratio]]


def main() -> None:
    """Measure, and compare."""
    small = {"model": "S", "dtype": "float32"}
    sampled, sampled_here = recorded("rollout", **small)
    trained, trained_here = recorded("grpo_step", **small, **{"TRL's pass": grpo_step.TRL_PASS})
    turned, _ = recorded("multi_turn", **small, history="append-only", turns=10)
    others = ["ours / generate", "eager / generate"] if sampled_here else []
    if not (sampled_here and trained_here):
        print("no figures are on record of this kind of processor beside other libraries", flush=True)
    slow = check(lambda: rollout.measure("S", "float32", ROUNDS), sampled, "staggered / static", *others)
    slow += check(
        lambda: multi_turn.measure("S", "float32", 10, "append-only", ROUNDS), turned, "per call / tree, time"
    )
    if trained_here:
        slow += check(lambda: grpo_step.measure("S", "float32", ROUNDS), trained, "TRL / ours")
    if slow:
        raise SystemExit(f"slower than recorded by more than {1 - FLOOR:.0%}: {', '.join(slow)}")


if __name__ == "__main__":
    main()
