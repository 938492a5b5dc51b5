"""AdamW over a model's trainable parameters, in float32 whatever precision they are computed in."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from agentscope_tuner.engine.memory import FreedMemory
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.errors import TrainingStoppedError


class Optimizer:
    """Takes the gradients that lie in the parameters' `grad`, and leaves none behind.

    Gradients of parameters in other precisions go on to float32 as they come: a sum of hundreds of them would be
    rounded hundreds of times.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
        keep_memory: bool = False,
    ) -> None:
        """AdamW with these settings; with `keep_memory`, what a step frees is kept for the next one."""
        self._freed = FreedMemory(keep=keep_memory)
        self.parameters = loaded.trainable_parameters()
        # Small updates vanish in bfloat16, so those weights have a float32 master copy.
        self.masters = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in self.parameters.items()
        }
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                if parameter.grad is not None:  # there was a backward pass before
                    _move_gradient(self.masters[name], parameter)
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self.masters[name]))
        self.adamw = torch.optim.AdamW(
            self.masters.values(), lr=0.0, betas=betas, weight_decay=weight_decay, eps=eps, fused=True
        )
        self.updates = 0
        """Steps taken."""
        # Adapters of different roles are different policies: the gradient of one does not shrink that of another.
        self._policies = [list(self.parameters)]
        if loaded.adapters:
            self._policies = [
                [name for name in self.parameters if name.endswith(f".{adapter}.weight")] for adapter in loaded.adapters
            ]

    def forget(self) -> None:
        """Begin anew, from the weights as they are."""
        self.adamw.state.clear()
        self.updates = 0

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for name, parameter in self.parameters.items():
            self.masters[name].grad = parameter.grad = None

    def step(self, learning_rate: float, max_norm: float) -> float:
        """Clip each policy's gradient to `max_norm`, update, and return the norm there was before clipping.

        Raises:
            TrainingStoppedError: the gradient is not finite; the weights are as they were.
        """
        norms = [
            torch.nn.utils.clip_grad_norm_([self.masters[name] for name in names], max_norm).item()
            for names in self._policies
        ]
        norm = math.hypot(*norms)
        if not math.isfinite(norm):
            self.zero_grad()
            raise TrainingStoppedError(
                f"the gradient of update {self.updates + 1} has the norm {norm}; the weights before it are kept. Lower "
                "`algorithm.learning_rate`, or in bfloat16 try `engine.dtype: float32`"
            )
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.updates += 1
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])
        self.zero_grad()
        self._freed.after_step()
        return norm


def _move_gradient(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None
