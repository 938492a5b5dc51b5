"""Makes AgentScope workflows trainable: change `model=...` to `model=model_tuner`, and call `tune()`."""

from agentscope_tuner.config import (
    AlgorithmConfig,
    DatasetConfig,
    TunerConfig,
    TunerModelConfig,
)
from agentscope_tuner.endpoint import Endpoint
from agentscope_tuner.evaluate import evaluate
from agentscope_tuner.judges import Judge, MathJudge
from agentscope_tuner.model_tuner import ModelTuner
from agentscope_tuner.tune import tune
from agentscope_tuner.types import (
    EvalResult,
    JudgeOutput,
    Task,
    TuneResult,
    WorkflowOutput,
    WorkflowTask,
)
from agentscope_tuner.workflow import Workflow, check_judge, check_workflow

__all__ = [
    "AlgorithmConfig",
    "DatasetConfig",
    "Endpoint",
    "EvalResult",
    "Judge",
    "JudgeOutput",
    "MathJudge",
    "ModelTuner",
    "Task",
    "TuneResult",
    "TunerConfig",
    "TunerModelConfig",
    "Workflow",
    "WorkflowOutput",
    "WorkflowTask",
    "check_judge",
    "check_workflow",
    "evaluate",
    "tune",
]
