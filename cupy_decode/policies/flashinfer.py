"""FlashInfer's two paged-decode plans: the smallest chunk whose grid still fits the machine.

Source: ``include/flashinfer/attention/scheduler.cuh`` (``DecodePlan``, ``PrefillPlan``). Both
search the chunk length, in pages, on the host; a chunk is one thread block per KV head.

CUDA cores, Llama-3-8B, 2,560 keys in 160 pages of 16, 528 resident thread blocks: the smallest
chunk allowed is 128 keys, 8 pages, and 8 * ceil(160 / 8) = 160 thread blocks fit, so 20 splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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

#: Keys of the smallest chunk.
MIN_CHUNK = 128
#: Occupancy of the CUDA-core kernel where the device does not state it; at run time it is asked
#: of the driver.
CUDA_CORE_BLOCKS_PER_SM = 4
#: Occupancy that the tensor-core plan assumes.
TENSOR_CORE_BLOCKS_PER_SM = 2


def _smallest_chunk(work: np.ndarray, tiles: np.ndarray, least: int, limit: int) -> int:
    """Smallest chunk of at least ``least`` with ``sum(tiles * ceil(work / chunk)) <= limit``.

    Falls back to the longest entry when nothing shorter fits, and to ``least`` when nothing is
    longer.
    """
    low, high = least, int(work.max())
    while low < high:
        middle = (low + high) // 2
        if int((tiles * -(-work // middle)).sum()) > limit:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True)
class CudaCorePlan:
    """Chunk length and rows of the CUDA-core plan.

    Attributes
    ----------
    split_kv : bool
    chunk_pages, chunk_tokens : int
    new_batch : int
        Rows that the search counted.
    padded_batch : int
        Rows of the launch grid.
    o_indptr : list of int
        First row of each request; the last entry is the number of rows.
    """

    split_kv: bool
    chunk_pages: int
    chunk_tokens: int
    new_batch: int
    padded_batch: int
    o_indptr: list[int]

    @property
    def valid(self) -> int:
        """Rows of the grid that have work: the first ``new_batch`` ones, as far as they fit."""
        return min(self.new_batch, self.padded_batch)


def cuda_core_plan(
    num_pages: Any, page_size: int, num_kv_heads: int, max_grid: int, cuda_graph: bool = False
) -> CudaCorePlan:
    """Plan of the CUDA-core decode kernel.

    Parameters
    ----------
    num_pages : (batch,) integers
        Pages of each request.
    max_grid : int
        Thread blocks that run at once.
    cuda_graph : bool
        A captured launch always takes the split kernel, padded to ``max_grid // num_kv_heads``
        rows.

    Notes
    -----
    Empty requests cost nothing in the search and a row in the plan. With many of them the rows
    exceed the padded grid: 8 empty and two of 4,000 pages need 74 rows where 66 fit.

    Examples
    --------
    >>> cuda_core_plan([1000, 10, 10, 10], 16, 8, 528).o_indptr
    [0, 63, 64, 65, 66]
    """
    pages = np.asarray(num_pages, np.int64)
    batch = len(pages)
    if batch * num_kv_heads >= max_grid:
        split, chunk, rows = False, max(int(pages.max()), 1), batch
    else:
        least = max(MIN_CHUNK // page_size, 1)
        ones = np.ones(batch, np.int64)
        chunk = _smallest_chunk(pages, ones, least, max_grid // num_kv_heads)
        rows = int((-(-np.maximum(pages, 1) // chunk)).sum())
        split = cuda_graph or rows != batch
    padded = max_grid // num_kv_heads if cuda_graph and split else batch if cuda_graph else rows
    chunks = -(-np.maximum(pages, 1) // chunk)
    o_indptr = [0, *np.cumsum(chunks).tolist()]
    return CudaCorePlan(split, chunk, chunk * page_size, rows, padded, o_indptr)


def cta_tile_q(
    packed_query_len: int, head_dim: int, compute_capability: tuple[int, int] = (9, 0)
) -> int:
    """Query rows of one tensor-core thread block, from the average of query tokens times group.

    Examples
    --------
    >>> [cta_tile_q(rows, 128) for rows in (4, 16, 17, 65)]
    [16, 16, 64, 128]
    """
    if head_dim >= 512:
        return 16 if packed_query_len <= 32 else 32
    if packed_query_len > 64 and head_dim < 256:
        return 128
    if compute_capability[0] < 8:
        return 64  # Turing lacks the shared memory for the 16-row layout
    return 64 if packed_query_len > 16 else 16


@dataclass(frozen=True)
class TensorCorePlan:
    """Chunk length and rows of the tensor-core plan; rows count query tiles too."""

    cta_tile_q: int
    split_kv: bool
    chunk_pages: int
    chunk_tokens: int
    chunks_per_request: list[int]
    new_batch: int
    padded_batch: int


def tensor_core_plan(
    num_pages: Any,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    num_sms: int,
    *,
    cuda_graph: bool = False,
    fixed_split_pages: int = 0,
    disable_split: bool = False,
    query_lens: int | Sequence[int] = 1,
    head_dim: int = 128,
    window_left: int = -1,
    compute_capability: tuple[int, int] = (9, 0),
) -> TensorCorePlan:
    """Plan of the tensor-core decode kernel, which is the prefill kernel with short queries.

    Parameters
    ----------
    num_pages : (batch,) integers
    fixed_split_pages : int
        Chunk length to use instead of searching one: the same bits in every batch.
    disable_split : bool
        One chunk per request.
    window_left : int
        Keys visible in front of the newest, or -1 for all.

    Examples
    --------
    2 * 132 // 8 = 33 rows are allowed, so 160 pages may be cut as finely as 128 keys permit.

    >>> tensor_core_plan([160], 16, 32, 8, 132).chunks_per_request
    [20]
    """
    pages = np.asarray(num_pages, np.int64)
    batch, group_size = len(pages), num_q_heads // num_kv_heads
    packed = np.broadcast_to(np.asarray(query_lens, np.int64), pages.shape) * group_size
    total_rows = int(packed.sum())
    uniform = packed.min() == packed.max()
    # A captured launch of ragged queries must provide for all spare tokens on one request.
    typical_rows = total_rows // batch
    if cuda_graph and not uniform:
        typical_rows = total_rows - (batch - 1) * group_size
    tile = cta_tile_q(typical_rows, head_dim, compute_capability)
    tiles = -(-packed // tile)
    if window_left >= 0:
        pages = np.minimum(cdiv(window_left + tile, page_size), pages)
    pages = np.maximum(pages, 1)

    row_limit = TENSOR_CORE_BLOCKS_PER_SM * num_sms // num_kv_heads
    longest = int(pages.max())
    if disable_split:
        split, chunk = False, longest
    elif fixed_split_pages > 0:
        split, chunk = longest > fixed_split_pages, fixed_split_pages
    else:
        chunk = _smallest_chunk(pages, tiles, max(MIN_CHUNK // page_size, 1), row_limit)
        split = cuda_graph or chunk < longest
    chunks = -(-pages // chunk)
    rows = int((tiles * chunks).sum())
    padded = rows
    if cuda_graph:
        # Several tokens per request are promised to stay as many; a single one is not.
        graph_tiles = int(tiles.sum())
        if not uniform or packed[0] == group_size:
            graph_tiles = cdiv(total_rows, tile) + batch - 1
        padded = max(row_limit, graph_tiles)
    return TensorCorePlan(tile, split, chunk, chunk * page_size, chunks.tolist(), rows, padded)


def _why_whole(step: StepShape, row_limit: int) -> str:
    least = max(MIN_CHUNK // step.page_size, 1) * step.page_size
    if step.max_seq_len <= least:
        return f"no request exceeds the smallest chunk, {least} keys"
    return f"cutting any request would exceed {row_limit} rows"


@dataclass(frozen=True)
class FlashInferCudaCore:
    """``cuda_core_plan`` over pages of ``step.page_size``."""

    name: ClassVar[str] = "flashinfer-cuda-core"

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        max_grid = device.num_sms * (device.blocks_per_sm or CUDA_CORE_BLOCKS_PER_SM)
        found = cuda_core_plan(
            -(-step.lens // step.page_size),
            step.page_size,
            heads.num_kv_heads,
            max_grid,
            step.cuda_graph,
        )
        blocks = step.batch * heads.num_kv_heads
        if blocks >= max_grid:
            reason = f"{blocks} blocks already fill {max_grid} slots"
        elif not found.split_kv:
            reason = _why_whole(step, max_grid // heads.num_kv_heads)
        else:
            reason = f"chunks of {found.chunk_tokens} keys, the shortest that fit {max_grid} slots"
        if found.o_indptr[-1] > found.padded_batch:
            reason += f"; {found.o_indptr[-1]} rows overflow {found.padded_batch} padded ones"
        plan = SplitPlan.from_split_size(step.lens, found.chunk_tokens, policy=self.name)
        account = make_account(
            device,
            split=found.split_kv,
            reason=reason,
            grid=(found.padded_batch, heads.num_kv_heads),
            busy_blocks=visible_rows(step, plan) * heads.num_kv_heads,
            num_splits=int(plan.counts.max()),
            scratch_bytes=heads.num_q_heads * found.padded_batch * (heads.value_dim + 1) * 4
            if found.split_kv
            else 0,
            blocks_per_sm=CUDA_CORE_BLOCKS_PER_SM,
            max_grid_size=max_grid,
            kv_chunk_size=found.chunk_tokens,
            padded_batch_size=found.padded_batch,
            new_batch_size=found.new_batch,
        )
        return plan, account


@dataclass(frozen=True)
class FlashInferTensorCore:
    """``tensor_core_plan`` over pages of ``step.page_size``.

    Parameters
    ----------
    fixed_split_pages, disable_split
        As in ``tensor_core_plan``: the two ways to the same bits in every batch.
    """

    name: ClassVar[str] = "flashinfer-tensor-core"
    fixed_split_pages: int = 0
    disable_split: bool = False

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        window_left = -1 if step.window is None else step.window - 1
        found = tensor_core_plan(
            -(-step.lens // step.page_size),
            step.page_size,
            heads.num_q_heads,
            heads.num_kv_heads,
            device.num_sms,
            cuda_graph=step.cuda_graph,
            fixed_split_pages=self.fixed_split_pages,
            disable_split=self.disable_split,
            query_lens=step.query_len_per_sequence.tolist(),
            head_dim=heads.value_dim,
            window_left=window_left,
            compute_capability=device.compute_capability,
        )
        limit = TENSOR_CORE_BLOCKS_PER_SM * device.num_sms // heads.num_kv_heads
        if self.disable_split:
            reason = "splitting is disabled"
        elif self.fixed_split_pages:
            reason = f"chunks of {found.chunk_tokens} keys were asked for"
        elif found.split_kv:
            reason = f"chunks of {found.chunk_tokens} keys, the shortest that give {limit} rows"
        else:
            reason = _why_whole(step, limit)
        if found.new_batch > found.padded_batch:
            reason += f"; refused: {found.new_batch} rows exceed {found.padded_batch} captured ones"
        # The chunks start where the window of the first query token does.
        first = step.first_visible
        sizes = np.full(step.batch, found.chunk_tokens)
        if not found.split_kv:
            sizes = np.maximum(step.lens, 1)
        plan = plan_from(step, first, sizes, self.name)
        account = make_account(
            device,
            split=found.split_kv,
            reason=reason,
            grid=(found.padded_batch, 1, heads.num_kv_heads),
            busy_blocks=found.new_batch * heads.num_kv_heads if step.max_seq_len else 0,
            num_splits=int(plan.counts.max()),
            scratch_bytes=heads.num_q_heads
            * found.padded_batch
            * found.cta_tile_q
            * (heads.value_dim + 1)
            * 4
            if found.split_kv
            else 0,
            blocks_per_sm=TENSOR_CORE_BLOCKS_PER_SM,
            cta_tile_q=found.cta_tile_q,
            kv_chunk_size=found.chunk_tokens,
            padded_batch_size=found.padded_batch,
            new_batch_size=found.new_batch,
        )
        return plan, account
