"""Every operator in plain NumPy and float64, under the names of the CUDA kernels.

Written to be checked by eye: one loop per sequence, one formula per line, no arithmetic shared with
the kernels. A sequence is never padded to its neighbours, so its bits do not depend on them.

What holds for every operator
-----------------------------
- Query head ``i`` reads KV head ``i // group_size``; the query is the newest key.
- A score is ``scale * (q . k)``, then the soft cap, then the ALiBi bias; keys outside the window
  are not scored at all. Keys and values of a quantised cache are multiplied by their scales first.
- A sequence without a visible key gives ``out`` 0 and ``lse`` -inf. So does one whose scores are
  all -inf: nothing in it has weight.
- A NaN (or +inf) score makes ``out`` and ``lse`` of its head NaN. A NaN in a visible value row
  makes ``out`` NaN, however small its weight.
- ``lse`` is in natural log and leaves sinks out. Only ``m`` of partial states is in log2 units.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from cupy_decode.heads import INT32_MAX
from cupy_decode.plan import Partials, SplitPlan

LOG2_E = math.log2(math.e)

_FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}

# Non-finite inputs and empty states are part of the contract and are tested as such.
_quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")


def _f64(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def gather_kv(
    cache: Any, block_table_row: Any, seq_len: int, *, begin: int = 0, row: int = 0
) -> np.ndarray:
    """Keys or values ``begin .. seq_len`` of one sequence, in order.

    Parameters
    ----------
    cache : (num_blocks, block_size, num_kv_heads, dim)
    block_table_row : (max_blocks,) integers
        Entries that hold no key of the range are not looked at.
    seq_len : int
        End of the range.
    begin : int
        First key of the range.
    row : int
        Row of the block table, for the error message.

    Returns
    -------
    (seq_len - begin, num_kv_heads, dim) array of the cache's dtype

    Raises
    ------
    ValueError
        If the row is too short or names a block that the cache does not have.
    """
    num_blocks, block_size = cache.shape[:2]
    keys = np.arange(begin, seq_len)
    columns = keys // block_size
    if keys.size and columns[-1] >= len(block_table_row):
        raise ValueError(
            f"block_table row {row} has {len(block_table_row)} columns but seq_lens[{row}] = "
            f"{seq_len} needs {columns[-1] + 1} of block_size {block_size}"
        )
    blocks = np.asarray(block_table_row)[columns].astype(np.int64)
    outside = (blocks < 0) | (blocks >= num_blocks)
    if outside.any():
        at = int(outside.argmax())
        raise ValueError(
            f"block_table[{row}, {columns[at]}] is {blocks[at]} but the cache has blocks "
            f"0..{num_blocks - 1}"
        )
    return np.asarray(cache)[blocks, keys % block_size]


def elements(cache: Any, kv_dtype: str | None) -> np.ndarray:
    """A cache with the elements that ``kv_dtype`` gives its bytes; other caches as they are."""
    if kv_dtype in _FP8 and cache.dtype == np.uint8:
        return np.asarray(cache).view(_FP8[kv_dtype])
    return np.asarray(cache)


def factors(scale: Any, batch: int, num_kv_heads: int) -> np.ndarray:
    """Scales of a quantised cache as (batch, num_kv_heads, 1), from any of their forms."""
    shape = (batch, num_kv_heads)
    return np.broadcast_to(1.0 if scale is None else _f64(scale), shape)[..., None]


def _scores(
    q: np.ndarray,
    k: np.ndarray,
    distance: np.ndarray,
    scale: float,
    logits_soft_cap: float | None,
    slopes: np.ndarray | None,
) -> np.ndarray:
    """Scores of ``q`` (g, head_dim) against ``k`` (n, head_dim); ``distance`` is j - (s - 1)."""
    s = scale * (q @ k.T)
    if logits_soft_cap is not None:
        s = logits_soft_cap * np.tanh(s / logits_soft_cap)
    if slopes is not None:
        s = s + slopes[:, None] * distance
    return s


def _groups(num_q_heads: int, num_kv_heads: int) -> list[slice]:
    """Query heads of each KV head."""
    g = num_q_heads // num_kv_heads
    return [slice(i * g, (i + 1) * g) for i in range(num_kv_heads)]


@_quiet
def dense_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one query token over keys in order; no pages, no splits.

    Parameters
    ----------
    q : (num_q_heads, head_dim)
    k : (n, num_kv_heads, head_dim)
    v : (n, num_kv_heads, v_head_dim)
    scale : float, optional
        ``head_dim ** -0.5`` when left out.
    window : int, optional
        Newest keys that are visible, the current one included.
    logits_soft_cap : float, optional
        Scores become ``cap * tanh(score / cap)``.
    alibi_slopes : (num_q_heads,), optional
        Adds ``slope * (j - (n - 1))``, which is 0 at the newest key.
    sinks : (num_q_heads,), optional
        One extra logit per query head that has weight but no value.

    Returns
    -------
    out : (num_q_heads, v_head_dim) float64
    lse : (num_q_heads,) float64
        Natural log of the sum of ``exp(score)`` over the visible keys, sink left out.
    """
    q, k, v = _f64(q), _f64(k), _f64(v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if window is not None:
        first = max(0, len(k) - int(window))
        k, v = k[first:], v[first:]
    distance = np.arange(len(k)) - (len(k) - 1.0)

    out = np.zeros((q.shape[0], v.shape[-1]))
    lse = np.full(q.shape[0], -np.inf)
    for kv_head, group in enumerate(_groups(q.shape[0], k.shape[1])):
        slopes = None if alibi_slopes is None else _f64(alibi_slopes)[group]
        s = _scores(q[group], k[:, kv_head], distance, scale, logits_soft_cap, slopes)
        top = s.max(axis=1, initial=-np.inf)
        p = np.exp(s - top[:, None])
        total = p.sum(axis=1)
        weight = total if sinks is None else total + np.exp(_f64(sinks)[group] - top)
        seen = top != -np.inf
        out[group] = np.where(seen[:, None], (p @ v[:, kv_head]) / weight[:, None], 0.0)
        lse[group] = np.where(seen, top + np.log(total), -np.inf)
    return out, lse


def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    plan: SplitPlan | None = None,
    scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one query token per sequence over a paged cache.

    Parameters
    ----------
    q : (batch, num_q_heads, head_dim)
    k_cache : (num_blocks, block_size, num_kv_heads, head_dim)
    v_cache : (num_blocks, block_size, num_kv_heads, v_head_dim)
    block_table : (batch, max_blocks) integers
    seq_lens : (batch,) integers
        Keys of each sequence, the current one included.
    plan : SplitPlan, optional
        Compute by splits and reduce them; without it each sequence is one dense softmax.
    scale, window, logits_soft_cap, alibi_slopes, sinks
        As in ``dense_attention``.
    kv_dtype : {"e4m3", "e5m2"}, optional
        What the bytes of a uint8 cache are.
    k_scale, v_scale : optional
        What keys and values are multiplied by: a number, (num_kv_heads,) or
        (batch, num_kv_heads).

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim) float64
    lse : (batch, num_q_heads) float64, natural log, sinks left out

    Raises
    ------
    ValueError
        If a table entry that holds visible keys is missing or outside the cache.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "logits_soft_cap": logits_soft_cap,
        "alibi_slopes": alibi_slopes,
    }
    if plan is not None:
        partials = paged_split_k(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            plan,
            window=window,
            kv_dtype=kv_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
            **options,
        )
        return reduce_splits(partials, sinks=sinks)
    batch, num_q_heads = q.shape[:2]
    k_cache, v_cache = elements(k_cache, kv_dtype), elements(v_cache, kv_dtype)
    k_factor, v_factor = (factors(x, batch, k_cache.shape[2]) for x in (k_scale, v_scale))
    out = np.zeros((batch, num_q_heads, v_cache.shape[-1]))
    lse = np.full((batch, num_q_heads), -np.inf)
    for b, s in enumerate(int(n) for n in seq_lens):
        first = 0 if window is None else max(0, s - int(window))
        k = _f64(gather_kv(k_cache, block_table[b], s, begin=first, row=b)) * k_factor[b]
        v = _f64(gather_kv(v_cache, block_table[b], s, begin=first, row=b)) * v_factor[b]
        out[b], lse[b] = dense_attention(q[b], k, v, sinks=sinks, **options)
    return out, lse


@_quiet
def paged_split_k(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    plan: SplitPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    shard: tuple[int, int] = (0, INT32_MAX),
) -> Partials:
    """Stage 1: the softmax state of every split.

    Parameters
    ----------
    q, k_cache, v_cache, block_table, seq_lens, scale, window, logits_soft_cap, alibi_slopes
    kv_dtype, k_scale, v_scale
        As in ``decode_attention``.
    plan : SplitPlan
        Host plan. Its ranges end at the lengths given here.
    shard : (int, int)
        Keys of every sequence that are read; there are no others here.

    Returns
    -------
    Partials
        Float64 ``acc``, ``m`` (log2 units) and ``l``. A split without a visible key holds
        (0, -inf, 0). Rows that the plan does not use hold NaN, so that reading one shows.
    """
    batch, num_q_heads, head_dim = q.shape
    k_cache, v_cache = elements(k_cache, kv_dtype), elements(v_cache, kv_dtype)
    k_factor, v_factor = (factors(x, batch, k_cache.shape[2]) for x in (k_scale, v_scale))
    scale = head_dim**-0.5 if scale is None else float(scale)
    acc = np.full((plan.capacity, num_q_heads, v_cache.shape[-1]), np.nan)
    m = np.full((plan.capacity, num_q_heads), np.nan)
    l = np.full((plan.capacity, num_q_heads), np.nan)  # noqa: E741
    for row, (b, begin, end) in enumerate(plan.ranges(seq_lens)):
        acc[row], m[row], l[row] = 0.0, -np.inf, 0.0
        s = int(seq_lens[b])
        first = begin if window is None else max(begin, s - int(window))
        first, end = max(first, shard[0]), min(end, shard[1])
        if first >= end:
            continue
        k = _f64(gather_kv(k_cache, block_table[b], end, begin=first, row=b)) * k_factor[b]
        v = _f64(gather_kv(v_cache, block_table[b], end, begin=first, row=b)) * v_factor[b]
        distance = np.arange(first, end) - (s - 1.0)
        for kv_head, group in enumerate(_groups(num_q_heads, k_cache.shape[2])):
            slopes = None if alibi_slopes is None else _f64(alibi_slopes)[group]
            score = _scores(
                _f64(q[b, group]), k[:, kv_head], distance, scale, logits_soft_cap, slopes
            )
            x = score * LOG2_E
            top = x.max(axis=1)
            seen = top != -np.inf
            p = np.where(seen[:, None], np.exp2(x - top[:, None]), 0.0)
            m[row, group] = top
            l[row, group] = p.sum(axis=1)
            acc[row, group] = np.where(seen[:, None], p @ v[:, kv_head], 0.0)
    return Partials(acc, m, l, plan)


@_quiet
def paged_split_k_leaves(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    plan: SplitPlan,
    *,
    leaf_keys: list[int],
    leaf_rows: int,
    shard: tuple[int, int],
    window: int | None = None,
    **options: Any,
) -> Partials:
    """Stage 1 by leaves: the state of every visible leaf, with an integer maximum.

    Parameters
    ----------
    q, k_cache, v_cache, block_table, seq_lens, window, **options
        As in ``paged_split_k``.
    plan : SplitPlan
        Carried along; it has no say in what is added.
    leaf_keys : list of int
        Keys of a leaf, by sequence.
    leaf_rows : int
        Rows for each sequence.
    shard : (int, int)
        Keys of every sequence that are read.

    Returns
    -------
    Partials
        With a ``width`` of 1 wherever a leaf has a visible key. Other rows hold NaN.
    """
    lens = [int(s) for s in seq_lens]
    bounds = [range(0, max(s, 1), keys) for s, keys in zip(lens, leaf_keys, strict=True)]
    leaves = SplitPlan.from_bounds(bounds, lens)
    arrays = (q, k_cache, v_cache, block_table, seq_lens)
    found = paged_split_k(*arrays, leaves, window=window, shard=shard, **options)
    width = np.zeros((len(lens), leaf_rows), np.int32)
    rows = (width.size, *found.m.shape[1:])
    acc = np.full((*rows, found.acc.shape[2]), np.nan)
    m, l = np.full(rows, np.nan), np.full(rows, np.nan)  # noqa: E741
    for row, (b, begin, end) in enumerate(leaves.ranges(lens)):
        first = max(begin, shard[0], 0 if window is None else lens[b] - int(window))
        if first < min(end, shard[1]):
            i = begin // leaf_keys[b]
            at = b * leaf_rows + i
            m[at] = np.ceil(found.m[row])
            factor = np.where(m[at] == -np.inf, 1.0, np.exp2(found.m[row] - m[at]))
            l[at], acc[at] = found.l[row] * factor, found.acc[row] * factor[:, None]
            width[b, i] = 1
    return Partials(acc, m, l, plan, width)


@_quiet
def reduce_splits(partials: Partials, *, sinks: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Stage 2: one global maximum, rescale, add in split order, divide once.

    Parameters
    ----------
    partials : Partials
        Rows past ``plan.split_offsets[batch]`` are not read; where ``l`` is 0, neither ``acc`` nor
        ``m`` counts.
    sinks : (num_q_heads,), optional

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim) float64
    lse : (batch, num_q_heads) float64, natural log, sinks left out
    """
    if partials.width is not None:
        held = partials.width > 0
        own = np.flatnonzero(held)
        offsets = np.concatenate([[0], np.cumsum(held.sum(axis=1))]).astype(np.int32)
        plan = SplitPlan(offsets, np.zeros(len(own), np.int32))
        partials = Partials(partials.acc[own], partials.m[own], partials.l[own], plan)
    offsets = partials.plan.to_host().split_offsets
    batch = len(offsets) - 1
    num_q_heads, v_head_dim = partials.acc.shape[1:]
    out = np.zeros((batch, num_q_heads, v_head_dim))
    lse = np.full((batch, num_q_heads), -np.inf)
    for b in range(batch):
        rows = slice(int(offsets[b]), int(offsets[b + 1]))
        acc, m, l = (_f64(x[rows]) for x in (partials.acc, partials.m, partials.l))  # noqa: E741
        live = l != 0  # and not l > 0: a NaN sum has to reach the output
        top = np.where(live, m, -np.inf).max(axis=0, initial=-np.inf)
        total = np.zeros(num_q_heads)
        numerator = np.zeros((num_q_heads, v_head_dim))
        for i in range(len(m)):
            weight = np.exp2(m[i] - top)
            total += np.where(live[i], weight * l[i], 0.0)
            numerator += np.where(live[i][:, None], weight[:, None] * acc[i], 0.0)
        denominator = total if sinks is None else total + np.exp2(_f64(sinks) * LOG2_E - top)
        some = live.any(axis=0)
        out[b] = np.where(some[:, None], numerator / denominator[:, None], 0.0)
        lse[b] = np.where(some, (top + np.log2(total)) / LOG2_E, -np.inf)
    return out, lse


@_quiet
def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, sinks: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the union of two disjoint key sets, from the outputs over each.

    Parameters
    ----------
    out_a, out_b : (tokens, num_q_heads, v_head_dim)
        Normalised outputs, computed without sinks.
    lse_a, lse_b : (tokens, num_q_heads)
        Natural log. Both -inf and +inf mean "no keys": some kernels write the one, some the other.
    sinks : (num_q_heads,), optional
        Give them to the last merge only.

    Returns
    -------
    out : (tokens, num_q_heads, v_head_dim) float64
    lse : (tokens, num_q_heads) float64, sinks left out

    Notes
    -----
    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out`` is the mean weighted by ``exp(lse - max)``.
    A side of weight 0 is not read, so what it holds cannot matter.
    """
    lse_a, lse_b = (np.where(np.isposinf(x), -np.inf, x) for x in (_f64(lse_a), _f64(lse_b)))
    top = np.maximum(lse_a, lse_b)
    some = top != -np.inf
    weight_a, weight_b = (np.where(some, np.exp(x - top), 0.0)[..., None] for x in (lse_a, lse_b))
    total = weight_a + weight_b
    denominator = total if sinks is None else total + np.exp(_f64(sinks) - top)[..., None]
    sum_a = np.where(weight_a != 0, weight_a * _f64(out_a), 0.0)
    sum_b = np.where(weight_b != 0, weight_b * _f64(out_b), 0.0)
    out = np.where(some[..., None], (sum_a + sum_b) / denominator, 0.0)
    return out, np.where(some, top + np.log(total[..., 0]), -np.inf)


def write_kv(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """Write new key and value rows into their cache slots, in place.

    Parameters
    ----------
    k : (tokens, num_kv_heads, head_dim)
    v : (tokens, num_kv_heads, v_head_dim)
    k_cache, v_cache : (num_blocks, block_size, num_kv_heads, head_dim or v_head_dim)
        Written in place, rounded to their dtype.
    slot_mapping : (tokens,) integers
        ``block * block_size + offset``; a negative slot is padding and writes nothing.

    Raises
    ------
    ValueError
        If a slot lies past the cache. Nothing is written then.
    """
    num_blocks, block_size = k_cache.shape[:2]
    slots = [int(slot) for slot in slot_mapping]
    for token, slot in enumerate(slots):
        if slot >= num_blocks * block_size:
            raise ValueError(
                f"slot_mapping[{token}] is {slot} but the cache has slots "
                f"0..{num_blocks * block_size - 1} (a negative slot is padding)"
            )
    for token, slot in enumerate(slots):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = k[token].astype(k_cache.dtype)
            v_cache[slot // block_size, slot % block_size] = v[token].astype(v_cache.dtype)
