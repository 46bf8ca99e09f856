"""FlashAttention-2: the fewest splits that fill the waves nearly as well as any count.

Source: ``csrc/flash_attn/flash_api.cpp`` (``num_splits_heuristic``, ``set_params_splitkv``) and
``csrc/flash_attn/src/flash_fwd_kernel.h`` (split ranges).

48 thread blocks on 108 SMs: 2 splits give 96 / 108 = 0.89 waves at 89 % efficiency, 3 give 144 /
108 = 1.33 waves at 67 %. The smallest count within 85 % of the best is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cupy_decode.grid import cdiv
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, StepShape, make_account, visible_rows

#: Query rows of one thread block on the split path.
BLOCK_M = 64
#: Most splits that the combine kernel reads.
MAX_SPLITS = 128


def almost_full(blocks: int, slots: int) -> bool:
    """``blocks >= 0.8 * slots``, in the float32 arithmetic of the source."""
    return bool(np.float32(blocks) >= np.float32(0.8) * np.float32(slots))


def smallest_efficient(blocks: int, slots: int, candidates: Sequence[int]) -> int:
    """The smallest count whose last wave is filled to 85 % of the best count's.

    The efficiency of ``n`` splits is ``w / ceil(w)`` with ``w = blocks * n / slots`` waves, in
    float32 as in the source.

    Examples
    --------
    >>> smallest_efficient(48, 108, range(1, 65))
    2
    """
    counts = np.asarray(candidates, np.int64)
    num_waves = (blocks * counts).astype(np.float32) / np.float32(slots)
    efficiency = (num_waves / np.ceil(num_waves)).astype(np.float64)
    return int(counts[np.argmax(efficiency >= 0.85 * efficiency.max())])


def num_splits_heuristic(
    blocks: int, slots: int, num_n_blocks: int, max_splits: int = MAX_SPLITS
) -> int:
    """Splits of every sequence.

    Parameters
    ----------
    blocks : int
        Thread blocks of the unsplit grid.
    slots : int
        Thread blocks that run at once; the caller passes twice the SM count.
    num_n_blocks : int
        Key blocks of the longest sequence.

    Notes
    -----
    A count is skipped when it leaves the key blocks per split as they were: 64 blocks in 12 splits
    are 6 each and the last split empty, so 12 is 11.

    Examples
    --------
    >>> num_splits_heuristic(48, 108, 64), num_splits_heuristic(212, 264, 64)
    (2, 1)
    """
    if almost_full(blocks, slots):
        return 1
    candidates = [
        n
        for n in range(1, min(max_splits, slots, num_n_blocks) + 1)
        if n == 1 or cdiv(num_n_blocks, n) != cdiv(num_n_blocks, n - 1)
    ]
    return smallest_efficient(blocks, slots, candidates) if candidates else 1


def block_n(head_dim: int) -> int:
    """Keys of one block on the split path."""
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64


@dataclass(frozen=True)
class Decode:
    """The heuristic's inputs for one decode step, and its answer.

    ``mblocks`` are the thread blocks of the unsplit grid, ``m_blocks`` those of one head.
    """

    block_n: int
    n_blocks: int
    m_blocks: int
    mblocks: int
    num_splits: int


def decode(
    batch: int,
    heads: HeadConfig,
    max_seq_len: int,
    num_sms: int,
    query_len: int = 1,
    windowed: bool = False,
) -> Decode:
    """What ``flash_attn_with_kvcache`` decides for a step.

    A single query token of a grouped layer without a window is turned around: the group becomes
    the query axis, so a thread block serves all heads of a KV head. Otherwise it serves one head.

    Examples
    --------
    Llama-3-8B, batch 1, 2,560 keys: 8 blocks, 20 key blocks, and with 264 slots any count fits one
    wave, so all 20 are split.

    >>> decode(1, HeadConfig(32, 8, 128), 2560, 132)
    Decode(block_n=128, n_blocks=20, m_blocks=1, mblocks=8, num_splits=20)
    """
    keys = block_n(heads.head_dim)
    n_blocks = cdiv(max_seq_len, keys)
    num_heads, rows = heads.num_q_heads, query_len
    if query_len == 1 and heads.group_size > 1 and not windowed:
        num_heads, rows = heads.num_kv_heads, heads.group_size
    m_blocks = cdiv(rows, BLOCK_M)
    mblocks = batch * num_heads * m_blocks
    splits = num_splits_heuristic(mblocks, 2 * num_sms, n_blocks)
    return Decode(keys, n_blocks, m_blocks, mblocks, splits)


@dataclass(frozen=True)
class Fa2:
    """The heuristic's count, turned into one split length for the whole batch.

    The kernel derives the key blocks per split from the longest sequence, so shorter ones have
    fewer splits of the same length.
    """

    name: ClassVar[str] = "fa2"

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        windowed = step.window is not None and step.window <= step.max_seq_len
        found = decode(
            step.batch, heads, step.max_seq_len, device.num_sms, step.max_query_len, windowed
        )
        splits, slots = found.num_splits, 2 * device.num_sms
        if almost_full(found.mblocks, slots):
            reason = f"{found.mblocks} blocks fill 80 % of {slots} slots"
        else:
            reason = (
                f"{found.mblocks} blocks for {slots} slots: {splits} of at most "
                f"{max(found.n_blocks, 1)} splits fill the waves within 85 % of the best"
            )
        blocks_per_split = max(cdiv(found.n_blocks, splits), 1)
        plan = SplitPlan.from_split_size(
            step.lens, blocks_per_split * found.block_n, policy=self.name
        )
        columns = found.mblocks // step.batch
        num_heads = columns // found.m_blocks
        grid = (found.m_blocks, step.batch, num_heads)
        if splits > 1:
            grid = (found.m_blocks, splits, step.batch * num_heads)
        rows = step.batch * step.max_query_len * heads.num_q_heads
        rounding = 32 if heads.head_dim <= 128 else 64
        head_dim_rounded = cdiv(heads.head_dim, rounding) * rounding
        account = make_account(
            device,
            split=splits > 1,
            reason=reason,
            grid=grid,
            busy_blocks=visible_rows(step, plan) * columns,
            num_splits=splits,
            scratch_bytes=splits * rows * (head_dim_rounded + 1) * 4 if splits > 1 else 0,
            blocks_per_sm=2,
            block_n=found.block_n,
            num_n_blocks=found.n_blocks,
        )
        return plan, account
