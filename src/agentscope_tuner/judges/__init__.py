"""Where rewards come from, when the workflow does not give them itself."""

from agentscope_tuner.judges.base import Judge
from agentscope_tuner.judges.math import MathJudge

__all__ = ["Judge", "MathJudge"]
