"""What a split policy sees and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_decode.grid import blocks_per_row, cdiv, head_tiles, waves
from cupy_decode.heads import INT32_MAX, HeadConfig, whole
from cupy_decode.plan import SplitPlan


@dataclass(frozen=True)
class Device:
    """The part of a GPU that split rules look at.

    Parameters
    ----------
    num_sms : int
        Streaming multiprocessors.
    compute_capability : (int, int)
    blocks_per_sm : int, optional
        Occupancy of the policy's own kernel, where it is known.

    Raises
    ------
    TypeError, ValueError
        If a count is no integer, or below 1.
    """

    num_sms: int = 132
    compute_capability: tuple[int, int] = (9, 0)
    blocks_per_sm: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_sms", "blocks_per_sm"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value)

    @classmethod
    def of(cls, device: Device | int | None) -> Device:
        """A ``Device`` from itself, from an SM count, or the default (an H100/H200's 132 SMs)."""
        if isinstance(device, Device):
            return device
        if device is None:
            return cls()
        if isinstance(device, str):
            raise TypeError(
                f"device must be a Device or a number of SMs; got {device!r}: an H100 has 132"
            )
        return cls(num_sms=whole("device", device))


@dataclass(frozen=True)
class StepShape:
    """One decode step of one attention layer, as a split rule sees it.

    Parameters
    ----------
    seq_lens : (batch,) integers
        Keys of each sequence, the newest one included.
    heads : HeadConfig
    query_lens : (batch,) integers, optional
        Query tokens of each sequence; all 1 in pure decode.
    q_bytes, kv_bytes : int
        Bytes per element of the query and of the cache.
    page_size : int
        Tokens per kernel block.
    window : int, optional
        Newest keys that are visible, the current one included.
    cuda_graph : bool
        True when the launch will be captured.

    Raises
    ------
    TypeError
        If a size is no integer.
    ValueError
        If a length is negative, past int32 or not an integer, ``query_lens`` does not fit
        ``seq_lens`` or a size is below 1.
    """

    seq_lens: Any
    heads: HeadConfig
    query_lens: Any = None
    q_bytes: int = 2
    kv_bytes: int = 2
    page_size: int = 16
    window: int | None = None
    cuda_graph: bool = False
    lens: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lens = np.atleast_1d(np.asarray(self.seq_lens))
        if lens.ndim != 1 or lens.size == 0 or lens.dtype.kind not in "iu":
            raise ValueError(
                "seq_lens must be a non-empty one-dimensional integer array; "
                f"got shape {lens.shape}, dtype {lens.dtype}"
            )
        if lens.min() < 0:
            b = int(lens.argmin())
            raise ValueError(f"seq_lens[{b}] is {lens[b]}; lengths cannot be negative")
        if lens.max() > INT32_MAX:
            b = int(lens.argmax())
            raise ValueError(f"seq_lens[{b}] is {lens[b]}; lengths must be at most {INT32_MAX}")
        for name in ("q_bytes", "kv_bytes", "page_size", "window"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value)
        if self.query_lens is not None:
            queries = np.asarray(self.query_lens)
            if queries.shape != lens.shape or queries.dtype.kind not in "iu" or queries.min() < 1:
                raise ValueError(
                    f"query_lens must be {len(lens)} integers of at least 1, one per sequence; "
                    f"got {self.query_lens}"
                )
        object.__setattr__(self, "lens", lens.astype(np.int64))

    @property
    def batch(self) -> int:
        """Sequences of the step."""
        return len(self.lens)

    @property
    def max_seq_len(self) -> int:
        """Keys of the longest sequence."""
        return int(self.lens.max())

    @property
    def max_query_len(self) -> int:
        """Query tokens of the sequence that has most of them."""
        return 1 if self.query_lens is None else int(np.max(self.query_lens))

    @property
    def num_query_tokens(self) -> int:
        """Query tokens of the whole batch; equal to ``batch`` in pure decode."""
        return self.batch if self.query_lens is None else int(np.sum(self.query_lens))

    @property
    def query_len_per_sequence(self) -> np.ndarray:
        """Query tokens of each sequence, int64, shape (batch,)."""
        if self.query_lens is None:
            return np.ones(self.batch, np.int64)
        return np.asarray(self.query_lens, np.int64)

    @property
    def first_visible(self) -> np.ndarray:
        """First key that any query token of each sequence sees, int64, shape (batch,)."""
        if self.window is None:
            return np.zeros(self.batch, np.int64)
        return np.maximum(self.lens - self.query_len_per_sequence - (self.window - 1), 0)


@dataclass(frozen=True)
class Account:
    """What the engine behind a policy would launch for a step.

    Attributes
    ----------
    split : bool
        Whether the engine takes its split path.
    reason : str
        Why, in words.
    grid : tuple of int
        The engine's own stage-1 grid.
    thread_blocks : int
        Its product.
    busy_blocks : int
        Thread blocks that have a key to read; the others return at once.
    waves : float
        ``thread_blocks`` over the blocks that run at once.
    num_splits : int
        Most splits requested for one sequence.
    scratch_bytes : int
        Partial state that the engine allocates for the step.
    details : dict
        Intermediate values, under the engine's own names.
    """

    split: bool
    reason: str
    grid: tuple[int, ...]
    thread_blocks: int
    busy_blocks: int
    waves: float
    num_splits: int
    scratch_bytes: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceRule:
    """A policy as ``plan_splits.cu`` evaluates it on lengths that the host does not know.

    Attributes
    ----------
    rule : str
        A key of ``specs.PLAN_RULES``; the names below are the kernel's.
    value : int
        The rule's number: splits, keys per split or per chunk, or runs.
    tile : int
        Keys that are never parted.
    num_sms, num_kv_heads, query_tiles : int
        What some rules know of the machine and the layer.
    """

    rule: str
    value: int
    tile: int = 16
    num_sms: int = 1
    num_kv_heads: int = 1
    query_tiles: int = 1

    def max_rows(self, batch: int, max_seq_len: int) -> int:
        """Most rows of a plan for ``batch`` sequences of at most ``max_seq_len`` keys.

        Not the rows of the longest lengths: 256 keys in 16 splits of whole 16-key tiles are 16
        rows, 272 keys are 9.

        Examples
        --------
        >>> DeviceRule("count", 16).max_rows(3, 272)
        48
        """
        if self.rule == "equal-shares":
            return batch + self.value - 1
        if self.rule == "size":
            return batch * max(cdiv(max_seq_len, self.value), 1)
        splits = cdiv(max_seq_len, self.value) if self.rule == "chunk" else self.value
        rows = batch * max(min(splits, cdiv(max_seq_len, self.tile)), 1)
        if self.rule == "fa3-dynamic":
            # Shares are at least the tiles of all sequences over num_sms / (heads * query tiles).
            rows = min(rows, batch + self.num_sms // (self.num_kv_heads * self.query_tiles))
        return rows


#: A policy is a pure function: the same step and device always give the same plan.
Policy = Callable[[StepShape, Device], tuple[SplitPlan, Account]]


def plan_from(step: StepShape, first_keys: np.ndarray, sizes: np.ndarray, policy: str) -> SplitPlan:
    """Splits of ``sizes[b]`` keys counted from ``first_keys[b]``.

    Engines that skip the keys in front of a window split what is left. Here the first split
    reaches back to key 0, so that the plan covers the sequence; the kernels skip what a window
    hides.
    """
    bounds = [
        [0, *range(first + size, length, size)]
        for first, size, length in zip(
            first_keys.tolist(), sizes.tolist(), step.lens.tolist(), strict=True
        )
    ]
    return SplitPlan.from_bounds(bounds, step.lens, policy=policy)


def visible_rows(step: StepShape, plan: SplitPlan, tiles: int | np.ndarray = 1) -> int:
    """Rows of a plan that own a key some query sees, each counted once per query tile.

    ``tiles`` are the query tiles that read a row: one number, or one per sequence.
    """
    begins = np.maximum(
        plan.split_begin[: plan.num_rows], np.repeat(step.first_visible, plan.counts)
    )
    ends = np.append(plan.split_begin[1 : plan.num_rows], 0).astype(np.int64)
    ends[plan.split_offsets[1:] - 1] = step.lens
    row_tiles = np.repeat(np.broadcast_to(tiles, step.lens.shape), plan.counts)
    return int(row_tiles[ends > begins].sum())


def partial_bytes(num_tokens: int, num_q_heads: int, v_head_dim: int, num_splits: int) -> int:
    """Bytes of the partial states: one fp32 vector and two fp32 numbers per token, head and split.

    Examples
    --------
    >>> partial_bytes(1, 32, 128, 16)
    266240
    """
    return num_tokens * num_q_heads * num_splits * (v_head_dim + 2) * 4


def make_account(
    device: Device,
    *,
    split: bool,
    reason: str,
    grid: tuple[int, ...],
    busy_blocks: int,
    num_splits: int,
    scratch_bytes: int,
    blocks_per_sm: int = 1,
    **details: Any,
) -> Account:
    """An ``Account`` whose thread blocks and waves follow from the grid.

    ``busy_blocks`` may count work items; persistent thread blocks are no more than the grid.
    ``blocks_per_sm`` is what the engine itself assumes where the device does not say.
    """
    blocks = math.prod(grid)
    return Account(
        split=split,
        reason=reason,
        grid=grid,
        thread_blocks=blocks,
        busy_blocks=min(busy_blocks, blocks),
        waves=waves(blocks, device.num_sms, device.blocks_per_sm or blocks_per_sm),
        num_splits=num_splits,
        scratch_bytes=scratch_bytes,
        details=details,
    )


def row_account(
    step: StepShape,
    device: Device,
    plan: SplitPlan,
    reason: str,
    num_splits: int | None = None,
    **details: Any,
) -> Account:
    """The account of a plan run by this package's own readable kernel: one thread block per plan
    row, KV head and tile of 16 query heads.

    ``num_splits`` is the count that was asked for, where that may exceed the rows.
    """
    heads = step.heads
    return make_account(
        device,
        split=not plan.unsplit,
        reason=reason,
        grid=(plan.num_rows, heads.num_kv_heads, head_tiles(heads)),
        busy_blocks=visible_rows(step, plan) * blocks_per_row(heads),
        num_splits=int(plan.counts.max()) if num_splits is None else num_splits,
        scratch_bytes=0
        if plan.unsplit
        else partial_bytes(plan.num_rows, heads.num_q_heads, heads.value_dim, 1),
        **details,
    )
