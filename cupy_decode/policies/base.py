"""What a split policy sees and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_decode.heads import HeadConfig
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
    """

    num_sms: int = 132
    compute_capability: tuple[int, int] = (9, 0)
    blocks_per_sm: int | None = None

    @classmethod
    def of(cls, device: Device | int | None) -> Device:
        """A ``Device`` from itself, from an SM count, or the default (an H100/H200's 132 SMs)."""
        if isinstance(device, Device):
            return device
        return cls() if device is None else cls(num_sms=int(device))


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
        lens = np.atleast_1d(np.asarray(self.seq_lens)).astype(np.int64)
        object.__setattr__(self, "lens", lens)

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def max_query_len(self) -> int:
        return 1 if self.query_lens is None else int(np.max(self.query_lens))


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
    waves: float
    num_splits: int
    scratch_bytes: int
    details: dict[str, Any] = field(default_factory=dict)


#: A policy is a pure function: the same step and device always give the same plan.
Policy = Callable[[StepShape, Device], tuple[SplitPlan, Account]]
