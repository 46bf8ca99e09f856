// paged_split_k_mma: split-K decode attention over a paged KV cache, in one launch, on tensor
// cores.
//
// Who reads which keys follows from seq_lens on the device (schedule.cuh): nothing is planned, and
// a captured graph stays right when lengths change. The result does not depend on how the keys were
// split, nor on the batch around a sequence: its sums follow a tree of its own (tree_node.cuh).
//
// Grid      (blocks): one wave; block c takes the units c and c + blocks, then what tickets say
// Threads   READERS warps that read and 4 that merge. A reader is on its own: reader w adds up leaf
//           w of every leaf block, a page of 16 keys or two at a time, for all query heads of the
//           KV head (up to 16; more are tiled). Merger w owns G / 4 neighbouring heads, each spread
//           over 4 * 32 / G lanes (from 4 heads down: one head a merger, over 32 lanes)
// Shared    ring   [READERS][STAGES][K, V][16][D] in TKV, copies in flight (kv_ring.cuh)
//           states [READERS][G][4 + D], float: the leaves of a leaf block, from readers to mergers
//           stacks [levels][G][4 + D], float: sums that wait for their right siblings
// Reads     each visible key once per 16 query heads: 2 * D * sizeof(TKV) bytes; per unit the
//           queries, per 16 keys an id (ANY_BLOCK: per key)
// Writes    the output and its lse; for a sequence of several units one or a few states of
//           G * (4 + D) floats for each, which the last to finish reads again (tree_merge.cuh)
// Empty     A sequence without keys: out 0, lse -inf, both written.
// Faults    A block id outside the pool or a length past the table is never followed: the row
//           becomes NaN and `fault` says where.
// Overlap   With OVERLAP the launch before this one may still write q and each sequence's newest
//           page, and use the workspace and the outputs. All else is complete, and read at once.
//
// Slower: loads straight to registers, bulk copies page by page, deeper rings, a grid-wide wait
// before a distributed merge; warps that read and merge in turn (a fence waits for the copies in
// flight); very short units, which wait for the mergers; code run once on nothing while the first
// keys are on their way; keys put in anew while the values are at work (registers); the code that
// begins a unit, or that feeds the ring, in one copy; clusters of blocks that meet in shared memory
// (launched later than they save, but for 512 keys); who adds up known before it is ready, and
// waiting for the others. No quicker: a barrier for each reader in place of one for all, leaves
// dealt to other warps from unit to unit, a vote of the warp on whether any score is above the
// maximum, states read until they have come in place of a counter (0.3 us with up to 4 heads, lost
// again with 8), sixteen states of 8 heads read at once, up to 32 units that meet in one step.
#include "mma_tile.cuh"
#include "tree_merge.cuh"

// Warps that merge and warps that read: the former leave the latter's copies in flight alone, where
// a fence would wait for them.
constexpr int MERGERS = 4;
enum Barrier { STATES_FREE = 1, STATES_FULL = 2 };

// OPTIONS: the sum of those of scores.cuh that the call needs. TKV: T, or an 8-bit float. LEAVES:
// log2 of a sequence's leaves at most, fewer where shared memory is small.
template <typename T, typename TKV, typename TOut, int D, int G, int READERS, int STAGES, bool ONE,
          int OPTIONS, int LEAVES = LEAVES_LOG2<D, G>>
__global__ void __launch_bounds__(32 * (READERS + MERGERS), 1) paged_split_k_mma(
    TOut* out,                    // [batch, num_q_heads, D]
    float* lse,                   // [batch, num_q_heads], natural log
    float* partials,              // [capacity, G, 4 + D]
    unsigned int* arrivals,       // [capacity + 1, MERGERS], 0 before and after; the last: tickets
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
    int pages_per_block,          // block_size / 16, BLOCK_PARTS
    int max_blocks,
    int max_seq_len,              // max_blocks * block_size
    int capacity,                 // partial states that the workspace holds
    int fixed_unit,               // pages of a unit, or 0: from seq_lens
    int window,                   // newest keys that are visible, WINDOW
    float scale,                  // of all scores
    float v_scale,                // factor of all of V, SCALES
    float soft_cap) {             // SOFT_CAP
    constexpr int TILES = G > 8 ? 2 : 1;                 // tiles of 8 heads in a product
    constexpr int ROWS = G > MERGERS ? G / MERGERS : 1;  // heads that a merger owns
    constexpr int LANES = 32 / ROWS;                     // lanes of each of them
    using Node = TreeNode<D, LANES>;
    constexpr int BATCH = Node::N > 4 ? 64 / Node::N : 16;   // a merge reads into 64 registers
    constexpr int FAN = LANES < 2 * BATCH ? LANES : 2 * BATCH;    // units that meet at once
    // Units that meet where they are more: few, since what one SM reads of L2 is the limit there.
    constexpr int GROUP = 8;
    using Ring = KvRing<TKV, D, STAGES>;
    constexpr int LOOK_UP = OPTIONS & ANY_BLOCK ? 2 : 32;    // pages looked up at a time
    // Pages added at a time: two where as many are on their way meanwhile.
    constexpr int AT_ONCE = STAGES >= 4 && STAGES % 2 == 0 ? 2 : 1;
    using Pages = WarpPages<READERS, AT_ONCE>;

    DYN_SMEM(shared);
    constexpr int WARPS = READERS + MERGERS;
    float* states = reinterpret_cast<float*>(shared + READERS * STAGES * Ring::STAGE_BYTES);
    __shared__ int tickets[2][WARPS];                    // of units in turn; a copy for each warp
    // Through a shuffle, so that the compiler knows that a warp's lanes agree: fewer registers.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    struct Work {
        Unit unit;
        Pages pages;                              // what a reader reads of it
        int kv_head, q_head, q_heads;             // KV head; query heads from .. and how many
    };
    auto q_row = [&](const Work& work) {
        return q + (long long)work.unit.sequence * q_stride_token +
               (long long)work.q_head * q_stride_head;
    };
    auto find_heads = [&](Work& work) {
        work.kv_head = tiles == 1 ? work.unit.head : quotient(work.unit.head, tiles);
        const int tile = work.unit.head - work.kv_head * tiles;
        work.q_head = work.kv_head * group_size + tile * tile_heads;
        work.q_heads = min(tile_heads, group_size - tile * tile_heads);
    };
    // A factor of K or V, of one (sequence, KV head).
    auto factor = [&](float all, const float* each, int stride_token, int stride_head,
                      const Work& work) {
        if (!(OPTIONS & SCALES) || each == nullptr) return all;
        return all * __ldg(each + (long long)work.unit.sequence * stride_token +
                           (long long)work.kv_head * stride_head);
    };
    QueryTile<T, TKV, D, TILES> queries;
    Scores<OPTIONS, TILES> scores;
    auto load_queries = [&](const Work& of) {
        queries.template load<(OPTIONS & OVERLAP) != 0>(q_row(of), q_stride_head, of.q_heads);
        scores.load(factor(scale, k_scales, k_scales_stride_token, k_scales_stride_head, of),
                    soft_cap, alibi_slopes + of.q_head, of.q_heads);
    };
    // ---- of the only sequence, what is known without its length: on its way while that is
    Work first;
    int only_len = 0;
    if constexpr (ONE) {
        only_len = __ldg(seq_lens);
        if (threadIdx.x * 32 < max_blocks) prefetch_l2(block_table + threadIdx.x * 32);
        first.unit.sequence = 0;
        first.unit.index = quotient(blockIdx.x, heads);
        first.unit.head = blockIdx.x - first.unit.index * heads;
        find_heads(first);
        if ((OPTIONS & OVERLAP) == 0 && warp < READERS) load_queries(first);
    }
    const Schedule<TKV, READERS, LEAVES, FAN, ONE, (OPTIONS & WINDOW) != 0> schedule(
        seq_lens, only_len, batch, heads, max_seq_len, window, capacity, gridDim.x, fixed_unit);
    if (blockIdx.x >= schedule.num_units) return;

    // ---- a block's first two units are fixed, the others go to whoever is ready for them
    const bool dynamic = schedule.num_units > 2 * gridDim.x;
    int u_next = blockIdx.x + gridDim.x;
    auto find_work = [&](const Unit& unit) {
        Work work;
        work.unit = unit;
        work.pages = Pages(unit, schedule.first_page_of(unit.seq_len), warp);
        find_heads(work);
        return work;
    };
    if (warp < READERS) {
        // ================================================================ a reader
        // Whether row `row` of a page holds a visible key; `keys`: of the sequence from row 0 on.
        auto visible = [&](int row, int keys) {
            return row < keys && (!(OPTIONS & WINDOW) || row >= keys - window);
        };
        // Blocks of LOOK_UP of its pages from number `from` on, one a lane (ANY_BLOCK: of the rows
        // of two pages); nobody looks at them yet, so that nobody waits.
        auto look_up = [&](const Work& work, int from) {
            const int number = from + lane * LOOK_UP / 32;
            if (number >= work.pages.num_pages) return 0;
            int column = work.pages.page(number, warp);
            if (AT_ONCE > 1 && column * PAGE >= work.unit.seq_len) return 0;    // holds no key
            if constexpr (OPTIONS & ANY_BLOCK) {
                const int row = lane % PAGE;
                if (!visible(row, work.unit.seq_len - column * PAGE)) return 0;
                column = (column * PAGE + row) / block_size;
            } else if constexpr (OPTIONS & BLOCK_PARTS) {
                column = quotient(column, pages_per_block);
            }
            return __ldg(block_table + (long long)work.unit.sequence * table_stride + column);
        };

        // ---- the ring is fed from the pages of `work`, then from those of `next`
        Work work, next = {}, fed_work;     // fed_work: the one of them being fed
        int next_blocks;                    // of the first pages of `next`
        int blocks, more_blocks;            // of the pages being fed, and of the 32 after them
        unsigned int fed, to_feed;          // pages put in of fed_work, and in all
        bool ahead = false;                 // fed_work is `next`
        unsigned int bad_stages = 0;        // bit i: stage i holds a page that may not be read
        Ring ring{shared + warp * STAGES * Ring::STAGE_BYTES};
        CacheHead<TKV> k_head = {nullptr, k_stride_block, k_stride_slot};
        CacheHead<TKV> v_head = {nullptr, v_stride_block, v_stride_slot};
        auto begin_feeding = [&](const Work& from, int first_blocks) {
            fed_work = from, fed = 0, to_feed = from.pages.num_pages;
            blocks = first_blocks;
            const int column = Ring::chunk() * Ring::WIDTH;
            k_head.chunk = k_cache + from.kv_head * k_stride_head + column;
            v_head.chunk = v_cache + from.kv_head * v_stride_head + column;
        };
        auto mark_stage = [&](bool bad) {
            const unsigned int bit = 1u << ring.filled % STAGES;
            bad_stages = bad ? bad_stages | bit : bad_stages & ~bit;
        };
        // Put page number `fed` of fed_work in, its 16 rows in a block of the cache ...
        auto feed_page = [&](int page) {
            PageId id = {__shfl_sync(0xffffffffu, blocks, fed % 32), 0,
                         fed_work.unit.seq_len - page * PAGE};
            int column = page;
            if constexpr (OPTIONS & BLOCK_PARTS) {
                column = quotient(page, pages_per_block);
                id.part = page - column * pages_per_block;
            }
            const int hidden = id.rows - window;
            const bool bad = (unsigned int)id.block >= (unsigned int)num_blocks;
            mark_stage(bad);
            if (bad) {
                if (lane == 0)
                    report_fault(fault, FAULT_BLOCK_ID, fed_work.unit.sequence, column, id.block);
                id.block = 0, id.rows = 0;               // zeros, and nothing is read
            }
            ring.template fill<(OPTIONS & WINDOW) != 0>(k_head, v_head, id, hidden);
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
            if (!wanted || bad) mine.block = -1;
            mark_stage(__any_sync(0xffffffffu, bad));
            ring.fill_rows(k_head, v_head, mine);
        };
        auto feed_next = [&]() {
            const int page = fed_work.pages.page(fed, warp);
            if constexpr (OPTIONS & ANY_BLOCK)
                feed_rows(page);
            else
                feed_page(page);
            fed++;
        };
        auto feed = [&]() {
#pragma unroll 1
            while (!ring.full()) {
                if (fed == to_feed) {
                    if (ahead || next.pages.num_pages == 0) return;
                    ahead = true;
                    begin_feeding(next, next_blocks);
                    more_blocks = look_up(next, LOOK_UP);
                    continue;
                }
                if (fed > 0 && fed % LOOK_UP == 0)
                    blocks = more_blocks, more_blocks = look_up(fed_work, fed + LOOK_UP);
                feed_next();
            }
        };

        if constexpr (ONE)
            work = find_work(schedule.find(first.unit.index, first.unit.head));
        else
            work = find_work(schedule.find(blockIdx.x));
        begin_feeding(work, look_up(work, 0));
        more_blocks = look_up(work, LOOK_UP);
        // OVERLAP: whether the next page may be fed before the wait. Not the newest; nor a bad id,
        // whose report would be a write.
        auto ready = [&]() {
            const bool bad = lane * LOOK_UP / 32 == fed &&
                             (unsigned int)blocks >= (unsigned int)num_blocks;
            return work.pages.page(fed, warp) != (work.unit.seq_len - 1) / PAGE &&
                   !__any_sync(0xffffffffu, bad);
        };
        if constexpr (!ONE && (OPTIONS & OVERLAP) == 0) {
            // The ids first: who asks for queries in the meantime waits for both.
            blocks = __shfl_sync(0xffffffffu, blocks, lane);
            load_queries(work);  // now: code that has not run yet is fetched behind the first keys
        }
#pragma unroll 1
        for (int i = 0; i < min(STAGES, LOOK_UP) && fed < to_feed; i++) {
            if constexpr (OPTIONS & OVERLAP)
                if (!ready()) break;
            feed_next();
        }
        if constexpr (OPTIONS & OVERLAP) {
            griddepcontrol_wait();
            load_queries(work);
        }
#pragma unroll 1
        for (int round = 0;; round++) {
            const bool more = u_next < schedule.num_units;
            next.pages.num_pages = 0;
            if (more) {
                next = find_work(schedule.find(u_next));
                constexpr int LINES = D / 64;                // of 128 bytes, in a query
                if (lane < next.q_heads * LINES)
                    prefetch_l2(q_row(next) + lane / LINES * q_stride_head + lane % LINES * 64);
            }
            next_blocks = look_up(next, 0);
            unsigned int ticket = 0;
            if (dynamic && more && threadIdx.x == 0)
                ticket = atom_inc(arrivals + capacity * MERGERS,
                                  schedule.num_units - gridDim.x - 1);
            queries.bring_into_range();    // not where they were asked for: this waits for them
#pragma unroll 1
            for (int block = 0; block < work.pages.num_blocks; block++) {
                // ---- one leaf
                LeafState<TKV, D, TILES> leaf;
                leaf.clear();
                const int leaf_first = block << work.pages.leaf;
                const int left = min(work.pages.num_pages - leaf_first, 1 << work.pages.leaf);
                int keys = work.unit.seq_len - work.pages.page(leaf_first, warp) * PAGE;
#pragma unroll 1
                for (int i = 0;; i += AT_ONCE) {
                    feed();
                    if (i >= left) break;
                    const unsigned char* pages[AT_ONCE];
                    ring.front(pages);
                    leaf.add(pages, queries, keys, keys - window, scores);
#pragma unroll
                    for (int r = 0; r < AT_ONCE; r++)
                        if (bad_stages >> (ring.used + r) % STAGES & 1) leaf.spoil();
                    ring.pop(AT_ONCE);
                    keys -= AT_ONCE * PAGE;
                }
                const bool last = block + 1 == work.pages.num_blocks;
                // ---- its state, for the mergers
                if (last && warp == 0) {
                    const int after = 2 * gridDim.x + __shfl_sync(0xffffffffu, ticket, 0);
                    if (lane < WARPS) tickets[round % 2][lane] = after;
                }
                // On their way during what follows; after the ticket, since a warp that waits for
                // one of its loads may wait for all.
                if (last && more) load_queries(next);
                leaf.sum_weights();
                bar_sync(STATES_FREE, 32 * WARPS);
                leaf.template store<G>(states + warp * G * Node::FLOATS);
                bar_arrive(STATES_FULL, 32 * WARPS);
            }
            if (!more) return;
            u_next = dynamic ? tickets[round % 2][warp] : schedule.num_units;
            work = next;
            ahead = false;
        }
    }

    // ==================================================================== a merger
    const int merger = warp - READERS;
    const int my_head = merger * ROWS + lane / LANES, my_lane = lane % LANES;
    const bool mine = merger * ROWS < G;                 // or else it has no heads
    constexpr bool REGISTER = Node::N <= 8;              // where registers are left for it
    TreeStack<Node, REGISTER> stack;
    const float* my_states = states + my_head * Node::FLOATS;
    float* my_stack = states + (READERS * G + my_head) * Node::FLOATS;
    if constexpr (OPTIONS & OVERLAP) {
        // In this order: what starts early then comes after all that this launch may not rely on,
        // and what it reads early need not be older than this launch.
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    }
    bar_arrive(STATES_FREE, 32 * WARPS);
    int u = blockIdx.x;
#pragma unroll 1
    for (int round = 0;; round++) {
        const bool more = u_next < schedule.num_units;
        int u_after = schedule.num_units;                // the unit after the next
        const Work work = find_work(schedule.find(u));
#pragma unroll 1
        for (int block = 0; block < work.pages.num_blocks; block++) {
            const bool last = block + 1 == work.pages.num_blocks;
            bar_sync(STATES_FULL, 32 * WARPS);
            Node node;
            if (mine) node = sum_of_leaves<Node, READERS>(my_states, G * Node::FLOATS, my_lane);
            if (last && dynamic) u_after = tickets[round % 2][warp];
            if (!last || more) bar_arrive(STATES_FREE, 32 * WARPS);
            if (!mine) continue;
            const Unit& unit = work.unit;
            const int low_log2 = __ffs(unit.span) - 1;   // states begin at multiples of 2^this
            auto partial = [&](int place) {
                return partials + ((long long)(unit.slot + place) * G + my_head) * Node::FLOATS;
            };
            auto emit = [&](const Node& sum, int first) {
                sum.store(partial(first >> low_log2), my_lane);
            };
            const int first_block = unit.index * unit.span;
            if (work.pages.num_blocks > 1)
                node = stack.push(node, first_block + block, first_block, last,
                                  unit.index + 1 == unit.count, my_stack, G * Node::FLOATS, my_lane,
                                  emit);
            else if (unit.count > 1)
                emit(node, first_block);
            if (!last) continue;

            // ---- the unit is done: its sum is the result, or meets the sequence's others
            const bool even = unit.span >> low_log2 == 1;      // each unit left one state
            unsigned int there = 0xffffffffu;
            if (!even)
                there = __ballot_sync(0xffffffffu, unit.begins_state(lane << low_log2));
            int count = unit.count, index = unit.index, step = 1;    // nodes, this one, its units
#pragma unroll 1
            for (int level = 0; count > 1; level++) {
                const bool all = count <= FAN;
                const int first = all ? 0 : index / GROUP * GROUP;
                const int mates = min(all ? count : GROUP, count - first);
                if (mates > 1) {
                    const int counter = unit.slot + first * step + level;
                    if (!arrive_last(arrivals + counter * MERGERS + merger, mates)) break;
                    node = add_siblings<Node, LANES, BATCH>(
                        partial(first * step), step * G * Node::FLOATS,
                        even ? mates : unit.places(), there, my_lane);
                }
                index = first / GROUP, count = all ? 1 : (count + GROUP - 1) / GROUP;
                step *= GROUP;
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
            // without weight the output is 0, not 0 times what was never added up
            const bool none = node.l == 0.0f;
            float inverse = none ? 0.0f : 1.0f / node.w;
            const int q_head = work.q_head + my_head;
            if constexpr (OPTIONS & SCALES)
                inverse *= factor(v_scale, v_scales, v_scales_stride_token, v_scales_stride_head,
                                  work);
            if constexpr (OPTIONS & SINKS)
                if (!none)
                    inverse *=
                        node.l / (node.l + ex2(fmaf(__ldg(sinks + q_head), LOG2_E, -node.m)));
            TOut* row = out + (long long)unit.sequence * out_stride_token +
                        (long long)q_head * out_stride_head;
#pragma unroll
            for (int i = 0; i < Node::N; i += 2)
                store_pair(row + Node::chunk(i / Node::V, my_lane) - 4 + i % Node::V,
                           none ? 0.0f : node.acc[i] * inverse,
                           none ? 0.0f : node.acc[i + 1] * inverse);
            if (my_lane == 0)
                lse[unit.sequence * num_q_heads + q_head] = lse_of(node.m, node.l);
        }
        if (!more) return;
        u = u_next, u_next = u_after;
    }
}
