"""The learner's attention on a GPU: every token of a packed prefix tree sees its ancestors, by FlexAttention.

A walk through the tree, branch after branch, enters a token and later leaves all that follows it. One token is an
ancestor of another if the other one was entered in between.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentscope_tuner.algorithms.packing import PackedTree, pack
from agentscope_tuner.engine.tree_attention import TreeLayout

_BLOCK = 128
"""Tokens of which all see some of so many others, or none of them does."""


class FlexLayout:
    """As `TreeLayout`, by a kernel that PyTorch compiles."""

    def __init__(self, tree: PackedTree, device: torch.device) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        entered, left = (torch.from_numpy(times).to(device) for times in visits(tree))
        seen = _blocks_seen(tree)
        numbers = torch.from_numpy(seen.sum(1, dtype=np.int32))
        order = torch.from_numpy(np.argsort(~seen, 1, kind="stable").astype(np.int32))

        def is_ancestor(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (entered[key] <= entered[query]) & (entered[query] < left[key])

        self.mask = BlockMask.from_kv_blocks(
            numbers[None, None].to(device), order[None, None].to(device), BLOCK_SIZE=_BLOCK, mask_mod=is_ancestor,
            seq_lengths=(len(tree.ids), len(tree.ids)),
        )  # fmt: skip

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The batch has one row: the packed tree."""
        out: Tensor = _flex_attention()(q, k, v, block_mask=self.mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Trees have all lengths; each would otherwise be compiled for.
    return torch.compile(flex_attention, dynamic=True)


def visits(tree: PackedTree) -> tuple[np.ndarray, np.ndarray]:
    """When a walk through the tree enters each token (N,), and when it has left all that follows (N,)."""
    nodes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for family in tree.families:
        nodes[family.path[-1][1] - 1 if family.path else -1] += family.spans
    entered, left = np.zeros((2, len(tree.ids)), np.int32)
    clock = 0
    stack = [(*span, False) for span in nodes[-1]]
    while stack:
        start, end, below = stack.pop()
        if below:
            left[start:end] = clock
            continue
        entered[start:end] = np.arange(clock, clock + end - start)
        clock += end - start
        stack.append((start, end, True))
        stack += [(*span, False) for span in nodes.get(end - 1, ())]
    return entered, left


def _blocks_seen(tree: PackedTree) -> np.ndarray:
    """Which blocks of keys (B, B) each block of queries sees something of."""
    count = -(-len(tree.ids) // _BLOCK)
    seen = np.zeros((count, count), bool)
    for family in tree.families:
        blocks = {block for start, end in family.path for block in range(start // _BLOCK, -(-end // _BLOCK))}
        above = np.array(sorted(blocks), np.int64)
        for start, end in family.spans:
            own = np.arange(start // _BLOCK, (end - 1) // _BLOCK + 1)
            seen[np.ix_(own, above)] = True
            seen[np.ix_(own, own)] |= own[:, None] >= own
    return seen


def flex_works(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it can be compiled here, and computes what `TreeLayout` does, gradients included."""
    shared = [*range(150)]
    tree = pack([[*shared, *range(at, at + 70 + at // 100)] for at in (1000, 2000, 3000)], max_tokens=1000)[0]
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        shape = (1, heads, len(tree.ids), size)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device).requires_grad_()

    given = random(heads), random(kv_heads), random(kv_heads)

    def outcome(layout: FlexLayout | TreeLayout) -> list[Tensor]:
        with torch.enable_grad():
            out = layout.attend(0, *given, size**-0.5)
            toward = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
            return [out.detach(), *torch.autograd.grad((out * toward).sum(), given)]

    try:
        found = outcome(FlexLayout(tree, device))
    # There is no such attention in this PyTorch, or it cannot be compiled here, for any reason.
    except Exception:
        return False
    expected = outcome(TreeLayout(tree, device))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    return all((a - b).norm() <= tolerance * b.norm() for a, b in zip(found, expected, strict=True))
