"""What a run shows while it runs, and what it says at the end.

On a terminal this is a live display of two bars; anywhere else it is one plain line per step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentscope_tuner.reporting.curves import terminal_curve
from agentscope_tuner.reporting.run_folder import RunFolder
from agentscope_tuner.types import EvalResult, StepMetrics, TuneResult

_REFRESH_S = 0.25
_RECENT_STEPS = 10
_BAR_WIDTH = 24


class ProgressView:
    """Use it as a context manager around a run.

    Args:
        total_steps: the number of the last step.
        console: where to show it; None: standard output.
        clock: seconds, for step times and time left.
    """

    def __init__(
        self, total_steps: int, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console if console is not None else Console()
        self._clock = clock
        self._total_steps = total_steps
        self._step = 0
        self._reward: float | None = None
        self._held_out = ""
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step_began = clock()
        self._phase = ""
        self._begin_phase("", 0)
        self._live: Live | None = None
        self._refreshed = float("-inf")

    def __enter__(self) -> ProgressView:
        self._step_began = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Without its own thread: the run keeps every core busy, and a refresh on each event is often enough.
            self._live = Live(self._display(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._begin_phase("", 0)
            self._live.update(self._display())
            self._live.stop()
            self._live = None

    # --------------------------------------------------------------------------------------------------- events

    def phase(self, name: str, total: int) -> None:
        """A part of a step begins, such as `rollout`, `train` or `evaluation`, of `total` units."""
        self._begin_phase(name, total)
        self._refresh()

    def expect(self, n: int) -> None:
        """This phase has `n` more units."""
        self._total += n

    def episode_done(self, failed: bool) -> None:
        """An episode of this phase is over; this advances the phase by one."""
        self._episodes += 1
        self._failed += failed
        self.advance()

    def tokens(self, n: int) -> None:
        """`n` more tokens were sampled, or trained, in this phase."""
        self._tokens += n
        self._refresh()

    def advance(self, n: int = 1) -> None:
        """`n` units of this phase are done."""
        self._done += n
        self._refresh()

    def step_done(self, metrics: StepMetrics) -> None:
        """A step is over. Step 0 stands for what came before training: its time predicts nothing."""
        now = self._clock()
        if metrics.step > 0:
            self._step_times.append(now - self._step_began)
        self._step_began = now
        self._step = metrics.step
        self._reward = metrics.reward_mean if metrics.reward_mean is not None else self._reward
        self._held_out = _held_out(metrics) or self._held_out
        if self._live is None:
            self._print(self._plain_line(metrics))
        self._refresh()

    def message(self, text: str) -> None:
        """Show a line; on a terminal, above the bars."""
        self._print(text)

    def summary(self, result: TuneResult) -> None:
        """Show what came out: held-out reward before and after, the curve, and how to load the checkpoint."""
        parts: list[RenderableType] = []
        if result.eval_before or result.eval_after:
            parts += [_evaluations(result), Text()]
        if self._console.encoding.lower().startswith("utf"):
            parts += [
                Text(terminal_curve(result.history, width=min(60, self._console.width - 4)), no_wrap=True),
                Text(),
            ]
        parts.append(Text(f"curve       {RunFolder(result.run_dir).reward_png}", overflow="fold"))
        parts.append(Text(f"checkpoint  {result.checkpoint}", overflow="fold"))
        self._console.print(Panel(Group(*parts), title="result", title_align="left", expand=False))
        # Outside of the panel, so that the lines can be copied.
        path = repr(str(result.checkpoint))
        self._print(f"\nmodel = transformers.AutoModelForCausalLM.from_pretrained({path})")
        self._print(f"tokenizer = transformers.AutoTokenizer.from_pretrained({path})")

    # -------------------------------------------------------------------------------------------------- display

    def _begin_phase(self, name: str, total: int) -> None:
        self._phase, self._total = name, total
        self._done = self._episodes = self._failed = self._tokens = 0
        self._phase_began = self._clock()

    def _refresh(self) -> None:
        if self._live is None:
            return
        now = self._clock()
        if now - self._refreshed >= _REFRESH_S:
            self._refreshed = now
            self._live.update(self._display(), refresh=True)

    def _display(self) -> RenderableType:
        reward = "" if self._reward is None else f"reward {_number(self._reward)}"
        steps = [reward, self._held_out, self._time_left()]
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, min_width=12)
        table.add_column(width=_BAR_WIDTH)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row(*self._row("step", self._step, self._total_steps, steps))
        if self._phase:
            elapsed = self._clock() - self._phase_began
            counts = [
                f"{self._failed} failed" if self._episodes else "",
                f"{self._tokens / elapsed:,.0f} tok/s" if self._tokens and elapsed > 0 else "",
            ]
            table.add_row(*self._row(self._phase, self._done, max(self._total, self._done), counts))
        return table

    def _row(self, name: str, done: int, total: int, facts: list[str]) -> tuple[RenderableType, ...]:
        text = "  ".join([f"{done}/{total}", *(fact for fact in facts if fact)])
        return Text(name, style="bold"), ProgressBar(total=max(total, 1), completed=done, width=_BAR_WIDTH), Text(text)

    def _plain_line(self, metrics: StepMetrics) -> str:
        facts = [f"step {metrics.step}/{self._total_steps}"]
        if metrics.reward_mean is not None:
            facts.append(f"reward {_number(metrics.reward_mean)}")
        if held_out := _held_out(metrics):
            facts.append(held_out)
        if metrics.episodes:
            facts.append(f"episodes {metrics.episodes} ({metrics.episodes_failed} failed)")
        if metrics.groups:
            facts.append(f"zero-variance {metrics.zero_variance_groups}/{metrics.groups}")
        if metrics.tokens_sampled and metrics.time_rollout_s > 0:
            facts.append(f"{metrics.tokens_sampled / metrics.time_rollout_s:,.0f} tok/s")
        if metrics.step > 0:
            facts.append(f"{self._step_times[-1]:.1f} s/step")
        if left := self._time_left():
            facts.append(left)
        return "  ".join(facts)

    def _time_left(self) -> str:
        steps = self._total_steps - self._step
        if not self._step_times or steps <= 0:
            return ""
        return f"{_duration(steps * sum(self._step_times) / len(self._step_times))} left"

    def _print(self, text: str) -> None:
        # Agents' texts hold brackets, and a log line that is wrapped cannot be searched.
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------------------- texts


def _evaluations(result: TuneResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("held-out reward")
    table.add_column("before")
    table.add_column("after")
    for mode in dict.fromkeys([*result.eval_before, *result.eval_after]):
        table.add_row(mode, _evaluation(result.eval_before.get(mode)), _evaluation(result.eval_after.get(mode)))
    table.caption = "brackets: 95% confidence interval"
    table.caption_justify = "left"
    return table


def _evaluation(result: EvalResult | None) -> Text:
    if result is None:
        return Text("-")
    failed = f"  {result.episodes_failed}/{result.episodes} failed" if result.episodes_failed else ""
    return Text(f"{result}{failed}")


def _held_out(metrics: StepMetrics) -> str:
    greedy, sampled = metrics.eval_reward_mean, metrics.eval_reward_sampled_mean
    if greedy is None and sampled is None:
        return ""
    return "held-out " + "/".join("-" if value is None else _number(value) for value in (greedy, sampled))


def _number(value: float) -> str:
    """Two decimals, or two digits where rewards are small."""
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
