"""What the process of a run tells those that play its episodes."""

from __future__ import annotations

from dataclasses import dataclass

from agentscope_tuner.config import TunerConfig
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner


@dataclass(slots=True)
class RunSpec:
    """What every runner has to know about the run.

    The recorder keeps it, pickled: whoever gets Trinity's configuration prints it, and would import what is in it.
    """

    config: TunerConfig
    workflow: WorkflowRunner
    judge: JudgeRunner | None
