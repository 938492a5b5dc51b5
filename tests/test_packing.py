"""Prefix-tree packing, on random families of sequences."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentscope_tuner.algorithms import packing
from agentscope_tuner.algorithms.packing import common_prefix, pack


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Sequences that extend, repeat and branch off each other."""
    token = st.integers(0, 2)
    sequences = [draw(st.lists(token, min_size=1, max_size=30))]
    for _ in range(draw(st.integers(0, 10))):
        base = draw(st.sampled_from(sequences))
        kept = draw(st.integers(0, len(base)))
        sequences.append((base[:kept] + draw(st.lists(token, max_size=20))) or [0])
    return sequences


@given(families(), st.integers(1, 200), st.sampled_from([1, 4, 16]))
@settings(max_examples=300, deadline=None)
def test_every_token_sees_exactly_its_own_past(sequences: list[list[int]], max_tokens: int, min_shared: int) -> None:
    found = []
    for tree in pack(sequences, max_tokens=max_tokens, min_shared=min_shared):
        visible: dict[int, list[int]] = {}
        for family in tree.families:
            above = [index for start, end in family.path for index in range(start, end)]
            assert all(start < end < following for (start, end), (following, _) in pairwise(family.path))
            for start, end in family.spans:
                for index in range(start, end):
                    assert index not in visible
                    visible[index] = [*above, *range(start, index + 1)]
        assert sorted(visible) == list(range(len(tree.ids)))
        for member, where in zip(tree.members, tree.where, strict=True):
            found.append(member)
            assert [tree.ids[i] for i in where] == sequences[member]
            assert [tree.positions[i] for i in where] == list(range(len(where)))
            assert visible[where[-1]] == where
    assert sorted(found) == list(range(len(sequences)))


@given(families())
def test_no_tree_is_larger_than_its_sequences(sequences: list[list[int]]) -> None:
    (tree,) = pack(sequences, max_tokens=10**9, min_shared=1)
    prefixes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    assert len(tree.ids) == len(prefixes)  # every distinct prefix is one token of the tree


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_append_only_turns_cost_their_last_turn_alone() -> None:
    turns = [list(range(100 * (i + 1))) for i in range(6)]
    (tree,) = pack(turns, max_tokens=10**6)
    assert len(tree.ids) == 600
    assert len(tree.families) == 1


def test_what_is_shared_is_shared_however_long_it_is() -> None:
    turns = [list(range(100 * (i + 1))) for i in range(20)]
    assert [len(tree.ids) for tree in pack(turns, max_tokens=500)] == [2000]
    group = [[*range(2000), *range(10_000 * (i + 1), 10_000 * (i + 1) + 50)] for i in range(8)]
    assert [len(tree.ids) for tree in pack(group, max_tokens=500)] == [2400]
    assert sorted(len(tree.ids) for tree in pack(group, max_tokens=500, most_tokens=2200)) == [2200, 2200]
    assert [len(tree.ids) for tree in pack(group, max_tokens=500, most_tokens=100)] == [2050] * 8


def test_cuts_fall_where_little_is_shared() -> None:
    """Four episodes of four turns, each with the turns before it; only the first 50 tokens are of all episodes."""
    turns = [[*range(50), *range(1000 * e, 1000 * e + 100 * (i + 1))] for e in range(1, 5) for i in range(4)]
    assert [len(tree.ids) for tree in pack(turns, max_tokens=900)] == [850, 850]
    assert [len(tree.ids) for tree in pack(turns, max_tokens=800)] == [850, 850]
    assert [len(tree.ids) for tree in pack(turns, max_tokens=200)] == [450] * 4


@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=9),
    max_tokens=st.integers(20, 200),
)
def test_no_other_cuts_run_less(sizes: list[tuple[int, float]], max_tokens: int) -> None:
    lengths = [length for length, _ in sizes]
    saved = [0] + [int(share * min(pair)) for pair, (_, share) in zip(pairwise(lengths), sizes[1:], strict=True)]

    def tree(first: int, end: int) -> tuple[int, float]:
        size = sum(lengths[first:end]) - sum(saved[first + 1 : end])
        longest = max(saved[first + 1 : end], default=0)
        allowed = end == first + 1 or size <= max_tokens + longest + min(longest, max_tokens)
        cost = size + packing._TREE + packing._EXCESS * max(0, size - max_tokens)
        return size, cost if allowed else math.inf

    def cost(cuts: tuple[int, ...]) -> float:
        return sum(tree(first, end)[1] for first, end in pairwise(cuts))

    n = len(lengths)
    others = [(0, *inner, n) for k in range(n) for inner in combinations(range(1, n), k)]
    found = tuple(packing._cuts(lengths, saved, max_tokens, None))
    if tree(0, n)[0] <= max_tokens:
        assert found == (0, n)
    else:
        assert cost(found) == pytest.approx(min(map(cost, others)))


def test_beginnings_too_short_to_share_count_for_every_sequence() -> None:
    sequences = [[*range(23), 100 + i] for i in range(300)]
    assert max(len(tree.ids) for tree in pack(sequences, max_tokens=240)) == 240


def test_no_tree_has_more_tokens_than_there_is_memory_for() -> None:
    """One beginning that ends a little early makes all others run what comes after it again."""
    sequences = [[*range(220), *range(1000 * i, 1000 * i + 10)] for i in range(1, 40)] + [[*range(200), 0]]
    trees = pack(sequences, max_tokens=300, most_tokens=600)
    assert max(len(tree.ids) for tree in trees) <= 600
    assert sorted(member for tree in trees for member in tree.members) == list(range(40))
    for tree in trees:
        for member, where in zip(tree.members, tree.where, strict=True):
            assert [tree.ids[at] for at in where] == sequences[member]


def test_what_most_sequences_share_lies_together() -> None:
    """A history that grows, of which every call adds something that no later one sees."""
    history = [*range(400)]
    ends = range(100, 401, 50)
    trees = pack([[*history[:end], *[1000 + end] * 30] for end in ends], max_tokens=2000)
    assert len(trees) == 1
    for member, where in zip(trees[0].members, trees[0].where, strict=True):
        assert where[: ends[member]] == [*range(ends[member])]
