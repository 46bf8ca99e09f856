"""Random paged problems: permuted pages, poisoned slots, absurd ids in unused table columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_decode.heads import HeadConfig

#: What no operator may look at.
UNUSED_BLOCK_ID = 2**31 - 1


def paged_problem(
    seed: int,
    seq_lens: Any,
    heads: HeadConfig,
    *,
    block_size: int = 16,
    dtype: Any = np.float32,
    poison: float = np.nan,
    spare_blocks: int = 2,
) -> dict[str, np.ndarray]:
    """Arguments of ``decode_attention`` with standard normal queries, keys and values.

    Pages lie in random order among ``spare_blocks`` that nobody owns; every slot without a key
    holds ``poison`` in both caches, and the table has one column more than any row needs.
    """
    rng = np.random.default_rng(seed)
    lens = np.asarray(seq_lens, np.int32)
    pages = -(-lens // block_size)
    ids = rng.permutation(int(pages.sum()) + spare_blocks)
    table = np.full((len(lens), int(pages.max()) + 1), UNUSED_BLOCK_ID, np.int32)
    shape = (len(ids), block_size, heads.num_kv_heads)
    k_cache = np.full((*shape, heads.head_dim), poison, np.float64)
    v_cache = np.full((*shape, heads.value_dim), poison, np.float64)
    taken = 0
    for b, s in enumerate(lens):
        own = ids[taken : taken + pages[b]]
        taken += pages[b]
        table[b, : pages[b]] = own
        j = np.arange(s)
        k_cache[own[j // block_size], j % block_size] = rng.standard_normal((s, *k_cache.shape[2:]))
        v_cache[own[j // block_size], j % block_size] = rng.standard_normal((s, *v_cache.shape[2:]))
    q = rng.standard_normal((len(lens), heads.num_q_heads, heads.head_dim))
    return {
        "q": q.astype(dtype),
        "k_cache": k_cache.astype(dtype),
        "v_cache": v_cache.astype(dtype),
        "block_table": table,
        "seq_lens": lens,
    }
