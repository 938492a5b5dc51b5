"""Makes AgentScope workflows trainable: change `model=...` to `model=model_tuner`, and call `tune()`."""

from importlib import import_module
from typing import TYPE_CHECKING

from agentscope_tuner.config import (
    AlgorithmConfig,
    DatasetConfig,
    TunerConfig,
    TunerModelConfig,
)

# Functions that are called as their modules are: whoever imported such a module later would put it in their place.
from agentscope_tuner.evaluate import evaluate
from agentscope_tuner.tune import tune
from agentscope_tuner.types import (
    EvalResult,
    JudgeOutput,
    Task,
    TuneResult,
    WorkflowOutput,
    WorkflowTask,
)

if TYPE_CHECKING:
    from agentscope_tuner.endpoint import Endpoint
    from agentscope_tuner.judges import Judge, MathJudge
    from agentscope_tuner.model_tuner import ModelTuner
    from agentscope_tuner.workflow import Workflow, check_judge, check_workflow
else:
    # Imported when they are asked for: they need AgentScope, or a web server, which take seconds, and most processes
    # of a run need neither.
    _HOMES = {
        "Endpoint": "endpoint",
        "Judge": "judges",
        "MathJudge": "judges",
        "ModelTuner": "model_tuner",
        "Workflow": "workflow",
        "check_judge": "workflow",
        "check_workflow": "workflow",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})


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
