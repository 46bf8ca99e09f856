"""Bytes, FLOP and intensity of one decode step of one attention layer.

Everything is counted from shapes. The first half is the roofline account: what the step must move
and how far from the ridge it stays. The second half, ``ledger``, counts what the readable kernels
of this project request, load by load, so that a count of real loads can be compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_decode.grid import blocks_per_row, head_tiles
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import SplitPlan

#: Bytes of one block-table entry, of one float32, and of one sequence length.
INT32 = FLOAT32 = 4
#: Dense bf16 FLOP/s and read bytes/s of an H100 SXM; their ratio is the ridge of 295 FLOP/byte.
H100_BF16_FLOPS, H100_BYTES_PER_S = 989e12, 3.35e12


def _lens(seq_lens: Any) -> np.ndarray:
    lens = np.atleast_1d(np.asarray(seq_lens)).astype(np.int64)
    if (lens < 0).any():
        b = int((lens < 0).argmax())
        raise ValueError(f"seq_lens[{b}] is {lens[b]}; lengths count keys and cannot be negative")
    return lens


def _at_least_one(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")


def kv_bytes(
    seq_lens: Any, heads: HeadConfig, element_bytes: int = 2, window: int | None = None
) -> int:
    """Bytes of K and V that a step has to read, each visible key once per KV head.

    Parameters
    ----------
    seq_lens : int or (batch,) integers
    heads : HeadConfig
    element_bytes : int
        Bytes of one cache element.
    window : int, optional
        Newest visible keys.

    Returns
    -------
    int
        ``sum(s) * num_kv_heads * (head_dim + v_head_dim) * element_bytes``; with equal head sizes
        the familiar 2 * h_kv * d * s * b.
    """
    _at_least_one(element_bytes=element_bytes, window=window)
    lens = _lens(seq_lens)
    keys = int((lens if window is None else np.minimum(lens, window)).sum())
    return keys * heads.num_kv_heads * (heads.head_dim + heads.value_dim) * element_bytes


def state_bytes(heads: HeadConfig) -> int:
    """Bytes of one partial state of one query head: float32 acc, m and l, ``4 * (d + 2)``."""
    return FLOAT32 * (heads.value_dim + 2)


def partial_bytes(rows: int, heads: HeadConfig) -> int:
    """Bytes of ``rows`` partial states of all query heads, one way.

    Parameters
    ----------
    rows : int
        Splits over the batch: those in use for active bytes, the capacity for allocated ones.
    """
    return rows * heads.num_q_heads * state_bytes(heads)


def partial_round_trip_bytes(rows: int, heads: HeadConfig) -> int:
    """``partial_bytes`` written by stage 1 and read back by stage 2."""
    return 2 * partial_bytes(rows, heads)


def block_table_bytes(seq_lens: Any, block_size: int) -> int:
    """Bytes of the block-table entries that hold a key of the batch."""
    _at_least_one(block_size=block_size)
    return INT32 * int((-(-_lens(seq_lens) // block_size)).sum())


def index_overhead(heads: HeadConfig, block_size: int, element_bytes: int = 2) -> float:
    """Block-table bytes over K and V bytes when each KV head reads its own index, per key."""
    _at_least_one(block_size=block_size, element_bytes=element_bytes)
    return INT32 / (block_size * (heads.head_dim + heads.value_dim) * element_bytes)


def q_bytes(batch: int, heads: HeadConfig, element_bytes: int = 2) -> int:
    """Bytes of the queries of one step."""
    return batch * heads.num_q_heads * heads.head_dim * element_bytes


def out_bytes(batch: int, heads: HeadConfig, element_bytes: int = 2) -> int:
    """Bytes of the outputs of one step."""
    return batch * heads.num_q_heads * heads.value_dim * element_bytes


def lse_bytes(batch: int, heads: HeadConfig) -> int:
    """Bytes of the float32 log-sum-exps of one step."""
    return batch * heads.num_q_heads * FLOAT32


def flop(seq_lens: Any, heads: HeadConfig, window: int | None = None) -> int:
    """Multiplications and additions of ``q . k`` and ``p * v``: ``2 * h * s * (d + d_v)``."""
    _at_least_one(window=window)
    lens = _lens(seq_lens)
    keys = int((lens if window is None else np.minimum(lens, window)).sum())
    return 2 * keys * heads.num_q_heads * (heads.head_dim + heads.value_dim)


def intensity(
    seq_lens: Any,
    heads: HeadConfig,
    element_bytes: int = 2,
    *,
    rows: int = 0,
    window: int | None = None,
) -> float:
    """FLOP per byte of K and V and, with ``rows`` active splits, of the partials' round trip.

    Without partials it is ``2 * h / (b * h_kv)`` at any length: 4 for a group of 4 in bf16. Splits
    add bytes and no FLOP, so they can only lower it.
    """
    moved = kv_bytes(seq_lens, heads, element_bytes, window) + partial_round_trip_bytes(rows, heads)
    return flop(seq_lens, heads, window) / moved if moved else 0.0


def ridge_point(flops: float = H100_BF16_FLOPS, bytes_per_s: float = H100_BYTES_PER_S) -> float:
    """Intensity at which compute and bandwidth take the same time, in FLOP per byte."""
    return flops / bytes_per_s


def seconds_at(num_bytes: float, bytes_per_s: float = H100_BYTES_PER_S) -> float:
    """Time to move ``num_bytes`` at a bandwidth: the floor of a memory-bound step."""
    if bytes_per_s <= 0:
        raise ValueError(f"bytes_per_s must be positive; got {bytes_per_s}")
    return num_bytes / bytes_per_s


@dataclass(frozen=True)
class Tile:
    """One K and V tile of the Triton kernel against one query tile.

    Attributes
    ----------
    kv_bytes : int
        Bytes of the K tile and the V tile.
    live_rows, masked_rows : int
        Query rows that hold a query head, and the rest of ``block_m``.
    live_flop : int
        FLOP of the live rows.
    """

    kv_bytes: int
    live_rows: int
    masked_rows: int
    live_flop: int

    @property
    def flop_per_byte(self) -> float:
        """Intensity of the tile, which is that of the whole step without partials."""
        return self.live_flop / self.kv_bytes


def tile_account(
    heads: HeadConfig, block_m: int = 16, tile: int = 16, element_bytes: int = 2
) -> Tile:
    """Account of one tile when a single sequence's token is in flight."""
    _at_least_one(block_m=block_m, tile=tile, element_bytes=element_bytes)
    live = min(heads.group_size, block_m)
    both = heads.head_dim + heads.value_dim
    return Tile(
        kv_bytes=tile * both * element_bytes,
        live_rows=live,
        masked_rows=block_m - live,
        live_flop=2 * live * tile * both,
    )


@dataclass(frozen=True)
class Stage1Block:
    """What one thread block of the readable ``paged_split_k`` requests.

    Attributes
    ----------
    row : int
        Row of the plan.
    sequence : int
        Sequence the row belongs to; -1 for rows that the plan does not use.
    keys : int
        Visible keys of the row's range.
    k_bytes, v_bytes : int
        Cache bytes, each key once.
    table_bytes : int
        Distinct block-table bytes.
    partial_bytes : int
        Bytes of the states written, an empty row's included.
    """

    row: int
    sequence: int
    keys: int
    k_bytes: int
    v_bytes: int
    table_bytes: int
    partial_bytes: int


@dataclass(frozen=True)
class Ledger:
    """Bytes that the readable kernels request in one split step.

    Attributes
    ----------
    grid : (int, int, int)
        Stage-1 grid: plan rows, KV heads, tiles of at most 16 query heads of one KV head.
    rows : tuple of Stage1Block
        One entry per plan row, for the first head tile of one KV head; every KV head and head tile
        reads the same keys.
    k_bytes, v_bytes, table_bytes, partial_write_bytes : int
        Stage 1, whole grid.
    state_read_bytes, acc_read_bytes : int
        Stage 2: m and l of every row in use, acc of rows that hold a visible key.
    out_bytes, lse_bytes : int
        Stage 2, written.
    """

    grid: tuple[int, int, int]
    rows: tuple[Stage1Block, ...]
    k_bytes: int
    v_bytes: int
    table_bytes: int
    partial_write_bytes: int
    state_read_bytes: int
    acc_read_bytes: int
    out_bytes: int
    lse_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything above, read or written."""
        return (
            self.k_bytes
            + self.v_bytes
            + self.table_bytes
            + self.partial_write_bytes
            + self.state_read_bytes
            + self.acc_read_bytes
            + self.out_bytes
            + self.lse_bytes
        )


def ledger(
    plan: SplitPlan,
    seq_lens: Sequence[int] | np.ndarray,
    heads: HeadConfig,
    kv_bytes: int,
    block_size: int,
    *,
    q_bytes: int | None = None,
    window: int | None = None,
) -> Ledger:
    """Count what ``paged_split_k`` and ``reduce_splits`` request for a plan.

    Parameters
    ----------
    plan : SplitPlan
        Host plan; its capacity is the grid's first axis.
    seq_lens : (batch,) integers
    heads : HeadConfig
    kv_bytes : int
        Bytes of one cache element.
    block_size : int
        Keys of one kernel block.
    q_bytes : int, optional
        Bytes of one query or output element; ``kv_bytes`` when left out.
    window : int, optional
        Newest visible keys.

    Returns
    -------
    Ledger

    Notes
    -----
    Stage 1 has one thread block per (row, KV head, tile of query heads). It reads each visible
    key of its range once, K and V, and the table entries of the pages that hold them; it writes
    ``4 * (v_head_dim + 2)`` bytes per query head, for an empty row too. Blocks of rows past the
    plan's end touch none of these. Stage 2 reads m and l of every row in use and acc of the
    non-empty ones. (An unsplit plan can finish in stage 1 and skip the round trip; this is the
    two-kernel form.)
    """
    _at_least_one(kv_bytes=kv_bytes, block_size=block_size, q_bytes=q_bytes, window=window)
    lens = _lens(seq_lens)
    row_blocks = blocks_per_row(heads)
    first_tile_heads = -(-heads.group_size // head_tiles(heads))
    rows = []
    for row, (b, begin, end) in enumerate(plan.ranges(lens)):
        first = begin if window is None else max(begin, int(lens[b]) - window)
        keys = max(0, end - first)
        pages = (end - 1) // block_size - first // block_size + 1 if keys else 0
        rows.append(
            Stage1Block(
                row=row,
                sequence=b,
                keys=keys,
                k_bytes=keys * heads.head_dim * kv_bytes,
                v_bytes=keys * heads.value_dim * kv_bytes,
                table_bytes=pages * INT32,
                partial_bytes=first_tile_heads * state_bytes(heads),
            )
        )
    in_use, alive = len(rows), sum(r.keys > 0 for r in rows)
    rows += [Stage1Block(row, -1, 0, 0, 0, 0, 0) for row in range(in_use, plan.capacity)]
    return Ledger(
        grid=(plan.capacity, heads.num_kv_heads, head_tiles(heads)),
        rows=tuple(rows),
        k_bytes=row_blocks * sum(r.k_bytes for r in rows),
        v_bytes=row_blocks * sum(r.v_bytes for r in rows),
        table_bytes=row_blocks * sum(r.table_bytes for r in rows),
        partial_write_bytes=partial_bytes(in_use, heads),
        state_read_bytes=2 * FLOAT32 * heads.num_q_heads * in_use,
        acc_read_bytes=FLOAT32 * heads.value_dim * heads.num_q_heads * alive,
        out_bytes=out_bytes(len(lens), heads, kv_bytes if q_bytes is None else q_bytes),
        lse_bytes=lse_bytes(len(lens), heads),
    )
