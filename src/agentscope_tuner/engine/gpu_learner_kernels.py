"""The learner's compiled kernels on a GPU, in Triton: what `LearnerKernels` computes between linear layers.

All is computed in float32; what is read and written has the type of what is given.
"""
# Triton has no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Numbers that one program takes, where none depends on another."""
_WORDS = 4096
"""Of the vocabulary, those that are read at once."""
_PROGRAMS = 512
"""Programs that share a gradient of few numbers, which every row adds to."""


@triton.jit
def _rms_norm(
    x, change, weight, total, y, scales, eps, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < WIDTH
    of_row = tl.load(x + row * WIDTH + at, inside, 0.0).to(tl.float32)
    if ADD:
        of_row += tl.load(change + row * WIDTH + at, inside, 0.0).to(tl.float32)
        tl.store(total + row * WIDTH + at, of_row, inside)
    scale = 1 / tl.sqrt(tl.sum(of_row * of_row, 0) / WIDTH + eps)
    tl.store(scales + row, scale)
    by = tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(y + row * WIDTH + at, (of_row * scale * by).to(y.dtype.element_ty), inside)


@triton.jit
def _rms_norm_backward(
    grad, grad_total, total, weight, scales, grad_x, grad_weights, rows,
    WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """One program for every PROGRAMS-th row: each has a gradient of the weight, which are then added."""
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    by = tl.load(weight + at, inside, 0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, PROGRAMS):
        place = row * WIDTH + at
        scale = tl.load(scales + row)
        normed = tl.load(total + place, inside, 0.0).to(tl.float32) * scale
        given = tl.load(grad + place, inside, 0.0).to(tl.float32)
        of_weight += given * normed
        given *= by
        found = scale * (given - normed * (tl.sum(given * normed, 0) / WIDTH))
        if ADD:
            found += tl.load(grad_total + place, inside, 0.0).to(tl.float32)
        tl.store(grad_x + place, found.to(grad_x.dtype.element_ty), inside)
    tl.store(grad_weights + tl.program_id(0) * WIDTH + at, of_weight, inside)


@triton.jit
def _rotate(
    x, cosines, sines, positions, y, sign,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    at = tl.arange(0, HALF)[None]
    inside = (head < HEADS) & (at < SIZE // 2)
    place = (row * HEADS + head) * SIZE + at
    low = tl.load(x + place, inside, 0.0).to(tl.float32)
    high = tl.load(x + place + SIZE // 2, inside, 0.0).to(tl.float32)
    angle = tl.load(positions + row) * SIZE + at
    cosine = tl.load(cosines + angle, at < SIZE // 2, 0.0)
    sine = tl.load(sines + angle, at < SIZE // 2, 0.0) * sign
    tl.store(y + place, (low * cosine - high * sine).to(y.dtype.element_ty), inside)
    tl.store(y + place + SIZE // 2, (high * cosine + low * sine).to(y.dtype.element_ty), inside)


@triton.jit
def _swiglu(gate, up, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    u = tl.load(up + at, at < count, 0.0).to(tl.float32)
    tl.store(y + at, (g / (1 + tl.exp(-g)) * u).to(y.dtype.element_ty), at < count)


@triton.jit
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(grad + at, at < count, 0.0).to(tl.float32)
    g = tl.load(gate + at, at < count, 0.0).to(tl.float32)
    u = tl.load(up + at, at < count, 0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-g))
    tl.store(grad_up + at, (d * g * sigmoid).to(grad_up.dtype.element_ty), at < count)
    of_gate = d * u * sigmoid * (1 + g * (1 - sigmoid))
    tl.store(grad_gate + at, of_gate.to(grad_gate.dtype.element_ty), at < count)


@triton.jit
def _choose(logits, tokens, temperatures, logprobs, entropies, logsums, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    by = 1 / tl.where(temperature > 0, temperature, 1.0)
    # The sums go on from one block to the next: of exponentials, and of those times the logits.
    highest = tl.full((BLOCK,), -1e30, tl.float32)
    total, mean = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, VOCABULARY, BLOCK):
        inside = begin + at < VOCABULARY
        logit = tl.load(logits + row * VOCABULARY + begin + at, inside, -1e30).to(tl.float32) * by
        logit = tl.maximum(logit, -1e30)  # a token may be excluded
        higher = tl.maximum(highest, logit)
        before, weight = tl.exp(highest - higher), tl.where(inside, tl.exp(logit - higher), 0.0)
        total = total * before + weight
        mean = mean * before + weight * logit
        highest = higher
    high = tl.max(highest, 0)
    share = tl.exp(highest - high)
    whole = tl.sum(total * share, 0)
    logsum = high + tl.log(whole)
    token = tl.load(logits + row * VOCABULARY + tl.load(tokens + row)).to(tl.float32) * by
    tl.store(logprobs + row, token - logsum)
    tl.store(entropies + row, logsum - tl.sum(mean * share, 0) / whole)
    tl.store(logsums + row, logsum)


@triton.jit
def _choose_backward(
    grad_logprobs, grad_entropies, logits, tokens, temperatures, entropies, logsums,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    by = 1 / tl.where(temperature > 0, temperature, 1.0)
    chosen, spread = tl.load(grad_logprobs + row), tl.load(grad_entropies + row)
    place = logits + row * VOCABULARY + at
    logprob = tl.load(place, at < VOCABULARY, -1e30).to(tl.float32) * by - tl.load(logsums + row)
    logprob = tl.maximum(logprob, -1e30)
    found = -tl.exp(logprob) * (chosen + spread * (logprob + tl.load(entropies + row)))
    found += tl.where(at == tl.load(tokens + row), chosen, 0.0)
    tl.store(place, (found * by).to(logits.dtype.element_ty), at < VOCABULARY)


class GpuLearnerKernels:
    """Parts of a forward pass and of its gradient; see `LearnerKernels` for what they are given and return."""

    def rms_norm(
        self, x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of x (..., D) and a change; its RMS norm in `dtype`; and what it was scaled by (...)."""
        x = x.contiguous()
        width = x.shape[-1]
        total = x if change is None else torch.empty_like(x)
        y, scales = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)
        _rms_norm[(x.numel() // width,)](
            x, None if change is None else change.contiguous(), weight, total, y, scales, eps, width,
            change is not None, triton.next_power_of_2(width),
        )  # fmt: skip
        return total, y, scales

    def rms_norm_backward(
        self, grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the sum and of weight, by that of the norm and what else there is of the sum's."""
        grad, width = grad.contiguous(), total.shape[-1]
        grad_total = None if grad_total is None else grad_total.contiguous()
        rows = total.numel() // width
        programs = min(rows, _PROGRAMS)
        grad_x = torch.empty_like(total)
        grad_weights = total.new_empty(programs, width, dtype=torch.float32)
        _rms_norm_backward[(programs,)](
            grad, grad_total, total, weight, scale, grad_x, grad_weights, rows, width, grad_total is not None,
            triton.next_power_of_2(width), programs,
        )  # fmt: skip
        return grad_x, grad_weights.sum(0).to(weight.dtype)

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Rotary embedding of x (N, H, d) at positions (N,) by tables (length, d); or its transpose."""
        x = x.contiguous()
        y = torch.empty_like(x)
        rows, heads, size = x.shape
        half = triton.next_power_of_2(size // 2)
        together = min(triton.next_power_of_2(heads), max(1, _BLOCK // half))
        _rotate[rows, triton.cdiv(heads, together)](
            x, cosines, sines, positions, y, -1.0 if back else 1.0, heads, size, together, half
        )
        return y

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`."""
        y = torch.empty_like(gate)
        _swiglu[(triton.cdiv(y.numel(), _BLOCK),)](gate, up, y, y.numel(), _BLOCK)
        return y

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _swiglu_backward[(triton.cdiv(gate.numel(), _BLOCK),)](
            grad.contiguous(), gate, up, grad_gate, grad_up, gate.numel(), _BLOCK
        )
        return grad_gate, grad_up

    def choose(self, logits: Tensor, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is known of tokens (n,) drawn by logits (n, V) at temperatures (n,), where 0 counts as 1."""
        rows, vocabulary = logits.shape
        logprobs, entropies, logsums = logits.new_empty(3, rows, dtype=torch.float32)
        _choose[(rows,)](logits, tokens, temperatures, logprobs, entropies, logsums, vocabulary, _WORDS, num_warps=8)
        return logprobs, entropies, logsums

    def choose_backward(
        self, grad_logprobs: Tensor, grad_entropies: Tensor, logits: Tensor, tokens: Tensor, temperatures: Tensor,
        entropies: Tensor, logsums: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of logits, which it takes the place of."""
        rows, vocabulary = logits.shape
        _choose_backward[rows, triton.cdiv(vocabulary, _WORDS)](
            grad_logprobs.contiguous(), grad_entropies.contiguous(), logits, tokens, temperatures, entropies, logsums,
            vocabulary, _WORDS,
        )  # fmt: skip
        return logits
