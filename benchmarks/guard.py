"""Whether speed is still what was recorded: `python benchmarks/guard.py`.

A few ratios of small benchmarks, against those in `docs/performance`. One that is more than a quarter lower fails; as
machines are noisy, only where the best of three tries does.

How much faster than other libraries we are depends on the kind of processor, so that is asked for only where products
in bfloat16 are about as much faster than in float32 as where the figures were recorded. The other ratios have our own
code on both sides: they tell whether batches, passes and what they share are still put together as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpo_step
import multi_turn
import rollout
from common import RESULTS, matmul_rate

FLOOR = 0.75
TRIES = 3
ROUNDS = 3
Row = dict[str, Any]


def recorded(name: str, **which: Any) -> Row:
    """A row of a benchmark's results."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return next(row for row in rows if row.items() >= which.items())


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


def same_kind(name: str) -> bool:
    """Whether this processor is of the kind that a benchmark's figures were recorded on."""
    before = json.loads((RESULTS / f"{name}.json").read_text())["machine"]["matmul_gflops"]
    gain = matmul_rate("bfloat16") / matmul_rate("float32")
    return 2 / 3 < gain / (before["bfloat16"] / before["float32"]) < 3 / 2


def main() -> None:
    """Measure, and compare."""
    small = {"model": "S", "dtype": "float32"}
    sampling, training = ["staggered / static"], []
    if same_kind("rollout") and same_kind("grpo_step"):
        sampling += ["ours / generate", "eager / generate"]
        training += ["TRL / ours"]
    else:
        print("another kind of processor than that of the figures: other libraries are left out", flush=True)
    slow = check(lambda: rollout.measure("S", "float32", ROUNDS), recorded("rollout", **small), *sampling)
    slow += check(
        lambda: multi_turn.measure("S", "float32", 10, "append-only", ROUNDS),
        recorded("multi_turn", **small, history="append-only", turns=10),
        "per call / tree, time",
    )
    if training:
        usual = {**small, "TRL's pass": grpo_step.TRL_PASS}
        slow += check(lambda: grpo_step.measure("S", "float32", ROUNDS), recorded("grpo_step", **usual), *training)
    if slow:
        raise SystemExit(f"slower than recorded by more than {1 - FLOOR:.0%}: {', '.join(slow)}")


if __name__ == "__main__":
    main()
