// plan_splits: split plans written on the device from seq_lens, so that nobody waits for lengths.
//
// A captured graph replays this kernel with the rest of the step: the plan follows the lengths of
// every replay, in buffers whose addresses and sizes stay fixed.
//
// Grid      one thread block per plan; several plans lie one after the other in every array
// Threads   thread t plans sequences t, t + THREADS, ...
// Shared    one sum per warp and a few numbers
// Reads     seq_lens twice at most: once for what the rule asks of the whole batch, once to plan
// Writes    split_offsets [batch + 1] and the rows in use of split_begin
// Empty     A sequence of length 0 still has one row, which is empty.
// Lengths   outside 0 .. max_seq_len are planned as if cut to it: stage 1 refuses them by itself,
//           and the caller sized `capacity` for max_seq_len.

enum Rule {
    BY_COUNT,      // `value` splits; vLLM's segments are this rule
    BY_SIZE,       // splits of `value` keys, the last one shorter
    BY_CHUNK,      // as many splits as chunks of `value` keys; SGLang's deterministic mode
    SGLANG,        // BY_CHUNK, with a chunk that follows from the batch; at most `value` splits
    FA3_DYNAMIC,   // no split far above an SM's share of all tiles; at most `value` splits
    EQUAL_SHARES   // the batch's tiles, laid end to end, in `value` equal runs
};

__device__ __forceinline__ int ceil_div(int a, int b) { return a / b + (a % b != 0); }

// What a rule needs to know of all sequences together.
struct Batch {
    int longest, shortest;
    unsigned long long tiles;
};

// SGLang's get_num_kv_splits: the chunk that cuts the longest sequence, the smaller of two.
__device__ __forceinline__ int sglang_chunk(Batch all, int batch, int max_splits, int num_sms,
                                            int query_tiles) {
    // Evenness: chunks as long as the shortest sequence, unless all are within 20 % of each other.
    const int longest = all.longest;
    int shortest = max(all.shortest, 1);
    if (longest * 8ll < shortest * 10ll) shortest = longest;
    const int even = min(max(ceil_div(longest, max(shortest, 1)), 1), max_splits);
    // Filling: num_sms * log2(longest / 64) thread blocks, in float32. The logarithm is the
    // correctly rounded one: it is taken in double and rounded once, and over all int lengths the
    // true value keeps 6.9 double ulp away from every number halfway between two floats. log2f is
    // not that: one ulp below a whole product it loses a block. At powers of two the true value is
    // a float, so the rounding removes whatever error double had.
    const float quotient = (float)max(longest, 1) / 64.0f;
    const float scale = fmaxf((float)log2((double)quotient), 1.0f);
    const int cores = (int)__fmul_rn((float)num_sms, scale);
    const int filling = min(ceil_div(cores, batch * query_tiles), max_splits);
    return max(min(ceil_div(longest, even), ceil_div(longest, filling)), 1);
}

// FlashAttention-3's dynamic rule: key tiles of one SM's share and 10 %, at least 1. Three float32
// roundings, left to right.
__device__ __forceinline__ int tiles_per_sm(Batch all, int num_sms, int num_kv_heads,
                                            int query_tiles) {
    const float total = (float)(all.tiles * query_tiles);
    const float share = __fdiv_rn(__fmul_rn(__fmul_rn(total, 1.1f), (float)num_kv_heads),
                                  (float)num_sms);
    return max((int)ceilf(share), 1);
}

// Keys of a sequence's splits. `share` is the chunk or the tiles that the batch allows.
template <int RULE>
__device__ __forceinline__ int keys_per_split(int seq_len, int value, int tile, int share) {
    if (RULE == BY_SIZE) return value;
    int splits = value;
    if (RULE == BY_CHUNK) splits = ceil_div(seq_len, value);
    if (RULE == SGLANG) splits = ceil_div(seq_len, share);
    if (RULE == FA3_DYNAMIC) splits = min(ceil_div(ceil_div(seq_len, tile), share), value);
    // equal splits of whole tiles; the ones past the end do not exist
    return max(ceil_div(ceil_div(seq_len, max(splits, 1)), tile), 1) * tile;
}

// Tiles laid end to end and cut into `count` equal runs: run w begins at floor(w * total / count).
struct Runs {
    long long total, count;
    __device__ __forceinline__ long long begin(long long run) const { return run * total / count; }
    // The first run that begins at or behind a tile.
    __device__ __forceinline__ long long first(long long tile) const {
        return (tile * count + total - 1) / total;
    }
};

// Inclusive prefix sum over the block's threads. Every thread calls it.
template <int THREADS, typename T>
__device__ __forceinline__ T block_prefix_sum(T x, T* warp_total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T y = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += y;
    }
    if (lane == 31) warp_total[warp] = x;
    __syncthreads();
    for (int w = 0; w < warp; w++) x += warp_total[w];
    return x;
}

template <int RULE, int THREADS>
__global__ void __launch_bounds__(THREADS) plan_splits(
    int* split_offsets,      // [plans, batch + 1]
    int* split_begin,        // [plans, capacity]
    int* worker_offsets,     // [plans, value + 1] first row of each run of EQUAL_SHARES, or null
    const int* seq_lens,     // [plans, batch]
    long long seq_lens_stride_plan, long long seq_lens_stride,
    int batch, int capacity, int max_seq_len,
    int value,               // the rule's number
    int tile,                // keys that are never parted
    int num_sms,             // SGLANG, FA3_DYNAMIC
    int num_kv_heads,        // FA3_DYNAMIC
    int query_tiles) {       // thread blocks per sequence (SGLANG) or per KV head of it, unsplit
    constexpr bool LOOKS_AT_BATCH = RULE == SGLANG || RULE == FA3_DYNAMIC || RULE == EQUAL_SHARES;
    __shared__ int row_total[THREADS / 32];
    __shared__ long long tile_total[THREADS / 32];
    __shared__ int rows_so_far, share;
    __shared__ long long tiles_so_far;
    __shared__ Batch all;
    const int tid = threadIdx.x;
    split_offsets += (long long)blockIdx.x * (batch + 1);
    split_begin += (long long)blockIdx.x * capacity;
    seq_lens += blockIdx.x * seq_lens_stride_plan;
    if (worker_offsets != nullptr) worker_offsets += (long long)blockIdx.x * (value + 1);

    if (tid == 0) {
        rows_so_far = split_offsets[0] = 0;
        tiles_so_far = 0;
        all = {0, max_seq_len, 0};
    }
    long long total_tiles = 1;
    if (LOOKS_AT_BATCH) {
        __syncthreads();                                  // `all` is ready to be added to
        Batch mine = {0, max_seq_len, 0};
        for (int b = tid; b < batch; b += THREADS) {
            const int seq_len = min(max(seq_lens[b * seq_lens_stride], 0), max_seq_len);
            mine.longest = max(mine.longest, seq_len);
            mine.shortest = min(mine.shortest, seq_len);
            mine.tiles += ceil_div(seq_len, tile);
        }
        atomicMax(&all.longest, mine.longest);
        atomicMin(&all.shortest, mine.shortest);
        atomicAdd(&all.tiles, mine.tiles);
        __syncthreads();                                  // and holds every thread's part
        total_tiles = max((long long)all.tiles, 1ll);
        if (RULE == SGLANG && tid == 0)
            share = sglang_chunk(all, batch, value, num_sms, query_tiles);
        if (RULE == FA3_DYNAMIC && tid == 0)
            share = tiles_per_sm(all, num_sms, num_kv_heads, query_tiles);
    }
    // Where there are fewer tiles than workers, every tile is one run and some workers get none.
    const Runs cuts = {total_tiles, min((long long)value, total_tiles)};
    const Runs workers = {total_tiles, value};

    for (int first = 0; first < batch; first += THREADS) {
        const int b = first + tid;
        const int seq_len = b < batch ? min(max(seq_lens[b * seq_lens_stride], 0), max_seq_len) : 0;
        int size = 1, count = 0;
        long long begin_tile = 0, end_tile = 0, cut = 0;
        __syncthreads();                                  // rows_so_far of the last round is there
        if (RULE == EQUAL_SHARES) {
            const long long tiles = ceil_div(seq_len, tile);
            end_tile = tiles_so_far + block_prefix_sum<THREADS>(tiles, tile_total);
            begin_tile = end_tile - tiles;
            cut = cuts.first(begin_tile + 1);             // the first inside the sequence
            if (b < batch) count = 1 + (int)max(cuts.first(end_tile) - cut, 0ll);
        } else if (b < batch) {
            size = keys_per_split<RULE>(seq_len, value, tile, share);
            count = max(ceil_div(seq_len, size), 1);
        }
        const int end = rows_so_far + block_prefix_sum<THREADS>(count, row_total);
        if (b < batch) {
            split_offsets[b + 1] = min(end, capacity);
            for (int i = 0; i < count && end - count + i < capacity; i++) {
                const int row = end - count + i;
                if (RULE != EQUAL_SHARES) {
                    split_begin[row] = i * size;
                    continue;
                }
                const long long at = i == 0 ? begin_tile : cuts.begin(cut + i - 1);
                split_begin[row] = (int)(at - begin_tile) * tile;
                // Behind an empty sequence the tile is that sequence's, and so is the run.
                const bool taken = i == 0 && b > 0 && seq_lens[(b - 1) * seq_lens_stride] <= 0;
                if (worker_offsets != nullptr && !taken) {
                    const long long stop = min(workers.first(at + 1), workers.count);
                    for (long long w = workers.first(at); w < stop; w++) worker_offsets[w] = row;
                }
            }
            if (RULE == EQUAL_SHARES && worker_offsets != nullptr && b == batch - 1)
                worker_offsets[value] = min(end, capacity);
        }
        __syncthreads();                                  // everyone has read rows_so_far
        if (tid == THREADS - 1) {
            rows_so_far = end;
            tiles_so_far = end_tile;
        }
    }
}
