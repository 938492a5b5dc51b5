"""Whether compiled kernels are used: they are built at start, and have to be right and fast on this processor."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from agentscope_tuner.engine.compiling import compile_kernels
from agentscope_tuner.engine.native import TILE, NativeKernels, Way, to_pairs, to_tiles, weight_tiles

_TOLERANCE = 1e-5
_MUCH_SLOWER = 10
"""Times as long as PyTorch: with the registers they are made for, kernels take less than it; split up, fifty times."""


@cache
def native_kernels() -> NativeKernels | None:
    """The kernels; None where they cannot be built, or are wrong, or take far longer than PyTorch."""
    try:
        kernels = NativeKernels(ctypes.CDLL(str(compile_kernels())))
    except (OSError, subprocess.SubprocessError, AttributeError, RuntimeError):
        return None
    if not (_agrees(kernels) and _keeps_up(kernels)):
        return None
    kernels.way = _fastest_way(kernels)
    return kernels


def _agrees(kernels: NativeKernels) -> bool:
    """Compare with PyTorch on random numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    checks = (_agrees_on_rows, _agrees_on_linear_layers, _agrees_along_a_tree, _agrees_on_losses)
    return all(check(kernels, draw) for check in checks)


def _agrees_on_rows(kernels: NativeKernels, draw: Callable[..., Tensor]) -> bool:
    """Attention over a cache: a sequence with one new token, one with more than are computed together, one with few."""
    new = {4: [70], 0: [*range(30, 51)], 2: [41, 42, 43]}
    slots = torch.tensor([slot for slot, lengths in new.items() for _ in lengths])
    lengths = torch.tensor([length for lengths in new.values() for length in lengths])
    trunk_of = torch.where(slots == 2, -1, 0)
    for kv_heads, group, d, shared in [(2, 3, 32, 0), (1, 1, 80, 7), (2, 8, 128, 33), (1, 2, 20, 5)]:
        q, keys, values = (draw(len(slots), kv_heads * group, d) * d**-0.5, *(draw(5, kv_heads, 96, d) for _ in "kv"))
        trunk = (draw(kv_heads, shared, d), draw(kv_heads, shared, d))
        padded = torch.cat([trunk[0], trunk[0].new_zeros(kv_heads, -shared % TILE, d)], 1)
        for dtype, tolerance in ((torch.float32, _TOLERANCE), (torch.bfloat16, 3e-2)):
            laid = (to_tiles(padded.to(dtype)), to_pairs(trunk[1].to(dtype)).contiguous())
            trunks = torch.tensor([[*(tensor.data_ptr() for tensor in laid), shared]])
            cache = (to_tiles(keys.to(dtype)), to_pairs(values.to(dtype)))
            got = kernels.attend(q, *cache, slots, lengths, trunks, trunk_of).float()
            for row, (at, n) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
                parts = (trunk, (keys[at, :, :n], values[at, :, :n]))[trunk_of[row] < 0 :]
                k, v = (torch.cat(pieces, 1) for pieces in zip(*parts, strict=True))
                expected = torch.softmax(q[row].view(kv_heads, group, d) @ k.transpose(1, 2), -1) @ v
                if not torch.allclose(got[row], expected.view(-1, d), rtol=tolerance, atol=tolerance):
                    return False
    return True


def _agrees_on_linear_layers(kernels: NativeKernels, draw: Callable[..., Tensor]) -> bool:
    """More rows than a thread takes at once, and an output that begins a tile."""
    x, weight, bias = (draw(*shape).bfloat16() for shape in ((130, 40), (33, 40), (33,)))
    expected = F.linear(x.float(), weight.float(), bias.float())
    return torch.allclose(kernels.linear(x, weight_tiles(weight), bias, 33).float(), expected, rtol=1e-2, atol=1e-4)


def _keeps_up(kernels: NativeKernels) -> bool:
    """Whether attention over a cache takes about as long as PyTorch's, even where nothing is to be gathered for that.

    It takes many times as long where a compiler does not know how to use the processor's registers.
    """
    rows, kv_heads, group, tokens, d = 16, 2, 4, 256, 64
    q = torch.ones(rows, kv_heads * group, d)
    keys, values = (torch.ones(rows, kv_heads, tokens, d) for _ in "kv")
    tiles, slots, lengths = to_tiles(keys), torch.arange(rows), torch.full((rows,), tokens)
    trunks, trunk_of = torch.empty(0, 3, dtype=torch.int64), torch.full((rows,), -1)

    def plainly() -> None:
        torch.softmax(q.view(rows, kv_heads, group, d) @ keys.transpose(2, 3), -1) @ values

    ours, theirs = shortest_times(lambda: kernels.attend(q, tiles, values, slots, lengths, trunks, trunk_of), plainly)
    return ours < _MUCH_SLOWER * theirs


def _fastest_way(kernels: NativeKernels) -> Way:
    """How products of bfloat16 are computed fastest, of the ways that are right."""
    ways = [Way.ONE_BY_ONE, *(way for way in (Way.IN_PAIRS, Way.IN_MATRICES) if _computes(kernels, way))]
    rows, inputs, outputs = 64, 512, 1024
    x, tiles = torch.ones(rows, inputs).bfloat16(), weight_tiles(torch.ones(outputs, inputs).bfloat16())

    def multiply(way: Way) -> None:
        kernels.way = way
        kernels.linear(x, tiles, None, outputs)

    times = shortest_times(*[partial(multiply, way) for way in ways])
    return ways[times.index(min(times))]


def _computes(kernels: NativeKernels, way: Way) -> bool:
    """Whether products are computed in that way, and are right."""
    kernels.way = way
    return kernels.way is way and _agrees(kernels)


def shortest_times(*ways: Callable[[], object]) -> list[float]:
    """The shortest of several times that each way took, in turn, on one thread.

    On a busy machine several threads wait for the one that others hold up, nearly every time; one is seldom held up.
    """
    taken = [float("inf")] * len(ways)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(8):  # the first ones prepare
            for number, way in enumerate(ways):
                begun = time.perf_counter()
                way()
                taken[number] = min(taken[number], time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    return taken


@torch.enable_grad()
def _agrees_along_a_tree(kernels: NativeKernels, draw: Callable[..., Tensor]) -> bool:
    """The same, with gradients: a trunk of 60 tokens, and two branches of 10 and 50, of which one goes on from 5."""
    stretches = torch.tensor([[0, 60, 0, 0], [60, 70, 0, 1], [70, 120, 1, 2]])
    spans = torch.tensor([[0, 60], [0, 60], [60, 65]])
    seen = torch.ones(120, 120).tril().bool()
    seen[70:, 65:70] = False
    for kv_heads, group, d in [(2, 3, 32), (1, 1, 20)]:
        inputs = [draw(120, heads, d).requires_grad_() for heads in (kv_heads * group, kv_heads, kv_heads)]
        grad = draw(120, kv_heads * group, d)
        q, k, v = (x.transpose(0, 1) for x in inputs)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf)
        expected = (torch.softmax(scores, -1) @ v).transpose(0, 1)
        q, k, v = (x.detach() for x in inputs)
        out, normalizers = kernels.tree_attend(q, k, v, stretches, spans)
        found = [out, *kernels.tree_attend_backward(grad, q, k, v, out, normalizers, stretches, spans)]
        wanted = [expected, *torch.autograd.grad((expected * grad).sum(), inputs)]
        if not all((a - b).norm() <= _TOLERANCE * b.norm() for a, b in zip(found, wanted, strict=True)):
            return False
    return True


@torch.enable_grad()
def _agrees_on_losses(kernels: NativeKernels, draw: Callable[..., Tensor]) -> bool:
    """Log-probabilities and entropies, with gradients."""
    logits, temperatures = (5 * draw(7, 700)).requires_grad_(), draw(7).abs() + 0.5
    tokens = torch.arange(7) * 100
    spread = torch.log_softmax(logits / temperatures[:, None], -1)
    expected = [spread.gather(1, tokens[:, None])[:, 0], -(spread.exp() * spread).sum(-1)]
    grads = [draw(7), draw(7)]
    wanted = [*expected, *torch.autograd.grad(expected, logits, grads)]
    logprobs, entropies, logsums = kernels.choose(logits.detach(), tokens, temperatures)
    gradient = kernels.choose_backward(
        grads[0], grads[1], logits.detach().clone(), tokens, temperatures, entropies, logsums
    )
    found = [logprobs, entropies, gradient]
    return all((a - b).norm() <= _TOLERANCE * b.norm() for a, b in zip(found, wanted, strict=True))
