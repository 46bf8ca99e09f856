"""FlashInfer's BatchAttention: equal chunks dealt to the least loaded of the persistent blocks.

Source: ``include/flashinfer/attention/scheduler.cuh`` (``TwoStageHolisticPlan``) and ``heap.h``.

16 sequences of 2,560 keys under 8 KV heads on 132 SMs: 16 * 2560 * 8 / 264 = 1242 keys a thread
block, rounded up to 1,280; two chunks a sequence, 256 work items for 264 thread blocks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cupy_decode.grid import cdiv
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, StepShape, make_account

#: Query rows of the two kernels, long queries and short ones.
LONG_TILE_Q, SHORT_TILE_Q = 128, 16


def chunk_limit(keys: int) -> int:
    """Chunk length for ``keys`` keys a thread block: 128, or the next multiple of 256.

    Examples
    --------
    >>> [chunk_limit(keys) for keys in (1, 128, 129, 257)]
    [128, 128, 256, 512]
    """
    return 128 if keys <= 128 else cdiv(keys, 256) * 256


@dataclass(frozen=True)
class Deal:
    """Chunks of a batch and where they run.

    Attributes
    ----------
    ctas : int
        Persistent thread blocks.
    limits : int64 array, shape (batch,)
        Longest chunk of each request.
    items : int64 array, shape (work_items, 5)
        ``(request, KV head, first key, end key, thread block)``, in the order they are dealt.
    """

    ctas: int
    limits: np.ndarray
    items: np.ndarray

    @property
    def keys_per_cta(self) -> np.ndarray:
        """Keys that each thread block reads, int64, shape (ctas,)."""
        keys = self.items[:, 3] - self.items[:, 2]
        return np.bincount(self.items[:, 4], keys, minlength=self.ctas).astype(np.int64)


def deal(
    kv_lens: Any,
    num_q_heads: int,
    num_kv_heads: int,
    num_sms: int,
    head_dim: int = 128,
    query_lens: Any = 1,
) -> Deal:
    """Cut every request into chunks and give each to the thread block with the least to do.

    An item costs twice its query tile and its keys. Two thread blocks run on an SM, one for
    head_dim 256 and more.

    Parameters
    ----------
    kv_lens : (batch,) integers
    query_lens : int or (batch,) integers
        Query tokens. A request of more than 16 packed rows goes to the 128-row kernel, whose
        chunks are half as long when there is more than one KV head; it is dealt first. Only the
        last query tile of a request, which sees all its keys, is dealt here.

    Notes
    -----
    Among equally loaded thread blocks the lowest number is taken; the source leaves the choice to
    the order of a C++ heap. Loads are the same either way.

    Examples
    --------
    >>> result = deal([2560] * 16, 32, 8, 132)
    >>> int(result.limits[0]), len(result.items), int(result.keys_per_cta.max())
    (1280, 256, 1280)
    """
    lens = np.asarray(kv_lens, np.int64)
    rows = np.broadcast_to(np.asarray(query_lens, np.int64), lens.shape) * (
        num_q_heads // num_kv_heads
    )
    is_long = rows > SHORT_TILE_Q
    ctas = num_sms if head_dim >= 256 else 2 * num_sms

    limit = chunk_limit(max(cdiv(int(lens.sum()) * num_kv_heads, ctas), 1))
    limits = np.where(is_long, limit // min(num_kv_heads, 2), limit)

    load = [(0, cta) for cta in range(ctas)]
    items = []
    for request in np.argsort(~is_long, kind="stable").tolist():
        tile = LONG_TILE_Q if is_long[request] else SHORT_TILE_Q
        length, step = int(lens[request]), int(limits[request])
        for begin in range(0, max(length, 1), step):
            end = min(begin + step, length)
            for head in range(num_kv_heads):
                cost, cta = load[0]
                heapq.heapreplace(load, (cost + 2 * tile + end - begin, cta))
                items.append((request, head, begin, end, cta))
    return Deal(ctas, limits, np.array(items, np.int64))


@dataclass(frozen=True)
class FlashInferBatchAttention:
    """``deal``: the plan holds its chunks, the account's ``items`` where each runs."""

    name: ClassVar[str] = "flashinfer-batch-attention"

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        found = deal(
            step.lens,
            heads.num_q_heads,
            heads.num_kv_heads,
            device.num_sms,
            heads.head_dim,
            step.query_len_per_sequence,
        )
        plan = SplitPlan.from_counts_and_sizes(step.lens, found.limits, policy=self.name)
        keys = found.keys_per_cta
        # The buffer is sized for the worst case: 4 * ctas * (128 + 16) rows per KV head.
        scratch_rows = 4 * found.ctas * (LONG_TILE_Q + SHORT_TILE_Q) * heads.num_kv_heads
        account = make_account(
            device,
            split=not plan.unsplit,
            reason=(
                f"{len(found.items)} chunks of at most {int(found.limits.max())} keys dealt to "
                f"{found.ctas} blocks, {int(keys.min())} to {int(keys.max())} keys each"
            ),
            grid=(1, found.ctas),
            busy_blocks=int((keys > 0).sum()),
            num_splits=int(plan.counts.max()),
            scratch_bytes=scratch_rows * (2 * heads.head_dim + 4),
            blocks_per_sm=found.ctas // device.num_sms,
            items=found.items,
            kv_len_limit=found.limits,
        )
        return plan, account
