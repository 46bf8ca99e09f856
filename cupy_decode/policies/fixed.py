"""The two rules that look at nothing but their parameter, and the share rule for ragged batches.

A fixed count keeps the launch geometry constant; a fixed size keeps every sequence's arithmetic
independent of its batch mates, which is what reproducible bits need; equal shares balance a ragged
batch over persistent thread blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cupy_decode.grid import blocks_per_row
from cupy_decode.heads import whole
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, DeviceRule, StepShape, row_account


@dataclass(frozen=True)
class FixedCount:
    """At most ``num_splits`` splits of every sequence, in multiples of ``tile`` keys.

    Examples
    --------
    s = 257 in 16 splits: ceil(257 / 16) = 17 tiles, ceil(17 / 16) = 2 tiles each, hence 9 splits.

    >>> from cupy_decode.heads import presets
    >>> plan, _ = FixedCount(16)(StepShape([257, 2560], presets["llama-3-8b"]), Device())
    >>> plan.counts.tolist()
    [9, 16]
    """

    name: ClassVar[str] = "fixed"
    num_splits: int
    tile: int = 16

    def __post_init__(self) -> None:
        whole("num_splits", self.num_splits, most=None)  # there are never more than tiles
        whole("tile", self.tile)

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        plan = SplitPlan.from_num_splits(
            step.lens, self.num_splits, tile=self.tile, policy=self.name
        )
        reason = f"{self.num_splits} splits were asked for"
        return plan, row_account(step, device, plan, reason, self.num_splits)

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device."""
        return DeviceRule("count", self.num_splits, self.tile)


@dataclass(frozen=True)
class FixedSize:
    """Splits of exactly ``split_size`` keys, the last one shorter.

    Examples
    --------
    >>> from cupy_decode.heads import presets
    >>> plan, _ = FixedSize(512)(StepShape([513], presets["llama-3-8b"]), Device())
    >>> plan.ranges([513])
    [(0, 0, 512), (0, 512, 513)]
    """

    name: ClassVar[str] = "split-size"
    split_size: int

    def __post_init__(self) -> None:
        whole("split_size", self.split_size, most=None)  # past the end, it is one split

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        plan = SplitPlan.from_split_size(step.lens, self.split_size, policy=self.name)
        reason = f"splits of {self.split_size} keys were asked for"
        return plan, row_account(step, device, plan, reason)

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device."""
        return DeviceRule("size", self.split_size)


def equal_shares(seq_lens: Any, num_workers: int, tile: int = 16) -> tuple[SplitPlan, np.ndarray]:
    """Cut the tokens of a whole batch into ``num_workers`` equal runs.

    The sequences are laid end to end in tiles of ``tile`` keys, N in all, and worker ``w`` takes
    the tiles ``floor(w * N / num_workers) .. floor((w + 1) * N / num_workers)``. Where a cut falls
    inside a sequence it begins a new split, so there are at most ``batch + num_workers - 1``.

    Parameters
    ----------
    seq_lens : (batch,) integers
    num_workers : int
    tile : int
        Cuts fall on multiples of this many keys of their sequence.

    Returns
    -------
    plan : SplitPlan
    worker_offsets : int32 array, shape (num_workers + 1,)
        Worker ``w`` owns the plan rows ``worker_offsets[w] .. worker_offsets[w + 1]``.

    Raises
    ------
    TypeError, ValueError
        If ``num_workers`` or ``tile`` is no integer, or below 1.

    Examples
    --------
    16 keys a tile: 4 + 1 + 3 tiles over two workers, 4 each.

    >>> plan, workers = equal_shares([64, 10, 48], 2)
    >>> plan.ranges([64, 10, 48]), workers.tolist()
    ([(0, 0, 64), (1, 0, 10), (2, 0, 48)], [0, 1, 3])
    """
    num_workers, tile = whole("num_workers", num_workers), whole("tile", tile)
    lens = np.asarray(seq_lens, np.int64)
    first_tile = np.concatenate([[0], np.cumsum(-(-lens // tile))])
    cuts = np.arange(num_workers + 1) * first_tile[-1] // num_workers

    # A row begins at each sequence start and at each cut strictly inside a sequence.
    inner = np.setdiff1d(cuts, first_tile)
    owner = np.searchsorted(first_tile, inner, side="right") - 1
    sequence = np.concatenate([np.arange(len(lens)), owner])
    row_tile = np.concatenate([first_tile[:-1], inner])
    order = np.lexsort((row_tile, sequence))
    sequence, row_tile = sequence[order], row_tile[order]

    begins = (row_tile - first_tile[sequence]) * tile
    bounds = np.split(begins, np.flatnonzero(np.diff(sequence)) + 1)
    plan = SplitPlan.from_bounds([list(row) for row in bounds], lens, policy=EqualShares.name)

    worker_offsets = np.searchsorted(row_tile, cuts).astype(np.int32)
    worker_offsets[-1] = len(row_tile)  # empty sequences at the end are somebody's rows too
    return plan, worker_offsets


@dataclass(frozen=True)
class EqualShares:
    """``equal_shares`` over ``num_workers`` persistent thread blocks per KV head and head tile.

    ``num_workers`` left out gives one full wave. The account's ``worker_offsets`` say which rows
    each worker owns.
    """

    name: ClassVar[str] = "equal-shares"
    num_workers: int | None = None
    tile: int = 16

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            whole("num_workers", self.num_workers)
        whole("tile", self.tile)

    def workers(self, step: StepShape, device: Device) -> int:
        """Persistent thread blocks per KV head and head tile."""
        running = device.num_sms * (device.blocks_per_sm or 1)
        return self.num_workers or max(1, running // blocks_per_row(step.heads))

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        workers = self.workers(step, device)
        plan, worker_offsets = equal_shares(step.lens, workers, self.tile)
        account = row_account(
            step,
            device,
            plan,
            f"{int(step.lens.sum())} keys in {workers} equal shares",
            num_workers=workers,
            worker_offsets=worker_offsets,
        )
        return plan, account

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device."""
        return DeviceRule("equal-shares", self.workers(step, device), self.tile)
