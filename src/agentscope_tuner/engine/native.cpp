// Attention of new tokens over a key-value cache, read where it lies; the learner's attention along a packed tree, and
// its steps between matrix products.
//
// Eager PyTorch has to copy the caches of a batch together, padded to the longest, before it can multiply; for long
// sequences that costs several times the arithmetic. And it takes a norm for five passes over memory, and ten more for
// its gradient. No headers but the standard ones, so that it compiles in a few seconds anywhere.

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
constexpr int64_t BLOCK = 96;        // about so many queries read them together
#ifdef __AVX512F__
constexpr int TOGETHER = 4;  // rows that are computed at once: as many as there are registers for
#else
constexpr int TOGETHER = 2;
#endif

inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store(float* to, Lanes lanes) { *reinterpret_cast<Lanes*>(to) = lanes; }

// Rows of a matrix, `stride` numbers apart.
struct Rows {
    const float* start;
    int64_t stride;
    const float* operator[](int64_t row) const { return start + row * stride; }
};

template <int N>
void score_rows(const float* a, const float* turned, float* out, int64_t width, int64_t d, int64_t stride) {
    Lanes low[N] = {}, high[N] = {};
    for (int64_t j = 0; j < d; j++) {
        const Lanes first = load(turned + j * TILE), second = load(turned + j * TILE + LANES);
        for (int r = 0; r < N; r++) {
            low[r] += a[r * d + j] * first;
            high[r] += a[r * d + j] * second;
        }
    }
    for (int r = 0; r < N; r++) {
        float tile[TILE];
        store(tile, low[r]);
        store(tile + LANES, high[r]);
        std::memcpy(out + r * stride, tile, width * sizeof(float));
    }
}

// out (m, n), rows of `stride` numbers, becomes a (m, d) times b (n, d) turned round.
void multiply(const float* a, Rows b, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    thread_local std::vector<float> turned;
    turned.resize(d * TILE);
    for (int64_t first = 0; first < n; first += TILE) {
        const int64_t width = std::min(TILE, n - first);
        for (int64_t t = 0; t < width; t++)
            for (int64_t j = 0; j < d; j++) turned[j * TILE + t] = b[first + t][j];
        int64_t i = 0;
        for (; i + TOGETHER <= m; i += TOGETHER)
            score_rows<TOGETHER>(a + i * d, turned.data(), out + i * stride + first, width, d, stride);
        for (; i < m; i++) score_rows<1>(a + i * d, turned.data(), out + i * stride + first, width, d, stride);
    }
}

// The same for one query or a few, which do not pay for turning b round.
void multiply_few(const float* a, Rows b, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    for (int64_t t = 0; t < n; t++) {
        for (int64_t i = 0; i < m; i++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < d; j++) sum += a[i * d + j] * b[t][j];
            out[i * stride + t] = sum;
        }
    }
}

template <int N>
void add_rows(const float* weights, int64_t across, int64_t down, Rows b, float* out, int64_t out_stride, int64_t n,
              int64_t d) {
    const int64_t whole = d / LANES * LANES;
    for (int64_t j = 0; j < whole; j += LANES) {
        Lanes sum[N];
        for (int r = 0; r < N; r++) sum[r] = load(out + r * out_stride + j);
        for (int64_t t = 0; t < n; t++) {
            const Lanes number = load(b[t] + j);
            for (int r = 0; r < N; r++) sum[r] += weights[r * down + t * across] * number;
        }
        for (int r = 0; r < N; r++) store(out + r * out_stride + j, sum[r]);
    }
    for (int r = 0; r < N; r++)
        for (int64_t t = 0; t < n; t++)
            for (int64_t j = whole; j < d; j++) out[r * out_stride + j] += weights[r * down + t * across] * b[t][j];
}

// Adds weights (m, n) times b (n, d) to out (m, d). The weight of (i, t) is at `i * down + t * across`.
void add_product(const float* weights, int64_t across, int64_t down, Rows b, float* out, int64_t out_stride, int64_t m,
                 int64_t n, int64_t d) {
    for (int64_t first = 0; first < n; first += TILE) {
        const int64_t width = std::min(TILE, n - first);
        const Rows tile{b[first], b.stride};
        const float* from = weights + first * across;
        int64_t i = 0;
        for (; i + TOGETHER <= m; i += TOGETHER)
            add_rows<TOGETHER>(from + i * down, across, down, tile, out + i * out_stride, out_stride, width, d);
        for (; i < m; i++) add_rows<1>(from + i * down, across, down, tile, out + i * out_stride, out_stride, width, d);
    }
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

}  // namespace

// q, out: (rows, kv_heads, group, d), queries scaled. keys, values: (slots, kv_heads, capacity, d), of which a row sees
// the first `lengths` of its slot, after the trunk's (kv_heads, trunk, d) if there is one. Neighbouring rows of one slot
// read it together.
extern "C" void attend(const float* q, float* out, const float* keys, const float* values, const float* trunk_keys,
                       const float* trunk_values, const int64_t* slots, const int64_t* lengths, int64_t rows,
                       int64_t kv_heads, int64_t group, int64_t d, int64_t capacity, int64_t trunk) {
    const int64_t most = std::max<int64_t>(1, BLOCK / group);
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
            const int64_t at = (slots[first] * kv_heads + head) * capacity * d, shared = head * trunk * d;
            const int64_t own = *std::max_element(lengths + first, lengths + first + count), width = trunk + own;
            queries.resize(many * d);
            sums.assign(many * d, 0.0f);
            scores.resize(many * width);
            for (int64_t i = 0; i < count; i++)
                std::memcpy(&queries[i * group * d], q + (first + i) * row_size + head * group * d,
                            group * d * sizeof(float));
            const auto score = many < TOGETHER ? multiply_few : multiply;
            score(queries.data(), {trunk_keys + shared, d}, scores.data(), many, trunk, d, width);
            score(queries.data(), {keys + at, d}, scores.data() + trunk, many, own, d, width);
            for (int64_t i = 0; i < many; i++)
                softmax(&scores[i * width], trunk + lengths[first + i / group], width);
            add_product(scores.data(), 1, width, {trunk_values + shared, d}, sums.data(), d, many, trunk, d);
            add_product(scores.data() + trunk, 1, width, {values + at, d}, sums.data(), d, many, own, d);
            for (int64_t i = 0; i < count; i++)
                std::memcpy(out + (first + i) * row_size + head * group * d, &sums[i * group * d],
                            group * d * sizeof(float));
        }
    }
}

namespace {

// Tokens `first` up to `end` of a packed tree; they see some spans of it, and themselves causally.
struct Stretch {
    int64_t first, end;
    std::vector<std::pair<int64_t, int64_t>> path;
    int64_t seen;  // tokens of the path

    int64_t width() const { return seen + end - first; }
};

// Cuts (stretches, 4) rows of first, end, first span and number of spans, with spans (any, 2), to pieces.
std::vector<Stretch> cut(const int64_t* stretches, const int64_t* spans, int64_t count, int64_t group) {
    const int64_t most = std::max<int64_t>(1, BLOCK / group);
    std::vector<Stretch> pieces;
    for (int64_t i = 0; i < count; i++) {
        const int64_t* row = stretches + 4 * i;
        Stretch piece{row[0], row[0], {}, 0};
        for (int64_t s = row[2]; s < row[2] + row[3]; s++) {
            piece.path.emplace_back(spans[2 * s], spans[2 * s + 1]);
            piece.seen += spans[2 * s + 1] - spans[2 * s];
        }
        piece.path.emplace_back(row[0], row[0]);
        for (int64_t first = row[0]; first < row[1]; first += most) {
            piece.seen += first - piece.first;
            piece.path.back().second = piece.first = first;
            piece.end = std::min(first + most, row[1]);
            pieces.push_back(piece);
        }
    }
    return pieces;
}

// Calls `visit(place among the piece's keys, first token, tokens)` for everything that it sees.
template <class Visit>
void each_span(const Stretch& piece, Visit visit) {
    int64_t at = 0;
    for (const auto& [first, end] : piece.path) {
        if (end > first) visit(at, first, end - first);
        at += end - first;
    }
    visit(at, piece.first, piece.end - piece.first);
}

// Copies what belongs to a key-value head between x (tokens, kv_heads, size) and rows (tokens of the piece, size).
void take(const float* x, float* rows, const Stretch& piece, int64_t kv_heads, int64_t head, int64_t size) {
    for (int64_t token = piece.first; token < piece.end; token++)
        std::memcpy(rows + (token - piece.first) * size, x + (token * kv_heads + head) * size, size * sizeof(float));
}
void put(const float* rows, float* x, const Stretch& piece, int64_t kv_heads, int64_t head, int64_t size) {
    for (int64_t token = piece.first; token < piece.end; token++)
        std::memcpy(x + (token * kv_heads + head) * size, rows + (token - piece.first) * size, size * sizeof(float));
}

}  // namespace

// Attention along a packed tree. q, out: (tokens, kv_heads, group, d), queries scaled; k, v: (tokens, kv_heads, d);
// logsums: (tokens, kv_heads, group), for the gradient.
extern "C" void tree_attend(const float* q, const float* k, const float* v, float* out, float* logsums,
                            const int64_t* stretches, const int64_t* spans, int64_t count, int64_t kv_heads,
                            int64_t group, int64_t d) {
    const std::vector<Stretch> pieces = cut(stretches, spans, count, group);
    const int64_t stride = kv_heads * d;
#pragma omp parallel
    {
        std::vector<float> scores, queries, sums, logs;
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < static_cast<int64_t>(pieces.size()) * kv_heads; work++) {
            const Stretch& piece = pieces[work / kv_heads];
            const int64_t head = work % kv_heads, many = (piece.end - piece.first) * group, width = piece.width();
            queries.resize(many * d);
            sums.assign(many * d, 0.0f);
            logs.resize(many);
            scores.resize(many * width);
            take(q, queries.data(), piece, kv_heads, head, group * d);
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                multiply(queries.data(), {k + first * stride + head * d, stride}, &scores[at], many, n, d, width);
            });
            for (int64_t i = 0; i < many; i++) logs[i] = softmax(&scores[i * width], piece.seen + i / group + 1, width);
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                add_product(&scores[at], 1, width, {v + first * stride + head * d, stride}, sums.data(), d, many, n, d);
            });
            put(sums.data(), out, piece, kv_heads, head, group * d);
            put(logs.data(), logsums, piece, kv_heads, head, group);
        }
    }
}

// Gradients of `tree_attend`. grad_k and grad_v: (parts, tokens, kv_heads, d), to be summed by the caller: pieces of
// different parts may add to the same keys at the same time. All gradients are zero at first.
extern "C" void tree_attend_backward(const float* grad, const float* q, const float* k, const float* v,
                                     const float* out, const float* logsums, float* grad_q, float* grad_k,
                                     float* grad_v, const int64_t* stretches, const int64_t* spans, int64_t count,
                                     int64_t tokens, int64_t kv_heads, int64_t group, int64_t d, int64_t parts) {
    const std::vector<Stretch> pieces = cut(stretches, spans, count, group);
    const int64_t stride = kv_heads * d;
#pragma omp parallel for schedule(static, 1)
    for (int64_t work = 0; work < kv_heads * parts; work++) {
        const int64_t head = work % kv_heads, part = work / kv_heads;
        float* const part_k = grad_k + part * tokens * stride + head * d;
        float* const part_v = grad_v + part * tokens * stride + head * d;
        std::vector<float> weights, changes, queries, grads, outs, sums, logs;
        for (size_t number = part; number < pieces.size(); number += parts) {
            const Stretch& piece = pieces[number];
            const int64_t many = (piece.end - piece.first) * group, width = piece.width();
            for (auto* rows : {&queries, &grads, &outs}) rows->resize(many * d);
            sums.assign(many * d, 0.0f);
            logs.resize(many);
            weights.resize(many * width);
            changes.resize(many * width);
            take(q, queries.data(), piece, kv_heads, head, group * d);
            take(grad, grads.data(), piece, kv_heads, head, group * d);
            take(out, outs.data(), piece, kv_heads, head, group * d);
            take(logsums, logs.data(), piece, kv_heads, head, group);
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                const int64_t from = first * stride + head * d;
                multiply(queries.data(), {k + from, stride}, &weights[at], many, n, d, width);
                multiply(grads.data(), {v + from, stride}, &changes[at], many, n, d, width);
            });
            for (int64_t i = 0; i < many; i++) {
                // Softmax's gradient is p * (dp - sum(p * dp)); that sum is the product of an output and its gradient.
                float product = 0;
                for (int64_t j = 0; j < d; j++) product += grads[i * d + j] * outs[i * d + j];
                const int64_t seen = piece.seen + i / group + 1;
                float *p = &weights[i * width], *change = &changes[i * width];
                const float log = logs[i];
#pragma omp simd
                for (int64_t t = 0; t < seen; t++) {
                    p[t] = std::exp(p[t] - log);
                    change[t] = p[t] * (change[t] - product);
                }
                std::fill(p + seen, p + width, 0.0f);
                std::fill(change + seen, change + width, 0.0f);
            }
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                const int64_t to = first * stride;
                add_product(&changes[at], 1, width, {k + to + head * d, stride}, sums.data(), d, many, n, d);
                add_product(&changes[at], width, 1, {queries.data(), d}, part_k + to, stride, n, many, d);
                add_product(&weights[at], width, 1, {grads.data(), d}, part_v + to, stride, n, many, d);
            });
            put(sums.data(), grad_q, piece, kv_heads, head, group * d);
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
