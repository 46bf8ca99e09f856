#pragma once
// All inline PTX, one wrapper each, so that the kernels read as plain C++ and another target can
// offer the same names.

#define DYN_SMEM(name) extern __shared__ __align__(128) unsigned char name[]

// 2^x, at most 2 ulp off; results below 2^-126 are 0.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes that nobody will read again: past L1, through the read-only path.
__device__ __forceinline__ uint4 load_16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
