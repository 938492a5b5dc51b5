// Attention of one new token per sequence over a key-value cache, read where it lies.
//
// Eager PyTorch has to copy the caches of a batch together, padded to the longest, before it can multiply; for long
// sequences that costs several times the arithmetic. Plain C, so that it compiles in a second without any headers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

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
// the first `lengths` of its slot, after the trunk's (kv_heads, trunk, d) if there is one.
extern "C" void decode_attention(const float* q, float* out, const float* keys, const float* values,
                                 const float* trunk_keys, const float* trunk_values, const int64_t* slots,
                                 const int64_t* lengths, int64_t rows, int64_t kv_heads, int64_t group, int64_t d,
                                 int64_t capacity, int64_t trunk) {
#pragma omp parallel
    {
        std::vector<float> scores;
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < rows * kv_heads; work++) {
            const int64_t row = work / kv_heads, head = work % kv_heads, own = lengths[row], seen = trunk + own;
            const int64_t at = (slots[row] * kv_heads + head) * capacity * d, shared = head * trunk * d;
            scores.resize(group * seen);
            score(q + work * group * d, trunk_keys + shared, scores.data(), trunk, group, d, seen);
            score(q + work * group * d, keys + at, scores.data() + trunk, own, group, d, seen);
            for (int64_t g = 0; g < group; g++) softmax(scores.data() + g * seen, seen);
            float* sum = out + work * group * d;
            std::fill(sum, sum + group * d, 0.0f);
            weigh(scores.data(), trunk_values + shared, sum, trunk, group, d, seen);
            weigh(scores.data() + trunk, values + at, sum, own, group, d, seen);
        }
    }
}
