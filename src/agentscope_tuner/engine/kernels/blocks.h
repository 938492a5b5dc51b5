// What the sampler's kernels share: attention over a key-value cache, read where it lies; the steps between matrix
// products; linear layers; drawing. All work on numbers of two types, float and bfloat16, and sum up in floats.

#pragma once

#include "common.h"
#include "pairs.h"

namespace {

// Adds weights (m, n), rows of `stride` numbers, times values (n, d) to out (m, d).
void add_values(const float* weights, int64_t stride, const float* values, float* out, int64_t m, int64_t n,
                int64_t d) {
    add_product(weights, 1, stride, Rows{values, d}, out, d, m, n, d);
}

// How many numbers a product of so many reads.
template <class T>
int64_t whole(int64_t count) {
    return std::is_same_v<T, Bf16> ? round_up(count, 2) : count;
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

    // One slot begins with as many tokens of another one.
    void copy(int64_t source, int64_t target, int64_t tokens) const {
        const int64_t tiled = round_up(tokens, TILE);
        for (int64_t head = 0; head < kv_heads; head++) {
            std::copy_n(keys + at(source, head), tiled * d, keys + at(target, head));
            std::copy_n(values + at(source, head), whole<T>(tokens) * d, values + at(target, head));
        }
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

    int64_t row_size() const { return cache.kv_heads * group * cache.d; }

    // Each slot of a block: its first query there, how many it has, where a head of it is, how many tokens.
    template <class Visit>
    void each_slot(std::pair<int64_t, int64_t> block, int64_t head, Visit visit) const {
        const int64_t first = block.first, count = block.second;
        for (int64_t i = 0, end; i < count; i = end) {
            for (end = i + 1; end < count && slots[first + end] == slots[first + i];) end++;
            const int64_t own = *std::max_element(lengths + first + i, lengths + first + end);
            visit(i * group, (end - i) * group, cache.at(slots[first + i], head), own);
        }
    }

    // Lines of memory with what a block's slots hold of keys and values, as far as a processor keeps them until they are
    // read: they lie apart, slot by slot, so that it does not find them by itself.
    void find_lines(std::pair<int64_t, int64_t> block, int64_t head, std::vector<const T*>& lines) const {
        constexpr int64_t LINE = 64 / sizeof(T), MOST = 2048;
        lines.clear();
        each_slot(block, head, [&](int64_t, int64_t, int64_t at, int64_t own) {
            const int64_t numbers = round_up(own, TILE) * cache.d;
            if (static_cast<int64_t>(lines.size()) + 2 * numbers / LINE > MOST) return;
            for (int64_t i = 0; i < numbers; i += LINE) lines.push_back(cache.keys + at + i);
            for (int64_t i = 0; i < whole<T>(own) * cache.d; i += LINE) lines.push_back(cache.values + at + i);
        });
    }

    // Outputs (rows, H, d) of one key-value head, for a block of scaled queries (rows, H, d), which both begin with it.
    // `soon` are lines that the same thread reads next, which are asked for in between.
    template <class Out>
    void attend(const float* q, Out* out, std::pair<int64_t, int64_t> block, int64_t head,
                const std::vector<const T*>& soon = {}) const {
        thread_local std::vector<float> scores, queries, sums;
        const int64_t first = block.first, count = block.second;
        const int64_t d = cache.d, many = count * group;
        const Trunk trunk = trunk_of[first] < 0 ? Trunk{0, 0, 0} : trunks[trunk_of[first]];
        const int64_t tiled = round_up(trunk.length, TILE);
        const T* const trunk_keys = reinterpret_cast<const T*>(trunk.keys) + head * tiled * d;
        const T* const trunk_values = reinterpret_cast<const T*>(trunk.values) + head * whole<T>(trunk.length) * d;
        const int64_t width = trunk.length + *std::max_element(lengths + first, lengths + first + count);
        queries.resize(many * d);
        sums.assign(many * d, 0.0f);
        scores.resize(many * width);
        for (int64_t i = 0; i < count; i++)
            std::memcpy(&queries[i * group * d], q + i * row_size() + head * group * d, group * d * sizeof(float));
        multiply_tiles(queries.data(), trunk_keys, scores.data(), many, trunk.length, d, width);
        each_slot(block, head, [&](int64_t from, int64_t m, int64_t at, int64_t own) {
            multiply_tiles(&queries[from * d], cache.keys + at, &scores[from * width] + trunk.length, m, own, d, width);
        });
        const int64_t lines = soon.size();
        for (int64_t i = 0; i < many; i++) {
            for (int64_t line = i * lines / many; line < (i + 1) * lines / many; line++)
                __builtin_prefetch(soon[line], 0, 2);
            softmax(&scores[i * width], trunk.length + lengths[first + i / group], width);
        }
        add_values(scores.data(), width, trunk_values, sums.data(), many, trunk.length, d);
        each_slot(block, head, [&](int64_t from, int64_t m, int64_t at, int64_t own) {
            add_values(&scores[from * width] + trunk.length, width, cache.values + at, &sums[from * d], m, own, d);
        });
        for (int64_t i = 0; i < count; i++) {
            Out* to = out + i * row_size() + head * group * d;
            for (int64_t j = 0; j < group * d; j++) put(to + j, sums[i * group * d + j]);
        }
    }
};

// 1 / sqrt(mean(x^2) + eps). It is never inlined: what is summed in another order differs in the last bit, and a compiler
// chooses the order by what is around.
__attribute__((noinline)) float inverse_root(const float* x, int64_t d, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < d; j++) squares += x[j] * x[j];
    return 1 / std::sqrt(squares / d + eps);
}

// sum += change (where there is one), and out = sum * by * weight, with by = 1 / sqrt(mean(sum^2) + eps), which is
// returned.
template <class Change, class T, class Out>
float add_norm(float* sum, const Change* change, const T* weight, Out* out, int64_t d, float eps) {
    if (change != nullptr) {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) sum[j] += number(change[j]);
    }
    const float by = inverse_root(sum, d, eps);
#pragma omp simd
    for (int64_t j = 0; j < d; j++) put(out + j, sum[j] * by * number(weight[j]));
    return by;
}

// A projected head (d) as attention reads it: its norm, where there is a weight for it, turned; times `scaling`.
template <class In, class T>
void place_head(const In* from, const T* norm, const float* cosines, const float* sines, float* out, int64_t d,
                float scaling, float eps) {
    thread_local std::vector<float> in;
    in.resize(d);
    for (int64_t j = 0; j < d; j++) in[j] = number(from[j]);
    if (norm != nullptr) {
        float squares = 0;
        for (int64_t j = 0; j < d; j++) squares += in[j] * in[j];
        scaling /= std::sqrt(squares / d + eps);
        for (int64_t j = 0; j < d; j++) in[j] *= number(norm[j]);
    }
    for (int64_t j = 0; j < d; j++) in[j] *= scaling;
    turn(in.data(), cosines, sines, out, d / 2, 1);
}

// Of each row, slots of other sequences that have the same token at the same place, and the same before it: the slots from
// `first[row]` to `first[row + 1]`, if there are any at all.
struct Twins {
    const int64_t *first = nullptr, *slots = nullptr;

    template <class Visit>
    void each_slot(int64_t row, Visit visit) const {
        if (first == nullptr) return;
        for (int64_t i = first[row]; i < first[row + 1]; i++) visit(slots[i]);
    }
};

// How projections become queries, keys and values: norms over heads, which may be missing, then rotary embedding.
template <class T>
struct Heads {
    const T *q_norm, *k_norm;
    const float *cosines, *sines;  // (positions, d)
    const int64_t *positions, *slots, *own;
    Cache<T> cache;
    int64_t heads;
    float scaling, eps;
    Twins twins = {};

    // Splits a row's joined projections (heads + 2 kv_heads, d): queries, scaled, go to q (heads, d); keys and values to
    // the row's place in the cache, and to that of its twins.
    template <class In>
    void split(const In* from, float* q, int64_t row) const {
        thread_local std::vector<float> key;
        const int64_t d = cache.d, kv_heads = cache.kv_heads;
        key.resize(d);
        const float *c = cosines + positions[row] * d, *s = sines + positions[row] * d;
        for (int64_t head = 0; head < heads; head++, from += d)
            place_head(from, q_norm, c, s, q + head * d, d, scaling, eps);
        for (int64_t head = 0; head < kv_heads; head++, from += d) {
            place_head(from, k_norm, c, s, key.data(), d, 1, eps);
            const auto keep = [&](int64_t slot) {
                cache.put_key(slot, head, own[row], key.data());
                cache.put_value(slot, head, own[row], from + kv_heads * d);
            };
            keep(slots[row]);
            twins.each_slot(row, keep);
        }
    }
};

// out (d) = silu(gate) * up, which lie side by side in joined (2 d).
template <class In, class Out>
void gate_joined(const In* joined, Out* out, int64_t d) {
#pragma omp simd
    for (int64_t j = 0; j < d; j++) put(out + j, silu(number(joined[j])) * number(joined[d + j]));
}

// A linear layer: weights (outputs, inputs) in tiles, like keys; the bias may be missing. Of one with a low-rank update, B
// (outputs, rank) times A (rank, inputs), the tiles are those of both weights and B, side by side: what A makes of a row
// comes after the row itself, so that the update takes no pass over the outputs. Rows in bfloat16 have even inputs, and so
// is the rank there.
template <class T>
struct Linear {
    const T *tiles, *bias;
    int64_t inputs, outputs;
    const T* a = nullptr;  // in tiles
    int64_t rank = 0;

    template <class In>
    void operator()(const In* x, float* y, int64_t rows) const {
        multiply_tiles(rank == 0 ? x : with_update(x, rows), tiles, y, rows, outputs, inputs + rank, outputs);
        if (bias == nullptr) return;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t j = 0; j < outputs; j++) y[row * outputs + j] += number(bias[j]);
    }

   private:
    // Rows (rows, inputs + rank).
    template <class In>
    const In* with_update(const In* x, int64_t rows) const {
        thread_local std::vector<float> parts;
        thread_local std::vector<In> room;
        parts.resize(rows * rank);
        multiply_tiles(x, a, parts.data(), rows, rank, inputs, rank);
        room.resize(rows * (inputs + rank));
        for (int64_t row = 0; row < rows; row++) {
            In* const to = std::copy_n(x + row * inputs, inputs, &room[row * (inputs + rank)]);
            for (int64_t r = 0; r < rank; r++) put(to + r, parts[row * rank + r]);
        }
        return room.data();
    }
};

// A token by a row of logits, by inverting the cumulative distribution at `uniform`, and its log-probability; at
// temperature 0 the likeliest one, and its log-probability at temperature 1.
template <class T>
int64_t draw_token(const T* x, float temperature, double uniform, int64_t vocabulary, float* logprob) {
    constexpr int64_t PART = 256;  // two levels keep the sums short: which part of the vocabulary, then which token
    thread_local std::vector<double> sums;
    float weights[PART];
    sums.resize(ceil_div(vocabulary, PART));
    float most = number(x[0]);
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < vocabulary; j++) most = std::max(most, number(x[j]));
    const float by = temperature > 0 ? 1 / temperature : 1;
    // Zero for what is as unlikely as exp(-75), so that nothing is drawn whose logit is minus infinity; by bits as well.
    const auto weight = [&](int64_t j) {
        float e = exponential((number(x[j]) - most) * by);
        uint32_t word;
        std::memcpy(&word, &e, sizeof(word));
        word &= 0 - static_cast<uint32_t>(word > 0x09808333u);  // 3.1e-33
        std::memcpy(&e, &word, sizeof(word));
        return e;
    };
    double total = 0;
    for (size_t part = 0; part < sums.size(); part++) {
        const int64_t first = part * PART, end = std::min(first + PART, vocabulary);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = first; j < end; j++) sum += weight(j);
        total += sums[part] = sum;
    }
    int64_t token = 0;
    if (temperature > 0) {
        double rest = uniform * total;
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
        for (int64_t j = 0; j < n; j++) weights[j] = weight(first + j);
        for (int64_t j = 0; j < n && (weights[j] == 0 || rest >= 0); j++) {
            if (weights[j] > 0) token = first + j;
            rest -= weights[j];
        }
    } else {
        while (number(x[token]) != most) token++;
    }
    *logprob = (number(x[token]) - most) * by - std::log(total);
    return token;
}

}  // namespace
