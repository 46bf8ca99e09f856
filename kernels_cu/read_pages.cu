// read_pages: read the K and V pages of a batch through its page list, and nothing else.
//
// The floor of paged decode attention: no kernel that uses every key once can be faster.
//
// Grid      (blocks)
// Threads   a warp reads (page, KV head) items, the heads of a page next to each other; a row of
//           VECTORS 16-byte vectors is read by as many lanes, and the 16 rows of both caches are in
//           flight together
// Shared    none
// Reads     num_pages * block_size * num_kv_heads rows of K and of V, each once, past L1
// Writes    sink, once in 2^32 threads: without a use of the data nothing would wait for the loads
// Empty     num_pages = 0 reads nothing
#include "ptx.cuh"

// BLOCKS_PER_SM = 1 lets a thread have the registers that all its loads need at a time. With 6, as
// where the compiler chooses for itself, it gets 40, and an item goes out in several rounds that
// wait for one another: nothing to a large step, but much to a small one.
template <int VECTORS, int BLOCKS_PER_SM>
__global__ void __launch_bounds__(256, BLOCKS_PER_SM) read_pages(
    unsigned int* sink,           // [1]
    const uint4* k_cache,         // [num_blocks, block_size, num_kv_heads, VECTORS]
    const uint4* v_cache,         // [num_blocks, block_size, num_kv_heads, VECTORS]
    const int* pages,             // [num_pages], the used entries of the block table
    int num_pages, int num_kv_heads,
    int block_size,               // a multiple of 16
    long long stride_block, long long stride_slot, long long stride_head) {   // in vectors
    constexpr int ROWS = 32 / VECTORS;          // rows that one load of the warp covers
    constexpr int LOADS = 16 / ROWS;
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int warps = gridDim.x * blockDim.x / 32;
    const long long mine = lane / VECTORS * stride_slot + lane % VECTORS;
    unsigned int fold = 0;
    for (int item = warp; item < num_pages * num_kv_heads; item += warps) {
        const int head = item % num_kv_heads;
        const long long page =
            __ldg(pages + item / num_kv_heads) * stride_block + head * stride_head + mine;
        for (int row = 0; row < block_size; row += 16) {
            uint4 k[LOADS], v[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                k[i] = load_16(k_cache + page + (row + i * ROWS) * stride_slot);
                v[i] = load_16(v_cache + page + (row + i * ROWS) * stride_slot);
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                fold += k[i].x ^ k[i].y ^ k[i].z ^ k[i].w ^ v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
        }
    }
    if (fold == 0x9e3779b9u) sink[0] = fold;
}
