#pragma once
// Who reads what, worked out by every warp from seq_lens: no plan, no launch before this one.
//
//   page     16 keys, what the tensor cores take at a time
//   leaf     a run of 2^n pages that one warp adds up in order. Its length follows from the
//            sequence's length and the number of heads alone, so the sums do too
//   leaf block   WARPS leaves, one a warp
//   unit     a run of leaf blocks of one (sequence, head): what a thread block takes at a time. How
//            long follows from the whole batch and the device; no bit of the result depends on it
//
// With a window of the newest keys all of this is of the pages that hold some of them: a sequence
// is as long as they are, and its leaves are counted from the first of them.
//
// Units are numbered sequence by sequence, and within a sequence the heads of one run of keys come
// one after another: blocks that run side by side read neighbouring rows of the same pages.
constexpr int PAGE = 16;

// Leaves of a sequence over all its heads: up to half of 2^10, a wave of 256 blocks of 4 warps,
// while they have at most 2^3 pages, or half as many in sequences whose last leaf block would leave
// much of a block idle; so long are those of long sequences, lest one leaf block keep the others
// waiting at the end, up to as many as there is room to add up. Constants, lest the sums depend on
// the device; but where shared memory is small, so is the room.
constexpr int WAVE_LOG2 = 10, LONG_LEAF_LOG2 = 3, LONG_LEAF_PAGES = 256;
template <int D, int G>
constexpr int LEAVES_LOG2 = D <= 128 && G <= 8 ? 13 : 10;

// log2 of the pages of the shortest leaves: about as long to read as the leaves of a leaf block
// take to meet. Pages of 8-bit elements are read in half the time.
template <typename TKV>
constexpr int MIN_LEAF_LOG2 = sizeof(TKV) == 1 ? 3 : 1;
constexpr int FEW_PAGES = 64;        // from so many on, those of 16-bit elements are twice as long

// What a unit that leaves a partial state costs more than others, in pages that could be read in
// the meantime; and pages of the shortest unit of a ragged batch.
constexpr int MERGE_PAGES = 8, RAGGED_UNIT_LOG2 = 6;
constexpr int MOST_UNITS = 1 << 19;         // more are as good as these

__device__ __forceinline__ int ceil_log2(unsigned int x) { return x <= 1 ? 0 : 32 - __clz(x - 1); }
// a / 2^n, rounded up.
__device__ __forceinline__ int cdiv_log2(int a, int n) { return (a + (1 << n) - 1) >> n; }

// a / b for 0 <= a < 2^20 and b > 0: the float quotient, off by 2^-22 at most, stays clear of the
// integers on both sides, which are 0.5 / b away. Integer division takes some forty instructions.
__device__ __forceinline__ int quotient(int a, int b) {
    return (int)__fdividef(a + 0.5f, (float)b);
}

// log2 of the pages of a leaf.
template <typename TKV, int LEAVES_LOG2>
__device__ __forceinline__ int leaf_log2(int pages, int heads) {
    const unsigned int all = (unsigned int)pages * heads;
    const int room = ceil_log2((all + (1 << LEAVES_LOG2) - 1) >> LEAVES_LOG2);
    const int half = ceil_log2((2 * all + (1 << WAVE_LOG2) - 1) >> WAVE_LOG2);
    const int least = sizeof(TKV) > 1 && pages >= FEW_PAGES ? MIN_LEAF_LOG2<TKV> + 1
                                                            : MIN_LEAF_LOG2<TKV>;
    const int most = pages >= LONG_LEAF_PAGES ? LONG_LEAF_LOG2 : LONG_LEAF_LOG2 - 1;
    return max(max(room, min(half, most)), least);
}

// log2 of the pages of a unit of a batch of unequal lengths, where the units go to whoever is
// ready: so short that the last of them keep nobody waiting, 32 a block, but two at least if they
// would be shorter than it takes to merge the unit before.
__device__ __forceinline__ int ragged_unit_log2(float pages, int blocks) {
    const float some = (float)blocks;        // the least n with some * 2^n >= pages, by exponents
    int n = max((__float_as_int(pages) >> 23) - (__float_as_int(some) >> 23), 0);
    if (some * (float)(1 << n) < pages) n++;
    return max(max(n - 5, min(n - 1, RAGGED_UNIT_LOG2)), 0);
}

// Leaf blocks of a unit where `rows` (sequence, head) of `leaf_blocks` each are cut alike: each
// lane tries one length, and the one whose busiest block has the least to do wins. A state that
// others must wait for costs about as much as a few pages.
__device__ __forceinline__ int even_unit(int rows, int leaf_blocks, int block_log2, int blocks) {
    const int lane = threadIdx.x % 32;
    const int step = quotient(blocks, 31 * rows) + 1;    // lanes reach a part for every block
    const int parts = lane == 31 ? 1 : min((lane + 1) * step, leaf_blocks);    // of each row
    const int unit = quotient(leaf_blocks + parts - 1, parts);
    const int units = rows * quotient(leaf_blocks + unit - 1, unit);
    const int rounds = quotient(min(units, MOST_UNITS) + blocks - 1, blocks);
    const unsigned int cost = rounds * ((unit << block_log2) + (parts > 1 ? MERGE_PAGES : 0));
    const unsigned int best = __reduce_min_sync(0xffffffffu, cost << 5 | lane);
    return __shfl_sync(0xffffffffu, unit, best & 31);
}

struct Unit {
    int sequence, head;
    int seq_len;        // as found, possibly not a length the table can hold
    int pages;          // with visible keys; 0 if there are none or the length is refused
    int leaf;           // log2 of the pages of a leaf
    int blocks;         // leaf blocks of the whole sequence
    int span;           // leaf blocks of a unit
    int index, count;   // number `index` of the `count` units of this (sequence, head)
    int slot;           // where the partial states of this (sequence, head) begin, if count > 1

    // Partial states of this (sequence, head): a place for every run of leaf blocks that may be
    // one.
    __device__ __forceinline__ int places() const {
        return count > 1 ? cdiv_log2(blocks, __ffs(span) - 1) : 0;
    }
    // Whether a partial state begins with this leaf block: the smallest aligned run around it that
    // begins earlier does not fit its unit.
    __device__ __forceinline__ bool begins_state(int block) const {
        const int owner = quotient(block, span), begin = owner * span;
        const int end = owner + 1 == count ? 0x40000000 : begin + span;
        const int around = block & (block - 1);
        return block < blocks &&
               (around < begin || around + 2 * (block & -block) > end || block == 0);
    }
};

// ONE: the batch is one sequence, and its schedule a few instructions. WINDOW: only the newest
// `window` keys are visible. TKV: element type of the cache.
// FAN: partial states that meet at once, at most.
template <typename TKV, int WARPS, int LEAVES_LOG2, int FAN, bool ONE, bool WINDOW>
struct Schedule {
    const int* seq_lens;
    int batch, heads, max_seq_len, window;
    int unit_pages;     // a unit is the least number of leaf blocks that has so many
    int num_units;
    // Lane i looks after the sequences i * chunk .. (i + 1) * chunk; chunk 0: all have as many
    // pages and are cut alike.
    int chunk;
    int units_before, slots_before;    // of sequences before the lane's; cut alike: of each
    int first_len;                     // length of the lane's first
    Unit only;                         // ONE: how the only sequence is cut

    // The first page with a visible key, and how many there are from it on.
    __device__ __forceinline__ int first_page_of(int seq_len) const {
        return WINDOW ? max(seq_len - window, 0) / PAGE : 0;
    }
    __device__ __forceinline__ int pages_of(int seq_len) const {
        return seq_len < 0 || seq_len > max_seq_len
                   ? 0 : (seq_len + PAGE - 1) / PAGE - first_page_of(seq_len);
    }
    // log2 of the pages of a leaf block of a sequence of so many.
    __device__ __forceinline__ int leaf_block_log2(int pages) const {
        return leaf_log2<TKV, LEAVES_LOG2>(pages, heads) + ceil_log2(WARPS);
    }
    // How a sequence is cut: at least one unit, which writes the output even of no keys.
    __device__ __forceinline__ Unit cut(int seq_len) const {
        Unit unit = cut_pages(pages_of(seq_len));
        unit.seq_len = seq_len;
        return unit;
    }
    __device__ __forceinline__ Unit cut_pages(int pages) const {
        Unit unit;
        unit.pages = pages;
        unit.leaf = leaf_log2<TKV, LEAVES_LOG2>(pages, heads);
        const int block_log2 = unit.leaf + ceil_log2(WARPS);
        unit.blocks = cdiv_log2(unit.pages, block_log2);
        unit.span = max(cdiv_log2(unit_pages, block_log2), 1);
        // Where units are no power of two, all partial states meet at once.
        if ((unit.span & (unit.span - 1)) != 0 && unit.span < unit.blocks &&
            cdiv_log2(unit.blocks, __ffs(unit.span) - 1) > FAN)
            unit.span = 1 << ceil_log2(unit.span);
        unit.count = max(quotient(unit.blocks + unit.span - 1, unit.span), 1);
        return unit;
    }
    // capacity: partial states that the workspace holds. fixed_pages > 0 overrules the unit.
    // only_len: ONE, its length.
    __device__ __forceinline__ Schedule(const int* seq_lens, int only_len, int batch, int heads,
                                        int max_seq_len, int window, int capacity, int blocks,
                                        int fixed_pages)
        : seq_lens(seq_lens), batch(batch), heads(heads), max_seq_len(max_seq_len), window(window) {
        if constexpr (ONE) {
            unit_pages = 1;                // a leaf block each, unless they are more than a wave
            only = cut(only_len);
            if (fixed_pages > 0 || only.blocks * heads > min(blocks, capacity)) {
                const int block_log2 = only.leaf + ceil_log2(WARPS);
                unit_pages = max(fixed_pages, 1);
                if (fixed_pages <= 0 && only.blocks * heads > blocks)
                    unit_pages = even_unit(heads, only.blocks, block_log2, blocks) << block_log2;
                only = cut(only_len);
                while (only.places() * heads > capacity) unit_pages *= 2, only = cut(only_len);
            }
            num_units = only.count * heads;
            return;
        }
        unit_pages = max(fixed_pages, 1);
        chunk = (batch + 31) / 32;
        const int begin = min((int)threadIdx.x % 32 * chunk, batch);
        const int end = min(begin + chunk, batch);
        first_len = begin < end ? __ldg(seq_lens + begin) : 0;
        unsigned int pages = pages_of(first_len), most = pages;
#pragma unroll 4
        for (int b = begin + 1; b < end; b++) {
            const unsigned int here = pages_of(__ldg(seq_lens + b));
            pages += here, most = max(most, here);
        }
        const unsigned int total = __reduce_add_sync(0xffffffffu, pages);
        const int longest = __reduce_max_sync(0xffffffffu, most);
        if (fixed_pages <= 0) {
            if (longest * (float)batch > 1.2f * total) {
                unit_pages = 1 << ragged_unit_log2((float)total * heads, blocks);
            } else {
                const int block_log2 = leaf_block_log2(longest);
                const int leaf_blocks = max(cdiv_log2(longest, block_log2), 1);
                unit_pages = even_unit(batch * heads, leaf_blocks, block_log2, blocks)
                             << block_log2;
            }
        }
        // Longer units while the partial states would not fit: whole sequences need none.
        const bool alike = (unsigned int)longest * batch == total;
        if (alike) {
            Unit unit = cut_pages(longest);
            while (unit.places() * heads > capacity / batch)
                unit_pages *= 2, unit = cut_pages(longest);
            chunk = 0, units_before = unit.count * heads, slots_before = unit.places() * heads;
            num_units = units_before * batch;
            return;
        }
#pragma unroll 1
        while (count_units(begin, end) > capacity) unit_pages *= 2;
    }

    // Units of all sequences, and of those before this lane's; returns the partial states.
    __device__ __forceinline__ int count_units(int begin, int end) {
        const int lane = threadIdx.x % 32;
        int units = 0, slots = 0;
#pragma unroll 1
        for (int b = begin; b < end; b++) {
            const Unit here = cut(b == begin ? first_len : __ldg(seq_lens + b));
            units += here.count * heads;
            slots += here.places() * heads;
        }
        units_before = units, slots_before = slots;
#pragma unroll 1
        for (int step = 1; step < min(batch, 32); step *= 2) {
            const int u = __shfl_up_sync(0xffffffffu, units_before, step);
            const int s = __shfl_up_sync(0xffffffffu, slots_before, step);
            if (lane >= step) units_before += u, slots_before += s;
        }
        units_before = begin < end ? units_before - units : 0x7fffffff;
        slots_before -= slots;
        num_units = __reduce_add_sync(0xffffffffu, units);
        return __reduce_add_sync(0xffffffffu, slots);
    }

    // Unit number u of 0 .. num_units. Every lane of the warp calls this with the same u.
    __device__ __forceinline__ Unit find(int u) const {
        if constexpr (ONE) {
            const int index = quotient(u, heads);
            return find(index, u - index * heads);
        }
        int sequence = 0, seq_len = first_len, units = 0, slots = 0;
        if (chunk == 0) {
            sequence = quotient(u, units_before);        // off by one at most for larger u
            const int rest = u - sequence * units_before;
            sequence += (rest >= units_before) - (rest < 0);
            units = sequence * units_before, slots = sequence * slots_before;
            seq_len = __ldg(seq_lens + sequence);
        } else {
            sequence = __popc(__ballot_sync(0xffffffffu, units_before <= u)) - 1;
            units = __shfl_sync(0xffffffffu, units_before, sequence);
            slots = __shfl_sync(0xffffffffu, slots_before, sequence);
            seq_len = __shfl_sync(0xffffffffu, first_len, sequence);
            if (chunk > 1) find_in_chunk(u, sequence, seq_len, units, slots);
        }
        Unit unit = cut(seq_len);
        unit.sequence = sequence;
        if (chunk > 1) {
            units -= unit.count * heads;          // so far, up to the end of this sequence
            slots -= unit.places() * heads;
        }
        unit.index = quotient(u - units, heads);
        unit.head = u - units - unit.index * heads;
        unit.slot = slots + unit.head * unit.places();
        return unit;
    }
    // ONE: the same, of a unit whose index and head are known.
    __device__ __forceinline__ Unit find(int index, int head) const {
        Unit unit = only;
        unit.sequence = 0, unit.index = index, unit.head = head;
        unit.slot = head * unit.places();
        return unit;
    }

    // The sequence of unit u among those of the lane `sequence`, which begin at `units` and
    // `slots`; those end with it afterwards.
    __device__ __forceinline__ void find_in_chunk(int u, int& sequence, int& seq_len, int& units,
                                                  int& slots) const {
        const int lane = threadIdx.x % 32;
        const int end = min((sequence + 1) * chunk, batch);
        int hit = -1;
#pragma unroll 1
        for (int first = sequence * chunk; hit < 0; first += 32) {
            const int b = first + lane;
            const Unit here = cut(b < end ? __ldg(seq_lens + b) : 0);
            int units_to = b < end ? here.count * heads : 0;
            int slots_to = b < end ? here.places() * heads : 0;
#pragma unroll 1
            for (int step = 1; step < min(chunk, 32); step *= 2) {
                const int x = __shfl_up_sync(0xffffffffu, units_to, step);
                const int y = __shfl_up_sync(0xffffffffu, slots_to, step);
                if (lane >= step) units_to += x, slots_to += y;
            }
            // The first sequence that ends past u, or else all 32 are before it.
            hit = __ffs(__ballot_sync(0xffffffffu, b < end && units + units_to > u)) - 1;
            const int from = hit < 0 ? 31 : hit;
            sequence = first + from;
            seq_len = __shfl_sync(0xffffffffu, here.seq_len, from);
            units += __shfl_sync(0xffffffffu, units_to, from);
            slots += __shfl_sync(0xffffffffu, slots_to, from);
        }
    }
};

// The pages of a unit that one warp reads, in order: its leaf of every leaf block. It takes AT_ONCE
// of them at a time, so that the last may be one behind the newest, which holds no key.
template <int WARPS, int AT_ONCE>
struct WarpPages {
    int first;          // page of the sequence where the unit begins
    int leaf;           // log2 of the pages of a leaf
    int num_blocks;     // leaf blocks, at least 1
    int num_pages;      // of this warp, a multiple of AT_ONCE

    WarpPages() = default;
    // first_page: of the sequence, that its units are counted from.
    __device__ __forceinline__ WarpPages(const Unit& unit, int first_page, int warp) {
        leaf = unit.leaf;
        const int block = leaf + ceil_log2(WARPS), from = unit.index * unit.span;
        first = from << block;
        num_blocks = max(min(unit.span, unit.blocks - from), 1);
        const int pages = min(unit.pages - first, num_blocks << block), full = pages >> block;
        const int rest = pages - (full << block);
        const int tail = min(max(rest - (warp << leaf), 0), 1 << leaf);
        num_pages = (full << leaf) + (tail + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
        first += first_page;
    }
    // Page of the sequence that is number i of this warp.
    __device__ __forceinline__ int page(int i, int warp) const {
        const int block = i >> leaf;
        return first + (((block * WARPS + warp) << leaf) | (i - (block << leaf)));
    }
};
