// The layers of a model for the learner: what comes before attention and what comes after it, with gradients.
//
// A thread takes some rows from one product to the next, so that they stay in its core's cache. Sums, and all between
// products, are floats. Weights, and what they are multiplied by, are of one type, float or bfloat16.

#include <memory>

#include "strips.h"

namespace {

constexpr int64_t PIECE = 48;  // rows that a thread takes at once, see also `strips.h`

// All rows, in such pieces.
struct Pieces {
    int64_t rows, size;

    template <class T>
    static Pieces of(int64_t rows) {
        return {rows, std::is_same_v<T, Bf16> && way == IN_MATRICES ? PIECE_IN_MATRICES : PIECE};
    }

    int64_t count() const { return ceil_div(rows, size); }

    // Calls `work(first row, rows, number of the piece)` for all pieces, by whichever of this team's threads is free.
    template <class Work>
    void each(Work work) const {
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < count(); piece++)
            work(piece * size, std::min(size, rows - piece * size), piece);
    }
};

// A weight (outputs, inputs), whose rows may be those of several, one after the other.
template <class T>
struct Weight {
    struct Part {
        const T* start;
        int64_t rows;
    };

    int64_t outputs() const {
        int64_t rows = 0;
        for (const Part& part : parts) rows += part.rows;
        return rows;
    }

    const T* row(int64_t number) const {
        size_t part = 0;
        for (; number >= parts[part].rows; part++) number -= parts[part].rows;
        return parts[part].start + number * inputs;
    }

    std::vector<Part> parts;
    int64_t inputs;
};

// Products with a weight or, `backwards`, with its transpose. In bfloat16 both of its sizes are even.
template <class T>
class Product {
   public:
    Product(Weight<T> weight, const T* bias, bool backwards = false)
        : weight(std::move(weight)), backwards(backwards),
          tiles(new T[round_up(outputs(), TILE) * inputs()]),
          linear{tiles.get(), bias, inputs(), outputs()} {}

    // By all threads, before any of them multiplies.
    void prepare() const {
        const int64_t inputs = linear.inputs, width = outputs();
#pragma omp for schedule(static)
        for (int64_t first = 0; first < width; first += TILE) {
            T* const to = tiles.get() + first * inputs;
            const int64_t end = std::min(first + TILE, width);
            if (end < first + TILE) std::fill(to, to + TILE * inputs, T{});
            if (backwards)
                lay_out_columns(to, first, end);
            else
                for (int64_t t = first; t < end; t++) lay_out_row(weight.row(t), to, t - first);
        }
    }

    void operator()(const T* x, float* y, int64_t rows) const { linear(x, y, rows); }

    operator const Linear<T>&() const { return linear; }

   private:
    int64_t inputs() const { return backwards ? weight.outputs() : weight.inputs; }
    int64_t outputs() const { return backwards ? weight.inputs : weight.outputs(); }

    // One output's numbers become a column of a tile, of floats or of pairs.
    void lay_out_row(const float* from, float* to, int64_t t) const {
        for (int64_t j = 0; j < linear.inputs; j++) to[j * TILE + t] = from[j];
    }
    void lay_out_row(const Bf16* from, Bf16* to, int64_t t) const {
        for (int64_t j = 0; j < linear.inputs; j += 2) std::memcpy(to + j * TILE + 2 * t, from + j, 2 * sizeof(Bf16));
    }

    // Some columns of the weight become a tile's.
    void lay_out_columns(float* to, int64_t first, int64_t end) const {
        for (int64_t j = 0; j < linear.inputs; j++) std::copy_n(weight.row(j) + first, end - first, to + j * TILE);
    }
    void lay_out_columns(Bf16* to, int64_t first, int64_t end) const {
        uint32_t* const pairs = reinterpret_cast<uint32_t*>(to);
        for (int64_t j = 0; j < linear.inputs; j += 2) {
            const Bf16 *const even = weight.row(j) + first, *const odd = weight.row(j + 1) + first;
#pragma omp simd
            for (int64_t t = 0; t < end - first; t++)
                pairs[j / 2 * TILE + t] = even[t].bits | static_cast<uint32_t>(odd[t].bits) << 16;
        }
    }

    const Weight<T> weight;
    const bool backwards;
    const std::unique_ptr<T[]> tiles;
    const Linear<T> linear;
};

// How projections become queries, keys and values: norms over heads, which may be missing, then rotary embedding.
struct Turning {
    const float *q_norm, *k_norm;
    const float *cosines, *sines;  // (positions, d)
    const int64_t* positions;
    int64_t heads, kv_heads, d;
    float scaling, eps;

    // Splits a row's projections (heads + 2 kv_heads, d).
    void split(const float* from, float* q, float* k, float* v, int64_t row) const {
        const float *c = cosines + positions[row] * d, *s = sines + positions[row] * d;
        for (int64_t head = 0; head < heads; head++, from += d)
            place_head(from, q_norm, c, s, q + (row * heads + head) * d, d, scaling, eps);
        for (int64_t head = 0; head < kv_heads; head++, from += d)
            place_head(from, k_norm, c, s, k + (row * kv_heads + head) * d, d, 1, eps);
        std::copy_n(from, kv_heads * d, v + row * kv_heads * d);
    }

    // Joins the gradients of a row's queries, keys and values to that of its projections; adds to those of the norms.
    template <class T>
    void join(const T* from, const float* q, const float* k, const float* v, float* grad, float* grad_q_norm,
              float* grad_k_norm, int64_t row) const {
        for (int64_t head = 0; head < heads; head++, from += d, grad += d)
            back(from, q_norm, q + (row * heads + head) * d, grad, grad_q_norm, row, scaling);
        for (int64_t head = 0; head < kv_heads; head++, from += d, grad += d)
            back(from, k_norm, k + (row * kv_heads + head) * d, grad, grad_k_norm, row, 1);
        std::copy_n(v + row * kv_heads * d, kv_heads * d, grad);
    }

   private:
    template <class T>
    void back(const T* in, const float* norm, const float* placed, float* grad, float* grad_norm, int64_t row,
              float by) const {
        thread_local std::vector<float> turned, head;
        turned.resize(d);
        turn(placed, cosines + positions[row] * d, sines + positions[row] * d, turned.data(), d / 2, -1);
        for (int64_t j = 0; j < d; j++) turned[j] *= by;
        if (norm == nullptr) {
            std::copy_n(turned.data(), d, grad);
            return;
        }
        head.resize(d);
        float squares = 0;
        for (int64_t j = 0; j < d; j++) {
            head[j] = number(in[j]);
            squares += head[j] * head[j];
        }
        norm_backward(turned.data(), nullptr, head.data(), norm, 1 / std::sqrt(squares / d + eps), grad, grad_norm, d);
    }
};

template <class Out>
void scale_row(const float* in, float by, const float* weight, Out* out, int64_t d) {
#pragma omp simd
    for (int64_t j = 0; j < d; j++) put(out + j, in[j] * by * weight[j]);
}

// The norm of a row; returns the inverse root of its mean square.
template <class Out>
float norm_row(const float* in, const float* weight, Out* out, int64_t d, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < d; j++) squares += in[j] * in[j];
    const float by = 1 / std::sqrt(squares / d + eps);
    scale_row(in, by, weight, out, d);
    return by;
}

// Writes numbers as they are kept, if that is elsewhere or rounded.
template <class T>
void keep(const float* from, T* to, int64_t n) {
    if constexpr (std::is_same_v<T, float>)
        if (from == to) return;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) put(to + j, from[j]);
}

// Where a piece of what is kept is computed: in its place, or in a room of floats before it is rounded.
template <class T>
float* place(T* kept, std::vector<float>& room, int64_t size) {
    if constexpr (std::is_same_v<T, float>)
        if (kept != nullptr) return kept;
    room.resize(size);
    return room.data();
}

// A sum (d) over rows, of which every piece adds up its own, so that it is the same whoever did them; none where there is
// nowhere to put it.
class RowSum {
   public:
    RowSum(float* to, int64_t d, Pieces pieces) : to(to), d(d), parts(to == nullptr ? 0 : pieces.count() * d) {}

    float* part(int64_t piece) { return to == nullptr ? nullptr : &parts[piece * d]; }

    void finish() const {
        if (to == nullptr) return;
        std::fill_n(to, d, 0.0f);
        for (size_t first = 0; first < parts.size(); first += d)
            for (int64_t j = 0; j < d; j++) to[j] += parts[first + j];
    }

   private:
    float* const to;
    const int64_t d;
    std::vector<float> parts;
};

// From the sum x (rows, width) to queries (rows, heads, d), scaled, and keys and values (rows, kv_heads, d). The weight is
// that of all three projections; scales (rows) of norms and, where heads have norms, projections (rows, outputs) are kept.
template <class T>
void layer_in(const float* x, const float* norm, Weight<T> weight, const T* bias, Turning turning, float* scales,
              T* projected, float* q, float* k, float* v, int64_t rows, float eps) {
    const auto pieces = Pieces::of<T>(rows);
    const int64_t outputs = weight.outputs(), width = weight.inputs;
    const Product<T> project(std::move(weight), bias);
#pragma omp parallel
    {
        const Matrices matrices(way == IN_MATRICES);
        std::vector<T> normed(pieces.size * width);
        std::vector<float> room;
        project.prepare();
        pieces.each([&](int64_t first, int64_t n, int64_t) {
            T* const kept = projected == nullptr ? nullptr : projected + first * outputs;
            float* const to = place(kept, room, pieces.size * outputs);
            for (int64_t i = 0; i < n; i++)
                scales[first + i] = norm_row(x + (first + i) * width, norm, &normed[i * width], width, eps);
            project(normed.data(), to, n);
            for (int64_t i = 0; i < n; i++) turning.split(to + i * outputs, q, k, v, first + i);
            if (kept != nullptr) keep(to, kept, n * outputs);
        });
    }
}

// Gradients of `layer_in`, by those of queries, keys and values, and what else there is of the sum's. That of the weight
// is the product of grad_projected (rows, outputs) and normed (rows, width).
template <class T>
void layer_in_backward(const float* grad_q, const float* grad_k, const float* grad_v, const float* grad_sum,
                       const float* x, const float* norm, Weight<T> weight, Turning turning, const float* scales,
                       const T* projected, T* normed, T* grad_projected, float* grad_x, float* grad_norm,
                       float* grad_bias, float* grad_q_norm, float* grad_k_norm, int64_t rows) {
    const auto pieces = Pieces::of<T>(rows);
    const int64_t outputs = weight.outputs(), width = weight.inputs, d = turning.d;
    const Product<T> project(std::move(weight), nullptr, true);
    RowSum norm_sum(grad_norm, width, pieces), bias_sum(grad_bias, outputs, pieces), q_sum(grad_q_norm, d, pieces),
        k_sum(grad_k_norm, d, pieces);
#pragma omp parallel
    {
        const Matrices matrices(way == IN_MATRICES);
        std::vector<float> change(pieces.size * width), room;
        project.prepare();
        pieces.each([&](int64_t first, int64_t n, int64_t piece) {
            for (int64_t row = first; row < first + n; row++) {
                T* const kept = grad_projected + row * outputs;
                float* const to = place(kept, room, outputs);
                turning.join(projected == nullptr ? nullptr : projected + row * outputs, grad_q, grad_k, grad_v, to,
                             q_sum.part(piece), k_sum.part(piece), row);
                if (float* const sum = bias_sum.part(piece))
                    for (int64_t j = 0; j < outputs; j++) sum[j] += to[j];
                keep(to, kept, outputs);
            }
            project(grad_projected + first * outputs, change.data(), n);
            for (int64_t row = first; row < first + n; row++) {
                const int64_t at = row * width;
                scale_row(x + at, scales[row], norm, normed + at, width);
                norm_backward(&change[(row - first) * width], grad_sum + at, x + at, norm, scales[row], grad_x + at,
                              norm_sum.part(piece), width);
            }
        });
    }
    for (const RowSum* sum : {&norm_sum, &bias_sum, &q_sum, &k_sum}) sum->finish();
}

// From the sum x (rows, width) and what was attended to (rows, attended), to the next sum y. The middle one, scales (rows)
// of its norm, and what gates are made of, gate and up (rows, 2 inner), are kept; these in strips, where they may lie so.
template <class T>
void layer_out(const float* x, const T* attended, const T* out, const float* norm, const T* gate,
               const T* up, const T* down, float* middle, float* scales, T* joined, float* y, int64_t rows,
               int64_t width, int64_t size, int64_t inner, float eps) {
    const auto pieces = Pieces::of<T>(rows);
    const bool strips = std::is_same_v<T, Bf16> && lie_in_strips(width, inner);
    const Product<T> to_width({{{out, width}}, size}, nullptr),
        to_inner({{{gate, inner}, {up, inner}}, width}, nullptr), from_inner({{{down, width}}, inner}, nullptr);
#pragma omp parallel
    {
        const Matrices matrices(way == IN_MATRICES);
        std::vector<float> change(pieces.size * width), room;
        std::vector<T> normed(pieces.size * width), gated(strips ? 0 : pieces.size * inner);
        for (const Product<T>* product : {&to_width, &to_inner, &from_inner}) product->prepare();
        pieces.each([&](int64_t first, int64_t n, int64_t) {
            T* const kept = joined + first * 2 * inner;
            float* const sums = middle + first * width;
            std::copy_n(x + first * width, n * width, sums);
            to_width(attended + first * size, change.data(), n);
            for (int64_t i = 0; i < n; i++)
                scales[first + i] =
                    add_norm(sums + i * width, &change[i * width], norm, &normed[i * width], width, eps);
            if constexpr (std::is_same_v<T, Bf16>)
                if (strips) change_in_strips(normed.data(), to_inner, from_inner, kept, change.data(), n);
            if (!strips) {
                float* const gates = place(kept, room, pieces.size * 2 * inner);
                to_inner(normed.data(), gates, n);
                for (int64_t i = 0; i < n; i++) gate_joined(gates + i * 2 * inner, &gated[i * inner], inner);
                keep(gates, kept, n * 2 * inner);
                from_inner(gated.data(), change.data(), n);
            }
            for (int64_t i = 0; i < n * width; i++) y[first * width + i] = sums[i] + change[i];
        });
    }
}

// Gradients of `layer_out`, by that of y (rows, width), which is also given in the weights' type, `rounded`. Those of
// weights are products: of rounded_middle (rows, width), as grad_middle is rounded, and attended; of grad_joined (rows,
// 2 inner) and normed (rows, width); of rounded and gated (rows, inner). What is joined and gated may lie in strips.
template <class T>
void layer_out_backward(const float* grad, const T* rounded, const float* middle, const float* scales, const T* joined,
                        const T* out, const float* norm, const T* gate, const T* up, const T* down, T* gated,
                        T* grad_joined, T* normed, float* grad_middle, T* rounded_middle, float* grad_attended,
                        float* grad_norm, int64_t rows, int64_t width, int64_t size, int64_t inner) {
    const auto pieces = Pieces::of<T>(rows);
    const bool strips = std::is_same_v<T, Bf16> && lie_in_strips(width, inner);
    const Product<T> to_attended({{{out, width}}, size}, nullptr, true),
        from_gates({{{gate, inner}, {up, inner}}, width}, nullptr, true),
        to_gated({{{down, width}}, inner}, nullptr, true);
    RowSum norm_sum(grad_norm, width, pieces);
#pragma omp parallel
    {
        const Matrices matrices(way == IN_MATRICES);
        std::vector<float> change(pieces.size * width), grad_gated(strips ? 0 : pieces.size * inner);
        for (const Product<T>* product : {&to_attended, &from_gates, &to_gated}) product->prepare();
        pieces.each([&](int64_t first, int64_t n, int64_t piece) {
            const T* const kept = joined + first * 2 * inner;
            T *const let = gated + first * inner, *const grads = grad_joined + first * 2 * inner;
            if constexpr (std::is_same_v<T, Bf16>)
                if (strips)
                    change_in_strips_backward(rounded + first * width, kept, to_gated, from_gates, let, grads,
                                              change.data(), n);
            if (!strips) {
                to_gated(rounded + first * width, grad_gated.data(), n);
                for (int64_t i = 0; i < n; i++) {
                    const T* const gates = kept + i * 2 * inner;
                    T* const to = grads + i * 2 * inner;
                    gate_joined(gates, let + i * inner, inner);
#pragma omp simd
                    for (int64_t j = 0; j < inner; j++)
                        gate_backward(grad_gated[i * inner + j], number(gates[j]), number(gates[inner + j]), to + j,
                                      to + inner + j);
                }
                from_gates(grads, change.data(), n);
            }
            for (int64_t row = first; row < first + n; row++) {
                const int64_t at = row * width;
                scale_row(middle + at, scales[row], norm, normed + at, width);
                norm_backward(&change[(row - first) * width], grad + at, middle + at, norm, scales[row],
                              grad_middle + at, norm_sum.part(piece), width);
                keep(grad_middle + at, rounded_middle + at, width);
            }
            to_attended(rounded_middle + first * width, grad_attended + first * size, n);
        });
    }
    norm_sum.finish();
}

}  // namespace

#define LAYERS(T, NAME)                                                                                                \
    extern "C" void layer_in_##NAME(                                                                                   \
        const float* x, const float* norm, const T* q_weight, const T* k_weight, const T* v_weight, const T* bias,     \
        const float* q_norm, const float* k_norm, const float* cosines, const float* sines, const int64_t* positions,  \
        float* scales, T* projected, float* q, float* k, float* v, int64_t rows, int64_t width, int64_t heads,         \
        int64_t kv_heads, int64_t d, float scaling, float eps) {                                                       \
        layer_in<T>(                                                                                                   \
            x, norm, {{{q_weight, heads * d}, {k_weight, kv_heads * d}, {v_weight, kv_heads * d}}, width}, bias,       \
            {q_norm, k_norm, cosines, sines, positions, heads, kv_heads, d, scaling, eps}, scales, projected, q, k, v, \
            rows, eps);                                                                                                \
    }                                                                                                                  \
    extern "C" void layer_in_backward_##NAME(                                                                          \
        const float* grad_q, const float* grad_k, const float* grad_v, const float* grad_sum, const float* x,          \
        const float* norm, const T* q_weight, const T* k_weight, const T* v_weight, const float* q_norm,               \
        const float* k_norm, const float* cosines, const float* sines, const int64_t* positions, const float* scales,  \
        const T* projected, T* normed, T* grad_projected, float* grad_x, float* grad_norm, float* grad_bias,           \
        float* grad_q_norm, float* grad_k_norm, int64_t rows, int64_t width, int64_t heads, int64_t kv_heads,          \
        int64_t d, float scaling, float eps) {                                                                         \
        layer_in_backward<T>(                                                                                          \
            grad_q, grad_k, grad_v, grad_sum, x, norm,                                                                 \
            {{{q_weight, heads * d}, {k_weight, kv_heads * d}, {v_weight, kv_heads * d}}, width},                      \
            {q_norm, k_norm, cosines, sines, positions, heads, kv_heads, d, scaling, eps}, scales, projected, normed,  \
            grad_projected, grad_x, grad_norm, grad_bias, grad_q_norm, grad_k_norm, rows);                             \
    }                                                                                                                  \
    extern "C" void layer_out_##NAME(const float* x, const T* attended, const T* out, const float* norm, const T* gate,\
                                     const T* up, const T* down, float* middle, float* scales, T* joined, float* y,    \
                                     int64_t rows, int64_t width, int64_t size, int64_t inner, float eps) {            \
        layer_out(x, attended, out, norm, gate, up, down, middle, scales, joined, y, rows, width, size, inner, eps);   \
    }                                                                                                                  \
    extern "C" void layer_out_backward_##NAME(                                                                         \
        const float* grad, const T* rounded, const float* middle, const float* scales, const T* joined, const T* out,  \
        const float* norm, const T* gate, const T* up, const T* down, T* gated, T* grad_joined, T* normed,             \
        float* grad_middle, T* rounded_middle, float* grad_attended, float* grad_norm, int64_t rows, int64_t width,    \
        int64_t size, int64_t inner) {                                                                                 \
        layer_out_backward(grad, rounded, middle, scales, joined, out, norm, gate, up, down, gated, grad_joined,       \
                           normed, grad_middle, rounded_middle, grad_attended, grad_norm, rows, width, size, inner);   \
    }
LAYERS(float, float)
LAYERS(Bf16, bf16)
