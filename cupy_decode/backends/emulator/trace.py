"""What an emulated launch did: counts per block and pointer argument, as NumPy arrays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Fields of ``LaunchTrace.counts``, in the runtime's order.
COUNTS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "loads",
            "stores",
            "atomics",
            "load_bytes",
            "store_bytes",
            "distinct_load_bytes",
            "distinct_store_bytes",
        )
    ]
)
#: Fields of ``LaunchTrace.blocks``.
BLOCKS = np.dtype([(name, np.int64) for name in ("shared_loads", "shared_stores", "barriers")])


@dataclass(frozen=True, eq=False)
class LaunchTrace:
    """Counts of one emulated launch.

    Attributes
    ----------
    kernel : str
        C++ name expression of the specialisation.
    grid, block : (int, int, int)
    arguments : tuple of str
        Names of the pointer arguments.
    counts : structured array ``COUNTS``, shape (thread blocks, arguments)
        Global memory. ``loads`` counts accesses, ``load_bytes`` their bytes, and
        ``distinct_load_bytes`` the different bytes that the block loaded at least once: what must
        come from memory if the block's repeated loads hit a cache.
    blocks : structured array ``BLOCKS``, shape (thread blocks,)
        Shared memory accesses and block-wide barriers.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[str, ...]
    counts: np.ndarray
    blocks: np.ndarray

    def __getitem__(self, argument: str) -> np.ndarray:
        """Counts of one pointer argument, a record per thread block."""
        if argument not in self.arguments:
            raise KeyError(f"no argument {argument!r}; there are {', '.join(self.arguments)}")
        return self.counts[:, self.arguments.index(argument)]

    def block_index(self, number: int) -> tuple[int, int, int]:
        """``blockIdx`` of a row of ``counts``; x runs fastest."""
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def idle(self, *arguments: str) -> np.ndarray:
        """True for the blocks that loaded nothing from any of these arguments.

        ``trace.idle("k_cache", "v_cache")`` are the blocks that exited early.
        """
        return np.all([self[name]["loads"] == 0 for name in arguments], axis=0)

    def table(self) -> str:
        """Totals of every argument that was touched, as text."""
        heads = ["argument", "loads", "bytes", "distinct/block", "stores", "bytes", "atomics"]
        keys = ("loads", "load_bytes", "distinct_load_bytes", "stores", "store_bytes", "atomics")
        rows = [heads]
        for name in self.arguments:
            totals = [int(self[name][key].sum()) for key in keys]
            if any(totals):
                rows.append([name, *(f"{n:,}" for n in totals)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
        lines = [
            row[0].ljust(widths[0])
            + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
            for row in rows
        ]
        head = f"{self.kernel}, grid {self.grid}, block {self.block}"
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        return self.table()

    def save(self, path: str | Path) -> None:
        """Write the trace as one ``.npz`` file."""
        head = {
            "kernel": self.kernel,
            "grid": self.grid,
            "block": self.block,
            "arguments": self.arguments,
        }
        with open(path, "wb") as file:
            np.savez_compressed(
                file, head=np.array(json.dumps(head)), counts=self.counts, blocks=self.blocks
            )

    @classmethod
    def load(cls, path: str | Path) -> LaunchTrace:
        """Read what ``save`` wrote. Needs no compiler."""
        with np.load(path, allow_pickle=False) as stored:
            head = json.loads(str(stored["head"]))
            return cls(
                head["kernel"],
                tuple(head["grid"]),
                tuple(head["block"]),
                tuple(head["arguments"]),
                stored["counts"],
                stored["blocks"],
            )
