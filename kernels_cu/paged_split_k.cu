// paged_split_k: stage 1 of split-K decode attention over a paged KV cache.
//
// One thread block reads one split (a contiguous run of keys of one sequence) once and leaves the
// softmax state of the query heads that share one KV head: unnormalised, so that stage 2 can merge
// the states of all splits. K and V are read once per KV head, however many query heads share it.
//
// Grid      (capacity, num_kv_heads, head_tiles): plan row, KV head, tile of G query heads.
//           A row past the plan's last returns at once: the grid is fixed, the work is not.
// Threads   Per tile of 32 keys:
//           copy    thread t moves the vectors t, t + THREADS, ... of the K and V tile
//           score   warp w owns heads w, w + WARPS, ...; lane j owns key j
//           output  thread t owns columns 2c, 2c + 1 with c = t % (DV / 2), of heads
//                   t / (DV / 2), + HEAD_STEP, ...
// Shared    k [32][PITCH], v [32][PITCH] in TKV; q [G][DK], p [G][32], rescale [G] in float
// Reads     each visible key once: (DK + DV) * sizeof(TKV) bytes; one table entry per block
// Writes    (DV + 2) * 4 bytes per query head and row (FINISH: the output and its lse instead)
// Empty     A split with no visible key writes the identity (0, -inf, 0) and reads no key.
// TREE      A split is a run of whole leaves (leaves.cuh) and leaves the state of each of its
//           maximal aligned subtrees, in rows [batch, leaf_rows] instead of one a split: a leaf is
//           folded into its left siblings, which this block wrote before, as soon as it is read. No
//           bit of what reduce_subtrees makes of them depends on the plan.
// Faults    A block id outside the pool or a length past the table is never followed: the state
//           becomes NaN (m = +inf, so that no merge can weigh it away) and `fault` says where.
#include "leaves.cuh"
#include "paged_kv.cuh"
#include "softmax_state.cuh"
#include "splits.cuh"
#include "tree_node.cuh"

template <typename TQ, typename TKV, typename TOut, int DK, int DV, int G, int THREADS,
          bool SOFT_CAP, bool ALIBI, bool FINISH, bool TREE>
__global__ void __launch_bounds__(THREADS) paged_split_k(
    float* acc_out,               // [rows, num_q_heads, DV]; rows: capacity, or batch * leaf_rows
    float* m_out,                 // [rows, num_q_heads], log2 units
    float* l_out,                 // [rows, num_q_heads]
    int* width_out,               // [batch, leaf_rows], TREE only: leaves of each row's state
    TOut* out,                    // [batch, num_q_heads, DV], FINISH only
    float* lse,                   // [batch, num_q_heads], FINISH only, natural log
    int* fault,                   // [4] or null
    const TQ* q,                  // [batch, num_q_heads, DK]
    const TKV* k_cache,           // [num_blocks, block_size, num_kv_heads, DK]
    const TKV* v_cache,           // [num_blocks, block_size, num_kv_heads, DV]
    const int* block_table,       // [batch, max_blocks]
    const int* seq_lens,          // [batch]
    const int* split_offsets,     // [batch + 1], or null: nothing is split
    const int* split_begin,       // [capacity], or null with it
    const float* alibi_slopes,    // [num_q_heads], ALIBI only
    const float* k_scales,        // [batch, num_kv_heads] by strides, or null: factors of K
    const float* v_scales,        // [batch, num_kv_heads] by strides, or null: factors of V
    long long q_stride_token, long long q_stride_head, long long q_stride_dim,
    long long out_stride_token, long long out_stride_head, long long out_stride_dim,
    long long k_stride_block, long long k_stride_slot, long long k_stride_head,
    long long v_stride_block, long long v_stride_slot, long long v_stride_head,
    long long table_stride_token, long long table_stride_column, long long seq_lens_stride,
    long long k_scales_stride_token, long long k_scales_stride_head,
    long long v_scales_stride_token, long long v_scales_stride_head,
    int batch, int num_q_heads, int group_size, int num_blocks, int block_size, int max_blocks,
    int window,                   // newest keys that are visible; 0: all
    int leaf_rows,                // TREE only, and so are the next three
    int max_leaves,               // of one sequence: the heads' share
    int shard_begin, int shard_end,    // keys of every sequence that are read here
    float scale,                  // times the factor of all of K
    float v_scale,                // factor of all of V
    float soft_cap) {
    using KCopy = TileCopy<TKV, DK, THREADS>;
    using VCopy = TileCopy<TKV, DV, THREADS>;
    constexpr int WARPS = THREADS / 32;
    constexpr int HEADS_PER_WARP = (G + WARPS - 1) / WARPS;
    constexpr int PAIRS = DV / 2;                        // column pairs of the output
    constexpr int HEAD_STEP = THREADS / PAIRS;           // heads that the block's threads cover
    constexpr int HEADS_PER_THREAD = (G + HEAD_STEP - 1) / HEAD_STEP;
    // Independent work hides latency while registers last; tanh takes some.
    constexpr int UNROLL = HEADS_PER_WARP <= 2 && HEADS_PER_THREAD <= 4 && !SOFT_CAP ? 4 : 2;
    static_assert(PAIRS <= THREADS, "every output column needs a thread");

    DYN_SMEM(shared);
    TKV* k_tile = reinterpret_cast<TKV*>(shared);
    TKV* v_tile = reinterpret_cast<TKV*>(shared + KCopy::BYTES);
    float* q_shared = reinterpret_cast<float*>(shared + KCopy::BYTES + VCopy::BYTES);
    float* p_shared = q_shared + G * DK;
    float* rescale = p_shared + G * TILE;

    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int row = blockIdx.x, kv_head = blockIdx.y;

    // ---- which keys
    const int sequence = sequence_of_row<THREADS>(row, split_offsets, batch);
    if (sequence == batch) return;                       // no such row in this plan
    const int seq_len = seq_lens[sequence * seq_lens_stride];
    bool bad = seq_len < 0 || seq_len > (long long)max_blocks * block_size;
    if (bad && tid == 0) report_fault(fault, FAULT_SEQ_LEN, sequence, max_blocks, seq_len);
    KeyRange keys;
    LeafRange own;
    int leaf = 0;                                        // keys of a leaf
    const bool counts = blockIdx.y == 0 && blockIdx.z == 0;    // one block of a row says the widths
    if (TREE) {
        leaf = leaf_keys(seq_len, max_leaves);
        own = leaves_of_row(row, gridDim.x, sequence, split_offsets, split_begin, leaf, leaf_rows);
        keys = visible_keys(own, leaf, seq_len, window, {shard_begin, shard_end});
        width_out += (long long)sequence * leaf_rows;
        if (counts)
            for (int i = own.begin + tid; i < own.end; i += THREADS) width_out[i] = 0;
    } else {
        keys = visible_keys(row, gridDim.x, sequence, split_offsets, split_begin, seq_len, window);
    }
    if (bad) keys = {0, 0};
    // Tiles do not straddle leaves, so a window may begin inside the first one.
    const int first_tile = TREE ? keys.begin / TILE * TILE : keys.begin;

    // ---- which heads: G of this KV head's group, the last tile maybe fewer
    const int head_in_group = blockIdx.z * G;
    const int heads = min(G, group_size - head_in_group);
    const int head0 = kv_head * group_size + head_in_group;

    const int* table_row = block_table + sequence * table_stride_token;
    k_cache += kv_head * k_stride_head;
    v_cache += kv_head * v_stride_head;
    q += sequence * q_stride_token + head0 * q_stride_head;
    if (k_scales != nullptr)
        scale *= k_scales[sequence * k_scales_stride_token + kv_head * k_scales_stride_head];

    for (int i = tid; i < G * DK; i += THREADS) {
        const int h = i / DK, d = i % DK;
        q_shared[i] = h < heads ? to_float(q[h * q_stride_head + d * q_stride_dim]) : 0.0f;
    }

    SoftmaxState state[HEADS_PER_WARP];
    float acc[HEADS_PER_THREAD][2] = {};
    const int pair = tid % PAIRS, first_head = tid / PAIRS;

    auto factor_of_v = [&]() {
        if (v_scales == nullptr) return v_scale;
        return v_scale *
               v_scales[sequence * v_scales_stride_token + kv_head * v_scales_stride_head];
    };

    // ---- TREE: a leaf has been read; it is added to the left siblings that this split has
    const int first_leaf = TREE ? keys.begin / leaf : 0;
    auto close_leaf = [&](int first) {
        float *left = p_shared, *right = rescale;        // of each head: l at first, then weights
        auto at = [&](int row, int h) {
            return ((long long)sequence * leaf_rows + row) * num_q_heads + head0 + h;
        };
#pragma unroll
        for (int i = 0; i < HEADS_PER_WARP; i++) {
            const int h = warp + i * WARPS;
            if (h < heads && lane == 0) right[h] = state[i].l;
        }
        bad = __syncthreads_or(bad);
        const float factor = bad ? quiet_nan() : factor_of_v();
#pragma unroll
        for (int i = 0; i < HEADS_PER_WARP; i++)
            if (bad) state[i] = {-neg_inf(), quiet_nan()};
#pragma unroll
        for (int i = 0; i < HEADS_PER_THREAD; i++) {
            const int h = first_head + i * HEAD_STEP;
            if (h >= heads) break;
            // Without any weight (every score -inf) the values do not count, whatever they are.
            const bool none = !bad && right[h] == 0.0f;
            acc[i][0] = none ? -0.0f : acc[i][0] * factor;
            acc[i][1] = none ? -0.0f : acc[i][1] * factor;
        }
        int width = 1;
        for (; (first & width) && first - width >= first_leaf; width *= 2) {
            first -= width;
            if (counts && tid == 0) width_out[first] = 0;
            __syncthreads();                             // what left and right held has been used
#pragma unroll
            for (int i = 0; i < HEADS_PER_WARP; i++) {
                const int h = warp + i * WARPS;
                if (h >= heads) break;
                const float m = m_out[at(first, h)], M = fmaxf(m, state[i].m);
                const float f = exact_weight(m, M), g = exact_weight(state[i].m, M);
                state[i].l = __fadd_rn(__fmul_rn(l_out[at(first, h)], f), __fmul_rn(state[i].l, g));
                state[i].m = M;
                if (lane == 0) left[h] = f, right[h] = g;
            }
            __syncthreads();                             // both weights are in place
            if (first_head >= HEAD_STEP) continue;
#pragma unroll
            for (int i = 0; i < HEADS_PER_THREAD; i++) {
                const int h = first_head + i * HEAD_STEP;
                if (h >= heads) break;
                const float2 o = load_pair(acc_out + at(first, h) * DV + 2 * pair);
                acc[i][0] = __fadd_rn(__fmul_rn(o.x, left[h]), __fmul_rn(acc[i][0], right[h]));
                acc[i][1] = __fadd_rn(__fmul_rn(o.y, left[h]), __fmul_rn(acc[i][1], right[h]));
            }
        }
        if (counts && tid == 0) width_out[first] = width;
#pragma unroll
        for (int i = 0; i < HEADS_PER_WARP; i++) {
            const int h = warp + i * WARPS;
            if (h < heads && lane == 0) {
                m_out[at(first, h)] = state[i].m;
                l_out[at(first, h)] = state[i].l;
            }
            state[i] = SoftmaxState();
        }
#pragma unroll
        for (int i = 0; i < HEADS_PER_THREAD; i++) {
            const int h = first_head + i * HEAD_STEP;
            if (h < heads && first_head < HEAD_STEP)
                *reinterpret_cast<float2*>(acc_out + at(first, h) * DV + 2 * pair) =
                    make_float2(acc[i][0], acc[i][1]);
            acc[i][0] = acc[i][1] = 0.0f;
        }
    };

    // ---- the first tile's rows, and the second tile's places, are on their way before the loop
    KCopy k_copy;
    VCopy v_copy;
    auto find = [&](int key) {
        if (TREE && key < keys.begin) key = keys.end;
        return find_key(key, keys.end, table_row, table_stride_column, block_size, num_blocks,
                        sequence, fault, bad);
    };
    Place next = find(first_tile + lane);
    k_copy.fetch(k_cache, k_stride_block, k_stride_slot, next);
    v_copy.fetch(v_cache, v_stride_block, v_stride_slot, next);
    next = find(first_tile + TILE + lane);

    for (int tile = first_tile; tile < keys.end; tile += TILE) {
        k_copy.store(k_tile);
        v_copy.store(v_tile);
        __syncthreads();                                 // tile (and, at first, q) is in place

        k_copy.fetch(k_cache, k_stride_block, k_stride_slot, next);
        v_copy.fetch(v_cache, v_stride_block, v_stride_slot, next);
        next = find(tile + 2 * TILE + lane);

        // score: one dot product per (head of this warp, key of this lane)
        float dot[HEADS_PER_WARP] = {};
#pragma unroll UNROLL
        for (int c = 0; c < KCopy::VECS; c++) {
            constexpr int N = KCopy::WIDTH;
            float k[N];
            unpack(*reinterpret_cast<const typename KCopy::Vector*>(
                       k_tile + lane * KCopy::PITCH + c * N), k, TKV());
#pragma unroll
            for (int i = 0; i < HEADS_PER_WARP; i++) {
                const int h = warp + i * WARPS;
                if (h < G) {
                    const float* qh = q_shared + h * DK + c * N;
                    float part = qh[0] * k[0];           // short sums round less than one long one
#pragma unroll
                    for (int e = 1; e < N; e++) part += qh[e] * k[e];
                    dot[i] += part;
                }
            }
        }

        // softmax: every lane of a warp holds the same state of the warp's heads
        const int key = tile + lane;
#pragma unroll
        for (int i = 0; i < HEADS_PER_WARP; i++) {
            const int h = warp + i * WARPS;
            if (h >= G) break;                           // past the group q is 0: p is never used
            float score = dot[i] * scale;
            if (SOFT_CAP) score = soft_cap * tanhf(score / soft_cap);
            if (ALIBI && h < heads) score += alibi_slopes[head0 + h] * (key - (seq_len - 1));
            if (key >= keys.end) score = neg_inf();
            if (TREE && key < keys.begin) score = neg_inf();
            const float top = warp_max(score) * LOG2_E;
            const float m = fmaxf(state[i].m, TREE ? ceilf(top) : top);
            const float p = probability(score, m);
            const float factor = TREE ? exact_weight(state[i].m, m) : weight(state[i].m, m);
            state[i].l = state[i].l * factor + warp_sum(p);
            state[i].m = m;
            p_shared[h * TILE + lane] = p;
            if (lane == 0) rescale[h] = factor;
        }
        __syncthreads();                                 // p and rescale are in place

        // output: acc = acc * rescale + p . V, the tile's sum taken first: it rounds less
        if (first_head < HEAD_STEP) {
            float part[HEADS_PER_THREAD][2] = {};
#pragma unroll UNROLL
            for (int j = 0; j < TILE; j++) {
                const float2 v = load_pair(v_tile + j * VCopy::PITCH + 2 * pair);
#pragma unroll
                for (int i = 0; i < HEADS_PER_THREAD; i++) {
                    const int h = first_head + i * HEAD_STEP;
                    if (h < G) {
                        part[i][0] += p_shared[h * TILE + j] * v.x;
                        part[i][1] += p_shared[h * TILE + j] * v.y;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < HEADS_PER_THREAD; i++) {
                const int h = first_head + i * HEAD_STEP;
                if (h < G) {
                    acc[i][0] = acc[i][0] * rescale[h] + part[i][0];
                    acc[i][1] = acc[i][1] * rescale[h] + part[i][1];
                }
            }
        }
        __syncthreads();                                 // everyone is done with this tile
        if (TREE && (tile + TILE >= keys.end || (tile + TILE) % leaf == 0)) close_leaf(tile / leaf);
    }
    if (TREE) {
        // A length that is refused: the first row says so for all.
        bad = __syncthreads_or(bad && own.begin == 0 && keys.begin >= keys.end);
        if (bad) close_leaf(0);
        return;
    }

    // ---- one state per head
    bad = __syncthreads_or(bad);
    float* l_shared = rescale;
#pragma unroll
    for (int i = 0; i < HEADS_PER_WARP; i++) {
        const int h = warp + i * WARPS;
        if (h >= heads || lane != 0) continue;
        if (bad) state[i] = {-neg_inf(), quiet_nan()};
        if (FINISH) {
            l_shared[h] = state[i].l;
            lse[(long long)sequence * num_q_heads + head0 + h] = lse_of(state[i].m, state[i].l);
        } else {
            m_out[(long long)row * num_q_heads + head0 + h] = state[i].m;
            l_out[(long long)row * num_q_heads + head0 + h] = state[i].l;
        }
    }
    if (FINISH) __syncthreads();
    if (first_head >= HEAD_STEP) return;
    const float factor = factor_of_v();
#pragma unroll
    for (int i = 0; i < HEADS_PER_THREAD; i++) {
        const int h = first_head + i * HEAD_STEP;
        if (h >= heads) break;
        float2 o = make_float2(acc[i][0] * factor, acc[i][1] * factor);
        if (bad) o = make_float2(quiet_nan(), quiet_nan());
        if (FINISH) {
            // Divide as reduce_splits does: an unsplit row has the bits it has in a split batch.
            const float l = l_shared[h];
            TOut* to = out + sequence * out_stride_token + (head0 + h) * out_stride_head +
                       2 * pair * out_stride_dim;
            to[0] = from_float<TOut>(l == 0.0f ? 0.0f : o.x / l);
            to[out_stride_dim] = from_float<TOut>(l == 0.0f ? 0.0f : o.y / l);
        } else {
            float* to = acc_out + ((long long)row * num_q_heads + head0 + h) * DV + 2 * pair;
            *reinterpret_cast<float2*>(to) = o;
        }
    }
}
