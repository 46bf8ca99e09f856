"""The faults: one place in one file changed, as a slip or a wrong idea would.

``old`` occurs exactly once in its file. ``kernel`` names whose checks must fail.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``old`` replaced by ``new`` in ``file``; ``why`` says what that breaks."""

    kernel: str
    file: str
    old: str
    new: str
    why: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.why}"


def faults(kernel: str, file: str, *entries: tuple[str, str, str]) -> list[Fault]:
    return [Fault(kernel, file, old, new, why) for why, old, new in entries]


FAULTS = [
    *faults(
        "paged_split_k",
        "paged_split_k.cu",
        (
            "missing barrier: a tile is used before it is stored",
            "__syncthreads();                                 // tile (and, at first, q) is",
            "// tile (and, at first, q) is",
        ),
        (
            "missing barrier: weights are used before they are stored",
            "__syncthreads();                                 // p and rescale are",
            "// p and rescale are",
        ),
        (
            "missing barrier: the next tile overwrites one that is still read",
            "__syncthreads();                                 // everyone is done",
            "// everyone is done",
        ),
        (
            "missing barrier: sums are divided by before they are stored",
            "if (FINISH) __syncthreads();",
            "",
        ),
        (
            "divergent barrier: one warp leaves the others alone",
            "__syncthreads();                                 // p and rescale are",
            "if (warp > 0) __syncthreads();                   // p and rescale are",
        ),
        (
            "tree: keys before the window count",
            "if (TREE && key < keys.begin) score = neg_inf();",
            "",
        ),
        (
            "tree: keys before the window are read",
            "if (TREE && key < keys.begin) key = keys.end;",
            "",
        ),
        (
            "tree: tiles straddle leaves",
            "TREE ? keys.begin / TILE * TILE : keys.begin",
            "keys.begin",
        ),
        (
            "tree: maxima that are no integers",
            "TREE ? ceilf(top) : top",
            "top",
        ),
        (
            "tree: the rest of a last leaf is lost",
            "(tile + TILE >= keys.end || (tile + TILE) % leaf == 0)",
            "((tile + TILE) % leaf == 0)",
        ),
        (
            "tree: a leaf is folded with a sibling of another split",
            "(first & width) && first - width >= first_leaf",
            "(first & width)",
        ),
        (
            "tree: states go where the right sibling would lie",
            "            first -= width;\n            if (counts",
            "            if (counts",
        ),
        (
            "tree: rows that were folded into another still hold a state",
            "if (counts && tid == 0) width_out[first] = 0;",
            "",
        ),
        (
            "tree: missing barrier between weights and outputs",
            "__syncthreads();                             // both weights",
            "// both weights",
        ),
        (
            "tree: missing barrier before the weights of the next level",
            "__syncthreads();                             // what left and right",
            "// what left and right",
        ),
        (
            "tree: the left sibling's sum keeps its own maximum",
            "__fmul_rn(l_out[at(first, h)], f)",
            "l_out[at(first, h)]",
        ),
        (
            "tree: the left sibling's output keeps its own maximum",
            "__fmul_rn(o.x, left[h])",
            "o.x",
        ),
        (
            "tree: nobody says how wide a state is",
            "width_out[first] = width;",
            "width_out[first] = 1;",
        ),
        (
            "tree: stale widths of rows that hold no state",
            "own.begin + tid; i < own.end; i += THREADS) width_out[i] = 0;",
            "own.begin + tid; i < own.begin; i += THREADS) width_out[i] = 0;",
        ),
        (
            "tree: sums go on into the next leaf",
            "state[i] = SoftmaxState();",
            "",
        ),
        (
            "tree: a bad id is known to the thread that saw it alone",
            "        bad = __syncthreads_or(bad);\n        const float factor",
            "        __syncthreads();\n        const float factor",
        ),
        (
            "tree: a refused length counts as no keys",
            "if (bad) close_leaf(0);",
            "",
        ),
        ("missing mask: keys past the end count", "if (key >= keys.end) score = neg_inf();", ""),
        (
            "wrong mask: one key too many",
            "if (key >= keys.end) score",
            "if (key > keys.end) score",
        ),
        (
            "wrong mask: one key too few",
            "if (key >= keys.end) score",
            "if (key + 1 >= keys.end) score",
        ),
        (
            "short run: the last, partial tile is left out",
            "tile < keys.end; tile += TILE",
            "tile + TILE <= keys.end; tile += TILE",
        ),
        (
            "wrong prefetch: every tile but the first two is read one tile late",
            "find(tile + 2 * TILE + lane",
            "find(tile + 3 * TILE + lane",
        ),
        (
            "wrong prefetch: the second tile repeats the first",
            "find(first_tile + TILE + lane",
            "find(first_tile + lane",
        ),
        (
            "short tile: the last key never enters the output",
            "for (int j = 0; j < TILE; j++)",
            "for (int j = 0; j < TILE - 1; j++)",
        ),
        (
            "short dot product",
            "for (int c = 0; c < KCopy::VECS; c++)",
            "for (int c = 0; c < KCopy::VECS - 1; c++)",
        ),
        (
            "wrong rescale: one column of a pair keeps its old maximum",
            "acc[i][1] = acc[i][1] * rescale[h] + part[i][1];",
            "acc[i][1] = acc[i][1] + part[i][1];",
        ),
        (
            "wrong rescale: the sum keeps its old maximum",
            "state[i].l = state[i].l * factor + warp_sum(p);",
            "state[i].l = state[i].l + warp_sum(p);",
        ),
        (
            "wrong maximum: only the last tile's",
            "m = fmaxf(state[i].m, TREE ? ceilf(top) : top);",
            "m = TREE ? ceilf(top) : top;",
        ),
        (
            "wrong units: the maximum is not in log2 units",
            "warp_max(score) * LOG2_E",
            "warp_max(score)",
        ),
        (
            "the weights of head h are those of lane h",
            "p_shared[h * TILE + lane] = p;",
            "p_shared[h * TILE + (lane ^ 1)] = p;",
        ),
        (
            "wrong head: heads of a group are not neighbours",
            "const int head0 = kv_head * group_size + head_in_group;",
            "const int head0 = kv_head + head_in_group;",
        ),
        (
            "wrong tile of heads: the second repeats the first",
            "const int head_in_group = blockIdx.z * G;",
            "const int head_in_group = blockIdx.z * 0;",
        ),
        (
            "out-of-bounds read: queries past the group",
            "q_shared[i] = h < heads ?",
            "q_shared[i] = h < G ?",
        ),
        (
            "wrong query row",
            "q += sequence * q_stride_token",
            "q += row * q_stride_token",
        ),
        (
            "missing exit: rows past the plan are worked on",
            "if (sequence == batch) return; ",
            "",
        ),
        (
            "unchecked length: the table is read past its row",
            "bool bad = seq_len < 0 || seq_len > (long long)max_blocks * block_size;",
            "bool bad = seq_len < 0;",
        ),
        (
            "unchecked length: negative ones count as empty",
            "bool bad = seq_len < 0 || seq_len",
            "bool bad = seq_len",
        ),
        (
            "a refused length is followed all the same",
            "if (bad) keys = {0, 0};",
            "",
        ),
        (
            "a bad id is known to the thread that saw it alone",
            "    // ---- one state per head\n    bad = __syncthreads_or(bad);",
            "    __syncthreads();",
        ),
        (
            "a refused row looks empty",
            "        if (bad) state[i] = {-neg_inf(), quiet_nan()};\n        if (FINISH)",
            "        if (bad) state[i] = {neg_inf(), 0.0f};\n        if (FINISH)",
        ),
        (
            "stale partial: maxima land in the sequence's row",
            "m_out[(long long)row * num_q_heads",
            "m_out[(long long)sequence * num_q_heads",
        ),
        (
            "wrong distance in the ALiBi bias: the newest key is at -1",
            "(key - (seq_len - 1))",
            "(key - seq_len)",
        ),
        ("soft cap without its cap", "score = soft_cap * tanhf(", "score = tanhf("),
        (
            "0 / 0 where there is no key",
            "to[0] = from_float<TOut>(l == 0.0f ? 0.0f : o.x / l);",
            "to[0] = from_float<TOut>(o.x / l);",
        ),
        ("queries taken for contiguous", "d * q_stride_dim", "d"),
        (
            "lengths taken for contiguous",
            "seq_lens[sequence * seq_lens_stride]",
            "seq_lens[sequence]",
        ),
        ("outputs taken for contiguous", "to[out_stride_dim] =", "to[1] ="),
        ("the scale of K is ignored", "if (k_scales != nullptr)", "if (false)"),
        ("the scale of V is ignored", "if (v_scales == nullptr) return", "return"),
        (
            "scales of query heads, not of KV heads",
            "kv_head * v_scales_stride_head];",
            "head0 * v_scales_stride_head];",
        ),
        (
            "the first sequence's scales for all",
            "k_scales[sequence * k_scales_stride_token",
            "k_scales[0 * k_scales_stride_token",
        ),
        (
            "wrong page layout: slots too far apart",
            "v_copy.fetch(v_cache, v_stride_block, v_stride_slot, next);\n    next",
            "v_copy.fetch(v_cache, v_stride_block, v_stride_slot + WARPS, next);\n    next",
        ),
    ),
    *faults(
        "paged_split_k",
        "paged_kv.cuh",
        ("out-of-bounds table read: one key too far", "if (key < end) {", "if (key <= end) {"),
        ("table rows taken for contiguous", "column * stride_column)", "column)"),
        (
            "out-of-bounds block: the id one past the pool is followed",
            "if (block < 0 || block >= num_blocks) {",
            "if (block < 0 || block > num_blocks) {",
        ),
        (
            "a negative id passes for a key that is not there",
            "if (block < 0 || block >= num_blocks) {",
            "if (block >= num_blocks) {",
        ),
        (
            "wrong slot in a block",
            "place = {block, key - column * block_size};",
            "place = {block, key % TILE};",
        ),
        (
            "wrong lane: rows of the tile are shifted",
            "__shfl_sync(0xffffffffu, mine.slot, key % TILE)",
            "__shfl_sync(0xffffffffu, mine.slot, (key + 1) % TILE)",
        ),
        (
            "threads without a row store past the tile",
            "            if (key < TILE)\n                *reinterpret_cast<Vector*>(tile",
            "                *reinterpret_cast<Vector*>(tile",
        ),
        (
            "misaligned rows in shared memory",
            "(VECS + (VECS % 2 == 0)) * WIDTH;",
            "(VECS + (VECS % 2 == 0)) * WIDTH + 1;",
        ),
        ("the record of a fault names no row", "fault[1] = row;", "fault[1] = code;"),
    ),
    *faults(
        "paged_split_k",
        "splits.cuh",
        (
            "wrong owner: rows belong to the sequence before",
            "split_offsets[b + 1] <= row",
            "split_offsets[b + 1] < row",
        ),
        (
            "sequences past the first block of threads own no row",
            "first < batch; first += THREADS",
            "first < THREADS; first += THREADS",
        ),
        (
            "the last split of a sequence ends where the next sequence begins",
            "if (row + 1 < last_row)",
            "if (row + 1 < capacity)",
        ),
        (
            "a split past the current length is not cut",
            "keys.end = min(split_begin[row + 1], seq_len);",
            "keys.end = split_begin[row + 1];",
        ),
        (
            "a window one key too wide",
            "max(keys.begin, seq_len - window)",
            "max(keys.begin, seq_len - window - 1)",
        ),
    ),
    *faults(
        "paged_split_k",
        "softmax_state.cuh",
        (
            "an empty state has a weight of NaN",
            "return m == neg_inf() ? 0.0f : ex2(m - M);",
            "return ex2(m - M);",
        ),
        (
            "wrong shuffle mask: a maximum over half a warp",
            "for (int step = 16; step > 0; step /= 2) x = fmaxf",
            "for (int step = 8; step > 0; step /= 2) x = fmaxf",
        ),
        (
            "wrong shuffle mask: a sum over pairs of lanes is left out",
            "for (int step = 16; step > 0; step /= 2) x += ",
            "for (int step = 16; step > 1; step /= 2) x += ",
        ),
        ("lse in log2 units", "(m + log2f(l)) * LN_2;", "m + log2f(l);"),
        (
            "a wrong scale by one per cent",
            "fmaf(score, LOG2_E, m",
            "fmaf(score, LOG2_E * 1.01f, m",
        ),
    ),
    *faults(
        "paged_split_k",
        "leaves.cuh",
        (
            "leaves that follow from the length alone, in rows that follow from the heads too",
            "while ((long long)keys * max_leaves < seq_len)",
            "while ((long long)keys * 2 * max_leaves < seq_len)",
        ),
        (
            "leaves between two rows belong to both",
            "if (row > split_offsets[sequence]) own.begin = border(row);",
            "if (row > split_offsets[sequence]) own.begin = max(border(row) - 1, 0);",
        ),
        (
            "the first row leaves out its first leaf",
            "LeafRange own = {0, leaf_rows};",
            "LeafRange own = {1, leaf_rows};",
        ),
        (
            "a row behind the last key is not empty",
            "if (keys.begin >= keys.end) keys = {0, 0};",
            "",
        ),
        (
            "the window of a leaf begins one key early",
            "keys.begin = max(keys.begin, seq_len - window);\n    if (keys",
            "keys.begin = max(keys.begin, seq_len - window - 1);\n    if (keys",
        ),
    ),
    *faults(
        "paged_split_k",
        "tree_node.cuh",
        (
            "a weight of 0 for a state far below",
            "fmaxf(m - M, -127.0f)",
            "(m - M < -2.0f ? -127.0f : m - M)",
        ),
    ),
    *faults(
        "reduce_subtrees",
        "reduce_subtrees.cu",
        (
            "missing barrier: the range of leaves is not there yet",
            "__syncthreads();                                     // begin and end",
            "// begin and end",
        ),
        (
            "missing barrier: maxima are read before they are stored",
            "__syncthreads();                                     // every thread's",
            "// every thread's",
        ),
        (
            "leaves of the first threads alone",
            "leaf < leaf_rows; leaf += THREADS",
            "leaf < min(leaf_rows, THREADS); leaf += THREADS",
        ),
        ("rows that hold no state count", "if (width[leaf] <= 0) continue;", ""),
        (
            "rows that hold no state are added",
            "width[leaf] > 0 ? value(leaf) : -0.0f",
            "value(leaf)",
        ),
        (
            "the sum ends before the last subtree",
            "atomicMax(&end, leaf + min(width[leaf], leaf_rows - leaf));",
            "atomicMax(&end, leaf);",
        ),
        (
            "left and right siblings in one place",
            "if (1 << level < leaves) continue;",
            "",
        ),
        (
            "a running sum instead of a tree",
            "if (!(leaf >> level & 1)) {",
            "if (level == LEVELS - 1) {",
        ),
        (
            "what waits at the end is left out",
            "if (end >> level & 1) sum = __fadd_rn(waiting[level], sum);",
            "if (end >> level & 1) sum = waiting[level];",
        ),
        (
            "wrong rescale: sums are added at their own maxima",
            "__fmul_rn(l[at(leaf)], exact_weight(m[at(leaf)], M))",
            "l[at(leaf)]",
        ),
        (
            "wrong rescale: outputs are added at their own maxima",
            "__fmul_rn(acc[at(leaf) * v_head_dim + d], exact_weight(m[at(leaf)], M))",
            "acc[at(leaf) * v_head_dim + d]",
        ),
        (
            "a sequence without a row has the states of another call",
            "leaf_rows = 0;                               // nobody",
            ";                                            // nobody",
        ),
        (
            "the sink is left out",
            "if (sinks != nullptr) denominator +=",
            "if (false) denominator +=",
        ),
        (
            "0 / 0 where there is no key",
            "from_float<TOut>(total == 0.0f ? 0.0f : o / denominator)",
            "from_float<TOut>(o / denominator)",
        ),
    ),
    *faults(
        "reduce_splits",
        "reduce_splits.cu",
        ("missing barrier: maxima are read before they are stored", "    __syncthreads();\n", ""),
        (
            "the last warp's maximum is left out",
            "w < THREADS / 32; w++",
            "w < THREADS / 32 - 1; w++",
        ),
        (
            "a maximum over the first block of rows alone",
            "row < last; row += THREADS) M",
            "row < min(last, first + THREADS); row += THREADS) M",
        ),
        (
            "one row too many: the next sequence's first",
            "const int last = min(split_offsets[sequence + 1], capacity);",
            "const int last = min(split_offsets[sequence + 1] + 1, capacity);",
        ),
        (
            "one row too few",
            "const int first = max(split_offsets[sequence], 0);",
            "const int first = max(split_offsets[sequence], 0) + 1;",
        ),
        (
            "the sums of other sequences are added",
            "for (int row = first; row < last; row++) total",
            "for (int row = 0; row < last; row++) total",
        ),
        (
            "wrong rescale: sums are added at their own maxima",
            "total += l[at(row)] * weight(m[at(row)], M);",
            "total += l[at(row)];",
        ),
        (
            "wrong rescale: outputs are added at their own maxima",
            "acc[at(row) * v_head_dim + d] * weight(m[at(row)], M);",
            "acc[at(row) * v_head_dim + d];",
        ),
        ("stale partial: acc of an empty row is read", "if (l[at(row)] != 0.0f) o +=", "o +="),
        (
            "0 / 0 where there is no key",
            "from_float<TOut>(total == 0.0f ? 0.0f : o / denominator)",
            "from_float<TOut>(o / denominator)",
        ),
        ("the sink does not weigh", "? 0.0f : o / denominator);", "? 0.0f : o / total);"),
        ("the lse counts the sink", "lse_of(M, total)", "lse_of(M, denominator)"),
        (
            "another head's sink",
            "probability(sinks[head], M)",
            "probability(sinks[0], M)",
        ),
        ("wrong row pitch", "acc[at(row) * v_head_dim + d]", "acc[at(row) * THREADS + d]"),
        (
            "columns past the first block of threads are not written",
            "d < v_head_dim; d += THREADS",
            "d < min(v_head_dim, THREADS); d += THREADS",
        ),
    ),
    *faults(
        "merge_states",
        "merge_states.cu",
        ("+inf is taken for a sum", "return x == -neg_inf() ? neg_inf() : x;", "return x;"),
        ("a side of weight zero is read: 0 * NaN", "if (weight_a != 0.0f) o +=", "o +="),
        (
            "b's weight on a's output",
            "to_float(out_b[d]) * weight_b",
            "to_float(out_b[d]) * weight_a",
        ),
        ("the maximum is always a's", "const float top = fmaxf(a, b);", "const float top = a;"),
        (
            "two empty sides make NaN",
            "return x == neg_inf() ? 0.0f : ex2((x - top) * LOG2_E);",
            "return ex2((x - top) * LOG2_E);",
        ),
        ("wrong units", "ex2((x - top) * LOG2_E)", "ex2(x - top)"),
        (
            "swapped strides of the lse",
            "p[token * stride_token + head * stride_head]",
            "p[token * stride_head + head * stride_token]",
        ),
        ("a's strides for b", "token * out_b_stride_token", "token * out_a_stride_token"),
        ("the sink does not weigh", "? 0.0f : o / denominator);", "? 0.0f : o / total);"),
        (
            "0 / 0 where neither side has keys",
            "from_float<T>(total == 0.0f ? 0.0f : o / denominator)",
            "from_float<T>(o / denominator)",
        ),
        (
            "the lse is in log2 units by half",
            "top + log2f(total) * LN_2;",
            "top + log2f(total);",
        ),
        (
            "columns past the first block of threads are not written",
            "d < v_head_dim; d += THREADS",
            "d < min(v_head_dim, THREADS); d += THREADS",
        ),
    ),
    *faults(
        "write_kv",
        "write_kv.cu",
        ("padding is written before the cache's start", "    if (slot < 0) return;\n", ""),
        (
            "the slot one past the cache is written",
            "if (slot >= (long long)num_blocks * block_size) {",
            "if (slot > (long long)num_blocks * block_size) {",
        ),
        (
            "block and offset swapped",
            "block = slot / block_size, offset = slot % block_size;",
            "block = slot % block_size, offset = slot / block_size;",
        ),
        ("short copy", "i < num_heads * dim; i += THREADS", "i < THREADS; i += THREADS"),
        (
            "heads at the wrong pitch",
            "from[head * from_stride_head + d]",
            "from[d * from_stride_head + head]",
        ),
        (
            "K strides for V",
            "v_cache + block * v_cache_stride_block",
            "v_cache + block * k_cache_stride_block",
        ),
        (
            "the wrong token's rows",
            "v + token * v_stride_token",
            "v + slot * v_stride_token",
        ),
        (
            "the record of a fault names another token",
            "report_fault(fault, FAULT_SLOT, token,",
            "report_fault(fault, FAULT_SLOT, token + 1,",
        ),
    ),
    *faults(
        "plan_splits",
        "plan_splits.cu",
        (
            "missing barrier: the batch is summed up before the sums are cleared",
            "__syncthreads();                                  // `all` is",
            "// `all` is",
        ),
        (
            "missing barrier: the batch is used before it is summed up",
            "__syncthreads();                                  // and holds",
            "// and holds",
        ),
        (
            "missing barrier: rows so far are read before they are stored",
            "__syncthreads();                                  // rows_so_far of",
            "// rows_so_far of",
        ),
        (
            "missing barrier: rows so far are overwritten while they are read",
            "__syncthreads();                                  // everyone has read",
            "// everyone has read",
        ),
        (
            "missing barrier: warp totals are read before they are stored",
            "warp_total[warp] = x;\n    __syncthreads();",
            "warp_total[warp] = x;",
        ),
        (
            "one set of warp totals for two sums",
            "block_prefix_sum<THREADS>(count, row_total)",
            "block_prefix_sum<THREADS>((long long)count, tile_total)",
        ),
        ("prefix sum without its guard", "if (lane >= step) x += y;", "x += y;"),
        ("prefix sum one step short", "step < 32; step *= 2", "step < 16; step *= 2"),
        ("the total of a warp lacks its last lane", "if (lane == 31)", "if (lane == 30)"),
        (
            "a warp counts itself twice",
            "for (int w = 0; w < warp; w++)",
            "for (int w = 0; w <= warp; w++)",
        ),
        ("rows past the capacity", "i < count && end - count + i < capacity", "i < count"),
        (
            "offsets past the capacity",
            "split_offsets[b + 1] = min(end, capacity);",
            "split_offsets[b + 1] = end;",
        ),
        (
            "an empty sequence has no row",
            "count = max(ceil_div(seq_len, size), 1);",
            "count = ceil_div(seq_len, size);",
        ),
        (
            "a negative length is planned",
            "b < batch ? min(max(seq_lens[b * seq_lens_stride], 0), max_seq_len) : 0;",
            "b < batch ? min(seq_lens[b * seq_lens_stride], max_seq_len) : 0;",
        ),
        (
            "a length past the table is planned",
            "b < batch ? min(max(seq_lens[b * seq_lens_stride], 0), max_seq_len) : 0;",
            "b < batch ? max(seq_lens[b * seq_lens_stride], 0) : 0;",
        ),
        (
            "out-of-bounds read of a length",
            "b < batch ? min(max(seq_lens[b * seq_lens_stride], 0), max_seq_len) : 0;",
            "min(max(seq_lens[b * seq_lens_stride], 0), max_seq_len);",
        ),
        (
            "splits rounded down",
            "max(ceil_div(ceil_div(seq_len, max(splits, 1)), tile), 1) * tile",
            "max(ceil_div(seq_len / max(splits, 1), tile), 1) * tile",
        ),
        (
            "divisions rounded down",
            "return a / b + (a % b != 0);",
            "return a / b;",
        ),
        (
            "the first thread's end for the round's",
            "if (tid == THREADS - 1) {",
            "if (tid == 0) {",
        ),
        (
            "shares of tiles not yet begun",
            "cut = cuts.first(begin_tile + 1);",
            "cut = cuts.first(begin_tile);",
        ),
        (
            "the last worker has no end",
            "worker_offsets[value] = min(end, capacity);",
            "worker_offsets[value] = row_total[0];",
        ),
        ("the share of an SM without its slack", "__fmul_rn(total, 1.1f)", "total"),
        ("the shortest sequence is ignored", "atomicMin(&all.shortest, mine.shortest);", ""),
    ),
    *faults(
        "read_stream",
        "read_stream.cu",
        ("out-of-bounds load past the end", "min(i + u * step, num_vectors - 1)", "i + u * step"),
        ("the last vector is never read", "num_vectors - 1)", "num_vectors - 2)"),
        ("vectors are read UNROLL times", "i += UNROLL * step", "i += step"),
        ("a part of the vector is not used", "^ v[u].z ^ v[u].w", "^ v[u].z"),
    ),
    *faults(
        "read_pages",
        "read_pages.cu",
        (
            "half of each page is skipped",
            "row < block_size; row += 16",
            "row < block_size; row += 32",
        ),
        ("all heads read head 0", "const int head = item % num_kv_heads;", "const int head = 0;"),
        (
            "page numbers, not page ids",
            "__ldg(pages + item / num_kv_heads)",
            "(item / num_kv_heads)",
        ),
        (
            "lanes of a row overlap",
            "lane / VECTORS * stride_slot + lane % VECTORS",
            "lane / VECTORS * stride_slot + lane % (VECTORS / 2)",
        ),
        ("V from K's cache", "v[i] = load_16(v_cache", "v[i] = load_16(k_cache"),
        ("short list", "item < num_pages * num_kv_heads", "item < num_pages * num_kv_heads - 1"),
    ),
]
