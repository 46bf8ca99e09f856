#pragma once
// A ring of K and V pages per warp, filled by asynchronous copies while older pages are worked on.
//
// The rings of an SM keep 128 KB in flight, several times what the latency of memory needs; deeper
// ones gain nothing. Warps are independent: no barrier of the block.
#include "paged_kv.cuh"
#include "schedule.cuh"

// Where the 16-byte chunk `chunk` of row `row` lies in a page of a cache whose rows have CHUNKS.
// Columns of 128 bytes (64 where a row is no longer) with the chunks of a row permuted: eight rows
// of one chunk touch all banks, as do the chunks of eight rows.
template <int CHUNKS>
__device__ __forceinline__ int page_offset(int row, int chunk) {
    if constexpr (CHUNKS == 4) return row * 64 + (((chunk ^ row >> 1) & 3) << 4);
    return (chunk >> 3) * (PAGE * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
}

// A page of a sequence: the block that holds it, which 16 slots of the block it is, and how many of
// them hold a key.
struct PageId {
    int block, part, rows;
};

// One cache as a warp sees it: this lane's chunk of row 0 of one head.
template <typename T>
struct CacheHead {
    const T* chunk;
    int stride_block, stride_slot;    // in elements

    __device__ __forceinline__ const T* at(int block, int slot) const {
        return chunk + (long long)block * stride_block + (long long)slot * stride_slot;
    }
};

template <typename T, int D, int STAGES>
struct KvRing {
    static constexpr int WIDTH = 16 / sizeof(T);             // elements in a chunk
    static constexpr int CHUNKS = D / WIDTH;                 // 16-byte chunks in a row
    static constexpr int ROWS = 32 / CHUNKS;                 // rows that a copy of the warp covers
    static constexpr int K_BYTES = PAGE * D * sizeof(T), STAGE_BYTES = 2 * K_BYTES;

    unsigned char* pages;        // [STAGES][K, V][...], this warp's
    unsigned int filled = 0, used = 0;    // pages put in, pages done with

    // This lane's place in a row, and the first of its rows.
    static __device__ __forceinline__ int chunk() { return threadIdx.x % CHUNKS; }
    static __device__ __forceinline__ int first_row() { return threadIdx.x % 32 / CHUNKS; }

    __device__ __forceinline__ bool full() const { return filled - used == STAGES; }
    __device__ __forceinline__ unsigned char* stage(unsigned int i) const {
        return pages + i % STAGES * STAGE_BYTES;
    }

    // Put a page in. Rows that hold no key become 0, because 0 * NaN is not 0, and so do those
    // before row `hidden`.
    template <bool HIDDEN>
    __device__ __forceinline__ void fill(const CacheHead<T>& k_head, const CacheHead<T>& v_head,
                                         PageId id, int hidden) {
        unsigned char* to = stage(filled);
        const T* k = k_head.at(id.block, id.part * PAGE + first_row());
        const T* v = v_head.at(id.block, id.part * PAGE + first_row());
        const long long k_step = (long long)ROWS * k_head.stride_slot;
        const long long v_step = (long long)ROWS * v_head.stride_slot;
#pragma unroll
        for (int i = 0; i < PAGE / ROWS; i++) {
            const int row = first_row() + i * ROWS, at = page_offset<CHUNKS>(row, chunk());
            const bool there = row < id.rows && (!HIDDEN || row >= hidden);
            cp_async_16_or_zero(to + at, k, there);
            cp_async_16_or_zero(to + K_BYTES + at, v, there);
            k += k_step, v += v_step;
        }
        commit();
    }

    // The same for a page whose rows each have a block and a slot: lane i holds row i % 16's.
    // block < 0: no key, or not to be read.
    __device__ __forceinline__ void fill_rows(const CacheHead<T>& k_head,
                                              const CacheHead<T>& v_head, Place mine) {
        unsigned char* to = stage(filled);
#pragma unroll
        for (int i = 0; i < PAGE / ROWS; i++) {
            const int row = first_row() + i * ROWS;
            unsigned char* chunk_of_row = to + page_offset<CHUNKS>(row, chunk());
            const int block = __shfl_sync(0xffffffffu, mine.block, row);
            const int slot = __shfl_sync(0xffffffffu, mine.slot, row);
            cp_async_16_or_zero(chunk_of_row, k_head.at(block, slot), block >= 0);
            cp_async_16_or_zero(chunk_of_row + K_BYTES, v_head.at(block, slot), block >= 0);
        }
        commit();
    }

    __device__ __forceinline__ void commit() {
        cp_async_commit();
        filled++;
    }

    // Wait for the oldest PAGES pages: K of each lies at its pointer, V behind it.
    template <int PAGES>
    __device__ __forceinline__ void front(const unsigned char* (&oldest)[PAGES]) const {
        if (full())
            cp_async_wait<STAGES - PAGES>();
        else
            cp_async_wait<0>();
        __syncwarp();
#pragma unroll
        for (int r = 0; r < PAGES; r++) oldest[r] = stage(used + r);
    }
    __device__ __forceinline__ void pop(int count) {
        __syncwarp();            // no lane reads the pages any more
        used += count;
    }
};
