#pragma once
// The top of the tree: partial states of one (sequence, head) in global memory, added by whichever
// warp arrives last. Nobody waits, and the counters are back at 0 when the launch ends.
#include "tree_node.cuh"

// Sum over a segment of LANES lanes: neighbours first, as the tree has it.
template <int LANES>
__device__ __forceinline__ float lane_tree_sum(float x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Sum of `count` siblings, `step` floats apart, brought to the largest maximum at once; at most
// LANES and at most 2 * BATCH of them. Bit i of `there`: sibling i exists; the first does, and the
// others count as nothing without being read. Lane i weighs sibling i for its whole segment.
// Columns are added BATCH siblings at a time, a power of two, whose loads are in flight together.
template <typename Node, int LANES, int BATCH>
__device__ __forceinline__ Node add_in_batches(const float* nodes, int step, int count,
                                               unsigned int there, int lane) {
    float x[BATCH][Node::N];
    auto exists = [&](int i) { return i < count && there >> i & 1; };
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)      // the first one again rather than none: no branches
            Node::load_columns(x[i], nodes + (exists(first + i) ? first + i : 0) * step, lane);
    };
    load(0);
    const bool mine_exists = exists(lane);
    const float4 mine = *reinterpret_cast<const float4*>(nodes + (mine_exists ? lane : 0) * step);
    Node sum;
    sum.m = mine.x;
#pragma unroll
    for (int s = 1; s < LANES; s *= 2) sum.m = fmaxf(sum.m, __shfl_xor_sync(0xffffffffu, sum.m, s));
    const float f = mine_exists ? exact_weight(mine.x, sum.m) : 0.0f;
    sum.l = lane_tree_sum<LANES>(mine_exists ? __fmul_rn(mine.y, f) : 0.0f);
    sum.w = lane_tree_sum<LANES>(mine_exists ? __fmul_rn(mine.z, f) : 0.0f);
#pragma unroll 1
    for (int first = 0;; first += BATCH) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float weight = __shfl_sync(0xffffffffu, f, first + i, LANES);
#pragma unroll
            for (int c = 0; c < Node::N; c++)
                x[i][c] = exists(first + i) ? __fmul_rn(x[i][c], weight) : -0.0f;
        }
#pragma unroll
        for (int width = 1; width < BATCH; width *= 2)
#pragma unroll
            for (int i = 0; i < BATCH; i += 2 * width)
#pragma unroll
                for (int c = 0; c < Node::N; c++) x[i][c] = __fadd_rn(x[i][c], x[i + width][c]);
#pragma unroll
        for (int c = 0; c < Node::N; c++)
            sum.acc[c] = first == 0 ? x[0][c] : __fadd_rn(sum.acc[c], x[0][c]);
        if (first + BATCH >= count) return sum;
        load(first + BATCH);
    }
}

// The same in the smallest batches that hold them all: code that runs once is read from afar.
template <typename Node, int LANES, int BATCH>
__device__ __forceinline__ Node add_siblings(const float* nodes, int step, int count,
                                             unsigned int there, int lane) {
    if constexpr (BATCH > 4) {
        if (count <= BATCH / 2)
            return add_siblings<Node, LANES, BATCH / 2>(nodes, step, count, there, lane);
    }
    return add_in_batches<Node, LANES, BATCH>(nodes, step, count, there, lane);
}

// True in the warp that is the last of `count` to call this for `arrivals`: what the others wrote
// before is then visible to all its lanes. Warps are on their own, each with its heads: no barrier
// of the block.
__device__ __forceinline__ bool arrive_last(unsigned int* arrivals, int count) {
    __syncwarp();
    unsigned int before = 0;
    if (threadIdx.x % 32 == 0) before = atom_inc_acq_rel(arrivals, count - 1);
    const bool last = __shfl_sync(0xffffffffu, before, 0) == count - 1;
    __syncwarp();                // hands on to the others what lane 0 has acquired
    return last;
}
