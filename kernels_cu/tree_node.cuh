#pragma once
// Softmax states whose sums come out the same however the keys were split.
//
// Two ideas make it so:
//   * the maximum is rounded up to an integer (in log2 units), so every rescale is a power of two
//     and exact: only the order of the additions matters;
//   * the additions follow one binary tree over fixed leaves. A node is the sum of two siblings of
//     equal width, so whoever computes it adds the same operands.
// Exact until a weight falls below 2^-126: such terms become 0, as they would anyway beside the
// other operand, but which of them do may then depend on the split.
#include "softmax_state.cuh"

// 2^(m - M) for integers m <= M; 0 below 2^-126 and for an empty state (m = -inf, M too).
// The exponent is put together by hand: adding 2^23 leaves an integer in the low bits of a float.
__device__ __forceinline__ float exact_weight(float m, float M) {
    return __int_as_float(__float_as_int(fmaxf(m - M, -127.0f) + (8388608.0f + 127.0f)) << 23);
}

// A state of one head. LANES lanes of a warp hold its D columns, V at a time: lane i the columns
// (j * LANES + i) * V + 0 .. V. In memory: m, l, w, unused, then D columns.
//
// With an integer maximum the largest weight is anywhere in (1/2, 1], so it is rounded on its way
// to the tensor cores. Dividing by the sum of the rounded weights takes that error out again; the
// lse needs the sum of the true ones.
template <int D, int LANES>
struct TreeNode {
    static constexpr int N = D / LANES, V = N < 4 ? N : 4, FLOATS = 4 + D;

    float m;         // an integer, or -inf: no key
    float l;         // sum of the weights
    float w;         // sum of the weights as rounded
    float acc[N];    // sum of rounded weight times value; -0 without keys: x + -0 is x for every x

    // Floats of a node in memory where this lane's chunk j begins.
    static __device__ __forceinline__ int chunk(int j, int lane) {
        return 4 + (j * LANES + lane) * V;
    }
    static __device__ __forceinline__ void load_columns(float (&x)[N], const float* node,
                                                        int lane) {
#pragma unroll
        for (int j = 0; j < N / V; j++) {
            if constexpr (V == 2) {
                const float2 v = *reinterpret_cast<const float2*>(node + chunk(j, lane));
                x[0] = v.x, x[1] = v.y;
            } else {
                const float4 v = *reinterpret_cast<const float4*>(node + chunk(j, lane));
                x[4 * j] = v.x, x[4 * j + 1] = v.y, x[4 * j + 2] = v.z, x[4 * j + 3] = v.w;
            }
        }
    }
    __device__ __forceinline__ void load(const float* node, int lane) {
        const float4 sums = *reinterpret_cast<const float4*>(node);
        m = sums.x, l = sums.y, w = sums.z;
        load_columns(acc, node, lane);
    }
    __device__ __forceinline__ void store(float* node, int lane) const {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            *reinterpret_cast<float2*>(node + chunk(i / V, lane) + i % V) =
                make_float2(acc[i], acc[i + 1]);
        if (lane == 0) *reinterpret_cast<float4*>(node) = make_float4(m, l, w, 0.0f);
    }

    // The parent of two siblings.
    friend __device__ __forceinline__ TreeNode operator+(const TreeNode& left,
                                                         const TreeNode& right) {
        TreeNode sum;
        sum.m = fmaxf(left.m, right.m);
        const float f = exact_weight(left.m, sum.m), h = exact_weight(right.m, sum.m);
        sum.l = __fadd_rn(__fmul_rn(left.l, f), __fmul_rn(right.l, h));
        sum.w = __fadd_rn(__fmul_rn(left.w, f), __fmul_rn(right.w, h));
#pragma unroll
        for (int i = 0; i < N; i++)
            sum.acc[i] = __fadd_rn(__fmul_rn(left.acc[i], f), __fmul_rn(right.acc[i], h));
        return sum;
    }
};

// The sum of N leaves, `stride` floats apart: two halves, in turn rather than at once, which saves
// registers.
template <typename Node, int N>
__device__ __forceinline__ Node sum_of_leaves(const float* leaves, int stride, int lane) {
    if constexpr (N == 1) {
        Node leaf;
        leaf.load(leaves, lane);
        return leaf;
    } else {
        const Node left = sum_of_leaves<Node, N / 2>(leaves, stride, lane);
        return left + sum_of_leaves<Node, N / 2>(leaves + N / 2 * stride, stride, lane);
    }
}

// Left siblings that wait for their right ones: a binary counter over the nodes pushed so far, its
// lowest place in registers if REGISTER, the others in shared memory, `stride` floats apart. (In
// local memory each would be a trip to L2: shared memory leaves L1 too small for them.)
template <typename Node, bool REGISTER>
struct TreeStack {
    Node lowest;

    // Push node number `index` of a run that begins with number `first` and, with `last`, ends
    // here. Sums that lack their left sibling, because it lies before the run, go to emit(sum,
    // number of its first node). With `whole` the tree ends here too: missing right siblings are
    // nothing, and of a run that is the whole tree the last call returns the sum. Otherwise what
    // waits at the end goes to emit as well. A barrier of the warp must lie between calls.
    template <typename Emit>
    __device__ __forceinline__ Node push(Node node, int index, int first, bool last, bool whole,
                                         float* higher, int stride, int lane, Emit emit) {
        bool carried = true;                     // `node` is on its way up
#pragma unroll 1
        for (int level = 0;; level++, higher += stride) {
            const bool in_register = REGISTER && level == 0;
            const int here = index >> level;
            const int left = (here - 1) << level, mine = here << level;
            if (carried) {
                if (here & 1) {
                    if (left < first) {
                        emit(node, mine);
                        carried = false;
                    } else {
                        Node waiting = lowest;
                        if (!in_register) waiting.load(higher - REGISTER * stride, lane);
                        node = waiting + node;
                    }
                } else if (last && whole) {
                    if (here == 0) return node;
                } else {
                    if (last) emit(node, mine);
                    else if (in_register) lowest = node;
                    else node.store(higher - REGISTER * stride, lane);
                    carried = false;
                }
            } else if (!last) {
                return node;
            } else if (here == 0) {
                return node;
            } else if (here & 1 && left >= first) {
                Node waiting = lowest;           // to the left of what went already
                if (!in_register) waiting.load(higher - REGISTER * stride, lane);
                emit(waiting, left);
            }
        }
    }
};
