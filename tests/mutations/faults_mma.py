"""Faults of the tensor-core kernel and its headers."""

from __future__ import annotations

from .faults import faults

FAULTS_MMA = [
    *faults(
        "paged_split_k_mma",
        "paged_split_k_mma.cu",
        (
            "missing barrier: leaves overwrite those that are still read",
            "bar_sync(STATES_FREE, 32 * WARPS);",
            "bar_arrive(STATES_FREE, 32 * WARPS);",
        ),
        (
            "missing barrier: leaves are added before they are stored",
            "bar_sync(STATES_FULL, 32 * WARPS);",
            "bar_arrive(STATES_FULL, 32 * WARPS);",
        ),
        (
            "out-of-bounds block: the id one past the pool is followed",
            "(unsigned int)id.block >= (unsigned int)num_blocks;",
            "(unsigned int)id.block > (unsigned int)num_blocks;",
        ),
        (
            "out-of-bounds table read: one page too far",
            "if (number >= work.pages.num_pages) return 0;",
            "if (number > work.pages.num_pages) return 0;",
        ),
        (
            "the first part of a block for every part",
            "id.part = page - column * pages_per_block;",
            "id.part = 0;",
        ),
        ("a refused id spoils nothing", "mark_stage(bad);", "mark_stage(false);"),
        (
            "a spoiled page passes",
            "if (bad_stages >> (ring.used + r) % STAGES & 1) leaf.spoil();",
            ";",
        ),
        (
            "overlap: queries are read ahead of the wait",
            "            griddepcontrol_wait();\n            load_queries(work);",
            "            load_queries(work);\n            griddepcontrol_wait();",
        ),
        (
            "overlap: the newest page is read ahead of the wait",
            "work.pages.page(fed, warp) != (work.unit.seq_len - 1) / PAGE",
            "work.pages.page(fed, warp) != work.unit.seq_len / PAGE",
        ),
        (
            "overlap: a bad id is reported ahead of the wait",
            "!__any_sync(0xffffffffu, bad);",
            "true;",
        ),
        (
            "overlap: mergers do not wait",
            "        griddepcontrol_wait();\n        griddepcontrol_launch_dependents();",
            "",
        ),
        (
            "overlap: the launch behind is let go ahead of the wait",
            "        griddepcontrol_wait();\n        griddepcontrol_launch_dependents();",
            "        griddepcontrol_launch_dependents();\n        griddepcontrol_wait();",
        ),
        (
            "tickets leave units out",
            "after = 2 * gridDim.x +",
            "after = 3 * gridDim.x +",
        ),
        (
            "the counter of tickets is not back at 0",
            "schedule.num_units - gridDim.x - 1);",
            "schedule.num_units - gridDim.x);",
        ),
        (
            "the ticket of the unit before",
            "u_next = dynamic ? tickets[round % 2][warp]",
            "u_next = dynamic ? tickets[(round + 1) % 2][warp]",
        ),
        ("states where nobody looks for them", "first >> low_log2), my_lane", "first), my_lane"),
        (
            "stale partial: places that no unit wrote",
            "            if (!even)",
            "            if (false)",
        ),
        (
            "page ids past the first 32 of a warp are not looked up",
            "if (fed > 0 && fed % LOOK_UP == 0)",
            "if (fed > 0 && fed % (2 * LOOK_UP) == 0)",
        ),
        (
            "one row too many is copied",
            "fed_work.unit.seq_len - page * PAGE};",
            "fed_work.unit.seq_len - page * PAGE + 1};",
        ),
        (
            "wrong mask: one key too many",
            "int keys = work.unit.seq_len - work.pages.page(leaf_first, warp) * PAGE;",
            "int keys = work.unit.seq_len - work.pages.page(leaf_first, warp) * PAGE + 1;",
        ),
        (
            "wrong mask: the first pages' keys for every page of a leaf",
            "keys -= AT_ONCE * PAGE;",
            "",
        ),
        ("one of two pages is given back", "ring.pop(AT_ONCE);", "ring.pop(1);"),
        (
            "page ids past a sequence: of a page that holds no key",
            "if (AT_ONCE > 1 && column * PAGE >= work.unit.seq_len) return 0;",
            "",
        ),
        (
            "short leaf: its last page is left out",
            "if (i >= left) break;",
            "if (i >= left - 2 * (warp == 1)) break;",
        ),
        (
            "all heads share one stack",
            "states + (READERS * G + my_head) * Node::FLOATS;",
            "states + READERS * G * Node::FLOATS;",
        ),
        (
            "the next unit's queries for this one's last leaves",
            "if (last && more) ",
            "if (more) ",
        ),
        (
            "a group of units waits for one more",
            "mates = min(all ? count : GROUP, count - first);",
            "mates = all ? count : GROUP;",
        ),
        (
            "groups meet at a counter of their units",
            "unit.slot + first * step + level;",
            "unit.slot + first * step;",
        ),
        (
            "stale partial: groups of units are read as units",
            "step *= GROUP;",
            "",
        ),
        (
            "0 / 0 where there is no key",
            "const bool none = node.l == 0.0f;",
            "const bool none = false;",
        ),
        (
            "a refused length looks empty",
            "if (bad) node.l = node.w = quiet_nan();",
            "",
        ),
        (
            "every tile of a group has the heads of the first",
            "work.kv_head * group_size + tile * tile_heads;",
            "work.kv_head * group_size;",
        ),
        (
            "small blocks: the slot of every key is 0",
            "key - column * block_size};",
            "0};",
        ),
        (
            "small blocks: a hidden key is read where its id happens to be",
            "if (!wanted || bad) mine.block = -1;",
            "",
        ),
        (
            "window: hidden rows are read",
            "(!(OPTIONS & WINDOW) || row >= keys - window);",
            "true;",
        ),
        ("a factor of V for every sequence", "v_scales, v_scales_stride_token,", "v_scales, 0,"),
        ("the sink of another head", "__ldg(sinks + q_head)", "__ldg(sinks + my_head)"),
        (
            "the last tile has heads that are not the group's",
            "min(tile_heads, group_size - tile * tile_heads);",
            "tile_heads;",
        ),
    ),
    *faults(
        "paged_split_k_mma",
        "kv_ring.cuh",
        ("missing commit: nobody waits for the copies", "        cp_async_commit();\n", ""),
        (
            "missing wait: a page is used before it arrives",
            "cp_async_wait<STAGES - PAGES>();",
            "cp_async_wait<STAGES - 1>();",
        ),
        (
            "missing wait at the end of the ring",
            "cp_async_wait<0>();",
            "cp_async_wait<1>();",
        ),
        (
            "missing warp barrier: other lanes' copies are read",
            "__syncwarp();\n#pragma unroll\n        for (int r = 0; r < PAGES; r++) oldest",
            "for (int r = 0; r < PAGES; r++) oldest",
        ),
        (
            "missing warp barrier: a page is overwritten while it is read",
            "__syncwarp();            // no lane reads",
            "// no lane reads",
        ),
        (
            "rows of K without a key are read",
            "cp_async_16_or_zero(to + at, k, there);",
            "cp_async_16_or_zero(to + at, k, true);",
        ),
        (
            "rows of V without a key are read: 0 * NaN",
            "at, v, there);",
            "at, v, true);",
        ),
        (
            "V over K",
            "cp_async_16_or_zero(to + K_BYTES + at, v",
            "cp_async_16_or_zero(to + at, v",
        ),
        (
            "chunks where nobody looks for them",
            "at = page_offset<CHUNKS>(row, chunk());",
            "at = page_offset<CHUNKS>(row, chunk() ^ 1);",
        ),
        (
            "a ring one page too small",
            "pages + i % STAGES * STAGE_BYTES",
            "pages + i % (STAGES - 1) * STAGE_BYTES",
        ),
    ),
    *faults(
        "paged_split_k_mma",
        "mma_tile.cuh",
        (
            "swapped fragment: rows of K",
            "const int k_row = lane % 16, k_chunk = lane / 16;",
            "const int k_row = lane / 2, k_chunk = lane % 2;",
        ),
        (
            "swapped fragment: rows and chunks of V",
            "const int v_row = lane % 8 + lane / 16 * 8, v_chunk = lane / 8 % 2;",
            "const int v_row = lane % 16, v_chunk = lane / 16;",
        ),
        (
            "a new maximum of the second head alone rescales nothing",
            "if (f[r][n][0] != 1.0f || f[r][n][1] != 1.0f) {",
            "if (f[r][n][0] != 1.0f) {",
        ),
        (
            "sums over half of the lanes",
            "for (int step = 4; step < 32; step *= 2)\n                    l[n][h] +=",
            "for (int step = 4; step < 16; step *= 2)\n                    l[n][h] +=",
        ),
        (
            "swapped fragment: columns g and g + 8",
            "(lane / 4, 1)] = acc[n][e][h + 2];",
            "(lane / 4, 1)] = acc[n][e][h];",
        ),
        (
            "weights are not transposed",
            "p[r][n][1] = movmatrix_trans(pack_pair(x[2], x[3], Math()));",
            "p[r][n][1] = pack_pair(x[2], x[3], Math());",
        ),
        (
            "wrong mask: the second half of a page",
            "const int row = r * PAGE + i * 8 + lane / 4;",
            "const int row = r * PAGE + lane / 4;",
        ),
        (
            "wrong mask: the second page as the first",
            "const int row = r * PAGE + i * 8 + lane / 4;",
            "const int row = i * 8 + lane / 4;",
        ),
        (
            "the second page rescales like the first",
            "acc[n][e][i] *= f[r][n][i % 2];",
            "acc[n][e][i] *= f[0][n][i % 2];",
        ),
        (
            "alibi: the second page is as near as the first",
            "r * PAGE + lane / 4 + i / 2 * 8 + 1 - keys",
            "lane / 4 + i / 2 * 8 + 1 - keys",
        ),
        (
            "wrong shuffle mask: a maximum over half of the keys",
            "for (int step = 4; step < 32; step *= 2)\n                        top",
            "for (int step = 8; step < 32; step *= 2)\n                        top",
        ),
        (
            "wrong rescale: the heads of a pair share one factor",
            "acc[n][e][i] *= f[r][n][i % 2];",
            "acc[n][e][i] *= f[r][n][0];",
        ),
        (
            "wrong rescale: the sum keeps its old maximum",
            "l[n][h] = l[n][h] * f[r][n][h] +",
            "l[n][h] = l[n][h] +",
        ),
        (
            "the maximum is no integer: rescales are no powers of two",
            "fmaxf(m[n][h], ceilf(top))",
            "fmaxf(m[n][h], top)",
        ),
        (
            "window: a leaf's oldest keys are weighed though they are hidden",
            "there[i] = row < keys && (!(OPTIONS & WINDOW) || row >= hidden);",
            "there[i] = row < keys;",
        ),
        (
            "ALiBi counts from the key before the newest",
            "i / 2 * 8 + 1 - keys);",
            "i / 2 * 8 + 2 - keys);",
        ),
        (
            "queries that were brought into range stay there",
            "x[i] *= q.unit[n][i % 2];",
            ";",
        ),
    ),
    *faults(
        "paged_split_k_mma",
        "fragments.cuh",
        ("V is not transposed", "ldmatrix_x4_trans(a[0], row);", "ldmatrix_x4(a[0], row);"),
        (
            "out-of-bounds read: queries past the tile's heads",
            "min(n * 8 + lane / 4, heads - 1);",
            "n * 8 + lane / 4;",
        ),
        (
            "swapped fragment: halves of the queries",
            "16 + i % 2 * F::QUERY_STEP",
            "16 + (1 - i % 2) * F::QUERY_STEP",
        ),
        (
            "8 bits: columns of V that stay beside each other",
            "__byte_perm(r[i], 0, 0x3120)",
            "r[i]",
        ),
        (
            "8 bits: pairs of columns of K swapped",
            "a[i / 2][i % 2], a[i / 2][i % 2 + 2], TKV()",
            "a[i / 2][i % 2 + 2], a[i / 2][i % 2], TKV()",
        ),
        (
            "8 bits: queries in the order of 16",
            "QUERY_COLUMN = 4, QUERY_STEP = 2;",
            "QUERY_COLUMN = 2, QUERY_STEP = 8;",
        ),
    ),
    *faults(
        "paged_split_k_mma",
        "scores.cuh",
        (
            "the soft cap of a score before its scale",
            "inner = scale_of_unit / soft_cap, cap",
            "inner = 1.0f / soft_cap, cap",
        ),
        (
            "every head has the slope of the tile's first",
            "alibi_slopes + min(n * 8 + threadIdx.x % 4 * 2 + h, heads - 1)",
            "alibi_slopes",
        ),
    ),
    *faults(
        "paged_split_k_mma",
        "tree_merge.cuh",
        (
            "stale partial: the first to arrive merges, not the last",
            "before, 0) == count - 1;",
            "before, 0) == 0u;",
        ),
        (
            "the counter is not back at 0",
            "atom_inc_acq_rel(arrivals, count - 1)",
            "atom_inc_acq_rel(arrivals, count)",
        ),
        (
            "wrong rescale: every sibling at its own maximum",
            "const float f = exact_weight(mine.x, sum.m);",
            "const float f = 1.0f;",
        ),
        (
            "a sum over half of the siblings",
            "step < LANES; step *= 2) x +=",
            "step < LANES / 2; step *= 2) x +=",
        ),
        (
            "the first batch of siblings is lost",
            "sum.acc[c] = __fadd_rn(sum.acc[c], x[0][c]);",
            "sum.acc[c] = x[0][c];",
        ),
        (
            "the last four of five to eight siblings are lost",
            "(i & (i - 1)) == 0 && first + i >= count;",
            "(i & (i - 1)) == 0 && first + 2 * i >= count;",
        ),
    ),
    *faults(
        "paged_split_k_mma",
        "tree_node.cuh",
        (
            "half of the leaves are lost in the sum",
            "return left + sum_of_leaves<Node, N / 2>(leaves + N / 2 * stride, stride, lane);",
            "return left;",
        ),
        ("the right sibling is lost", "node = waiting + node;", "node = waiting;"),
        (
            "left siblings are taken from other units",
            "if (left < first) {",
            "if (left < 0) {",
        ),
        (
            "what waits at the end of a unit is lost",
            "emit(waiting, left);",
            "",
        ),
        (
            "the last sum of a unit is lost",
            "if (last) emit(node, mine);",
            "if (last) carried = false;",
        ),
        (
            "wrong rescale of the right sibling",
            "__fmul_rn(right.acc[i], h)",
            "__fmul_rn(right.acc[i], f)",
        ),
    ),
    *faults(
        "paged_split_k_mma",
        "schedule.cuh",
        (
            "the last unit of a sequence is left out",
            "max(quotient(unit.blocks + unit.span - 1, unit.span), 1);",
            "max(quotient(unit.blocks, unit.span), 1);",
        ),
        (
            "a warp's last leaf is cut by a page",
            "min(max(rest - (warp << leaf), 0), 1 << leaf);",
            "min(max(rest - (warp << leaf) - 1, 0), 1 << leaf);",
        ),
        (
            "runs of keys and heads swapped",
            "unit.index = quotient(u - units, heads);",
            "unit.index = quotient(u - units, unit.count);",
        ),
        (
            "a page that keys fill in part is dropped",
            "(seq_len + PAGE - 1) / PAGE - first",
            "seq_len / PAGE - first",
        ),
        (
            "states that begin within their unit are not seen",
            "around < begin || around + 2 * (block & -block) > end",
            "around < begin",
        ),
        ("window: pages are counted from the sequence's first", "first += first_page;", ""),
        (
            "sequences of unequal length are cut alike",
            "const bool alike = (unsigned int)longest * batch == total;",
            "const bool alike = true;",
        ),
        (
            "states of all sequences cut alike in one place",
            "slots = sequence * slots_before;",
            "slots = 0;",
        ),
        (
            "units are numbered from the end of their sequence",
            "units -= unit.count * heads; ",
            "",
        ),
    ),
]
