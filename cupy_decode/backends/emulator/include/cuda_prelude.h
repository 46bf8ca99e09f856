#pragma once
// CUDA C++ as g++ sees it: keywords, built-in variables, intrinsics. The element types come from
// the real CUDA headers, whose host code this uses; PTX wrappers have their twins in ptx.cuh.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include <vector_functions.h>
#include <vector_types.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "emulator.h"

#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
// One OS thread runs all fibres, so thread-local storage is memory of the block; and it is one
// contiguous range that the runtime recognises.
#define __shared__ static thread_local
#define __global__ static __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (emu_thread_idx())
#define blockIdx (emu_block_idx())
#define blockDim (emu_block_dim())
#define gridDim (emu_grid_dim())
constexpr int warpSize = 32;

// The caller's position, for messages and to tell two barriers apart.
#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- barriers and votes

inline void __syncthreads(EMU_SITE) { emu_block_barrier(EMU_SYNC, 0, file, line); }
inline int __syncthreads_count(int p, EMU_SITE) {
    return emu_block_barrier(EMU_SYNC_COUNT, p, file, line);
}
inline int __syncthreads_and(int p, EMU_SITE) {
    return emu_block_barrier(EMU_SYNC_AND, p, file, line);
}
inline int __syncthreads_or(int p, EMU_SITE) {
    return emu_block_barrier(EMU_SYNC_OR, p, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) { emu_warp_sync(mask, file, line); }
inline unsigned __ballot_sync(unsigned mask, int p, EMU_SITE) {
    return emu_ballot(mask, p, file, line);
}
inline int __any_sync(unsigned mask, int p, EMU_SITE) {
    return emu_ballot(mask, p, file, line) != 0;
}
inline int __all_sync(unsigned mask, int p, EMU_SITE) {
    return emu_ballot(mask, !p, file, line) == 0;
}

// ---- shuffles

template <typename T>
inline T emu_shuffle_any(unsigned mask, T value, int source, const char* file, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = emu_shuffle(mask, bits, source, file, line);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_SITE) {
    const int first = emu_lane() & ~(width - 1);
    return emu_shuffle_any(mask, value, first + (source & (width - 1)), file, line);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMU_SITE) {
    const int lane = emu_lane(), source = lane ^ lanes, last = lane | (width - 1);
    return emu_shuffle_any(mask, value, source <= last ? source : lane, file, line);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
    const int lane = emu_lane(), source = lane - (int)delta, first = lane & ~(width - 1);
    return emu_shuffle_any(mask, value, source >= first ? source : lane, file, line);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
    const int lane = emu_lane(), source = lane + (int)delta, last = lane | (width - 1);
    return emu_shuffle_any(mask, value, source <= last ? source : lane, file, line);
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned x, EMU_SITE) {
    return emu_reduce(mask, EMU_ADD, x, file, line);
}
inline int __reduce_add_sync(unsigned mask, int x, EMU_SITE) {
    return emu_reduce(mask, EMU_ADD, x, file, line);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x, EMU_SITE) {
    return emu_reduce(mask, EMU_UMIN, x, file, line);
}
inline int __reduce_min_sync(unsigned mask, int x, EMU_SITE) {
    return emu_reduce(mask, EMU_MIN, x, file, line);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x, EMU_SITE) {
    return emu_reduce(mask, EMU_UMAX, x, file, line);
}
inline int __reduce_max_sync(unsigned mask, int x, EMU_SITE) {
    return emu_reduce(mask, EMU_MAX, x, file, line);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned x, EMU_SITE) {
    return emu_reduce(mask, EMU_AND, x, file, line);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x, EMU_SITE) {
    return emu_reduce(mask, EMU_OR, x, file, line);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned x, EMU_SITE) {
    return emu_reduce(mask, EMU_XOR, x, file, line);
}

// ---- atomics and fences; fibres switch only at barriers, so a fence has nothing to order

template <typename T>
struct emu_same_type {
    using type = T;
};
template <typename T>
using emu_same = typename emu_same_type<T>::type;   // not deduced: takes its type from the pointer

template <typename T, typename Update>
inline T emu_atomic(T* p, Update update) {
    uint64_t bits = emu_atomic_begin(p, sizeof(T));
    T old;
    std::memcpy(&old, &bits, sizeof(T));
    const T value = update(old);
    bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    emu_atomic_end(p, sizeof(T), bits);
    return old;
}
template <typename T>
inline T atomicAdd(T* p, emu_same<T> x) {
    return emu_atomic(p, [=](T old) { return T(old + x); });
}
template <typename T>
inline T atomicMax(T* p, emu_same<T> x) {
    return emu_atomic(p, [=](T old) { return std::max(old, x); });
}
template <typename T>
inline T atomicMin(T* p, emu_same<T> x) {
    return emu_atomic(p, [=](T old) { return std::min(old, x); });
}
template <typename T>
inline T atomicOr(T* p, emu_same<T> x) {
    return emu_atomic(p, [=](T old) { return T(old | x); });
}
template <typename T>
inline T atomicAnd(T* p, emu_same<T> x) {
    return emu_atomic(p, [=](T old) { return T(old & x); });
}
template <typename T>
inline T atomicExch(T* p, emu_same<T> x) {
    return emu_atomic(p, [=](T) { return x; });
}
template <typename T>
inline T atomicCAS(T* p, emu_same<T> expected, emu_same<T> x) {
    return emu_atomic(p, [=](T old) { return old == expected ? x : old; });
}
inline unsigned atomicInc(unsigned* p, unsigned limit) {
    return emu_atomic(p, [=](unsigned old) { return old >= limit ? 0u : old + 1; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __trap(EMU_SITE) { emu_trap("__trap()", file, line); }

// ---- arithmetic

template <typename T>
inline T __ldg(const T* p) {
    return *p;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

template <typename To, typename From>
inline To emu_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &x, sizeof(To));
    return to;
}
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float2int_ru(float x) { return (int)std::ceil(x); }
inline int __float2int_rd(float x) { return (int)std::floor(x); }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
// Bytes of (y, x) by the nibbles of the selector, without its sign-replicating mode.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)(((unsigned long long)a * b) >> 32);
}

// min and max of CUDA: mixed operands take the usual arithmetic conversions.
template <typename A, typename B>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <typename A, typename B>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return (T)a < (T)b ? (T)b : (T)a;
}

// ---- calling a kernel with its arguments in 64-bit words

template <typename... P, std::size_t... I>
inline void emu_call(void (*kernel)(P...), const uint64_t* values, std::index_sequence<I...>) {
    auto value = [&](auto* type, std::size_t i) {
        std::remove_pointer_t<decltype(type)> x;
        std::memcpy(&x, values + i, sizeof x);
        return x;
    };
    kernel(value((std::remove_cv_t<P>*)nullptr, I)...);
}
template <typename... P>
inline void emu_call(void (*kernel)(P...), const uint64_t* values) {
    emu_call(kernel, values, std::index_sequence_for<P...>());
}

template <typename P>
constexpr char emu_code() {
    if (std::is_pointer_v<P>) return 'p';
    if (std::is_same_v<P, float>) return 'f';
    if (std::is_integral_v<P> && sizeof(P) == 4) return 'i';
    return std::is_integral_v<P> && sizeof(P) == 8 ? 'l' : '?';
}
template <typename... P>
inline const char* emu_codes(void (*)(P...)) {
    static const char codes[] = {emu_code<P>()..., 0};
    return codes;
}
