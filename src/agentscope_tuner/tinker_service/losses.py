"""The losses that Tinker's `forward_backward` names, each a sum over tokens.

Formulas and default thresholds are those of Tinker's documentation ("Loss Functions").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
"""What a client sent for each token, by name; all (n,)."""
Settings = Mapping[str, float]


def _cross_entropy(logprobs: Tensor, given: Inputs, settings: Settings) -> Tensor:
    return -logprobs * given["weights"]


def _importance_sampling(logprobs: Tensor, given: Inputs, settings: Settings) -> Tensor:
    return -torch.exp(logprobs - given["logprobs"]) * given["advantages"]


def _ppo(logprobs: Tensor, given: Inputs, settings: Settings) -> Tensor:
    ratio = torch.exp(logprobs - given["logprobs"])
    bound = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * given["advantages"], bound * given["advantages"])


def _cispo(logprobs: Tensor, given: Inputs, settings: Settings) -> Tensor:
    ratio = torch.exp(logprobs.detach() - given["logprobs"])
    bound = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -bound * logprobs * given["advantages"]


def _dro(logprobs: Tensor, given: Inputs, settings: Settings) -> Tensor:
    drift = logprobs - given["logprobs"]
    return -(logprobs * given["advantages"] - 0.5 * settings["beta"] * drift**2)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss, what it reads, and the defaults of its settings."""

    compute: Callable[[Tensor, Inputs, Settings], Tensor]
    """From log-probabilities, inputs and settings to the loss of each token (n,)."""
    inputs: tuple[str, ...]
    defaults: Settings


LOSSES = {
    "cross_entropy": TokenLoss(_cross_entropy, ("weights",), {}),
    "importance_sampling": TokenLoss(_importance_sampling, ("logprobs", "advantages"), {}),
    "ppo": TokenLoss(_ppo, ("logprobs", "advantages"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": TokenLoss(_cispo, ("logprobs", "advantages"), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": TokenLoss(_dro, ("logprobs", "advantages"), {"beta": 0.05}),
}
