"""The page of `docs/performance`, from the figures that the benchmarks left there: `python benchmarks/report.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import end_to_end
import grpo_step
import multi_turn
import overhead
import rollout
import scaling
from common import RESULTS, read_results, table
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]
BENCHMARKS = {
    "Sampling": rollout,
    "A GRPO step": grpo_step,
    "Episodes of many turns": multi_turn,
    "Overhead of a call": overhead,
    "From start to skill": end_to_end,
    "Growing work": scaling,
}


def bars(axes: Axes, rows: Sequence[Row], labels: Sequence[str], values: Sequence[str]) -> None:
    """A group of bars for each row, one for each value."""
    width = 0.8 / len(values)
    for number, value in enumerate(values):
        heights = [row.get(value) or 0.0 for row in rows]
        drawn = axes.bar([i + number * width for i in range(len(rows))], heights, width, label=value)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7)
    names = [" ".join(str(row[label]) for label in labels) for row in rows]
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(rows))], names, fontsize=7, rotation=15)
    axes.legend(fontsize=7)


def curves(figure: Figure, rows: Sequence[Row]) -> None:
    """Time and memory on logarithmic axes, a panel for each quantity that grows."""
    whats = list(dict.fromkeys(row["grows"] for row in rows))
    for axes, what in zip(figure.subplots(1, len(whats), squeeze=False)[0], whats, strict=True):
        points = [row for row in rows if row["grows"] == what and row[what] != "exponent"]
        slopes = next((row for row in rows if row["grows"] == what and row[what] == "exponent"), None)
        for key in ("rollout_s", "train_s", "total_gb"):
            xs, ys = [row[what] for row in points], [row[key] for row in points]
            axes.loglog(xs, ys, marker="o", label=key if slopes is None else f"{key}, exponent {slopes[key]:.2f}")
        axes.set(xlabel=what)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)


def draw(name: str, rows: Sequence[Row]) -> None:
    """The picture of one benchmark."""
    figure = Figure(figsize=(9, 3.2), dpi=100, layout="constrained")
    match name:
        case "scaling":
            curves(figure, rows)
        case "rollout":
            bars(figure.subplots(), rows, ["model", "dtype"], ["ours / generate", "eager / generate"])
        case "grpo_step":
            bars(figure.subplots(), rows, ["model", "dtype", "TRL's pass"], ["TRL / ours"])
        case "multi_turn":
            values = ["per call / tree, tokens", "per call / tree, time", "merged / tree, time"]
            bars(figure.subplots(), rows, ["model", "history", "turns"], values)
        case "overhead":
            bars(figure.subplots(), rows, ["agent"], ["overhead per call, us", "transformer per call, us"])
        case "end_to_end":
            bars(figure.subplots(), rows, ["seed"], ["sampling", "training", "judging", "agents and the rest"])
    figure.savefig(RESULTS / f"{name}.png")


def main() -> None:
    """Write the page, and its pictures."""
    parts = [
        "# Performance\n\nEvery section is what one command of `benchmarks/` measured, in its own words; `make bench` "
        "runs them all. Models are Qwen2-shaped with random weights: S, M and L have 2, 57 and 494 million parameters. "
        "Of several machines, pictures show the first, the fastest; what is not in a table was not measured there.\n"
    ]
    for title, module in BENCHMARKS.items():
        name = module.__name__
        if not (measured := read_results(name)):
            continue
        draw(name, measured[0]["rows"])
        about = (module.__doc__ or "").partition("\n\n")
        parts.append(f"## {title}\n\n{about[0]}\n\n{about[2].strip()}\n\n![{title}]({name}.png)\n")
        for one in measured:
            host = one["machine"]
            peaks = ", ".join(f"{rate} GFLOP/s in {dtype}" for dtype, rate in host["matmul_gflops"].items())
            gpu = f"{host['gpu']}, which copies {host['copy_gb_s']} GB/s, and " if "gpu" in host else ""
            parts.append(
                f"Measured on {gpu}{host['threads']} threads of {host['processor']} with {host['instructions']}, "
                f"{host['memory_gb']} GB, torch {host['torch']}; a large matrix product reaches {peaks}:\n"
            )
            parts.append(table(one["rows"]) + "\n")
    (RESULTS / "index.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
