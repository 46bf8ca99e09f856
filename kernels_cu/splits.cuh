#pragma once
// Reading a split plan: rows of key ranges in CSR form.
//
//   split_offsets [batch + 1]   sequence b owns rows split_offsets[b] .. split_offsets[b + 1]
//   split_begin   [capacity]    first key of each row; it ends where the next row of the same
//                               sequence begins, the last one at the sequence's length
//
// Null pointers are the plan that splits nothing: row b is the whole of sequence b.

// Sequence that owns a row, or batch when the row is unused. Every thread of the block calls this;
// all get the same answer: the number of sequences whose rows end at or before this one.
template <int THREADS>
__device__ __forceinline__ int sequence_of_row(int row, const int* split_offsets, int batch) {
    if (split_offsets == nullptr) return row;
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
__device__ __forceinline__ KeyRange visible_keys(int row, int capacity, int sequence,
                                                 const int* split_offsets, const int* split_begin,
                                                 int seq_len, int window) {
    KeyRange keys = {0, seq_len};
    if (split_offsets != nullptr) {
        const int last_row = min(split_offsets[sequence + 1], capacity);
        keys.begin = max(split_begin[row], 0);
        if (row + 1 < last_row) keys.end = min(split_begin[row + 1], seq_len);
    }
    if (window > 0) keys.begin = max(keys.begin, seq_len - window);
    return keys;
}
