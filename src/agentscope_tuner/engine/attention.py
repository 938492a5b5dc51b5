"""Attention over the two layouts this engine works with, plugged into transformers' own modules.

A *layout* says which keys each query sees. The sampler's (`SlotLayout`) reads and extends a key-value cache; the
learner's (`TreeLayout`) attends along the branches of a prefix tree. Both are explicit batched matrix products, with
the query heads that share a key-value head folded into the rows, so keys and values are never repeated.

Shapes: B batch, H query heads, K key-value heads, G = H // K, N new tokens, T cached tokens, P shared-prefix tokens,
d head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from agentscope_tuner.algorithms.packing import PackedTree
from agentscope_tuner.errors import ModelError

ATTENTION_NAME = "agentscope_tuner"

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


def _softmax(scores: Tensor, like: Tensor) -> Tensor:
    return torch.softmax(scores, -1, dtype=torch.float32).to(like.dtype)


class CausalLayout:
    """Plain causal attention over one block of tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Every token sees itself and what came before."""
        b, h, n, d = q.shape
        kv = k.shape[1]
        rows = (q * scaling).reshape(b, kv, h // kv * n, d)
        scores = (rows @ k.transpose(2, 3)).view(b, kv, h // kv, n, n)
        scores = scores + torch.full((n, n), MASKED, dtype=scores.dtype, device=q.device).triu_(1)
        p = _softmax(scores, v).view(b, kv, h // kv * n, n)
        return (p @ v).view(b, h, n, d).transpose(1, 2)


class KVCache:
    """Keys and values of `slots` sequences, and of prefixes (trunks) that many of them share.

    A slot's sequence is its trunk followed by its own tokens; only the latter are stored in the slot.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, slots: int, limit: int, like: Tensor) -> None:
        self.slots = slots
        self.limit = limit
        """Most own tokens a slot may ever hold."""
        self.capacity = 0
        self._shape = (kv_heads, head_dim)
        self._like = like
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for _ in range(layers):
            self.keys.append(self._empty(0))
            self.values.append(self._empty(0))

    def _empty(self, capacity: int) -> Tensor:
        kv_heads, head_dim = self._shape
        # Padding reaches keys that were never written; they are masked, but must be finite.
        return torch.zeros(self.slots, kv_heads, capacity, head_dim, dtype=self._like.dtype, device=self._like.device)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` own tokens in every slot."""
        if tokens <= self.capacity:
            return
        capacity = min(self.limit, max(tokens + 63 & ~63, self.capacity * 3 // 2))
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                store[layer] = self._empty(capacity)
                store[layer][:, :, : self.capacity] = old
        self.capacity = capacity

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first own tokens of one slot to another."""
        for store in (self.keys, self.values):
            for tensor in store:
                tensor[target, :, :tokens] = tensor[source, :, :tokens]

    def take(self, slot: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of a slot's first own tokens, per layer (K, P, d)."""
        return [
            (keys[slot, :, :tokens].clone(), values[slot, :, :tokens].clone())
            for keys, values in zip(self.keys, self.values, strict=True)
        ]


class SlotGroup:
    """Rows of a batch whose slots share a trunk."""

    def __init__(
        self,
        trunk: list[tuple[Tensor, Tensor]] | None,
        slots: list[int],
        starts: list[int],
        new: int,
        device: torch.device,
        capacity: int,
    ) -> None:
        """Prepare indices and mask for `new` tokens per row, from own position `starts` on."""
        self.trunk = trunk
        self.rows = len(slots)
        # Neighbouring slots are read as a view; others have to be gathered.
        self.contiguous = (
            slice(slots[0], slots[0] + len(slots)) if slots == list(range(slots[0], slots[0] + len(slots))) else None
        )
        self.slots = torch.tensor(slots, device=device)
        # (B, N); padding at the end of the context would run out of the slot. What it overwrites there is not read:
        # a row that is padded has fewer tokens than that.
        self.own = (torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)).clamp_(
            max=capacity - 1
        )
        self.keys = min(max(starts) + new, capacity)
        visible = torch.arange(self.keys, device=device) <= self.own[:, :, None]
        self.mask = torch.zeros(visible.shape, device=device).masked_fill_(~visible, MASKED)[:, None, None]


class SlotLayout:
    """New tokens of several sequences against their cached past; writes them into the cache."""

    def __init__(self, cache: KVCache, groups: list[SlotGroup]) -> None:
        self.cache = cache
        self.groups = groups

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Rows of the batch are the groups' rows, one group after the other."""
        q = q * scaling
        outs, first = [], 0
        for group in self.groups:
            rows = slice(first, first + group.rows)
            outs.append(self._attend_group(layer, group, q[rows], k[rows], v[rows]))
            first += group.rows
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_group(self, layer: int, group: SlotGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, n, d = q.shape
        kv = k.shape[1]
        g = h // kv
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        where = (group.slots[:, None], slice(None), group.own)
        keys[where] = k.transpose(1, 2)
        values[where] = v.transpose(1, 2)
        own = group.contiguous if group.contiguous is not None else group.slots
        own_keys, own_values = keys[own, :, : group.keys], values[own, :, : group.keys]  # (B, K, T, d)
        q = q.reshape(b, kv, g * n, d)
        scores = (q @ own_keys.transpose(2, 3)).view(b, kv, g, n, -1) + group.mask
        scores = scores.view(b, kv, g * n, -1)
        if group.trunk is None:
            out = _softmax(scores, v) @ own_values
        else:
            trunk_keys, trunk_values = group.trunk[layer]  # (K, P, d)
            p = trunk_keys.shape[1]
            folded = q.transpose(0, 1).reshape(kv, b * g * n, d)
            trunk_scores = (folded @ trunk_keys.transpose(1, 2)).view(kv, b, g * n, p).transpose(0, 1)
            weights = _softmax(torch.cat([trunk_scores, scores], -1), v)
            from_trunk = weights[..., :p].transpose(0, 1).reshape(kv, b * g * n, p) @ trunk_values
            out = from_trunk.view(kv, b, g * n, d).transpose(0, 1) + weights[..., p:] @ own_values
        return out.reshape(b, h, n, d).transpose(1, 2)


class TreeLayout:
    """Every token of a prefix tree sees its ancestors; one packed row holds the whole tree.

    Siblings are padded to one length and attended together: to the tokens they share once, to their own with a causal
    mask.
    """

    def __init__(self, tree: PackedTree, device: torch.device) -> None:
        self._families: list[tuple[int, Tensor, Tensor, Tensor]] = []
        source = torch.empty(len(tree.ids), dtype=torch.long)
        offset = 0
        for family in tree.families:
            n, longest = len(family.spans), max(end - start for start, end in family.spans)
            spans = torch.tensor(family.spans)
            index = spans[:, :1] + torch.arange(longest)
            real = index < spans[:, 1:]
            source[index[real]] = offset + real.flatten().nonzero()[:, 0]
            offset += n * longest
            index = torch.where(real, index, spans[:, :1])  # padding repeats a real token; its output is dropped
            causal = torch.full((longest, longest), MASKED).triu_(1)
            path = torch.tensor(family.path, dtype=torch.long)
            self._families.append((n, index.flatten().to(device), path.to(device), causal.to(device)))
        self._source = source.to(device)
        """Where each packed token's output lies among the padded ones."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The batch has one row: the packed tree."""
        _, h, _, d = q.shape
        kv = k.shape[1]
        g = h // kv
        # Tokens first: gathering rows, and scattering their gradients back, is then one contiguous copy each.
        q, k, v = ((x[0].transpose(0, 1).flatten(1)) for x in (q * scaling, k, v))
        outs = []
        for n, index, path, causal in self._families:
            own_q = q.index_select(0, index).view(n, -1, kv, g, d).permute(2, 0, 3, 1, 4)  # (K, n, G, C, d)
            own_k = k.index_select(0, index).view(n, -1, kv, d).permute(2, 0, 1, 3)  # (K, n, C, d)
            own_v = v.index_select(0, index).view(n, -1, kv, d).permute(2, 0, 1, 3)
            c, p = own_k.shape[2], len(path)
            folded = own_q.reshape(kv, n, g * c, d)
            scores = (folded @ own_k.transpose(2, 3)).view(kv, n, g, c, c) + causal
            scores = scores.view(kv, n, g * c, c)
            if p:
                path_k = k.index_select(0, path).view(p, kv, d).permute(1, 2, 0)  # (K, d, P)
                path_v = v.index_select(0, path).view(p, kv, d).transpose(0, 1)  # (K, P, d)
                path_scores = (folded.reshape(kv, n * g * c, d) @ path_k).view(kv, n, g * c, p)
                weights = _softmax(torch.cat([path_scores, scores], -1), v)
                from_path = weights[..., :p].reshape(kv, n * g * c, p) @ path_v
                out = from_path.view(kv, n, g * c, d) + weights[..., p:] @ own_v
            else:
                out = _softmax(scores, v) @ own_v
            outs.append(out.view(kv, n, g, c, d).permute(1, 3, 0, 2, 4).reshape(n * c, h * d))
        return torch.cat(outs).index_select(0, self._source).view(1, -1, h, d)
