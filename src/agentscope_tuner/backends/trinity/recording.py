"""Where Trinity's processes report to: one actor that writes the run folder as the embedded engine does."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from agentscope_tuner.algorithms import build_datums, compute_advantages
from agentscope_tuner.config import TunerConfig
from agentscope_tuner.errors import RoleError, TooManyFailuresError, TunerError
from agentscope_tuner.recorder import check_targets
from agentscope_tuner.reporting import (
    DECODINGS,
    RunFolder,
    TensorBoardWriter,
    check_failures,
    describe,
    describe_evaluation,
    draw_reward,
    mean_metrics,
    summarize,
    with_continuations,
)
from agentscope_tuner.types import EpisodeGroup, EvalResult, StepMetrics

_FROM_TRAINER = {
    "actor/loss": "loss",
    "loss:sum": "loss",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "kl_to_sampler",
    "grad_norm": "grad_norm",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "time/train_step": "time_train_s",
    "perf/total_num_tokens": "tokens_packed",
    "packed_tokens:sum": "tokens_packed",
}
"""Trinity's names for what `StepMetrics` calls otherwise; of two for one thing, the later counts."""


@dataclass(slots=True)
class _Step:
    """What has been heard of a step so far."""

    groups: list[EpisodeGroup] = field(default_factory=list)
    metrics: StepMetrics | None = None
    """Set once all its groups are there."""
    trained: dict[str, float] | None = None
    evaluated: dict[str, list[EpisodeGroup]] = field(default_factory=lambda: defaultdict(list))
    begun: float = 0.0
    evaluation_begun: float = 0.0
    results: dict[str, EvalResult] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """What the driver shows."""

    episodes: int
    failed: int
    tokens: int
    finished: list[StepMetrics]
    """Steps written since the last time it asked."""
    stop: TunerError | None
    """Why the run should end, if it should."""


class RunRecorder:
    """Writes episodes as they come, and a line of metrics per step once everything about it is known."""

    def __init__(
        self,
        config: TunerConfig,
        targets: list[str] | None,
        folder: str,
        spec: bytes,
        *,
        done: int,
        steps: int,
        eval_tasks: int,
    ) -> None:
        """For the steps from `done` to `steps`, in which the roles `targets` learn; `spec` is for the runners."""
        self._spec = spec
        self._targets = targets
        self._config = config
        self._folder = RunFolder(Path(folder))
        self._last = steps
        self._eval_tasks = eval_tasks
        self._steps: dict[int, _Step] = defaultdict(_Step)
        self._history = self._folder.read_metrics()
        first = 0 if eval_tasks else 1
        self._next = max(done + 1 if done else first, self._history[-1].step + 1 if self._history else first)
        self._versions: dict[int, int] = {}
        """Of the weights that were evaluated, by the batch that Trinity evaluated them in."""
        self._roles: set[str] = set()
        self._evaluated: dict[int, set[str]] = defaultdict(set)
        """What is done of each of these evaluations."""
        self._board = TensorBoardWriter(self._folder.tensorboard_dir) if config.monitor_type == "tensorboard" else None
        self._episodes = self._failed = self._tokens = 0
        self._fresh: list[StepMetrics] = []
        self._stop: TunerError | None = None

    def spec(self) -> bytes:
        """A pickled `RunSpec`."""
        return self._spec

    def record(self, group: EpisodeGroup, roles: set[str], *, phase: str, batch: int, version: int) -> None:
        """A group was run.

        Args:
            group: the group.
            roles: all that the runner has seen registered so far.
            phase: `train`, `eval_greedy` or `eval_sampled`.
            batch: the explorer's step that it belongs to.
            version: how many updates the weights had seen. Trinity evaluates before it has synchronized the step's
                own, so an evaluation belongs to the step of its weights, not of its batch.
        """
        self._roles |= roles
        step = batch if phase == "train" else self._versions.setdefault(batch, version)
        now = time.perf_counter()
        longest = max(episode.time_s for episode in group.episodes)
        state = self._steps[step]
        for episode in with_continuations(group.episodes):
            self._folder.write_episode(episode, phase=phase, step=step)
            self._episodes += 1
            self._failed += episode.error is not None
            self._tokens += episode.tokens_sampled
        if phase == "train":
            state.begun = min(state.begun or now, now - longest)
            state.groups.append(group)
            if len(state.groups) == self._config.algorithm.batch_size:
                self._all_played(state, step, now)
        else:
            decoding = phase.removeprefix("eval_")
            state.evaluation_begun = min(state.evaluation_begun or now, now - longest)
            state.evaluated[decoding].append(group)
            if len(state.evaluated[decoding]) == self._eval_tasks:
                self._all_evaluated(state, decoding, now)
                self._evaluated[batch].add(decoding)
        self._write_what_is_known()

    def evaluated(self, batch: int) -> bool:
        """Whether the evaluation that Trinity makes in a batch is done."""
        return len(self._evaluated[batch]) == len(DECODINGS)

    def fail(self, error: TunerError) -> None:
        """Something is wrong with the run, not with an episode."""
        self._stop = self._stop or error

    def trained(self, step: int, data: dict[str, float]) -> None:
        """The trainer has done a step."""
        self._steps[step].trained = data
        self._write_what_is_known()

    def progress(self) -> Progress:
        """What happened so far."""
        fresh, self._fresh = self._fresh, []
        return Progress(self._episodes, self._failed, self._tokens, fresh, self._stop)

    def finish(self, results: dict[str, EvalResult]) -> None:
        """Nothing comes any more but the evaluation of the finished model, if there was one."""
        self._steps[self._last].results = results
        for step in sorted(self._steps):
            if self._next <= step <= self._last and self._steps[step].metrics is not None:
                self._write(step)

    def _all_played(self, state: _Step, step: int, now: float) -> None:
        state.groups.sort(key=lambda group: group.episodes[0].workflow_task.episode_id)
        metrics = StepMetrics(step=step)
        describe(state.groups, metrics)
        metrics.groups = len(state.groups)
        algorithm = self._config.algorithm
        credits = compute_advantages(state.groups, algorithm.advantage, algorithm.turn_discount)
        metrics.zero_variance_groups = sum(not one for one in credits)
        metrics.tokens_trained = sum(len(datum.call.completion_ids) for datum in chain(*build_datums(credits)))
        metrics.time_rollout_s = now - state.begun
        state.metrics = metrics
        episodes = with_continuations([episode for group in state.groups for episode in group.episodes])
        try:
            check_failures(episodes, algorithm.max_failed_fraction, self._folder.episodes_dir)
            if any(group.succeeded for group in state.groups):
                check_targets(self._targets, self._roles)
        except (TooManyFailuresError, RoleError) as exc:
            self.fail(exc)
        state.groups = []

    def _all_evaluated(self, state: _Step, decoding: str, now: float) -> None:
        episodes = [episode for group in state.evaluated.pop(decoding) for episode in group.episodes]
        result = summarize([episode.reward_mean for episode in episodes], now - state.evaluation_begun)
        result.metrics = mean_metrics(episodes)
        state.results[decoding] = result

    def _write_what_is_known(self) -> None:
        while self._next <= self._last and self._complete(self._next):
            self._write(self._next)

    def _complete(self, step: int) -> bool:
        """Whether everything about a step is known that will be."""
        state = self._steps[step]
        evaluated = len(state.results) == len(DECODINGS)
        if step == 0:
            return evaluated
        # Trinity evaluates at the beginning of a step's synchronization, so with the weights of the step before; the
        # finished model is evaluated last of all. Where neither side waits, evaluations come when they come.
        trinity = self._config.trinity
        in_step = trinity.sync_style == "fixed" and trinity.sync_interval == 1
        due = in_step and (step + 1) % self._config.algorithm.eval_interval_steps == 0
        waits = self._eval_tasks > 0 and (due or step == self._last)
        return state.metrics is not None and state.trained is not None and (evaluated or not waits)

    def _write(self, step: int) -> None:
        state = self._steps.pop(step)
        metrics = state.metrics or StepMetrics(step=step)
        for earlier in sorted(known for known in self._steps if known < step):  # evaluations that came late
            state.results |= self._steps.pop(earlier).results
        for theirs, ours in _FROM_TRAINER.items():
            if state.trained is not None and theirs in state.trained:
                setattr(metrics, ours, state.trained[theirs])
        describe_evaluation(state.results, metrics)
        self._history.append(metrics)
        self._folder.append_metrics(metrics)
        if self._board is not None:
            self._board.write(metrics)
        self._fresh.append(metrics)
        self._next = step + 1
        if state.results or step == self._last:
            draw_reward(self._history, self._folder.reward_png, self._config.experiment_name)
