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
// Fewer run through a part of the same code: what runs once is read from afar, and copies for small
// numbers would add a quarter to the time that the kernel takes to compile.
template <typename Node, int LANES, int BATCH>
__device__ __forceinline__ Node add_siblings(const float* nodes, int step, int count,
                                             unsigned int there, int lane) {
    there &= 0xffffffffu >> (32 - count);
    float x[BATCH][Node::N];
    // Whether a batch that begins at `first` ends before its sibling i.
    auto ends = [&](int first, int i) {
        return i >= 4 && (i & (i - 1)) == 0 && first + i >= count;
    };
    auto load = [&](int first) {
        const unsigned int here = there >> first;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {    // the first one again rather than none: no branches
            if (ends(first, i)) break;
            Node::load_columns(x[i], nodes + (here >> i & 1 ? first + i : 0) * step, lane);
        }
    };
    load(0);
    const bool mine_exists = there >> lane & 1;
    const float4 mine = *reinterpret_cast<const float4*>(nodes + (mine_exists ? lane : 0) * step);
    Node sum;
    sum.m = mine.x;
#pragma unroll
    for (int s = 1; s < LANES; s *= 2) sum.m = fmaxf(sum.m, __shfl_xor_sync(0xffffffffu, sum.m, s));
    const float f = exact_weight(mine.x, sum.m);
    sum.l = lane_tree_sum<LANES>(mine_exists ? __fmul_rn(mine.y, f) : 0.0f);
    sum.w = lane_tree_sum<LANES>(mine_exists ? __fmul_rn(mine.z, f) : 0.0f);
#pragma unroll
    for (int c = 0; c < Node::N; c++) sum.acc[c] = -0.0f;
#pragma unroll 1
    for (int first = 0;; first += BATCH) {
        const unsigned int here = there >> first;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (ends(first, i)) break;
            const float weight = __shfl_sync(0xffffffffu, f, first + i, LANES);
#pragma unroll
            for (int c = 0; c < Node::N; c++)
                x[i][c] = __fmul_rn(here >> i & 1 ? x[i][c] : -0.0f, weight);
            // the last of 2, 4, .. closes sums of 2, 4, ..
#pragma unroll
            for (int width = 1; width < BATCH && (i + 1) % (2 * width) == 0; width *= 2)
#pragma unroll
                for (int c = 0; c < Node::N; c++)
                    x[i + 1 - 2 * width][c] =
                        __fadd_rn(x[i + 1 - 2 * width][c], x[i + 1 - width][c]);
        }
#pragma unroll
        for (int c = 0; c < Node::N; c++) sum.acc[c] = __fadd_rn(sum.acc[c], x[0][c]);
        if (first + BATCH >= count) return sum;
        load(first + BATCH);
    }
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
