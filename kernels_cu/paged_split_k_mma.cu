// paged_split_k_mma: split-K decode attention over a paged KV cache, in one launch, on tensor cores.
//
// Who reads which keys follows from seq_lens on the device (schedule.cuh): nothing is planned, and a
// captured graph stays right when lengths change. The result does not depend on how the keys were
// split, nor on the batch around a sequence: its sums follow a tree of its own (tree_node.cuh).
//
// Grid      (blocks): one wave; block c takes the units c, c + blocks, ...
// Threads   4 warps. In the loop each is on its own: warp w reads leaf w of every leaf block, a page
//           of 16 keys at a time, for all query heads of the KV head (up to 16; more are tiled).
//           Afterwards warp w owns G / 4 neighbouring heads, each spread over 4 * 32 / G lanes
//           (from 4 heads down: one head a warp, over 32 lanes)
// Shared    ring   [4 warps][STAGES][K, V][16][D] in TKV, copies in flight (kv_ring.cuh)
//           states [4 warps][G][4 + D], float: the leaves of a leaf block
//           stacks [levels][G][4 + D], float: sums that wait for their right siblings
// Reads     each visible key once per 16 query heads: 2 * D * sizeof(TKV) bytes; per unit the
//           queries, per 16 keys an id (ANY_BLOCK: per key)
// Writes    the output and its lse; for a sequence of several units a state of G * (4 + D) floats
//           for each, which the last to finish reads again (tree_merge.cuh)
// Empty     A sequence without keys: out 0, lse -inf, both written.
// Faults    A block id outside the pool or a length past the table is never followed: the row
//           becomes NaN and `fault` says where.
//
// Slower in a study of this structure: loads straight to registers, bulk copies page by page, deeper
// rings, a grid-wide wait before a distributed merge.
#include "mma_tile.cuh"
#include "tree_merge.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;

// OPTIONS: the sum of those of scores.cuh that the call needs. TKV: T, or an 8-bit float.
template <typename T, typename TKV, typename TOut, int D, int G, int STAGES, bool ONE, int OPTIONS>
__global__ void __launch_bounds__(THREADS, D > 128 ? 1 : 2) paged_split_k_mma(
    TOut* out,                    // [batch, num_q_heads, D]
    float* lse,                   // [batch, num_q_heads], natural log
    float* partials,              // [capacity, G, 4 + D]
    unsigned int* arrivals,       // [capacity, 4 warps], 0 before and after
    int* fault,                   // [4] or null
    const T* q,                   // [batch, num_q_heads, D]
    const TKV* k_cache,           // [num_blocks, block_size, num_kv_heads, D]
    const TKV* v_cache,           // [num_blocks, block_size, num_kv_heads, D]
    const int* block_table,       // [batch, max_blocks]
    const int* seq_lens,          // [batch]
    const float* alibi_slopes,    // [num_q_heads], ALIBI
    const float* sinks,           // [num_q_heads], SINKS
    const float* k_scales,        // [batch, num_kv_heads] by strides, or null: factors of K, SCALES
    const float* v_scales,        // [batch, num_kv_heads] by strides, or null: factors of V, SCALES
    long long k_stride_head, long long v_stride_head,
    int q_stride_token, int q_stride_head, int out_stride_token, int out_stride_head,
    int k_stride_block, int k_stride_slot, int v_stride_block, int v_stride_slot,
    int table_stride,
    int k_scales_stride_token, int k_scales_stride_head,
    int v_scales_stride_token, int v_scales_stride_head,
    int batch, int num_q_heads,   // batch: 1 if ONE
    int group_size,               // query heads of one KV head, read in
    int tiles,                    // tiles of
    int tile_heads,               // heads, at most G, the last maybe fewer
    int heads,                    // num_kv_heads * tiles: what the schedule calls heads
    int num_blocks,
    int block_size,
    int pages_per_block,          // block_size / 16; not looked at if ANY_BLOCK
    int max_blocks,
    int max_seq_len,              // max_blocks * block_size
    int capacity,                 // partial states that the workspace holds
    int fixed_unit_log2,          // log2 of the pages of a unit, or -1: from seq_lens
    int window,                   // newest keys that are visible, WINDOW
    float scale,                  // of all scores
    float v_scale,                // factor of all of V, SCALES
    float soft_cap) {             // SOFT_CAP
    constexpr int TILES = G > 8 ? 2 : 1;                 // tiles of 8 heads in a product
    constexpr int ROWS = G > WARPS ? G / WARPS : 1;      // heads that a warp owns after the loop
    constexpr int LANES = 32 / ROWS;                     // lanes of each of them
    using Node = TreeNode<D, LANES>;
    constexpr int BATCH = Node::N > 4 ? 64 / Node::N : 16;   // a merge reads into 64 registers
    constexpr int FAN = LANES < 2 * BATCH ? LANES : 2 * BATCH;
    constexpr int GROUP = FAN < 16 ? FAN : 16;           // of units that meet where they are many
    using Ring = KvRing<TKV, D, STAGES>;
    constexpr int LOOK_UP = OPTIONS & ANY_BLOCK ? 2 : 32;    // pages whose ids a warp reads at a time

    DYN_SMEM(shared);
    float* states = reinterpret_cast<float*>(shared + WARPS * STAGES * Ring::STAGE_BYTES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int my_head = warp * ROWS + lane / LANES, my_lane = lane % LANES;

    const Schedule<TKV, WARPS, ONE, (OPTIONS & WINDOW) != 0> schedule(
        seq_lens, batch, heads, max_seq_len, window, capacity, gridDim.x, fixed_unit_log2);
    if (blockIdx.x >= schedule.num_units) return;

    // ---- what a warp reads of a unit
    struct Work {
        Unit unit;
        WarpPages<TKV, WARPS> pages;
        int kv_head, q_head, q_heads;    // KV head; query heads from .. and how many
    };
    auto q_row = [&](const Work& work) {
        return q + (long long)work.unit.sequence * q_stride_token +
               (long long)work.q_head * q_stride_head;
    };
    auto find_work = [&](int u) {
        Work work;
        work.unit = schedule.find(u);
        work.pages = WarpPages<TKV, WARPS>(work.unit, schedule.first_page_of(work.unit.seq_len),
                                      schedule.unit_pages_log2, heads, warp);
        work.kv_head = tiles == 1 ? work.unit.head : quotient(work.unit.head, tiles);
        const int tile = work.unit.head - work.kv_head * tiles;
        work.q_head = work.kv_head * group_size + tile * tile_heads;
        work.q_heads = min(tile_heads, group_size - tile * tile_heads);
        constexpr int LINES = D / 64;                    // of 128 bytes, in a query
        if (lane < work.q_heads * LINES)
            prefetch_l2(q_row(work) + lane / LINES * q_stride_head + lane % LINES * 64);
        return work;
    };
    // Whether row `row` of a page holds a visible key; `keys`: of the sequence from row 0 on.
    auto visible = [&](int row, int keys) {
        return row < keys && (!(OPTIONS & WINDOW) || row >= keys - window);
    };
    // Blocks of LOOK_UP of its pages from number `from` on, one a lane (ANY_BLOCK: of the rows of
    // two pages); nobody looks at them yet, so that nobody waits.
    auto look_up = [&](const Work& work, int from) {
        const int number = from + lane * LOOK_UP / 32;
        if (number >= work.pages.num_pages) return 0;
        int column = work.pages.page(number, warp);
        if constexpr (OPTIONS & ANY_BLOCK) {
            const int row = lane % PAGE;
            if (!visible(row, work.unit.seq_len - column * PAGE)) return 0;
            column = (column * PAGE + row) / block_size;
        } else if (pages_per_block != 1) {
            column = quotient(column, pages_per_block);
        }
        return __ldg(block_table + (long long)work.unit.sequence * table_stride + column);
    };

    // ---- the ring is fed from the pages of `work`, then from those of `next`
    Work work, next, fed_work;          // fed_work: the one of them being fed
    int next_blocks;                    // of the first pages of `next`
    int blocks, more_blocks;            // of the pages being fed, and of the 32 after them
    unsigned int fed = 0, to_feed = 0;  // pages put in of fed_work, and in all
    bool ahead = false;                 // fed_work is `next`
    Ring ring{shared + warp * STAGES * Ring::STAGE_BYTES};
    CacheHead<TKV> k_head = {nullptr, k_stride_block, k_stride_slot};
    CacheHead<TKV> v_head = {nullptr, v_stride_block, v_stride_slot};
    // Put page number `fed` of fed_work in, its 16 rows in a block of the cache ...
    auto feed_page = [&](int page) {
        PageId id = {__shfl_sync(0xffffffffu, blocks, fed % 32), 0,
                     fed_work.unit.seq_len - page * PAGE};
        int column = page;
        if (pages_per_block != 1) {
            column = quotient(page, pages_per_block);
            id.part = page - column * pages_per_block;
        }
        if (id.block < 0 || id.block >= num_blocks) {
            if (lane == 0)
                report_fault(fault, FAULT_BLOCK_ID, fed_work.unit.sequence, column, id.block);
            id.block = -1;
        }
        ring.template fill<(OPTIONS & WINDOW) != 0>(k_head, v_head, id, id.rows - window);
    };
    // ... or each of them where it is.
    auto feed_rows = [&](int page) {
        const int row = lane % PAGE, key = page * PAGE + row, column = key / block_size;
        Place mine = {__shfl_sync(0xffffffffu, blocks, fed % 2 * PAGE + row),
                      key - column * block_size};
        const bool wanted = visible(row, fed_work.unit.seq_len - page * PAGE);
        const bool bad = wanted && (mine.block < 0 || mine.block >= num_blocks);
        if (bad && lane < PAGE)
            report_fault(fault, FAULT_BLOCK_ID, fed_work.unit.sequence, column, mine.block);
        if (!wanted) mine.block = -1;
        ring.fill_rows(k_head, v_head, mine, __any_sync(0xffffffffu, bad));
    };
    auto feed = [&]() {
        while (!ring.full()) {
            if (fed == to_feed) {
                if (ahead) return;
                ahead = true;
                fed_work = next, fed = 0, to_feed = next.pages.num_pages;
                blocks = next_blocks, more_blocks = look_up(next, LOOK_UP);
                const int column = Ring::chunk() * Ring::WIDTH;
                k_head.chunk = k_cache + next.kv_head * k_stride_head + column;
                v_head.chunk = v_cache + next.kv_head * v_stride_head + column;
                continue;
            }
            if (fed > 0 && fed % LOOK_UP == 0)
                blocks = more_blocks, more_blocks = look_up(fed_work, fed + LOOK_UP);
            const int page = fed_work.pages.page(fed, warp);
            if constexpr (OPTIONS & ANY_BLOCK)
                feed_rows(page);
            else
                feed_page(page);
            fed++;
        }
    };

    QueryTile<T, TKV, D, TILES> queries;
    Scores<OPTIONS, TILES> scores;
    // A factor of K or V, of one (sequence, KV head).
    auto factor = [&](float all, const float* each, int stride_token, int stride_head,
                      const Work& work) {
        if (!(OPTIONS & SCALES) || each == nullptr) return all;
        return all * __ldg(each + (long long)work.unit.sequence * stride_token +
                           (long long)work.kv_head * stride_head);
    };
    constexpr bool REGISTER = Node::N <= 8;              // where registers are left for it
    TreeStack<Node, REGISTER> stack;
    float* my_stack = states + (WARPS * G + my_head) * Node::FLOATS;
    // In its first round the loop has no work yet: it looks up the first unit and feeds the ring.
    bool working = false, more = true;
#pragma unroll 1
    for (int u = blockIdx.x; working || more; u += gridDim.x) {
        more = u < schedule.num_units;
        next.pages = WarpPages<TKV, WARPS>();
        if (more) next = find_work(u);
        next_blocks = look_up(next, 0);
#pragma unroll 1
        for (int block = 0; block < work.pages.num_blocks; block++) {
            // ---- one leaf
            LeafState<TKV, D, TILES> leaf;
            leaf.clear();
            const int leaf_first = block << work.pages.leaf;
            const int left = min(work.pages.num_pages - leaf_first, 1 << work.pages.leaf);
            int keys = work.unit.seq_len - work.pages.page(leaf_first, warp) * PAGE;
            feed();
#pragma unroll 1
            for (int i = 0; i < left; i++) {
                leaf.add(ring.front(), queries, keys, keys - window, scores);
                ring.pop();
                keys -= PAGE;
                feed();
            }
            const bool last = block + 1 == work.pages.num_blocks;
            if (last && more) {                          // on their way during what follows
                queries.load(q_row(next), q_stride_head, next.q_heads);
                scores.load(factor(scale, k_scales, k_scales_stride_token, k_scales_stride_head, next),
                            soft_cap, alibi_slopes + next.q_head, next.q_heads);
            }
            if (!working) break;

            // ---- the leaves of this leaf block meet
            __syncthreads();     // the last ones have been read
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
#pragma unroll
                    for (int step = 4; step < 32; step *= 2)
                        leaf.l[n][h] += __shfl_xor_sync(0xffffffffu, leaf.l[n][h], step);
                    const int head = n * 8 + lane % 4 * 2 + h;
                    if (head >= G) continue;
                    float* to = states + (warp * G + head) * Node::FLOATS;
#pragma unroll
                    for (int e = 0; e < D / 16; e++) {
                        using F = Fragments<TKV>;
                        to[4 + 16 * e + F::out_column(lane / 4, 0)] = leaf.acc[n][e][h];
                        to[4 + 16 * e + F::out_column(lane / 4, 1)] = leaf.acc[n][e][h + 2];
                    }
                    if (lane < 4)
                        *reinterpret_cast<float4*>(to) =
                            make_float4(leaf.m[n][h], leaf.l[n][h], leaf.w[n][h], 0.0f);
                }
            __syncthreads();
            if (warp * ROWS >= G) continue;              // a warp without heads

            Node leaves[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                leaves[w].load(states + (w * G + my_head) * Node::FLOATS, my_lane);
#pragma unroll
            for (int width = 1; width < WARPS; width *= 2)
#pragma unroll
                for (int w = 0; w < WARPS; w += 2 * width)
                    leaves[w] = leaves[w] + leaves[w + width];
            Node node =
                stack.push(leaves[0], block, last, my_stack, G * Node::FLOATS, my_lane);
            if (!last) continue;

            // ---- the unit is done: its state is the result, or meets the sequence's others
            const Unit& unit = work.unit;
            auto partial = [&](int index) {
                return partials + ((long long)(unit.slot + index) * G + my_head) * Node::FLOATS;
            };
            int count = unit.count, index = unit.index, step = 1;    // nodes, this one, its units
            if (count > 1) node.store(partial(index), my_lane);
#pragma unroll 1
            for (int level = 0; count > 1; level++) {
                const int group = count <= FAN ? count : GROUP, first = quotient(index, group) * group;
                const int mates = min(group, count - first);
                if (mates > 1) {
                    const int counter = unit.slot + first * step + level;
                    if (!arrive_last(arrivals + counter * WARPS + warp, mates)) break;
                    node = add_siblings<Node, LANES, BATCH>(
                        partial(first * step), step * G * Node::FLOATS, mates, my_lane);
                }
                index = quotient(first, group), count = quotient(count + group - 1, group);
                step *= group;
                if (count > 1) {
                    __syncwarp();                // every lane has read what is overwritten
                    node.store(partial(index * step), my_lane);
                }
            }
            if (count > 1 || my_head >= work.q_heads) continue;

            const bool bad = unit.seq_len < 0 || unit.seq_len > max_seq_len;
            if (bad && my_lane == 0)
                report_fault(fault, FAULT_SEQ_LEN, unit.sequence, max_blocks, unit.seq_len);
            if (bad) node.l = node.w = quiet_nan();
            float inverse = node.l == 0.0f ? 0.0f : 1.0f / node.w;
            const int q_head = work.q_head + my_head;
            if constexpr (OPTIONS & SCALES)
                inverse *= factor(v_scale, v_scales, v_scales_stride_token, v_scales_stride_head,
                                  work);
            if constexpr (OPTIONS & SINKS)
                if (node.l != 0.0f)
                    inverse *= node.l / (node.l + ex2(fmaf(__ldg(sinks + q_head), LOG2_E, -node.m)));
            TOut* row = out + (long long)unit.sequence * out_stride_token +
                        (long long)q_head * out_stride_head;
#pragma unroll
            for (int i = 0; i < Node::N; i += 2)
                store_pair(row + Node::chunk(i / Node::V, my_lane) - 4 + i % Node::V,
                           node.acc[i] * inverse, node.acc[i + 1] * inverse);
            if (my_lane == 0)
                lse[unit.sequence * num_q_heads + q_head] = lse_of(node.m, node.l);
        }
        work = next;
        working = more;
        ahead = false;
    }
}
