// Products of numbers in bfloat16. Two that lie one after the other along what is summed lie together: rows of pairs are
// (count / 2, width, 2) where rows would be (count, width), with zeros where an odd count ends.
//
// So do some processors want them, which have an instruction for both at once; and others read both without shuffling,
// since a bfloat16 is the upper half of a float. Some have the instruction and are slower with it, so that it is used
// only where it was found to be faster.

#pragma once

#include "common.h"
#include "matrices.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// One by one, as floats; two at a time; or as many as fit into registers that hold matrices.
enum Way : int64_t { ONE_BY_ONE, IN_PAIRS, IN_MATRICES };
extern Way way;

namespace {

#ifdef __AVX512BF16__
constexpr bool HAS_PAIRS = true;
inline Lanes dot(Lanes sum, Words a, Words b) { return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else
constexpr bool HAS_PAIRS = false;
inline Lanes dot(Lanes sum, Words, Words) { return sum; }
#endif

// Rows (m, d) of floats, `stride` apart, rounded: pairs (m, (d + 1) / 2), the last one filled up with zero. There is room
// for more rows, up to a multiple of SIDE.
const uint32_t* pair_rows(const float* rows, int64_t m, int64_t d, int64_t stride, std::vector<uint32_t>& room) {
    const int64_t half = ceil_div(d, 2);
    room.resize(round_up(m, SIDE) * half);
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

// Rows of a matrix in pairs, `stride` pairs apart.
struct PairRows {
    const Bf16* start;
    int64_t stride;
    const Bf16* pairs(int64_t row) const { return start + row / 2 * 2 * stride; }
    Lanes lanes(int64_t row, int64_t j) const {
        const Words both = *reinterpret_cast<const Words*>(pairs(row) + 2 * j);
        return (Lanes)(row % 2 ? both & 0xffff0000u : both << 16);
    }
    float at(int64_t row, int64_t j) const { return number(pairs(row)[2 * j + row % 2]); }
    PairRows from(int64_t row) const { return {pairs(row), stride}; }  // an even one
    void soon(int64_t, int64_t) const {}
};

// The same rows as floats: of what is read more than once, this is faster.
Rows widened(PairRows rows, int64_t count, int64_t width, std::vector<float>& room) {
    room.resize(count * width);
    for (int64_t row = 0; row < count; row++) {
        int64_t j = 0;
        for (; j + LANES <= width; j += LANES) store(&room[row * width + j], rows.lanes(row, j));
        for (; j < width; j++) room[row * width + j] = rows.at(row, j);
    }
    return {room.data(), width};
}

// out (N, width), rows `out_stride` apart, becomes, or grows by, pairs a (N, count) times pairs of a tile (count, TILE),
// whose rows are `stride` apart. For each of these, it asks for what is needed later, `step` pairs further than before.
template <int N>
void dot_rows(const uint32_t* a, int64_t a_stride, const uint32_t* tile, int64_t stride, int64_t count, float* out,
              int64_t out_stride, int64_t width, bool add, const uint32_t* soon, int64_t step) {
    Lanes sums[N][PARTS] = {};  // in registers, as long as no index into it is unknown to the compiler
    for (int r = 0; r < N && add; r++)
        for (int p = 0; p < PARTS; p++) __builtin_prefetch(out + r * out_stride + p * LANES, 1);
    for (int64_t j = 0; j < count; j++) {
        __builtin_prefetch(soon + j * step);
        for (int p = 0; p < PARTS; p++) {
            const Words part = *reinterpret_cast<const Words*>(tile + j * stride + p * LANES);
            for (int r = 0; r < N; r++) sums[r][p] = dot(sums[r][p], Words{} + a[r * a_stride + j], part);
        }
    }
    float narrow[N * TILE];
    const bool whole = width == TILE;
    float* const to = whole ? out : narrow;
    const int64_t to_stride = whole ? out_stride : TILE;
    for (int r = 0; r < N; r++)
        for (int p = 0; p < PARTS; p++) {
            float* const at = to + r * to_stride + p * LANES;
            store(at, add && whole ? load(at) + sums[r][p] : sums[r][p]);
        }
    for (int r = 0; r < N && !whole; r++)
        for (int64_t j = 0; j < width; j++)
            out[r * out_stride + j] = narrow[r * TILE + j] + (add ? out[r * out_stride + j] : 0);
}

// The same for m rows, at most N at once; each is computed alike, whoever its neighbours are. If there is a tile `soon`,
// all rows together ask for it.
template <int N>
void dot_tile(const uint32_t* a, int64_t a_stride, const uint32_t* tile, int64_t stride, int64_t count, float* out,
              int64_t out_stride, int64_t m, int64_t width, bool add, const uint32_t* soon) {
    const int64_t step = soon == nullptr ? 0 : std::max<int64_t>(1, N * TILE / m);
    int64_t i = 0;
    for (; i + N <= m; i += N, soon += step * count)
        dot_rows<N>(a + i * a_stride, a_stride, tile, stride, count, out + i * out_stride, out_stride, width, add, soon,
                    step);
    if constexpr (N > 1)
        if (i < m)
            dot_tile<N - 1>(a + i * a_stride, a_stride, tile, stride, count, out + i * out_stride, out_stride, m - i,
                            width, add, nullptr);
}

// The same, by matrices as far as they go; these ask for what they need themselves.
void multiply_pairs(const uint32_t* a, const uint32_t* tile, int64_t stride, int64_t count, float* out,
                    int64_t out_stride, int64_t m, int64_t width, bool add, const uint32_t* soon = nullptr) {
    const int64_t whole = way == IN_MATRICES ? count / SIDE * SIDE : 0;
    if (whole > 0) multiply_matrices({a, count}, tile, stride, whole, out, out_stride, m, width, add);
    if (whole < count)
        dot_tile<TOGETHER>(a + whole, count, tile + whole * stride, stride, count - whole, out, out_stride, m, width,
                           add || whole > 0, soon);
}

// out (m, n), rows of `stride` numbers, becomes pairs a (m, d / 2) times keys in tiles of pairs (any, d / 2, TILE, 2).
void multiply_tiles(const uint32_t* a, const Bf16* tiles, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    const int64_t half = ceil_div(d, 2);
    const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(tiles);
    for (int64_t first = 0; first < n; first += TILE)
        multiply_pairs(a, pairs + first * half, TILE, half, out + first, stride, m, std::min(TILE, n - first), false);
}

// The same for a (m, d) in floats, which are rounded, unless numbers are multiplied one by one.
void multiply_tiles(const float* a, const Bf16* tiles, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    thread_local std::vector<uint32_t> paired;
    thread_local std::vector<float> wide;
    if (way != ONE_BY_ONE) {
        multiply_tiles(pair_rows(a, m, d, d, paired), tiles, out, m, n, d, stride);
        return;
    }
    for (int64_t first = 0; first < n; first += TILE) {
        const Bf16* const tile = tiles + first * round_up(d, 2);
        const int64_t width = std::min(TILE, n - first);
        if (m > TOGETHER)
            score_tile<TOGETHER>(a, widened({tile, TILE}, d, TILE, wide), out + first, m, width, d, stride);
        else
            score_tile<TOGETHER>(a, PairRows{tile, TILE}, out + first, m, width, d, stride);
    }
}

// The same for a (m, d) in bfloat16, where d is even.
void multiply_tiles(const Bf16* a, const Bf16* tiles, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    thread_local std::vector<uint32_t> room;
    thread_local std::vector<float> wide;
    if (way == ONE_BY_ONE) {
        wide.resize(m * d);
        for (int64_t i = 0; i < m * d; i++) wide[i] = number(a[i]);
        multiply_tiles(wide.data(), tiles, out, m, n, d, stride);
        return;
    }
    const uint32_t* rows = reinterpret_cast<const uint32_t*>(a);
    if (way == IN_MATRICES && m % SIDE != 0) {  // registers are filled, with whatever there is
        room.resize(round_up(m, SIDE) * d / 2);
        std::memcpy(room.data(), a, m * d * sizeof(Bf16));
        rows = room.data();
    }
    multiply_tiles(rows, tiles, out, m, n, d, stride);
}

// Adds weights (m, n), rows of `stride` numbers, times values in pairs (n / 2, d, 2) to out (m, d). If n is odd, what the
// last value is paired with has the weight zero; like all that a cache holds, it is finite.
void add_values(const float* weights, int64_t stride, const Bf16* values, float* out, int64_t m, int64_t n, int64_t d) {
    constexpr int64_t PART = 8 * TILE;  // values that stay in a processor's cache
    thread_local std::vector<uint32_t> paired, rest;
    thread_local std::vector<float> wide;
    for (int64_t first = 0; first < n; first += PART) {
        const int64_t count = std::min(PART, n - first), half = ceil_div(count, 2);
        const Bf16* const part = values + first * d;
        if (way == ONE_BY_ONE) {
            if (m > TOGETHER)
                add_product(weights + first, 1, stride, widened({part, d}, count, d, wide), out, d, m, count, d);
            else
                add_product(weights + first, 1, stride, PairRows{part, d}, out, d, m, count, d);
            continue;
        }
        const uint32_t* const rows = pair_rows(weights + first, m, count, stride, paired);
        const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(part);
        int64_t j = 0;
        for (; j + TILE <= d; j += TILE) multiply_pairs(rows, pairs + j, d, half, out + j, d, m, TILE, true);
        if (j == d) continue;
        rest.assign(half * TILE, 0);  // what is left is read in whole tiles, too
        for (int64_t t = 0; t < half; t++)
            std::memcpy(&rest[t * TILE], pairs + t * d + j, (d - j) * sizeof(uint32_t));
        multiply_pairs(rows, rest.data(), TILE, half, out + j, d, m, d - j, true);
    }
}

}  // namespace
