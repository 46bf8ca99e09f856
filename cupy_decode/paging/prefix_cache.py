"""Which cached block holds which tokens: a tree of chained content hashes, and its LRU order.

An entry stands for the tokens of one full block *after* the tokens of all its ancestors, since K
and V depend on the whole prefix. Its hash chains the parent's hash with the block's tokens, and a
lookup also compares both, so two contents whose hashes collide are never taken for each other.

An entry outlives its block as long as something below it is still of use: when the same tokens
are computed again, the entry gets the new block and its descendants become reachable again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from hashlib import blake2b

#: ``hash_fn(parent_hash, tokens)``: ``tokens`` are a block's int32 token ids as bytes.
HashFn = Callable[[Hashable, bytes], Hashable]


def chained_hash(parent_hash: Hashable, tokens: bytes) -> Hashable:
    """16-byte BLAKE2b digest of the parent's digest followed by the block's tokens."""
    return blake2b(parent_hash + tokens, digest_size=16).digest()  # type: ignore[operator]


class PrefixEntry:
    """One block's worth of tokens in its context; equal only to itself."""

    __slots__ = ("block", "first_child", "key", "newer", "next_sibling", "older", "parent", "pins",
                 "previous_sibling", "tokens")  # fmt: skip

    def __init__(self, key: Hashable, parent: PrefixEntry | None, tokens: bytes) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.block: int | None = None
        self.pins = 0  # sequences whose published chain ends here
        # Children are a linked list through their siblings: nearly every entry has one child or
        # none, and a container for each would be half of the cache's memory traffic.
        self.first_child: PrefixEntry | None = None
        self.next_sibling: PrefixEntry | None = None
        self.previous_sibling: PrefixEntry | None = None
        # Neighbours in the order of eviction, while the block is idle.
        self.older: PrefixEntry | None = None
        self.newer: PrefixEntry | None = None

    @property
    def is_idle(self) -> bool:
        """True while the cache alone holds the block."""
        return self.newer is not None

    def attach(self) -> None:
        """Become the first child of the parent."""
        assert self.parent is not None
        self.next_sibling = self.parent.first_child
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self
        self.parent.first_child = self

    def detach(self) -> PrefixEntry:
        """Leave the parent, and return it."""
        assert self.parent is not None
        if self.previous_sibling is not None:
            self.previous_sibling.next_sibling = self.next_sibling
        else:
            self.parent.first_child = self.next_sibling
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self.previous_sibling
        return self.parent


class IdleEntries:
    """Entries whose blocks no sequence uses, linked from the oldest to the newest.

    The links lie in the entries: the one to evict leads to the one after it, and no table is asked.
    """

    def __init__(self) -> None:
        # The list is a circle through this entry, which stands between its newest and its oldest.
        self._ends = PrefixEntry(b"", None, b"")
        self._ends.older = self._ends.newer = self._ends
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def blocks(self) -> Iterator[int]:
        """Idle blocks, the oldest first."""
        entry = self._ends.newer
        while entry is not None and entry.block is not None:  # the circle's end has none
            yield entry.block
            entry = entry.newer

    def oldest(self) -> PrefixEntry:
        """The next to evict; there must be one."""
        assert self._ends.newer is not None
        return self._ends.newer

    def add(self, entry: PrefixEntry) -> None:
        """Make the entry the newest."""
        newest = self._ends.older
        assert newest is not None
        entry.older, entry.newer = newest, self._ends
        newest.newer = self._ends.older = entry
        self._number += 1

    def remove(self, entry: PrefixEntry) -> None:
        older, newer = entry.older, entry.newer
        assert older is not None
        assert newer is not None
        older.newer, newer.older = newer, older
        entry.older = entry.newer = None
        self._number -= 1


class PrefixCache:
    """Entries by hash, entries by block, and the idle entries from oldest to newest.

    An eviction takes the entry out of the order and out of the tree, and no more. To clear it from
    the two tables as well is to reach into memory that lies anywhere; that is left to the next
    ``publish``, which comes after a step's kernels were launched, while the step waits for its
    evictions. Until then an entry that a table still names, but that has no block, counts as none.

    Parameters
    ----------
    num_blocks : int
    hash_fn : callable, optional
        ``hash_fn(parent_hash, tokens)``; the root's hash is ``b""``.
    """

    def __init__(self, num_blocks: int, hash_fn: HashFn = chained_hash) -> None:
        self._hash = hash_fn
        self.root = PrefixEntry(b"", None, b"")
        self.idle = IdleEntries()
        self._entries: dict[Hashable, PrefixEntry] = {}
        self._entry_of: list[PrefixEntry | None] = [None] * num_blocks
        self._evicted: list[int] = []  # blocks to be cleared from the table by block
        self._forgotten: list[PrefixEntry] = []  # to be cleared from the table by hash

    def entry_of(self, block: int) -> PrefixEntry | None:
        """The entry whose tokens can be found in the block."""
        entry = self._entry_of[block]
        return None if entry is None or entry.block is None else entry

    def find(self, parent: PrefixEntry, tokens: bytes) -> PrefixEntry | None:
        """The entry for ``tokens`` below ``parent`` if its keys are in a block, else None."""
        entry = self._entries.get(self._hash(parent.key, tokens))
        if entry is None or entry.block is None or not _same(entry, parent, tokens):
            return None
        return entry

    def publish(self, parent: PrefixEntry, tokens: bytes, block: int) -> PrefixEntry | None:
        """Make a written block findable.

        Where another block already holds the same tokens, that one stays the one to be found and
        ``block`` remains private. Returns None when the hash belongs to different content: the
        newcomer then cannot be found, which costs a recomputation and never a wrong key.
        """
        if self._evicted or self._forgotten:
            self._clear_tables()
        key = self._hash(parent.key, tokens)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = PrefixEntry(key, parent, tokens)
            entry.attach()
        elif not _same(entry, parent, tokens):
            return None
        if entry.block is None:
            entry.block = block
            self._entry_of[block] = entry
        return entry

    def pin(self, entry: PrefixEntry) -> None:
        """Keep the entry while a sequence may publish a block below it."""
        entry.pins += 1

    def move_pin(self, parent: PrefixEntry, child: PrefixEntry) -> None:
        """Pin the child instead of its parent, which stays of use by having it."""
        parent.pins -= 1
        child.pins += 1

    def unpin(self, entry: PrefixEntry) -> None:
        entry.pins -= 1
        self._forget_if_useless(entry)

    def evict(self) -> int:
        """Take the oldest idle block, or an idle descendant of it, out of the cache.

        Descendants go first: without its ancestors a block can never be found, so evicting the
        ancestor would waste both.
        """
        entry = self.idle.oldest()
        while entry.first_child and (below := self._idle_child(entry)):
            entry = below
        block = entry.block
        assert block is not None
        self.idle.remove(entry)
        entry.block = None
        self._evicted.append(block)
        self._forget_if_useless(entry)
        return block

    def _idle_child(self, entry: PrefixEntry) -> PrefixEntry | None:
        child = entry.first_child
        while child is not None and not child.is_idle:
            child = child.next_sibling
        return child

    def _forget_if_useless(self, entry: PrefixEntry) -> None:
        while entry.parent and entry.block is None and not entry.first_child and not entry.pins:
            self._forgotten.append(entry)
            entry = entry.detach()

    def _clear_tables(self) -> None:
        for block in self._evicted:
            self._entry_of[block] = None
        for entry in self._forgotten:
            del self._entries[entry.key]
        self._evicted.clear()
        self._forgotten.clear()


def _same(entry: PrefixEntry, parent: PrefixEntry, tokens: bytes) -> bool:
    return entry.parent is parent and entry.tokens == tokens
