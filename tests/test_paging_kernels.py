"""The pool joined to the kernels: what they read is what the sequence owns, byte for byte.

Keys and values are written where the pool's slots say, copied when it says so, and everything else
in the cache is NaN. A kernel that reads a slot of nobody shows it in its output; one that misses a
slot differs from dense attention over the tokens; one that reads more and throws it away shows it
in the count of distinct bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode.backends.emulator import trace_launch
from cupy_decode.paging import ShadowPool
from cupy_decode.tolerance import assert_close, bound

pytestmark = pytest.mark.emulator

HEADS = cd.HeadConfig(num_q_heads=4, num_kv_heads=2, head_dim=64)
BLOCK_SIZE = 32
SEQ_IDS = ("a", "b", "c", "d")


class Engine:
    """A cache filled through a pool, and the dense K and V of every sequence beside it."""

    def __init__(self) -> None:
        self.pool = ShadowPool(num_blocks=24, block_size=BLOCK_SIZE, seed=3)
        shape = (24, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim)
        self.caches = [np.full(shape, np.nan, np.float32) for _ in range(2)]
        self.dense: dict[str, list[np.ndarray]] = {}
        self._rng = np.random.default_rng(9)

    def allocate(self, seq_id: str, tokens: list[int], *, like: str | None = None) -> None:
        cached = self.pool.allocate(seq_id, tokens).num_cached_tokens
        shape = (0, HEADS.num_kv_heads, HEADS.head_dim)
        before = [np.empty(shape, np.float32)] * 2 if like is None else self.dense[like]
        self.dense[seq_id] = [x[:cached] for x in before]
        self._write(seq_id)
        self.pool.publish(seq_id)

    def append(self, seq_id: str, tokens: list[int]) -> None:
        self.pool.append(seq_id, tokens)
        for source, destination in self.pool.take_copies():
            for cache in self.caches:
                cache[destination] = cache[source]
        self._write(seq_id)

    def fork(self, seq_id: str, child_id: str) -> None:
        self.pool.fork(seq_id, child_id)
        self.dense[child_id] = list(self.dense[seq_id])

    def free(self, seq_id: str) -> None:
        self.pool.free(seq_id)

    def _write(self, seq_id: str) -> None:
        first, length = len(self.dense[seq_id][0]), self.pool.seq_len(seq_id)
        shape = (length - first, HEADS.num_kv_heads, HEADS.head_dim)
        new = [self._rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
        positions, rows = np.arange(first, length), np.zeros(length - first, int)
        table = self.pool.block_table([seq_id])
        slots = cd.slot_mapping(table, positions, BLOCK_SIZE, rows=rows)
        cd.write_kv(*new, *self.caches, slots, backend="reference")
        self.dense[seq_id] = [
            np.concatenate(pair) for pair in zip(self.dense[seq_id], new, strict=True)
        ]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Prefix reuse, forks with a copy, blocks used for the second time, neighbours everywhere."""
    engine = Engine()
    engine.allocate("gone", [7] * 150)
    engine.free("gone")
    engine.allocate("a", list(range(100)))
    engine.allocate("b", [*range(64), *range(500, 540)], like="a")
    engine.fork("b", "c")
    engine.append("b", [600] * 30)
    engine.append("c", [601] * 3)
    engine.allocate("d", [8])
    return engine


def views(engine: Engine, kernel_block_size: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Table and caches in kernel units: other numbers, the same memory."""
    table = engine.pool.block_table(SEQ_IDS)
    table = cd.map_to_kernel_blocks(table, BLOCK_SIZE, kernel_block_size)
    shape = (-1, kernel_block_size, HEADS.num_kv_heads, HEADS.head_dim)
    caches = [cache.reshape(shape) for cache in engine.caches]
    assert all(np.shares_memory(c, e) for c, e in zip(caches, engine.caches, strict=True))
    return table, caches


def query(batch: int) -> np.ndarray:
    shape = (batch, HEADS.num_q_heads, HEADS.head_dim)
    return np.random.default_rng(11).standard_normal(shape).astype(np.float32)


def run(engine: Engine, kernel_block_size: int, **options: Any) -> Any:
    table, caches = views(engine, kernel_block_size)
    lens = engine.pool.seq_lens(SEQ_IDS)
    return trace_launch(cd.decode_attention, query(4), *caches, table, lens, **options)


def test_the_batch_shares_copies_and_scatters_its_blocks(engine: Engine) -> None:
    pool = engine.pool
    blocks = [pool.block_ids(s) for s in SEQ_IDS]
    assert len(set(blocks[0][:2]) & set(blocks[1]) & set(blocks[2])) == 2
    assert blocks[1][3] != blocks[2][3]
    assert any(np.diff(row).tolist() != [1] * (len(row) - 1) for row in blocks[:3])
    table, lens = pool.block_table(SEQ_IDS), pool.seq_lens(SEQ_IDS)
    assert pool.check(table, lens, SEQ_IDS) == []
    fine, _ = views(engine, 16)
    assert pool.shadow.check(fine, lens, SEQ_IDS, block_size=16) == []


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("kernel_block_size", [16, 32])
def test_kernels_see_the_tokens_of_their_sequence(
    engine: Engine, kernel_block_size: int, num_splits: int
) -> None:
    out, lse = run(engine, kernel_block_size, num_splits=num_splits).result
    table, caches = views(engine, kernel_block_size)
    lens = engine.pool.seq_lens(SEQ_IDS)
    for row, seq_id in enumerate(SEQ_IDS):
        want = cd.reference.dense_attention(query(4)[row], *engine.dense[seq_id])
        arrays = (query(4)[[row]], *caches, table[[row]], lens[[row]])
        want_out, want_lse = (x[None] for x in want)
        allowed = bound(*arrays, want_out, want_lse)
        assert_close(out[[row]], lse[[row]], want_out, want_lse, allowed)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_both_block_sizes_give_the_same_bits(engine: Engine, num_splits: int) -> None:
    coarse, fine = (run(engine, size, num_splits=num_splits).result for size in (32, 16))
    for x, y in zip(coarse, fine, strict=True):
        assert np.isfinite(x).all()
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("kernel_block_size", [16, 32])
def test_no_byte_is_read_beyond_those_of_the_sequence(
    engine: Engine, kernel_block_size: int
) -> None:
    stage_1 = run(engine, kernel_block_size, num_splits=1).launches[0]
    lens = engine.pool.seq_lens(SEQ_IDS)
    for name in ("k_cache", "v_cache"):
        # One thread block for each sequence and KV head.
        read = np.sort(stage_1[name]["distinct_load_bytes"])
        owned = np.sort(np.repeat(lens * HEADS.head_dim * 4, HEADS.num_kv_heads))
        assert read.tolist() == owned.tolist()


def test_a_wrong_entry_is_caught_by_the_tags_before_a_kernel_runs(engine: Engine) -> None:
    table, caches = views(engine, BLOCK_SIZE)
    lens = engine.pool.seq_lens(SEQ_IDS)
    table[0, 1] = engine.pool.block_ids("d")[0]
    found = engine.pool.shadow.check(table, lens, SEQ_IDS)
    read = [(w.row, w.position + i) for w in found for i in range(w.num_slots)]
    assert read == [(0, p) for p in range(32, 64)]
    arrays = (query(4), *caches, table, lens)
    out, _ = trace_launch(cd.decode_attention, *arrays, num_splits=1).result
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()
