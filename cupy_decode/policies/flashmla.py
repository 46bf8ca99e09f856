"""FlashMLA: the batch's key blocks packed greedily onto a fixed number of SM parts.

Sources: ``csrc/api/dense_decode.h`` (parts) and
``csrc/smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu`` (packing).

One sequence of 4,096 keys is 64 blocks; on 66 parts the payload is ceil((64 + 5) / 66) + 5 = 7
blocks, of which 5 pay for the request, so each part takes 2 blocks and 32 parts have work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cupy_decode.grid import cdiv
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, StepShape, make_account

#: Keys of one block.
BLOCK_N = 64
#: Blocks' worth of time that touching a request costs, whatever its length.
FIXED_OVERHEAD = 5
#: Query rows of one thread block.
BLOCK_M = 64


def num_sm_parts(num_sms: int, num_q_heads: int, num_kv_heads: int, query_len: int = 1) -> int:
    """SMs over KV heads and query tiles of 64 rows, rounded down twice; at least 1.

    Examples
    --------
    >>> num_sm_parts(132, 128, 1), num_sm_parts(132, 16, 1)
    (66, 132)
    """
    query_tiles = cdiv(query_len * num_q_heads // num_kv_heads, BLOCK_M)
    return max(num_sms // num_kv_heads // query_tiles, 1)


@dataclass(frozen=True)
class Part:
    """What one SM part reads: from a block of one request to the end before a block of another."""

    begin_request: int
    begin_block: int
    begin_split: int
    end_request: int
    end_block: int


@dataclass(frozen=True)
class Schedule:
    """Packing of a batch.

    Attributes
    ----------
    payload : int
        Blocks that a part may take, overheads included.
    bounds : list of list of int
        First block of each split of each request.
    parts : list of Part
        Idle parts begin past the last request and end where it ends.
    part_offsets : list of int
        Part ``p`` owns the splits ``part_offsets[p] .. part_offsets[p + 1]`` of the whole batch.
    """

    payload: int
    bounds: list[list[int]]
    parts: list[Part]
    part_offsets: list[int]

    @property
    def num_splits(self) -> list[int]:
        """Splits of each request."""
        return [len(row) for row in self.bounds]

    @property
    def cumulative_splits(self) -> list[int]:
        """Exclusive prefix sum of ``num_splits``, the form in which FlashMLA hands them on."""
        return [0, *np.cumsum(self.num_splits).tolist()]


def pack(
    seq_lens: Any, parts: int, block_n: int = BLOCK_N, overhead: int = FIXED_OVERHEAD
) -> Schedule:
    """Fill one part after the other, cutting a request where the part is full.

    A request costs its blocks and ``overhead`` more on every part that touches it. An empty
    request counts as one block, so that some part writes its output.

    Examples
    --------
    3 parts for 16 + 32 + 47 blocks: payload ceil((95 + 15) / 3) + 5 = 42. Part 0 has 21 blocks
    left after request 0 and spends 5 on touching request 1.

    >>> schedule = pack([1000, 2000, 3000], 3)
    >>> schedule.payload, schedule.bounds
    (42, [[0], [0, 16], [0, 16]])
    """
    lens = [int(s) for s in seq_lens]
    blocks = [max(cdiv(s, block_n), 1) for s in lens]
    payload = cdiv(sum(n + overhead for n in blocks), parts) + overhead
    bounds: list[list[int]] = [[] for _ in lens]
    part_list, part_offsets = [], [0]
    request, block, rows = 0, 0, 0
    for _ in range(parts):
        begin = (request, block, len(bounds[request]) if block else 0)
        left = payload
        while request < len(lens):
            if left >= blocks[request] - block + overhead:
                bounds[request].append(block)
                rows += 1
                left -= blocks[request] - block + overhead
                request, block = request + 1, 0
                continue
            if left > overhead:
                bounds[request].append(block)
                rows += 1
                block += left - overhead
            break
        if block:
            end = (request, block)
        else:
            end = (request - 1, blocks[request - 1] if lens[request - 1] else 0)
        part_list.append(Part(*begin, *end))
        part_offsets.append(rows)
    return Schedule(payload, bounds, part_list, part_offsets)


@dataclass(frozen=True)
class FlashMla:
    """``pack`` over ``num_sm_parts`` parts.

    The account's ``part_offsets`` say which plan rows each part reads. The kernel itself is
    compiled for head_dim 576 and v_head_dim 512; the rule is applied to any heads.
    """

    name: ClassVar[str] = "flashmla"

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads, query_len = step.heads, step.max_query_len
        parts = num_sm_parts(device.num_sms, heads.num_q_heads, heads.num_kv_heads, query_len)
        schedule = pack(step.lens, parts)
        plan = SplitPlan.from_bounds(
            [[block * BLOCK_N for block in row] for row in schedule.bounds],
            step.lens,
            policy=self.name,
        )
        rows = query_len * heads.group_size
        busy_parts = int((np.diff(schedule.part_offsets) > 0).sum()) if step.max_seq_len else 0
        account = make_account(
            device,
            split=not plan.unsplit,
            reason=f"{parts} parts of {schedule.payload} blocks, {FIXED_OVERHEAD} per request",
            grid=(cdiv(rows, BLOCK_M), heads.num_kv_heads, parts),
            busy_blocks=busy_parts * cdiv(rows, BLOCK_M) * heads.num_kv_heads,
            num_splits=max(schedule.num_splits),
            # One row per part and request, which bounds the number of cuts, whatever the lengths.
            scratch_bytes=(step.batch + parts)
            * heads.num_kv_heads
            * rows
            * (heads.value_dim + 1)
            * 4,
            num_sm_parts=parts,
            payload=schedule.payload,
            part_offsets=schedule.part_offsets,
        )
        return plan, account
