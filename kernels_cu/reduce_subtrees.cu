// reduce_subtrees: stage 2 of split-K decode attention whose bits do not depend on the split.
//
// Every state is brought to the global maximum, which is exact, and the sums are added along the
// tree over the leaves: the same additions whichever subtrees the splits left. One division ends
// it.
//
// Grid      (batch, num_q_heads): one thread block adds all subtrees of one (sequence, head)
// Threads   thread t owns output columns t, t + THREADS, ...; every thread repeats the scalar sums
// Shared    one float per warp, and which leaves there are
// Reads     width of each of the sequence's rows; m, l and acc of those that hold a state
// Writes    v_head_dim outputs and one lse
// Empty     A sequence with no row in the plan, or without a state: out 0, lse -inf, both written.
//           What rows without a state hold is never read.
#include "leaves.cuh"
#include "tree_node.cuh"
#include "vec.cuh"

// The sum along the tree of value(leaf) over the rows that hold a state, all within begin .. end.
// A left sibling waits in its level for the right one; where there is none, it adds -0:
// x + -0 is x.
template <typename Value>
__device__ __forceinline__ float tree_sum(const int* width, int begin, int end, Value value) {
    constexpr int LEVELS = MOST_LEAVES_LOG2 + 1;
    float waiting[LEVELS];
#pragma unroll
    for (int level = 0; level < LEVELS; level++) waiting[level] = -0.0f;
    for (int leaf = begin, next; leaf < end; leaf = next) {
        const int leaves = min(max(width[leaf], 1), end - leaf);
        float x = width[leaf] > 0 ? value(leaf) : -0.0f;
        next = leaf + leaves;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (1 << level < leaves) continue;           // below this subtree
            if (!(leaf >> level & 1)) {
                waiting[level] = x;
                break;
            }
            x = __fadd_rn(waiting[level], x);
        }
    }
    float sum = -0.0f;
#pragma unroll
    for (int level = 0; level < LEVELS; level++)
        if (end >> level & 1) sum = __fadd_rn(waiting[level], sum);
    return sum;
}

template <typename TOut, int THREADS>
__global__ void __launch_bounds__(THREADS) reduce_subtrees(
    TOut* out,                  // [batch, num_q_heads, v_head_dim]
    float* lse,                 // [batch, num_q_heads], natural log, without the sink
    const float* acc,           // [batch, leaf_rows, num_q_heads, v_head_dim]
    const float* m,             // [batch, leaf_rows, num_q_heads], log2 units, integers
    const float* l,             // [batch, leaf_rows, num_q_heads]
    const int* width,           // [batch, leaf_rows] leaves of the state in a row; 0: none
    const int* split_offsets,   // [batch + 1], or null: every sequence has rows
    const float* sinks,         // [num_q_heads], or null
    long long out_stride_token, long long out_stride_head, long long out_stride_dim,
    int capacity,               // rows of the plan, in use or not
    int leaf_rows,              // at most 2^MOST_LEAVES_LOG2
    int num_q_heads, int v_head_dim) {
    const int sequence = blockIdx.x, head = blockIdx.y, tid = threadIdx.x;
    const long long row0 = (long long)sequence * leaf_rows;
    auto at = [&](int leaf) { return (row0 + leaf) * num_q_heads + head; };
    width += row0;
    if (split_offsets != nullptr) {
        const int first = max(split_offsets[sequence], 0);
        const int last = min(split_offsets[sequence + 1], capacity);
        if (first >= last)
            leaf_rows = 0;                               // nobody wrote this sequence's rows
    }

    // ---- the leaves there are, and the global maximum
    __shared__ float warp_maximum[THREADS / 32];
    __shared__ int begin, end;
    if (tid == 0) begin = leaf_rows, end = 0;
    __syncthreads();                                     // begin and end are in place
    float M = neg_inf();
    for (int leaf = tid; leaf < leaf_rows; leaf += THREADS) {
        if (width[leaf] <= 0) continue;
        M = fmaxf(M, m[at(leaf)]);
        atomicMin(&begin, leaf);
        atomicMax(&end, leaf + min(width[leaf], leaf_rows - leaf));
    }
    M = warp_max(M);
    if (tid % 32 == 0) warp_maximum[tid / 32] = M;
    __syncthreads();                                     // every thread's part is in
    for (int w = 0; w < THREADS / 32; w++) M = fmaxf(M, warp_maximum[w]);

    // ---- rescale and add; the sink is one more logit that has no value vector
    const float total = tree_sum(width, begin, end, [&](int leaf) {
        return __fmul_rn(l[at(leaf)], exact_weight(m[at(leaf)], M));
    });
    float denominator = total;
    if (sinks != nullptr) denominator += probability(sinks[head], M);

    out += sequence * out_stride_token + head * out_stride_head;
    for (int d = tid; d < v_head_dim; d += THREADS) {
        const float o = tree_sum(width, begin, end, [&](int leaf) {
            return __fmul_rn(acc[at(leaf) * v_head_dim + d], exact_weight(m[at(leaf)], M));
        });
        out[d * out_stride_dim] = from_float<TOut>(total == 0.0f ? 0.0f : o / denominator);
    }
    if (tid == 0) lse[(long long)sequence * num_q_heads + head] = lse_of(M, total);
}
