#pragma once
// Which keys are added up together, whoever adds them.
//
//   leaf      a run of keys counted from the sequence's first. How long follows from the sequence's
//             length and the head geometry alone: never from a plan, a batch, a page or a device
//   subtree   the sum of 2^n leaves that begin at a multiple of 2^n. Siblings add up to their
//             parent (tree_node.cuh says why the bits of a sum are then the same for all)
//
// States lie in rows [batch, leaf_rows]: a subtree's in the row of its first leaf, and width says
// of each row how many leaves its state is the sum of; 0 of a row that holds no state.
#include "splits.cuh"

constexpr int MIN_LEAF = 64;                             // keys, a multiple of TILE
constexpr int MOST_LEAVES_LOG2 = 9;                      // of one sequence, whatever its heads

// Keys of a leaf: the shortest power of two that leaves the sequence at most max_leaves, which is
// the heads' share of a number of thread blocks.
__device__ __forceinline__ int leaf_keys(int seq_len, int max_leaves) {
    int keys = MIN_LEAF;
    while ((long long)keys * max_leaves < seq_len) keys *= 2;
    return keys;
}

// Half-open range of leaves.
struct LeafRange {
    int begin, end;
};

// Leaves that a row of a plan owns. A border inside a leaf moves up to the next one, so that leaves
// stay whole; rows emptied thereby own none. Together the rows of a sequence own all leaf_rows.
__device__ __forceinline__ LeafRange leaves_of_row(int row, int capacity, int sequence,
                                                   const int* split_offsets, const int* split_begin,
                                                   int leaf, int leaf_rows) {
    LeafRange own = {0, leaf_rows};
    if (split_offsets == nullptr) return own;
    auto border = [&](int row) {
        const int key = max(split_begin[row], 0);
        return min(key / leaf + (key % leaf != 0), leaf_rows);
    };
    if (row > split_offsets[sequence]) own.begin = border(row);
    if (row + 1 < min(split_offsets[sequence + 1], capacity)) own.end = border(row + 1);
    return own;
}

// Keys of leaves that exist and are visible: cut at the length, at the window (the newest `window`
// keys; 0 means all) and at the shard (keys shard.begin .. shard.end of every sequence).
__device__ __forceinline__ KeyRange visible_keys(LeafRange own, int leaf, int seq_len, int window,
                                                 KeyRange shard) {
    KeyRange keys;
    keys.end = (int)min((long long)own.end * leaf, (long long)min(seq_len, shard.end));
    keys.begin = (int)min((long long)own.begin * leaf, (long long)keys.end);
    keys.begin = max(keys.begin, shard.begin);
    if (window > 0) keys.begin = max(keys.begin, seq_len - window);
    if (keys.begin >= keys.end) keys = {0, 0};
    return keys;
}
