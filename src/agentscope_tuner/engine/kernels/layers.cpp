// The layers of a small model for the learner: what comes before attention and what comes after it, with gradients.
//
// A thread takes some rows from one product to the next, so that they stay in its core's cache.

#include <memory>

#include "blocks.h"

namespace {

constexpr int64_t PIECE = 48;  // rows

int64_t pieces_of(int64_t rows) { return (rows + PIECE - 1) / PIECE; }

// Products with a weight (outputs, inputs) or, backwards, with its transpose.
class Product {
   public:
    Product(const float* weight, const float* bias, int64_t outputs, int64_t inputs)
        : Product(weight, bias, outputs, inputs, inputs, 1) {}

    static Product backwards(const float* weight, int64_t outputs, int64_t inputs) {
        return Product(weight, nullptr, inputs, outputs, 1, inputs);
    }

    // By all threads, before any of them multiplies.
    void prepare() const {
        const int64_t inputs = linear.inputs;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < linear.outputs; first += TILE) {
            const float* const from = weight + first * down;
            float* const to = tiles.get() + first * inputs;
            const int64_t width = std::min(TILE, linear.outputs - first);
            if (width < TILE) std::fill(to, to + TILE * inputs, 0.0f);
            if (down == 1)
                for (int64_t j = 0; j < inputs; j++)
#pragma omp simd
                    for (int64_t t = 0; t < width; t++) to[j * TILE + t] = from[j * across + t];
            else
                for (int64_t t = 0; t < width; t++)
                    for (int64_t j = 0; j < inputs; j++) to[j * TILE + t] = from[t * down + j];
        }
    }

    void operator()(const float* x, float* y, int64_t rows) const { linear(x, y, rows); }

   private:
    // The weight of an output and an input is at `output * down + input * across`.
    Product(const float* weight, const float* bias, int64_t outputs, int64_t inputs, int64_t down, int64_t across)
        : weight(weight), down(down), across(across), tiles(new float[(outputs + TILE - 1) / TILE * TILE * inputs]),
          linear{tiles.get(), bias, inputs, outputs} {}

    const float* const weight;
    const int64_t down, across;
    const std::unique_ptr<float[]> tiles;
    const Linear<float> linear;
};

// How projections become queries, keys and values: norms over heads, which may be missing, then rotary embedding.
struct Turning {
    const float *q_norm, *k_norm;
    const float *cosines, *sines;  // (positions, d)
    const int64_t* positions;
    int64_t heads, kv_heads, d;
    float scaling, eps;

    int64_t outputs() const { return (heads + 2 * kv_heads) * d; }

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
    void join(const float* from, const float* q, const float* k, const float* v, float* grad, float* grad_q_norm,
              float* grad_k_norm, int64_t row) const {
        for (int64_t head = 0; head < heads; head++, from += d, grad += d)
            back(from, q_norm, q + (row * heads + head) * d, grad, grad_q_norm, row, scaling);
        for (int64_t head = 0; head < kv_heads; head++, from += d, grad += d)
            back(from, k_norm, k + (row * kv_heads + head) * d, grad, grad_k_norm, row, 1);
        std::copy_n(v + row * kv_heads * d, kv_heads * d, grad);
    }

   private:
    void back(const float* in, const float* norm, const float* placed, float* grad, float* grad_norm, int64_t row,
              float by) const {
        thread_local std::vector<float> turned;
        turned.resize(d);
        turn(placed, cosines + positions[row] * d, sines + positions[row] * d, turned.data(), d / 2, -1);
        for (int64_t j = 0; j < d; j++) turned[j] *= by;
        if (norm == nullptr) {
            std::copy_n(turned.data(), d, grad);
            return;
        }
        float squares = 0;
        for (int64_t j = 0; j < d; j++) squares += in[j] * in[j];
        norm_backward(turned.data(), nullptr, in, norm, 1 / std::sqrt(squares / d + eps), grad, grad_norm, d);
    }
};

void scale_row(const float* in, float by, const float* weight, float* out, int64_t d) {
#pragma omp simd
    for (int64_t j = 0; j < d; j++) out[j] = in[j] * by * weight[j];
}

// The norm of a row; returns the inverse root of its mean square.
float norm_row(const float* in, const float* weight, float* out, int64_t d, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < d; j++) squares += in[j] * in[j];
    const float by = 1 / std::sqrt(squares / d + eps);
    scale_row(in, by, weight, out, d);
    return by;
}

// Calls `work(first row, rows, number of the piece)` for all pieces, by whichever of this team's threads is free.
template <class Work>
void each_piece(int64_t rows, Work work) {
#pragma omp for schedule(dynamic, 1)
    for (int64_t piece = 0; piece < pieces_of(rows); piece++)
        work(piece * PIECE, std::min(PIECE, rows - piece * PIECE), piece);
}

// A sum (d) over rows, of which every piece adds up its own, so that it is the same whoever did them; none where there is
// nowhere to put it.
class RowSum {
   public:
    RowSum(float* to, int64_t d, int64_t rows) : to(to), d(d), parts(to == nullptr ? 0 : pieces_of(rows) * d) {}

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

}  // namespace

// From the sum x (rows, width) to queries (rows, heads, d), scaled, and keys and values (rows, kv_heads, d). The weight is
// that of all three projections; scales (rows) of norms and, where heads have norms, projections (rows, outputs) are kept.
extern "C" void layer_in(const float* x, const float* norm, const float* weight, const float* bias, const float* q_norm,
                         const float* k_norm, const float* cosines, const float* sines, const int64_t* positions,
                         float* scales, float* projected, float* q, float* k, float* v, int64_t rows, int64_t width,
                         int64_t heads, int64_t kv_heads, int64_t d, float scaling, float eps) {
    const Turning turning{q_norm, k_norm, cosines, sines, positions, heads, kv_heads, d, scaling, eps};
    const int64_t outputs = turning.outputs();
    const Product project(weight, bias, outputs, width);
#pragma omp parallel
    {
        std::vector<float> normed(PIECE * width), room(projected == nullptr ? PIECE * outputs : 0);
        project.prepare();
        each_piece(rows, [&](int64_t first, int64_t n, int64_t) {
            float* const to = projected == nullptr ? room.data() : projected + first * outputs;
            for (int64_t i = 0; i < n; i++)
                scales[first + i] = norm_row(x + (first + i) * width, norm, &normed[i * width], width, eps);
            project(normed.data(), to, n);
            for (int64_t i = 0; i < n; i++) turning.split(to + i * outputs, q, k, v, first + i);
        });
    }
}

// Gradients of `layer_in`, by those of queries, keys and values, and what else there is of the sum's. That of the weight
// is the product of grad_projected (rows, outputs) and normed (rows, width).
extern "C" void layer_in_backward(const float* grad_q, const float* grad_k, const float* grad_v, const float* grad_sum,
                                  const float* x, const float* norm, const float* weight, const float* q_norm,
                                  const float* k_norm, const float* cosines, const float* sines,
                                  const int64_t* positions, const float* scales, const float* projected, float* normed,
                                  float* grad_projected, float* grad_x, float* grad_norm, float* grad_bias,
                                  float* grad_q_norm, float* grad_k_norm, int64_t rows, int64_t width, int64_t heads,
                                  int64_t kv_heads, int64_t d, float scaling, float eps) {
    const Turning turning{q_norm, k_norm, cosines, sines, positions, heads, kv_heads, d, scaling, eps};
    const int64_t outputs = turning.outputs();
    const Product project = Product::backwards(weight, outputs, width);
    RowSum norm_sum(grad_norm, width, rows), bias_sum(grad_bias, outputs, rows), q_sum(grad_q_norm, d, rows),
        k_sum(grad_k_norm, d, rows);
#pragma omp parallel
    {
        std::vector<float> change(PIECE * width);
        project.prepare();
        each_piece(rows, [&](int64_t first, int64_t n, int64_t piece) {
            for (int64_t row = first; row < first + n; row++) {
                float* const to = grad_projected + row * outputs;
                turning.join(projected == nullptr ? nullptr : projected + row * outputs, grad_q, grad_k, grad_v, to,
                             q_sum.part(piece), k_sum.part(piece), row);
                if (float* const sum = bias_sum.part(piece))
                    for (int64_t j = 0; j < outputs; j++) sum[j] += to[j];
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
// of its norm, and what gates are made of, gate and up (rows, 2 inner), are kept.
extern "C" void layer_out(const float* x, const float* attended, const float* out, const float* norm,
                          const float* gate_up, const float* down, float* middle, float* scales, float* joined, float* y,
                          int64_t rows, int64_t width, int64_t size, int64_t inner, float eps) {
    const Product to_width(out, nullptr, width, size), to_inner(gate_up, nullptr, 2 * inner, width),
        from_inner(down, nullptr, width, inner);
#pragma omp parallel
    {
        std::vector<float> change(PIECE * width), normed(PIECE * width), gated(PIECE * inner);
        for (const Product* product : {&to_width, &to_inner, &from_inner}) product->prepare();
        each_piece(rows, [&](int64_t first, int64_t n, int64_t) {
            float *const sums = middle + first * width, *const gates = joined + first * 2 * inner;
            std::copy_n(x + first * width, n * width, sums);
            to_width(attended + first * size, change.data(), n);
            for (int64_t i = 0; i < n; i++)
                scales[first + i] =
                    add_norm(sums + i * width, &change[i * width], norm, &normed[i * width], width, eps);
            to_inner(normed.data(), gates, n);
            for (int64_t i = 0; i < n; i++) gate_joined(gates + i * 2 * inner, &gated[i * inner], inner);
            from_inner(gated.data(), change.data(), n);
            for (int64_t i = 0; i < n * width; i++) y[first * width + i] = sums[i] + change[i];
        });
    }
}

// Gradients of `layer_out`, by that of y. Those of weights are products: of grad_middle (rows, width), which is also x's,
// and attended; of grad_joined (rows, 2 inner) and normed (rows, width); of grad and gated (rows, inner).
extern "C" void layer_out_backward(const float* grad, const float* middle, const float* scales, const float* joined,
                                   const float* out, const float* norm, const float* gate_up, const float* down,
                                   float* gated, float* grad_joined, float* normed, float* grad_middle,
                                   float* grad_attended, float* grad_norm, int64_t rows, int64_t width, int64_t size,
                                   int64_t inner) {
    const Product to_attended = Product::backwards(out, width, size),
                  from_gates = Product::backwards(gate_up, 2 * inner, width),
                  to_gated = Product::backwards(down, width, inner);
    RowSum norm_sum(grad_norm, width, rows);
#pragma omp parallel
    {
        std::vector<float> change(PIECE * width), grad_gated(PIECE * inner);
        for (const Product* product : {&to_attended, &from_gates, &to_gated}) product->prepare();
        each_piece(rows, [&](int64_t first, int64_t n, int64_t piece) {
            to_gated(grad + first * width, grad_gated.data(), n);
            for (int64_t i = 0; i < n; i++) {
                const float* const gates = joined + (first + i) * 2 * inner;
                float* const to = grad_joined + (first + i) * 2 * inner;
                gate_joined(gates, gated + (first + i) * inner, inner);
#pragma omp simd
                for (int64_t j = 0; j < inner; j++)
                    gate_backward(grad_gated[i * inner + j], gates[j], gates[inner + j], to + j, to + inner + j);
            }
            from_gates(grad_joined + first * 2 * inner, change.data(), n);
            for (int64_t row = first; row < first + n; row++) {
                const int64_t at = row * width;
                scale_row(middle + at, scales[row], norm, normed + at, width);
                norm_backward(&change[(row - first) * width], grad + at, middle + at, norm, scales[row],
                              grad_middle + at, norm_sum.part(piece), width);
            }
            to_attended(grad_middle + first * width, grad_attended + first * size, n);
        });
    }
    norm_sum.finish();
}
