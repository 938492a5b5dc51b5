// The learner's attention along a packed tree, and its steps between matrix products, with their gradients.

#include <memory>
#include <tuple>

#include "common.h"

namespace {

// Tokens `first` up to `end` of a packed tree; they see some spans of it, none of which begins where another one ends. The
// last one they end themselves, causally.
struct Piece {
    int64_t first, end;
    std::vector<std::pair<int64_t, int64_t>> spans;
    int64_t seen;  // tokens before them

    int64_t width() const { return seen + end - first; }
};

// Cuts (stretches, 4) rows of first, end, first span and number of spans, with spans (any, 2), to pieces.
std::vector<Piece> cut(const int64_t* stretches, const int64_t* spans, int64_t count, int64_t group) {
    const int64_t most = std::max<int64_t>(1, BLOCK / group);
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < count; i++) {
        const int64_t* row = stretches + 4 * i;
        Piece piece{row[0], row[0], {}, 0};
        for (int64_t s = row[2]; s < row[2] + row[3]; s++) {
            piece.spans.emplace_back(spans[2 * s], spans[2 * s + 1]);
            piece.seen += spans[2 * s + 1] - spans[2 * s];
        }
        if (piece.spans.empty() || piece.spans.back().second != row[0]) piece.spans.emplace_back(row[0], row[0]);
        for (int64_t first = row[0]; first < row[1]; first += most) {
            piece.seen += first - piece.first;
            piece.first = first;
            piece.spans.back().second = piece.end = std::min(first + most, row[1]);
            pieces.push_back(piece);
        }
    }
    return pieces;
}

// Calls `visit(place among the piece's keys, first token, tokens)` for everything that it sees.
template <class Visit>
void each_span(const Piece& piece, Visit visit) {
    int64_t at = 0;
    for (const auto& [first, end] : piece.spans) {
        visit(at, first, end - first);
        at += end - first;
    }
}

// Tokens in tiles. One begins wherever some piece begins to see tokens, unless another one sees those before as well.
struct Tiling {
    Tiling(const std::vector<Piece>& pieces, int64_t tokens) : tile_of(tokens) {
        std::vector<int64_t> begun(tokens + 1), within(tokens + 1);  // spans that begin here; that go on here, more or less
        for (const Piece& piece : pieces)
            for (const auto& [first, end] : piece.spans) {
                begun[first]++;
                within[first + 1]++;
                within[end]--;
            }
        int64_t going_on = 0;
        for (int64_t token = 0; token < tokens; token++) {
            going_on += within[token];
            const bool full = tiles.empty() || tiles.back().second == TILE;
            if (full || (begun[token] > 0 && going_on == 0)) tiles.emplace_back(token, 0);
            tiles.back().second++;
            tile_of[token] = tiles.size() - 1;
        }
    }

    std::vector<int64_t> tile_of;                    // of each token
    std::vector<std::pair<int64_t, int64_t>> tiles;  // the first token of each, and how many
};

// Keys or values (tokens, kv_heads, d) in tiles.
class Tiled {
   public:
    Tiled(const Tiling& tiling, int64_t kv_heads, int64_t d)
        : kv_heads(kv_heads), d(d), tile_of(tiling.tile_of), tiles(tiling.tiles),
          // What is read beyond the last of its rows is not used.
          numbers(new float[(tiles.size() * kv_heads * d + 1) * TILE]) {}

    // By all threads, before any of them multiplies.
    void fill(const float* x) const {
        const int64_t count = tiles.size(), stride = kv_heads * d;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++)
            for (int64_t row = 0; row < stride; row++)
                for (int64_t t = 0; t < tiles[i].second; t++)
                    at(row / d, i)[row % d * TILE + t] = x[(tiles[i].first + t) * stride + row];
    }

    // out (m, n), rows of `width` numbers, becomes a (m, d) times n tokens of a head.
    void multiply(const float* a, int64_t head, int64_t first, float* out, int64_t m, int64_t n, int64_t width) const {
        for (int64_t done = 0, count; done < n; done += count) {
            const int64_t tile = tile_of[first + done], within = first + done - tiles[tile].first;
            count = std::min(n - done, tiles[tile].second - within);
            multiply_tiles(a, at(head, tile) + within, out + done, m, count, d, width);
        }
    }

   private:
    float* at(int64_t head, int64_t tile) const { return &numbers[(head * tiles.size() + tile) * TILE * d]; }

    const int64_t kv_heads, d;
    const std::vector<int64_t>& tile_of;
    const std::vector<std::pair<int64_t, int64_t>>& tiles;
    const std::unique_ptr<float[]> numbers;
};

// Copies what belongs to a key-value head between x (tokens, kv_heads, size) and rows (tokens of the piece, size).
void gather(const float* x, float* rows, const Piece& piece, int64_t kv_heads, int64_t head, int64_t size) {
    for (int64_t token = piece.first; token < piece.end; token++)
        std::memcpy(rows + (token - piece.first) * size, x + (token * kv_heads + head) * size, size * sizeof(float));
}
void scatter(const float* rows, float* x, const Piece& piece, int64_t kv_heads, int64_t head, int64_t size) {
    for (int64_t token = piece.first; token < piece.end; token++)
        std::memcpy(x + (token * kv_heads + head) * size, rows + (token - piece.first) * size, size * sizeof(float));
}

// By their bits: with `-ffast-math`, what is not a number may count as equal to zero.
bool all_zero(const std::vector<float>& numbers) {
    uint32_t any = 0;
    for (const float& x : numbers) {
        uint32_t word;
        std::memcpy(&word, &x, sizeof(word));
        any |= word << 1;
    }
    return any == 0;
}

}  // namespace

// Attention along a packed tree. q, out: (tokens, kv_heads, group, d), queries scaled; k, v: (tokens, kv_heads, d);
// normalizers: (2, tokens, kv_heads, group), for the gradient, what `softmax` returns. By one number, the logarithm of the
// sum of exponentials, weights would be as wrong as large scores are rounded.
extern "C" void tree_attend(const float* q, const float* k, const float* v, float* out, float* normalizers,
                            const int64_t* stretches, const int64_t* spans, int64_t count, int64_t tokens,
                            int64_t kv_heads, int64_t group, int64_t d) {
    const std::vector<Piece> pieces = cut(stretches, spans, count, group);
    const int64_t stride = kv_heads * d;
    const Tiling tiling(pieces, tokens);
    const Tiled keys(tiling, kv_heads, d);
#pragma omp parallel
    {
        keys.fill(k);
        std::vector<float> scores, queries, sums, most, scales;
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < static_cast<int64_t>(pieces.size()) * kv_heads; work++) {
            const Piece& piece = pieces[work / kv_heads];
            const int64_t head = work % kv_heads, many = (piece.end - piece.first) * group, width = piece.width();
            queries.resize(many * d);
            sums.assign(many * d, 0.0f);
            most.resize(many);
            scales.resize(many);
            scores.resize(many * width);
            gather(q, queries.data(), piece, kv_heads, head, group * d);
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                keys.multiply(queries.data(), head, first, &scores[at], many, n, width);
            });
            for (int64_t i = 0; i < many; i++)
                std::tie(most[i], scales[i]) = softmax(&scores[i * width], piece.seen + i / group + 1, width);
            each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                add_product(&scores[at], 1, width, Rows{v + first * stride + head * d, stride}, sums.data(), d, many, n, d);
            });
            scatter(sums.data(), out, piece, kv_heads, head, group * d);
            scatter(most.data(), normalizers, piece, kv_heads, head, group);
            scatter(scales.data(), normalizers + tokens * kv_heads * group, piece, kv_heads, head, group);
        }
    }
}

// Gradients of `tree_attend`. grad_k and grad_v: (parts, tokens, kv_heads, d), to be summed by the caller: pieces of
// different parts may add to the same keys at the same time. All gradients are zero at first.
extern "C" void tree_attend_backward(const float* grad, const float* q, const float* k, const float* v,
                                     const float* out, const float* normalizers, float* grad_q, float* grad_k,
                                     float* grad_v, const int64_t* stretches, const int64_t* spans, int64_t count,
                                     int64_t tokens, int64_t kv_heads, int64_t group, int64_t d, int64_t parts) {
    const std::vector<Piece> pieces = cut(stretches, spans, count, group);
    const int64_t stride = kv_heads * d;
    const Tiling tiling(pieces, tokens);
    const Tiled keys(tiling, kv_heads, d), values(tiling, kv_heads, d);
#pragma omp parallel
    {
        keys.fill(k);
        values.fill(v);
#pragma omp for schedule(static, 1)
        for (int64_t work = 0; work < kv_heads * parts; work++) {
            const int64_t head = work % kv_heads, part = work / kv_heads;
            float* const part_k = grad_k + part * tokens * stride + head * d;
            float* const part_v = grad_v + part * tokens * stride + head * d;
            std::vector<float> weights, changes, queries, grads, outs, sums, most, scales;
            for (size_t number = part; number < pieces.size(); number += parts) {
                const Piece& piece = pieces[number];
                const int64_t many = (piece.end - piece.first) * group, width = piece.width();
                for (auto* rows : {&queries, &grads, &outs}) rows->resize(many * d);
                sums.assign(many * d, 0.0f);
                most.resize(many);
                scales.resize(many);
                weights.resize(many * width);
                changes.resize(many * width);
                gather(grad, grads.data(), piece, kv_heads, head, group * d);
                // In the last layer that is most of every prompt.
                if (all_zero(grads)) {
                    scatter(sums.data(), grad_q, piece, kv_heads, head, group * d);
                    continue;
                }
                gather(q, queries.data(), piece, kv_heads, head, group * d);
                gather(out, outs.data(), piece, kv_heads, head, group * d);
                gather(normalizers, most.data(), piece, kv_heads, head, group);
                gather(normalizers + tokens * kv_heads * group, scales.data(), piece, kv_heads, head, group);
                each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                    keys.multiply(queries.data(), head, first, &weights[at], many, n, width);
                    values.multiply(grads.data(), head, first, &changes[at], many, n, width);
                });
                for (int64_t i = 0; i < many; i++) {
                    // Softmax's gradient is p * (dp - sum(p * dp)); that sum is the product of an output and its
                    // gradient.
                    float product = 0;
                    for (int64_t j = 0; j < d; j++) product += grads[i * d + j] * outs[i * d + j];
                    const int64_t seen = piece.seen + i / group + 1;
                    float *p = &weights[i * width], *change = &changes[i * width];
                    const float largest = most[i], scale = scales[i];
#pragma omp simd
                    for (int64_t t = 0; t < seen; t++) {
                        p[t] = exponential(p[t] - largest) * scale;
                        change[t] = p[t] * (change[t] - product);
                    }
                    std::fill(p + seen, p + width, 0.0f);
                    std::fill(change + seen, change + width, 0.0f);
                }
                each_span(piece, [&](int64_t at, int64_t first, int64_t n) {
                    const int64_t to = first * stride;
                    add_product(&changes[at], 1, width, Rows{k + to + head * d, stride}, sums.data(), d, many, n, d);
                    add_product(&changes[at], width, 1, Rows{queries.data(), d}, part_k + to, stride, n, many, d);
                    add_product(&weights[at], width, 1, Rows{grads.data(), d}, part_v + to, stride, n, many, d);
                });
                scatter(sums.data(), grad_q, piece, kv_heads, head, group * d);
            }
        }
    }
}

// y = sum * scale * weight for rows (rows, d), with scale = 1 / sqrt(mean(sum^2) + eps), which is kept for the gradient.
// The sum is x + change, and is written; where nothing changes, it is x.
template <class T>
void rms_norm(const float* x, const T* change, const float* weight, float* sum, T* y, float* scale, int64_t rows,
              int64_t d, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float* in = x + row * d;
        float squares = 0;
        if (change != nullptr) {
            float* const out = sum + row * d;
#pragma omp simd reduction(+ : squares)
            for (int64_t j = 0; j < d; j++) {
                out[j] = in[j] + number(change[row * d + j]);
                squares += out[j] * out[j];
            }
            in = out;
        } else {
#pragma omp simd reduction(+ : squares)
            for (int64_t j = 0; j < d; j++) squares += in[j] * in[j];
        }
        const float by = scale[row] = 1 / std::sqrt(squares / d + eps);
#pragma omp simd
        for (int64_t j = 0; j < d; j++) put(y + row * d + j, in[j] * by * weight[j]);
    }
}

// Gradients of `rms_norm`, of its sum x and the weight, by that of y and what else there is of the sum's. `grad_weight`
// (d) is summed over pieces of rows, whose order is always the same.
template <class T>
void rms_norm_backward(const T* grad, const float* grad_sum, const float* x, const float* weight, const float* scale,
                       float* grad_x, float* grad_weight, int64_t rows, int64_t d) {
    constexpr int64_t PIECES = 32;
    std::vector<float> sums(PIECES * d, 0.0f);
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < PIECES; piece++) {
        for (int64_t row = piece * rows / PIECES; row < (piece + 1) * rows / PIECES; row++)
            norm_backward(grad + row * d, grad_sum == nullptr ? nullptr : grad_sum + row * d, x + row * d, weight,
                          scale[row], grad_x + row * d, sums.data() + piece * d, d);
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
template <class T>
void swiglu(const T* gate, const T* up, T* y, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) put(y + i, silu(number(gate[i])) * number(up[i]));
}

template <class T>
void swiglu_backward(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++)
        gate_backward(number(grad[i]), number(gate[i]), number(up[i]), grad_gate + i, grad_up + i);
}

// For logits (rows, vocabulary) over temperatures (rows), where 0 counts as 1: the log-probability of each row's token,
// the row's entropy, and the logarithm of its sum of exponentials.
template <class T>
void choose(const T* logits, const int64_t* tokens, const float* temperatures, float* logprobs, float* entropies,
            float* logsums, int64_t rows, int64_t vocabulary) {
    constexpr int64_t PART = 256;  // sums of floats are kept short
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * vocabulary;
        const float by = temperatures[row] > 0 ? 1 / temperatures[row] : 1;
        float most = number(x[0]);
#pragma omp simd reduction(max : most)
        for (int64_t j = 0; j < vocabulary; j++) most = std::max(most, number(x[j]));
        double total = 0, mean = 0;
        for (int64_t first = 0; first < vocabulary; first += PART) {
            float sum = 0, weighed = 0;
#pragma omp simd reduction(+ : sum, weighed)
            for (int64_t j = first; j < std::min(first + PART, vocabulary); j++) {
                // Minus infinity times a weight of zero would be no number.
                const float score = bounded_below((number(x[j]) - most) * by), weight = exponential(score);
                sum += weight;
                weighed += weight * score;
            }
            total += sum;
            mean += weighed;
        }
        const double logsum = std::log(total);
        logprobs[row] = (number(x[tokens[row]]) - most) * by - logsum;
        entropies[row] = logsum - mean / total;
        logsums[row] = most * by + logsum;
    }
}

// Turns the logits of `choose` into their gradient, from those of log-probabilities and of entropies.
template <class T>
void choose_backward(const float* grad_logprobs, const float* grad_entropies, T* logits, const int64_t* tokens,
                     const float* temperatures, const float* entropies, const float* logsums, int64_t rows,
                     int64_t vocabulary) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        T* x = logits + row * vocabulary;
        const float by = temperatures[row] > 0 ? 1 / temperatures[row] : 1;
        const float chosen = grad_logprobs[row], spread = grad_entropies[row];
        const float logsum = logsums[row], entropy = entropies[row];
        const float logit = number(x[tokens[row]]);
        const auto gradient = [=](float of) {
            const float logprob = bounded_below(of * by - logsum);
            return -exponential(logprob) * (chosen + spread * (logprob + entropy)) * by;
        };
#pragma omp simd
        for (int64_t j = 0; j < vocabulary; j++) put(x + j, gradient(number(x[j])));
        put(x + tokens[row], gradient(logit) + chosen * by);
    }
}

// What linear layers read and return may be in either type; all between them is in float32.
#define LEARNER(T, NAME)                                                                                               \
    extern "C" void rms_norm_##NAME(const float* x, const T* change, const float* weight, float* sum, T* y,            \
                                    float* scale, int64_t rows, int64_t d, float eps) {                                \
        rms_norm(x, change, weight, sum, y, scale, rows, d, eps);                                                      \
    }                                                                                                                  \
    extern "C" void rms_norm_backward_##NAME(const T* grad, const float* grad_sum, const float* x,                     \
                                             const float* weight, const float* scale, float* grad_x,                   \
                                             float* grad_weight, int64_t rows, int64_t d) {                            \
        rms_norm_backward(grad, grad_sum, x, weight, scale, grad_x, grad_weight, rows, d);                             \
    }                                                                                                                  \
    extern "C" void swiglu_##NAME(const T* gate, const T* up, T* y, int64_t n) { swiglu(gate, up, y, n); }             \
    extern "C" void swiglu_backward_##NAME(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up,        \
                                           int64_t n) {                                                                \
        swiglu_backward(grad, gate, up, grad_gate, grad_up, n);                                                        \
    }                                                                                                                  \
    extern "C" void choose_##NAME(const T* logits, const int64_t* tokens, const float* temperatures, float* logprobs,  \
                                  float* entropies, float* logsums, int64_t rows, int64_t vocabulary) {                \
        choose(logits, tokens, temperatures, logprobs, entropies, logsums, rows, vocabulary);                          \
    }                                                                                                                  \
    extern "C" void choose_backward_##NAME(const float* grad_logprobs, const float* grad_entropies, T* logits,         \
                                           const int64_t* tokens, const float* temperatures, const float* entropies,   \
                                           const float* logsums, int64_t rows, int64_t vocabulary) {                   \
        choose_backward(grad_logprobs, grad_entropies, logits, tokens, temperatures, entropies, logsums, rows,         \
                        vocabulary);                                                                                   \
    }
LEARNER(float, float)
LEARNER(Bf16, bf16)
