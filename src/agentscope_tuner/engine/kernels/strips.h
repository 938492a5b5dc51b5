// Rows in strips of TILE columns: of all rows of a piece so many columns lie together, then the next ones. So a register
// that holds a matrix is read from memory that lies together, and its results go there; of a large model, each of its
// rows would otherwise be in another page.

#pragma once

#include "blocks.h"

namespace {

constexpr int64_t PIECE_IN_MATRICES = 128;  // rows of a piece: it is multiplied while a large model's weights are read

// Whether numbers lie so: rows of whole strips, where registers hold matrices.
inline bool lie_in_strips(int64_t columns, int64_t others) {
    return way == IN_MATRICES && columns % TILE == 0 && others % TILE == 0;
}

// Rows of a strip: there is room for those that fill the last register.
inline int64_t filled(int64_t rows) { return round_up(rows, SIDE); }

#if HAS_MATRICES

// Of a product of a piece in strips one strip (rows, TILE).
void multiply_strip(const Linear<Bf16>& linear, const Bf16* x, int64_t strip, float* out, int64_t rows) {
    const PairsOfRows from{reinterpret_cast<const uint32_t*>(x), SIDE, filled(rows) * SIDE};
    const Bf16* const tile = linear.tiles + strip * TILE * linear.inputs;
    multiply_matrices(from, reinterpret_cast<const uint32_t*>(tile), TILE, linear.inputs / 2, out, TILE, rows, TILE,
                      false);
}

// From rows (any, columns), which are rounded, to strips of them.
template <class In>
void to_strips(const In* x, Bf16* strips, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j += TILE) {
            const In* const from = x + i * columns + j;
            Bf16* const to = strips + j * filled(rows) + i * TILE;
            if constexpr (std::is_same_v<In, Bf16>) {
                std::memcpy(to, from, TILE * sizeof(Bf16));
            } else {
#pragma omp simd
                for (int64_t k = 0; k < TILE; k++) put(to + k, from[k]);
            }
        }
}

// A product of a piece in strips, in rows (rows, outputs).
void multiply_strips(const Linear<Bf16>& linear, const Bf16* x, float* out, int64_t rows) {
    float numbers[PIECE_IN_MATRICES * TILE];
    for (int64_t strip = 0; strip < linear.outputs / TILE; strip++) {
        multiply_strip(linear, x, strip, numbers, rows);
        for (int64_t i = 0; i < rows; i++)
            std::memcpy(out + i * linear.outputs + strip * TILE, numbers + i * TILE, TILE * sizeof(float));
    }
}

// What an MLP makes of normed rows (rows, width), at most a piece: change (rows, width). Gate and up are kept in strips,
// where there is a place for them.
template <class In>
void change_in_strips(const In* normed, const Linear<Bf16>& to_inner, const Linear<Bf16>& from_inner, Bf16* joined,
                      float* change, int64_t rows) {
    thread_local std::vector<Bf16> in, gated;
    float gates[PIECE_IN_MATRICES * TILE], ups[PIECE_IN_MATRICES * TILE];
    const int64_t strips = from_inner.inputs / TILE, size = filled(rows) * TILE;
    in.resize(to_inner.inputs / TILE * size);
    gated.resize(strips * size);
    to_strips(normed, in.data(), rows, to_inner.inputs);
    for (int64_t strip = 0; strip < strips; strip++) {
        multiply_strip(to_inner, in.data(), strip, gates, rows);
        multiply_strip(to_inner, in.data(), strips + strip, ups, rows);
        Bf16* const let = &gated[strip * size];
#pragma omp simd
        for (int64_t j = 0; j < rows * TILE; j++) put(let + j, silu(gates[j]) * ups[j]);
        if (joined == nullptr) continue;
        Bf16 *const kept = joined + strip * size, *const kept_ups = kept + strips * size;
#pragma omp simd
        for (int64_t j = 0; j < rows * TILE; j++) {
            put(kept + j, gates[j]);
            put(kept_ups + j, ups[j]);
        }
    }
    multiply_strips(from_inner, gated.data(), change, rows);
}

// Gradients of that, by that of the change, rounded (rows, width): of normed rows, change (rows, width), and in strips of
// gate and up. What gates had let through is computed again, also in strips.
void change_in_strips_backward(const Bf16* rounded, const Bf16* joined, const Linear<Bf16>& to_gated,
                               const Linear<Bf16>& from_gates, Bf16* gated, Bf16* grad_joined, float* change,
                               int64_t rows) {
    thread_local std::vector<Bf16> in;
    float grad[PIECE_IN_MATRICES * TILE];
    const int64_t strips = to_gated.outputs / TILE, size = filled(rows) * TILE;
    in.resize(to_gated.inputs / TILE * size);
    to_strips(rounded, in.data(), rows, to_gated.inputs);
    for (int64_t strip = 0; strip < strips; strip++) {
        multiply_strip(to_gated, in.data(), strip, grad, rows);
        const Bf16 *const gates = joined + strip * size, *const ups = gates + strips * size;
        Bf16 *const to = grad_joined + strip * size, *const to_ups = to + strips * size;
        Bf16* const let = gated + strip * size;
#pragma omp simd
        for (int64_t j = 0; j < rows * TILE; j++) {
            const float gate = number(gates[j]), up = number(ups[j]);
            put(let + j, silu(gate) * up);
            gate_backward(grad[j], gate, up, to + j, to_ups + j);
        }
    }
    multiply_strips(from_gates, grad_joined, change, rows);
}

#else

template <class In>
void change_in_strips(const In*, const Linear<Bf16>&, const Linear<Bf16>&, Bf16*, float*, int64_t) {}
inline void change_in_strips_backward(const Bf16*, const Bf16*, const Linear<Bf16>&, const Linear<Bf16>&, Bf16*, Bf16*,
                                      float*, int64_t) {}

#endif

}  // namespace
