"""Run a batch that was cut from a replayed trace through the kernels.

The batch comes with the allocator's own table: shared prefixes, scattered blocks, tails. The cache
gets random keys and values, so what is checked is the paging, and what is timed is real.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cupy_decode import decode, policies
from cupy_decode.heads import HeadConfig
from cupy_decode.paging import BlockPool, map_to_kernel_blocks
from cupy_decode.trace_replay import LiveBatch

_DTYPE = np.dtype(ml_dtypes.bfloat16)


def random_cache(batch: LiveBatch, num_kv_heads: int, dim: int, seed: int, xp: Any) -> Any:
    """A bfloat16 cache in allocator blocks; blocks that no row of the table names hold NaN.

    Returns
    -------
    (num_blocks, block_size, num_kv_heads, dim) array of module ``xp``
    """
    cache = xp.full((batch.num_blocks, batch.block_size, num_kv_heads, dim), np.nan, _DTYPE)
    rng = xp.random.default_rng(seed)
    for block in np.unique(batch.block_table[batch.block_table >= 0]).tolist():
        rows = rng.standard_normal((batch.block_size, num_kv_heads, dim), dtype=np.float32)
        cache[block] = rows.astype(_DTYPE)
    return cache


def repage(batch: LiveBatch, block_size: int, *caches: Any, seed: int = 0) -> tuple[Any, ...]:
    """The same tokens as another allocator would hold them: its table and its caches.

    Every sequence is allocated anew, without sharing, from a shuffled pool of ``block_size``-token
    blocks, and its tokens are copied there.

    Returns
    -------
    block_table : (batch, width) int32
    *caches : (num_blocks, block_size, num_kv_heads, dim)
        One for each of ``caches``, NaN where no token is.
    """
    need = int((-(-batch.seq_lens.astype(np.int64) // block_size)).sum())
    pool = BlockPool(need + 3, block_size, seed=seed, prefix_caching=False)
    rows = list(range(len(batch.seq_lens)))
    for b in rows:
        pool.allocate(b, int(batch.seq_lens[b]))
    table = pool.block_table(rows)
    moved = []
    for cache in caches:
        xp = np if isinstance(cache, np.ndarray) else _module_of(cache)
        to = xp.full((pool.num_blocks, block_size, *cache.shape[2:]), np.nan, cache.dtype)
        for b, length in enumerate(batch.seq_lens.tolist()):
            keys = np.arange(length)
            source = batch.block_table[b, keys // batch.block_size], keys % batch.block_size
            target = table[b, keys // block_size], keys % block_size
            to[tuple(map(xp.asarray, target))] = cache[tuple(map(xp.asarray, source))]
        moved.append(to)
    return table, *moved


def _module_of(array: Any) -> Any:
    import cupy

    return cupy.get_array_module(array)


def kernel_arrays(
    batch: LiveBatch, k_cache: Any, v_cache: Any, kernel_block_size: int, xp: Any
) -> tuple[Any, Any, Any, Any]:
    """Caches cut to kernel blocks, the kernel's table, and the lengths, on ``xp``'s side."""
    table = map_to_kernel_blocks(batch.block_table, batch.block_size, kernel_block_size)
    cut = (c.reshape(-1, kernel_block_size, *c.shape[2:]) for c in (k_cache, v_cache))
    return *cut, xp.asarray(table), xp.asarray(batch.seq_lens)


def run(
    batch: LiveBatch,
    heads: HeadConfig,
    *,
    kernel_block_size: int = 16,
    policy_names: tuple[str, ...] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Time every policy's plan for the batch on the GPU.

    Parameters
    ----------
    batch : LiveBatch
    heads : HeadConfig
    kernel_block_size : int
        Divides the allocator's block size.
    policy_names : tuple of str, optional
        Policies that need no parameter; all of them when left out.

    Returns
    -------
    list of dict
        One row per policy: its rows, microseconds, share of the read bandwidth measured in the same
        run, and the largest difference from the first policy's output.
    """
    import cupy

    from cupy_decode import bench, traffic

    device = policies.Device(num_sms=cupy.cuda.Device().attributes["MultiProcessorCount"])
    k_cache = random_cache(batch, heads.num_kv_heads, heads.head_dim, seed, cupy)
    v_cache = random_cache(batch, heads.num_kv_heads, heads.value_dim, seed + 1, cupy)
    arrays = kernel_arrays(batch, k_cache, v_cache, kernel_block_size, cupy)
    shape = (len(batch.seq_lens), heads.num_q_heads, heads.head_dim)
    q = cupy.random.default_rng(seed + 2).standard_normal(shape, dtype=np.float32).astype(_DTYPE)
    limit = bench.read_bandwidth()
    num_bytes = traffic.kv_bytes(batch.seq_lens, heads)
    first: Any = None
    rows = []
    for name in policy_names or parameterless_policies():
        plan = policies.plan_splits(batch.seq_lens, heads, name, device).to(cupy)
        out, _ = decode.decode_attention(q, *arrays, plan)
        out = out.astype(np.float32)
        first = out if first is None else first
        us = bench.time_us(partial(decode.decode_attention, q, *arrays, plan))
        rows.append(
            {
                "policy": name,
                "rows": int(plan.split_offsets[-1]),
                "microseconds": us,
                "read_fraction": num_bytes / (us * 1e-6) / limit,
                "max_difference": float(cupy.abs(out - first).max()),
            }
        )
    return rows


def parameterless_policies() -> tuple[str, ...]:
    """Registered policies that need no option."""
    return tuple(n for n in policies.names() if n not in ("fixed", "split-size", "equal-shares"))
