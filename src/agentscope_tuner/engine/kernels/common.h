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

// Registers of the machine, and no wider than those: a compiler splits wider ones by way of memory, which can take fifty
// times as long. They are aligned as single numbers, so that any address will do. Of all registers, SUMS are for sums,
// of at most TOGETHER rows.
#if defined(__AVX512F__)
constexpr int LANES = 16, SUMS = 16, TOGETHER = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, SUMS = 12, TOGETHER = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, SUMS = 24, TOGETHER = 3;
#else
constexpr int LANES = 4, SUMS = 8, TOGETHER = 1;
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
constexpr int64_t TILE = 32;          // keys or values that are read together
constexpr int PARTS = TILE / LANES;   // registers that these take
constexpr int64_t BLOCK = 96;         // about so many queries read them together

constexpr int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }
constexpr int64_t round_up(int64_t count, int64_t size) { return ceil_div(count, size) * size; }

// How many registers of a tile's row are multiplied at once by numbers of so many other rows.
constexpr int abreast(int rows) {
    int parts = PARTS;
    while (parts > 1 && rows * parts > SUMS) parts /= 2;
    return parts;
}

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

// The same in a register: a compiler may prefer to load it again for every instruction that it is an operand of, which
// takes longer than these.
inline Lanes held(Lanes lanes) {
#if defined(__AVX512F__)
    asm("" : "+v"(lanes));
#elif defined(__SSE2__)
    asm("" : "+x"(lanes));
#endif
    return lanes;
}

// Rows of a matrix, `stride` numbers apart.
struct Rows {
    const float* start;
    int64_t stride;
    const float* operator[](int64_t row) const { return start + row * stride; }
    Lanes lanes(int64_t row, int64_t j) const { return load((*this)[row] + j); }
    float at(int64_t row, int64_t j) const { return (*this)[row][j]; }
    Rows from(int64_t row) const { return {(*this)[row], stride}; }
    void soon(int64_t, int64_t) const {}
};

// A tile (any, TILE) among others that are read one after the other.
struct Tile {
    const float* start;
    Lanes lanes(int64_t row, int64_t j) const { return load(start + row * TILE + j); }
    // Asks for what is needed some rows after this one, here or in the next tile: otherwise the first rows that are
    // multiplied by a tile wait for it.
    void soon(int64_t row, int64_t j) const { __builtin_prefetch(start + (row + 64) * TILE + j); }
};

// Writes the first `width` numbers of a row that was summed in registers, or as many as these hold.
template <int COUNT>
void store_row(float* to, const Lanes (&sums)[COUNT], int64_t width) {
    if (width >= COUNT * LANES) {
        for (int p = 0; p < COUNT; p++) store(to + p * LANES, sums[p]);
    } else {
        float whole[COUNT * LANES];
        for (int p = 0; p < COUNT; p++) store(whole + p * LANES, sums[p]);
        std::memcpy(to, whole, width * sizeof(float));
    }
}

// Adds the number of each row times each part. The fewer of both stay in registers.
template <int N, int COUNT, class Number, class Part>
inline void add_outer(Lanes (&sums)[N][COUNT], Number number_of, Part part_of) {
    if constexpr (N <= COUNT) {
        Lanes numbers[N];
        for (int r = 0; r < N; r++) numbers[r] = held(Lanes{} + number_of(r));
        for (int p = 0; p < COUNT; p++) {
            const Lanes part = held(part_of(p));
            for (int r = 0; r < N; r++) sums[r][p] += numbers[r] * part;
        }
    } else {
        Lanes parts[COUNT];
        for (int p = 0; p < COUNT; p++) parts[p] = held(part_of(p));
        for (int r = 0; r < N; r++)
            for (int p = 0; p < COUNT; p++) sums[r][p] += number_of(r) * parts[p];
    }
}

// out (N, width) becomes a (N, d) times a tile of keys (d, TILE).
template <int N, class B>
void score_rows(const float* a, B tile, float* out, int64_t width, int64_t d, int64_t stride) {
    constexpr int ABREAST = abreast(N);
    for (int64_t first = 0; first < width; first += ABREAST * LANES) {
        Lanes sums[N][ABREAST] = {};
        for (int64_t j = 0; j < d; j++) {
            tile.soon(j, first);
            add_outer(sums, [&](int r) { return a[r * d + j]; }, [&](int p) { return tile.lanes(j, first + p * LANES); });
        }
        for (int r = 0; r < N; r++) store_row(out + r * stride + first, sums[r], width - first);
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

// out (m, n), rows of `stride` numbers, becomes a (m, d) times keys in tiles (any, d, TILE).
void multiply_tiles(const float* a, const float* tiles, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    for (int64_t first = 0; first < n; first += TILE)
        score_tile<TOGETHER>(a, Tile{tiles + first * d}, out + first, m, std::min(TILE, n - first), d, stride);
}

template <int N, class B>
void add_rows(const float* weights, int64_t across, int64_t down, B b, float* out, int64_t out_stride, int64_t n,
              int64_t d) {
    constexpr int ABREAST = abreast(N);
    constexpr int64_t STEP = ABREAST * LANES;
    int64_t j = 0;
    for (; j + STEP <= d; j += STEP) {
        Lanes sums[N][ABREAST];
        for (int r = 0; r < N; r++)
            for (int p = 0; p < ABREAST; p++) sums[r][p] = load(out + r * out_stride + j + p * LANES);
        for (int64_t t = 0; t < n; t++)
            add_outer(sums, [&](int r) { return weights[r * down + t * across]; },
                      [&](int p) { return b.lanes(t, j + p * LANES); });
        for (int r = 0; r < N; r++) store_row(out + r * out_stride + j, sums[r], STEP);
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

// x, or -75 where it is less: of less than that, an exponential is as good as zero. Denormal numbers, which begin at -87,
// are not made by `exponential`, and some processors take ten times as long to multiply by them, which a softmax's are if
// their sum is divided by. A trained model has many of them, of scores and of logits that lie far apart. It goes by bits,
// since what is no number has to stay so; and without a choice, which a compiler may take for branches, in one of which
// nothing is bounded.
inline float bounded_below(float x) {
    constexpr uint32_t LEAST = 0xc2960000u, INFINITE = 0xff800000u;  // -75 and minus infinity
    uint32_t word;
    std::memcpy(&word, &x, sizeof(word));
    const uint32_t less = word - LEAST <= INFINITE - LEAST;
    word ^= (word ^ LEAST) & (0 - less);
    std::memcpy(&x, &word, sizeof(word));
    return x;
}

// a * b + c, rounded once where the machine can: otherwise `-ffast-math` would join constants that are apart for a reason.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Of at most 88: 2^n times the exponential of what is left over, which is at most ln(2) / 2 away from 0. The coefficients
// are those of Cephes' expf. A compiler vectorizes this in place: calls of a library's take up to a third longer, and not
// every library has one for whole registers.
inline float exponential(float x) {
    x = bounded_below(x);
    const float n = __builtin_rintf(x * 1.44269504f);
    const float rest = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));  // ln(2), in two parts
    float sum = fused(rest, 1.9875691500e-4f, 1.3981999507e-3f);
    sum = fused(rest, sum, 8.3334519073e-3f);
    sum = fused(rest, sum, 4.1665795894e-2f);
    sum = fused(rest, sum, 1.6666665459e-1f);
    sum = fused(rest, sum, 5.0000001201e-1f);
    sum = fused(rest * rest, sum, rest) + 1;
    const uint32_t word = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &word, sizeof(power));
    return sum * power;
}

// Softmax of the first n numbers, zero for the others up to `width`; returns what is subtracted from them, and what their
// exponentials are multiplied by.
std::pair<float, float> softmax(float* __restrict x, int64_t n, int64_t width) {
    float most = x[0];
    for (int64_t i = 1; i < n; i++) most = std::max(most, x[i]);
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        x[i] = exponential(x[i] - most);
        sum += x[i];
    }
    const float scale = 1 / sum;
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
    std::fill(x + n, x + width, 0.0f);
    return {most, scale};
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
    return x / (1 + exponential(-x));
}

// Gradients of `silu(gate) * up`, by that of it.
template <class T>
inline void gate_backward(float grad, float gate, float up, T* grad_gate, T* grad_up) {
    const float x = bounded(gate), e = exponential(-x), sigmoid = 1 / (1 + e);
    put(grad_up, grad * x * sigmoid);
    // e * sigmoid = 1 - sigmoid, but not rounded
    put(grad_gate, grad * up * sigmoid * (1 + x * e * sigmoid));
}

// Gradients of a row's norm `in * by * weight`, where `by` is the inverse root of its mean square, by that of it: of
// the row, to which `rest` is added if there is any, and, added to `grad_weight`, of the weight.
template <class T>
inline void norm_backward(const T* grad, const float* rest, const float* in, const float* weight, float by,
                          float* grad_in, float* __restrict grad_weight, int64_t d) {
    float product = 0;
#pragma omp simd reduction(+ : product)
    for (int64_t j = 0; j < d; j++) product += number(grad[j]) * weight[j] * in[j];
    const float pull = product * by * by * by / d;
#pragma omp simd
    for (int64_t j = 0; j < d; j++) {
        grad_in[j] = number(grad[j]) * weight[j] * by - in[j] * pull;
        grad_weight[j] += number(grad[j]) * in[j] * by;
    }
    if (rest == nullptr) return;
#pragma omp simd
    for (int64_t j = 0; j < d; j++) grad_in[j] += rest[j];
}

}  // namespace
