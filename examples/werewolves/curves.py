"""How often the trained side won: `python examples/werewolves/curves.py runs/a runs/b ... --out curves.png`.

One panel for each side that was trained. `reward.png` in a run folder shows rewards; wins are only a part of them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from game import WEREWOLF
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from agentscope_tuner.reporting.run_folder import RunFolder

WIN = "workflow/werewolves_win"
KINDS = {"": "training", "eval_greedy/": "held-out, greedy", "eval_sampled/": "held-out, sampled"}
STYLES = {"": {"alpha": 0.4}, "eval_greedy/": {"marker": "o"}, "eval_sampled/": {"marker": "s", "linestyle": "--"}}


def wins(run: Path, kind: str, *, village: bool) -> list[tuple[int, float]]:
    """(step, share of games that the side won), where it was measured."""
    measured = [(step.step, step.extra.get(kind + WIN)) for step in RunFolder(run).read_metrics()]
    return [(step, 1 - share if village else share) for step, share in measured if share is not None]


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", default="curves.png", type=Path)
    given = parser.parse_args()
    sides: dict[str, list[Path]] = defaultdict(list)
    for run in given.runs:
        trained = OmegaConf.load(run / "config.yaml").workflow.trainable_targets or [WEREWOLF]
        sides["werewolves" if WEREWOLF in trained else "village"].append(run)
    figure = Figure(figsize=(5.5 * len(sides), 4.2), dpi=100, layout="constrained")
    for axes, (side, runs) in zip(
        figure.subplots(1, len(sides), sharey=True, squeeze=False)[0], sides.items(), strict=True
    ):
        for number, run in enumerate(runs):
            for kind, name in KINDS.items():
                points = wins(run, kind, village=side == "village")
                axes.plot(*zip(*points, strict=True), color=f"C{number}", label=f"{run.name}, {name}", **STYLES[kind])
        axes.set(title=f"Games won by the {side}", xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(given.out)


if __name__ == "__main__":
    main()
