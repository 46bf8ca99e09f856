#pragma once
// The state of a softmax over some of the keys: a value with laws.
//
// For scores x_j in log2 units (x = score * log2 e) the state of a set of keys is
//     m   = max x_j
//     l   = sum 2^(x_j - m)
//     acc = sum 2^(x_j - m) v_j          (one element per output column, kept by its owner)
// Two states merge by bringing both to the larger maximum M: l and acc times weight(m, M), added.
// Merging is associative and commutative (up to rounding); EMPTY = (-inf, 0, 0) is its identity.
#include "ptx.cuh"

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fffffff); }

struct SoftmaxState {
    float m = neg_inf();
    float l = 0.0f;
};

// Factor that brings a state with maximum m to maximum M >= m.
// An empty state has weight 0; without the test, -inf - -inf would be NaN.
__device__ __forceinline__ float weight(float m, float M) {
    return m == neg_inf() ? 0.0f : ex2(m - M);
}

// 2^(score * log2 e - m), the subtraction fused: at scores of -65536 a product rounded first would
// be off by 2^-8, and so would the weights. A masked score (-inf) gives 0 even where no key has
// been seen yet (m = -inf), and a NaN score gives NaN: a bad input must show in the result.
__device__ __forceinline__ float probability(float score, float m) {
    return ex2(fmaf(score, LOG2_E, m == neg_inf() ? 0.0f : -m));
}

// Natural log-sum-exp of the scores of a state; -inf when it holds no key.
__device__ __forceinline__ float lse_of(float m, float l) {
    return l == 0.0f ? neg_inf() : (m + log2f(l)) * LN_2;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
