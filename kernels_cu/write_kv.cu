// write_kv: the newest K and V rows of each token go into their slots of the paged cache.
//
// Grid      (tokens)
// Threads   thread t copies elements t, t + THREADS, ... of the token's K rows, then of its V rows
// Reads     each new element once
// Writes    num_kv_heads * (k_dim + v_dim) elements per token
// Empty     A negative slot is padding: nothing is written.
// Faults    A slot past the cache is not written; `fault` says which token.
//
// T is an unsigned integer of the element's width: nothing is computed, bits move.
#include "paged_kv.cuh"

template <typename T, int THREADS>
__device__ __forceinline__ void copy_rows(T* to, long long to_stride_head, const T* from,
                                          long long from_stride_head, int num_heads, int dim) {
    for (int i = threadIdx.x; i < num_heads * dim; i += THREADS) {
        const int head = i / dim, d = i % dim;
        to[head * to_stride_head + d] = from[head * from_stride_head + d];
    }
}

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) write_kv(
    T* k_cache,                       // [num_blocks, block_size, num_kv_heads, k_dim]
    T* v_cache,                       // [num_blocks, block_size, num_kv_heads, v_dim]
    int* fault,                       // [4] or null
    const T* k,                       // [tokens, num_kv_heads, k_dim]
    const T* v,                       // [tokens, num_kv_heads, v_dim]
    const long long* slot_mapping,    // [tokens]: block * block_size + offset, or negative
    long long k_cache_stride_block, long long k_cache_stride_slot, long long k_cache_stride_head,
    long long v_cache_stride_block, long long v_cache_stride_slot, long long v_cache_stride_head,
    long long k_stride_token, long long k_stride_head,
    long long v_stride_token, long long v_stride_head,
    int num_blocks, int block_size, int num_kv_heads, int k_dim, int v_dim) {
    const int token = blockIdx.x;
    const long long slot = slot_mapping[token];
    if (slot < 0) return;
    if (slot >= (long long)num_blocks * block_size) {
        const int most = (int)min(slot, 2147483647LL);
        if (threadIdx.x == 0) report_fault(fault, FAULT_SLOT, token, 0, most);
        return;
    }
    const long long block = slot / block_size, offset = slot % block_size;
    copy_rows<T, THREADS>(k_cache + block * k_cache_stride_block + offset * k_cache_stride_slot,
                          k_cache_stride_head, k + token * k_stride_token, k_stride_head,
                          num_kv_heads, k_dim);
    copy_rows<T, THREADS>(v_cache + block * v_cache_stride_block + offset * v_cache_stride_slot,
                          v_cache_stride_head, v + token * v_stride_token, v_stride_head,
                          num_kv_heads, v_dim);
}
