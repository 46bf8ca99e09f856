"""A batch cut from replayed traffic decodes the same through any two block sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import live_batch, trace_replay

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


def decode_both_ways(
    batch: trace_replay.LiveBatch, heads: cd.HeadConfig, backend: str
) -> tuple[list[np.ndarray], Any]:
    """Through 128-token allocator blocks cut to 16, and through 16-token blocks as they are."""
    xp = module_of(backend)
    caches = [
        live_batch.random_cache(batch, heads.num_kv_heads, dim, seed, xp)
        for seed, dim in enumerate((heads.head_dim, heads.value_dim))
    ]
    shape = (len(batch.seq_lens), heads.num_q_heads, heads.head_dim)
    rng = np.random.default_rng(5)
    q = xp.asarray(rng.standard_normal(shape, np.float32).astype(live_batch._DTYPE))
    plan = cd.plan_splits(batch.seq_lens, heads, "sglang-triton")
    arrays = live_batch.kernel_arrays(batch, *caches, 16, xp)
    cut_down = cd.decode_attention(q, *arrays, plan, backend=backend)
    table, *moved = live_batch.repage(batch, 16, *caches)
    small = (*moved, xp.asarray(table), xp.asarray(batch.seq_lens))
    as_is = cd.decode_attention(q, *small, plan, backend=backend)
    for a, b in zip(cut_down, as_is, strict=True):
        np.testing.assert_array_equal(to_host(a).astype(np.float64), to_host(b).astype(np.float64))
    # dense float64, gathered through the allocator's own table
    host = [to_host(c) for c in caches]
    exact = cd.reference.decode_attention(to_host(q), *host, batch.block_table, batch.seq_lens)
    return [to_host(a) for a in cut_down], exact


@pytest.mark.parametrize("backend", BACKENDS)
def test_generated_traffic(backend: str) -> None:
    requests = trace_replay.generate_trace(60, seed=1, requests_per_second=50)
    short = [r for r in requests if r.input_length < 900][:5]
    batch = cut(short, short[-1].arrival + 0.1, 128, 400)
    shared = np.unique(batch.block_table[batch.block_table >= 0], return_counts=True)[1]
    assert shared.max() > 1, "no two sequences share a prefix block"
    (out, lse), exact = decode_both_ways(batch, HEADS, backend)
    np.testing.assert_allclose(out.astype(np.float64), exact[0], atol=2e-2)
    np.testing.assert_allclose(lse, exact[1], atol=1e-4)


@pytest.mark.gpu
def test_the_conversation_trace() -> None:
    path = shared_path("traces/mooncake_conversation.jsonl")
    heads = cd.presets["llama-3-8b"]
    batch = cut(str(path), 600.0, 128, 4000)
    (out, lse), exact = decode_both_ways(batch, heads, "cuda")
    np.testing.assert_allclose(out.astype(np.float64), exact[0], atol=4e-3)
    np.testing.assert_allclose(lse, exact[1], atol=1e-4)
