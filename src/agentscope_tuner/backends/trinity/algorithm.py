"""What Trinity's explorer and trainer import: our advantages and loss weights, and steps that stay whole.

An update's loss is a weighted sum over tokens, as in the embedded engine. A token's weight goes into its advantage: the
clipped loss is proportional to the advantage's size. Trinity's own losses are means over whatever is computed at once,
so a token's share would depend on its company; `SummedLoss` is a sum, which can be cut anywhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
import torch
from torch import Tensor
from trinity.algorithm.advantage_fn.advantage_fn import AdvantageFn
from trinity.algorithm.algorithm import MultiStepGRPOAlgorithm
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy
from trinity.algorithm.sample_strategy.utils import representative_sample
from trinity.buffer.operators import ExperienceOperator
from trinity.common.config import BufferConfig
from trinity.common.experience import EID, CustomField, Experience

from agentscope_tuner.algorithms import Credit
from agentscope_tuner.algorithms.advantages import Weighting, token_weights
from agentscope_tuner.algorithms.losses import policy_loss
from agentscope_tuner.backends.trinity.strands import strands_of

_POLL_S = 0.1
TAUGHT, STEP_SIZE = "taught_tokens", "experiences_in_step"
"""Names in an experience's `info`."""
_REFERENCE = "ref_logprob"
"""A name in what the Tinker trainer makes of an experience."""


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


def padded(exps: list[Experience], size: int) -> list[Experience]:
    """Fill up with experiences of which nothing is learned.

    Raises:
        ValueError: there are more than `size`.
    """
    if len(exps) > size:
        raise ValueError(
            f"a step has {len(exps)} experiences, and `buffer.train_batch_size` is {size}; raise it in "
            "`trinity.settings`, or let agents keep their history, so that a role's calls are one experience"
        )
    filler = nothing_learned("padding", int(exps[0].tokens[0]))
    filler.returns = filler.advantages
    return [*exps, *[filler] * (size - len(exps))]


def without_reference(exps: list[Experience]) -> None:
    """Give zeros where Trinity's Tinker trainer looks for the log-probabilities of a reference, which no loss reads.

    It would ask the service for them otherwise: a pass over every sequence of every step.
    """
    for exp in exps:
        exp.info[_REFERENCE] = 0.0
        exp.custom_fields = [CustomField(_REFERENCE, _REFERENCE, torch.float32)]


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
            exp.advantages = exp.advantages * weights.get(exp.eid.rid, 0.0)
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


class SummedLoss(PolicyLossFn):  # type: ignore[misc]  # published without types
    """The clipped policy loss, summed over the tokens of all experiences of an update."""

    def __init__(
        self, backend: str = "verl", clip_low: float = 0.2, clip_high: float = 0.2, sequence_parallel: int = 1
    ) -> None:
        """`sequence_parallel` GPUs share each sequence."""
        super().__init__(backend=backend)
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.sequence_parallel = sequence_parallel

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of these experiences, all tensors (B, T), and what is logged of them."""
        losses, clipped = policy_loss(logprob, old_logprob, advantages, self.clip_low, self.clip_high)
        mask = action_mask.bool()
        # Distributed training takes the mean of the gradients of all ranks.
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        loss = losses.masked_fill(~mask, 0.0).sum() * (ranks // self.sequence_parallel)
        tokens = mask.sum().clamp(min=1)
        return loss, {
            "pg_clipfrac": float((clipped & mask).sum() / tokens),
            "ppo_kl": float((old_logprob - logprob).detach().masked_fill(~mask, 0.0).sum() / tokens),
            "pg_loss": float(loss.detach()),
        }

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """None but the constructor's own."""
        return {}


class WholeSteps(DefaultSampleStrategy):  # type: ignore[misc]  # published without types
    """Trains on what one explorer step wrote, however many experiences that are."""

    def __init__(
        self, buffer_config: BufferConfig, recorder: str, eval_interval: int, patience_s: float, padded: bool
    ) -> None:
        """For one trainer.

        Args:
            buffer_config: Trinity's.
            recorder: name of the run's recorder.
            eval_interval: steps between evaluations; 0: there is none to wait for.
            patience_s: how long one may take.
            padded: fill every step up to `train_batch_size`, as verl's mini-batches need it.
        """
        super().__init__(buffer_config)
        self._size = buffer_config.train_batch_size if padded else 0
        self._recorder = recorder
        self._eval_interval = eval_interval
        self._patience_s = patience_s

    async def sample(self, step: int, **kwargs: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """The experiences of the next step.

        Raises:
            TimeoutError: an evaluation took too long.
            ValueError: there are more than `train_batch_size`.
        """
        if self._eval_interval and step % self._eval_interval == 0:
            await self._evaluation(step)
        exps = await self.exp_buffer.read(batch_size=1)
        rest = exps[0].info[STEP_SIZE] - 1
        if rest:
            exps += await self.exp_buffer.read(batch_size=rest)
        if self._size:
            exps = padded(exps, self._size)
        else:
            without_reference(exps)
        metrics: dict[str, float] = {}
        self.set_model_version_metric(exps, metrics)
        return exps, metrics, representative_sample(exps)

    async def _evaluation(self, step: int) -> None:
        """Wait for the one that the explorer makes in this step: training would exchange the weights below it."""
        recorder = ray.get_actor(self._recorder)
        async with asyncio.timeout(self._patience_s):
            while not await recorder.evaluated.remote(step):
                await asyncio.sleep(_POLL_S)
