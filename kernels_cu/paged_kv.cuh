#pragma once
// A paged KV cache: fixed-size blocks scattered over a pool, found through a block table.
#include "vec.cuh"

constexpr int TILE = 32;   // keys a thread block handles at a time: one per lane of a warp

// What a kernel reports about device-resident values it refused to follow.
enum FaultCode { FAULT_NONE = 0, FAULT_BLOCK_ID = 1, FAULT_SEQ_LEN = 2, FAULT_SLOT = 3 };

// Keep the first fault: fault [4] = code, row, column, value. A null pointer: nobody asked.
__device__ __forceinline__ void report_fault(int* fault, FaultCode code, int row, int column,
                                             int value) {
    if (fault != nullptr && atomicCAS(&fault[0], FAULT_NONE, code) == FAULT_NONE) {
        fault[1] = row;
        fault[2] = column;
        fault[3] = value;
    }
}

// Where one key lives: its block in the pool (negative: not to be read) and its slot in the block.
struct Place {
    int block, slot;
};

// Look `key` up in one row of the block table. The id is checked before anyone may follow it.
__device__ __forceinline__ Place find_key(int key, int end, const int* table_row,
                                          long long stride_column, int block_size, int num_blocks,
                                          int sequence, int* fault, bool& bad) {
    Place place = {-1, 0};
    if (key < end) {
        const int column = key / block_size;
        const int block = __ldg(table_row + column * stride_column);
        if (block < 0 || block >= num_blocks) {
            report_fault(fault, FAULT_BLOCK_ID, sequence, column, block);
            bad = true;
        } else {
            place = {block, key - column * block_size};
        }
    }
    return place;
}

// A tile of TILE cache rows of D elements on its way from the pool to shared memory: first into
// registers, so that the loads of the next tile fly while this one is being worked on.
template <typename T, int D, int THREADS>
struct TileCopy {
    using Vector = typename Row<T, D>::Vector;
    static constexpr int WIDTH = Row<T, D>::N;                         // elements in a vector
    static constexpr int VECS = Row<T, D>::VECS;                       // vectors in a row
    static constexpr int N = (TILE * VECS + THREADS - 1) / THREADS;    // vectors a thread
    // Rows start an odd number of vectors apart: the lanes that read the same column of different
    // rows at a time (eight of 16 bytes, sixteen of 8) then touch all 32 banks once.
    static constexpr int PITCH = (VECS + (VECS % 2 == 0)) * WIDTH;
    static constexpr int BYTES = TILE * PITCH * sizeof(T);

    Vector data[N];

    // head: the cache at this block's KV head. mine: the place of the tile's key number lane.
    __device__ __forceinline__ void fetch(const T* head, long long stride_block,
                                          long long stride_slot, Place mine) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int x = threadIdx.x + i * THREADS, key = x / VECS, column = x % VECS;
            const int block = __shfl_sync(0xffffffffu, mine.block, key % TILE);
            const int slot = __shfl_sync(0xffffffffu, mine.slot, key % TILE);
            data[i] = Vector();   // rows not to be read count as zeros
            if (key < TILE && block >= 0)
                load_vector(data[i], head + block * stride_block + slot * stride_slot +
                                         column * WIDTH);
        }
    }

    __device__ __forceinline__ void store(T* tile) const {   // tile [TILE][PITCH], shared
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int x = threadIdx.x + i * THREADS, key = x / VECS, column = x % VECS;
            if (key < TILE)
                *reinterpret_cast<Vector*>(tile + key * PITCH + column * WIDTH) = data[i];
        }
    }
};
