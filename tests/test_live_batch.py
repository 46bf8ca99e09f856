"""A batch cut from replayed traffic decodes the same through any two block sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import live_batch, tolerance, trace_replay

from .shared_data import shared_path
from .test_operators import BACKENDS, module_of, to_host

HEADS = cd.HeadConfig(8, 2, 64)


def cut(requests: Any, at: float, block_size: int, num_blocks: int) -> trace_replay.LiveBatch:
    replay = trace_replay.replay(
        requests, num_blocks=num_blocks, block_size=block_size, at=at, progress=False
    )
    assert replay.live_batch is not None
    assert len(replay.live_batch.seq_lens) > 1
    return replay.live_batch


def check_decode(
    batch: trace_replay.LiveBatch, heads: cd.HeadConfig, backend: str, kernel: str
) -> None:
    """The same bits through 128-token allocator blocks cut to 16 and through 16-token blocks as
    they are, and as close to dense float64 as a kernel must come.

    Some sequences, from the shortest to the longest, are held to a bound of their own, and the
    whole batch to the bound of those together.
    """
    xp = module_of(backend)
    caches = [
        live_batch.random_cache(batch, heads.num_kv_heads, dim, seed, xp)
        for seed, dim in enumerate((heads.head_dim, heads.value_dim))
    ]
    shape = (len(batch.seq_lens), heads.num_q_heads, heads.head_dim)
    rng = np.random.default_rng(5)
    q = xp.asarray(rng.standard_normal(shape, np.float32).astype(live_batch._DTYPE))
    plan = None
    if kernel == "readable":
        plan = cd.plan_splits(batch.seq_lens, heads, "sglang-triton")
    options = dict(plan=plan, kernel=kernel, backend=backend)
    arrays = live_batch.kernel_arrays(batch, *caches, 16, xp)
    cut_down = cd.decode_attention(q, *arrays, **options)
    table, *moved = live_batch.repage(batch, 16, *caches)
    small = (*moved, xp.asarray(table), xp.asarray(batch.seq_lens))
    as_is = cd.decode_attention(q, *small, **options)
    for a, b in zip(cut_down, as_is, strict=True):
        np.testing.assert_array_equal(to_host(a).astype(np.float64), to_host(b).astype(np.float64))
    out, lse = map(to_host, cut_down)
    # dense float64, gathered through the allocator's own table
    host = [to_host(c) for c in caches]
    q = to_host(q)
    ref_out, ref_lse = cd.reference.decode_attention(q, *host, batch.block_table, batch.seq_lens)

    def allowed(rows: Any) -> tolerance.Bound:
        tables = batch.block_table[rows], batch.seq_lens[rows]
        return tolerance.bound(q[rows], *host, *tables, ref_out[rows], ref_lse[rows])

    by_length = np.argsort(batch.seq_lens)
    some = by_length[np.linspace(0, len(by_length) - 1, 4).astype(int)]
    for b in some:
        row = slice(b, b + 1)
        tolerance.assert_close(out[row], lse[row], ref_out[row], ref_lse[row], allowed(row))
    tolerance.assert_close(out, lse, ref_out, ref_lse, allowed(some))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", ["readable", "fast"])
def test_generated_traffic(kernel: str, backend: str) -> None:
    requests = trace_replay.generate_trace(60, seed=1, requests_per_second=50)
    short = [r for r in requests if r.input_length < 900][:5]
    batch = cut(short, short[-1].arrival + 0.1, 128, 400)
    shared = np.unique(batch.block_table[batch.block_table >= 0], return_counts=True)[1]
    assert shared.max() > 1, "no two sequences share a prefix block"
    check_decode(batch, HEADS, backend, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["readable", "fast"])
def test_the_conversation_trace(kernel: str) -> None:
    path = shared_path("traces/mooncake_conversation.jsonl")
    batch = cut(str(path), 600.0, 128, 4000)
    check_decode(batch, cd.presets["llama-3-8b"], "cuda", kernel)
