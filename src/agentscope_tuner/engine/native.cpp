// The sampler's steps between matrix products, with attention over a key-value cache read where it lies; the learner's
// attention along a packed tree, and its steps between matrix products.
//
// Eager PyTorch has to copy the caches of a batch together, padded to the longest, before it can multiply, and takes
// every step in many passes over memory. No headers but the standard ones, so that it compiles in a few seconds anywhere.
//
// The sampler's functions come for two types of numbers: `_float`, and `_bf16`, the upper half of a float. All of them
// compute in floats.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

// Registers of the machine, however wide they are; aligned as single numbers, so that any address will do.
typedef float Lanes __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));
constexpr int64_t LANES = 16;
constexpr int64_t TILE = 2 * LANES;  // keys or values that are read together
constexpr int64_t BLOCK = 96;        // about so many queries read them together
#ifdef __AVX512F__
constexpr int TOGETHER = 4;  // rows that are computed at once: as many as there are registers for
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
inline Lanes load(const Bf16* from) {
    return (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16);
}
inline void store(float* to, Lanes lanes) { *reinterpret_cast<Lanes*>(to) = lanes; }

// Rows of a matrix, `stride` numbers apart.
template <class T>
struct Rows {
    const T* start;
    int64_t stride;
    const T* operator[](int64_t row) const { return start + row * stride; }
};

// out (N, width) becomes a (N, d) times a tile of keys (d, TILE).
template <int N, class T>
void score_rows(const float* a, const T* tile, float* out, int64_t width, int64_t d, int64_t stride) {
    Lanes low[N] = {}, high[N] = {};
    for (int64_t j = 0; j < d; j++) {
        const Lanes first = load(tile + j * TILE), second = load(tile + j * TILE + LANES);
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

template <class T>
void score_tile(const float* a, const T* tile, float* out, int64_t m, int64_t width, int64_t d, int64_t stride) {
    int64_t i = 0;
    for (; i + TOGETHER <= m; i += TOGETHER)
        score_rows<TOGETHER>(a + i * d, tile, out + i * stride, width, d, stride);
    switch (m - i) {
        case 3: score_rows<3>(a + i * d, tile, out + i * stride, width, d, stride); break;
        case 2: score_rows<2>(a + i * d, tile, out + i * stride, width, d, stride); break;
        case 1: score_rows<1>(a + i * d, tile, out + i * stride, width, d, stride); break;
    }
}

// out (m, n), rows of `stride` numbers, becomes a (m, d) times keys in tiles (any, d, TILE).
template <class T>
void multiply_tiles(const float* a, const T* tiles, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    for (int64_t first = 0; first < n; first += TILE)
        score_tile(a, tiles + first * d, out + first, m, std::min(TILE, n - first), d, stride);
}

// The same for b (n, d), which is turned round tile by tile.
void multiply(const float* a, Rows<float> b, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    thread_local std::vector<float> turned;
    turned.resize(d * TILE);
    for (int64_t first = 0; first < n; first += TILE) {
        const int64_t width = std::min(TILE, n - first);
        for (int64_t t = 0; t < width; t++)
            for (int64_t j = 0; j < d; j++) turned[j * TILE + t] = b[first + t][j];
        score_tile(a, turned.data(), out + first, m, width, d, stride);
    }
}

template <int N, class T>
void add_rows(const float* weights, int64_t across, int64_t down, Rows<T> b, float* out, int64_t out_stride, int64_t n,
              int64_t d) {
    int64_t j = 0;
    for (; j + TILE <= d; j += TILE) {
        Lanes low[N], high[N];
        for (int r = 0; r < N; r++) {
            low[r] = load(out + r * out_stride + j);
            high[r] = load(out + r * out_stride + j + LANES);
        }
        for (int64_t t = 0; t < n; t++) {
            const Lanes first = load(b[t] + j), second = load(b[t] + j + LANES);
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
                out[r * out_stride + rest] += weights[r * down + t * across] * number(b[t][rest]);
}

// Adds weights (m, n) times b (n, d) to out (m, d). The weight of (i, t) is at `i * down + t * across`.
template <class T>
void add_product(const float* weights, int64_t across, int64_t down, Rows<T> b, float* out, int64_t out_stride,
                 int64_t m, int64_t n, int64_t d) {
    for (int64_t first = 0; first < n; first += TILE) {
        const int64_t width = std::min(TILE, n - first);
        const Rows<T> tile{b[first], b.stride};
        const float* from = weights + first * across;
        int64_t i = 0;
        for (; i + TOGETHER <= m; i += TOGETHER)
            add_rows<TOGETHER>(from + i * down, across, down, tile, out + i * out_stride, out_stride, width, d);
        switch (m - i) {
            case 3: add_rows<3>(from + i * down, across, down, tile, out + i * out_stride, out_stride, width, d); break;
            case 2: add_rows<2>(from + i * down, across, down, tile, out + i * out_stride, out_stride, width, d); break;
            case 1: add_rows<1>(from + i * down, across, down, tile, out + i * out_stride, out_stride, width, d); break;
        }
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

// Rotary embedding of one head; with sign -1 its transpose.
inline void turn(const float* in, const float* cosines, const float* sines, float* out, int64_t half, float sign) {
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        out[j] = in[j] * cosines[j] - sign * in[j + half] * sines[j];
        out[j + half] = in[j + half] * cosines[j] + sign * in[j] * sines[j];
    }
}

inline float silu(float x) { return x / (1 + std::exp(-x)); }

// ---------------------------------------------------------------------------------------------------- the sampler

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

// ---------------------------------------------------------------------------------------------------- the learner

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
void gather(const float* x, float* rows, const Stretch& piece, int64_t kv_heads, int64_t head, int64_t size) {
    for (int64_t token = piece.first; token < piece.end; token++)
        std::memcpy(rows + (token - piece.first) * size, x + (token * kv_heads + head) * size, size * sizeof(float));
}
void scatter(const float* rows, float* x, const Stretch& piece, int64_t kv_heads, int64_t head, int64_t size) {
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
            gather(q, queries.data(), piece, kv_heads, head, group * d);
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                multiply(queries.data(), Rows<float>{k + first * stride + head * d, stride}, &scores[at], many, n, d, width);
            });
            for (int64_t i = 0; i < many; i++) logs[i] = softmax(&scores[i * width], piece.seen + i / group + 1, width);
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                add_product(&scores[at], 1, width, Rows<float>{v + first * stride + head * d, stride}, sums.data(), d, many, n, d);
            });
            scatter(sums.data(), out, piece, kv_heads, head, group * d);
            scatter(logs.data(), logsums, piece, kv_heads, head, group);
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
            gather(q, queries.data(), piece, kv_heads, head, group * d);
            gather(grad, grads.data(), piece, kv_heads, head, group * d);
            gather(out, outs.data(), piece, kv_heads, head, group * d);
            gather(logsums, logs.data(), piece, kv_heads, head, group);
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                const int64_t from = first * stride + head * d;
                multiply(queries.data(), Rows<float>{k + from, stride}, &weights[at], many, n, d, width);
                multiply(grads.data(), Rows<float>{v + from, stride}, &changes[at], many, n, d, width);
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
                add_product(&changes[at], 1, width, Rows<float>{k + to + head * d, stride}, sums.data(), d, many, n, d);
                add_product(&changes[at], width, 1, Rows<float>{queries.data(), d}, part_k + to, stride, n, many, d);
                add_product(&weights[at], width, 1, Rows<float>{grads.data(), d}, part_v + to, stride, n, many, d);
            });
            scatter(sums.data(), grad_q, piece, kv_heads, head, group * d);
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
            const int64_t at = (row * heads + head) * d;
            turn(x + at, c, s, y + at, half, sign);
        }
    }
}

// y = silu(gate) * up, number by number.
extern "C" void swiglu(const float* gate, const float* up, float* y, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) y[i] = silu(gate[i]) * up[i];
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
