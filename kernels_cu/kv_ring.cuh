#pragma once
// A ring of K and V pages per warp, filled by asynchronous copies while older pages are worked on.
//
// Two pages a warp and eight warps an SM keep 128 KB in flight, several times what the latency of
// memory needs; deeper rings gain nothing. Warps are independent: no barrier of the block.
#include "paged_kv.cuh"
#include "schedule.cuh"

// Where the 16-byte chunk `chunk` of row `row` lies in a page of a cache. Columns of 128 bytes with
// the chunks of a row permuted: eight rows of one chunk touch all banks, as do the chunks of a row.
__device__ __forceinline__ int page_offset(int row, int chunk) {
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
};

template <typename T, int D, int STAGES>
struct KvRing {
    static constexpr int CHUNKS = D / 8;                     // 16-byte chunks in a row
    static constexpr int ROWS = 32 / CHUNKS;                 // rows that one copy of the warp covers
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

    // Put a page in. Rows that hold no key become 0, because 0 * NaN is not 0.
    __device__ __forceinline__ void fill(const CacheHead<T>& k_head, const CacheHead<T>& v_head,
                                         PageId id) {
        unsigned char* to = stage(filled);
        const int slot = id.part * PAGE + first_row();
        const T* k = k_head.chunk + (long long)id.block * k_head.stride_block +
                     (long long)slot * k_head.stride_slot;
        const T* v = v_head.chunk + (long long)id.block * v_head.stride_block +
                     (long long)slot * v_head.stride_slot;
        const int k_step = ROWS * k_head.stride_slot, v_step = ROWS * v_head.stride_slot;
#pragma unroll
        for (int i = 0; i < PAGE / ROWS; i++) {
            const int row = first_row() + i * ROWS, at = page_offset(row, chunk());
            cp_async_16_or_zero(to + at, k, row < id.rows);
            cp_async_16_or_zero(to + K_BYTES + at, v, row < id.rows);
            k += k_step, v += v_step;
        }
        cp_async_commit();
        filled++;
    }

    // Wait for the oldest page; K lies at the result, V behind it.
    __device__ __forceinline__ const unsigned char* front() const {
        if (full())
            cp_async_wait<STAGES - 1>();
        else
            cp_async_wait<0>();
        __syncwarp();
        return stage(used);
    }
    __device__ __forceinline__ void pop() {
        __syncwarp();            // no lane reads the page any more
        used++;
    }
};
