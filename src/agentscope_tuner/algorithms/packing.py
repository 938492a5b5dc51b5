"""Prefix-tree packing: sequences that begin alike share their beginning, in storage and in compute.

The calls of an episode extend one another, and the episodes of a group start from one prompt. Their union is a tree
of tokens; the learner runs every node of it once. A token's ancestors are its context, its depth is its position, so
the gradient equals that of running every sequence by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, pairwise

import numpy as np

MIN_SHARED = 24
"""Shorter shared stretches are not worth a node of their own: they cost more in overhead than they save."""
_TREE = 100
"""What a forward and backward pass costs beside its tokens, in tokens: weights are read, and gradients added up."""
_EXCESS = 0.25
"""What a token beyond the usual number costs, as it takes memory: it has to save so many tokens elsewhere."""


@dataclass(slots=True)
class Family:
    """Sibling nodes of similar length; they see the same ancestors."""

    spans: list[tuple[int, int]]
    """Each node's tokens, as a range of packed indices."""
    path: list[tuple[int, int]]
    """The ancestors' tokens, root first, in as few ranges as they make."""


@dataclass(slots=True)
class PackedTree:
    """A forest of sequences in one packed row of N tokens."""

    ids: list[int] = field(default_factory=list)
    """(N,)"""
    positions: list[int] = field(default_factory=list)
    """(N,) depth of each token."""
    families: list[Family] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    """Which of the input sequences are in this tree."""
    where: list[list[int]] = field(default_factory=list)
    """For each member, the packed index of each of its tokens."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def pack(
    sequences: Sequence[list[int]],
    *,
    max_tokens: int,
    most_tokens: int | None = None,
    min_shared: int = MIN_SHARED,
) -> list[PackedTree]:
    """Pack sequences into trees of about `max_tokens` tokens; a longer sequence gets a tree of its own.

    Neighbours in lexicographic order share the most, so one sort finds both the trees and where to cut them: where the
    least is run again (see `_cuts`). Long sequences share what they have in common, in trees that may be longer, of
    `most_tokens` at most.
    """
    bound = None if most_tokens is None else max(max_tokens, most_tokens)
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    lengths = [len(sequences[i]) for i in order]
    shared = [0] * len(order)
    for at in range(1, len(order)):
        shared[at] = common_prefix(sequences[order[at - 1]], sequences[order[at]])
    saved = [
        overlap if overlap >= min_shared or (at > 0 and overlap == lengths[at - 1]) else 0
        for at, overlap in enumerate(shared)
    ]
    trees: list[PackedTree] = []
    for first, end in pairwise(_cuts(lengths, saved, max_tokens, bound)):
        trees += _fitting(sequences, order[first:end], [0, *shared[first + 1 : end]], min_shared, bound)
    return trees


def _cuts(lengths: list[int], saved: list[int], max_tokens: int, bound: int | None) -> list[int]:
    """Places to cut sorted sequences at, the first and the last one's included, so that the least is run in all.

    A tree has a cost of its own, and what `saved` tells of its first sequence is run again. Where its sequences share n
    tokens it may have n and min(n, max_tokens) more than `max_tokens`, if that is worth it.
    """
    ends = [0, *accumulate(length - known for length, known in zip(lengths, saved, strict=True))]
    if ends[-1] <= max_tokens:
        return [0, len(lengths)] if lengths else [0]
    widest = max_tokens + max(saved) + min(max(saved), max_tokens)
    if bound is not None:
        widest = min(widest, bound)
    # What a tree has that ends at `end` is `ends[end] - before[first]`: the more, the sooner it begins.
    before = np.array(ends[:-1]) - saved
    known = np.array(saved)
    costs, cuts, low = np.zeros(len(ends)), [0], 0
    for end in range(1, len(ends)):
        while low < end - 1 and ends[end] - before[low] > widest:
            low += 1
        # From trees of one sequence, which may be of any size, to those of many.
        sizes = ends[end] - before[low:end][::-1]
        cost = costs[low:end][::-1] + sizes + _TREE + _EXCESS * np.maximum(0, sizes - max_tokens)
        longest = np.maximum.accumulate(known[low + 1 : end][::-1])
        cost[1:][sizes[1:] > max_tokens + longest + np.minimum(longest, max_tokens)] = math.inf
        best = int(cost.argmin())
        costs[end] = cost[best]
        cuts.append(end - 1 - best)
    found = [len(lengths)]
    while found[-1] > 0:
        found.append(cuts[found[-1]])
    return found[::-1]


def _fitting(
    sequences: Sequence[list[int]], batch: list[int], shared: list[int], min_shared: int, bound: int | None
) -> list[PackedTree]:
    """One tree, or several where it would have too many tokens: of what is shared, short ends are run again."""
    tree = _build(sequences, batch, shared, min_shared)
    if bound is None or len(tree.ids) <= bound or len(batch) == 1:
        return [tree]
    middle = len(batch) // 2
    halves = (batch[:middle], shared[:middle]), (batch[middle:], [0, *shared[middle + 1 :]])
    return [tree for half in halves for tree in _fitting(sequences, *half, min_shared, bound)]


def _build(sequences: Sequence[list[int]], batch: list[int], shared: list[int], min_shared: int) -> PackedTree:
    """One tree from sorted sequences; `shared[i]` is the overlap of `batch[i]` with its left neighbour."""
    tree = PackedTree()
    # A sequence that its right neighbour extends needs no node: it is the beginning of that one.
    extended = [i + 1 < len(batch) and shared[i + 1] == len(sequences[batch[i]]) for i in range(len(batch))]
    leaves = [i for i in range(len(batch)) if not extended[i]]
    # Overlap of neighbouring leaves: the least overlap on the way from one to the next.
    overlaps = [0] + [min(shared[a + 1 : b + 1]) for a, b in pairwise(leaves)]
    paths: dict[int, list[tuple[int, int]]] = {}

    def grow(low: int, high: int, depth: int) -> list[tuple[int, int, list[int]]]:
        """Nodes that begin at `depth`, for leaves low..high-1, as (start depth, end depth, leaves)."""
        nodes: list[tuple[int, int, list[int]]] = []
        first = low
        for i in range(low + 1, high + 1):
            if i == high or overlaps[i] - depth < min_shared:
                members = list(range(first, i))
                end = min(overlaps[first + 1 : i]) if i - first > 1 else len(sequences[batch[leaves[first]]])
                nodes.append((depth, end, members))
                first = i
        return nodes

    # For all nodes below one, and for those that nothing is above.
    siblings: list[Family] = []
    stack: list[tuple[int, int, list[int], Family]] = []

    def descend(low: int, high: int, depth: int, path: list[tuple[int, int]]) -> None:
        siblings.append(Family([], path))
        # The one with most leaves comes last, so it is taken first: it follows its parent at once, and what many tokens
        # see lies in few stretches.
        nodes = sorted(grow(low, high, depth), key=lambda node: (len(node[2]), node[1] - node[0]))
        stack.extend((*node, siblings[-1]) for node in nodes)

    descend(0, len(leaves), 0, [])
    while stack:
        start, end, members, family = stack.pop()
        sequence = sequences[batch[leaves[members[0]]]]
        at = len(tree.ids)
        tree.ids.extend(sequence[start:end])
        tree.positions.extend(range(start, end))
        if end > start:
            family.spans.append((at, at + end - start))
        below = _joined(family.path, at, at + end - start)
        if len(members) > 1:
            descend(members[0], members[-1] + 1, end, below)
        else:
            paths[leaves[members[0]]] = below
    for family in siblings:
        tree.families += _of_similar_length(family)

    for i in range(len(batch) - 1, -1, -1):
        if extended[i]:
            paths[i] = paths[i + 1]
    tree.members = list(batch)
    tree.where = [_first(paths[i], len(sequences[batch[i]])) for i in range(len(batch))]
    return tree


def _joined(path: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    if path and path[-1][1] == start:
        return [*path[:-1], (path[-1][0], end)]
    return [*path, (start, end)] if end > start else path


def _first(path: list[tuple[int, int]], count: int) -> list[int]:
    """The first tokens of a path."""
    return list(islice(chain.from_iterable(range(start, end) for start, end in path), count))


def _of_similar_length(siblings: Family) -> list[Family]:
    """Attention pads a family to its longest node: lengths are kept within a factor of two."""
    found: list[Family] = []
    shortest = 0
    for start, end in sorted(siblings.spans, key=lambda span: span[1] - span[0]):
        if not found or end - start > 2 * shortest:
            found.append(Family([], siblings.path))
            shortest = end - start
        found[-1].spans.append((start, end))
    return found
