// The sampler's steps between matrix products, with attention over a key-value cache read where it lies; and for small
// models all layers at once, products included.
//
// Eager PyTorch has to copy the caches of a batch together, padded to the longest, before it can multiply, and takes
// every step in many passes over memory. Products of small matrices take less time than calls, and threads that wait.
//
// The functions come for two types of numbers: `_float`, and `_bf16`, the upper half of a float. All sum up in floats.

#include "common.h"
#include "pairs.h"

namespace {

constexpr int64_t ROWS = 128;  // of a product's input, that a thread goes through before the next weights

// out (m, n), rows of `stride` numbers, becomes a (m, d) times keys in tiles (any, d, TILE).
void multiply_tiles(const float* a, const float* tiles, float* out, int64_t m, int64_t n, int64_t d, int64_t stride) {
    for (int64_t first = 0; first < n; first += TILE)
        score_tile<TOGETHER>(a, Rows{tiles + first * d, TILE}, out + first, m, std::min(TILE, n - first), d, stride);
}

// Adds weights (m, n), rows of `stride` numbers, times values (n, d) to out (m, d).
void add_values(const float* weights, int64_t stride, const float* values, float* out, int64_t m, int64_t n,
                int64_t d) {
    add_product(weights, 1, stride, Rows{values, d}, out, d, m, n, d);
}

// How many numbers a product of so many reads.
template <class T>
int64_t whole(int64_t count) {
    return std::is_same_v<T, Bf16> ? even(count) : count;
}

// Keys in tiles (slots, kv_heads, capacity / TILE, d, TILE), values (slots, kv_heads, capacity, d); in bfloat16 both in
// pairs, of a key's numbers and of neighbouring values.
template <class T>
struct Cache {
    T *keys, *values;
    int64_t kv_heads, capacity, d;

    int64_t at(int64_t slot, int64_t head) const { return (slot * kv_heads + head) * capacity * d; }

    void put_key(int64_t slot, int64_t head, int64_t token, const float* key) const {
        T* const to = keys + at(slot, head) + token / TILE * TILE * d;
        const int64_t within = token % TILE;
        for (int64_t j = 0; j < d; j++)
            if constexpr (std::is_same_v<T, Bf16>)
                put(to + (j / 2 * TILE + within) * 2 + j % 2, key[j]);
            else
                put(to + j * TILE + within, key[j]);
    }

    template <class In>
    void put_value(int64_t slot, int64_t head, int64_t token, const In* value) const {
        T* const to = values + at(slot, head);
        for (int64_t j = 0; j < d; j++)
            if constexpr (std::is_same_v<T, Bf16>)
                put(to + (token / 2 * d + j) * 2 + token % 2, number(value[j]));
            else
                put(to + token * d + j, number(value[j]));
    }
};

// A prefix of `length` tokens that rows see first, laid out like a slot.
struct Trunk {
    int64_t keys, values, length;
};

// New tokens, a row for each, over the cache.
template <class T>
struct Attention {
    Cache<T> cache;
    const Trunk* trunks;
    const int64_t *trunk_of, *slots, *lengths;
    int64_t group;

    // Cuts rows into blocks (first row, rows) whose keys are read together: those of one trunk, or of one slot.
    std::vector<std::pair<int64_t, int64_t>> blocks(int64_t first, int64_t end) const {
        const int64_t most = std::max<int64_t>(1, BLOCK / group);
        std::vector<std::pair<int64_t, int64_t>> found;
        for (int64_t row = first; row < end; row++) {
            const bool together = row > first && trunk_of[row] == trunk_of[row - 1] &&
                                  (trunk_of[row] >= 0 || slots[row] == slots[row - 1]);
            if (together && found.back().second < most)
                found.back().second++;
            else
                found.emplace_back(row, 1);
        }
        return found;
    }

    // Outputs (rows, H, d) of one key-value head, for a block of scaled queries (rows, H, d).
    template <class Out>
    void attend(const float* q, Out* out, std::pair<int64_t, int64_t> block, int64_t head) const {
        thread_local std::vector<float> scores, queries, sums;
        const int64_t first = block.first, count = block.second;
        const int64_t d = cache.d, many = count * group, row_size = cache.kv_heads * group * d;
        const Trunk trunk = trunk_of[first] < 0 ? Trunk{0, 0, 0} : trunks[trunk_of[first]];
        const int64_t tiled = (trunk.length + TILE - 1) / TILE * TILE;
        const T* const trunk_keys = reinterpret_cast<const T*>(trunk.keys) + head * tiled * d;
        const T* const trunk_values = reinterpret_cast<const T*>(trunk.values) + head * whole<T>(trunk.length) * d;
        const int64_t width = trunk.length + *std::max_element(lengths + first, lengths + first + count);
        queries.resize(many * d);
        sums.assign(many * d, 0.0f);
        scores.resize(many * width);
        for (int64_t i = 0; i < count; i++)
            std::memcpy(&queries[i * group * d], q + (first + i) * row_size + head * group * d,
                        group * d * sizeof(float));
        multiply_tiles(queries.data(), trunk_keys, scores.data(), many, trunk.length, d, width);
        // Each slot's own tokens, for its rows: from query `from` on, so many of them.
        const auto each_slot = [&](auto&& visit) {
            for (int64_t i = 0, end; i < count; i = end) {
                for (end = i + 1; end < count && slots[first + end] == slots[first + i];) end++;
                const int64_t own = *std::max_element(lengths + first + i, lengths + first + end);
                visit(i * group, (end - i) * group, cache.at(slots[first + i], head), own);
            }
        };
        each_slot([&](int64_t from, int64_t m, int64_t at, int64_t own) {
            multiply_tiles(&queries[from * d], cache.keys + at, &scores[from * width] + trunk.length, m, own, d, width);
        });
        for (int64_t i = 0; i < many; i++)
            softmax(&scores[i * width], trunk.length + lengths[first + i / group], width);
        add_values(scores.data(), width, trunk_values, sums.data(), many, trunk.length, d);
        each_slot([&](int64_t from, int64_t m, int64_t at, int64_t own) {
            add_values(&scores[from * width] + trunk.length, width, cache.values + at, &sums[from * d], m, own, d);
        });
        for (int64_t i = 0; i < count; i++) {
            Out* to = out + (first + i) * row_size + head * group * d;
            for (int64_t j = 0; j < group * d; j++) put(to + j, sums[i * group * d + j]);
        }
    }
};

// sum += change (where there is one), and out = sum / sqrt(mean(sum^2) + eps) * weight.
template <class Change, class T, class Out>
void add_norm(float* sum, const Change* change, const T* weight, Out* out, int64_t d, float eps) {
    float squares = 0;
    if (change != nullptr) {
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
#pragma omp simd
    for (int64_t j = 0; j < d; j++) put(out + j, sum[j] * by * number(weight[j]));
}

// How projections become queries, keys and values: norms over heads, which may be missing, then rotary embedding.
template <class T>
struct Heads {
    const T *q_norm, *k_norm;
    const float *cosines, *sines;  // (positions, d)
    const int64_t *positions, *slots, *own;
    Cache<T> cache;
    int64_t heads;
    float scaling, eps;

    // Splits a row's joined projections (heads + 2 kv_heads, d): queries, scaled, go to q (heads, d); keys and values to
    // the row's place in the cache.
    template <class In>
    void split(const In* from, float* q, int64_t row) const {
        thread_local std::vector<float> in, turned;
        const int64_t d = cache.d, half = d / 2, kv_heads = cache.kv_heads;
        in.resize(d);
        turned.resize(d);
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
                std::memcpy(q + head * d, turned.data(), d * sizeof(float));
            } else {
                cache.put_key(slots[row], head - heads, own[row], turned.data());
            }
        }
        for (int64_t head = 0; head < kv_heads; head++, from += d) cache.put_value(slots[row], head, own[row], from);
    }
};

// out (d) = silu(gate) * up, which lie side by side in joined (2 d).
template <class In, class Out>
void gate_joined(const In* joined, Out* out, int64_t d) {
#pragma omp simd
    for (int64_t j = 0; j < d; j++) put(out + j, silu(number(joined[j])) * number(joined[d + j]));
}

// A linear layer: weights (outputs, inputs) in tiles, like keys; the bias may be missing.
template <class T>
struct Linear {
    const T *tiles, *bias;
    int64_t inputs, outputs;

    void operator()(const float* x, float* y, int64_t rows) const {
        multiply_tiles(x, tiles, y, rows, outputs, inputs, outputs);
        if (bias == nullptr) return;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t j = 0; j < outputs; j++) y[row * outputs + j] += number(bias[j]);
    }
};

// The same by all threads, which share the weights: out (rows, outputs) for x (rows, inputs).
template <class T>
void multiply(const Linear<T>& linear, const T* x, T* out, int64_t rows) {
    const int64_t inputs = linear.inputs, outputs = linear.outputs, tiles = (outputs + TILE - 1) / TILE;
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    std::vector<float> wide(rows * inputs);
#pragma omp parallel
    {
        float product[ROWS * TILE];
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t j = 0; j < inputs; j++) wide[row * inputs + j] = number(x[row * inputs + j]);
#pragma omp for schedule(static)
        for (int64_t work = 0; work < blocks * tiles; work++) {
            const int64_t row = work / tiles * ROWS, first = work % tiles * TILE;
            const int64_t m = std::min(ROWS, rows - row), n = std::min(TILE, outputs - first);
            multiply_tiles(&wide[row * inputs], linear.tiles + first * whole<T>(inputs), product, m, n, inputs, TILE);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < n; j++)
                    put(out + (row + i) * outputs + first + j,
                        product[i * TILE + j] + (linear.bias == nullptr ? 0 : number(linear.bias[first + j])));
        }
    }
}

template <class T>
struct Layer {
    const T *norm_in, *norm_mid, *q_norm, *k_norm;
    Linear<T> qkv, out, gate_up, down;
    T *keys, *values;
};

// All layers, for the embeddings `sums` of new tokens (rows, width), which are overwritten: final hidden states `out`
// (rows, width). The rows are computed in pieces, each by one thread from end to end. Threads wait for each other once a
// layer: keys and values are written before they are read. Each layer has so many trunks of its own.
template <class T>
void forward(float* sums, T* out, const Layer<T>* layers, int64_t count, const T* norm, Attention<T> attention,
             int64_t trunks, Heads<T> heads, int64_t rows, int64_t width, int64_t pieces) {
    const int64_t q_size = heads.heads * heads.cache.d;
    std::vector<float> queries(rows * q_size);
    const auto first_of = [&](int64_t piece) { return rows * piece / pieces; };
#pragma omp parallel firstprivate(attention, heads)
    {
        thread_local std::vector<float> in, joined, gated, change;
        for (int64_t index = 0; index < count; index++) {
            const Layer<T>& layer = layers[index];
            attention.cache.keys = heads.cache.keys = layer.keys;
            attention.cache.values = heads.cache.values = layer.values;
            heads.q_norm = layer.q_norm;
            heads.k_norm = layer.k_norm;
            if (index > 0) attention.trunks += trunks;
#pragma omp for schedule(static)
            for (int64_t piece = 0; piece < pieces; piece++) {
                const int64_t first = first_of(piece), n = first_of(piece + 1) - first;
                in.resize(n * width);
                joined.resize(n * layer.qkv.outputs);
                for (int64_t i = 0; i < n; i++)
                    add_norm<float>(sums + (first + i) * width, nullptr, layer.norm_in, &in[i * width], width,
                                    heads.eps);
                layer.qkv(in.data(), joined.data(), n);
                for (int64_t i = 0; i < n; i++)
                    heads.split(&joined[i * layer.qkv.outputs], &queries[(first + i) * q_size], first + i);
            }
            // The same pieces fall to the same threads, so nobody has to wait for what comes next.
#pragma omp for schedule(static) nowait
            for (int64_t piece = 0; piece < pieces; piece++) {
                const int64_t first = first_of(piece), n = first_of(piece + 1) - first;
                const int64_t inner = layer.down.inputs;
                for (const auto& block : attention.blocks(first, first + n))
                    for (int64_t head = 0; head < attention.cache.kv_heads; head++)
                        attention.attend(queries.data(), queries.data(), block, head);
                in.resize(n * width);
                change.resize(n * width);
                joined.resize(n * 2 * inner);
                gated.resize(n * inner);
                layer.out(&queries[first * q_size], change.data(), n);
                for (int64_t i = 0; i < n; i++)
                    add_norm(sums + (first + i) * width, &change[i * width], layer.norm_mid, &in[i * width], width,
                             heads.eps);
                layer.gate_up(in.data(), joined.data(), n);
                for (int64_t i = 0; i < n; i++) gate_joined(&joined[i * 2 * inner], &gated[i * inner], inner);
                layer.down(gated.data(), change.data(), n);
                for (int64_t i = 0; i < n; i++) {
                    float* sum = sums + (first + i) * width;
                    for (int64_t j = 0; j < width; j++) sum[j] += change[i * width + j];
                    if (index == count - 1)
                        add_norm<float>(sum, nullptr, norm, out + (first + i) * width, width, heads.eps);
                }
            }
        }
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

template <class T>
void attend(const float* q, T* out, const Attention<T>& attention, int64_t rows) {
    const auto blocks = attention.blocks(0, rows);
    const int64_t kv_heads = attention.cache.kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t work = 0; work < static_cast<int64_t>(blocks.size()) * kv_heads; work++)
        attention.attend(q, out, blocks[work / kv_heads], work % kv_heads);
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
    extern "C" void forward_##NAME(float* sums, T* out, const Layer<T>* layers, const T* norm, const float* cosines,   \
                                   const float* sines, const int64_t* positions, const int64_t* slots,                 \
                                   const int64_t* own, const int64_t* lengths, const Trunk* trunks,                    \
                                   const int64_t* trunk_of, int64_t count, int64_t trunk_count, int64_t rows,          \
                                   int64_t width, int64_t heads, int64_t kv_heads, int64_t d, int64_t capacity,        \
                                   int64_t pieces, float scaling, float eps) {                                         \
        const Cache<T> cache{nullptr, nullptr, kv_heads, capacity, d};                                                 \
        forward<T>(sums, out, layers, count, norm, {cache, trunks, trunk_of, slots, lengths, heads / kv_heads},        \
                   trunk_count,                                                                                        \
                   {nullptr, nullptr, cosines, sines, positions, slots, own, cache, heads, scaling, eps}, rows, width, \
                   pieces);                                                                                            \
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

// Whether products of bfloat16 are computed in pairs, which not every processor can; returns whether they are.
extern "C" int64_t compute_in_pairs(int64_t wanted) {
    in_pairs = HAS_PAIRS && wanted;
    return in_pairs;
}

// Copies the first rows of each head from one slot to another. Each of `tensors`, those of keys before those of values,
// is (start, bytes of a head of a slot, bytes of a row).
extern "C" void copy_slot(const int64_t* tensors, int64_t layers, int64_t heads, int64_t source, int64_t target,
                          int64_t key_rows, int64_t value_rows) {
    for (int64_t i = 0; i < 2 * layers; i++) {
        char* const start = reinterpret_cast<char*>(tensors[3 * i]);
        const int64_t size = tensors[3 * i + 1], bytes = tensors[3 * i + 2] * (i < layers ? key_rows : value_rows);
        for (int64_t head = 0; head < heads; head++)
            std::memcpy(start + (target * heads + head) * size, start + (source * heads + head) * size, bytes);
    }
}
