// What the kernels of sampler and learner share: numbers of two types, registers full of them, and small products.
//
// No headers but the standard ones, so that it compiles in a few seconds anywhere.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

// Registers of the machine, however wide they are; aligned as single numbers, so that any address will do.
typedef float Lanes __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));
constexpr int64_t LANES = 16;
constexpr int64_t TILE = 2 * LANES;  // keys or values that are read together
constexpr int64_t BLOCK = 96;        // about so many queries read them together
#ifdef __AVX512F__
constexpr int TOGETHER = 8;  // rows that are computed at once: as many as there are registers for
#else
constexpr int TOGETHER = 2;
#endif

struct Bf16 {
    uint16_t bits;
};

inline float number(float x) { return x; }
inline float number(Bf16 x) {
    const uint32_t word = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &word, sizeof(out));
    return out;
}
inline void put(float* to, float x) { *to = x; }
inline void put(Bf16* to, float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof(word));
    to->bits = (word + 0x7fff + (word >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store(float* to, Lanes lanes) { *reinterpret_cast<Lanes*>(to) = lanes; }

// Rows of a matrix, `stride` numbers apart.
struct Rows {
    const float* start;
    int64_t stride;
    const float* operator[](int64_t row) const { return start + row * stride; }
    Lanes lanes(int64_t row, int64_t j) const { return load((*this)[row] + j); }
    float at(int64_t row, int64_t j) const { return (*this)[row][j]; }
    Rows from(int64_t row) const { return {(*this)[row], stride}; }
};

// out (N, width) becomes a (N, d) times a tile of keys (d, TILE).
template <int N, class B>
void score_rows(const float* a, B tile, float* out, int64_t width, int64_t d, int64_t stride) {
    Lanes low[N] = {}, high[N] = {};
    for (int64_t j = 0; j < d; j++) {
        const Lanes first = tile.lanes(j, 0), second = tile.lanes(j, LANES);
        for (int r = 0; r < N; r++) {
            low[r] += a[r * d + j] * first;
            high[r] += a[r * d + j] * second;
        }
    }
    for (int r = 0; r < N; r++) {
        if (width == TILE) {
            store(out + r * stride, low[r]);
            store(out + r * stride + LANES, high[r]);
        } else {
            float whole[TILE];
            store(whole, low[r]);
            store(whole + LANES, high[r]);
            std::memcpy(out + r * stride, whole, width * sizeof(float));
        }
    }
}

// The same for m rows, at most N at once; each is computed alike, whoever its neighbours are.
template <int N, class B>
void score_tile(const float* a, B tile, float* out, int64_t m, int64_t width, int64_t d, int64_t stride) {
    int64_t i = 0;
    for (; i + N <= m; i += N) score_rows<N>(a + i * d, tile, out + i * stride, width, d, stride);
    if constexpr (N > 1)
        if (i < m) score_tile<N - 1>(a + i * d, tile, out + i * stride, m - i, width, d, stride);
}

template <int N, class B>
void add_rows(const float* weights, int64_t across, int64_t down, B b, float* out, int64_t out_stride, int64_t n,
              int64_t d) {
    int64_t j = 0;
    for (; j + TILE <= d; j += TILE) {
        Lanes low[N], high[N];
        for (int r = 0; r < N; r++) {
            low[r] = load(out + r * out_stride + j);
            high[r] = load(out + r * out_stride + j + LANES);
        }
        for (int64_t t = 0; t < n; t++) {
            const Lanes first = b.lanes(t, j), second = b.lanes(t, j + LANES);
            for (int r = 0; r < N; r++) {
                low[r] += weights[r * down + t * across] * first;
                high[r] += weights[r * down + t * across] * second;
            }
        }
        for (int r = 0; r < N; r++) {
            store(out + r * out_stride + j, low[r]);
            store(out + r * out_stride + j + LANES, high[r]);
        }
    }
    for (int r = 0; r < N; r++)
        for (int64_t t = 0; t < n; t++)
            for (int64_t rest = j; rest < d; rest++)
                out[r * out_stride + rest] += weights[r * down + t * across] * b.at(t, rest);
}

template <int N, class B>
void add_tile(const float* weights, int64_t across, int64_t down, B b, float* out, int64_t out_stride, int64_t m,
              int64_t n, int64_t d) {
    int64_t i = 0;
    for (; i + N <= m; i += N)
        add_rows<N>(weights + i * down, across, down, b, out + i * out_stride, out_stride, n, d);
    if constexpr (N > 1)
        if (i < m)
            add_tile<N - 1>(weights + i * down, across, down, b, out + i * out_stride, out_stride, m - i, n, d);
}

// Adds weights (m, n) times b (n, d) to out (m, d). The weight of (i, t) is at `i * down + t * across`.
template <class B>
void add_product(const float* weights, int64_t across, int64_t down, B b, float* out, int64_t out_stride, int64_t m,
                 int64_t n, int64_t d) {
    for (int64_t first = 0; first < n; first += TILE)
        add_tile<TOGETHER>(weights + first * across, across, down, b.from(first), out, out_stride, m,
                           std::min(TILE, n - first), d);
}

// Softmax of the first n numbers, zero for the others up to `width`; returns the logarithm of the sum of exponentials.
float softmax(float* __restrict x, int64_t n, int64_t width) {
    float most = x[0];
    for (int64_t i = 1; i < n; i++) most = std::max(most, x[i]);
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        x[i] = std::exp(x[i] - most);
        sum += x[i];
    }
    const float scale = 1 / sum;
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
    std::fill(x + n, x + width, 0.0f);
    return most + std::log(sum);
}

// Rotary embedding of one head; with sign -1 its transpose.
inline void turn(const float* in, const float* cosines, const float* sines, float* out, int64_t half, float sign) {
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        out[j] = in[j] * cosines[j] - sign * in[j + half] * sines[j];
        out[j + half] = in[j + half] * cosines[j] + sign * in[j] * sines[j];
    }
}

// A gate as it is used: below, its sigmoid is 0, but exp(-x) must not be infinite, by which fast division, vectorized,
// does not give 0 but no number.
inline float bounded(float gate) { return std::max(gate, -80.0f); }

inline float silu(float gate) {
    const float x = bounded(gate);
    return x / (1 + std::exp(-x));
}

}  // namespace
