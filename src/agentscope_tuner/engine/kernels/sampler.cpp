// The sampler's steps between matrix products, with attention over a key-value cache read where it lies.
//
// Eager PyTorch has to copy the caches of a batch together, padded to the longest, before it can multiply, and takes
// every step in many passes over memory.
//
// The functions come for two types of numbers: `_float`, and `_bf16`, the upper half of a float. All compute in floats.

#include "common.h"

namespace {

// out (m, n), rows of `stride` numbers, becomes a (m, d) times keys in tiles (any, d, TILE).
template <class T>
void multiply_tiles(const float* a, const T* tiles, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    for (int64_t first = 0; first < n; first += TILE)
        score_tile(a, tiles + first * d, out + first, m, std::min(TILE, n - first), d, stride);
}

// Keys in tiles (slots, kv_heads, capacity / TILE, d, TILE), values (slots, kv_heads, capacity, d).
template <class T>
struct Cache {
    T *keys, *values;
    int64_t kv_heads, capacity, d;

    int64_t at(int64_t slot, int64_t head) const { return (slot * kv_heads + head) * capacity * d; }
};

// A prefix of `length` tokens that rows see first, laid out like a slot.
struct Trunk {
    int64_t keys, values, length;
};

template <class T>
void attend_rows(const float* q, T* out, Cache<T> cache, const Trunk* trunks, const int64_t* trunk_of,
                 const int64_t* slots, const int64_t* lengths, int64_t rows, int64_t group) {
    const int64_t d = cache.d, kv_heads = cache.kv_heads, most = std::max<int64_t>(1, BLOCK / group);
    std::vector<std::pair<int64_t, int64_t>> blocks;  // first row, rows
    for (int64_t row = 0; row < rows; row++) {
        if (row > 0 && slots[row] == slots[row - 1] && blocks.back().second < most)
            blocks.back().second++;
        else
            blocks.emplace_back(row, 1);
    }
    const int64_t row_size = kv_heads * group * d;
#pragma omp parallel
    {
        std::vector<float> scores, queries, sums;
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < static_cast<int64_t>(blocks.size()) * kv_heads; work++) {
            const auto [first, count] = blocks[work / kv_heads];
            const int64_t head = work % kv_heads, many = count * group;
            const Trunk trunk = trunk_of[first] < 0 ? Trunk{0, 0, 0} : trunks[trunk_of[first]];
            const int64_t tiled = (trunk.length + TILE - 1) / TILE * TILE;
            const T* const trunk_keys = reinterpret_cast<const T*>(trunk.keys) + head * tiled * d;
            const T* const trunk_values = reinterpret_cast<const T*>(trunk.values) + head * trunk.length * d;
            const int64_t own = *std::max_element(lengths + first, lengths + first + count);
            const int64_t width = trunk.length + own, at = cache.at(slots[first], head);
            queries.resize(many * d);
            sums.assign(many * d, 0.0f);
            scores.resize(many * width);
            for (int64_t i = 0; i < count; i++)
                std::memcpy(&queries[i * group * d], q + (first + i) * row_size + head * group * d,
                            group * d * sizeof(float));
            multiply_tiles(queries.data(), trunk_keys, scores.data(), many, trunk.length, d, width);
            multiply_tiles(queries.data(), cache.keys + at, scores.data() + trunk.length, many, own, d, width);
            for (int64_t i = 0; i < many; i++)
                softmax(&scores[i * width], trunk.length + lengths[first + i / group], width);
            add_product(scores.data(), 1, width, Rows<T>{trunk_values, d}, sums.data(), d, many, trunk.length, d);
            add_product(scores.data() + trunk.length, 1, width, Rows<T>{cache.values + at, d}, sums.data(), d, many,
                        own, d);
            for (int64_t i = 0; i < count; i++) {
                T* to = out + (first + i) * row_size + head * group * d;
                for (int64_t j = 0; j < group * d; j++) put(to + j, sums[i * group * d + j]);
            }
        }
    }
}

// x += y (where there is one), and out = x / sqrt(mean(x^2) + eps) * weight, for rows (rows, d). The sum stays a float.
template <class T>
void add_norm(float* x, const T* y, const T* weight, T* out, int64_t rows, int64_t d, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float* sum = x + row * d;
        float squares = 0;
        if (y != nullptr) {
            const T* change = y + row * d;
#pragma omp simd reduction(+ : squares)
            for (int64_t j = 0; j < d; j++) {
                sum[j] += number(change[j]);
                squares += sum[j] * sum[j];
            }
        } else {
#pragma omp simd reduction(+ : squares)
            for (int64_t j = 0; j < d; j++) squares += sum[j] * sum[j];
        }
        const float by = 1 / std::sqrt(squares / d + eps);
        T* to = out + row * d;
#pragma omp simd
        for (int64_t j = 0; j < d; j++) put(to + j, sum[j] * by * number(weight[j]));
    }
}

// Splits joined projections (rows, heads + 2 kv_heads, d): queries, normed and rotated and scaled, go to q (rows, heads,
// d); keys, normed and rotated, and values go to place `own` of each row's slot. Norms may be missing.
template <class T>
void split_heads(const T* joined, const T* q_norm, const T* k_norm, const float* cosines, const float* sines,
                 const int64_t* positions, const int64_t* slots, const int64_t* own, float* q, Cache<T> cache,
                 int64_t rows, int64_t heads, float scaling, float eps) {
    const int64_t d = cache.d, half = d / 2, kv_heads = cache.kv_heads;
#pragma omp parallel
    {
        std::vector<float> in(d), turned(d);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T* from = joined + row * (heads + 2 * kv_heads) * d;
            const float *c = cosines + positions[row] * d, *s = sines + positions[row] * d;
            for (int64_t head = 0; head < heads + kv_heads; head++, from += d) {
                const T* norm = head < heads ? q_norm : k_norm;
                for (int64_t j = 0; j < d; j++) in[j] = number(from[j]);
                float by = head < heads ? scaling : 1;
                if (norm != nullptr) {
                    float squares = 0;
                    for (int64_t j = 0; j < d; j++) squares += in[j] * in[j];
                    by /= std::sqrt(squares / d + eps);
                    for (int64_t j = 0; j < d; j++) in[j] *= number(norm[j]);
                }
                for (int64_t j = 0; j < d; j++) in[j] *= by;
                turn(in.data(), c, s, turned.data(), half, 1);
                if (head < heads) {
                    std::memcpy(q + (row * heads + head) * d, turned.data(), d * sizeof(float));
                } else {
                    T* to = cache.keys + cache.at(slots[row], head - heads) + own[row] / TILE * TILE * d;
                    for (int64_t j = 0; j < d; j++) put(to + j * TILE + own[row] % TILE, turned[j]);
                }
            }
            for (int64_t head = 0; head < kv_heads; head++, from += d)
                std::memcpy(cache.values + cache.at(slots[row], head) + own[row] * d, from, d * sizeof(T));
        }
    }
}

// out (rows, d) = silu(gate) * up, which lie side by side in joined (rows, 2 d).
template <class T>
void gate_joined(const T* joined, T* out, int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = joined + row * 2 * d, *up = gate + d;
        T* to = out + row * d;
#pragma omp simd
        for (int64_t j = 0; j < d; j++) put(to + j, silu(number(gate[j])) * number(up[j]));
    }
}

// A token of each row of logits (rows, vocabulary), by inverting the cumulative distribution at `uniforms`, and its
// log-probability; at temperature 0 the likeliest one, and its log-probability at temperature 1.
template <class T>
void draw_rows(const T* logits, const float* temperatures, const double* uniforms, int64_t* tokens, float* logprobs,
               int64_t rows, int64_t vocabulary) {
    constexpr int64_t PART = 256;  // two levels keep the sums short: which part of the vocabulary, then which token
#pragma omp parallel
    {
        std::vector<double> sums((vocabulary + PART - 1) / PART);
        float weights[PART];
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++) {
            const T* x = logits + row * vocabulary;
            float most = number(x[0]);
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < vocabulary; j++) most = std::max(most, number(x[j]));
            const float by = temperatures[row] > 0 ? 1 / temperatures[row] : 1;
            double total = 0;
            for (size_t part = 0; part < sums.size(); part++) {
                const int64_t first = part * PART, end = std::min(first + PART, vocabulary);
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t j = first; j < end; j++) sum += std::exp((number(x[j]) - most) * by);
                total += sums[part] = sum;
            }
            int64_t token = 0;
            if (temperatures[row] > 0) {
                double rest = uniforms[row] * total;
                size_t part = 0, last = 0;
                for (; part < sums.size() && rest >= sums[part]; part++) {
                    rest -= sums[part];
                    if (sums[part] > 0) last = part;
                }
                if (part == sums.size()) {  // rounding may point one past the end
                    part = last;
                    rest = sums[last];
                }
                const int64_t first = part * PART, n = std::min(PART, vocabulary - first);
                for (int64_t j = 0; j < n; j++) weights[j] = std::exp((number(x[first + j]) - most) * by);
                for (int64_t j = 0; j < n && (weights[j] == 0 || rest >= 0); j++) {
                    if (weights[j] > 0) token = first + j;
                    rest -= weights[j];
                }
            } else {
                while (number(x[token]) != most) token++;
            }
            tokens[row] = token;
            logprobs[row] = (number(x[token]) - most) * by - std::log(total);
        }
    }
}

}  // namespace

#define SAMPLER(T, NAME)                                                                                               \
    extern "C" void attend_##NAME(const float* q, T* out, T* keys, T* values, const int64_t* trunks,                   \
                                  const int64_t* trunk_of, const int64_t* slots, const int64_t* lengths, int64_t rows, \
                                  int64_t kv_heads, int64_t group, int64_t d, int64_t capacity) {                      \
        attend_rows<T>(q, out, {keys, values, kv_heads, capacity, d}, reinterpret_cast<const Trunk*>(trunks),          \
                       trunk_of, slots, lengths, rows, group);                                                         \
    }                                                                                                                  \
    extern "C" void add_norm_##NAME(float* x, const T* y, const T* weight, T* out, int64_t rows, int64_t d,            \
                                    float eps) {                                                                       \
        add_norm<T>(x, y, weight, out, rows, d, eps);                                                                  \
    }                                                                                                                  \
    extern "C" void split_heads_##NAME(const T* joined, const T* q_norm, const T* k_norm, const float* cosines,        \
                                       const float* sines, const int64_t* positions, const int64_t* slots,             \
                                       const int64_t* own, float* q, T* keys, T* values, int64_t rows, int64_t heads,  \
                                       int64_t kv_heads, int64_t d, int64_t capacity, float scaling, float eps) {      \
        split_heads<T>(joined, q_norm, k_norm, cosines, sines, positions, slots, own, q,                               \
                       {keys, values, kv_heads, capacity, d}, rows, heads, scaling, eps);                              \
    }                                                                                                                  \
    extern "C" void gate_joined_##NAME(const T* joined, T* out, int64_t rows, int64_t d) {                             \
        gate_joined<T>(joined, out, rows, d);                                                                          \
    }                                                                                                                  \
    extern "C" void draw_##NAME(const T* logits, const float* temperatures, const double* uniforms, int64_t* tokens,   \
                                float* logprobs, int64_t rows, int64_t vocabulary) {                                   \
        draw_rows<T>(logits, temperatures, uniforms, tokens, logprobs, rows, vocabulary);                              \
    }
SAMPLER(float, float)
SAMPLER(Bf16, bf16)
