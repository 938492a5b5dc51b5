"""Where keys and values lie: in slots, each for one sequence, and in prefixes that many sequences share.

Shapes: K key-value heads, P shared-prefix tokens, d head size.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from agentscope_tuner.engine.native import TILE, NativeKernels

# Of this process alone, and not shared with what it forks; Windows has no such choice.
_OWN_PAGES = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


class KVCache:
    """Keys and values of `slots` sequences, and of prefixes (trunks) that many of them share.

    A slot's sequence is its trunk followed by its own tokens; only the latter are stored in the slot. Values are
    (slots, K, capacity, d), and so are keys; but compiled kernels read these in tiles, see `native.to_tiles`, and in
    bfloat16 both in pairs, see `native.to_pairs`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        slots: int,
        limit: int,
        like: Tensor,
        kernels: NativeKernels | None = None,
    ) -> None:
        """An empty one for a model of `shape`: layers, key-value heads, numbers per head. Tensors are as `like` is."""
        layers, self._kv_heads, self._head_dim = shape
        self.slots = slots
        self.kernels = kernels
        self.limit = limit
        """Most own tokens of a slot."""
        self.capacity = -(-limit // TILE) * TILE
        self.paired = kernels is not None and like.dtype == torch.bfloat16
        """Whether keys and values lie in pairs."""
        self.token_size = self._kv_heads * self._head_dim
        """Numbers per token, in the keys as in the values of one layer."""
        self._like = like
        # Padding reaches keys that were never written: masked, but to be finite.
        self.keys = [self._zeros(self._key_extents(self.capacity)) for _ in range(layers)]
        self.values = [self._zeros((self.capacity, self._head_dim)) for _ in range(layers)]
        self._places = torch.tensor([tensor.data_ptr() for tensor in (*self.keys, *self.values)])

    def _zeros(self, extents: tuple[int, ...]) -> Tensor:
        shape = (self.slots, self._kv_heads, *extents)
        if self._like.device.type != "cpu":
            return self._like.new_zeros(shape)
        # PyTorch would write them all. Pages of the system's are zeros, and take time and memory once they are touched:
        # small ones, or few tokens of a sequence would take as much as all that there is room for.
        memory = mmap.mmap(-1, math.prod(shape) * self._like.itemsize, **_OWN_PAGES)
        if sys.platform == "linux":
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8).view(self._like.dtype).view(shape)

    def _key_extents(self, tokens: int) -> tuple[int, ...]:
        """Of so many keys of a head: tokens and numbers, or tiles of them."""
        return (tokens, self._head_dim) if self.kernels is None else (-(-tokens // TILE), self._head_dim, TILE)

    @torch.inference_mode()  # as what wrote it
    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first own tokens of slots to others, in this order: from one, to another, so many."""
        if self.kernels is not None:
            for source, target, tokens in copies:
                self.kernels.copy_slot(self._places, self.values[0], source, target, tokens)
            return
        for sources, targets, tokens in _at_once(copies):
            # On the device once, and not anew for every tensor.
            origin, target = torch.tensor([sources, targets], device=self._like.device)
            for tensor in (*self.keys, *self.values):
                tensor[target, :, :tokens] = tensor[origin, :, :tokens]

    def take(self, slot: int, tokens: int) -> Prefix:
        """A copy of a slot's first own tokens."""
        key_rows = self._key_extents(tokens)[0]
        value_rows = tokens + tokens % 2 if self.paired else tokens
        layers = [
            (keys[slot, :, :key_rows].clone(), values[slot, :, :value_rows].clone())
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        return Prefix(layers, tokens)


def _at_once(copies: Sequence[tuple[int, int, int]]) -> Iterator[tuple[list[int], list[int], int]]:
    """Sources, targets and most tokens of copies that do not depend on one another; the others come after them."""
    sources: list[int] = []
    targets: list[int] = []
    most, touched, written = 0, set[int](), set[int]()
    for source, target, tokens in copies:
        if source in written or target in touched:
            yield sources, targets, most
            sources, targets, most, touched, written = [], [], 0, set(), set()
        touched |= {source, target}
        written.add(target)
        sources.append(source)
        targets.append(target)
        most = max(most, tokens)
    if sources:
        yield sources, targets, most


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """Keys and values of P tokens that sequences begin with, apart from the cache."""

    layers: list[tuple[Tensor, Tensor]]
    """Keys and values as the cache keeps them; values are (K, P, d), in pairs with an even P."""
    tokens: int
    """P."""


class PrefixStack:
    """S prefixes together."""

    def __init__(self, prefixes: Sequence[Prefix]) -> None:
        self.prefixes = prefixes

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each (S,)."""
        return np.array([prefix.tokens for prefix in self.prefixes])

    @cached_property
    def places(self) -> Tensor:
        """Where they are, for compiled kernels: (layers, S, 3) addresses of keys and values, and how many tokens."""
        return (
            torch.tensor(
                [
                    [(keys.data_ptr(), values.data_ptr(), prefix.tokens) for keys, values in prefix.layers]
                    for prefix in self.prefixes
                ]
            )
            .transpose(0, 1)
            .contiguous()
        )

    @cached_property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (S, K, P, d), padded to the longest."""
        layers = zip(*(prefix.layers for prefix in self.prefixes), strict=True)
        return [(_side_by_side([k for k, _ in layer]), _side_by_side([v for _, v in layer])) for layer in layers]


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """(K, P, d) each, of different P, to (S, K, P, d)."""
    if len(tensors) == 1:
        return tensors[0][None]
    padded: Tensor = nn.utils.rnn.pad_sequence([tensor.transpose(0, 1) for tensor in tensors], batch_first=True)
    return padded.transpose(1, 2).contiguous()  # or every product would make it so
