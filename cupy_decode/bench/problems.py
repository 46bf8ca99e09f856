"""Random paged problems on the GPU, as many cold caches as a measurement rotates over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_decode.heads import HeadConfig

#: Caches are rotated until one pass over all of them reads this many bytes ...
_ROTATION_BYTES = 2 << 30
#: ... but not over more than this many.
_MAX_ROTATION = 32
#: Elements converted at a time while caches are filled.
_CHUNK = 1 << 27


@dataclass(frozen=True)
class Problem:
    """One decode step over several caches that hold different data in the same pages.

    Attributes
    ----------
    heads : HeadConfig
    q : (batch, num_q_heads, head_dim)
    k_caches, v_caches : list of (num_blocks, block_size, num_kv_heads, head_dim)
    block_table : (batch, max_blocks) int32
    seq_lens : (batch,) int32
    pages : (num_pages,) int32
        The entries of ``block_table`` in use, sequence after sequence.
    kv_dtype : {"e4m3", "e5m2"} or None
        What the bytes of 8-bit caches mean.
    """

    heads: HeadConfig
    q: Any
    k_caches: list[Any]
    v_caches: list[Any]
    block_table: Any
    seq_lens: Any
    pages: Any
    kv_dtype: str | None = None

    def arguments(self, copy: int = 0) -> dict[str, Any]:
        """The five arrays of ``decode_attention``, with one of the caches."""
        return dict(
            q=self.q,
            k_cache=self.k_caches[copy],
            v_cache=self.v_caches[copy],
            block_table=self.block_table,
            seq_lens=self.seq_lens,
        )


def random_pool(num_elements: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
    """A flat CuPy array of normally distributed numbers, filled in chunks; bytes of 8-bit floats.

    An e5m2 is the upper half of a float16. The same bytes read as e4m3 are numbers of about that
    size too, and none is NaN.
    """
    import cupy
    import ml_dtypes

    store = {"bfloat16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8}
    if dtype not in (*store, "float16", "float32"):
        raise ValueError(f"dtype must be bfloat16, float16, float32, e4m3 or e5m2; got {dtype!r}")
    random = cupy.random.RandomState(seed)
    pool = cupy.empty(num_elements, store.get(dtype) or np.dtype(dtype))
    for begin in range(0, num_elements, _CHUNK):
        part = pool[begin : begin + _CHUNK]
        normal = random.standard_normal(part.size, dtype=np.float32)
        # A bfloat16 is the upper half of a float32; cut off rather than rounded, it is as random.
        if dtype == "bfloat16":
            part[...] = normal.view(np.uint32) >> 16
        elif dtype in store:
            part[...] = normal.astype(np.float16).view(np.uint16) >> 8
        else:
            part[...] = normal
    return pool.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else pool


def problem(
    heads: HeadConfig,
    seq_lens: Any,
    *,
    block_size: int = 16,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    seed: int = 0,
    copies: int | None = None,
    pool: Any = None,
) -> Problem:
    """Random queries and caches on the current device, pages in random order.

    Parameters
    ----------
    heads : HeadConfig
    seq_lens : (batch,) integers
        On the host.
    block_size : int
    dtype : {"bfloat16", "float16", "float32"}
        Of the queries, and of the caches where ``kv_dtype`` is not given.
    kv_dtype : {"e4m3", "e5m2"}, optional
        Caches of 8-bit floats.
    seed : int
    copies : int, optional
        Caches to rotate over. Default: as many as read 2 GiB, from 1 to 32, and at least 2 where
        one launch reads less.
    pool : flat array, optional
        Random elements of the caches' type to cut the caches from, as ``random_pool`` makes; then
        nothing is generated. K and V come from different ends of it.

    Raises
    ------
    ValueError
        If ``pool`` is too small for one copy.
    """
    import cupy

    lens = np.asarray(seq_lens, np.int32)
    pages = -(-lens // block_size)
    num_blocks = int(pages.sum()) + 2  # two spare pages that nobody owns
    shape = (num_blocks, block_size, heads.num_kv_heads)
    k_size, v_size = int(np.prod(shape)) * heads.head_dim, int(np.prod(shape)) * heads.value_dim
    item = 1 if kv_dtype else 4 if dtype == "float32" else 2
    if copies is None:
        copies = min(max(-(-_ROTATION_BYTES // ((k_size + v_size) * item)), 1), _MAX_ROTATION)
    if pool is None:
        pool = random_pool(copies * (k_size + v_size), kv_dtype or dtype, seed)
    copies = min(copies, pool.size // (k_size + v_size))
    if copies < 1:
        raise ValueError(
            f"pool holds {pool.size} elements but one cache needs {k_size + v_size}; make it larger"
        )
    start = (pool.size - copies * v_size) // 64 * 64  # the kernels read whole 16-byte vectors
    v_pool = pool[start : start + copies * v_size]
    k_caches = [
        pool[i * k_size : (i + 1) * k_size].reshape(*shape, heads.head_dim) for i in range(copies)
    ]
    v_caches = [
        v_pool[i * v_size : (i + 1) * v_size].reshape(*shape, heads.value_dim)
        for i in range(copies)
    ]

    rng = np.random.default_rng(seed)
    ids = rng.permutation(num_blocks).astype(np.int32)[: pages.sum()]
    table = np.full((len(lens), max(int(pages.max()), 1)), 2**31 - 1, np.int32)
    table[np.arange(table.shape[1]) < pages[:, None]] = ids
    q_shape = (len(lens), heads.num_q_heads, heads.head_dim)
    q = random_pool(int(np.prod(q_shape)), dtype, seed + 1).reshape(q_shape)
    table, lens, ids = (cupy.asarray(x) for x in (table, lens, ids))
    return Problem(heads, q, k_caches, v_caches, table, lens, ids, kv_dtype)
