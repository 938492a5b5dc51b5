"""What a run leaves behind, and what it shows: run folder, curves, TensorBoard events, progress."""

from agentscope_tuner.reporting.curves import draw_reward, terminal_curve
from agentscope_tuner.reporting.progress import ProgressView
from agentscope_tuner.reporting.run_folder import RunFolder, read_episodes
from agentscope_tuner.reporting.tensorboard import TensorBoardWriter

__all__ = ["ProgressView", "RunFolder", "TensorBoardWriter", "draw_reward", "read_episodes", "terminal_curve"]
