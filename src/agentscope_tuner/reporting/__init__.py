"""What a run leaves behind, and what it shows: run folder, curves, TensorBoard events, progress."""

from agentscope_tuner.reporting.curves import draw_reward, terminal_curve
from agentscope_tuner.reporting.measures import (
    DECODINGS,
    check_failures,
    describe,
    describe_evaluation,
    mean_metrics,
    stored_evaluation,
    summarize,
    with_continuations,
)
from agentscope_tuner.reporting.progress import ProgressView
from agentscope_tuner.reporting.run_folder import RunFolder, read_episodes
from agentscope_tuner.reporting.tensorboard import TensorBoardWriter

__all__ = [
    "DECODINGS",
    "ProgressView",
    "RunFolder",
    "TensorBoardWriter",
    "check_failures",
    "describe",
    "describe_evaluation",
    "draw_reward",
    "mean_metrics",
    "read_episodes",
    "stored_evaluation",
    "summarize",
    "terminal_curve",
    "with_continuations",
]
