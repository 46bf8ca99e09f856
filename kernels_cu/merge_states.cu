// merge_states: two attention outputs over disjoint sets of keys become the one over their union.
//
// What travels between launches is (out, lse): normalised, natural log. Cascade attention merges a
// shared prefix with a suffix this way, context parallelism the shards of one sequence.
//
// Grid      (tokens, num_q_heads)
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
    const int token = blockIdx.x, head = blockIdx.y;
    auto load_lse = [&](const float* p, long long stride_token, long long stride_head) {
        const float x = p[token * stride_token + head * stride_head];
        return x == -neg_inf() ? neg_inf() : x;
    };
    // A normalised output is a state with l = 1 and maximum lse. The difference is taken before it
    // goes to log2 units: large sums that are close keep their distance.
    const float a = load_lse(lse_a, lse_a_stride_token, lse_a_stride_head);
    const float b = load_lse(lse_b, lse_b_stride_token, lse_b_stride_head);
    const float top = fmaxf(a, b);
    auto share = [&](float x) { return x == neg_inf() ? 0.0f : ex2((x - top) * LOG2_E); };
    const float weight_a = share(a), weight_b = share(b), total = weight_a + weight_b;
    float denominator = total;
    if (sinks != nullptr && top != neg_inf()) denominator += share(sinks[head]);

    out += token * out_stride_token + head * out_stride_head;
    out_a += token * out_a_stride_token + head * out_a_stride_head;
    out_b += token * out_b_stride_token + head * out_b_stride_head;
    for (int d = threadIdx.x; d < v_head_dim; d += THREADS) {
        float o = 0.0f;                                  // 0 * NaN is NaN: weight 0 reads nothing
        if (weight_a != 0.0f) o += to_float(out_a[d]) * weight_a;
        if (weight_b != 0.0f) o += to_float(out_b[d]) * weight_b;
        out[d] = from_float<T>(total == 0.0f ? 0.0f : o / denominator);
    }
    if (threadIdx.x == 0)
        lse[token * lse_stride_token + head * lse_stride_head] =
            total == 0.0f ? neg_inf() : top + log2f(total) * LN_2;
}
