"""The learner's attention: every token of a packed prefix tree sees its ancestors.

With compiled kernels this is theirs to do; what follows is for everything else, and equal.

Work is cut into blocks whose scores fit into the processor's cache. Scores are never kept: the backward pass computes
them again, block by block (as in arXiv:2205.14135), so memory grows with the tokens, not with their square.

Shapes: M sequences, C tokens of each, P ancestors that they share; K key-value heads, G query heads for each, d head
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentscope_tuner.algorithms.packing import Family, PackedTree
from agentscope_tuner.engine.attention import CHUNK, causal_mask, softmax
from agentscope_tuner.engine.learner_kernels import LearnerKernels

BLOCK = 2**18
"""About so many scores, of one key-value head and one query head, make a block."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Stretches of tokens that see the same ancestors, and themselves causally."""

    queries: Tensor
    """(M * C,) packed indices; a shorter stretch is padded with its first token."""
    keys: Tensor
    """(M * (P + C),) packed indices: what each stretch sees, its own tokens last."""
    padding: Tensor | None
    """(M * C,) true where padded; None when nothing is."""
    causal: Tensor
    """(C, C) added to the scores of queries against their own stretch."""


class TreeLayout:
    """Which ancestors each token of a packed tree sees."""

    def __init__(self, tree: PackedTree, device: torch.device, kernels: LearnerKernels | None = None) -> None:
        self._kernels = kernels
        if kernels is not None:
            self.stretches, self.spans = _stretches(tree)
            return
        masks: dict[int, Tensor] = {}

        def causal(length: int) -> Tensor:
            if length not in masks:
                masks[length] = causal_mask(length, torch.empty(0, device=device))
            return masks[length]

        self._blocks = [
            _block(own, path, causal(max(end - start for start, end in own)), device)
            for family in tree.families
            for own, path in _cut(family)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The batch has one row: the packed tree."""
        # Tokens first: gathering rows, and adding their gradients, is then one contiguous copy each.
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q * scaling, k, v))
        if self._kernels is not None:
            compiled: Tensor = _CompiledTreeAttention.apply(q, k, v, self.stretches, self.spans, self._kernels)  # type: ignore[no-untyped-call]
            return compiled[None]
        out: Tensor = _TreeAttention.apply(q, k, v, self._blocks)  # type: ignore[no-untyped-call]
        return out[None]


def _stretches(tree: PackedTree) -> tuple[Tensor, Tensor]:
    """Stretches (S, 4) and spans (any, 2) as `LearnerKernels.tree_attend` reads them."""
    stretches: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int]] = []
    for family in tree.families:
        stretches += [(start, end, len(spans), len(family.path)) for start, end in family.spans]
        spans += family.path
    return torch.tensor(stretches), torch.tensor(spans, dtype=torch.long).reshape(-1, 2)


def _cut(family: Family) -> Iterator[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """(own spans, path) of the blocks of a family: long nodes are cut to pieces, short siblings taken together."""
    together: list[tuple[int, int]] = []
    above = sum(end - start for start, end in family.path)
    for start, end in family.spans:  # from short to long
        length = end - start
        if length > CHUNK:
            for at in range(start, end, CHUNK):
                yield [(at, min(at + CHUNK, end))], [*family.path, (start, at)]
            continue
        if together and (len(together) + 1) * length * (above + length) > BLOCK:
            yield together, family.path
            together = []
        together.append((start, end))
    if together:
        yield together, family.path


def _block(spans: list[tuple[int, int]], path: list[tuple[int, int]], causal: Tensor, device: torch.device) -> _Block:
    bounds = torch.tensor(spans)
    own = bounds[:, :1] + torch.arange(len(causal))
    padding = own >= bounds[:, 1:]
    own = torch.where(padding, bounds[:, :1], own)
    above = [torch.arange(start, end).expand(len(spans), -1) for start, end in path]
    keys = torch.cat([*above, own], 1)
    return _Block(
        queries=own.flatten().to(device),
        keys=keys.flatten().to(device),
        padding=padding.flatten().to(device) if padding.any() else None,
        causal=causal,
    )


class _Work:
    """The tensors of one block. Rows are (K * M, G * C, d), keys (K * M, P + C, d), scores (K * M, G * C, P + C)."""

    def __init__(self, block: _Block, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._block = block
        self._c = len(block.causal)
        self._m = len(block.queries) // self._c
        self._kv, self._g = k.shape[1], q.shape[1] // k.shape[1]
        self.q, self.k, self.v = self.rows(q), self._keys(k), self._keys(v)
        scores = torch.bmm(self.q, self.k.transpose(1, 2))
        scores.view(self._kv * self._m, self._g, self._c, -1)[..., -self._c :].add_(block.causal)
        self.weights = softmax(scores, v)

    def rows(self, x: Tensor, *, zero_padding: bool = False) -> Tensor:
        """The block's rows of x (N, H, any)."""
        rows = x.index_select(0, self._block.queries)
        if zero_padding and self._block.padding is not None:
            rows[self._block.padding] = 0
        rows = rows.view(self._m, self._c, self._kv, self._g, -1).permute(2, 0, 3, 1, 4)
        return rows.reshape(self._kv * self._m, self._g * self._c, -1)

    def tokens(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`: (M * C, H, any)."""
        rows = rows.view(self._kv, self._m, self._g, self._c, -1).permute(1, 3, 0, 2, 4)
        return rows.reshape(self._m * self._c, self._kv * self._g, -1)

    def _keys(self, x: Tensor) -> Tensor:
        keys = x.index_select(0, self._block.keys).view(self._m, -1, self._kv, x.shape[-1])
        return keys.permute(2, 0, 1, 3).reshape(self._kv * self._m, -1, x.shape[-1])

    def add_keys(self, to: Tensor, keys: Tensor) -> None:
        """Add what belongs to the block's keys to `to` (N, K, d)."""
        keys = keys.view(self._kv, self._m, -1, keys.shape[-1]).permute(1, 2, 0, 3)
        to.index_add_(0, self._block.keys, keys.reshape(len(self._block.keys), self._kv, -1))


class _CompiledTreeAttention(torch.autograd.Function):
    """As `_TreeAttention`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, stretches: Tensor, spans: Tensor, kernels: LearnerKernels
    ) -> Tensor:
        out, normalizers = kernels.tree_attend(q, k, v, stretches, spans)
        ctx.save_for_backward(q, k, v, out, normalizers, stretches, spans)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        return *ctx.kernels.tree_attend_backward(grads[0], *ctx.saved_tensors), None, None, None


class _TreeAttention(torch.autograd.Function):
    """(N, H, d) queries, scaled; (N, K, d) keys and values; returns (N, H, d)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[_Block]) -> Tensor:
        ctx.blocks = blocks
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for block in blocks:
            work = _Work(block, q, k, v)
            tokens = work.tokens(torch.bmm(work.weights, work.v))
            if block.padding is None:
                out.index_copy_(0, block.queries, tokens)
            else:
                out.index_copy_(0, block.queries[~block.padding], tokens[~block.padding])
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out = ctx.saved_tensors
        (grad_out,) = grads
        grad_q, grad_k, grad_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        # Softmax's gradient is p * (dp - sum(p * dp)); that sum is the product of an output and its gradient.
        sums = (grad_out * out).sum(-1, keepdim=True)
        for block in ctx.blocks:
            work = _Work(block, q, k, v)
            grad = work.rows(grad_out, zero_padding=True)
            grad_scores = torch.bmm(grad, work.v.transpose(1, 2))
            grad_scores.sub_(work.rows(sums, zero_padding=True)).mul_(work.weights)
            grad_q.index_add_(0, block.queries, work.tokens(torch.bmm(grad_scores, work.k)))
            work.add_keys(grad_k, torch.bmm(grad_scores.transpose(1, 2), work.q))
            work.add_keys(grad_v, torch.bmm(work.weights.transpose(1, 2), grad))
        return grad_q, grad_k, grad_v, None
