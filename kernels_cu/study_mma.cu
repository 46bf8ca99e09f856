// study_mma: stage 1 of split-K decode attention on tensor cores, in steps that add one idea each.
//
// A study, slower than paged_split_k_mma, which has all of them and more. Compare
//   <T, false, 1, false>  queries as the rows of the products, padded from 8 to 16
//   <T, true,  1, false>  the transposed products: keys as rows, queries as columns, no padding
//   <T, true,  2, false>  a ring: the next page is on its way, and the id of the one after it,
//                         while this one is worked on
//   <T, true,  2, true>   the last block of a sequence to arrive merges; the others leave partials
//                         for reduce_splits
// It takes head_dim 128, pages of 16 keys, up to 8 query heads per KV head and contiguous arrays.
//
// Grid      (splits, num_kv_heads, batch), splits: the most of any sequence
// Threads   4 warps; warp w reads the pages w, w + 4, ... of the split, each on its own, and the
//           block adds up the four states
// Shared    pages [4 warps][STAGES][K, V][16][D] in T; afterwards states [4][8][D + 2], float
// Reads     K and V of the split once, a page id per 16 keys
// Writes    acc, m, l of its split; with MERGE the last block of a (sequence, KV head) reads them
//           again and writes out and lse
// Empty     a sequence without keys has one split without keys: acc 0, m -inf, l 0
#include "ptx.cuh"

constexpr int D = 128, PAGE = 16, WARPS = 4, HEADS = 8, CHUNKS = D / 8;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }
// 2^(m - M), where a state without keys weighs nothing
__device__ __forceinline__ float weight(float m, float M) {
    return m == neg_inf() ? 0.0f : ex2(m - M);
}

__device__ __forceinline__ unsigned int pack_pair(float lo, float hi, __nv_bfloat16) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const unsigned int*>(&x);
}
__device__ __forceinline__ unsigned int pack_pair(float lo, float hi, __half) {
    const __half2 x = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const unsigned int*>(&x);
}

// Chunk `chunk` (16 bytes) of row `row` of a page: permuted, so that 8 rows of a column of chunks
// lie in different banks.
template <typename T>
__device__ __forceinline__ T* at(T* page, int row, int chunk) {
    return page + row * D + (chunk ^ (row & 7)) * 8;
}

// Both arrangements hold the state of 8 heads in the registers of a warp. Lane 4g + t of a fragment
// of 16 x 8 results has rows g, g + 8 of columns 2t, 2t + 1.

// S [16 queries][8 keys] = Q K^T, O [16 queries][8 columns] = P V: rows 8 to 15 are padding.
template <typename T>
struct QueriesAsRows {
    unsigned int q[CHUNKS][2];    // the two quarters of a fragment that hold queries
    float m = neg_inf(), l = 0.0f, acc[D / 8][4] = {};

    __device__ __forceinline__ void load(const T* heads, int group_size) {
        const int lane = threadIdx.x % 32, head = min(lane / 4, group_size - 1);
        const auto* row = reinterpret_cast<const unsigned int*>(heads + head * D) + lane % 4;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) q[i / 2][i % 2] = __ldg(row + 4 * i);
    }
    __device__ __forceinline__ void add(const T* k, const T* v, int keys, float scale_log2) {
        const int lane = threadIdx.x % 32, t = lane % 4;
        float s[2][4] = {};
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            unsigned int b[4];
            ldmatrix_x4(b, at(k, lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2));
            const unsigned int a[4] = {q[j][0], 0, q[j][1], 0};
#pragma unroll
            for (int n = 0; n < 2; n++) mma_m16n8k16(s[n], a, {b[2 * n], b[2 * n + 1]}, T());
        }
        float M = m;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& x = s[i / 2][i % 2];
            x = i / 2 * 8 + 2 * t + i % 2 < keys ? x * scale_log2 : neg_inf();
            M = fmaxf(M, x);
        }
        M = fmaxf(M, __shfl_xor_sync(0xffffffffu, M, 1));
        M = fmaxf(M, __shfl_xor_sync(0xffffffffu, M, 2));
        const float f = weight(m, M);
        m = M, l *= f;
#pragma unroll
        for (int i = 0; i < 4; i++) l += s[i / 2][i % 2] = weight(s[i / 2][i % 2], M);
        const unsigned int p[4] = {pack_pair(s[0][0], s[0][1], T()), 0,
                                   pack_pair(s[1][0], s[1][1], T()), 0};
#pragma unroll
        for (int e = 0; e < D / 16; e++) {
            unsigned int b[4];
            ldmatrix_x4_trans(b, at(v, lane % 16, 2 * e + lane / 16));
#pragma unroll
            for (int n = 0; n < 2; n++) {
                acc[2 * e + n][0] *= f, acc[2 * e + n][1] *= f;
                mma_m16n8k16(acc[2 * e + n], p, {b[2 * n], b[2 * n + 1]}, T());
            }
        }
    }
    __device__ __forceinline__ void store(float (*state)[D + 2]) {    // [8 heads]
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        l += __shfl_xor_sync(0xffffffffu, l, 1);
        l += __shfl_xor_sync(0xffffffffu, l, 2);
#pragma unroll
        for (int e = 0; e < D / 8; e++)
#pragma unroll
            for (int i = 0; i < 2; i++) state[g][8 * e + 2 * t + i] = acc[e][i];
        if (t == 0) state[g][D] = m, state[g][D + 1] = l;
    }
};

// S^T [16 keys][8 queries] = K Q^T, O^T [16 columns][8 queries] = V^T P^T: half as many products.
template <typename T>
struct QueriesAsColumns {
    unsigned int q[D / 16][2];
    float m[2] = {neg_inf(), neg_inf()}, l[2] = {}, acc[D / 16][4] = {};

    __device__ __forceinline__ void load(const T* heads, int group_size) {
        const int lane = threadIdx.x % 32, head = min(lane / 4, group_size - 1);
        const auto* row = reinterpret_cast<const unsigned int*>(heads + head * D) + lane % 4;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) q[i / 2][i % 2] = __ldg(row + 4 * i);
    }
    __device__ __forceinline__ void add(const T* k, const T* v, int keys, float scale_log2) {
        const int lane = threadIdx.x % 32, g = lane / 4;
        float s[4] = {};
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            unsigned int a[4];
            ldmatrix_x4(a, at(k, lane % 16, 2 * j + lane / 16));
            mma_m16n8k16(s, a, q[j], T());
        }
        float f[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float M = m[h];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& x = s[2 * i + h];
                x = g + 8 * i < keys ? x * scale_log2 : neg_inf();
                M = fmaxf(M, x);
            }
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                M = fmaxf(M, __shfl_xor_sync(0xffffffffu, M, step));
            f[h] = weight(m[h], M);
            m[h] = M, l[h] *= f[h];
#pragma unroll
            for (int i = 0; i < 2; i++) l[h] += s[2 * i + h] = weight(s[2 * i + h], M);
        }
        // [key][query] fragments become [query][key] ones
        const unsigned int p[2] = {movmatrix_trans(pack_pair(s[0], s[1], T())),
                                   movmatrix_trans(pack_pair(s[2], s[3], T()))};
#pragma unroll
        for (int e = 0; e < D / 16; e++) {
            unsigned int a[4];
            ldmatrix_x4_trans(a, at(v, lane % 8 + lane / 16 * 8, 2 * e + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; i++) acc[e][i] *= f[i % 2];
            mma_m16n8k16(acc[e], a, p, T());
        }
    }
    __device__ __forceinline__ void store(float (*state)[D + 2]) {    // [8 heads]
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                l[h] += __shfl_xor_sync(0xffffffffu, l[h], step);
#pragma unroll
            for (int e = 0; e < D / 16; e++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    state[2 * t + h][16 * e + g + 8 * i] = acc[e][2 * i + h];
            if (g == 0) state[2 * t + h][D] = m[h], state[2 * t + h][D + 1] = l[h];
        }
    }
};

template <typename T, bool TRANSPOSED> struct Product { using Type = QueriesAsRows<T>; };
template <typename T> struct Product<T, true> { using Type = QueriesAsColumns<T>; };

template <typename T, bool TRANSPOSED, int STAGES, bool MERGE>
__global__ void __launch_bounds__(32 * WARPS, 2) study_mma(
    T* out,                       // [batch, num_q_heads, D], with MERGE
    float* lse,                   // [batch, num_q_heads], natural log, with MERGE
    float* acc,                   // [rows, num_q_heads, D]
    float* m,                     // [rows, num_q_heads], log2 units
    float* l,                     // [rows, num_q_heads]
    unsigned int* arrivals,       // [batch, num_kv_heads], 0 before and after
    const T* q,                   // [batch, num_q_heads, D]
    const T* k_cache,             // [num_blocks, 16, num_kv_heads, D]
    const T* v_cache,             // [num_blocks, 16, num_kv_heads, D]
    const int* block_table,       // [batch, max_blocks]
    const int* seq_lens,          // [batch]
    const int* split_offsets,     // [batch + 1]
    const int* split_begin,       // [rows], multiples of 16
    int num_q_heads, int num_kv_heads,
    int max_blocks,
    float scale_log2) {
    using State = typename Product<T, TRANSPOSED>::Type;
    DYN_SMEM(shared);
    const int kv_head = blockIdx.y, b = blockIdx.z, group_size = num_q_heads / num_kv_heads;
    const int first_row = split_offsets[b], splits = split_offsets[b + 1] - first_row;
    if ((int)blockIdx.x >= splits) return;
    const int row = first_row + blockIdx.x, seq_len = seq_lens[b];
    const int begin = split_begin[row];
    const int end = (int)blockIdx.x + 1 < splits ? split_begin[row + 1] : seq_len;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first_head = (long long)b * num_q_heads + kv_head * group_size;

    State state;
    state.load(q + first_head * D, group_size);

    // ---- the loop over this warp's pages
    T* pages = reinterpret_cast<T*>(shared) + warp * STAGES * 2 * PAGE * D;
    const int mine = (end - begin + PAGE - 1) / PAGE - warp;             // pages from the warp's on
    const int count = mine > 0 ? (mine + WARPS - 1) / WARPS : 0;
    auto first_key = [&](int i) { return begin + (warp + i * WARPS) * PAGE; };
    // With a ring a page's id is fetched a turn before its copies, which could not start without.
    auto page_id = [&](int i) {
        return i < count ? __ldg(block_table + b * max_blocks + first_key(i) / PAGE) : 0;
    };
    auto fill = [&](int i, int id) {
        if (i < count) {
            const int key = first_key(i);
            T* k = pages + i % STAGES * 2 * PAGE * D;
#pragma unroll
            for (int j = 0; j < PAGE * CHUNKS / 32; j++) {
                const int r = (lane + 32 * j) / CHUNKS, chunk = lane % CHUNKS;
                const long long from =
                    (((long long)id * PAGE + r) * num_kv_heads + kv_head) * D + chunk * 8;
                cp_async_16_or_zero(at(k, r, chunk), k_cache + from, key + r < end);
                cp_async_16_or_zero(at(k + PAGE * D, r, chunk), v_cache + from, key + r < end);
            }
        }
        cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) fill(i, page_id(i));
    int next_id = STAGES > 1 ? page_id(STAGES) : 0;
    for (int i = 0; i < count; i++) {
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        const T* k = pages + i % STAGES * 2 * PAGE * D;
        state.add(k, k + PAGE * D, end - first_key(i), scale_log2);
        __syncwarp();            // no lane reads the page any more
        fill(i + STAGES, STAGES > 1 ? next_id : page_id(i + STAGES));
        if (STAGES > 1) next_id = page_id(i + STAGES + 1);
    }
    cp_async_wait<0>();

    // ---- add up the warps; thread d has column d of every head
    float(*states)[HEADS][D + 2] = reinterpret_cast<float(*)[HEADS][D + 2]>(shared);
    __syncthreads();             // the states lie where the pages were
    state.store(states[warp]);
    __syncthreads();
    const int d = threadIdx.x;
    for (int h = 0; h < group_size; h++) {
        float M = neg_inf(), L = 0.0f, sum = 0.0f;
        for (int w = 0; w < WARPS; w++) M = fmaxf(M, states[w][h][D]);
        for (int w = 0; w < WARPS; w++) {
            const float f = weight(states[w][h][D], M);
            L += states[w][h][D + 1] * f, sum += states[w][h][d] * f;
        }
        const long long to = (long long)row * num_q_heads + kv_head * group_size + h;
        acc[to * D + d] = sum;
        if (d == 0) m[to] = M, l[to] = L;
    }
    if (!MERGE) return;

    // ---- the last to arrive merges
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0)
        last = atom_inc_acq_rel(arrivals + b * num_kv_heads + kv_head, splits - 1) ==
               (unsigned int)splits - 1;
    __syncthreads();
    if (!last) return;
    for (int h = 0; h < group_size; h++) {
        const long long from = (long long)first_row * num_q_heads + kv_head * group_size + h;
        float M = neg_inf(), L = 0.0f, sum = 0.0f;
        for (int i = 0; i < splits; i++) M = fmaxf(M, m[from + (long long)i * num_q_heads]);
#pragma unroll 8
        for (int i = 0; i < splits; i++) {
            const long long at = from + (long long)i * num_q_heads;
            const float f = weight(m[at], M);
            L += l[at] * f, sum += acc[at * D + d] * f;
        }
        out[(first_head + h) * D + d] = T(L > 0.0f ? sum / L : 0.0f);
        if (d == 0)
            lse[first_head + h] = L > 0.0f ? (M + log2f(L)) * 0.69314718056f : neg_inf();
    }
}
