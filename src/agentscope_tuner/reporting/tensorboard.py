"""Step metrics as TensorBoard scalars."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from agentscope_tuner.types import StepMetrics

_TAGS = {
    "reward/mean": "reward_mean",
    "reward/std": "reward_std",
    "reward/zero_variance_groups": "zero_variance_groups",
    "reward/resampled_groups": "resampled_groups",
    "eval/reward_greedy": "eval_reward_mean",
    "eval/reward_sampled": "eval_reward_sampled_mean",
    "time/rollout_s": "time_rollout_s",
    "time/train_s": "time_train_s",
    "time/eval_s": "time_eval_s",
    "train/episodes": "episodes",
    "train/episodes_failed": "episodes_failed",
    "train/groups": "groups",
    "train/tokens_sampled": "tokens_sampled",
    "train/tokens_trained": "tokens_trained",
    "train/tokens_packed": "tokens_packed",
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/kl_to_sampler": "kl_to_sampler",
    "train/clip_fraction": "clip_fraction",
    "train/entropy": "entropy",
    "train/learning_rate": "learning_rate",
}
"""Tag to field of `StepMetrics`."""


class TensorBoardWriter:
    """Writes one event per step; `extra` metrics keep their names.

    The first event of a writer says that the run (re)starts at its step, so that TensorBoard drops later steps which
    an earlier run left behind. The file is made with the first event.
    """

    def __init__(self, logdir: Path) -> None:
        # Imported here because few of those who import this package write events.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._logdir = logdir
        self._protos: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._record_writer: Any = RecordWriter
        self._records: Any = None

    def write(self, metrics: StepMetrics) -> None:
        """Write what is set and finite, and flush it."""
        scalars = {tag: getattr(metrics, field) for tag, field in _TAGS.items()} | metrics.extra
        values = [
            self._summaries.Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
            if value is not None and math.isfinite(value)
        ]
        if self._records is None:
            self._start(metrics.step)
        self._event(step=metrics.step, summary=self._summaries.Summary(value=values))
        self._records.flush()

    def close(self) -> None:
        """Close the event file. A later `write` would begin a new one."""
        if self._records is not None:
            self._records.close()
        self._records = None

    def _start(self, step: int) -> None:
        self._logdir.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        path = self._logdir / f"events.out.tfevents.{time.time():.6f}"
        # `RecordWriter` instead of `EventFileWriter`: no thread, and no host name in the file's name.
        self._records = self._record_writer(path.open("xb"))
        self._event(file_version="brain.Event:2")
        self._event(step=step, session_log=self._protos.SessionLog(status=self._protos.SessionLog.START))

    def _event(self, **content: Any) -> None:
        self._records.write(self._protos.Event(wall_time=time.time(), **content).SerializeToString())
