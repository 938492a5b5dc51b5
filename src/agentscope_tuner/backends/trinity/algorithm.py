"""What Trinity's explorer and trainer import: our advantages and loss weights, and steps that stay whole.

An update's loss is a weighted sum over tokens, as in the embedded engine. Trinity's loss is the mean over experiences
of the sum over each one's tokens (`seq-mean-token-sum`); so a token's weight, times the number of experiences, goes
into its advantage. That is exact, because the clipped loss is proportional to the advantage's size.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
import torch
from trinity.algorithm.advantage_fn.advantage_fn import AdvantageFn
from trinity.algorithm.algorithm import MultiStepGRPOAlgorithm
from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy
from trinity.algorithm.sample_strategy.utils import representative_sample
from trinity.buffer.operators import ExperienceOperator
from trinity.common.config import BufferConfig
from trinity.common.experience import EID, Experience

from agentscope_tuner.algorithms import Credit
from agentscope_tuner.algorithms.advantages import Weighting, token_weights
from agentscope_tuner.backends.trinity.strands import strands_of

_POLL_S = 0.1
TAUGHT, STEP_SIZE = "taught_tokens", "experiences_in_step"
"""Names in an experience's `info`."""


def to_experiences(credits: Sequence[Credit], task: str) -> list[Experience]:
    """The experiences of a group; roles compare among themselves, so each has a group of its own.

    Args:
        credits: of all its episodes and roles.
        task: names the group.
    """
    found = []
    runs = Counter[str]()
    for credit in credits:
        role = credit.trajectory.role
        for step, strand in enumerate(strands_of(credit)):
            found.append(
                Experience(
                    eid=EID(task=f"{task}:{role}", run=runs[role], step=step),
                    tokens=torch.tensor(strand.tokens, dtype=torch.int32),
                    prompt_length=strand.prompt_length,
                    logprobs=torch.tensor(strand.logprobs),
                    action_mask=torch.tensor(strand.sampled),
                    advantages=torch.tensor(strand.advantages),
                    reward=float(credit.trajectory.reward),
                    info={TAUGHT: strand.taught},
                    metrics={f"reward/{role}": float(credit.trajectory.reward)},
                )
            )
        runs[role] += 1
    return found


def nothing_learned(task: str, token: int) -> Experience:
    """What stands for a group of which no episode succeeded: the trainer waits for every step's experiences."""
    return Experience(
        eid=EID(task=task),
        tokens=torch.tensor([token, token], dtype=torch.int32),
        prompt_length=1,
        logprobs=torch.zeros(1),
        action_mask=torch.zeros(1, dtype=torch.bool),
        advantages=torch.zeros(1),
        reward=0.0,
        info={TAUGHT: 0},
    )


class WeighedAdvantages(AdvantageFn, ExperienceOperator):  # type: ignore[misc]  # published without types
    """Keeps the advantages that came with the experiences of a step, and weighs them."""

    def __init__(self, loss_weighting: Weighting = "token", max_tokens: int = 1) -> None:
        """As `algorithm.loss_weighting` says; `max_tokens` is the constant of `constant`."""
        self.loss_weighting = loss_weighting
        self.max_tokens = max_tokens

    def __call__(self, exps: list[Experience], **kwargs: Any) -> tuple[list[Experience], dict[str, float]]:
        """As `process`."""
        return self.process(exps)

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """All experiences of one explorer step."""
        tokens = Counter[str]()
        for exp in exps:
            tokens[exp.eid.rid] += exp.info[TAUGHT]
        tokens = +tokens  # trajectories without any teach nothing
        weights = token_weights(tokens, self.loss_weighting, self.max_tokens) if tokens else {}
        for exp in exps:
            exp.info[STEP_SIZE] = len(exps)
            exp.advantages = exp.advantages * (weights.get(exp.eid.rid, 0.0) * len(exps))
            exp.returns = exp.advantages.clone()
        return exps, {"taught_tokens": float(tokens.total())}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """In the explorer, where a step's experiences are together."""
        return False

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """None but the constructor's own."""
        return {}


class Grpo(MultiStepGRPOAlgorithm):  # type: ignore[misc]  # published without types
    """Trinity's, without the reference model, which only a KL loss would read."""

    use_reference = False


class WholeSteps(DefaultSampleStrategy):  # type: ignore[misc]  # published without types
    """Trains on what one explorer step wrote, however many experiences that are."""

    def __init__(self, buffer_config: BufferConfig, recorder: str, eval_interval: int, patience_s: float) -> None:
        """An evaluation that is due is waited for, up to `patience_s`; `eval_interval` 0: there is none."""
        super().__init__(buffer_config)
        self._recorder = recorder
        self._eval_interval = eval_interval
        self._patience_s = patience_s

    async def sample(self, step: int, **kwargs: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """The experiences of the next step.

        Raises:
            TimeoutError: an evaluation took too long.
        """
        if self._eval_interval and step % self._eval_interval == 0:
            await self._evaluation(step)
        exps = await self.exp_buffer.read(batch_size=1)
        rest = exps[0].info[STEP_SIZE] - 1
        if rest:
            exps += await self.exp_buffer.read(batch_size=rest)
        metrics: dict[str, float] = {}
        self.set_model_version_metric(exps, metrics)
        return exps, metrics, representative_sample(exps)

    async def _evaluation(self, step: int) -> None:
        """Wait for the one that the explorer makes in this step: training would exchange the weights below it."""
        recorder = ray.get_actor(self._recorder)
        async with asyncio.timeout(self._patience_s):
            while not await recorder.evaluated.remote(step):
                await asyncio.sleep(_POLL_S)
