"""vLLM's ROCm paged attention: partitions of 256 keys, always.

Source: ``csrc/rocm/attention.cu``.

Llama-3-8B, 2,560 keys at batch 1: grid (1, ceil(2560 / 256), 8) = (1, 10, 8), and a reduce of one
thread block per query head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupy_decode.grid import cdiv
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import (
    Account,
    Device,
    DeviceRule,
    StepShape,
    make_account,
    visible_rows,
)

#: Keys of one partition.
PARTITION_SIZE = 256
#: Partitions that one pass of the reduce kernel reads, a wavefront's lanes.
WARP_SIZE = 64
#: Passes that the reduce kernel is compiled for.
MAX_NPAR_LOOPS = 8


@dataclass(frozen=True)
class Launch:
    """Grids of both kernels, and whether the reduce is compiled for so many partitions."""

    partitions: int
    grid: tuple[int, int, int]
    reduce_grid: tuple[int, int]
    npar_loops: int
    supported: bool


def launch(num_seqs: int, num_q_heads: int, num_kv_heads: int, max_seq_len: int) -> Launch:
    """One thread block per sequence, partition and KV head.

    Examples
    --------
    >>> launch(1, 32, 8, 16385).npar_loops, launch(1, 32, 8, 131073).supported
    (2, False)
    """
    partitions = max(cdiv(max_seq_len, PARTITION_SIZE), 1)
    loops = cdiv(partitions, WARP_SIZE)
    return Launch(
        partitions,
        (num_seqs, partitions, num_kv_heads),
        (num_q_heads, num_seqs),
        loops,
        loops <= MAX_NPAR_LOOPS,
    )


@dataclass(frozen=True)
class Rocm:
    """Splits of exactly 256 keys."""

    name: ClassVar[str] = "rocm"

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        found = launch(step.batch, heads.num_q_heads, heads.num_kv_heads, step.max_seq_len)
        reason = f"one partition per {PARTITION_SIZE} keys"
        if not found.supported:
            most = MAX_NPAR_LOOPS * WARP_SIZE * PARTITION_SIZE
            reason += f"; the engine refuses more than {most} keys"
        # Vectors in the output's type, a maximum and a sum each, even for one partition.
        rows = step.batch * heads.num_q_heads * found.partitions
        plan = SplitPlan.from_split_size(step.lens, PARTITION_SIZE, policy=self.name)
        account = make_account(
            device,
            split=found.partitions > 1,
            reason=reason,
            grid=found.grid,
            busy_blocks=visible_rows(step, plan) * heads.num_kv_heads,
            num_splits=found.partitions,
            scratch_bytes=rows * (heads.value_dim * step.q_bytes + 8),
            reduce_grid=found.reduce_grid,
            npar_loops=found.npar_loops,
            supported=found.supported,
        )
        return plan, account

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device."""
        return DeviceRule("size", PARTITION_SIZE)
