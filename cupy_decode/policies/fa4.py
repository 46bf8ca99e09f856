"""FlashAttention-4: as many splits as fit into one wave.

Source: ``flash_attn/cute/interface.py`` (``num_splits_heuristic``, ``_get_fwd_config``) and
``flash_attn/cute/block_info.py`` (split ranges).

Llama-3-8B, batch 1, 2,560 keys on 148 SMs: 148 // 8 = 18 splits of at most 20 key blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cupy_decode.grid import cdiv
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import (
    Account,
    Device,
    StepShape,
    make_account,
    plan_from,
    visible_rows,
)

#: Most splits that the heuristic asks for.
MAX_SPLITS = 128


def num_splits_heuristic(
    blocks: int, num_sms: int, num_n_blocks: int, max_splits: int = MAX_SPLITS
) -> int:
    """``min(num_sms // blocks, max_splits, num_n_blocks)``, 1 for four key blocks or fewer.

    More blocks than SMs give 0, which callers read as 1.

    Examples
    --------
    >>> num_splits_heuristic(8, 148, 20), num_splits_heuristic(149, 148, 20)
    (18, 0)
    """
    if num_n_blocks <= 4 or blocks == 0:
        return 1
    return min(num_sms // blocks, max_splits, num_n_blocks)


def tile_size(
    head_dim: int, v_head_dim: int, compute_capability: tuple[int, int], local: bool = False
) -> tuple[int, int]:
    """Query rows and keys of one block, for a full mask.

    Examples
    --------
    >>> tile_size(128, 128, (10, 0)), tile_size(256, 256, (9, 0))
    ((128, 128), (128, 80))
    """
    major = compute_capability[0]
    if major == 8 or (major == 12 and head_dim > 64):
        return 128, 64
    if major != 9 or 96 < head_dim <= 128:
        return 128, 128
    if head_dim <= 64:
        return 192, 128
    if head_dim <= 96:
        return 192, 128 if local else 144
    if head_dim <= 192:
        return 128, 96 if local else 128 if v_head_dim <= 128 else 112
    return 128, 64 if local else 80


@dataclass(frozen=True)
class Fa4:
    """The heuristic's count for the whole batch (the caller asks for it with ``num_splits=0``).

    The count ignores a window; the ranges respect it. Unequal key and value dimensions on compute
    capability 10.x split only with 64-key blocks, or not at all, for want of shared memory, and
    12.x does not split.
    """

    name: ClassVar[str] = "fa4"

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads, major = step.heads, device.compute_capability[0]
        local = step.window is not None and step.window < step.max_seq_len
        block_m, block_n = tile_size(
            heads.head_dim, heads.value_dim, device.compute_capability, local
        )
        rows = step.max_query_len * heads.group_size
        # Blackwell overlaps two query tiles in a thread block when there are that many rows.
        stages = 2 if major in (10, 11) and rows > block_m else 1
        m_blocks = cdiv(rows, stages * block_m)
        blocks = step.batch * heads.num_kv_heads * m_blocks
        n_blocks = cdiv(step.max_seq_len, block_n)
        splits = num_splits_heuristic(blocks, device.num_sms, n_blocks)
        reason = f"{blocks} blocks fit {device.num_sms // blocks} times into {device.num_sms} SMs"
        if blocks > device.num_sms:
            reason = f"{blocks} blocks are more than {device.num_sms} SMs"
        if n_blocks <= 4:
            reason = f"{n_blocks} key blocks of {block_n} are too few to split"
        if major == 12:
            splits, reason = 1, "compute capability 12.x does not split"
        elif major in (10, 11) and heads.head_dim != heads.value_dim and splits > 1:
            if n_blocks >= 64 and heads.value_dim != 512:
                block_n = 64
                n_blocks = cdiv(step.max_seq_len, block_n)
                splits = num_splits_heuristic(blocks, device.num_sms, n_blocks)
            else:
                splits, reason = 1, "fp32 partial outputs do not fit beside unequal head sizes"
        splits = max(splits, 1)
        first_block = step.first_visible // block_n
        visible = -(-step.lens // block_n) - first_block
        sizes = np.maximum(-(-visible // splits), 1) * block_n
        plan = plan_from(step, first_block * block_n, sizes, self.name)
        tokens = step.num_query_tokens * heads.num_q_heads
        account = make_account(
            device,
            split=splits > 1,
            reason=reason,
            grid=(m_blocks, heads.num_kv_heads * splits, step.batch),
            busy_blocks=visible_rows(step, plan) * m_blocks * heads.num_kv_heads,
            num_splits=splits,
            scratch_bytes=splits * tokens * (heads.value_dim + 1) * 4 if splits > 1 else 0,
            tile_m=block_m,
            tile_n=block_n,
            num_n_blocks=n_blocks,
        )
        return plan, account
