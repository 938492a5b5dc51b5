"""Which fast ways of running a model there are, for what it is and for this machine: sampler and learner ask alike."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.native import TILE, NativeKernels, Way
from agentscope_tuner.engine.products import pairs_keep_up
from agentscope_tuner.engine.trial import native_kernels

if TYPE_CHECKING:
    from agentscope_tuner.engine.gpu_kernels import GpuKernels

_logger = logging.getLogger(__name__)

FUSED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Architectures made of RMSNorm, rotary attention (with or without query-key norms) and a gated MLP."""

_SMALL_LAYER = 2**22
"""A layer of at most so many bytes is small: it stays in the cache that a processor's core has for itself."""
_SHARED_LAYER = 2**24
"""One of at most so many bytes is run as a whole, too, where registers for matrices make that the faster way."""
_VOICES = 2**28
"""Most bytes of weights that adapters of a small model have, each a copy of its own."""


def has_fused_form(loaded: LoadedModel) -> bool:
    """Whether the model is of a family that hand-written passes know."""
    config = loaded.model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    # The rules "dynamic" and "longrope" depend on the length of the whole sequence, so no table can hold them.
    return config.model_type in FUSED_FAMILIES and rope not in ("dynamic", "longrope")


def tell_of_modules(loaded: LoadedModel, done: str) -> None:
    """Say that something is done by the model's own modules, although hand-written passes know its family."""
    _logger.warning(
        "`%s` is %s by its own modules, which takes longer: what is fast for its family, `%s`, "
        "does not compute the same here",
        loaded.name,
        done,
        loaded.model.config.model_type,
    )


def is_small(loaded: LoadedModel) -> bool:
    """Whether a layer stays in the cache that a processor's core has for itself."""
    return _layer_size(loaded) <= _SMALL_LAYER


def has_whole_form(loaded: LoadedModel, engine: EngineConfig) -> bool:
    """Whether compiled kernels run all of its layers in one call, with all of its adapters."""
    kernels = kernels_for(loaded, engine)
    if kernels is None:
        return False
    if not is_small(loaded):
        shared = kernels.way is Way.IN_MATRICES and _layer_size(loaded) <= _SHARED_LAYER
        return _fills_tiles(loaded) and not loaded.unmerged and (shared or pairs_keep_up(kernels))
    layers: int = loaded.model.config.num_hidden_layers
    return (len(loaded.voices) - 1) * layers * _layer_size(loaded) <= _VOICES


def _fills_tiles(loaded: LoadedModel) -> bool:
    """Whether `ByColumns` in `kernels/passes.h` can multiply by its weights."""
    config = loaded.model.config
    narrow = loaded.model.dtype == torch.bfloat16
    return narrow and config.hidden_size % 2 == 0 and config.intermediate_size % TILE == 0


def _layer_size(loaded: LoadedModel) -> int:
    """Bytes of a layer without adapters."""
    parameters = loaded.model.get_decoder().layers[0].named_parameters()
    return sum(parameter.nbytes for name, parameter in parameters if "lora_" not in name)


def kernels_for(loaded: LoadedModel, engine: EngineConfig) -> NativeKernels | None:
    """The compiled kernels, where they may be used and know the model's numbers."""
    fits = engine.fast_decoder and loaded.device.type == "cpu" and loaded.model.dtype in (torch.float32, torch.bfloat16)
    return native_kernels() if fits else None


def gpu_kernels_for(loaded: LoadedModel, engine: EngineConfig) -> GpuKernels | None:
    """Those for a GPU, where the model is on one and there is Triton."""
    if not engine.fast_decoder or loaded.device.type != "cuda":
        return None
    try:
        from agentscope_tuner.engine.gpu_kernels import GpuKernels
    except ImportError:
        return None
    return GpuKernels()
