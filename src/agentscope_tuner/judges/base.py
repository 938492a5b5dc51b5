"""What every judge is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from agentscope_tuner.types import JudgeOutput, WorkflowOutput, WorkflowTask


class Judge(ABC):
    """Turns what a workflow returned into a reward. One judge serves all episodes of a run, many at a time."""

    @abstractmethod
    async def judge(self, task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Reward one episode.

        Raises:
            RewardError: there is nothing to judge by; the episode fails and is counted. A wrong answer is a reward
                of 0, not an error.
        """
