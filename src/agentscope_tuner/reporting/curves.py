"""The reward curve, as a picture and as text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from agentscope_tuner.types import StepMetrics

Points = list[tuple[int, float]]
"""(step, value) pairs."""

_TRAIN, _GREEDY, _SAMPLED, _FAILED = "#4c78a8", "#d1495b", "#e8a33d", "#8d5a97"
_INK, _GRID = "#333333", "#e4e4e4"
_ROLES = ("#6a994e", "#b5838d", "#577590", "#bc6c25", "#7b2cbf", "#2a9d8f")
_ROLE_REWARD = "reward_mean/"
_LEGEND_COLUMNS = 4


def draw_reward(history: Sequence[StepMetrics], path: Path, title: str) -> None:
    """Draw a PNG of 1000 x 700 pixels: rewards above, zero-variance and failed fractions below."""
    # Imported here because Matplotlib takes longer to load than the rest of this package.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.10, hspace=0.03)
    figure = Figure(figsize=(10, 7), dpi=100, layout=layout, facecolor="white")
    rewards, fractions = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])

    trained = _points(history, lambda m: m.reward_mean)
    window = _window(len(trained))
    if trained:
        faint = {"alpha": 0.35, "linewidth": 1.0} if window > 1 else {"linewidth": 1.6}
        marker = "o" if len(trained) == 1 else ""
        rewards.plot(*zip(*trained, strict=True), color=_TRAIN, label="training", marker=marker, **faint)
        if window > 1:
            smooth = zip(*_smooth(trained), strict=True)
            rewards.plot(*smooth, color=_TRAIN, linewidth=2.2, label=f"training, mean of {window} steps")
    for points, color, marker, label in (
        (_points(history, lambda m: m.eval_reward_mean), _GREEDY, "o", "held-out, greedy"),
        (_points(history, lambda m: m.eval_reward_sampled_mean), _SAMPLED, "s", "held-out, sampled"),
    ):
        if points:
            rewards.plot(
                *zip(*points, strict=True),
                color=color,
                linewidth=1.6,
                marker=marker,
                markersize=7,
                markeredgecolor="white",
                markeredgewidth=1.2,
                label=label,
            )
    _draw_roles(rewards, history)
    legend_rows = -(-len(rewards.get_legend_handles_labels()[0]) // _LEGEND_COLUMNS)
    pad = 34 + 16 * max(0, legend_rows - 1)
    rewards.set_title(title, loc="left", fontsize=14, fontweight="bold", color=_INK, pad=pad, parse_math=False)
    rewards.set_ylabel("reward", fontsize=11, color=_INK)
    rewards.margins(y=0.08)

    for points, color, label in (
        (_points(history, lambda m: _fraction(m.zero_variance_groups, m.groups)), _INK, "zero-variance groups"),
        (_points(history, lambda m: _fraction(m.episodes_failed, m.episodes)), _FAILED, "failed episodes"),
    ):
        if points:
            marker = "o" if len(points) == 1 else ""
            fractions.plot(*zip(*points, strict=True), color=color, linewidth=1.4, marker=marker, label=label)
    fractions.set_ylim(-0.04, 1.04)
    fractions.set_yticks([0, 0.5, 1])
    fractions.set_ylabel("fraction", fontsize=11, color=_INK)
    fractions.set_xlabel("step", fontsize=11, color=_INK)
    fractions.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))

    for axes in (rewards, fractions):
        _style(axes)
    temporary = path.with_name(f".{path.name}.tmp")
    with warnings.catch_warnings():
        # A name may hold letters that the font has not; boxes in a title are no reason to disturb a run.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(temporary, format="png", dpi=100)
    temporary.replace(path)


def _draw_roles(axes: Any, history: Sequence[StepMetrics]) -> None:
    """A thin line for each role, where there are several."""
    names = sorted({name for metrics in history for name in metrics.extra if name.startswith(_ROLE_REWARD)})
    for name, color in zip(names, cycle(_ROLES), strict=False) if len(names) > 1 else ():
        points = [(metrics.step, metrics.extra[name]) for metrics in history if name in metrics.extra]
        label = name.removeprefix(_ROLE_REWARD)
        axes.plot(*zip(*_smooth(points), strict=True), color=color, linewidth=1.2, linestyle="--", label=label)


def _style(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.grid(color=_GRID, linewidth=0.9)
    axes.tick_params(colors=_INK, labelsize=10, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#999999")
    if axes.get_legend_handles_labels()[0]:
        # Above the axes, where it hides no data.
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 0.995),
            ncols=_LEGEND_COLUMNS,
            frameon=False,
            fontsize=10,
            labelcolor=_INK,
            handlelength=1.8,
            columnspacing=1.8,
            borderaxespad=0.2,
        )


def terminal_curve(history: Sequence[StepMetrics], width: int = 60, height: int = 10) -> str:
    """Draw training reward as a braille line, and held-out greedy reward as `●`, with axes.

    Args:
        history: the steps to draw.
        width: columns of the drawing, labels included.
        height: lines of the drawing, without the two lines below it (step axis and legend).

    Returns:
        Lines without colour codes; one sentence when there is no reward to draw.
    """
    trained = _points(history, lambda m: m.reward_mean)
    held_out = _points(history, lambda m: m.eval_reward_mean)
    if not trained and not held_out:
        return "no rewards to draw"
    every = trained + held_out
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    low, high = _range([value for _, value in every])
    labels = _y_labels(low, high, height)
    margin = max(len(label) for label in labels.values()) + 2
    canvas = _Canvas(max(width - margin, 4), height, (first, last), (low, high))
    canvas.line(_smooth(trained))
    canvas.marks(held_out, "●")

    lines = [
        f"{labels.get(row, ''):>{margin - 2}} {'┤' if row in labels else '│'}{text.rstrip()}"
        for row, text in enumerate(canvas.rows())
    ]
    ends = "step".center(canvas.columns)
    ends = f"{first}{ends[len(str(first)) : -len(str(last))]}{last}" if last > first else f"{first}  step"
    legend = [text for text, points in (("⠒⠒ training", trained), ("● held-out, greedy", held_out)) if points]
    lines.append(" " * margin + ends)
    lines.append(" " * margin + "   ".join(legend))
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- numbers


def _points(history: Sequence[StepMetrics], value_of: Callable[[StepMetrics], float | None]) -> Points:
    points = [(metrics.step, value_of(metrics)) for metrics in history]
    return sorted((step, value) for step, value in points if value is not None and math.isfinite(value))


def _fraction(part: int, whole: int) -> float | None:
    return min(part / whole, 1.0) if whole else None


def _window(steps: int) -> int:
    """A moving mean over a tenth of the run; too short a run is shown as it is."""
    return 1 if steps < 8 else min(max(steps // 10, 4), 25)


def _moving_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and those before it, so that the last point does not change when the run goes on."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def _smooth(points: Points) -> Points:
    means = _moving_mean([value for _, value in points], _window(len(points)))
    return [(step, mean) for (step, _), mean in zip(points, means, strict=True)]


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high > low:
        return low, high
    pad = abs(low) * 0.5 or 0.5
    return low - pad, high + pad


def _y_labels(low: float, high: float, height: int) -> dict[int, str]:
    """Row to label: top, middle, bottom."""
    digits = max(0, min(6, 1 - math.floor(math.log10(high - low))))
    rows = {0, height - 1} | ({(height - 1) // 2} if height >= 5 else set())
    span = max(height - 1, 1)
    return {row: f"{high - (high - low) * row / span:.{digits}f}" for row in sorted(rows)}


class _Canvas:
    """Characters of 2 x 4 braille dots each."""

    # The bit of each dot of a braille character, by row and column.
    BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

    def __init__(self, columns: int, rows: int, x_range: tuple[int, int], y_range: tuple[float, float]) -> None:
        self.columns = columns
        self._cells = [[0] * columns for _ in range(rows)]
        self._marks: dict[tuple[int, int], str] = {}
        self._x_range, self._y_range = x_range, y_range

    def line(self, points: Points) -> None:
        dots = [self._dot(step, value) for step, value in points]
        for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
            count = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(count + 1):
                x, y = round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)
                self._cells[y // 4][x // 2] |= self.BITS[y % 4][x % 2]

    def marks(self, points: Points, character: str) -> None:
        for step, value in points:
            x, y = self._dot(step, value)
            self._marks[y // 4, x // 2] = character

    def rows(self) -> list[str]:
        return [
            "".join(self._marks.get((y, x)) or (chr(0x2800 + cell) if cell else " ") for x, cell in enumerate(cells))
            for y, cells in enumerate(self._cells)
        ]

    def _dot(self, step: int, value: float) -> tuple[int, int]:
        """Column and row in dots, from the top left."""
        (first, last), (low, high) = self._x_range, self._y_range
        x = (step - first) / (last - first) if last > first else 0.0
        y = (high - value) / (high - low)
        return round(x * (self.columns * 2 - 1)), round(y * (len(self._cells) * 4 - 1))
