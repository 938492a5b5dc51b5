// Attention of new tokens over a key-value cache, read where it lies; and the learner's steps between matrix products.
//
// Eager PyTorch has to copy the caches of a batch together, padded to the longest, before it can multiply; for long
// sequences that costs several times the arithmetic. And it takes a norm for five passes over memory, and ten more for
// its gradient. Plain C, so that it compiles in a second without any headers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

// Registers of the machine, however wide they are; aligned as single numbers, so that any address will do.
typedef float Lanes __attribute__((vector_size(64), aligned(4)));
constexpr int64_t LANES = 16;
constexpr int64_t TILE = 2 * LANES;  // keys or values that are read together
constexpr int64_t BLOCK = 16;        // most rows of a sequence that read them together
constexpr int64_t FEW = 6;           // so few queries do not pay for turning the keys round

// Scores of `group` queries (group, d) against keys (n, d), written to rows of `stride` numbers.
void score(const float* __restrict q, const float* __restrict keys, float* __restrict scores, int64_t n, int64_t group,
           int64_t d, int64_t stride) {
    for (int64_t t = 0; t < n; t++) {
        const float* key = keys + t * d;
        for (int64_t g = 0; g < group; g++) {
            const float* query = q + g * d;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < d; j++) sum += query[j] * key[j];
            scores[g * stride + t] = sum;
        }
    }
}

// Adds values (n, d), weighted by rows of `stride` numbers, to `out` (group, d).
void weigh(const float* __restrict weights, const float* __restrict values, float* __restrict out, int64_t n,
           int64_t group, int64_t d, int64_t stride) {
    for (int64_t t = 0; t < n; t++) {
        const float* value = values + t * d;
        for (int64_t g = 0; g < group; g++) {
            const float weight = weights[g * stride + t];
            float* sum = out + g * d;
#pragma omp simd
            for (int64_t j = 0; j < d; j++) sum[j] += weight * value[j];
        }
    }
}

// The same as `score` for many queries: a tile of keys is turned round, so that lanes hold different keys.
void score_many(const float* __restrict q, const float* __restrict keys, float* __restrict scores, int64_t n,
                int64_t queries, int64_t d, int64_t stride, float* __restrict turned) {
    for (int64_t first = 0; first < n; first += TILE) {
        const int64_t width = std::min(TILE, n - first);
        for (int64_t t = 0; t < width; t++)
            for (int64_t j = 0; j < d; j++) turned[j * TILE + t] = keys[(first + t) * d + j];
        for (int64_t i = 0; i < queries; i++) {
            Lanes low = {}, high = {};
            for (int64_t j = 0; j < d; j++) {
                const float number = q[i * d + j];
                low += number * *reinterpret_cast<const Lanes*>(turned + j * TILE);
                high += number * *reinterpret_cast<const Lanes*>(turned + j * TILE + LANES);
            }
            float tile[TILE];
            std::memcpy(tile, &low, sizeof low);
            std::memcpy(tile + LANES, &high, sizeof high);
            std::memcpy(scores + i * stride + first, tile, width * sizeof(float));
        }
    }
}

// The same as `weigh` for many queries, of which query i reads the first `seen[i]` values.
void weigh_many(const float* __restrict weights, const float* __restrict values, float* __restrict out,
                const int64_t* seen, int64_t n, int64_t queries, int64_t d, int64_t stride) {
    const int64_t whole = d / LANES * LANES;
    for (int64_t first = 0; first < n; first += TILE) {
        for (int64_t i = 0; i < queries; i++) {
            const int64_t last = std::min(first + TILE, seen[i]);
            const float* row = weights + i * stride;
            for (int64_t j = 0; j < whole; j += LANES) {
                Lanes even = *reinterpret_cast<const Lanes*>(out + i * d + j), odd = {};
                int64_t t = first;
                for (; t + 1 < last; t += 2) {
                    even += row[t] * *reinterpret_cast<const Lanes*>(values + t * d + j);
                    odd += row[t + 1] * *reinterpret_cast<const Lanes*>(values + (t + 1) * d + j);
                }
                if (t < last) even += row[t] * *reinterpret_cast<const Lanes*>(values + t * d + j);
                *reinterpret_cast<Lanes*>(out + i * d + j) = even + odd;
            }
            for (int64_t j = whole; j < d; j++)
                for (int64_t t = first; t < last; t++) out[i * d + j] += row[t] * values[t * d + j];
        }
    }
}

void softmax(float* __restrict x, int64_t n) {
    float most = x[0];
    for (int64_t i = 1; i < n; i++) most = std::max(most, x[i]);
    float sum = 0;
    for (int64_t i = 0; i < n; i++) {
        x[i] = std::exp(x[i] - most);
        sum += x[i];
    }
    const float scale = 1 / sum;
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

}  // namespace

// q, out: (rows, kv_heads, group, d), queries scaled. keys, values: (slots, kv_heads, capacity, d), of which a row sees
// the first `lengths` of its slot, after the trunk's (kv_heads, trunk, d) if there is one. Neighbouring rows of one slot
// read it together, best in the order of their lengths.
extern "C" void attend(const float* q, float* out, const float* keys, const float* values, const float* trunk_keys,
                       const float* trunk_values, const int64_t* slots, const int64_t* lengths, int64_t rows,
                       int64_t kv_heads, int64_t group, int64_t d, int64_t capacity, int64_t trunk) {
    std::vector<std::pair<int64_t, int64_t>> blocks;  // first row, rows
    for (int64_t row = 0; row < rows; row++) {
        const bool more = row > 0 && slots[row] == slots[row - 1] && blocks.back().second < BLOCK;
        if (more)
            blocks.back().second++;
        else
            blocks.emplace_back(row, 1);
    }
#pragma omp parallel
    {
        std::vector<float> scores, queries, sums, turned(d * TILE);
        std::vector<int64_t> seen;
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < static_cast<int64_t>(blocks.size()) * kv_heads; work++) {
            const auto [first, count] = blocks[work / kv_heads];
            const int64_t head = work % kv_heads, many = count * group;
            const int64_t at = (slots[first] * kv_heads + head) * capacity * d, shared = head * trunk * d;
            queries.resize(many * d);
            sums.assign(many * d, 0.0f);
            seen.resize(many);
            for (int64_t i = 0; i < many; i++) {
                const int64_t row = first + i / group;
                std::memcpy(&queries[i * d], q + ((row * kv_heads + head) * group + i % group) * d, d * sizeof(float));
                seen[i] = lengths[row];
            }
            const int64_t own = *std::max_element(seen.begin(), seen.end()), stride = trunk + own;
            scores.resize(many * stride);
            float* own_scores = scores.data() + trunk;
            if (many < FEW) {
                score(queries.data(), trunk_keys + shared, scores.data(), trunk, many, d, stride);
                score(queries.data(), keys + at, own_scores, own, many, d, stride);
            } else {
                score_many(queries.data(), trunk_keys + shared, scores.data(), trunk, many, d, stride, turned.data());
                score_many(queries.data(), keys + at, own_scores, own, many, d, stride, turned.data());
            }
            for (int64_t i = 0; i < many; i++) softmax(scores.data() + i * stride, trunk + seen[i]);
            if (many < FEW && count == 1) {
                weigh(scores.data(), trunk_values + shared, sums.data(), trunk, many, d, stride);
                weigh(own_scores, values + at, sums.data(), own, many, d, stride);
            } else {
                const std::vector<int64_t> all(many, trunk);
                weigh_many(scores.data(), trunk_values + shared, sums.data(), all.data(), trunk, many, d, stride);
                weigh_many(own_scores, values + at, sums.data(), seen.data(), own, many, d, stride);
            }
            for (int64_t i = 0; i < many; i++) {
                const int64_t row = first + i / group;
                std::memcpy(out + ((row * kv_heads + head) * group + i % group) * d, &sums[i * d], d * sizeof(float));
            }
        }
    }
}

// y = x * scale * weight for rows (rows, d), with scale = 1 / sqrt(mean(x^2) + eps), which is kept for the gradient.
extern "C" void rms_norm(const float* x, const float* weight, float* y, float* scale, int64_t rows, int64_t d,
                         float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float* in = x + row * d;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < d; j++) squares += in[j] * in[j];
        const float by = scale[row] = 1 / std::sqrt(squares / d + eps);
#pragma omp simd
        for (int64_t j = 0; j < d; j++) y[row * d + j] = in[j] * by * weight[j];
    }
}

// Gradients of `rms_norm`. `grad_weight` (d) is summed over pieces of rows, whose order is always the same.
extern "C" void rms_norm_backward(const float* grad, const float* x, const float* weight, const float* scale,
                                  float* grad_x, float* grad_weight, int64_t rows, int64_t d) {
    constexpr int64_t PIECES = 32;
    std::vector<float> sums(PIECES * d, 0.0f);
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < PIECES; piece++) {
        float* __restrict sum = sums.data() + piece * d;
        for (int64_t row = piece * rows / PIECES; row < (piece + 1) * rows / PIECES; row++) {
            const float *in = x + row * d, *g = grad + row * d;
            float product = 0;
#pragma omp simd reduction(+ : product)
            for (int64_t j = 0; j < d; j++) product += g[j] * weight[j] * in[j];
            const float by = scale[row], pull = product * by * by * by / d;
#pragma omp simd
            for (int64_t j = 0; j < d; j++) {
                grad_x[row * d + j] = g[j] * weight[j] * by - in[j] * pull;
                sum[j] += g[j] * in[j] * by;
            }
        }
    }
    std::fill(grad_weight, grad_weight + d, 0.0f);
    for (int64_t piece = 0; piece < PIECES; piece++)
        for (int64_t j = 0; j < d; j++) grad_weight[j] += sums[piece * d + j];
}

// Rotary embedding of x (rows, heads, d) by tables (positions, d); with sign -1 its transpose, which is its gradient.
extern "C" void rotate(const float* x, const float* cosines, const float* sines, const int64_t* positions, float* y,
                       int64_t rows, int64_t heads, int64_t d, float sign) {
    const int64_t half = d / 2;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cosines + positions[row] * d, *s = sines + positions[row] * d;
        for (int64_t head = 0; head < heads; head++) {
            const float* in = x + (row * heads + head) * d;
            float* out = y + (row * heads + head) * d;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                out[j] = in[j] * c[j] - sign * in[j + half] * s[j];
                out[j + half] = in[j + half] * c[j] + sign * in[j] * s[j];
            }
        }
    }
}

// y = silu(gate) * up, number by number.
extern "C" void swiglu(const float* gate, const float* up, float* y, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) y[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
}

extern "C" void swiglu_backward(const float* grad, const float* gate, const float* up, float* grad_gate, float* grad_up,
                                int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const float sigmoid = 1 / (1 + std::exp(-gate[i]));
        grad_up[i] = grad[i] * gate[i] * sigmoid;
        grad_gate[i] = grad[i] * up[i] * sigmoid * (1 + gate[i] * (1 - sigmoid));
    }
}
