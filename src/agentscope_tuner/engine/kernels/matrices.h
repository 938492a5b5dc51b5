// Registers that hold matrices, which some processors have, and one instruction that multiplies two of them: of rows of
// pairs, see `pairs.h`.

#pragma once

#include "common.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_MATRICES 1
#else
#define HAS_MATRICES 0
#endif

namespace {

constexpr int64_t SIDE = 16;  // rows of such a register, and how many pairs or floats each of them has

// Rows that are multiplied: how far apart they are, and how far SIDE pairs of a row are from its next ones.
struct PairsOfRows {
    const uint32_t* start;
    int64_t stride, step = SIDE;
    PairsOfRows from(int64_t row) const { return {start + row * stride, stride, step}; }
};

#if HAS_MATRICES

// Asks the system for them, as it wants it, for all threads; returns whether they may be used.
bool matrices_granted() {
    constexpr long ASK = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, ASK, TILES) == 0;
}

constexpr int64_t AHEAD = 128;  // so many rows of a tile before they are multiplied by, they are asked for

// As long as it lives, its thread may multiply by them, if it is `wanted`.
class Matrices {
   public:
    explicit Matrices(bool wanted) : wanted(wanted) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};  // of a row, of each register
            uint8_t rows[16] = {};
        } shape;
        std::fill_n(shape.bytes, 8, 4 * SIDE);
        std::fill_n(shape.rows, 8, SIDE);
        asm volatile("" : : "r"(&shape) : "memory");  // all of it is read, which compilers do not know
        if (wanted) _tile_loadconfig(&shape);
    }
    ~Matrices() {
        if (wanted) _tile_release();
    }
    Matrices(const Matrices&) = delete;
    Matrices& operator=(const Matrices&) = delete;

   private:
    const bool wanted;
};

// out (HEIGHT SIDE, TILE) becomes, or grows by, pairs a times pairs of a tile (count, TILE); `count` is a multiple of
// SIDE. Rows of everything are some numbers or pairs apart.
template <int HEIGHT>
void multiply_matrices(const PairsOfRows& a, const uint32_t* tile, int64_t stride, int64_t count, float* out,
                       int64_t out_stride, bool add, int64_t soon, int64_t soon_end) {
    static_assert(TILE == 2 * SIDE && (HEIGHT == 1 || HEIGHT == 2));
    float* const below = out + SIDE * out_stride;
    const uint32_t* at = a.start;
    const int64_t a_bytes = 4 * a.stride, bytes = 4 * stride, out_bytes = 4 * out_stride;
    asm volatile("" ::: "memory");  // what is read was written before
    if (add) {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + SIDE, out_bytes);
        if constexpr (HEIGHT == 2) {
            _tile_loadd(2, below, out_bytes);
            _tile_loadd(3, below + SIDE, out_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t j = 0; j < count; j += SIDE, at += a.step, tile += SIDE * stride) {
        // Of this tile or the next: what is only asked for when it is needed is waited for.
        for (int64_t line = soon; line < soon_end; line++)
            _mm_prefetch(reinterpret_cast<const char*>(tile + AHEAD * TILE + line * SIDE), _MM_HINT_T1);
        _tile_loadd(4, at, a_bytes);
        _tile_loadd(6, tile, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tile + SIDE, bytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (HEIGHT == 2) {
            _tile_loadd(5, at + SIDE * a.stride, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + SIDE, out_bytes);
    if constexpr (HEIGHT == 2) {
        _tile_stored(2, below, out_bytes);
        _tile_stored(3, below + SIDE, out_bytes);
    }
    asm volatile("" ::: "memory");
}

// The same for m rows of which `width` numbers are wanted. There are rows of `a` up to a multiple of SIDE.
void multiply_matrices(const PairsOfRows& a, const uint32_t* tile, int64_t stride, int64_t count, float* out,
                       int64_t out_stride, int64_t m, int64_t width, bool add) {
    for (int64_t i = 0; i < m; i += 2 * SIDE) {
        const int64_t rows = std::min(2 * SIDE, m - i);
        const auto multiply = rows > SIDE ? multiply_matrices<2> : multiply_matrices<1>;
        float* const to = out + i * out_stride;
        const int64_t lines = stride == TILE ? 2 * SIDE : 0, soon = i * lines / m, soon_end = (i + rows) * lines / m;
        if (rows % SIDE == 0 && width == TILE) {
            multiply(a.from(i), tile, stride, count, to, out_stride, add, soon, soon_end);
            continue;
        }
        alignas(64) float whole[2 * SIDE * TILE];
        multiply(a.from(i), tile, stride, count, whole, TILE, false, soon, soon_end);
        for (int64_t r = 0; r < rows; r++) {
            if (!add) std::fill_n(to + r * out_stride, width, 0.0f);
            for (int64_t j = 0; j < width; j++) to[r * out_stride + j] += whole[r * TILE + j];
        }
    }
}

#else

inline bool matrices_granted() { return false; }
struct Matrices {
    explicit Matrices(bool) {}
};
inline void multiply_matrices(const PairsOfRows&, const uint32_t*, int64_t, int64_t, float*, int64_t, int64_t, int64_t,
                              bool) {}

#endif

}  // namespace
