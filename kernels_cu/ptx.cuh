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

// Ask for the line of an address in L2, for a load to come.
__device__ __forceinline__ void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
}

// ---- asynchronous copies, sm_80 and later

// 16 bytes from global to shared memory, past L1 and first to leave L2, where what nobody reads
// again would drive out tables, queries, states and the code itself; 16 zeros where `there` is
// false, and then the source is not touched.
__device__ __forceinline__ void cp_async_16_or_zero(void* shared, const void* global, bool there) {
    const unsigned int address = (unsigned int)__cvta_generic_to_shared(shared);
    unsigned long long evict_first;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 :: "r"(address), "l"(global), "r"(there ? 16 : 0), "l"(evict_first) : "memory");
}

// Close the group of the copies issued since the last commit.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most the N youngest groups of this thread are under way.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// ---- matrix fragments of 16-bit elements

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(unsigned int (&r)[4], const void* row) {
    const unsigned int address = (unsigned int)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address) : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned int (&r)[4], const void* row) {
    const unsigned int address = (unsigned int)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address) : "memory");
}

// Transpose an 8 x 8 matrix spread over the warp, two elements a lane.
__device__ __forceinline__ unsigned int movmatrix_trans(unsigned int x) {
    unsigned int y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

#ifndef CUPY_DECODE_FP32_ONLY
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if __CUDA_ARCH__ >= 890
// Four e4m3 as float16, two in a word.
__device__ __forceinline__ void cvt_e4m3_to_half(unsigned int bits, unsigned int& lo,
                                                 unsigned int& hi) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
        "cvt.rn.f16x2.e4m3x2 %1, b; }"
        : "=r"(lo), "=r"(hi) : "r"(bits));
}
#endif

// d [16][8] += a [16][16] . b [16][8], float32 sums; the last argument names the element type.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4],
                                             const unsigned int (&b)[2], __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4],
                                             const unsigned int (&b)[2], __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// ---- named barriers of a block: `threads` of its threads take part

// Wait until all have come, in one way or the other; what they wrote before is then visible.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
    __syncwarp();                // the lanes of a warp must come together
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// Come without waiting.
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// ---- between launches of a stream, sm_90 and later; older ones never overlap

// Wait until the launches before this one are done; what they wrote is then visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once every block has said so or left, a launch behind this one that asked for it may start.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- between blocks

// Add 1, or restart at 0 after `limit`; returns the old value. What this block wrote before is
// visible to whoever reads the counter after it, and the other way round.
__device__ __forceinline__ unsigned int atom_inc_acq_rel(unsigned int* p, unsigned int limit) {
    unsigned int old;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(p), "r"(limit) : "memory");
    return old;
}

// The same without a say about other memory.
__device__ __forceinline__ unsigned int atom_inc(unsigned int* p, unsigned int limit) {
    unsigned int old;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(p), "r"(limit) : "memory");
    return old;
}
