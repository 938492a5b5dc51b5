"""The sampler's decoder: the fastest one that computes what the model's own modules compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.attention import CausalLayout, GpuRowLayout, RowLayout
from agentscope_tuner.engine.decoder import (
    CacheLayout,
    Decoder,
    FusedDecoder,
    GpuDecoder,
    ModuleDecoder,
    NativeDecoder,
    WholeDecoder,
    cache_shape,
)
from agentscope_tuner.engine.fast_forms import (
    gpu_kernels_for,
    has_fused_form,
    has_whole_form,
    kernels_for,
    tell_of_modules,
)
from agentscope_tuner.engine.joined_linear import Speakers, Voices
from agentscope_tuner.engine.kv_cache import KVCache
from agentscope_tuner.engine.models import LoadedModel, agree
from agentscope_tuner.engine.native import NativeKernels
from agentscope_tuner.engine.products import Products, products_for


@torch.no_grad()
def choose_decoder(loaded: LoadedModel, rows: int, engine: EngineConfig) -> Decoder:
    """The fastest decoder that computes what the model computes.

    Args:
        loaded: the model.
        rows: typical batch size, for which weights are packed.
        engine: says whether the fused decoders may be used.
    """
    modules = ModuleDecoder(loaded)
    if not engine.fast_decoder or not has_fused_form(loaded):
        return modules
    kernels = kernels_for(loaded, engine)
    # With every adapter, as they would sample; a model without any has one way to speak.
    speakers = loaded.adapters or ("",)
    expected = [_probe(modules, loaded, None, speaker) for speaker in speakers]
    kinds: list[Callable[[LoadedModel, Products], FusedDecoder]] = [FusedDecoder if kernels is None else NativeDecoder]
    if has_whole_form(loaded, engine):
        kinds.insert(0, WholeDecoder)
    # A layer is missing, or this PyTorch lacks the packed operators.
    unusable: tuple[type[Exception], ...] = (AttributeError, RuntimeError)
    if (on_gpu := gpu_kernels_for(loaded, engine)) is not None:
        kinds.insert(0, partial(GpuDecoder, kernels=on_gpu))
        unusable = (Exception,)  # or Triton cannot compile here, for any reason
    for kind, products in product(kinds, products_for(loaded, rows, kernels)):
        try:
            candidate = kind(loaded, products)
            found = [_probe(candidate, loaded, kernels, speaker) for speaker in speakers]
        except unusable:
            continue
        if all(agree(*logits, loaded.model.dtype) for logits in zip(found, expected, strict=True)):
            return candidate
    tell_of_modules(loaded, "sampled")
    return modules


def _probe(decoder: Decoder, loaded: LoadedModel, kernels: NativeKernels | None, speaker: str) -> Tensor:
    """Logits (2 N, V) for two sequences of N tokens, with an adapter where there is one of this name."""
    device, length = loaded.device, min(12, loaded.max_model_len)
    probe = (torch.arange(2 * length, device=device) * 7919 % loaded.vocabulary).view(2, length)
    positions = torch.arange(length, device=device).expand(2, length)
    layout: CacheLayout = CausalLayout()
    if kernels is not None or isinstance(decoder, GpuDecoder):
        cache = KVCache(
            cache_shape(loaded), 2, length, torch.empty(0, dtype=loaded.model.dtype, device=device), kernels
        )
        probe, positions = probe.reshape(-1, 1), positions.reshape(-1, 1)
        own, slots = positions[:, 0].contiguous(), torch.arange(2, device=device).repeat_interleave(length)
        if isinstance(decoder, GpuDecoder):
            layout = GpuRowLayout(cache, decoder.kernels, own, slots)
        else:
            layout = RowLayout(cache, own, slots, torch.full_like(slots, -1))
    speakers: Speakers = ()
    if speaker and isinstance(layout, GpuRowLayout):
        speakers = Voices(torch.full_like(layout.slots, loaded.voices[speaker]))
    elif speaker:
        speakers = [(speaker, len(probe))]
    with loaded.speaking_as(speaker):
        hidden = decoder.hidden(probe, positions, layout, speakers)
    return decoder.logits(hidden.reshape(2 * length, -1))
