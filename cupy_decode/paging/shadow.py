"""Shadow tags: which token of which sequence each physical slot holds.

The tags are written where keys are written and nowhere else, so they know nothing of reference
counts, hashes or tables. A table is right when every slot that a kernel would read through it
carries the right position of the right sequence, or of another sequence whose tokens up to that
position are the same: keys depend on the whole prefix and on nothing more.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from cupy_decode.paging.audit import Finding, audit
from cupy_decode.paging.kernel_blocks import PAD, blocks_per_allocator_block
from cupy_decode.paging.pool import Allocation, BlockPool, _SequenceState

_NOBODY = -1


@dataclass(frozen=True)
class WrongSlot:
    """A run of slots that a kernel would read for tokens that they do not hold.

    Attributes
    ----------
    row : int
        Table row.
    position : int
        Position of the key that the kernel expects in the first slot.
    slot : int
        Physical slot, or -1 where the table names none.
    num_slots : int
        Slots of the run: this one and those behind it, each wrong in the same way.
    message : str
    """

    row: int
    position: int
    slot: int
    num_slots: int
    message: str


class Shadow:
    """A tag (sequence, position) for every slot of a cache.

    Parameters
    ----------
    num_blocks, block_size : int
        Shape of the cache, in allocator units.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._writer = np.full((num_blocks, block_size), _NOBODY, np.int64)
        self._position = np.full((num_blocks, block_size), PAD, np.int64)
        self._awaited = np.zeros((num_blocks, block_size), bool)  # the key's copy is due
        self._life: dict[Hashable, int] = {}  # a new number for each life of a sequence id
        self._history: list[array[int]] = []  # token ids of each life
        self._unknown = count(-1, -1)  # a token without an id equals no other

    def begin(self, seq_id: Hashable) -> None:
        """A sequence without tokens starts under this name."""
        self._life[seq_id] = len(self._history)
        self._history.append(array("q"))

    def fork(self, seq_id: Hashable, child_id: Hashable) -> None:
        """A child starts with the tokens of ``seq_id``."""
        tokens = self._history[self._life[seq_id]]
        self.begin(child_id)
        self._history[-1].extend(tokens)

    def end(self, seq_id: Hashable) -> None:
        """A sequence ends. Its tags stay, for others may hold the same blocks."""
        del self._life[seq_id]

    def extend(self, seq_id: Hashable, tokens: Any) -> None:
        """Further tokens of a sequence: ids, or how many."""
        history = self._history[self._life[seq_id]]
        if isinstance(tokens, int | np.integer):
            history.extend(next(self._unknown) for _ in range(int(tokens)))
        else:
            history.extend(int(t) for t in tokens)

    def write(self, seq_id: Hashable, slots: Any, positions: Any) -> None:
        """Keys of these positions are written into these slots."""
        self._writer.reshape(-1)[slots] = self._life[seq_id]
        self._position.reshape(-1)[slots] = positions
        self._awaited.reshape(-1)[slots] = False

    def copy(self, source: int, destination: int, *, due: bool = False) -> None:
        """One block is copied onto another.

        Parameters
        ----------
        source, destination : int
        due : bool
            The copy has been promised and not yet made: what it brings is wrong to read until
            ``copies_done``.
        """
        self._writer[destination] = self._writer[source]
        self._position[destination] = self._position[source]
        self._awaited[destination] = due

    def copies_done(self) -> None:
        """All copies that were due have been made."""
        self._awaited[:] = False

    def clear(self, block: int) -> None:
        """A block's keys are of no use any more."""
        self._writer[block] = _NOBODY
        self._position[block] = PAD
        self._awaited[block] = False

    def belongs(self, seq_id: Hashable, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """True where a slot holds this position of this sequence.

        Parameters
        ----------
        seq_id : hashable
        slots, positions : (n,) integers

        Returns
        -------
        bool array, shape (n,)
            All False for a sequence that is not live.
        """
        life = self._life.get(seq_id)
        if life is None:
            return np.zeros(len(slots), bool)
        own = np.frombuffer(self._history[life], np.int64)
        inside = (slots >= 0) & (slots < self._writer.size)
        at = np.where(inside, slots, 0)
        writers = np.where(inside, self._writer.reshape(-1)[at], _NOBODY)
        right = inside & (self._position.reshape(-1)[at] == positions) & (positions < len(own))
        right &= (writers != _NOBODY) & ~self._awaited.reshape(-1)[at]
        for writer in np.unique(writers[right]):
            if writer == life:
                continue
            other = np.frombuffer(self._history[writer], np.int64)
            n = min(len(own), len(other))
            differ = np.flatnonzero(own[:n] != other[:n])
            common = int(differ[0]) if differ.size else n
            right &= (writers != writer) | (positions < common)
        return right

    def check(
        self,
        block_table: Any,
        seq_lens: Any,
        seq_ids: Sequence[Hashable],
        *,
        block_size: int | None = None,
        window: int | None = None,
    ) -> list[WrongSlot]:
        """Every slot that a decode kernel would read through a table and should not.

        Parameters
        ----------
        block_table : (batch, width) integers
            In allocator or in kernel units, with the packed layout (stride = ratio).
        seq_lens : (batch,) integers
        seq_ids : sequence of hashable
            Sequence of each row.
        block_size : int, optional
            Tokens per block of the table; the pool's when left out.
        window : int, optional
            Newest keys that are read.

        Returns
        -------
        list of WrongSlot
            A run of neighbouring slots that are wrong in the same way is one finding.
        """
        size = self.block_size if block_size is None else block_size
        blocks_per_allocator_block(self.block_size, size)
        table = np.asarray(block_table)
        wrong = []
        for row, (seq_id, length) in enumerate(zip(seq_ids, seq_lens, strict=True)):
            begin = 0 if window is None else max(int(length) - window, 0)
            positions = np.arange(begin, int(length))
            column, offset = np.divmod(positions, size)
            inside = column < table.shape[1]
            block = np.where(inside, table[row, np.where(inside, column, 0)].astype(np.int64), PAD)
            slots = np.where(block < 0, PAD, block * size + offset)
            bad = np.flatnonzero(~self.belongs(seq_id, slots, positions))
            states = [self._state(int(slot)) for slot in slots[bad]]
            first = 0
            for i in range(1, len(bad) + 1):
                if i < len(bad) and bad[i] == bad[i - 1] + 1 and _go_on(states[i - 1], states[i]):
                    continue
                position, slot = int(positions[bad[first]]), int(slots[bad[first]])
                found = self._describe(row, seq_id, position, states[first], i - first)
                wrong.append(WrongSlot(row, position, slot, i - first, found))
                first = i
        return wrong

    def check_reads(
        self, seq_id: Hashable, slots: Any, seq_len: int, *, window: int | None = None
    ) -> np.ndarray:
        """Those of the slots that were read for a sequence and hold none of its visible keys.

        This is for accesses that were observed: slots recorded by an instrumented kernel.
        """
        slots = np.asarray(slots, np.int64)
        inside = (slots >= 0) & (slots < self._writer.size)
        positions = np.where(inside, self._position.reshape(-1)[np.where(inside, slots, 0)], PAD)
        begin = 0 if window is None else max(seq_len - window, 0)
        visible = (positions >= begin) & (positions < seq_len)
        return slots[~(visible & self.belongs(seq_id, slots, positions))]

    def _state(self, slot: int) -> _SlotState:
        if not 0 <= slot < self._writer.size:
            return _SlotState(slot, _NOBODY, PAD, False)
        tags = (self._writer, self._position, self._awaited)
        writer, position, awaited = (x.reshape(-1)[slot].item() for x in tags)
        return _SlotState(slot, writer, position, awaited)

    def _describe(
        self, row: int, seq_id: Hashable, position: int, state: _SlotState, n: int
    ) -> str:
        where = _span("slot", state.slot, n) if state.slot >= 0 else "no block"
        says = f"row {row} ({seq_id!r}) expects {_span('position', position, n)} in {where}"
        verb = "hold" if n > 1 else "holds"
        if state.slot < 0:
            return says
        if state.slot >= self._writer.size:
            return f"{says}, which {'are' if n > 1 else 'is'} not in the cache"
        if state.awaited:
            return f"{says}, to where a block must first be copied: take_copies has not been called"
        if state.writer == _NOBODY:
            return f"{says}, which {verb} nothing"
        names = [repr(seq_id) for seq_id, life in self._life.items() if life == state.writer]
        owner = names[0] if names else "a freed sequence"
        return f"{says}, which {verb} {_span('position', state.position, n)} of {owner}"


class _SlotState(NamedTuple):
    """What one slot holds."""

    slot: int
    writer: int
    position: int
    awaited: bool


def _go_on(a: _SlotState, b: _SlotState) -> bool:
    """True where ``b`` is the slot behind ``a`` and holds what comes after it, or both nothing."""
    if a.slot < 0 or b.slot < 0:
        return a.slot == b.slot
    held = b.position == a.position + (a.writer != _NOBODY)
    return b.slot == a.slot + 1 and (a.writer, a.awaited) == (b.writer, b.awaited) and held


def _span(name: str, first: int, number: int) -> str:
    return f"{name} {first}" if number == 1 else f"{name}s {first} to {first + number - 1}"


class ShadowPool(BlockPool):
    """A ``BlockPool`` that keeps a ``Shadow`` of its cache. Parameters are the pool's.

    A token counts as written where ``allocate`` or ``append`` puts it; a block that ``append``
    copies counts as copied once ``take_copies`` has been called.
    """

    def __init__(self, num_blocks: int, block_size: int, **options: Any) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.shadow = Shadow(num_blocks, block_size)

    def allocate(self, seq_id: Hashable, tokens: Any) -> Allocation:
        given = super().allocate(seq_id, tokens)
        self.shadow.begin(seq_id)
        self.shadow.extend(seq_id, tokens)
        self._write(seq_id, given.num_cached_tokens)
        return given

    def append(self, seq_id: Hashable, tokens: Any = 1) -> None:
        first = self.seq_len(seq_id)
        super().append(seq_id, tokens)
        self.shadow.extend(seq_id, tokens)
        self._write(seq_id, first)

    def fork(self, seq_id: Hashable, child_id: Hashable) -> None:
        super().fork(seq_id, child_id)
        self.shadow.fork(seq_id, child_id)

    def free(self, seq_id: Hashable) -> None:
        super().free(seq_id)
        self.shadow.end(seq_id)

    def take_copies(self) -> np.ndarray:
        copies = super().take_copies()
        self.shadow.copies_done()
        return copies

    def check(
        self,
        block_table: Any,
        seq_lens: Any,
        seq_ids: Sequence[Hashable],
        *,
        block_size: int | None = None,
        query_lens: Any = 1,
        window: int | None = None,
    ) -> list[Finding | WrongSlot]:
        """Faults of a table in allocator units: its audit and its shadow tags.

        Parameters
        ----------
        block_table, seq_lens, seq_ids, query_lens, window
            See ``audit``.
        block_size : int, optional
            The pool's own. A table in kernel units is for ``shadow.check``.
        """
        if block_size not in (None, self.block_size):
            raise ValueError(
                f"block_size must be the pool's, {self.block_size}, since owners are known by its "
                f"blocks; got {block_size}; give such a table to shadow.check"
            )
        found = audit(
            block_table, seq_lens, self.owners(), block_size=self.block_size, seq_ids=seq_ids,
            query_lens=query_lens, window=window,
        )  # fmt: skip
        return [*found, *self.shadow.check(block_table, seq_lens, seq_ids, window=window)]

    def _write(self, seq_id: Hashable, first: int) -> None:
        positions = np.arange(first, self.seq_len(seq_id))
        blocks = np.array(self.block_ids(seq_id), np.int64)
        slots = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        self.shadow.write(seq_id, slots, positions)

    def _take(self) -> int:
        block = super()._take()
        self.shadow.clear(block)
        return block

    def _drop(self, block: int) -> None:
        super()._drop(block)
        if self._ref[block] == 0:
            self.shadow.clear(block)

    def _copy_last_block(self, seq: _SequenceState) -> None:
        shared = seq.blocks[-1]
        super()._copy_last_block(seq)
        self.shadow.copy(shared, seq.blocks[-1], due=True)
