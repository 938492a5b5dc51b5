"""Two ways to run a model over a key-value cache: transformers' own modules, and a fused loop for common families.

The fused loop reads the same weights, joins the projections that share an input, and keeps them packed for whatever
multiplies by them. It is used only where `decoder_choice` finds that it agrees with the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentscope_tuner.engine.attention import CausalLayout, GpuRowLayout, RowLayout, SlotLayout
from agentscope_tuner.engine.fast_forms import is_small
from agentscope_tuner.engine.joined_linear import GpuJoinedLinear, JoinedLinear, Speakers, Voices
from agentscope_tuner.engine.kv_cache import KVCache
from agentscope_tuner.engine.models import SHARED_ADAPTER, LoadedModel, layer_weight
from agentscope_tuner.engine.native import Job, SmallModel, weight_tiles
from agentscope_tuner.engine.products import PlainProducts, Products, computes_wide, linears

if TYPE_CHECKING:
    from agentscope_tuner.engine.gpu_kernels import GpuKernels

_SMALL_HEAD = 2**24
"""A head of at most so many bytes may be read once for every few rows."""

CacheLayout = CausalLayout | SlotLayout | RowLayout | GpuRowLayout


class Decoder(Protocol):
    """Maps new tokens to final hidden states."""

    def refresh(self) -> None:
        """The weights have changed."""

    def hidden(
        self, ids: Tensor, positions: Tensor, layout: CacheLayout, speakers: Speakers = (), rows: Tensor | None = None
    ) -> Tensor:
        """(B, N) token ids and absolute positions to (B, N, D), or (R, N, D) of some `rows` (R,), in any order."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, D) to (B, V)."""


def take_rows(rows: Tensor | None, *given: Tensor) -> tuple[Tensor, ...]:
    """Of the last layer, what comes after attention is needed only for them: nobody attends to it."""
    return given if rows is None else tuple(one.index_select(0, rows) for one in given)


class ModuleDecoder:
    """The model's own modules. Works for every architecture the engine accepts, and always sees current weights."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._wide = computes_wide(loaded)

    def refresh(self) -> None:
        """Nothing to do: the modules hold the weights."""

    def hidden(
        self, ids: Tensor, positions: Tensor, layout: CacheLayout, speakers: Speakers = (), rows: Tensor | None = None
    ) -> Tensor:
        """(B, N) token ids and absolute positions to (B, N, D), or (R, N, D) of some `rows` (R,), in any order."""
        with linears(wide=self._wide):
            return take_rows(rows, self._hidden(ids, positions, layout, speakers))[0]

    def _hidden(self, ids: Tensor, positions: Tensor, layout: CacheLayout, speakers: Speakers) -> Tensor:
        if not self._loaded.adapters or isinstance(layout, CausalLayout):
            return self._loaded.hidden_states(ids, positions, layout)
        assert not isinstance(layout, GpuRowLayout)
        assert not isinstance(speakers, Voices)
        # The modules hold one adapter at a time.
        outs, row = [], 0
        for adapter, members in groupby(speakers, key=itemgetter(0)):
            rows = slice(row, row + sum(count for _, count in members))
            with self._loaded.speaking_as(adapter):
                outs.append(self._loaded.hidden_states(ids[rows], positions[rows], layout.rows(rows)))
            row = rows.stop
        return torch.cat(outs)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, D) to (B, V)."""
        with linears(wide=self._wide):
            logits: Tensor = self._loaded.head(hidden)
        return logits


_Join = Callable[[Sequence[nn.Module]], Any]
"""Makes a `JoinedLinear` of layers that read the same input."""


class _Layer:
    """The weights of one transformer block."""

    def __init__(self, block: Any, join: _Join) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.norm_in = block.input_layernorm.weight.detach()
        self.norm_mid = block.post_attention_layernorm.weight.detach()
        self.qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = join([attention.o_proj])
        self.gate_up = join([mlp.gate_proj, mlp.up_proj])
        self.down = join([mlp.down_proj])
        self.norms: tuple[Tensor, Tensor] | None = None
        """Over the heads of queries and of keys."""
        if hasattr(attention, "q_norm"):
            self.norms = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
        self.scaling = attention.scaling

    def assign(self, other: _Layer) -> None:
        """See `GpuJoinedLinear.assign`. Norms are the model's own, so they are as they should be."""
        for name in ("qkv", "out", "gate_up", "down"):
            getattr(self, name).assign(getattr(other, name))


def rotary_table(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position (max_model_len, d).

    The model's own rotary module knows every scaling rule; its table is all that is needed from it.
    """
    positions = torch.arange(loaded.max_model_len, device=loaded.device)[None]
    like = torch.empty(0, dtype=loaded.model.dtype, device=loaded.device)
    cosines, sines = loaded.model.get_decoder().rotary_emb(like, positions)
    return cosines[0].contiguous(), sines[0].contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32."""
    if x.device.type != "cpu":
        return F.rms_norm(x, weight.shape, weight, eps)
    # There PyTorch's own makes a copy of x for every operation: of a prompt, it takes several times as long.
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_tensor(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    scaled = wide * scale if wide is x else wide.mul_(scale)
    return scaled.mul_(weight.float()).to(x.dtype)


class FusedDecoder:
    """A hand-written forward pass for `fast_forms.FUSED_FAMILIES`."""

    def __init__(self, loaded: LoadedModel, products: Products) -> None:
        self._loaded = loaded
        self._products = products
        config = loaded.model.config
        self._heads = config.num_attention_heads
        _, self._kv_heads, self._head_dim = cache_shape(loaded)
        self._eps = config.rms_norm_eps
        self._cos, sin = self._table = self._rotary_table()
        half = self._head_dim // 2
        self._sin = torch.cat([-sin[:, :half], sin[:, half:]], -1)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the weights again."""
        base = self._loaded.model.get_decoder()
        self._embedding = base.embed_tokens.weight.detach()
        self._layers = self._read_layers()
        self._norm = base.norm.weight.detach()
        self._head = self._joining()([self._loaded.head])

    def _read_layers(self) -> list[_Layer]:
        return [*self._layers_joined(self._joining())]

    def _layers_joined(self, join: _Join) -> Iterator[_Layer]:
        return (_Layer(block, join) for block in self._loaded.model.get_decoder().layers)

    def _joining(self) -> _Join:
        return partial(JoinedLinear, adapters=self._loaded.unmerged, products=self._products)

    def _rotary_table(self) -> tuple[Tensor, Tensor]:
        return rotary_table(self._loaded)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # rotate_half(x) * sin, with the sign already in the table
        return torch.addcmul(x * cos, x.roll(self._head_dim // 2, -1), sin)

    def hidden(
        self, ids: Tensor, positions: Tensor, layout: CacheLayout, speakers: Speakers = (), rows: Tensor | None = None
    ) -> Tensor:
        """(B, N) token ids and absolute positions to (B, N, D), or (R, N, D) of some `rows` (R,), in any order."""
        assert not isinstance(layout, GpuRowLayout)
        early = rows if not speakers else None  # those of a voice have to stay together
        b, n = ids.shape
        heads, kv, d = self._heads, self._kv_heads, self._head_dim
        x = F.embedding(ids, self._embedding)
        # For every head, which takes a step less time than to repeat them in each layer.
        cos, sin = (
            table[positions][:, :, None].expand(-1, -1, heads + kv, -1).contiguous() for table in (self._cos, self._sin)
        )
        for table in (cos, sin):
            table[:, :, :heads] *= self._layers[0].scaling  # scores are scaled by it
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, layer.norm_in, self._eps)
            joined = layer.qkv(normed, speakers).view(b, n, heads + 2 * kv, d)
            qk, v = joined.split([heads + kv, kv], 2)
            if layer.norms is not None:
                parts = zip(qk.split([heads, kv], 2), layer.norms, strict=True)
                qk = torch.cat([rms_norm(part, norm, self._eps) for part, norm in parts], 2)
            q, k = self._rotate(qk, cos, sin).split([heads, kv], 2)
            attended = layout.attend(index, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 1.0)
            attended = attended.reshape(b, n, heads * d)
            if layer is self._layers[-1]:
                x, attended = take_rows(early, x, attended)
            x = layer.out(attended, speakers).add_(x)
            normed = rms_norm(x, layer.norm_mid, self._eps)
            gate, up = layer.gate_up(normed, speakers).chunk(2, -1)
            x = layer.down(F.silu(gate).mul_(up), speakers).add_(x)
        if early is None:
            (x,) = take_rows(rows, x)
        return rms_norm(x, self._norm, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, D) to (B, V)."""
        logits: Tensor = self._head(hidden)
        return logits


class NativeDecoder(FusedDecoder):
    """The same, with compiled steps between matrix products. Every token is a row of its own."""

    def _rotary_table(self) -> tuple[Tensor, Tensor]:
        cosines, sines = super()._rotary_table()
        return cosines.float(), sines.float()

    def hidden(
        self, ids: Tensor, positions: Tensor, layout: CacheLayout, speakers: Speakers = (), rows: Tensor | None = None
    ) -> Tensor:
        """(B, 1) token ids and absolute positions to (B, 1, D), or (R, 1, D) of some `rows` (R,), in any order."""
        assert isinstance(layout, RowLayout | GpuRowLayout)
        kernels, cache, at = layout.kernels, layout.cache, positions[:, 0].contiguous()
        # What the layers add up stays in float32, whatever the weights are.
        x = F.embedding(ids[:, 0], self._embedding).float()
        y: Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = kernels.add_norm(x, y, layer.norm_in, self._eps)
            queries = kernels.split_heads(
                layer.qkv(normed, speakers), layer.norms, self._table, at, layout.slots, layout.own,
                cache.keys[index], cache.values[index], layer.scaling, self._eps,
            )  # fmt: skip
            if layer is self._layers[-1] and rows is not None and isinstance(layout, RowLayout) and not speakers:
                x, queries = take_rows(rows, x, queries)
                layout, rows = layout.rows(rows), None
            y = layer.out(layout.attend_queries(index, queries).flatten(1), speakers)
            normed = kernels.add_norm(x, y, layer.norm_mid, self._eps)
            y = layer.down(kernels.gate_joined(layer.gate_up(normed, speakers)), speakers)
        return take_rows(rows, kernels.add_norm(x, y, self._norm, self._eps))[0][:, None]


class GpuDecoder(NativeDecoder):
    """The same on a GPU. Its weights stay where they are: recorded steps read them by address."""

    def __init__(self, loaded: LoadedModel, products: Products, kernels: GpuKernels) -> None:
        self.kernels = kernels
        super().__init__(loaded, products)

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the weights again."""
        if not hasattr(self, "_layers"):
            super().refresh()
            return
        join = self._joining()
        for mine, current in zip(self._layers, self._layers_joined(join), strict=True):  # one is there at a time
            mine.assign(current)
        self._head.assign(join([self._loaded.head]))

    @property
    def voices(self) -> Mapping[str, int]:
        """Those of the model. Where others have come, not all of the weights are where they were."""
        return self._loaded.voices

    def _joining(self) -> _Join:
        return partial(GpuJoinedLinear, adapters=self._loaded.unmerged, products=self._products, voices=self.voices)


class WholeDecoder(NativeDecoder):
    """The same for small models: all layers in one call, every thread with rows of its own.

    Between products of small matrices, making calls and waiting for the other threads takes longer than computing. So
    it does for those with low-rank updates: where roles have adapters, each is a voice with weights of its own, in
    bfloat16 with its update beside them. And where registers for matrices make products short, it does for larger
    models as well. Otherwise these are run like this where compiled products are about as fast as oneDNN's: what comes
    between them is computed with them.
    """

    def _read_layers(self) -> list[_Layer]:
        """Those of each voice, one after the other."""
        layers: list[_Layer] = []
        # In bfloat16 merging would round most of a small update away.
        unmerged = self._loaded.unmerged if self._loaded.model.dtype == torch.bfloat16 else ()
        for voice in self._loaded.voices:
            speaker = voice or SHARED_ADAPTER
            beside = (speaker,) if speaker in unmerged else ()
            with self._loaded.speaking_as(voice):
                layers += self._layers_joined(partial(JoinedLinear, adapters=beside, products=PlainProducts()))
        return layers

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the weights again."""
        super().refresh()
        self._tensors: list[Tensor] = []  # they are read by address
        self._over: KVCache | None = None
        self._voices = self._loaded.voices
        self._places = np.array([self._place(layer) for layer in self._layers])
        head = layer_weight(self._loaded.head, merged=True)
        self.draws = head.nbytes <= _SMALL_HEAD
        """Whether it also draws tokens."""
        model = [
            self._address(self._embedding), self._places.ctypes.data, len(self._layers) // len(self._voices),
            self._address(self._norm),
            *(self._linear(head, getattr(self._loaded.head, "bias", None)) if self.draws else [0] * 6),
            *map(self._address, self._table), len(self._norm), self._heads, self._kv_heads, self._head_dim,
            not is_small(self._loaded), 0,
        ]  # fmt: skip
        self._model = SmallModel(torch.tensor(model), self._norm, self._layers[0].scaling, self._eps)
        """The capacity of the cache comes last."""
        self._layers.clear()  # what is joined there is in tiles now

    def _place(self, layer: _Layer) -> list[int]:
        """A `Layer` of `kernels/whole.cpp`, without keys and values, which come last."""
        place = [self._address(norm) for norm in (layer.norm_in, layer.norm_mid, *(layer.norms or (None, None)))]
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            place += self._linear(linear.weight, linear.bias, linear.update)
        return [*place, 0, 0]

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _linear(self, weight: Tensor, bias: Tensor | None, update: tuple[Tensor, Tensor] | None = None) -> list[int]:
        """A `Linear` of `kernels/blocks.h`."""
        outputs, inputs = weight.shape
        a = rank = 0
        if update is not None:
            down, up = update
            a, rank = self._address(weight_tiles(down)), len(down)
            weight = torch.cat([weight, up], 1)
        return [self._address(weight_tiles(weight)), self._address(bias), inputs, outputs, a, rank]

    def over(self, cache: KVCache) -> SmallModel:
        """The model, as compiled kernels run it, with the keys and values of a cache."""
        if self._over is not cache:
            self._over = cache
            self._places[:, -2] = [keys.data_ptr() for keys in cache.keys] * len(self._voices)
            self._places[:, -1] = [values.data_ptr() for values in cache.values] * len(self._voices)
            self._model.places[-1] = cache.capacity
        return self._model

    def check(self, first: int, last: int) -> None:
        """See that a model has these tokens, and all between them: they are not looked at again.

        Raises:
            IndexError: it lacks one.
        """
        if not 0 <= first <= last < len(self._embedding):
            raise IndexError(f"token ids must be in [0, {len(self._embedding)}), got {first} to {last}")

    def begin(
        self, ids: Tensor, positions: Tensor, layout: RowLayout, wanted: Tensor, speakers: Speakers
    ) -> Job[Tensor]:
        """Begin to run (B,) token ids at absolute positions: to hidden states (R, D) of wanted rows, ascending."""
        assert not isinstance(speakers, Voices)
        if len(ids):
            self.check(int(ids.min()), int(ids.max()))
        voices, counts = zip(*speakers or [("", len(ids))], strict=True)
        voice_of = torch.tensor([self._voices[voice] for voice in voices]).repeat_interleave(torch.tensor(counts))
        rows = (ids, positions, layout.slots, layout.own, layout.lengths, layout.trunk_of, voice_of)
        return layout.kernels.begin_pass(self.over(layout.cache), rows, layout.trunks, wanted)

    def hidden(
        self, ids: Tensor, positions: Tensor, layout: CacheLayout, speakers: Speakers = (), rows: Tensor | None = None
    ) -> Tensor:
        """(B, 1) token ids and absolute positions to (B, 1, D), or (R, 1, D) of some `rows` (R,), ascending."""
        assert isinstance(layout, RowLayout)
        rows = torch.arange(len(ids)) if rows is None else rows
        job = self.begin(ids[:, 0].contiguous(), positions[:, 0].contiguous(), layout, rows, speakers)
        return job.finish()[:, None]


def cache_shape(loaded: LoadedModel) -> tuple[int, int, int]:
    """Layers, key-value heads, and numbers per head."""
    config = loaded.model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, kv_heads, head_dim
