"""A picture of a pool at one moment."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from cupy_decode.heads import counted

_COLUMNS = 64


@dataclass(frozen=True, eq=False)
class Snapshot:
    """State of every block; ``print`` it, or draw it with ``cupy_decode.plots.pool_snapshot``.

    Attributes
    ----------
    block_size : int
        Tokens per block.
    ref_counts : int32 array, shape (num_blocks,)
        Sequences that hold each block.
    cached : bool array, shape (num_blocks,)
        True where no sequence holds the block but its tokens can be found.
    num_tokens : int64 array, shape (num_blocks,)
        Tokens of use in each block.
    sequences : mapping of sequence id to tuple of int
        Blocks in order, -1 where the sliding window has passed.
    """

    block_size: int
    ref_counts: np.ndarray
    cached: np.ndarray
    num_tokens: np.ndarray
    sequences: Mapping[Hashable, tuple[int, ...]]

    @property
    def num_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def internal_fragmentation(self) -> float:
        """Share of the slots in used blocks that hold no token."""
        used = self.ref_counts > 0
        slots = int(used.sum()) * self.block_size
        return 1 - int(self.num_tokens[used].sum()) / slots if slots else 0.0

    def __str__(self) -> str:
        used = int((self.ref_counts > 0).sum())
        cached = int(self.cached.sum())
        lines = [
            f"{counted(self.num_blocks, 'block')} of {counted(self.block_size, 'token')}: "
            f"{used:,} used ({int((self.ref_counts > 1).sum()):,} shared), {cached:,} cached, "
            f"{self.num_blocks - used - cached:,} free; "
            f"{self.internal_fragmentation:.1%} of the used slots are empty",
            ". free   c cached   1-9 sequences that hold the block   + more than nine",
        ]
        marks = [
            "c" if c else "." if r == 0 else str(r) if r < 10 else "+"
            for r, c in zip(self.ref_counts.tolist(), self.cached.tolist(), strict=True)
        ]
        for first in range(0, self.num_blocks, _COLUMNS):
            lines.append(f"{first:8d} {''.join(marks[first : first + _COLUMNS])}")
        for seq_id, blocks in self.sequences.items():
            shown = " ".join(map(str, blocks[:16])) + (" ..." if len(blocks) > 16 else "")
            lines.append(f"{seq_id!r}: {counted(len(blocks), 'block')}: {shown}")
        return "\n".join(lines)
