#pragma once
// Element types and the vectors they travel in.
//
// CUPY_DECODE_FP32_ONLY leaves the half-precision headers out, so that float32 kernels compile
// where only the bare compiler is installed.
#include "ptx.cuh"

#ifndef CUPY_DECODE_FP32_ONLY
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

// Elements of T in 16 bytes.
template <typename T>
struct Vec {
    static constexpr int N = 16 / sizeof(T);
};

// How a row of D elements of T travels: in 16-byte vectors, or in 8-byte ones where those do not
// divide it (8-bit elements, D an odd multiple of 8).
template <bool WHOLE>
struct RowVector {
    using Type = uint4;
};
template <>
struct RowVector<false> {
    using Type = uint2;
};
template <typename T, int D>
struct Row {
    using Vector = typename RowVector<D * sizeof(T) % 16 == 0>::Type;
    static constexpr int N = sizeof(Vector) / sizeof(T);   // elements in a vector
    static constexpr int VECS = D / N;                     // vectors in a row
};
__device__ __forceinline__ void load_vector(uint4& v, const void* p) { v = load_16(p); }
__device__ __forceinline__ void load_vector(uint2& v, const void* p) {
    v = __ldg(reinterpret_cast<const uint2*>(p));
}

__device__ __forceinline__ float to_float(float x) { return x; }
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}

// The Vec<T>::N elements of a 16-byte vector as float32.
__device__ __forceinline__ void unpack(uint4 v, float (&x)[4], float) {
    x[0] = __uint_as_float(v.x);
    x[1] = __uint_as_float(v.y);
    x[2] = __uint_as_float(v.z);
    x[3] = __uint_as_float(v.w);
}

// Two neighbouring elements as float32.
__device__ __forceinline__ float2 load_pair(const float* p) {
    return make_float2(p[0], p[1]);
}

#ifndef CUPY_DECODE_FP32_ONLY
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

__device__ __forceinline__ float2 half_bits(unsigned int bits, __half) {
    return __half22float2(*reinterpret_cast<__half2*>(&bits));
}
// A bfloat16 is the upper half of a float32.
__device__ __forceinline__ float2 half_bits(unsigned int bits, __nv_bfloat16) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

template <typename T>
__device__ __forceinline__ void unpack(uint4 v, float (&x)[8], T tag) {
    const float2 a = half_bits(v.x, tag), b = half_bits(v.y, tag);
    const float2 c = half_bits(v.z, tag), d = half_bits(v.w, tag);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
    x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

template <typename T>
__device__ __forceinline__ float2 load_pair(const T* p) {
    return half_bits(*reinterpret_cast<const unsigned int*>(p), T());
}

// ---- 8-bit floats. Every value of either format is a float16.
__device__ __forceinline__ float2 fp8_bits(unsigned short bits, __nv_fp8_e4m3) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bits, __NV_E4M3)));
}
__device__ __forceinline__ float2 fp8_bits(unsigned short bits, __nv_fp8_e5m2) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bits, __NV_E5M2)));
}

template <typename T>
__device__ __forceinline__ void unpack_word(unsigned int bits, float* x, T tag) {
    const float2 a = fp8_bits((unsigned short)bits, tag);
    const float2 b = fp8_bits((unsigned short)(bits >> 16), tag);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
}
template <typename T>
__device__ __forceinline__ void unpack(uint4 v, float (&x)[16], T tag) {
    unpack_word(v.x, x, tag), unpack_word(v.y, x + 4, tag);
    unpack_word(v.z, x + 8, tag), unpack_word(v.w, x + 12, tag);
}
template <typename T>
__device__ __forceinline__ void unpack(uint2 v, float (&x)[8], T tag) {
    unpack_word(v.x, x, tag), unpack_word(v.y, x + 4, tag);
}

__device__ __forceinline__ float2 load_pair(const __nv_fp8_e4m3* p) {
    return fp8_bits(*reinterpret_cast<const unsigned short*>(p), __nv_fp8_e4m3());
}
__device__ __forceinline__ float2 load_pair(const __nv_fp8_e5m2* p) {
    return fp8_bits(*reinterpret_cast<const unsigned short*>(p), __nv_fp8_e5m2());
}
#endif
