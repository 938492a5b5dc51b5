// Gradients of weights, by registers that hold matrices.

#include <algorithm>
#include <memory>
#include <vector>

#include "strips.h"

namespace {

#if HAS_MATRICES

// Rows, or strips of them.
struct Grid {
    const Bf16* start;
    int64_t row, strip;  // how far apart they are
    const Bf16* at(int64_t i, int64_t column) const { return start + i * row + column / TILE * strip; }
};

constexpr int64_t TOKENS = 2 * SIDE;         // that are added up at once; columns are, TILE at a time
constexpr int64_t PACKED = SIDE * TILE;      // pairs of a block of TOKENS by TILE numbers
constexpr int64_t CHUNK = 16;                // such blocks that are added up before their sums are written
constexpr int64_t OUTPUTS = 4, INPUTS = 16;  // strips whose products, and a chunk of which, stay in a core's cache
static_assert(TILE == TOKENS && PIECE_IN_MATRICES % TOKENS == 0);

// A block of numbers in pairs of tokens (SIDE, TILE, 2), of which `count` are there and the others zero.
void pack_pairs(const Grid& from, int64_t first, int64_t column, int64_t count, uint32_t* to) {
    static constexpr Bf16 NONE[TILE] = {};
    for (int64_t t = 0; t < TOKENS; t += 2) {
        const Bf16* const even = t < count ? from.at(first + t, column) : NONE;
        const Bf16* const odd = t + 1 < count ? from.at(first + t + 1, column) : NONE;
#pragma omp simd
        for (int64_t j = 0; j < TILE; j++)
            to[t / 2 * TILE + j] = even[j].bits | static_cast<uint32_t>(odd[j].bits) << 16;
    }
}

// The same block for the left side of a product: (TILE, SIDE, 2).
void pack_transposed(const Grid& from, int64_t first, int64_t column, int64_t count, uint32_t* to) {
    alignas(64) uint32_t pairs[PACKED];
    pack_pairs(from, first, column, count, pairs);
    for (int64_t side = 0; side < TILE; side += SIDE) {
        __m512i rows[SIDE], mixed[SIDE];
        for (int64_t r = 0; r < SIDE; r++) rows[r] = _mm512_loadu_si512(pairs + r * TILE + side);
        for (int r = 0; r < SIDE; r += 2) {
            mixed[r] = _mm512_unpacklo_epi32(rows[r], rows[r + 1]);
            mixed[r + 1] = _mm512_unpackhi_epi32(rows[r], rows[r + 1]);
        }
        for (int r = 0; r < SIDE; r += 4)
            for (int k = 0; k < 2; k++) {
                rows[r + 2 * k] = _mm512_unpacklo_epi64(mixed[r + k], mixed[r + 2 + k]);
                rows[r + 2 * k + 1] = _mm512_unpackhi_epi64(mixed[r + k], mixed[r + 2 + k]);
            }
        // Of every four rows there are now columns 4 n + k, for four n; lanes of 128 bits are what is left to exchange.
        for (int k = 0; k < 4; k++) {
            const __m512i a = _mm512_shuffle_i32x4(rows[k], rows[4 + k], 0x88);
            const __m512i b = _mm512_shuffle_i32x4(rows[k], rows[4 + k], 0xdd);
            const __m512i c = _mm512_shuffle_i32x4(rows[8 + k], rows[12 + k], 0x88);
            const __m512i d = _mm512_shuffle_i32x4(rows[8 + k], rows[12 + k], 0xdd);
            mixed[k] = _mm512_shuffle_i32x4(a, c, 0x88);
            mixed[8 + k] = _mm512_shuffle_i32x4(a, c, 0xdd);
            mixed[4 + k] = _mm512_shuffle_i32x4(b, d, 0x88);
            mixed[12 + k] = _mm512_shuffle_i32x4(b, d, 0xdd);
        }
        for (int64_t r = 0; r < SIDE; r++) _mm512_storeu_si512(to + (side + r) * SIDE, mixed[r]);
    }
}

#endif

}  // namespace

// Whether rows with so many columns lie in strips.
extern "C" int64_t whether_in_strips(int64_t columns, int64_t others) {
    return lie_in_strips(columns, others);
}

// out (outputs, inputs) becomes the transpose of `grad` (rows, outputs) times x (rows, inputs), both row by row, or
// in strips of each PIECE_IN_MATRICES rows. All columns are multiples of TILE.
extern "C" void weight_gradient_bf16(const Bf16* grad, const Bf16* x, Bf16* out, int64_t rows, int64_t outputs,
                                     int64_t inputs, int64_t grad_strips, int64_t x_strips) {
#if HAS_MATRICES
    const int64_t blocks = ceil_div(rows, TOKENS), out_strips = outputs / TILE, in_strips = inputs / TILE;
    const int64_t wide = ceil_div(in_strips, ceil_div(in_strips, INPUTS)), across = ceil_div(in_strips, wide);
    const std::unique_ptr<uint32_t[]> packed(new uint32_t[in_strips * blocks * PACKED]);
    const auto visit = [&](const Bf16* start, int64_t columns, bool strips, int64_t block, auto work) {
        const int64_t first = block * TOKENS, begun = first / PIECE_IN_MATRICES * PIECE_IN_MATRICES;
        const int64_t n = std::min(PIECE_IN_MATRICES, rows - begun);
        const Bf16* const from = start + begun * columns;
        work(strips ? Grid{from, TILE, filled(n) * TILE} : Grid{from, columns, TILE}, first - begun,
             std::min(TOKENS, rows - first));
    };
#pragma omp parallel
    {
        const Matrices matrices(true);
        std::vector<uint32_t> left(OUTPUTS * CHUNK * PACKED);
        std::vector<float> sums(OUTPUTS * wide * TILE * TILE);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++)
            visit(x, inputs, x_strips, block, [&](const Grid& from, int64_t first, int64_t count) {
                for (int64_t s = 0; s < in_strips; s++)
                    pack_pairs(from, first, s * TILE, count, &packed[(s * blocks + block) * PACKED]);
            });
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < ceil_div(out_strips, OUTPUTS) * across; work++) {
            const int64_t first = work / across * OUTPUTS, high = std::min(OUTPUTS, out_strips - first);
            const int64_t begin = work % across * wide, end = std::min(begin + wide, in_strips);
            for (int64_t chunk = 0; chunk < blocks; chunk += CHUNK) {
                const int64_t count = std::min(CHUNK, blocks - chunk);
                for (int64_t b = 0; b < count; b++)
                    visit(grad, outputs, grad_strips, chunk + b, [&](const Grid& from, int64_t row, int64_t n) {
                        for (int64_t o = 0; o < high; o++)
                            pack_transposed(from, row, (first + o) * TILE, n, &left[(o * CHUNK + b) * PACKED]);
                    });
                for (int64_t s = begin; s < end; s++)
                    for (int64_t o = 0; o < high; o++)
                        multiply_matrices<2>({&left[o * CHUNK * PACKED], SIDE, PACKED},
                                             &packed[(s * blocks + chunk) * PACKED], TILE, count * SIDE,
                                             &sums[((s - begin) * OUTPUTS + o) * TILE * TILE], TILE, chunk > 0, 0, 0);
            }
            for (int64_t s = begin; s < end; s++)
                for (int64_t o = 0; o < high; o++)
                    for (int64_t r = 0; r < TILE; r++)
                        for (int64_t j = 0; j < TILE; j++)
                            put(out + ((first + o) * TILE + r) * inputs + s * TILE + j,
                                sums[(((s - begin) * OUTPUTS + o) * TILE + r) * TILE + j]);
        }
    }
#else
    (void)grad, (void)x, (void)out, (void)rows, (void)outputs, (void)inputs, (void)grad_strips, (void)x_strips;
#endif
}
