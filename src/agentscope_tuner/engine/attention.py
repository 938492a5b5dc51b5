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
from agentscope_tuner.engine.slots import count_up
from agentscope_tuner.errors import ModelError

if TYPE_CHECKING:
    from agentscope_tuner.engine.gpu_kernels import GpuKernels

ATTENTION_NAME = "agentscope_tuner"

CHUNK = 128
"""Most queries of one sequence whose scores are computed at once: more do not fit into a processor's cache."""
_BY_ROW = 2**17
"""From so many bytes of keys per sequence on, copying keys (or values) of a batch together costs more than going row by
row (measured on two cores: of 64 numbers a token, 512 tokens in float32 and 1,024 in bfloat16)."""
MOST_SCORES = 2**26
"""Most scores that are computed at once, for several new tokens of a sequence."""
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

    def rows(self, rows: slice | Tensor) -> RowLayout:
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
        keys = stack.prefixes[0].layers[0][0]
        self._device, self._kv_heads = keys.device, keys.shape[0]
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
        self.unseen = np.arange(stack.lengths.max()) >= stack.lengths[number, None]
        """(B, P)"""

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=self._device)

    def write_scores(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Map scaled q (B K, X, d) to scores (B K, X, P), those of padding included."""
        keys = self._stack.layers[layer][0]
        out, cells = self._cells(torch.bmm(self._spread(q), keys.flatten(0, 1).transpose(1, 2)), out)
        out.copy_(cells)

    def add_sums(self, layer: int, weights: Tensor, out: Tensor) -> None:
        """Add values weighted by (B K, X, P) to out (B K, X, d)."""
        values = self._stack.layers[layer][1]
        out, cells = self._cells(torch.bmm(self._spread(weights), values.flatten(0, 1)), out)
        out.add_(cells)

    def _spread(self, x: Tensor) -> Tensor:
        """(B K, X, Y) to (S K, R X, Y)."""
        x = x.unflatten(0, (-1, self._kv_heads))
        if self._spread_by is not None:
            x = x[self._spread_by]
        x = x.unflatten(0, (-1, self._most)).transpose(1, 2)
        return x.reshape(-1, self._most * x.shape[3], x.shape[4])

    def _cells(self, product: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Both out (B K, X, Y) and what it gets of a product (S K, R X, Y), in one shape."""
        kv = self._kv_heads
        cells = product.view(-1, kv, self._most, out.shape[1], out.shape[2]).transpose(1, 2)  # (S, R, K, X, Y)
        if self._gather_by is None:
            return out.unflatten(0, cells.shape[:3]), cells
        return out.unflatten(0, (-1, kv)), cells.flatten(0, 1)[self._gather_by]


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
        self.slots = np.asarray(slots)
        self.stack = stack
        self.of_row = of_row
        between = slots[-1] - slots[0] + 1
        # A view of slots that lie close together is read as it is, and the results of those that are no rows are
        # dropped; others have to be gathered.
        self.is_view = between <= MOST_PADDING * len(slots)
        self.read: slice | Tensor = slice(slots[0], slots[-1] + 1)
        if not self.is_view:
            self.read = torch.tensor(slots, device=cache.keys[0].device)
        self.slots_read = between if self.is_view else len(slots)
        self.place = self.slots - slots[0] if self.is_view else np.arange(len(slots))
        """(B,) of each row among the slots that are read."""

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def shared(self) -> SharedPrefixes | None:
        """The prefixes of all slots that are read."""
        if self.stack is None:
            return None
        numbers = np.full(self.slots_read, -1)
        numbers[self.place] = self.of_row
        return SharedPrefixes(self.stack, numbers)


class SlotGroup:
    """Rows that are attended together, and the new tokens of each: one row's after the other's, N of them."""

    def __init__(self, rows: SlotRows, starts: np.ndarray, counts: np.ndarray, heads: int, cache: KVCache) -> None:
        """Prepare masks.

        Args:
            rows: B of them.
            starts: (B,) each row's place for its first new token, in its slot.
            counts: (B,) how many new tokens each row has.
            heads: of queries.
            cache: holds the sequences.
        """
        device = cache.keys[0].device
        self.rows = rows
        self.starts = starts
        self.counts = counts
        within = count_up(counts)
        self.slots, self.own = np.repeat(rows.slots, counts), np.repeat(starts, counts) + within
        """(N,) The slot of each token, and its place there."""
        self.new = new = int(counts.max())
        """Tokens that each row is padded to, where they are attended together."""
        self.tokens = len(within)
        self.keys = int((starts + counts).max())
        longest = self.keys if rows.stack is None else self.keys + int(rows.stack.lengths.max())
        size = self.keys * cache.token_size * cache.keys[0].itemsize
        by_row = device.type == "cpu" and (not rows.is_view or new > 1) and size > _BY_ROW
        self.by_row = by_row or (new > 1 and heads * rows.slots_read * new * longest > MOST_SCORES)
        if self.by_row:
            return
        last = np.zeros((rows.slots_read, new, 1), np.int64)
        last[rows.place] = starts[:, None, None]
        last += np.arange(new)[:, None]
        unseen = np.arange(self.keys) > last
        if rows.shared is not None:
            prefix = np.broadcast_to(rows.shared.unseen[:, None], (rows.slots_read, new, rows.shared.unseen.shape[1]))
            unseen = np.concatenate([prefix, unseen], 2)
        self.mask = torch.from_numpy(np.where(unseen, np.float32(MASKED), np.float32(0.0)))[:, None].to(device)
        """(B, 1, N, P + T)"""
        self.cells: Tensor | None = None
        """(N,) of each token, among those of all slots that are read, where these are more."""
        if self.tokens < rows.slots_read * new:
            self.cells = torch.from_numpy(np.repeat(rows.place * new, counts) + within).to(device)


class SlotLayout:
    """New tokens of several sequences, a row for each, against their cached past; writes them into the cache."""

    def __init__(self, cache: KVCache, groups: Sequence[SlotGroup]) -> None:
        """Rows are the groups' tokens, one group after the other."""
        self.cache = cache
        self.groups = groups
        parts = [group.slots for group in groups], [group.own for group in groups]
        device = cache.keys[0].device
        self._slots, self._own = (torch.from_numpy(np.concatenate(part)).to(device) for part in parts)

    def rows(self, rows: slice) -> SlotLayout:
        """Some of the rows, which are those of whole groups."""
        ends = [*itertools.accumulate(group.tokens for group in self.groups)]
        groups = [group for group, end in zip(self.groups, ends, strict=True) if rows.start < end <= rows.stop]
        return SlotLayout(self.cache, groups)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Write keys and values (N, K, 1, d) into the cache, and attend: q (N, H, 1, d) to outputs (N, 1, H, d)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self._slots, :, self._own] = k[:, :, 0]
        values[self._slots, :, self._own] = v[:, :, 0]
        if scaling != 1.0:
            q = q * scaling
        outs, first = [], 0
        for group in self.groups:
            attend = self._attend_rows if group.by_row else self._attend_group
            outs.append(attend(layer, group, q[first : first + group.tokens, :, 0]))
            first += group.tokens
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[:, None]

    def _attend_group(self, layer: int, group: SlotGroup, q: Tensor) -> Tensor:
        """Map q (N, H, d) to outputs (N, H, d), for all rows at once."""
        rows, new, heads, d = group.rows, group.new, *q.shape[1:]
        cached = (self.cache.keys[layer], self.cache.values[layer])
        keys, values = (tensor[rows.read, :, : group.keys].flatten(0, 1) for tensor in cached)  # (B K, T, d)
        if group.cells is not None:
            q = q.new_zeros(rows.slots_read * new, heads, d).index_copy_(0, group.cells, q)
        if new > 1:
            q = q.view(rows.slots_read, new, heads, d).transpose(1, 2)
        q = q.reshape(len(keys), -1, d)  # (B K, G N, d)
        # A mask is added to float32 at five times the speed, and softmax computed at twice.
        scores = torch.empty(*q.shape[:2], group.mask.shape[-1], device=q.device)
        widths = [scores.shape[-1] - group.keys, group.keys]
        of_prefix, own = scores.split(widths, -1)
        # In bfloat16 oneDNN takes longer to multiply by what is not in one piece than to copy it.
        if keys.dtype == torch.bfloat16:
            keys = keys.contiguous()
        own.copy_(torch.bmm(q, keys.transpose(1, 2)))
        if (shared := rows.shared) is not None:
            shared.write_scores(layer, q, of_prefix)
        scores.view(rows.slots_read, heads, new, -1).add_(group.mask)
        of_prefix, own = softmax(scores, values).split(widths, -1)
        out = torch.bmm(own if shared is None else own.contiguous(), values)
        if shared is not None:
            shared.add_sums(layer, of_prefix, out)
        if new > 1:
            out = out.view(rows.slots_read, heads, new, d).transpose(1, 2)
        out = out.reshape(-1, heads, d)
        return out if group.cells is None else out.index_select(0, group.cells)

    def _attend_rows(self, layer: int, group: SlotGroup, q: Tensor) -> Tensor:
        """The same for long sequences: one after the other, reading keys and values where they are."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q = q.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)  # (K, G, N, d)
        stack, of_row = group.rows.stack, group.rows.of_row
        outs: list[Tensor] = []
        spans = zip(group.rows.slots.tolist(), group.starts.tolist(), group.counts.tolist(), strict=True)
        done = 0
        for row, (slot, start, count) in enumerate(spans):
            for first in range(0, count, CHUNK):
                n = min(CHUNK, count - first)
                own = start + first + n
                pieces = [(keys[slot, :, :own], values[slot, :, :own])]
                if stack is not None:
                    pieces.insert(0, stack.prefixes[of_row[row]].layers[layer])
                chunk = q[:, :, done : done + n]
                scores = [chunk.flatten(1, 2) @ k.transpose(1, 2) for k, _ in pieces]
                if n > 1:
                    scores[-1].unflatten(1, (-1, n))[..., -n:] += causal_mask(n, q)
                weights = softmax(torch.cat(scores, -1) if len(scores) > 1 else scores[0], q)
                seen = weights.split([k.shape[1] for k, _ in pieces], -1)
                sums = [w @ v for w, (_, v) in zip(seen, pieces, strict=True)]
                outs.append((sums[0] if len(sums) == 1 else sums[0] + sums[1]).unflatten(1, (-1, n)))
                done += n
        return torch.cat(outs, 2).permute(2, 0, 1, 3).flatten(1, 2)
