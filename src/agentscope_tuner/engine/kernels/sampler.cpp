// The sampler's steps between matrix products, with attention over a key-value cache read where it lies.
//
// Eager PyTorch has to copy the caches of a batch together, padded to the longest, before it can multiply, and takes
// every step in many passes over memory.
//
// The functions come for two types of numbers: `_float`, and `_bf16`, the upper half of a float. All sum up in floats.

#include <atomic>
#include <memory>

#include "blocks.h"

Way way = ONE_BY_ONE;

namespace {

constexpr int64_t ROWS = 128;  // of a product's input, that a thread goes through before the next weights

// A linear layer by all threads, which share the weights: out (rows, outputs) for x (rows, inputs). Each takes the next
// tile when it is free, since cores are not always equally fast.
template <class T>
void multiply(const Linear<T>& linear, const T* x, T* out, int64_t rows) {
    const int64_t inputs = linear.inputs, outputs = linear.outputs, tiles = ceil_div(outputs, TILE);
    const int64_t blocks = ceil_div(rows, ROWS);
    const bool narrow = way != ONE_BY_ONE && inputs % 2 == 0;
    const std::unique_ptr<float[]> wide(narrow ? nullptr : new float[rows * inputs]);
#pragma omp parallel
    {
        const Matrices matrices(way == IN_MATRICES);
        float product[ROWS * TILE];
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (narrow ? 0 : rows * inputs); i++) wide[i] = number(x[i]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < blocks * tiles; work++) {
            const int64_t row = work / tiles * ROWS, first = work % tiles * TILE;
            const int64_t m = std::min(ROWS, rows - row), n = std::min(TILE, outputs - first);
            const T* const tile = linear.tiles + first * whole<T>(inputs);
            if (narrow)
                multiply_tiles(x + row * inputs, tile, product, m, n, inputs, TILE);
            else
                multiply_tiles(&wide[row * inputs], tile, product, m, n, inputs, TILE);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < n; j++)
                    put(out + (row + i) * outputs + first + j,
                        product[i * TILE + j] + (linear.bias == nullptr ? 0 : number(linear.bias[first + j])));
        }
    }
}

template <class T>
void draw_rows(const T* logits, const float* temperatures, const double* uniforms, int64_t* tokens, float* logprobs,
               int64_t rows, int64_t vocabulary) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; row++)
        tokens[row] =
            draw_token(logits + row * vocabulary, temperatures[row], uniforms[row], vocabulary, logprobs + row);
}

template <class T>
void attend(const float* q, T* out, const Attention<T>& attention, int64_t rows) {
    const auto blocks = attention.blocks(0, rows);
    const int64_t kv_heads = attention.cache.kv_heads, count = static_cast<int64_t>(blocks.size()) * kv_heads;
    std::atomic<int64_t> taken{0};  // a thread takes its next work ahead, to ask for what that reads
#pragma omp parallel
    {
        const Matrices matrices(way == IN_MATRICES);
        thread_local std::vector<const T*> lines;
        for (int64_t work = taken++, next; work < count; work = next) {
            next = taken++;
            if (next < count)
                attention.find_lines(blocks[next / kv_heads], next % kv_heads, lines);
            else
                lines.clear();
            const auto& block = blocks[work / kv_heads];
            const int64_t at = block.first * attention.row_size();
            attention.attend(q + at, out + at, block, work % kv_heads, lines);
        }
    }
}

}  // namespace

#define SAMPLER(T, NAME)                                                                                               \
    extern "C" void attend_##NAME(const float* q, T* out, T* keys, T* values, const Trunk* trunks,                     \
                                  const int64_t* trunk_of, const int64_t* slots, const int64_t* lengths, int64_t rows, \
                                  int64_t kv_heads, int64_t group, int64_t d, int64_t capacity) {                      \
        attend<T>(q, out, {{keys, values, kv_heads, capacity, d}, trunks, trunk_of, slots, lengths, group}, rows);     \
    }                                                                                                                  \
    extern "C" void add_norm_##NAME(float* x, const T* y, const T* weight, T* out, int64_t rows, int64_t d,            \
                                    float eps) {                                                                       \
        _Pragma("omp parallel for schedule(static)") for (int64_t row = 0; row < rows; row++)                          \
            add_norm(x + row * d, y == nullptr ? y : y + row * d, weight, out + row * d, d, eps);                      \
    }                                                                                                                  \
    extern "C" void split_heads_##NAME(const T* joined, const T* q_norm, const T* k_norm, const float* cosines,        \
                                       const float* sines, const int64_t* positions, const int64_t* slots,             \
                                       const int64_t* own, float* q, T* keys, T* values, int64_t rows, int64_t heads,  \
                                       int64_t kv_heads, int64_t d, int64_t capacity, float scaling, float eps) {      \
        const Heads<T> split{q_norm, k_norm, cosines, sines, positions, slots, own,                                    \
                             {keys, values, kv_heads, capacity, d}, heads, scaling, eps};                              \
        _Pragma("omp parallel for schedule(static)") for (int64_t row = 0; row < rows; row++)                          \
            split.split(joined + row * (heads + 2 * kv_heads) * d, q + row * heads * d, row);                          \
    }                                                                                                                  \
    extern "C" void gate_joined_##NAME(const T* joined, T* out, int64_t rows, int64_t d) {                             \
        _Pragma("omp parallel for schedule(static)") for (int64_t row = 0; row < rows; row++)                          \
            gate_joined(joined + row * 2 * d, out + row * d, d);                                                       \
    }                                                                                                                  \
    extern "C" void draw_##NAME(const T* logits, const float* temperatures, const double* uniforms, int64_t* tokens,   \
                                float* logprobs, int64_t rows, int64_t vocabulary) {                                   \
        draw_rows<T>(logits, temperatures, uniforms, tokens, logprobs, rows, vocabulary);                              \
    }
SAMPLER(float, float)
SAMPLER(Bf16, bf16)

extern "C" void multiply_bf16(const Bf16* x, const Bf16* tiles, const Bf16* bias, Bf16* out, int64_t rows,
                              int64_t inputs, int64_t outputs) {
    multiply(Linear<Bf16>{tiles, bias, inputs, outputs}, x, out, rows);
}

// How products of bfloat16 are computed, which not every processor can do in every way; returns whether it can.
extern "C" int64_t compute_by(int64_t wanted) {
    if (wanted != ONE_BY_ONE && !HAS_PAIRS) return false;
    if (wanted == IN_MATRICES && !matrices_granted()) return false;
    way = static_cast<Way>(wanted);
    return true;
}

// `Cache::copy` in all layers: of the addresses in `tensors`, those of keys come before those of values.
#define COPY(T, NAME)                                                                                                \
    extern "C" void copy_slot_##NAME(T* const* tensors, int64_t layers, int64_t heads, int64_t capacity, int64_t d,  \
                                     int64_t source, int64_t target, int64_t tokens) {                               \
        for (int64_t i = 0; i < layers; i++)                                                                         \
            Cache<T>{tensors[i], tensors[layers + i], heads, capacity, d}.copy(source, target, tokens);              \
    }
COPY(float, float)
COPY(Bf16, bf16)
