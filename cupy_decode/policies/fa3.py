"""FlashAttention-3: the efficiency rule with early exits, and counts per sequence made on the GPU.

Sources: ``hopper/heuristics.h`` (``num_splits_heuristic``), ``hopper/tile_size.h`` (tiles on
compute capability 9.0), ``hopper/flash_api.cpp`` (``get_num_splits``, ``get_pagedkv_tma``),
``hopper/flash_prepare_scheduler.cu`` (dynamic splits) and ``hopper/block.h`` (split ranges).

Llama-3-8B, batch 1, 2,560 paged keys: 8 blocks and 20 key blocks of 128 on 132 SMs; 14 splits are
112 / 132 = 0.85 of a wave, the smallest count within 85 % of the best (16 splits, 0.97).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cupy_decode.grid import cdiv
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import (
    Account,
    Device,
    DeviceRule,
    StepShape,
    make_account,
    plan_from,
    visible_rows,
)
from cupy_decode.policies.fa2 import almost_full, smallest_efficient

#: Most splits that the heuristic asks for.
MAX_SPLITS = 128
#: Bytes of L2 that the heuristic counts on.
L2_BYTES = 50 * 2**20
#: Static cap under a captured graph, as vLLM sets it.
GRAPH_SPLITS = 32
#: Batches beyond this are never split dynamically: one thread block prepares the schedule.
MAX_DYNAMIC_BATCH = 992


def num_splits_heuristic(
    blocks: int,
    num_sms: int,
    num_n_blocks: int,
    num_m_blocks: int,
    kv_head_bytes: int,
    causal_or_local: bool,
    max_splits: int = MAX_SPLITS,
) -> int:
    """Splits of every sequence.

    Parameters
    ----------
    blocks : int
        Thread blocks of the unsplit step, ``batch * num_kv_heads * num_m_blocks``.
    num_n_blocks, num_m_blocks : int
        Key blocks of the longest sequence and query blocks of one.
    kv_head_bytes : int
        K and V of one head of the longest sequence.

    Notes
    -----
    A nearly full machine splits only keys that overflow L2 and are read at least twice per SM by a
    full mask. Four key blocks or fewer are never split, however idle the machine is.

    Examples
    --------
    >>> num_splits_heuristic(8, 132, 20, 1, 0, False), num_splits_heuristic(8, 132, 4, 1, 0, False)
    (14, 1)
    """
    if almost_full(blocks, num_sms):
        overflows = kv_head_bytes > L2_BYTES and num_m_blocks >= 2 * num_sms
        if overflows and not causal_or_local:
            return min(cdiv(kv_head_bytes, L2_BYTES), max_splits)
        return 1
    if num_n_blocks <= 4:
        return 1
    return smallest_efficient(blocks, num_sms, range(1, min(max_splits, num_sms, num_n_blocks) + 1))


def round_up_head_dim(head_dim: int) -> int:
    """Head dimension of the compiled kernel that serves ``head_dim``."""
    return next((size for size in (64, 96, 128, 192, 256) if head_dim <= size), 512)


def tile_size(
    head_dim: int,
    v_head_dim: int,
    causal: bool,
    local: bool,
    element_size: int = 2,
    paged_without_tma: bool = False,
) -> tuple[int, int]:
    """Query rows and keys of one block on compute capability 9.0; head dimensions rounded up.

    Examples
    --------
    >>> tile_size(128, 128, False, False), tile_size(128, 128, False, False, 2, True)
    ((128, 176), (128, 128))
    """
    narrow = causal or local or paged_without_tma
    if element_size == 1:
        if head_dim <= 64:
            return 192, 160
        if head_dim <= 96:
            return 192, 128
        if head_dim <= 128:
            return 128, 160 if paged_without_tma else 224
        if head_dim <= 192:
            return 128, 128 if paged_without_tma and local else 160
        return 128, 64 if local else 128
    if head_dim <= 64:
        if v_head_dim == 512:
            return 64, 64
        if v_head_dim == 256:
            return 128, 96
        return 192, 128 if narrow else 192
    if head_dim <= 96:
        return 192, 128 if local or paged_without_tma else 144
    if head_dim <= 128:
        return 128, 128 if narrow else 176
    if head_dim <= 192:
        return 128, 96 if paged_without_tma or local else 128 if v_head_dim <= 128 else 112
    return 128, 64 if local else 80


@dataclass(frozen=True)
class Decode:
    """The heuristic's inputs for one decode step, and its answer."""

    block_m: int
    block_n: int
    n_blocks: int
    mblocks: int
    num_splits: int


def decode(
    batch: int,
    heads: HeadConfig,
    max_seq_len: int,
    num_sms: int,
    *,
    paged: bool = True,
    kv_bytes: int = 2,
    varlen: bool = False,
    query_len: int = 1,
    page_size: int = 16,
    window: int | None = None,
) -> Decode:
    """What ``get_num_splits`` decides for a step.

    Parameters
    ----------
    varlen : bool
        Lengths live on the device, so the batch counts as one and the answer is only a cap.

    Examples
    --------
    >>> decode(1, HeadConfig(32, 8, 128), 2560, 132)
    Decode(block_m=128, block_n=128, n_blocks=20, mblocks=8, num_splits=14)
    """
    head_dim = round_up_head_dim(heads.head_dim)
    v_head_dim = round_up_head_dim(heads.value_dim)
    local = window is not None and window < max_seq_len
    # One query token sees every key, causal or not; paged 65..128 keeps the causal tile all the
    # same. It decides only between tiles that paging without TMA equalises anyway.
    causal = not local and (query_len > 1 or (paged and 64 < heads.head_dim <= 128))
    rows = query_len * heads.group_size

    tma_m, tma_n = tile_size(head_dim, v_head_dim, causal, local, kv_bytes)
    uses_tma = paged and page_size % tma_n == 0 and rows > tma_m
    block_m, block_n = tile_size(
        head_dim, v_head_dim, causal, local, kv_bytes, paged_without_tma=paged and not uses_tma
    )
    keys = max_seq_len
    if local:
        assert window is not None
        keys = min(max_seq_len, window + block_m)
    n_blocks, m_blocks = cdiv(keys, block_n), cdiv(rows, block_m)
    blocks = (1 if varlen else batch) * heads.num_kv_heads * m_blocks
    splits = num_splits_heuristic(
        blocks,
        num_sms,
        n_blocks,
        m_blocks,
        max_seq_len * (heads.head_dim + heads.value_dim) * kv_bytes,
        causal or local,
    )
    return Decode(block_m, block_n, n_blocks, blocks, splits)


def dynamic_splits(
    seq_lens: np.ndarray,
    num_kv_heads: int,
    num_sms: int,
    static_splits: int,
    block_n: int = 128,
    m_blocks: int | np.ndarray = 1,
) -> np.ndarray:
    """Splits of each sequence, so that no thread block gets much more than its share of blocks.

    ``per_sm = ceil(1.1 * sum(m * n) * num_kv_heads / num_sms)`` in float32, then
    ``clamp(ceil(n / per_sm), 1, static_splits)``, with n key blocks and m query blocks a sequence.

    Returns
    -------
    int64 array, shape (batch,)

    Notes
    -----
    The device planner evaluates the same expression: three float32 roundings, left to right.
    A batch of empty sequences gets one split each, where the engine divides by zero.

    Examples
    --------
    20 key blocks, 8 heads: ceil(176 / 132) = 2 blocks an SM, hence 10 splits.

    >>> dynamic_splits(np.array([2560]), 8, 132, 17).tolist()
    [10]
    """
    lens = np.asarray(seq_lens, np.int64)
    if len(lens) > MAX_DYNAMIC_BATCH or static_splits == 1:
        return np.ones(len(lens), np.int64)
    n_blocks = -(-lens // block_n)
    total = np.float32((n_blocks * m_blocks).sum())
    share = total * np.float32(1.1) * np.float32(num_kv_heads) / np.float32(num_sms)
    per_sm = max(int(np.ceil(share)), 1)
    return np.clip(-(-n_blocks // per_sm), 1, static_splits)


def _split_plan(step: StepShape, splits: np.ndarray, block_n: int, policy: str) -> SplitPlan:
    """Each sequence's visible key blocks in ``splits`` runs of equally many blocks."""
    first_block = step.first_visible // block_n
    n_blocks = -(-step.lens // block_n) - first_block
    sizes = np.maximum(-(-n_blocks // splits), 1) * block_n
    return plan_from(step, first_block * block_n, sizes, policy)


def _reason(found: Decode, num_sms: int) -> str:
    if almost_full(found.mblocks, num_sms):
        return f"{found.mblocks} blocks fill 80 % of {num_sms} SMs"
    if found.n_blocks <= 4:
        return f"{found.n_blocks} key blocks of {found.block_n} are too few to split"
    return (
        f"{found.mblocks} blocks for {num_sms} SMs: {found.num_splits} of at most "
        f"{min(found.n_blocks, num_sms, MAX_SPLITS)} splits fill the wave within 85 % of the best"
    )


@dataclass(frozen=True)
class Fa3:
    """One count for the whole batch, from the longest sequence.

    This is the rule of calls whose lengths the host knows; ``Fa3Dynamic`` is the rule of decode
    with lengths on the device. Thread blocks of the unsplit path are persistent, one per SM.
    """

    name: ClassVar[str] = "fa3"
    paged: bool = True

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        found = _decode_step(step, device, self.paged, varlen=False)
        splits = found.num_splits
        m_blocks = found.mblocks // (step.batch * step.heads.num_kv_heads)
        plan = _split_plan(step, np.array(splits), found.block_n, self.name)
        grid: tuple[int, ...] = (device.num_sms,)
        if splits > 1:
            grid = (m_blocks, splits * step.heads.num_kv_heads, step.batch)
        account = make_account(
            device,
            split=splits > 1,
            reason=_reason(found, device.num_sms),
            grid=grid,
            busy_blocks=visible_rows(step, plan) * m_blocks * step.heads.num_kv_heads,
            num_splits=splits,
            scratch_bytes=_scratch_bytes(step, splits),
            block_m=found.block_m,
            block_n=found.block_n,
            num_n_blocks=found.n_blocks,
            total_mblocks=found.mblocks,
        )
        return plan, account


@dataclass(frozen=True)
class Fa3Dynamic:
    """A count per sequence from ``dynamic_splits``, under a static cap.

    Parameters
    ----------
    num_splits : int, optional
        The cap. Left out, it is the heuristic's answer for a batch of one, or 32 when
        ``step.cuda_graph``, since a captured step must fix it.
    """

    name: ClassVar[str] = "fa3-dynamic"
    num_splits: int | None = None
    paged: bool = True

    def cap(self, step: StepShape, found: Decode) -> int:
        """Most splits of a sequence."""
        return self.num_splits or (GRAPH_SPLITS if step.cuda_graph else found.num_splits)

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device; the cap follows from the step's longest length.

        Raises
        ------
        ValueError
            If the step has a window, whose first visible key depends on the length.
        """
        if step.window is not None:
            raise ValueError(
                f"{self.name} plans on the device without a window only; got {step.window}: "
                "plan on the host, or use a rule that does not look at the window"
            )
        found = _decode_step(step, device, self.paged, varlen=True)
        cap = self.cap(step, found)
        if cap == 1 or step.batch > MAX_DYNAMIC_BATCH:
            return DeviceRule("count", 1, found.block_n)
        return DeviceRule(
            "fa3-dynamic",
            cap,
            found.block_n,
            num_sms=device.num_sms,
            num_kv_heads=step.heads.num_kv_heads,
            query_tiles=cdiv(step.heads.group_size, found.block_m),
        )

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        found = _decode_step(step, device, self.paged, varlen=True)
        cap = self.cap(step, found)
        m_blocks = -(-step.query_len_per_sequence * heads.group_size // found.block_m)
        splits = dynamic_splits(
            step.lens, heads.num_kv_heads, device.num_sms, cap, found.block_n, m_blocks
        )
        plan = _split_plan(step, splits, found.block_n, self.name)
        if cap == 1:
            reason = f"the static count is 1: {_reason(found, device.num_sms)}"
        elif step.batch > MAX_DYNAMIC_BATCH:
            reason = f"batches beyond {MAX_DYNAMIC_BATCH} are never split"
        else:
            reason = f"an SM's share of all key blocks and 10 % more, at most {cap} splits"
        account = make_account(
            device,
            split=cap > 1,
            reason=reason,
            grid=(device.num_sms,),
            busy_blocks=visible_rows(step, plan, m_blocks) * heads.num_kv_heads,
            num_splits=int(splits.max()),
            scratch_bytes=_scratch_bytes(step, cap),
            block_m=found.block_m,
            block_n=found.block_n,
            num_splits_static=cap,
            num_splits_dynamic=splits,
        )
        return plan, account


def _decode_step(step: StepShape, device: Device, paged: bool, varlen: bool) -> Decode:
    return decode(
        step.batch,
        step.heads,
        step.max_seq_len,
        device.num_sms,
        paged=paged,
        kv_bytes=step.kv_bytes,
        varlen=varlen,
        query_len=step.max_query_len,
        page_size=step.page_size,
        window=step.window,
    )


def _scratch_bytes(step: StepShape, splits: int) -> int:
    """Normalised fp32 vectors and one LSE each; nothing when unsplit."""
    rows = step.num_query_tokens * step.heads.num_q_heads
    return splits * rows * (step.heads.value_dim + 1) * 4 if splits > 1 else 0
