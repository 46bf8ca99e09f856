"""vLLM's Triton MLA decode: a power of two of splits from the longest sequence.

Source: ``vllm/v1/attention/backends/mla/triton_mla.py`` (count) and
``vllm/v1/attention/ops/triton_decode_attention.py`` (grid, split ranges).

8,192 keys on 132 SMs: 8192 // 512 = 16, already a power of two and below 2 * 132, so 16 splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cupy_decode.grid import cdiv
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, StepShape, make_account, visible_rows

#: Keys that a split should at least own.
MIN_WORK_PER_SPLIT = 512
#: Thread blocks per SM that the cap allows.
OCCUPANCY_MULTIPLIER = 2
#: Query heads that share a thread block.
BLOCK_H = 16


def num_kv_splits(max_seq_len: int, num_sms: int) -> int:
    """``min(next_power_of_2(max(1, max_seq_len // 512)), 2 * num_sms)``.

    Examples
    --------
    >>> [num_kv_splits(s, 132) for s in (512, 1535, 8192, 131072, 262144)]
    [1, 2, 16, 256, 264]
    """
    ideal = 1 << (max(1, max_seq_len // MIN_WORK_PER_SPLIT) - 1).bit_length()
    return min(ideal, num_sms * OCCUPANCY_MULTIPLIER)


@dataclass(frozen=True)
class VllmMla:
    """``num_kv_splits`` of the longest sequence for all; splits of ``ceil(s / n)`` keys each.

    Split lengths follow no tile, so a short sequence beside a long one is cut key by key.
    """

    name: ClassVar[str] = "vllm-mla"
    batch_invariant: bool = False

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads, tokens = step.heads, step.num_query_tokens
        if self.batch_invariant:
            splits, reason = 1, "batch invariance allows one split"
        else:
            splits = num_kv_splits(step.max_seq_len, device.num_sms)
            reason = f"{step.max_seq_len} keys in pieces of about {MIN_WORK_PER_SPLIT}"
            if splits == device.num_sms * OCCUPANCY_MULTIPLIER:
                reason += f", at most {OCCUPANCY_MULTIPLIER} per SM"
        head_tiles = cdiv(heads.num_q_heads, min(BLOCK_H, heads.group_size))
        sizes = np.maximum(-(-step.lens // splits), 1)
        plan = SplitPlan.from_counts_and_sizes(step.lens, sizes, policy=self.name)
        account = make_account(
            device,
            split=splits > 1,
            reason=reason,
            grid=(tokens, head_tiles, splits),
            busy_blocks=visible_rows(step, plan, step.query_len_per_sequence) * head_tiles,
            num_splits=splits,
            # Stage 1 always writes its normalised vector and LSE, one split included.
            scratch_bytes=tokens * heads.num_q_heads * splits * (heads.value_dim + 1) * 4,
        )
        return plan, account
