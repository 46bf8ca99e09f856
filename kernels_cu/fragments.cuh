#pragma once
// Fragments of matrices as the tensor cores take them: what lane 4g + t of a warp holds.
//
//   left operand  16 x 16   rows g, g + 8, g, g + 8 of columns 2t.., 2t.., 2t + 8.., 2t + 8.., two
//                           16-bit elements a word
//   right operand 16 x 8    column g, rows 2t, 2t + 1 and 2t + 8, 2t + 9
//   result        16 x 8    rows g, g, g + 8, g + 8 of columns 2t, 2t + 1, 2t, 2t + 1, in float
#include "vec.cuh"

__device__ __forceinline__ unsigned int pack_pair(float lo, float hi, __nv_bfloat16) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const unsigned int*>(&x);
}
__device__ __forceinline__ unsigned int pack_pair(float lo, float hi, __half) {
    const __half2 x = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const unsigned int*>(&x);
}

// Two neighbouring elements of a row that starts at a whole word.
template <typename T>
__device__ __forceinline__ void store_pair(T* to, float lo, float hi) {
    *reinterpret_cast<unsigned int*>(to) = pack_pair(lo, hi, T());
}
__device__ __forceinline__ void store_pair(float* to, float lo, float hi) {
    to[0] = lo, to[1] = hi;
}

// Two ones.
__device__ __forceinline__ unsigned int pair_of_ones(__nv_bfloat16) { return 0x3f803f80u; }
__device__ __forceinline__ unsigned int pair_of_ones(__half) { return 0x3c003c00u; }

// Two e4m3 in the upper bytes of the halves of a word, as float16: the exponent is 8 too small once
// the bits are in place, and the largest magnitude is NaN.
__device__ __forceinline__ unsigned int e4m3_to_half(unsigned int bits) {
    const unsigned int magnitude = (bits & 0x7f007f00u) >> 1;
    const unsigned int nan = (magnitude + 0x00800080u) >> 14 & 0x00010001u;
    const unsigned int x = (bits & 0x80008000u) | magnitude, scale = 0x5c005c00u;   // 2^8, twice
    const __half2 y = __hmul2(*reinterpret_cast<const __half2*>(&x),
                              *reinterpret_cast<const __half2*>(&scale));
    return *reinterpret_cast<const unsigned int*>(&y) | nan * 0x7fffu;
}

// Four 8-bit floats as float16, which holds every one of them, two in a word.
__device__ __forceinline__ void to_half(unsigned int bits, unsigned int& lo, unsigned int& hi,
                                        __nv_fp8_e4m3) {
#if __CUDA_ARCH__ >= 890
    cvt_e4m3_to_half(bits, lo, hi);
#else
    lo = e4m3_to_half(__byte_perm(bits, 0, 0x1404));
    hi = e4m3_to_half(__byte_perm(bits, 0, 0x3424));
#endif
}
__device__ __forceinline__ void to_half(unsigned int bits, unsigned int& lo, unsigned int& hi,
                                        __nv_fp8_e5m2) {
    lo = __byte_perm(bits, 0, 0x1404), hi = __byte_perm(bits, 0, 0x3424);    // the upper bytes
}

// Cache pages in shared memory as left operands: K with a key a row, V with a column of the output
// a row. One ldmatrix brings N of them. Math is what the tensor cores multiply.
template <typename TKV>
struct Fragments {
    using Math = TKV;
    static constexpr int N = 1;

    static __device__ __forceinline__ void keys(unsigned int (&a)[N][4], const void* row) {
        ldmatrix_x4(a[0], row);
    }
    static __device__ __forceinline__ void values(unsigned int (&a)[N][4], const void* row) {
        ldmatrix_x4_trans(a[0], row);
    }
    // A right operand that meets `keys`: where in 16 columns of a query its two words begin.
    static constexpr int QUERY_COLUMN = 2, QUERY_STEP = 8;       // times t; from one to the other
    // Column of 16 of the output that rows g (i = 0) and g + 8 (i = 1) hold.
    static __device__ __forceinline__ int out_column(int g, int i) { return g + 8 * i; }
};

// 8-bit elements: four in a word where two are meant to be. In K they are neighbours of one key,
// columns 4t .. 4t + 3: any order of columns will do, as long as the query has the same. In V they
// are columns 2g, 2g + 1 of the keys 2t, 2t + 1: the columns go to different rows.
template <typename TKV>
struct EightBitFragments {
    using Math = __half;
    static constexpr int N = 2;

    static __device__ __forceinline__ void keys(unsigned int (&a)[N][4], const void* row) {
        unsigned int r[4];       // keys 0-7 and 8-15 of 16 columns, then of the next 16
        ldmatrix_x4(r, row);
#pragma unroll
        for (int i = 0; i < 4; i++) to_half(r[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2], TKV());
    }
    static __device__ __forceinline__ void values(unsigned int (&a)[N][4], const void* row) {
        unsigned int r[4];       // 16 columns and the next 16 of keys 0-7, then of keys 8-15
        ldmatrix_x4_trans(r, row);
#pragma unroll
        for (int i = 0; i < 4; i++)
            to_half(__byte_perm(r[i], 0, 0x3120), a[i % 2][i / 2 * 2], a[i % 2][i / 2 * 2 + 1],
                    TKV());
    }
    static constexpr int QUERY_COLUMN = 4, QUERY_STEP = 2;
    static __device__ __forceinline__ int out_column(int g, int i) { return 2 * g + i; }
};
template <>
struct Fragments<__nv_fp8_e4m3> : EightBitFragments<__nv_fp8_e4m3> {};
template <>
struct Fragments<__nv_fp8_e5m2> : EightBitFragments<__nv_fp8_e5m2> {};

template <typename A, typename B>
constexpr bool SAME = false;
template <typename A>
constexpr bool SAME<A, A> = true;

// The queries of 8 * TILES heads as right operands, for a cache of TKV.
template <typename T, typename TKV, int D, int TILES>
struct QueryTile {
    using F = Fragments<TKV>;
    // bfloat16 against an 8-bit cache: a power of two brings each head into the range of float16.
    // Elements then lose bits where they are 2^-32 of the head's largest.
    static constexpr bool SCALED = !SAME<T, typename F::Math>;

    unsigned int bits[TILES][D / 16][2];
    float unit[TILES][2];        // SCALED: what products of the heads 2t, 2t + 1 are multiples of

    // As they are in memory; they are no operands before `bring_into_range`, which waits for them.
    // q: first head. Columns from `heads` on repeat the last head; nobody reads their results.
    // WRITTEN: since this launch began, so that the read-only path, which the compiler may move up
    // over a wait, is not for them.
    template <bool WRITTEN = false>
    __device__ __forceinline__ void load(const T* q, long long stride_head, int heads) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int head = min(n * 8 + lane / 4, heads - 1);
            const T* row = q + head * stride_head + lane % 4 * F::QUERY_COLUMN;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                const unsigned int* word = reinterpret_cast<const unsigned int*>(
                    row + i / 2 * 16 + i % 2 * F::QUERY_STEP);
                bits[n][i / 2][i % 2] = WRITTEN ? *word : __ldg(word);
            }
        }
    }
    __device__ __forceinline__ void bring_into_range() {
        if constexpr (SCALED)
#pragma unroll
            for (int n = 0; n < TILES; n++) bring_into_range(n);
    }

private:
    __device__ __forceinline__ void bring_into_range(int n) {
        const int lane = threadIdx.x % 32;
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const float2 x = half_bits(bits[n][i / 2][i % 2], T());
            top = fmaxf(top, fmaxf(fabsf(x.x), fabsf(x.y)));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        // 2^14 <= top * 2^n < 2^15; both powers are normal floats
        const int up = min(14 + 127 - (__float_as_int(top) >> 23), 126);
        const float factor = __int_as_float((127 + up) << 23);
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const float2 x = half_bits(bits[n][i / 2][i % 2], T());
            bits[n][i / 2][i % 2] =
                pack_pair(x.x * factor, x.y * factor, typename F::Math());
        }
        const float one = __int_as_float((127 - up) << 23);
#pragma unroll
        for (int h = 0; h < 2; h++)
            unit[n][h] = __shfl_sync(0xffffffffu, one, (lane % 4 * 2 + h) * 4);
    }
};
