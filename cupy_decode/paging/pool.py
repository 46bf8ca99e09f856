"""The paged allocator: a pool of fixed-size blocks and the sequences that own them.

A block is in exactly one of three states:

- *used*: one or more sequences hold it; its reference count is their number;
- *cached*: no sequence holds it, but its tokens can be found by prefix and it may be evicted;
- *free*: neither.

``num_free_blocks + num_cached_blocks + num_used_blocks == num_blocks`` at all times. Every method
either does all it was asked or raises and changes nothing.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from cupy_decode.heads import cdiv, whole
from cupy_decode.paging.kernel_blocks import PAD
from cupy_decode.paging.prefix_cache import (
    HashFn,
    IdleEntries,
    PrefixCache,
    PrefixEntry,
    chained_hash,
)
from cupy_decode.paging.snapshot import Snapshot


class PoolExhausted(RuntimeError):
    """A request needs more blocks than are free or evictable. Nothing has changed."""


class Allocation(NamedTuple):
    """What ``BlockPool.allocate`` gave a sequence.

    Attributes
    ----------
    block_ids : list of int
        Blocks in the order of the sequence, in allocator units.
    num_cached_tokens : int
        Leading tokens whose keys are already in those blocks and need not be computed.
    """

    block_ids: list[int]
    num_cached_tokens: int


class _SequenceState:
    """Blocks and tokens of one live sequence."""

    __slots__ = ("blocks", "chain_end", "counted", "edits", "num_published", "num_released",
                 "num_tokens", "tokens")  # fmt: skip

    def __init__(self) -> None:
        self.blocks: list[int] = []  # PAD where the sliding window has passed
        self.num_tokens = 0
        self.tokens: array[int] | None = None  # ids, as long as every token came with one
        self.counted = False  # True once tokens came as a number
        self.num_published = 0  # leading blocks that the prefix cache was told about
        self.num_released = 0  # leading blocks that the sliding window has passed
        self.chain_end: PrefixEntry | None = None  # entry of the last published block
        self.edits = 0  # changes of the row other than new entries at its end


class BlockPool:
    """A pool of KV-cache blocks with reference counts, prefix reuse and LRU eviction.

    Parameters
    ----------
    num_blocks : int
        Blocks of the cache, ids 0 to ``num_blocks - 1``.
    block_size : int
        Tokens per block.
    prefix_caching : bool
        Keep published blocks findable after their sequences are gone.
    hash_fn : callable, optional
        ``hash_fn(parent_hash, tokens) -> hashable`` for the prefix chain, where ``tokens`` are a
        block's int32 token ids as bytes and the first parent is ``b""``.
    seed : int, optional
        Shuffle the free list, so that tables look like those of a pool long in use; 0 or more.

    Raises
    ------
    TypeError, ValueError
        If ``num_blocks``, ``block_size`` or ``seed`` is no integer or too small.

    Notes
    -----
    Taking and returning a block is O(1) whatever the size of the pool: the free list is a stack,
    the cached blocks are a doubly linked list.

    Examples
    --------
    >>> pool = BlockPool(num_blocks=8, block_size=4)
    >>> pool.allocate("a", [1, 2, 3, 4, 5])
    Allocation(block_ids=[0, 1], num_cached_tokens=0)
    >>> pool.block_table(["a"]).tolist()
    [[0, 1]]
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        hash_fn: HashFn = chained_hash,
        seed: int | None = None,
    ) -> None:
        self.num_blocks = whole("num_blocks", num_blocks)
        self.block_size = whole("block_size", block_size)
        self.num_evictions = 0
        self._free = array("i", range(self.num_blocks - 1, -1, -1))
        if seed is not None:
            random.Random(whole("seed", seed, least=0, most=None)).shuffle(self._free)
        # Who holds each block: its sequences, or the cache while the block is idle. That one
        # reference passes between the cache and a sequence without being counted anew.
        self._ref = array("i", bytes(4 * num_blocks))
        self._cache = PrefixCache(num_blocks, hash_fn) if prefix_caching else None
        self._idle = self._cache.idle if self._cache else IdleEntries()
        self._sequences: dict[Hashable, _SequenceState] = {}
        self._copies: list[tuple[int, int]] = []

    # ------------------------------------------------------------------ questions

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no sequence holds but that a prefix lookup can still find."""
        return len(self._idle)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: the free ones and, by eviction, the cached ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that live sequences hold, each counted once."""
        return self.num_blocks - self.num_available_blocks

    @property
    def seq_ids(self) -> tuple[Hashable, ...]:
        """Live sequences, in the order of their admission."""
        return tuple(self._sequences)

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._sequences

    def seq_len(self, seq_id: Hashable) -> int:
        """Tokens of one sequence."""
        return self._sequence(seq_id).num_tokens

    def seq_lens(self, seq_ids: Sequence[Hashable]) -> np.ndarray:
        """Tokens of each sequence, int32, shape (batch,)."""
        return np.array([self.seq_len(s) for s in _several(seq_ids)], np.int32)

    def block_ids(self, seq_id: Hashable) -> list[int]:
        """Blocks of one sequence in order, -1 where the sliding window has passed."""
        return list(self._sequence(seq_id).blocks)

    def ref_count(self, block_id: int) -> int:
        """Sequences that hold the block.

        Raises
        ------
        ValueError
            If the pool has no such block.
        """
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(
                f"block_id must lie in 0..{self.num_blocks - 1}, the blocks of this pool; got "
                f"{block_id}; leave out a row's padding (-1)"
            )
        entry = self._cache and self._cache.entry_of(block_id)
        return 0 if entry and entry.is_idle else self._ref[block_id]

    def owners(self) -> dict[int, set[Hashable]]:
        """Sequences that hold each used block."""
        owners: dict[int, set[Hashable]] = {}
        for seq_id, seq in self._sequences.items():
            for block in seq.blocks[seq.num_released :]:
                owners.setdefault(block, set()).add(seq_id)
        return owners

    def block_table(self, seq_ids: Sequence[Hashable], *, width: int | None = None) -> np.ndarray:
        """Block ids of each sequence in allocator units.

        Parameters
        ----------
        seq_ids : sequence of hashable
            One table row each, in this order.
        width : int, optional
            Columns; those of the longest row (at least 1) when left out.

        Returns
        -------
        int32 array, shape (batch, width)
            Padded with -1.

        Raises
        ------
        TypeError
            If ``seq_ids`` is one string.
        ValueError
            If a sequence is not live or ``width`` is too small.
        """
        rows = [self._sequence(s).blocks for s in _several(seq_ids)]
        longest = max([1, *map(len, rows)])
        if width is not None and width < longest:
            raise ValueError(f"width {width} is too small: the longest row has {longest} blocks")
        table = np.full((len(rows), longest if width is None else width), PAD, np.int32)
        for i, row in enumerate(rows):
            table[i, : len(row)] = row
        return table

    def snapshot(self) -> Snapshot:
        """The state of every block at this moment, to print or to draw."""
        ref_counts = np.array(self._ref, np.int32)
        cached = np.zeros(self.num_blocks, bool)
        cached[list(self._idle.blocks())] = True
        ref_counts[cached] = 0
        num_tokens = np.where(cached, self.block_size, 0)
        for seq in self._sequences.values():
            held = np.array(seq.blocks[seq.num_released :], np.int64)
            num_tokens[held] = self.block_size
            if held.size:
                num_tokens[held[-1]] -= len(seq.blocks) * self.block_size - seq.num_tokens
        sequences = {s: tuple(seq.blocks) for s, seq in self._sequences.items()}
        return Snapshot(self.block_size, ref_counts, cached, num_tokens, sequences)

    # ------------------------------------------------------------------ life of a sequence

    def allocate(self, seq_id: Hashable, tokens: int | Sequence[int] | np.ndarray) -> Allocation:
        """Admit a sequence with all its blocks, or refuse it whole.

        Parameters
        ----------
        seq_id : hashable
            A name that no live sequence has.
        tokens : int or (n,) integers
            Token ids, which allow prefix reuse, or just their number: such a sequence finds no
            prefix and cannot be published.

        Returns
        -------
        Allocation

        Raises
        ------
        ValueError
            If ``seq_id`` is live already.
        PoolExhausted
            If the blocks do not suffice.

        Notes
        -----
        Every full block of the prompt can be reused, the last one too. An engine that needs the
        logits of the last token of a fully cached prompt runs it again without writing its key;
        to ``audit`` that row has ``query_lens`` 0, since others may hold the block.
        """
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id!r} is live already; free it or use another seq_id")
        count, ids = _as_tokens(tokens)
        hits = self._longest_cached_prefix(ids)
        # A cached block that is reused leaves the available ones too: count it once.
        reused_idle = sum(entry.is_idle for entry in hits)
        needed = cdiv(count, self.block_size) - len(hits)
        self._require(needed + reused_idle, seq_id)

        seq = _SequenceState()
        for entry in hits:
            seq.blocks.append(self._hold(entry))
        seq.blocks += [self._take() for _ in range(needed)]
        seq.num_tokens = count
        seq.tokens = ids
        seq.counted = ids is None
        seq.num_published = len(hits)
        if self._cache and ids is not None:
            seq.chain_end = hits[-1] if hits else self._cache.root
            self._cache.pin(seq.chain_end)
        self._sequences[seq_id] = seq
        return Allocation(list(seq.blocks), len(hits) * self.block_size)

    def append(self, seq_id: Hashable, tokens: int | Sequence[int] | np.ndarray = 1) -> None:
        """Make room for further tokens of a sequence.

        When its last block is partly filled and shared after a ``fork``, the sequence gets a copy
        of its own first; ``take_copies`` tells the engine what to copy.

        Parameters
        ----------
        seq_id : hashable
        tokens : int or (n,) integers
            Token ids, or just their number, which ends the tracking of this sequence's content:
            it cannot be published from then on.

        Raises
        ------
        PoolExhausted
            If the blocks do not suffice.
        """
        seq = self._sequence(seq_id)
        count, ids = _as_tokens(tokens)
        room = len(seq.blocks) * self.block_size - seq.num_tokens
        copy = room > 0 and count > 0 and self._ref[seq.blocks[-1]] > 1
        if count > room or copy:
            needed = max(cdiv(count - room, self.block_size), 0)
            self._require(needed + copy, seq_id)
            if copy:
                self._copy_last_block(seq)
            for _ in range(needed):
                seq.blocks.append(self._take())
        seq.num_tokens += count
        if ids is None:
            if not seq.counted:
                seq.counted = True
                self._stop_tracking(seq)
        elif seq.tokens is not None:
            seq.tokens += ids

    def fork(self, seq_id: Hashable, child_id: Hashable) -> None:
        """Start ``child_id`` as a twin of ``seq_id`` that shares all its blocks."""
        parent = self._sequence(seq_id)
        if child_id in self._sequences:
            raise ValueError(f"sequence {child_id!r} is live already; use another child_id")
        child = _SequenceState()
        child.blocks = list(parent.blocks)
        child.num_tokens = parent.num_tokens
        child.tokens = None if parent.tokens is None else parent.tokens[:]
        child.counted = parent.counted
        child.num_published = parent.num_published
        child.num_released = parent.num_released
        child.chain_end = parent.chain_end
        if self._cache and child.chain_end:
            self._cache.pin(child.chain_end)
        for block in child.blocks[child.num_released :]:
            self._ref[block] += 1
        self._sequences[child_id] = child

    def publish(self, seq_id: Hashable, num_tokens: int | None = None) -> int:
        """Let other sequences find the full blocks that are written by now.

        Call it after the kernels that write the keys were launched: a block that could be found
        before would hand out memory without keys.

        Parameters
        ----------
        seq_id : hashable
        num_tokens : int, optional
            Leading tokens whose keys are written; all when left out.

        Returns
        -------
        int
            Blocks published by this call; always 0 without prefix caching.

        Raises
        ------
        ValueError
            If tokens of the sequence came as a number, or ``num_tokens`` exceeds its length.
        """
        seq = self._sequence(seq_id)
        if seq.counted and self._cache:
            raise ValueError(
                f"sequence {seq_id!r} has tokens without ids, and blocks are found by their ids; "
                "give token ids to allocate and append, or do not publish it"
            )
        written = seq.num_tokens if num_tokens is None else num_tokens
        if not 0 <= written <= seq.num_tokens:
            raise ValueError(f"num_tokens must lie in 0..{seq.num_tokens}; got {num_tokens}")
        before = seq.num_published
        while (seq.num_published + 1) * self.block_size <= written and seq.chain_end:
            self._publish_next_block(seq)
        return seq.num_published - before

    def release_outside_window(self, seq_id: Hashable, window: int) -> int:
        """Give back the blocks that no later query of a sliding window can see.

        The query at position ``seq_len - 1`` sees the newest ``window`` keys, itself included. The
        entries of blocks that lie wholly before them become -1.

        Returns
        -------
        int
            Blocks given back by this call.
        """
        seq = self._sequence(seq_id)
        if window < 1:
            raise ValueError(f"window must be at least 1 key; got {window}")
        passed = max(seq.num_tokens - window, 0) // self.block_size
        first, gone = seq.num_released, max(passed - seq.num_released, 0)
        if gone:
            for i in range(passed - 1, first - 1, -1):
                self._drop(seq.blocks[i])
                seq.blocks[i] = PAD
            seq.num_released = passed
            seq.edits += 1
        return gone

    def free(self, seq_id: Hashable) -> None:
        """End a sequence. Its last block becomes the oldest, so that tails are evicted first.

        Raises
        ------
        ValueError
            If the sequence is unknown or was freed before.
        """
        seq = self._sequence(seq_id)
        for block in reversed(seq.blocks[seq.num_released :]):
            self._drop(block)
        self._stop_tracking(seq)
        del self._sequences[seq_id]

    def preempt(self, seq_id: Hashable) -> int | np.ndarray:
        """Take a sequence's blocks away; it must be computed again.

        Returns
        -------
        int or int32 array
            What ``allocate`` takes to admit it again: its token ids, or their number where the
            ids are not known. Published blocks may still be found then.
        """
        seq = self._sequence(seq_id)
        again = seq.num_tokens if seq.tokens is None else np.array(seq.tokens, np.int32)
        self.free(seq_id)
        return again

    def take_copies(self) -> np.ndarray:
        """Block copies that are due, in order, and forget them.

        An engine carries them out one after the other before the step's first write.

        Returns
        -------
        int64 array, shape (n, 2)
            Source and destination block ids.
        """
        copies = np.array(self._copies, np.int64).reshape(-1, 2)
        self._copies.clear()
        return copies

    # ------------------------------------------------------------------ inside

    def _sequence(self, seq_id: Hashable) -> _SequenceState:
        seq = self._sequences.get(seq_id)
        if seq is None:
            raise ValueError(f"sequence {seq_id!r} is not live; it was never allocated or is freed")
        return seq

    def _require(self, needed: int, seq_id: Hashable) -> None:
        if needed > self.num_available_blocks:
            raise PoolExhausted(
                f"sequence {seq_id!r} needs {needed} more blocks but only "
                f"{self.num_available_blocks} are available ({self.num_free_blocks} free, "
                f"{self.num_cached_blocks} cached); free or preempt a sequence"
            )

    def _longest_cached_prefix(self, ids: array[int] | None) -> list[PrefixEntry]:
        hits: list[PrefixEntry] = []
        if self._cache is None or ids is None:
            return hits
        parent = self._cache.root
        for end in range(self.block_size, len(ids) + 1, self.block_size):
            entry = self._cache.find(parent, ids[end - self.block_size : end].tobytes())
            if entry is None:
                break
            hits.append(entry)
            parent = entry
        return hits

    def _take(self) -> int:
        """A block with reference count 1; the caller has checked that there is one."""
        if self._free:
            block = self._free.pop()
            self._ref[block] = 1
        else:
            assert self._cache is not None
            block = self._cache.evict()  # with the cache's reference
            self.num_evictions += 1
        return block

    def _hold(self, entry: PrefixEntry) -> int:
        """The entry's block, with a reference to it."""
        assert self._cache is not None
        assert entry.block is not None
        if entry.is_idle:
            self._cache.idle.remove(entry)
        else:
            self._ref[entry.block] += 1
        return entry.block

    def _drop(self, block: int) -> None:
        if self._ref[block] > 1:
            self._ref[block] -= 1
        elif self._cache and (entry := self._cache.entry_of(block)):
            self._cache.idle.add(entry)
        else:
            self._ref[block] = 0
            self._free.append(block)

    def _copy_last_block(self, seq: _SequenceState) -> None:
        shared = seq.blocks[-1]
        own = self._take()
        self._copies.append((shared, own))
        self._ref[shared] -= 1
        seq.blocks[-1] = own
        seq.edits += 1

    def _publish_next_block(self, seq: _SequenceState) -> None:
        assert self._cache is not None
        assert seq.chain_end is not None
        assert seq.tokens is not None
        i = seq.num_published
        tokens = seq.tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()
        entry = None
        if i >= seq.num_released:
            entry = self._cache.publish(seq.chain_end, tokens, seq.blocks[i])
        if entry is None:
            # Nothing below a block that cannot be found could be found either.
            self._stop_tracking(seq)
            return
        self._cache.move_pin(seq.chain_end, entry)
        seq.chain_end = entry
        seq.num_published += 1

    def _stop_tracking(self, seq: _SequenceState) -> None:
        if self._cache and seq.chain_end:
            self._cache.unpin(seq.chain_end)
        seq.chain_end = None
        seq.tokens = None


def _several(seq_ids: Sequence[Hashable]) -> Sequence[Hashable]:
    """``seq_ids``, unless it is one string: that would be taken for ids of a letter each."""
    if isinstance(seq_ids, str | bytes):
        raise TypeError(
            f"seq_ids must be a sequence of ids; got {seq_ids!r} alone; write [{seq_ids!r}]"
        )
    return seq_ids


def _as_tokens(tokens: Any) -> tuple[int, array[int] | None]:
    """The number of tokens, and their ids where they were given."""
    if isinstance(tokens, int | np.integer):
        if tokens < 0:
            raise ValueError(f"tokens must be a number >= 0 or token ids; got {tokens}")
        return int(tokens), None if tokens else array("i")
    if isinstance(tokens, list):  # the decode step's path: NumPy is slow on one token
        with suppress(TypeError, OverflowError):  # said better below
            return len(tokens), array("i", tokens)
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(
            "tokens must be a number or one-dimensional integer token ids; "
            f"got shape {ids.shape}, dtype {ids.dtype}"
        )
    narrow = ids.astype(np.int32, copy=False)
    if narrow is not ids and (narrow != ids).any():
        raise ValueError(f"token ids must fit int32; got {ids.min()} to {ids.max()}")
    return len(ids), array("i", narrow.tobytes())
