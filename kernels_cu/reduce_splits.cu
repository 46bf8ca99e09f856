// reduce_splits: stage 2 of split-K decode attention, the N-way merge of a sequence's splits.
//
// Every state is brought to the global maximum, the sums are added, and one division ends it; no
// key or value is read again.
//
// Grid      (batch, num_q_heads): one thread block merges all splits of one (sequence, head)
// Threads   thread t owns output columns t, t + THREADS, ...; every thread repeats the scalar sums
// Shared    one float per warp
// Reads     m and l of each of the sequence's rows; acc of those that hold a key
// Writes    v_head_dim outputs and one lse
// Empty     A sequence with no row, or whose rows are all empty: out 0, lse -inf, both written.
//           Rows of other sequences, and rows past the plan's last, are never read.
#include "softmax_state.cuh"
#include "vec.cuh"

template <typename TOut, int THREADS>
__global__ void __launch_bounds__(THREADS) reduce_splits(
    TOut* out,                  // [batch, num_q_heads, v_head_dim]
    float* lse,                 // [batch, num_q_heads], natural log, without the sink
    const float* acc,           // [capacity, num_q_heads, v_head_dim]
    const float* m,             // [capacity, num_q_heads], log2 units
    const float* l,             // [capacity, num_q_heads]
    const int* split_offsets,   // [batch + 1]
    const float* sinks,         // [num_q_heads], or null
    long long out_stride_token, long long out_stride_head, long long out_stride_dim,
    int capacity, int num_q_heads, int v_head_dim) {
    const int sequence = blockIdx.x, head = blockIdx.y, tid = threadIdx.x;
    const int first = max(split_offsets[sequence], 0);
    const int last = min(split_offsets[sequence + 1], capacity);
    auto at = [&](int row) { return (long long)row * num_q_heads + head; };

    // ---- the global maximum
    __shared__ float warp_maximum[THREADS / 32];
    float M = neg_inf();
    for (int row = first + tid; row < last; row += THREADS) M = fmaxf(M, m[at(row)]);
    M = warp_max(M);
    if (tid % 32 == 0) warp_maximum[tid / 32] = M;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) M = fmaxf(M, warp_maximum[w]);

    // ---- rescale and add; the sink is one more logit that has no value vector
    float total = 0.0f;
    for (int row = first; row < last; row++) total += l[at(row)] * weight(m[at(row)], M);
    float denominator = total;
    if (sinks != nullptr) denominator += probability(sinks[head], M);

    out += sequence * out_stride_token + head * out_stride_head;
    for (int d = tid; d < v_head_dim; d += THREADS) {
        float o = 0.0f;
        for (int row = first; row < last; row++)
            if (l[at(row)] != 0.0f) o += acc[at(row) * v_head_dim + d] * weight(m[at(row)], M);
        out[d * out_stride_dim] = from_float<TOut>(total == 0.0f ? 0.0f : o / denominator);
    }
    if (tid == 0) lse[(long long)sequence * num_q_heads + head] = lse_of(M, total);
}
