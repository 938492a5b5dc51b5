"""Linear layers that read the same input, as one, with the low-rank updates of whoever speaks in each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentscope_tuner.engine.models import SHARED_ADAPTER, layer_weight, low_rank_update
from agentscope_tuner.engine.products import Products


class Voices:
    """Who speaks in each row, for a GPU: it does the same whoever that is."""

    def __init__(self, of_row: Tensor) -> None:
        """Numbers (B,) of `LoadedModel.voices`."""
        self._of_row = of_row
        self._others: dict[tuple[tuple[str, int], ...], Tensor] = {}

    def others(self, ranks: tuple[tuple[str, int], ...], voice_of: Tensor) -> Tensor:
        """Whether columns are not of the row's own voice (B, R).

        Args:
            ranks: how many columns each adapter has; found again by that, as layers are alike.
            voice_of: (R,) the number of each column's voice.
        """
        if ranks not in self._others:
            self._others[ranks] = self._of_row[:, None] != voice_of
        return self._others[ranks]


Speakers = Sequence[tuple[str, int]] | Voices
"""The adapter of each of the layout's groups of rows, and how many rows it has; for a GPU, `Voices`. Empty: no role has
an adapter of its own."""


class JoinedLinear:
    """Linear layers as one: what they return lies side by side."""

    def __init__(self, layers: Sequence[Any], adapters: Sequence[str], products: Products) -> None:
        """Join layers that read the same input."""
        weights = [layer_weight(layer, merged=not adapters) for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        given = [layer.bias.detach() for layer in layers if getattr(layer, "bias", None) is not None]
        self.bias = torch.cat(given) if given else None
        self._products = products
        updates = {name: update for name in adapters if (update := _join_updates(layers, name)) is not None}
        self._ranks = tuple((name, len(down)) for name, (down, _) in updates.items())
        self._updates = {
            name: (len(down), products.pack(down), products.pack(up)) for name, (down, up) in updates.items()
        }
        self._outputs = len(weight)
        self.weight = products.pack(weight)

    @property
    def update(self) -> tuple[Tensor, Tensor] | None:
        """That of its only adapter, if it has one: down and up, as they are packed."""
        if not self._updates:
            return None
        ((_, down, up),) = self._updates.values()
        return down, up

    def __call__(self, x: Tensor, speakers: Speakers = ()) -> Tensor:
        """(..., in) to (..., out), by the first dimension's speakers."""
        out = self._products.linear(x, self.weight, self.bias, self._outputs)
        if self._ranks:
            self._update(out, x, speakers)
        return out

    def _update(self, out: Tensor, x: Tensor, speakers: Speakers) -> None:
        assert not isinstance(speakers, Voices)
        row = 0
        for adapter, rows in speakers or [(SHARED_ADAPTER, len(x))]:
            if adapter in self._updates:
                rank, down, up = self._updates[adapter]
                part = self._products.linear(x[row : row + rows], down, None, rank)
                out[row : row + rows] += self._products.linear(part, up, None, self._outputs)
            row += rows


class GpuJoinedLinear(JoinedLinear):
    """The same on a GPU: the updates of all adapters at once, of which each row takes its own.

    So a step can be recorded whoever speaks in it, and has few kernels.
    """

    def __init__(
        self, layers: Sequence[Any], adapters: Sequence[str], products: Products, voices: Mapping[str, int]
    ) -> None:
        """Join layers that read the same input; voices have numbers."""
        super().__init__(layers, adapters, products)
        self._tensors = [tensor for tensor in (self.weight, self.bias) if tensor is not None]
        if self._updates:
            _, downs, ups = zip(*self._updates.values(), strict=True)
            # One that all share is nobody's voice, and everybody speaks with it.
            numbers = [voices.get(name, -1) for name, rank in self._ranks for _ in range(rank)]
            self.joined = torch.cat(downs), torch.cat(ups, 1), torch.tensor(numbers, device=self.weight.device)
            """Down (R, in) and up (out, R) of all adapters, and whose voice each of the R is."""
            self._tensors += self.joined
            self._updates.clear()

    def _update(self, out: Tensor, x: Tensor, speakers: Speakers) -> None:
        down, up, voice_of = self.joined
        parts = F.linear(x, down)
        if isinstance(speakers, Voices):
            parts.masked_fill_(speakers.others(self._ranks, voice_of), 0.0)
        out.addmm_(parts, up.T)

    def assign(self, other: GpuJoinedLinear) -> None:
        """Take the numbers of another one of this form, and stay where it is; but not where adapters come or go."""
        if self._ranks != other._ranks:
            vars(self).update(vars(other))
        for mine, theirs in zip(self._tensors, other._tensors, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)


def _join_updates(layers: Sequence[nn.Module], adapter: str) -> tuple[Tensor, Tensor] | None:
    """An adapter's low-rank update of joined layers: down (R, in), up (out, R) with the scale in it."""
    downs, ups = [], []
    for layer in layers:
        update = low_rank_update(layer, adapter)
        if update is not None:
            downs.append(update[0])
        ups.append(update[1] if update is not None else layer_weight(layer, merged=False)[:, :0])
    return (torch.cat(downs), torch.block_diag(*ups)) if downs else None
