"""Losses of GRPO and its variants: pure functions on per-token tensors of shape (n,)."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate (PPO, arXiv:1707.06347, equation 7; asymmetric as in DAPO, arXiv:2503.14476).

    Returns:
        The loss of each token, and whether clipping took its gradient away.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    free = ratio * advantages
    bound = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bound), bound < free


def k3_divergence(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(p || other) at tokens drawn from p: never negative, unbiased, low variance."""
    difference = other_logprobs - logprobs
    return torch.exp(difference) - difference - 1


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each row of logits (n, V); rows may hold minus infinity."""
    log_p = torch.log_softmax(logits, -1)
    # Zero times minus infinity is no number, and neither is zero times what overflows in the gradient.
    return -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
