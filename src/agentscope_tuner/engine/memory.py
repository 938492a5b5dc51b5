"""What a training step takes beside the weights, known before the first one.

Activations are counted on two short probes. They grow with the tokens of a pass, and with nothing else: attention
scores are never kept.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentscope_tuner.algorithms.packing import pack
from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.fast_forms import has_fused_form, is_small
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.products import computes_wide
from agentscope_tuner.engine.trainable import TreePass, head_rows
from agentscope_tuner.errors import ConfigError

_CPU_TOKENS, _SMALL_CPU_TOKENS, _GPU_TOKENS = 1536, 8192, 6144
"""Tokens of a pass, where the user says nothing; in bfloat16 twice the first. More hold more of a long prefix tree
together, and take more memory, which a small model has little use for otherwise."""
_LOGIT_COPIES = 7
"""Of a block, in float32: what its softmax and entropy make of the logits, and the gradients."""
_MOMENTS_BYTES = 8
"""AdamW's two, in float32."""
_MASTER_BYTES = 8
"""A weight and its gradient in float32, where the model has another precision."""
_GROWTH = 1.25
"""How far a process may grow with freed memory before it is given back."""
_MEMORY = Path("/proc/self/statm")
_ALLOCATED = 1.6
"""What the C library holds for activations, over what they need: it keeps what was freed, in pieces that do not always
fit. 1.2 to 1.7 were measured."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """In bytes."""

    fixed: float
    """Gradients and the optimizer's state."""
    per_token: float
    """What each token of a pass adds ..."""
    per_row: float
    """... and, up to the size of a block, each row of logits."""
    block: int
    """Rows of a block."""

    def gb(self, tokens: int) -> float:
        """What passes of so many tokens take, in GB."""
        return (self.fixed + tokens * self.per_token + min(tokens, self.block) * self.per_row) / 1e9

    def tokens_within(self, gb: float) -> int:
        """The longest pass that takes at most so many GB; negative where not even the rest does."""
        room = gb * 1e9 - self.fixed
        tokens = room / (self.per_token + self.per_row)
        return int(tokens if tokens < self.block else (room - self.block * self.per_row) / self.per_token)


def estimate(tree_pass: TreePass) -> StepMemory:
    """Count what the learner's forward pass keeps for its backward pass."""
    loaded = tree_pass.loaded
    short, long = min(32, loaded.max_model_len // 2), min(96, loaded.max_model_len)
    kept = [_kept(tree_pass, tokens) for tokens in (short, long)]
    per_token = (kept[1] - kept[0]) / (long - short)
    # The backward pass goes through the layers one by one, and makes about twice as much of each as was kept of it.
    per_token *= 1 + 2 / loaded.model.config.get_text_config().num_hidden_layers
    fixed = 0
    for parameter in loaded.trainable_parameters().values():
        master = _MASTER_BYTES if parameter.dtype != torch.float32 else 0
        fixed += parameter.numel() * (parameter.element_size() + _MOMENTS_BYTES + master)
    per_row = _LOGIT_COPIES * 4 * loaded.vocabulary
    return StepMemory(fixed, _ALLOCATED * per_token, _ALLOCATED * per_row, head_rows(loaded))


def _kept(tree_pass: TreePass, tokens: int) -> int:
    """Bytes that a forward pass over so many tokens keeps, weights not counted."""
    loaded = tree_pass.loaded
    weights = {p.untyped_storage().data_ptr() for p in loaded.model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tree = pack([[i * 7919 % loaded.vocabulary for i in range(tokens)]], max_tokens=tokens)[0]
    adapter = loaded.adapters[0] if loaded.adapters else ""
    counted = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with torch.enable_grad(), loaded.speaking_as(adapter), counted:
        # What was counted stays alive through `hidden`, so no address is counted for two tensors.
        hidden = tree_pass.hidden(tree)
    del hidden
    return sum(kept.values())


def give_back() -> None:
    """Give free memory back to the system, where the C library is GNU's."""
    if hasattr(library := _c_library(), "malloc_trim"):
        library.malloc_trim(0)


class FreedMemory:
    """What becomes of the memory that training steps free.

    The C library gives large pieces back at once, so that the next step has all their pages made anew, and zeroed: on a
    virtual machine a tenth of its time. What the library keeps is cut to pieces by what comes in between, so that
    passes of other lengths do not fit into it and the process grows from step to step.
    """

    def __init__(self, *, keep: bool) -> None:
        """With `keep`, it is there for the next step, until the process has grown; else it is given back after each."""
        self._keep = keep and _keep_pages()
        self._usual = 0

    def after_step(self) -> None:
        """Give back what should be."""
        if self._keep:
            # Compared with what there was after the first step since all was given back.
            resident = _resident()
            self._usual = self._usual or resident
            if resident <= _GROWTH * self._usual:
                return
            self._usual = 0
        give_back()


def _keep_pages() -> bool:
    """Have the C library keep what is freed, in the whole process and from now on; false where it cannot."""
    library = _c_library()
    if not hasattr(library, "mallopt") or not _MEMORY.exists():
        return False
    trim_threshold, mmap_threshold = -1, -3  # as <malloc.h> has them
    return bool(library.mallopt(trim_threshold, -1) and library.mallopt(mmap_threshold, 2**31 - 1))


def _resident() -> int:
    """Bytes of memory that the process has."""
    return int(_MEMORY.read_text().split()[1]) * mmap.PAGESIZE


@cache
def _c_library() -> Any:
    return ctypes.CDLL(None) if sys.platform.startswith("linux") else None


class PassTokens(NamedTuple):
    """How many tokens a forward and backward pass may have."""

    usual: int
    """`engine.micro_batch_tokens`, and as many as fit into `engine.step_memory_gb`."""
    most: int | None
    """What fits into that, where sequences share more than this; None: no bound."""


def pass_tokens(tree_pass: TreePass, engine: EngineConfig) -> PassTokens:
    """How many tokens passes may have by a run's settings.

    Raises:
        ConfigError: one sequence of `max_model_len` tokens would take more memory than it may.
    """
    loaded = tree_pass.loaded
    asked = engine.micro_batch_tokens or _usual_tokens(loaded)
    if engine.step_memory_gb is None:
        return PassTokens(asked, None)
    memory = estimate(tree_pass)
    tokens = memory.tokens_within(engine.step_memory_gb)
    if tokens < loaded.max_model_len:
        raise ConfigError(
            f"`engine.step_memory_gb` is {engine.step_memory_gb}, but to train on one sequence of "
            f"{loaded.max_model_len} tokens takes {memory.gb(loaded.max_model_len):.2f} GB, "
            f"{memory.fixed / 1e9:.2f} of them whatever its length; raise it, lower `model.max_model_len`, or train "
            "a LoRA adapter (`model.lora`)"
        )
    return PassTokens(min(asked, tokens), tokens)


def _usual_tokens(loaded: LoadedModel) -> int:
    if loaded.device.type != "cpu":
        return _GPU_TOKENS
    if has_fused_form(loaded) and is_small(loaded):
        return _SMALL_CPU_TOKENS
    return 2 * _CPU_TOKENS if loaded.model.dtype == torch.bfloat16 and not computes_wide(loaded) else _CPU_TOKENS
