"""Compiled steps between matrix products on a GPU, in Triton, which comes with PyTorch's builds for CUDA.

Every token is a row of its own. Between products all is computed in float32, whatever the weights are.

Shapes: N rows, D width, H query heads, K key-value heads, G = H // K, d head size, V vocabulary.
"""
# Triton has no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import os
from typing import Any

# Triton 3.9 tells everybody who has not chosen that the default will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = 1024
"""Numbers of a row that one program takes where rows are cut."""
_TILE = 128
"""Queries of one key-value head that a program attends for, when a sequence has many new tokens."""
_KEYS = 64
"""Keys that it reads at once."""
_SPAN = 512
"""One query at a time leaves most of the GPU idle, so that its keys are shared out among programs: so many to each."""
_LOGITS = 4096
"""Of a row, summed up together: a token is drawn by the sums first, and then among those of one block."""


@triton.jit
def _add_norm(x, y, weight, out, eps, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.load(x + row * WIDTH + at, inside, 0.0)
    if ADD:
        total += tl.load(y + row * WIDTH + at, inside, 0.0).to(tl.float32)
        tl.store(x + row * WIDTH + at, total, inside)
    scale = 1 / tl.sqrt(tl.sum(total * total, 0) / WIDTH + eps)
    by = tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (total * scale * by).to(out.dtype.element_ty), inside)


@triton.jit
def _gate(joined, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(joined + row * 2 * WIDTH + at, inside, 0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * WIDTH + WIDTH + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), inside)


@triton.jit
def _split_heads(
    joined, norm_q, norm_k, cosines, sines, positions, slots, own, queries, keys, values, scaling, eps, head_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """One program for some heads of a row; their numbers are rotated in pairs, one of each half."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    at = tl.arange(0, HALF)[None]
    inside = (head < HEADS + 2 * KV) & (at < SIZE // 2)
    source = joined + (row * (HEADS + 2 * KV) + head) * SIZE + at
    low = tl.load(source, inside, 0.0).to(tl.float32)
    high = tl.load(source + SIZE // 2, inside, 0.0).to(tl.float32)
    is_query, is_value = head < HEADS, head >= HEADS + KV
    if NORMED:
        scale = 1 / tl.sqrt(tl.sum(low * low + high * high, 1) / SIZE + eps)[:, None]
        of_query, of_key = norm_q + at, norm_k + at
        by_low = tl.where(is_query, tl.load(of_query, at < SIZE // 2, 0.0), tl.load(of_key, at < SIZE // 2, 0.0))
        of_query, of_key = of_query + SIZE // 2, of_key + SIZE // 2
        by_high = tl.where(is_query, tl.load(of_query, at < SIZE // 2, 0.0), tl.load(of_key, at < SIZE // 2, 0.0))
        low = tl.where(is_value, low, low * scale * by_low.to(tl.float32))
        high = tl.where(is_value, high, high * scale * by_high.to(tl.float32))
    angle = tl.load(positions + row) * SIZE + at
    cosine = tl.where(is_value, 1.0, tl.load(cosines + angle, at < SIZE // 2, 0.0))
    sine = tl.where(is_value, 0.0, tl.load(sines + angle, at < SIZE // 2, 0.0))
    by = tl.where(is_query, scaling, 1.0)
    first = ((low * cosine - high * sine) * by).to(queries.dtype.element_ty)
    second = ((high * cosine + low * sine) * by).to(queries.dtype.element_ty)
    target = queries + (row * HEADS + head) * SIZE + at
    tl.store(target, first, inside & is_query)
    tl.store(target + SIZE // 2, second, inside & is_query)
    place = (tl.load(slots + row) * KV + (head - HEADS) % KV) * head_stride + tl.load(own + row) * SIZE + at
    is_key = (head >= HEADS) & (head < HEADS + KV)
    tl.store(keys + place, first, inside & is_key)
    tl.store(keys + place + SIZE // 2, second, inside & is_key)
    tl.store(values + place, first, inside & is_value)
    tl.store(values + place + SIZE // 2, second, inside & is_value)


@triton.jit
def _attend(
    queries, keys, values, slots, own, tiles, out, logsums, head_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, SIZE2: tl.constexpr, GROUP2: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program for up to ROWS neighbouring rows of a slot, a key-value head, and a part of the keys.

    As in arXiv:2205.14135 the softmax goes on from one block of keys to the next. With several PARTS, each has an
    output (N, H, PARTS, d) and the logarithm of its sum (N, H, PARTS).
    """
    kv, part = tl.program_id(1), tl.program_id(2)
    if ROWS == 1:
        first, count = tl.program_id(0), 1
    else:
        first, count = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    # Products have at least 16 rows.
    place = tl.arange(0, ROWS * GROUP2 if ROWS * GROUP2 > 16 else 16)
    row, head = first + place // GROUP2, place % GROUP2
    real = (place // GROUP2 < count) & (head < HEADS // KV)
    at = tl.arange(0, SIZE2)
    offset = (row * HEADS + kv * (HEADS // KV) + head).to(tl.int64)
    q = tl.load(queries + offset[:, None] * SIZE + at[None], real[:, None] & (at[None] < SIZE), 0.0)
    last = tl.load(own + row, real, -1)
    begin = part * SPAN
    end = tl.minimum(tl.load(own + first + count - 1).to(tl.int32) + 1, begin + SPAN)
    base = (tl.load(slots + first) * KV + kv) * head_stride
    highest = tl.full(place.shape, -1e30, tl.float32)
    total = tl.zeros(place.shape, tl.float32)
    summed = tl.zeros((place.shape[0], SIZE2), tl.float32)
    for block in range(begin, end, KEYS):
        token = block + tl.arange(0, KEYS)
        where = base + token[:, None] * SIZE + at[None]
        readable = (token[:, None] < end) & (at[None] < SIZE)
        k = tl.load(keys + where, readable, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where((token[None] <= last[:, None]) & (token[None] < end), scores, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row that sees none of these keys has seen others, or is none.
        weights = tl.exp(scores - higher[:, None])
        before = tl.exp(highest - higher)
        total = total * before + tl.sum(weights, 1)
        v = tl.load(values + where, readable, 0.0)
        summed = summed * before[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    target = out + (offset[:, None] * PARTS + part) * SIZE + at[None]
    seen = real[:, None] & (at[None] < SIZE)
    by = tl.where(total > 0, total, 1.0)  # of a part that begins after the row's token, there is nothing
    tl.store(target, (summed / by[:, None]).to(out.dtype.element_ty), seen)
    if PARTS > 1:
        tl.store(logsums + offset * PARTS + part, tl.where(total > 0, highest + tl.log(by), -1e30), real)


@triton.jit
def _join_parts(
    parts, logsums, out, SIZE: tl.constexpr, SIZE2: tl.constexpr, PARTS: tl.constexpr, PARTS2: tl.constexpr
):
    """One program for a query: what its parts attended to, each by its share of the whole sum."""
    query, at, part = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE2), tl.arange(0, PARTS2)
    logsum = tl.load(logsums + query * PARTS + part, part < PARTS, -1e30)
    shares = tl.exp(logsum - tl.max(logsum, 0))
    seen = (part[:, None] < PARTS) & (at[None] < SIZE)
    given = tl.load(parts + (query * PARTS + part[:, None]) * SIZE + at[None], seen, 0.0)
    joined = tl.sum(given * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + query * SIZE + at, joined.to(out.dtype.element_ty), at < SIZE)


@triton.jit
def _sum_blocks(logits, temperatures, highest, sums, WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    word = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    scaled = tl.load(logits + row * WORDS + word, word < WORDS, float("-inf")).to(tl.float32)
    scaled /= tl.where(temperature > 0, temperature, 1.0)
    high = tl.maximum(tl.max(scaled, 0), -1e30)  # all of them may be excluded
    tl.store(highest + row * BLOCKS + block, high)
    tl.store(sums + row * BLOCKS + block, tl.sum(tl.exp(scaled - high), 0))


@triton.jit
def _choose(
    logits, temperatures, uniforms, highest, sums, tokens, logprobs,
    WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS2), tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    highs = tl.load(highest + row * BLOCKS + block, block < BLOCKS, -1e30)
    high = tl.max(highs, 0)
    weights = tl.load(sums + row * BLOCKS + block, block < BLOCKS, 0.0) * tl.exp(highs - high)
    ends = tl.cumsum(weights.to(tl.float64), 0)
    total = tl.max(ends, 0)
    target = tl.load(uniforms + row) * total
    # Rounding may point one past the last that has any weight.
    chosen = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), tl.sum((ends < total).to(tl.int32), 0))
    chosen = tl.where(greedy, tl.argmax(highs, 0), chosen)
    rest = target - tl.max(tl.where(block < chosen, ends, 0.0), 0)
    word = chosen * BLOCK + at
    scaled = tl.load(logits + row * WORDS + word, word < WORDS, float("-inf")).to(tl.float32)
    scaled /= tl.where(greedy, 1.0, temperature)
    ends = tl.cumsum(tl.exp(scaled - high).to(tl.float64), 0)
    last = tl.sum((ends < tl.max(ends, 0)).to(tl.int32), 0)
    token = tl.minimum(tl.sum((ends <= rest).to(tl.int32), 0), last)
    token = tl.where(greedy, tl.argmax(scaled, 0), token)
    value = tl.sum(tl.where(at == token, scaled, 0.0), 0)
    tl.store(tokens + row, (chosen * BLOCK + token).to(tl.int64))
    tl.store(logprobs + row, value - high - tl.log(total).to(tl.float32))


class GpuKernels:
    """What `NativeKernels` computes, for tensors on a GPU and keys and values in no particular order."""

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add y (N, D) to x (N, D) float32 in place; the RMS norm of the sum (N, D), in the type of `weight` (D,)."""
        rows, width = x.shape
        out = torch.empty_like(x, dtype=weight.dtype)
        _add_norm[(rows,)](x, y, weight, out, eps, width, y is not None, triton.next_power_of_2(width))
        return out

    def gate_joined(self, joined: Tensor) -> Tensor:
        """`silu(gate) * up` (N, I) of both side by side (N, 2 I)."""
        rows, width = len(joined), joined.shape[1] // 2
        out = joined.new_empty(rows, width)
        _gate[rows, triton.cdiv(width, _WIDE)](joined, out, width, _WIDE)
        return out

    def split_heads(
        self,
        joined: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        table: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        own: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        eps: float,
    ) -> Tensor:
        """As `NativeKernels.split_heads`, for keys and values (slots, K, capacity, d); returns queries (N, H, d)."""
        kv, capacity, size = keys.shape[1:]
        heads = joined.shape[1] // size - 2 * kv
        queries = joined.new_empty(len(joined), heads, size)
        half = triton.next_power_of_2(size // 2)
        together = min(triton.next_power_of_2(heads + 2 * kv), max(1, _WIDE // half))
        _split_heads[len(joined), triton.cdiv(heads + 2 * kv, together)](
            joined, *(norms or (None, None)), *table, positions, slots, own, queries, keys, values, scaling, eps,
            capacity * size, heads, kv, size, together, half, norms is not None,
        )  # fmt: skip
        return queries

    def rows_together(self, heads: int, kv_heads: int) -> int:
        """How many neighbouring rows of a slot are attended for at once."""
        return max(1, _TILE // int(triton.next_power_of_2(heads // kv_heads)))

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, own: Tensor, tiles: Tensor | None = None
    ) -> Tensor:
        """Outputs (N, H, d) of new tokens, whose keys and values are in the cache.

        Args:
            q: (N, H, d) scaled.
            keys: (slots, K, capacity, d).
            values: alike.
            slots: (N,) in which slot each row's sequence lies, and
            own: (N,) at which place of it the token.
            tiles: (any, 2) first row and number of rows of those that are attended for at once: neighbours in one slot,
                `rows_together` at most. None: every row by itself.
        """
        rows, heads, size = q.shape
        kv, capacity = keys.shape[1:3]
        together, parts, span = self.rows_together(heads, kv), 1, capacity
        if tiles is None and capacity > 2 * _SPAN:
            parts, span = triton.cdiv(capacity, _SPAN), _SPAN
        out, part, logsums = torch.empty_like(q), q, None
        if parts > 1:
            part = q.new_empty(rows, heads, parts, size, dtype=torch.float32)
            logsums = q.new_empty(rows, heads, parts, dtype=torch.float32)
        size2 = max(16, triton.next_power_of_2(size))
        _attend[rows if tiles is None else len(tiles), kv, parts](
            q, keys, values, slots, own, tiles, out if parts == 1 else part, logsums, capacity * size,
            heads, kv, size, size2, triton.next_power_of_2(heads // kv), 1 if tiles is None else together, _KEYS, span,
            parts,
        )  # fmt: skip
        if parts > 1:
            _join_parts[(rows * heads,)](part, logsums, out, size, size2, parts, triton.next_power_of_2(parts))
        return out

    def draw(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (N,) and log-probabilities (N,) for logits (N, V), as `distributions.draw_tokens` without truncation.

        Args:
            logits: of each row.
            temperatures: (N,) float32; 0 is greedy.
            uniforms: (N,) float64 in [0, 1).
        """
        rows, words = logits.shape
        blocks = triton.cdiv(words, _LOGITS)
        highest, sums = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(2))
        tokens: Any = logits.new_empty(rows, dtype=torch.int64)
        logprobs = logits.new_empty(rows, dtype=torch.float32)
        _sum_blocks[rows, blocks](logits, temperatures, highest, sums, words, blocks, _LOGITS)
        _choose[(rows,)](
            logits, temperatures, uniforms, highest, sums, tokens, logprobs, words, blocks,
            triton.next_power_of_2(blocks), _LOGITS,
        )  # fmt: skip
        return tokens, logprobs
