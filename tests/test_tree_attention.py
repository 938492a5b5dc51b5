"""Attention along a prefix tree, against plain attention of each sequence by itself."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agentscope_tuner.algorithms.packing import pack
from agentscope_tuner.engine import tree_attention
from agentscope_tuner.engine.tree_attention import TreeLayout
from agentscope_tuner.engine.trial import native_kernels

HEADS, KV_HEADS, SIZE = 6, 2, 8


def branching_sequences(rng: random.Random) -> list[list[int]]:
    """Sequences that share beginnings, with nodes of 1 to 300 tokens."""
    tokens = lambda: [rng.randrange(50) for _ in range(rng.choice([1, 5, 30, 100, 129, 300]))]  # noqa: E731
    sequences = [tokens()]
    while len(sequences) < 12:
        base = rng.choice(sequences)
        sequences.append(base[: rng.randrange(len(base) + 1)] + tokens())
    return sequences


def plain(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scaling
    return torch.softmax(scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf), -1) @ v


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("how", ["small blocks", "blocks", "compiled"])
def test_outputs_and_gradients_equal_those_of_each_sequence(
    seed: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "BLOCK", 2**8 if how == "small blocks" else 2**18)
    generator = torch.Generator().manual_seed(seed)
    sequences = branching_sequences(random.Random(seed))
    (tree,) = pack(sequences, max_tokens=10**6, min_shared=1)
    assert any(end - start > tree_attention.CHUNK for family in tree.families for start, end in family.spans)
    inputs = [
        torch.randn(1, heads, len(tree.ids), SIZE, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    weights = torch.randn(len(tree.ids), HEADS, SIZE, dtype=torch.float64, generator=generator)
    if how == "compiled":  # in float32
        assert native_kernels() is not None
        layout = TreeLayout(tree, torch.device("cpu"), native_kernels())
        packed = layout.attend(0, *(x.float() for x in inputs), 0.3)[0].double()
    else:
        packed = TreeLayout(tree, torch.device("cpu")).attend(0, *inputs, 0.3)[0]
    grads = torch.autograd.grad((packed * weights).sum(), inputs)

    alone = torch.zeros_like(packed)
    for where in map(torch.tensor, tree.where):
        q, k, v = (x[0][:, where] for x in inputs)
        # Tokens that several sequences share are written by each of them, with the same values.
        alone = alone.index_copy(0, where, plain(q, k, v, 0.3).transpose(0, 1))
    expected = torch.autograd.grad((alone * weights).sum(), inputs)
    tolerance = 1e-5 if how == "compiled" else 1e-6
    for found, reference in zip([packed, *grads], [alone, *expected], strict=True):
        assert (found - reference).norm() < tolerance * reference.norm()
        torch.testing.assert_close(found, reference, rtol=10 * tolerance, atol=tolerance)


def test_scores_are_not_kept_for_the_backward_pass() -> None:
    (tree,) = pack([list(range(2000))], max_tokens=10**6)
    q, k, v = (torch.randn(1, heads, 2000, SIZE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        TreeLayout(tree, torch.device("cpu")).attend(0, q, k, v, 0.3)
    assert kept < 4 * (q.numel() + k.numel() + v.numel())  # the scores would be 200 times as many


def test_compiled_gradients_are_as_exact_for_large_scores() -> None:
    kernels = native_kernels()
    assert kernels is not None
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(200, heads, 16, generator=generator) for heads in (4, 2, 2, 4))
    q *= 4  # scores of up to 60
    stretches, spans = torch.tensor([[0, 200, 0, 0]]), torch.zeros(0, 2, dtype=torch.int64)
    found = kernels.tree_attend_backward(
        grad, q, k, v, *kernels.tree_attend(q, k, v, stretches, spans), stretches, spans
    )
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    queries, *shared = (x.transpose(0, 1) for x in inputs)
    keys, values = (x.repeat_interleave(2, 0) for x in shared)
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1)
    expected = torch.autograd.grad((out.transpose(0, 1) * grad).sum(), inputs)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    assert max(errors[:2]) < 2.5e-6 and errors[2] < 8e-7  # that of v is twice as large by logarithms of sums
