// merge_states: two attention outputs over disjoint sets of keys become the output over their union.
//
// What travels between launches is (out, lse): normalised, natural log. Cascade attention merges a
// shared prefix with a suffix this way, context parallelism the shards of one sequence.
//
// Grid      (num_q_heads, tokens)
// Threads   thread t owns columns t, t + THREADS, ...
// Reads     both outputs and lses once
// Writes    the merged output and lse
// Empty     lse = -inf, or +inf as some kernels write it, means "no keys": that side's output is
//           never read into the sum. Both empty: out 0, lse -inf.
#include "softmax_state.cuh"
#include "vec.cuh"

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) merge_states(
    T* out,                     // [tokens, num_q_heads, v_head_dim]
    float* lse,                 // [tokens, num_q_heads], without the sink
    const T* out_a,             // [tokens, num_q_heads, v_head_dim]
    const float* lse_a,         // [tokens, num_q_heads]
    const T* out_b,             // as out_a
    const float* lse_b,         // as lse_a
    const float* sinks,         // [num_q_heads], or null: a last merge applies them once
    long long out_stride_token, long long out_stride_head,
    long long lse_stride_token, long long lse_stride_head,
    long long out_a_stride_token, long long out_a_stride_head,
    long long lse_a_stride_token, long long lse_a_stride_head,
    long long out_b_stride_token, long long out_b_stride_head,
    long long lse_b_stride_token, long long lse_b_stride_head,
    int v_head_dim) {
    const int head = blockIdx.x, token = blockIdx.y;
    auto log2_sum = [&](const float* p, long long stride_token, long long stride_head) {
        const float x = p[token * stride_token + head * stride_head] * LOG2_E;
        return x == -neg_inf() ? neg_inf() : x;
    };
    // A normalised output is a state with l = 1 and m = lse.
    const float a = log2_sum(lse_a, lse_a_stride_token, lse_a_stride_head);
    const float b = log2_sum(lse_b, lse_b_stride_token, lse_b_stride_head);
    const float M = fmaxf(a, b);
    const float weight_a = weight(a, M), weight_b = weight(b, M), total = weight_a + weight_b;
    float denominator = total;
    if (sinks != nullptr) denominator += probability(sinks[head] * LOG2_E, M);

    out += token * out_stride_token + head * out_stride_head;
    out_a += token * out_a_stride_token + head * out_a_stride_head;
    out_b += token * out_b_stride_token + head * out_b_stride_head;
    for (int d = threadIdx.x; d < v_head_dim; d += THREADS) {
        float o = 0.0f;                                  // 0 * NaN is NaN: weight 0 reads nothing
        if (weight_a != 0.0f) o += to_float(out_a[d]) * weight_a;
        if (weight_b != 0.0f) o += to_float(out_b[d]) * weight_b;
        out[d] = from_float<T>(total == 0.0f ? 0.0f : o / denominator);
    }
    if (threadIdx.x == 0) lse[token * lse_stride_token + head * lse_stride_head] = lse_of(M, total);
}
