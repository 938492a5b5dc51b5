// Products of numbers in bfloat16, two at a time, by processors that have an instruction for it: each lane of a register
// holds two numbers that lie one after the other along what is summed, and sums are floats.
//
// Some processors have the instruction and are slower with it, so that it is used only where it was found to be faster.

#pragma once

#include "common.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

bool in_pairs = false;

#ifdef __AVX512BF16__
constexpr bool HAS_PAIRS = true;
inline Lanes dot(Lanes sum, Words a, Words b) { return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else
constexpr bool HAS_PAIRS = false;
inline Lanes dot(Lanes sum, Words, Words) { return sum; }
#endif

// Rows (m, d) of floats, `stride` apart, rounded: pairs (m, (d + 1) / 2), the last one filled up with zero.
const uint32_t* pair_rows(const float* rows, int64_t m, int64_t d, int64_t stride, std::vector<uint32_t>& room) {
    const int64_t half = (d + 1) / 2;
    room.resize(m * half);
    for (int64_t i = 0; i < m; i++) {
        Bf16* const to = reinterpret_cast<Bf16*>(&room[i * half]);
        const float* const from = rows + i * stride;
        int64_t j = 0;
#ifdef __AVX512BF16__
        for (; j + 2 * LANES <= d; j += 2 * LANES) {
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(from + j + LANES), (__m512)load(from + j));
            std::memcpy(to + j, &both, sizeof(both));
        }
#endif
        for (; j < d; j++) put(to + j, from[j]);
        if (d % 2) to[d] = Bf16{0};
    }
    return room.data();
}

// Pairs (TILE) of two rows of `width` numbers at most TILE; the second may be missing.
inline void pair_up(const Bf16* first, const Bf16* second, int64_t width, uint32_t* to) {
    if (width == TILE && second != nullptr) {
        for (int64_t j = 0; j < TILE; j += LANES) {
            const Words low = __builtin_convertvector(*reinterpret_cast<const Halves*>(first + j), Words);
            const Words high = __builtin_convertvector(*reinterpret_cast<const Halves*>(second + j), Words);
            *reinterpret_cast<Words*>(to + j) = low | high << 16;
        }
        return;
    }
    for (int64_t j = 0; j < TILE; j++) {
        const uint32_t low = j < width ? first[j].bits : 0;
        const uint32_t high = j < width && second != nullptr ? second[j].bits : 0;
        to[j] = low | high << 16;
    }
}

// out (N, width), rows `out_stride` apart, becomes, or grows by, pairs a (N, count) times pairs of a tile (count, TILE).
template <int N>
void dot_rows(const uint32_t* a, int64_t a_stride, const uint32_t* tile, int64_t count, float* out, int64_t out_stride,
              int64_t width, bool add) {
    Lanes low[N] = {}, high[N] = {};
    for (int64_t j = 0; j < count; j++) {
        const Words first = *reinterpret_cast<const Words*>(tile + j * TILE);
        const Words second = *reinterpret_cast<const Words*>(tile + j * TILE + LANES);
        for (int r = 0; r < N; r++) {
            const Words both = Words{} + a[r * a_stride + j];
            low[r] = dot(low[r], both, first);
            high[r] = dot(high[r], both, second);
        }
    }
    for (int r = 0; r < N; r++) {
        float* const to = out + r * out_stride;
        if (width == TILE) {
            store(to, add ? load(to) + low[r] : low[r]);
            store(to + LANES, add ? load(to + LANES) + high[r] : high[r]);
        } else {
            float whole[TILE];
            store(whole, low[r]);
            store(whole + LANES, high[r]);
            for (int64_t j = 0; j < width; j++) to[j] = add ? to[j] + whole[j] : whole[j];
        }
    }
}

// The same for m rows, at most N at once; each is computed alike, whoever its neighbours are.
template <int N>
void dot_tile(const uint32_t* a, int64_t a_stride, const uint32_t* tile, int64_t count, float* out, int64_t out_stride,
              int64_t m, int64_t width, bool add) {
    int64_t i = 0;
    for (; i + N <= m; i += N)
        dot_rows<N>(a + i * a_stride, a_stride, tile, count, out + i * out_stride, out_stride, width, add);
    if constexpr (N > 1)
        if (i < m)
            dot_tile<N - 1>(a + i * a_stride, a_stride, tile, count, out + i * out_stride, out_stride, m - i, width,
                            add);
}

// out (m, n), rows of `stride` numbers, becomes a (m, d) times keys in tiles (any, d, TILE).
void multiply_pairs(const float* a, const Bf16* tiles, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    thread_local std::vector<uint32_t> room, paired;
    const int64_t half = (d + 1) / 2;
    const uint32_t* const rows = pair_rows(a, m, d, d, room);
    paired.resize(half * TILE);
    for (int64_t first = 0; first < n; first += TILE) {
        const Bf16* const tile = tiles + first * d;
        for (int64_t j = 0; j < half; j++)
            pair_up(tile + 2 * j * TILE, 2 * j + 1 < d ? tile + (2 * j + 1) * TILE : nullptr, TILE, &paired[j * TILE]);
        dot_tile<TOGETHER>(rows, half, paired.data(), half, out + first, stride, m, std::min(TILE, n - first), false);
    }
}

// Adds weights (m, n), rows of `stride` numbers, times values (n, d) to out (m, d).
void add_pairs(const float* weights, int64_t stride, const Bf16* values, float* out, int64_t m, int64_t n, int64_t d) {
    constexpr int64_t PART = 8 * TILE;  // values that stay in a processor's cache
    thread_local std::vector<uint32_t> room, paired;
    for (int64_t first = 0; first < n; first += PART) {
        const int64_t count = std::min(PART, n - first), half = (count + 1) / 2;
        const uint32_t* const rows = pair_rows(weights + first, m, count, stride, room);
        paired.resize(half * TILE);
        for (int64_t j = 0; j < d; j += TILE) {
            const int64_t width = std::min(TILE, d - j);
            for (int64_t t = 0; t < half; t++) {
                const Bf16* const value = values + (first + 2 * t) * d + j;
                pair_up(value, 2 * t + 1 < count ? value + d : nullptr, width, &paired[t * TILE]);
            }
            dot_tile<TOGETHER>(rows, half, paired.data(), half, out + j, d, m, width, true);
        }
    }
}

}  // namespace
