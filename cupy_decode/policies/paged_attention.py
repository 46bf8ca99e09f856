"""vLLM's original PagedAttention: v1 in one piece, or v2 in partitions of 512 keys.

Sources, deleted since: ``vllm/attention/ops/paged_attn.py`` (choice) and
``csrc/attention/paged_attention_v2.cu`` (grid, partitions).

Llama-3-8B, 2,560 keys: v2 with 5 partitions up to batch 16, v1 from batch 17 on, where 17 * 32 =
544 thread blocks exceed 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupy_decode.grid import cdiv
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, StepShape, make_account, visible_rows

#: Keys of one v2 partition.
PARTITION_SIZE = 512
#: Longest context that v1 takes: its logits live in shared memory.
MAX_V1_LEN = 8192


@dataclass(frozen=True)
class Choice:
    """Kernel, partitions per sequence, grid, and the shared memory that v1 would need."""

    kernel: str
    partitions: int
    grid: tuple[int, int, int]
    v1_smem_bytes: int


def choose(
    num_seqs: int,
    num_q_heads: int,
    max_seq_len: int,
    partition_size: int = PARTITION_SIZE,
    block_size: int = 16,
) -> Choice:
    """v1 iff the context fits its shared memory and there is one partition or a wide grid.

    Examples
    --------
    >>> choose(16, 32, 2560).kernel, choose(17, 32, 2560).kernel, choose(64, 32, 8193).partitions
    ('v2', 'v1', 17)
    """
    partitions = max(cdiv(max_seq_len, partition_size), 1)
    smem = 4 * cdiv(max_seq_len, block_size) * block_size
    if max_seq_len <= MAX_V1_LEN and (partitions == 1 or num_seqs * num_q_heads > 512):
        return Choice("v1", 1, (num_q_heads, num_seqs, 1), smem)
    return Choice("v2", partitions, (num_q_heads, num_seqs, partitions), smem)


@dataclass(frozen=True)
class PagedAttention:
    """v1: one split. v2: splits of exactly 512 keys, so 513 keys are 512 + 1.

    One thread block serves one query head; a group reads its KV head as often as it has heads.
    """

    name: ClassVar[str] = "paged-attention"

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        found = choose(step.batch, heads.num_q_heads, step.max_seq_len, block_size=step.page_size)
        blocks = step.batch * heads.num_q_heads
        if found.kernel == "v2":
            plan = SplitPlan.from_split_size(step.lens, PARTITION_SIZE, policy=self.name)
            reason = f"v2: {found.partitions} partitions, {blocks} heads and sequences"
            if step.max_seq_len > MAX_V1_LEN:
                reason = f"v2: {step.max_seq_len} keys exceed v1's {MAX_V1_LEN}"
        else:
            plan = SplitPlan.from_num_splits(step.lens, 1, policy=self.name)
            reason = f"v1: {blocks} heads and sequences exceed 512"
            if step.max_seq_len <= PARTITION_SIZE:
                reason = "v1: one partition holds every sequence"
        # v2 keeps normalised vectors in the output's type, and two fp32 numbers each.
        partial = blocks * found.partitions * (heads.value_dim * step.q_bytes + 8)
        account = make_account(
            device,
            split=found.kernel == "v2",
            reason=reason,
            grid=found.grid,
            busy_blocks=visible_rows(step, plan) * heads.num_q_heads,
            num_splits=found.partitions,
            scratch_bytes=partial if found.kernel == "v2" else 0,
            kernel=found.kernel,
            v1_smem_bytes=found.v1_smem_bytes,
        )
        return plan, account
