"""Attention over the layouts this engine works with, plugged into transformers' own modules.

A *layout* says which keys each query sees. The sampler's (`SlotLayout`, and where there are compiled kernels
`RowLayout`, or `GpuRowLayout`) read and extend a key-value cache; the learner's (`tree_attention.TreeLayout`, on a GPU
`flex_layout.FlexLayout`) attend along the branches of a prefix tree. All fold the query heads that share a key-value
head into the rows, so keys and values are never repeated.

Shapes: B batch, H query heads, K key-value heads, G = H // K, N new tokens, T cached tokens, P shared-prefix tokens,
d head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from agentscope_tuner.engine.kv_cache import KVCache, PrefixStack
from agentscope_tuner.engine.native import TILE
from agentscope_tuner.errors import ModelError

if TYPE_CHECKING:
    from agentscope_tuner.engine.gpu_kernels import GpuKernels

ATTENTION_NAME = "agentscope_tuner"

CHUNK = 128
"""Most queries of one sequence whose scores are computed at once: more do not fit into a processor's cache."""
_BY_ROW = 16384
"""From so many numbers per sequence on, copying keys (or values) of a batch together costs more than going row by row
(measured on two cores: 250 tokens of 64 numbers)."""
MOST_PADDING = 2
"""Where rows are attended together, they are padded to at most this many times themselves."""
MASKED = -1e30
"""Added to masked scores. Finite, so that a row with nothing to see stays finite too."""


class Layout(Protocol):
    """Which keys each query sees."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Map q (B, H, N, d) and new k, v (B, K, N, d) to outputs (B, N, H, d)."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call.

    Raises:
        ModelError: the module asks for something the layouts do not do.
    """
    for option in ("sliding_window", "softcap", "s_aux"):
        if options.get(option) is not None:
            raise ModelError(f"its attention uses `{option}`")
    return layout.attend(module.layer_idx, query, key, value, scaling or query.shape[-1] ** -0.5), None  # type: ignore[arg-type]


def softmax(scores: Tensor, like: Tensor) -> Tensor:
    """Over the last dimension, in the type of `like`.

    PyTorch's own computes in float32, whatever it reads, but takes twice as long where it writes bfloat16.
    """
    return torch.softmax(scores, -1, dtype=torch.float32).to(like.dtype)


def mask_of(unseen: Tensor) -> Tensor:
    """What is added to scores in float32, to hide what is not seen."""
    return torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, MASKED)


def causal_mask(n: int, like: Tensor) -> Tensor:
    """(n, n), added to the scores of n tokens against each other."""
    return torch.full((n, n), MASKED, dtype=like.dtype, device=like.device).triu_(1)


class CausalLayout:
    """Plain causal attention over one block of tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Every token sees itself and what came before."""
        b, h, n, d = q.shape
        kv = k.shape[1]
        rows = (q * scaling).reshape(b, kv, h // kv * n, d)
        scores = (rows @ k.transpose(2, 3)).view(b, kv, h // kv, n, n)
        scores = scores + causal_mask(n, scores)
        p = softmax(scores, v).view(b, kv, h // kv * n, n)
        return (p @ v).view(b, h, n, d).transpose(1, 2)


class RowLayout:
    """New tokens, a row for each, against the cached past of their sequences. Needs compiled kernels."""

    def __init__(
        self, cache: KVCache, own: Tensor, slots: Tensor, trunk_of: Tensor, stack: PrefixStack | None = None
    ) -> None:
        """Say where the rows' tokens are.

        Args:
            cache: holds the sequences.
            own: (B,) the place of each row's token in its slot.
            slots: (B,) of each row; rows of one slot are neighbours.
            trunk_of: (B,) which of the stack's prefixes each row's sequence begins with, or -1.
            stack: what sequences begin with.
        """
        assert cache.kernels is not None
        self.cache = cache
        self.kernels = cache.kernels
        self.slots = slots
        self.own = own
        self.lengths = own + 1
        self.trunk_of = trunk_of
        self._stack = stack  # it is read by address
        self.trunks = stack.places if stack is not None else torch.empty(len(cache.keys), 0, 3, dtype=torch.int64)

    def rows(self, rows: slice) -> RowLayout:
        """Some of the rows."""
        return RowLayout(self.cache, self.own[rows], self.slots[rows], self.trunk_of[rows], self._stack)

    def attend_queries(self, layer: int, q: Tensor) -> Tensor:
        """Map scaled q (B, H, d), float32, to outputs (B, H, d) in the cache's type; keys and values are there."""
        cache = self.cache
        return self.kernels.attend(
            q, cache.keys[layer], cache.values[layer], self.slots, self.lengths, self.trunks[layer], self.trunk_of
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Write keys and values (B, K, 1, d) into the cache, and attend: q (B, H, 1, d) to outputs (B, 1, H, d)."""
        keys, values, slots, own = self.cache.keys[layer], self.cache.values[layer], self.slots, self.own
        if self.cache.paired:
            pairs = k[:, :, 0].unflatten(-1, (-1, 2))
            keys.view(*keys.shape[:3], -1, TILE, 2)[slots, :, own // TILE, :, own % TILE] = pairs
            values.view(*values.shape[:2], -1, values.shape[3], 2)[slots, :, own // 2, :, own % 2] = v[:, :, 0]
        else:
            keys[slots, :, own // TILE, :, own % TILE] = k[:, :, 0]
            values[slots, :, own] = v[:, :, 0]
        return self.attend_queries(layer, (q[:, :, 0].float() * scaling).contiguous())[:, None]


class GpuRowLayout:
    """As `RowLayout`, on a GPU. Whatever sequences begin with is in their slots."""

    def __init__(
        self, cache: KVCache, kernels: GpuKernels, own: Tensor, slots: Tensor, tiles: Tensor | None = None
    ) -> None:
        """Say where the rows' tokens are.

        Args:
            cache: holds the sequences.
            kernels: compiled ones.
            own: (B,) the place of each row's token in its slot.
            slots: (B,) of each row.
            tiles: which rows are attended for at once, see `GpuKernels.attend`.
        """
        self.cache = cache
        self.kernels = kernels
        self.own = own
        self.slots = slots
        self._tiles = tiles

    def attend_queries(self, layer: int, q: Tensor) -> Tensor:
        """Map scaled q (B, H, d) to outputs (B, H, d); keys and values are there."""
        cache = self.cache
        return self.kernels.attend(q, cache.keys[layer], cache.values[layer], self.slots, self.own, self._tiles)


class SharedPrefixes:
    """The prefixes that rows of a batch begin with: all are attended in one product, each with R rows."""

    def __init__(self, stack: PrefixStack, number: np.ndarray) -> None:
        """Say which prefix of the stack each row begins with; what a row of -1 gets is not read."""
        self._stack = stack
        self._device = stack.prefixes[0].layers[0][0].device
        grouped = np.argsort(number, kind="stable")[np.count_nonzero(number < 0) :]
        ordered = number[grouped]
        self._most = most = int(np.bincount(ordered).max())
        cells = ordered * most + np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
        spread_by = np.zeros(len(stack.lengths) * most, np.int64)
        spread_by[cells] = grouped
        gather_by = np.zeros_like(number)
        gather_by[grouped] = cells
        in_place = np.array_equal(spread_by, np.arange(len(number)))
        self._spread_by = None if in_place else self._tensor(spread_by)
        """(S R) the row in each cell of the product."""
        self._gather_by = None if in_place else self._tensor(gather_by)
        """(B,) the cell of each row."""
        self.mask = mask_of(self._tensor(np.arange(stack.lengths.max()) >= stack.lengths[number, None]))
        """(B, P)"""

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=self._device)

    def scores(self, layer: int, q: Tensor) -> Tensor:
        """Map scaled q (B, K, X, d) to scores (B, K, X, P), those of padding included."""
        return self._gather(self._spread(q) @ self._stack.layers[layer][0].transpose(2, 3))

    def sums(self, layer: int, weights: Tensor) -> Tensor:
        """Values weighted by (B, K, X, P): (B, K, X, d)."""
        return self._gather(self._spread(weights) @ self._stack.layers[layer][1])

    def _spread(self, x: Tensor) -> Tensor:
        """(B, K, X, Y) to (S, K, R X, Y)."""
        if self._spread_by is not None:
            x = x[self._spread_by]
        return x.view(-1, self._most, *x.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _gather(self, x: Tensor) -> Tensor:
        """(S, K, R X, Y) to (B, K, X, Y)."""
        x = x.view(*x.shape[:2], self._most, -1, x.shape[3]).transpose(1, 2).flatten(0, 1)
        return x if self._gather_by is None else x[self._gather_by]


class SlotRows:
    """Rows of a batch that are attended together, in the order of their slots: what stays while the same ones go on."""

    def __init__(
        self, slots: Sequence[int], cache: KVCache, stack: PrefixStack | None = None, of_row: Sequence[int] = ()
    ) -> None:
        """Prepare indices.

        Args:
            slots: of each row, ascending.
            cache: holds the sequences.
            stack: what the rows' sequences begin with, or None: nothing that is not in their slots.
            of_row: which of the prefixes of the stack each row's sequence begins with; unused without a stack.
        """
        self.slots = slots
        self.stack = stack
        self.of_row = of_row
        self.index = torch.tensor(slots, device=cache.keys[0].device)
        between = slots[-1] - slots[0] + 1
        # A view of slots that lie close together is read as it is, and the results of those that are no rows are
        # dropped; others have to be gathered.
        self.is_view = between <= MOST_PADDING * len(slots)
        self.read: slice | Tensor = slice(slots[0], slots[-1] + 1) if self.is_view else self.index
        self.slots_read = between if self.is_view else len(slots)
        self.place: Tensor | None = None
        """(B,) of each row among the slots that are read, where these are more."""
        if self.slots_read > len(slots):
            self.place = self.index - slots[0]

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def shared(self) -> SharedPrefixes | None:
        """The prefixes of all slots that are read."""
        if self.stack is None:
            return None
        numbers = np.full(self.slots_read, -1)
        numbers[slice(None) if self.place is None else self.place.numpy(force=True)] = self.of_row
        return SharedPrefixes(self.stack, numbers)


class SlotGroup:
    """Rows that are attended together, and the new tokens of each."""

    def __init__(self, rows: SlotRows, starts: np.ndarray, counts: np.ndarray, new: int, cache: KVCache) -> None:
        """Prepare masks.

        Args:
            rows: B of them.
            starts: (B,) each row's place for its first new token, in its slot.
            counts: (B,) how many new tokens each row has; it is padded to `new`.
            new: tokens per row.
            cache: holds the sequences.
        """
        device, capacity = cache.keys[0].device, cache.capacity
        self.rows = rows
        self.starts = starts
        self.counts = counts
        # (B, N); padding at the end of the context would run out of the slot. What it overwrites there is not read:
        # a row that is padded has fewer tokens than that.
        self.own = (torch.from_numpy(starts).to(device)[:, None] + torch.arange(new, device=device)).clamp_(
            max=capacity - 1
        )
        self.keys = min(int(starts.max()) + new, capacity)
        self.by_row = device.type == "cpu" and (not rows.is_view or new > 1) and cache.token_size * self.keys > _BY_ROW
        if self.by_row:
            return
        last = self.own
        if rows.place is not None:
            last = last.new_zeros(rows.slots_read, new)
            last[rows.place] = self.own
        mask = mask_of(torch.arange(self.keys, device=device) > last[:, :, None])
        if rows.shared is not None:
            mask = torch.cat([rows.shared.mask[:, None].expand(-1, new, -1), mask], -1)
        self.mask = mask[:, None, None]


class SlotLayout:
    """New tokens of several sequences against their cached past; writes them into the cache."""

    def __init__(self, cache: KVCache, groups: list[SlotGroup]) -> None:
        self.cache = cache
        self.groups = groups

    def rows(self, rows: slice) -> SlotLayout:
        """Some of the rows, which are those of whole groups."""
        ends = [*itertools.accumulate(len(group.rows) for group in self.groups)]
        groups = [group for group, end in zip(self.groups, ends, strict=True) if rows.start < end <= rows.stop]
        return SlotLayout(self.cache, groups)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Rows of the batch are the groups' rows, one group after the other."""
        q = q * scaling
        outs, first = [], 0
        for group in self.groups:
            rows = slice(first, first + len(group.rows))
            outs.append(self._attend_group(layer, group, q[rows], k[rows], v[rows]))
            first = rows.stop
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_group(self, layer: int, group: SlotGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, h, n, d = q.shape
        kv = k.shape[1]
        g = h // kv
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        rows = group.rows
        where = (rows.index[:, None], slice(None), group.own)
        keys[where] = k.transpose(1, 2)
        values[where] = v.transpose(1, 2)
        if group.by_row:
            return self._attend_rows(layer, group, q)
        own_keys, own_values = keys[rows.read, :, : group.keys], values[rows.read, :, : group.keys]  # (B, K, T, d)
        if rows.place is not None:
            q = q.new_zeros(len(own_keys), h, n, d).index_copy_(0, rows.place, q)
        q = q.reshape(-1, kv, g * n, d)
        # A mask is added to float32 at five times the speed, and softmax computed at twice.
        scores = torch.empty(*q.shape[:3], group.mask.shape[-1], device=q.device)
        widths = [scores.shape[-1] - group.keys, group.keys]
        of_prefix, own = scores.split(widths, -1)
        # oneDNN is slow where few rows come first, as those of one query do.
        own[:] = q @ own_keys.transpose(2, 3) if n > 1 else (own_keys @ q.transpose(2, 3)).transpose(2, 3)
        if (shared := rows.shared) is not None:
            of_prefix[:] = shared.scores(layer, q)
        scores.unflatten(2, (g, n)).add_(group.mask)
        weights = softmax(scores, v)
        if shared is None:
            out = weights @ own_values
        else:
            of_prefix, own = weights.split(widths, -1)
            out = shared.sums(layer, of_prefix) + own.contiguous() @ own_values
        out = out.reshape(-1, h, n, d).transpose(1, 2)
        return out if rows.place is None else out[rows.place]

    def _attend_rows(self, layer: int, group: SlotGroup, q: Tensor) -> Tensor:
        """The same for long sequences: one after the other, reading keys and values where they are."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        kv = keys.shape[1]
        q = q.unflatten(1, (kv, -1))  # (B, K, G, N, d)
        out = torch.zeros_like(q)
        stack, of_row = group.rows.stack, group.rows.of_row
        spans = zip(group.rows.slots, group.starts.tolist(), group.counts.tolist(), strict=True)
        for row, (slot, start, count) in enumerate(spans):
            for first in range(0, count, CHUNK):
                n = min(CHUNK, count - first)
                own = start + first + n
                pieces = [(keys[slot, :, :own], values[slot, :, :own])]
                if stack is not None:
                    pieces.insert(0, stack.prefixes[of_row[row]].layers[layer])
                chunk = q[row, :, :, first : first + n]
                scores = [chunk.flatten(1, 2) @ k.transpose(1, 2) for k, _ in pieces]
                if n > 1:
                    scores[-1].unflatten(1, (-1, n))[..., -n:] += causal_mask(n, q)
                weights = softmax(torch.cat(scores, -1) if len(scores) > 1 else scores[0], q)
                seen = weights.split([k.shape[1] for k, _ in pieces], -1)
                out[row, :, :, first : first + n] = sum(
                    (w @ v for w, (_, v) in zip(seen, pieces, strict=True)), torch.zeros(())
                ).unflatten(1, (-1, n))
        return out.flatten(1, 2).transpose(1, 2)
