"""Which cached block holds which tokens: a tree of chained content hashes, and its LRU order.

An entry stands for the tokens of one full block *after* the tokens of all its ancestors, since K
and V depend on the whole prefix. Its hash chains the parent's hash with the block's tokens, and a
lookup also compares both, so two contents whose hashes collide are never taken for each other.

An entry outlives its block as long as something below it is still of use: when the same tokens
are computed again, the entry gets the new block and its descendants become reachable again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from hashlib import blake2b

#: ``hash_fn(parent_hash, tokens)``: ``tokens`` are a block's int32 token ids as bytes.
HashFn = Callable[[Hashable, bytes], Hashable]


def chained_hash(parent_hash: Hashable, tokens: bytes) -> Hashable:
    """16-byte BLAKE2b digest of the parent's digest followed by the block's tokens."""
    return blake2b(parent_hash + tokens, digest_size=16).digest()  # type: ignore[operator]


class PrefixEntry:
    """One block's worth of tokens in its context; equal only to itself."""

    __slots__ = ("block", "first_child", "key", "next_sibling", "parent", "pins",
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


class PrefixCache:
    """Entries by hash, entries by block, and the idle blocks from oldest to newest.

    Parameters
    ----------
    num_blocks : int
    hash_fn : callable, optional
        ``hash_fn(parent_hash, tokens)``; the root's hash is ``b""``.
    """

    def __init__(self, num_blocks: int, hash_fn: HashFn = chained_hash) -> None:
        self._hash = hash_fn
        self.root = PrefixEntry(b"", None, b"")
        self._entries: dict[Hashable, PrefixEntry] = {}
        self._entry_of: list[PrefixEntry | None] = [None] * num_blocks
        #: Blocks that hold an entry and that no sequence uses, the next to evict first.
        self.idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return self._entry_of[block] is not None

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

    def unpin(self, entry: PrefixEntry) -> None:
        entry.pins -= 1
        self._forget_if_useless(entry)

    def evict(self) -> int:
        """Take the oldest idle block, or an idle descendant of it, out of the cache.

        Descendants go first: without its ancestors a block can never be found, so evicting the
        ancestor would waste both.
        """
        block = next(iter(self.idle))
        entry = self._entry_of[block]
        assert entry is not None
        while (below := self._idle_child(entry)) is not None:
            entry = below
            assert entry.block is not None
            block = entry.block
        del self.idle[block]
        self._entry_of[block] = None
        entry.block = None
        self._forget_if_useless(entry)
        return block

    def _idle_child(self, entry: PrefixEntry) -> PrefixEntry | None:
        child = entry.first_child
        while child is not None and child.block not in self.idle:
            child = child.next_sibling
        return child

    def _forget_if_useless(self, entry: PrefixEntry) -> None:
        while entry.parent and entry.block is None and not entry.first_child and not entry.pins:
            del self._entries[entry.key]
            entry = entry.detach()


def _same(entry: PrefixEntry, parent: PrefixEntry, tokens: bytes) -> bool:
    return entry.parent is parent and entry.tokens == tokens
