// plan_splits: a split plan written on the device from seq_lens, so that nobody waits for lengths.
//
// A captured graph replays this kernel with the rest of the step: the plan follows the lengths of
// every replay, in buffers whose addresses and sizes stay fixed.
//
// Grid      one thread block
// Threads   thread t plans sequences t, t + THREADS, ...
// Shared    one int per warp
// Reads     seq_lens once
// Writes    split_offsets [batch + 1] and the rows in use of split_begin
// Empty     A sequence of length 0 still has one row, which is empty.
// Lengths   outside 0 .. max_seq_len are planned as if cut to it: stage 1 refuses them by itself,
//           and the caller sized `capacity` for max_seq_len.

enum Rule {
    // value splits of ceil(ceil(s / tile) / value) * tile keys; the ones past the end do not exist
    BY_COUNT = 0,
    // splits of value keys
    BY_SIZE = 1
};

template <int RULE>
__device__ __forceinline__ int keys_per_split(int seq_len, int value, int tile) {
    if (RULE == BY_SIZE) return value;
    const int tiles = (seq_len + tile - 1) / tile;
    return max((tiles + value - 1) / value, 1) * tile;
}

// Inclusive prefix sum over the block's threads. Every thread calls it.
template <int THREADS>
__device__ __forceinline__ int block_prefix_sum(int x, int* warp_total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int y = __shfl_up_sync(0xffffffffu, x, step);
        if (lane >= step) x += y;
    }
    if (lane == 31) warp_total[warp] = x;
    __syncthreads();
    for (int w = 0; w < warp; w++) x += warp_total[w];
    return x;
}

template <int RULE, int THREADS>
__global__ void __launch_bounds__(THREADS) plan_splits(
    int* split_offsets,      // [batch + 1]
    int* split_begin,        // [capacity]
    const int* seq_lens,     // [batch]
    int batch, int capacity, int max_seq_len,
    int value,               // the rule's number: splits or keys
    int tile) {
    __shared__ int warp_total[THREADS / 32];
    __shared__ int rows_so_far;
    const int tid = threadIdx.x;
    if (tid == 0) rows_so_far = split_offsets[0] = 0;
    for (int first = 0; first < batch; first += THREADS) {
        const int b = first + tid;
        int size = 1, count = 0;
        if (b < batch) {
            const int seq_len = min(max(seq_lens[b], 0), max_seq_len);
            size = keys_per_split<RULE>(seq_len, value, tile);
            count = max((seq_len + size - 1) / size, 1);
        }
        __syncthreads();                                  // rows_so_far of the last round is in place
        const int end = rows_so_far + block_prefix_sum<THREADS>(count, warp_total);
        if (b < batch) {
            split_offsets[b + 1] = min(end, capacity);
            for (int i = 0; i < count && end - count + i < capacity; i++)
                split_begin[end - count + i] = i * size;
        }
        __syncthreads();                                  // everyone has read rows_so_far
        if (tid == THREADS - 1) rows_so_far = end;
    }
}
