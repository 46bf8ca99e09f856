"""The block table of a running batch, changed where it changed and uploaded once a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from cupy_decode.heads import cdiv
from cupy_decode.paging.kernel_blocks import (
    PAD,
    blocks_per_allocator_block,
    map_to_kernel_blocks,
)
from cupy_decode.paging.pool import BlockPool, _SequenceState


class BlockTableBuffer:
    """Block table and lengths of a batch in kernel units, at a fixed address.

    ``update`` writes only the entries that are new since the last step; ``upload`` moves table and
    lengths to the device in one copy, since they lie behind each other in one buffer.

    Parameters
    ----------
    pool : BlockPool
    max_num_seqs : int
        Rows.
    max_seq_len : int
        Tokens of the longest row.
    kernel_block_size : int, optional
        Tokens per kernel block; the pool's block size when left out.
    stride : int, optional
        See ``map_to_kernel_blocks``.

    Attributes
    ----------
    block_table : int32 array, shape (max_num_seqs, width)
        The host's table, -1 where a row names no block.
    seq_lens : int32 array, shape (max_num_seqs,)
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_seq_len: int,
        *,
        kernel_block_size: int | None = None,
        stride: int | None = None,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_seq_len", max_seq_len)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        self._pool = pool
        self._stride = stride
        self.max_seq_len = max_seq_len
        self.kernel_block_size = kernel_block_size or pool.block_size
        self._ratio = blocks_per_allocator_block(pool.block_size, self.kernel_block_size)
        width = cdiv(max_seq_len, pool.block_size) * self._ratio
        self._host = np.zeros(max_num_seqs * (1 + width), np.int32)
        self.seq_lens = self._host[:max_num_seqs]
        self.block_table = self._host[max_num_seqs:].reshape(max_num_seqs, width)
        self.block_table[:] = PAD
        self._device: Any = None
        self._batch = 0
        self._uploaded = max_num_seqs  # rows of the device's table that may not be empty
        # What each row holds: the sequence, its edits at that time, and blocks written.
        self._rows: list[tuple[_SequenceState | None, int, int]] = [(None, 0, 0)] * max_num_seqs

    def update(self, seq_ids: Sequence[Hashable]) -> int:
        """Bring rows ``0 .. len(seq_ids) - 1`` up to date with the pool, and empty the others.

        Returns
        -------
        int
            Table entries written, in kernel units.

        Raises
        ------
        ValueError
            If there are more sequences than rows or one is longer than ``max_seq_len``.
        """
        if len(seq_ids) > len(self._rows):
            raise ValueError(f"{len(seq_ids)} sequences exceed max_num_seqs {len(self._rows)}")
        sequences = [self._pool._sequence(seq_id) for seq_id in seq_ids]
        for seq_id, seq in zip(seq_ids, sequences, strict=True):
            if seq.num_tokens > self.max_seq_len:
                raise ValueError(
                    f"sequence {seq_id!r} has {seq.num_tokens} tokens, more than max_seq_len "
                    f"{self.max_seq_len}"
                )
        written = 0
        for row, seq in enumerate(sequences):
            before, edits, first = self._rows[row]
            if before is not seq or edits != seq.edits:
                self.block_table[row, : first * self._ratio] = PAD
                first = 0
            if first < len(seq.blocks):
                new = map_to_kernel_blocks(
                    seq.blocks[first:],
                    self._pool.block_size,
                    self.kernel_block_size,
                    stride=self._stride,
                )
                self.block_table[row, first * self._ratio :][: len(new)] = new
                written += len(new)
            self._rows[row] = (seq, seq.edits, len(seq.blocks))
            self.seq_lens[row] = seq.num_tokens
        for row in range(len(seq_ids), self._batch):
            self.block_table[row] = PAD
            self.seq_lens[row] = 0
            self._rows[row] = (None, 0, 0)
        self._batch = len(seq_ids)
        return written

    def upload(self, xp: Any) -> tuple[Any, Any]:
        """Copy the batch to the device, always into the same arrays; rows past it are empty there.

        Parameters
        ----------
        xp : module
            ``cupy``, or ``numpy`` for a copy on the host.

        Returns
        -------
        block_table : int32 array, shape (batch, width)
        seq_lens : int32 array, shape (batch,)
        """
        if self._device is None:
            self._device = xp.empty(self._host.shape, np.int32)
        rows, width = self.block_table.shape
        used = rows + max(self._batch, self._uploaded) * width
        self._uploaded = self._batch
        if isinstance(self._device, np.ndarray):
            self._device[:used] = self._host[:used]
        else:
            self._device[:used].set(self._host[:used])
        table = self._device[rows:].reshape(rows, width)[: self._batch]
        return table, self._device[: self._batch]
