#pragma once
// Element types and the 16-byte vectors they travel in.
//
// CUPY_DECODE_FP32_ONLY leaves the half-precision headers out, so that float32 kernels compile
// where only the bare compiler is installed.
#include "ptx.cuh"

#ifndef CUPY_DECODE_FP32_ONLY
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Elements of T in 16 bytes.
template <typename T>
struct Vec {
    static constexpr int N = 16 / sizeof(T);
};

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
#endif
