#pragma once
// Reading a split plan: rows of key ranges in CSR form.
//
//   split_offsets [batch + 1]   sequence b owns rows split_offsets[b] .. split_offsets[b + 1]
//   split_begin   [capacity]    first key of each row; it ends where the next row of the same
//                               sequence begins, the last one at the sequence's length

// Sequence that owns a row, or batch when the row is unused. Every thread of the block calls this;
// all get the same answer: the number of sequences whose rows end at or before this one.
template <int THREADS>
__device__ __forceinline__ int sequence_of_row(int row, const int* split_offsets, int batch) {
    int sequence = 0;
    for (int first = 0; first < batch; first += THREADS) {
        const int b = first + threadIdx.x;
        sequence += __syncthreads_count(b < batch && split_offsets[b + 1] <= row);
    }
    return sequence;
}

// Half-open range of keys.
struct KeyRange {
    int begin, end;
};

// Keys of a row that are visible: the planned range, cut at the current length and at the window
// (the newest `window` keys; 0 means all). begin >= end where nothing is left.
__device__ __forceinline__ KeyRange visible_keys(int row, int capacity, int last_row,
                                                 const int* split_begin, int seq_len, int window) {
    KeyRange keys;
    keys.begin = max(split_begin[row], 0);
    keys.end = row + 1 < min(last_row, capacity) ? min(split_begin[row + 1], seq_len) : seq_len;
    if (window > 0) keys.begin = max(keys.begin, seq_len - window);
    return keys;
}
