#pragma once
// Who reads what, worked out by every warp from seq_lens: no plan, no launch before this one.
//
//   page     16 keys, what the tensor cores take at a time
//   leaf     a run of 2^n pages that one warp adds up in order. Its length follows from the
//            sequence's length and the number of heads alone, so the sums do too
//   leaf block   WARPS leaves, one a warp
//   unit     an aligned run of 2^n leaf blocks of one (sequence, head): what a block takes at a time.
//            How long follows from the whole batch and the device; no bit of the result depends on it
//
// With a window of the newest keys all of this is of the pages that hold some of them: a sequence is
// as long as they are, and its leaves are counted from the first of them.
//
// Units are numbered sequence by sequence, and within a sequence the heads of one run of keys come
// one after another: blocks that run side by side read neighbouring rows of the same pages.
constexpr int PAGE = 16;

// A sequence alone is cut into at most 2^10 leaves over all its heads: one wave of 256 blocks of 4
// warps. Constants, lest the sums depend on the device.
constexpr int LEAVES_LOG2 = 10;
constexpr int SHORT_LEAF_LOG2 = 3;

// log2 of the pages of the shortest leaves: about as long to read as the leaves of a leaf block take
// to meet. Pages of 8-bit elements are read in half the time.
template <typename TKV>
constexpr int MIN_LEAF_LOG2 = sizeof(TKV) == 1 ? 3 : 1;

__device__ __forceinline__ int ceil_log2(unsigned int x) { return x <= 1 ? 0 : 32 - __clz(x - 1); }
__device__ __forceinline__ int cdiv(int a, int b) { return (a + b - 1) / b; }

// a / b for 0 <= a < 2^20 and b > 0: the float quotient, off by 2^-22 at most, stays clear of the
// integers on both sides, which are 0.5 / b away. Integer division takes some forty instructions.
__device__ __forceinline__ int quotient(int a, int b) { return (int)__fdividef(a + 0.5f, (float)b); }

// log2 of the pages of a leaf: a wave of leaves of long sequences. Of shorter ones half as many and
// twice as long, since fewer states to merge are worth more than more blocks to read.
template <typename TKV>
__device__ __forceinline__ int leaf_log2(int pages, int heads) {
    const unsigned int all = (unsigned int)pages * heads, round = (1 << LEAVES_LOG2) - 1;
    const int wave = ceil_log2((all + round) >> LEAVES_LOG2);
    const int half = ceil_log2((2 * all + round) >> LEAVES_LOG2);
    return max(max(wave, min(half, SHORT_LEAF_LOG2)), MIN_LEAF_LOG2<TKV>);
}

// log2 of the pages of a unit, leaf blocks permitting, for `pages` in all on `blocks` blocks: one
// unit a block, or four where long sequences among short ones would keep some blocks much longer.
__device__ __forceinline__ int unit_log2(float pages, int blocks, bool ragged) {
    const float some = (float)blocks;        // the least n with some * 2^n >= pages, by exponents
    int n = max((__float_as_int(pages) >> 23) - (__float_as_int(some) >> 23), 0);
    if (some * (float)(1 << n) < pages) n++;
    return ragged ? max(n - 2, 0) : n;
}

struct Unit {
    int sequence, head;
    int seq_len;        // as found, possibly not a length the table can hold
    int pages;          // with visible keys; 0 if there are none or the length is refused
    int index, count;   // number `index` of the `count` units of this (sequence, head)
    int slot;           // where the partial states of this (sequence, head) begin, if count > 1
};

// ONE: the batch is one sequence, and its schedule a few instructions. WINDOW: only the newest
// `window` keys are visible. TKV: element type of the cache.
template <typename TKV, int WARPS, bool ONE, bool WINDOW>
struct Schedule {
    const int* seq_lens;
    int batch, heads, max_seq_len, window;
    int unit_pages_log2;
    int num_units;
    // Lane i looks after the sequences i * chunk .. (i + 1) * chunk.
    int chunk, units_before, slots_before;
    Unit only;          // ONE: what all its units share

    // The first page with a visible key, and how many there are from it on.
    __device__ __forceinline__ int first_page_of(int seq_len) const {
        return WINDOW ? max(seq_len - window, 0) / PAGE : 0;
    }
    __device__ __forceinline__ int pages_of(int seq_len) const {
        return seq_len < 0 || seq_len > max_seq_len
                   ? 0 : (seq_len + PAGE - 1) / PAGE - first_page_of(seq_len);
    }
    // Units of one head of a sequence: at least one, which writes the output even of no keys.
    __device__ __forceinline__ int units_of(int pages) const {
        const int span = max(unit_pages_log2, leaf_log2<TKV>(pages, heads) + ceil_log2(WARPS));
        return max((pages + (1 << span) - 1) >> span, 1);
    }

    // capacity: partial states that the workspace holds. fixed_log2 >= 0 overrules the unit size.
    __device__ __forceinline__ Schedule(const int* seq_lens, int batch, int heads, int max_seq_len,
                                        int window, int capacity, int blocks, int fixed_log2)
        : seq_lens(seq_lens), batch(batch), heads(heads), max_seq_len(max_seq_len), window(window) {
        if constexpr (ONE) {
            only.sequence = 0;
            only.seq_len = __ldg(seq_lens);
            only.pages = pages_of(only.seq_len);
            unit_pages_log2 =
                fixed_log2 >= 0 ? fixed_log2 : unit_log2((float)only.pages * heads, blocks, false);
            only.count = units_of(only.pages);
            while (only.count > 1 && only.count * heads > capacity) {
                unit_pages_log2++;
                only.count = units_of(only.pages);
            }
            num_units = only.count * heads;
            return;
        }
        chunk = (batch + 31) / 32;
        const int begin = min((int)threadIdx.x % 32 * chunk, batch), end = min(begin + chunk, batch);
        unsigned int pages = 0, most = 0;
#pragma unroll 1
        for (int b = begin; b < end; b++) {
            const unsigned int here = pages_of(__ldg(seq_lens + b));
            pages += here, most = max(most, here);
        }
        const float total = (float)__reduce_add_sync(0xffffffffu, pages);
        const bool ragged = __reduce_max_sync(0xffffffffu, most) * (float)batch > 1.5f * total;
        unit_pages_log2 = fixed_log2 >= 0 ? fixed_log2 : unit_log2(total * heads, blocks, ragged);
        int slots = count_units(begin, end);
        // A second round with few units would leave most of the device idle: shorter ones instead.
        if (fixed_log2 < 0 && num_units > blocks && 2 * num_units < 3 * blocks &&
            unit_pages_log2 > 0) {
            unit_pages_log2--;
            slots = count_units(begin, end);
        }
        // Longer units while the partial states would not fit: whole sequences need none.
#pragma unroll 1
        while (slots > capacity) {
            unit_pages_log2++;
            slots = count_units(begin, end);
        }
    }

    // Units of all sequences, and of those before this lane's; returns the partial states.
    __device__ __forceinline__ int count_units(int begin, int end) {
        const int lane = threadIdx.x % 32;
        int units = 0, slots = 0;
#pragma unroll 1
        for (int b = begin; b < end; b++) {
            const int count = units_of(pages_of(__ldg(seq_lens + b))) * heads;
            units += count;
            slots += count > heads ? count : 0;
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
        const int lane = threadIdx.x % 32;
        int units = 0, slots = 0;
        Unit unit = only;
        if constexpr (!ONE) {
            const int owner = __popc(__ballot_sync(0xffffffffu, units_before <= u)) - 1;
            units = __shfl_sync(0xffffffffu, units_before, owner);
            slots = __shfl_sync(0xffffffffu, slots_before, owner);
            const int end = min((owner + 1) * chunk, batch);
            int hit = -1;
#pragma unroll 1
            for (int first = owner * chunk; hit < 0; first += 32) {
                const int b = first + lane;
                const int seq_len = b < end ? __ldg(seq_lens + b) : 0;
                const int pages = pages_of(seq_len), count = b < end ? units_of(pages) : 0;
                int units_to = count * heads, slots_to = count > 1 ? count * heads : 0;
#pragma unroll 1
                for (int step = 1; step < min(chunk, 32); step *= 2) {
                    const int x = __shfl_up_sync(0xffffffffu, units_to, step);
                    const int y = __shfl_up_sync(0xffffffffu, slots_to, step);
                    if (lane >= step) units_to += x, slots_to += y;
                }
                // The first sequence that ends past u, or else all 32 are before it.
                hit = __ffs(__ballot_sync(0xffffffffu, b < end && units + units_to > u)) - 1;
                const int from = hit < 0 ? 31 : hit;
                unit.sequence = first + from;
                unit.seq_len = __shfl_sync(0xffffffffu, seq_len, from);
                unit.pages = __shfl_sync(0xffffffffu, pages, from);
                unit.count = __shfl_sync(0xffffffffu, count, from);
                units += __shfl_sync(0xffffffffu, units_to, from);
                slots += __shfl_sync(0xffffffffu, slots_to, from);
            }
            units -= unit.count * heads;      // so far, up to the end of this sequence
            slots -= unit.count * heads;
        }
        unit.index = quotient(u - units, heads);
        unit.head = u - units - unit.index * heads;
        unit.slot = slots + unit.head * unit.count;
        return unit;
    }
};

// The pages of a unit that one warp reads, in order: its leaf of every leaf block.
template <typename TKV, int WARPS>
struct WarpPages {
    int first = 0;          // page of the sequence where the unit begins
    int leaf = 0;           // log2 of the pages of a leaf
    int num_blocks = 1;     // leaf blocks, at least 1
    int num_pages = 0;      // of this warp

    WarpPages() = default;
    // first_page: of the sequence, that its units are counted from.
    __device__ __forceinline__ WarpPages(const Unit& unit, int first_page, int unit_pages_log2,
                                         int heads, int warp) {
        leaf = leaf_log2<TKV>(unit.pages, heads);
        const int block = leaf + ceil_log2(WARPS), span = max(unit_pages_log2, block);
        first = unit.index << span;
        const int pages = min(unit.pages - first, 1 << span), full = pages >> block;
        const int rest = pages - (full << block);
        num_blocks = max(full + (rest > 0), 1);
        num_pages = (full << leaf) + min(max(rest - (warp << leaf), 0), 1 << leaf);
        first += first_page;
    }
    // Page of the sequence that is number i of this warp.
    __device__ __forceinline__ int page(int i, int warp) const {
        const int block = i >> leaf;
        return first + (((block * WARPS + warp) << leaf) | (i - (block << leaf)));
    }
};
