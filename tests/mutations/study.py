"""Checks and faults of ``study_mma``, the steps on the way to the fast kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cupy_decode import reference, tolerance
from cupy_decode.bench.study import STUDIES, Study
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import Partials, SplitPlan

from ..problems import paged_problem
from .checks import Check, Files, run
from .faults import faults


def attend(study: Study, dtype: Any, files: Files, schedule: Any) -> None:
    """Ragged lengths, a sequence without keys and splits of unequal counts, against float64."""
    problem = paged_problem(3, (150, 0, 1, 33, 500), HeadConfig(8, 2, 128), dtype=np.dtype(dtype))
    q = problem["q"]
    batch, num_q_heads, head_dim = q.shape
    plan = SplitPlan.from_num_splits(problem["seq_lens"], 2)
    rows = int(plan.split_offsets[-1])
    partials = Partials(
        np.full((rows, num_q_heads, head_dim), np.nan, np.float32),
        np.full((rows, num_q_heads), np.nan, np.float32),
        np.full((rows, num_q_heads), np.nan, np.float32),
        plan,
    )
    arrivals = np.zeros((batch, 2), np.uint32)
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:2], np.nan, np.float32)
    where = dict(plan=plan, splits=2, partials=partials, arrivals=arrivals, out=out, lse=lse)
    run(study.launch(**problem, **where), files, schedule)
    assert not arrivals.any(), "a counter did not return to 0"
    if not study.merge:
        merged, lse = reference.reduce_splits(partials)
        out[...] = merged.astype(np.float32).astype(q.dtype)
    ref_out, ref_lse = reference.decode_attention(**problem)
    allowed = tolerance.bound(**problem, ref_out=ref_out, ref_lse=ref_lse)
    tolerance.assert_close(out, lse, ref_out, ref_lse, allowed)


CHECKS_STUDY: list[Check] = [
    partial(attend, STUDIES["tensor cores"], np.float16),
    partial(attend, STUDIES["one launch"], ml_dtypes.bfloat16),
]

FAULTS_STUDY = faults(
    "study_mma",
    "study_mma.cu",
    (
        "queries as rows: no mask for keys past the end",
        "x = i / 2 * 8 + 2 * t + i % 2 < keys ? x * scale_log2 : neg_inf();",
        "x = x * scale_log2;",
    ),
    (
        "queries as columns: no mask for keys past the end",
        "x = g + 8 * i < keys ? x * scale_log2 : neg_inf();",
        "x = x * scale_log2;",
    ),
    (
        "the maximum of a quarter of the keys",
        "M = fmaxf(M, __shfl_xor_sync(0xffffffffu, M, 2));",
        "",
    ),
    ("queries as columns: the sum keeps its old maximum", "m[h] = M, l[h] *= f[h];", "m[h] = M;"),
    (
        "weights enter untransposed",
        "{movmatrix_trans(pack_pair(s[0], s[1], T())),",
        "{pack_pair(s[0], s[1], T()),",
    ),
    (
        "V's rows in K's order",
        "at(v, lane % 8 + lane / 16 * 8, 2 * e + lane / 8 % 2)",
        "at(v, lane % 16, 2 * e + lane / 16)",
    ),
    ("slots past the end are read", "v_cache + from, key + r < end", "v_cache + from, true"),
    ("a page is used before it has come", "cp_async_wait<STAGES - 1>();", ""),
    (
        "a page is overwritten while it is read",
        "__syncwarp();            // no lane reads",
        "// no lane reads",
    ),
    (
        "the ids of the ring lag behind",
        "next_id = page_id(i + STAGES + 1);",
        "next_id = page_id(i + STAGES);",
    ),
    (
        "states overwrite pages that are still read",
        "__syncthreads();             // the states lie",
        "// the states lie",
    ),
    (
        "warps with different maxima are added as they are",
        "const float f = weight(states[w][h][D], M);",
        "const float f = 1.0f;",
    ),
    ("the first to arrive merges", "if (!last) return;", "if (last) return;"),
    ("the counter counts one split too many", "kv_head, splits - 1) ==", "kv_head, splits) =="),
    (
        "splits with different maxima are added as they are",
        "const float f = weight(m[at], M);",
        "const float f = 1.0f;",
    ),
)
