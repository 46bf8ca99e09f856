"""A second allocator, slow and simple, that a ``BlockPool`` is held to step by step.

It works with *contents*: the content of a position is the whole token sequence up to it, interned
as one integer, and a block has the content of its last position. Memory is a list of contents,
written where the pool says that keys go. Expected hits, evictions and refusals follow from
contents alone. Run ``python -m tests.paging_model 1000000`` for a long random program.
"""

from __future__ import annotations

import random
import sys
from itertools import count

from tqdm import trange

from cupy_decode.paging import BlockPool, PoolExhausted

_ROOT = 0


class PoolModel:
    """A pool and its model; every method acts on both and checks what the pool answered."""

    def __init__(self, num_blocks: int, block_size: int, **options) -> None:
        self.pool = BlockPool(num_blocks, block_size, **options)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.caching = options.get("prefix_caching", True)
        self.contents: dict[tuple[int, int], int] = {}  # (content before, token) -> content
        self.numbers = count(1)
        self.unknown = count(-1, -1)
        self.memory: dict[tuple[int, int], int] = {}  # (block, offset) -> content
        self.cache: dict[int, int] = {}  # content of a full block -> block
        self.parent: dict[int, int] = {}  # content of a published block -> content of its parent
        self.idle: list[int] = []  # contents in no sequence's hands, oldest first
        self.content: dict[object, list[int]] = {}  # per sequence and position
        self.rows: dict[object, list[int]] = {}  # blocks as the pool names them
        self.named: dict[object, bool] = {}  # all token ids given so far
        self.lost: dict[object, bool] = {}  # behind a block that could not be published
        self.published: dict[object, int] = {}
        self.released: dict[object, int] = {}

    # ---------------------------------------------------------------- the model's own rules

    def _extended(self, contents, tokens):
        contents = list(contents)
        for token in tokens:
            key = (contents[-1] if contents else _ROOT, token)
            if key not in self.contents:
                self.contents[key] = next(self.numbers)
            contents.append(self.contents[key])
        return contents

    def _tokens(self, tokens):
        if isinstance(tokens, int):
            return [next(self.unknown) for _ in range(tokens)]
        return tokens

    def _held(self, row):
        return {block for block in row if block >= 0}

    def _references(self):
        return [block for row in self.rows.values() for block in self._held(row)]

    def _available(self):
        return self.num_blocks - len(set(self._references()))

    def _evicted(self, taken):
        """Check that blocks taken out of the cache went in the right order."""
        due = {c for c, block in self.cache.items() if block in taken}
        assert due <= set(self.idle), "a block in use was evicted"
        free = self.num_blocks - len(set(self._references())) - len(self.idle)
        assert len(due) == max(len(taken) - free, 0), "evicted although blocks were free"
        while due:
            leaves, open_ = [], [self.idle[0]]
            while open_:
                content = open_.pop()
                below = [c for c in self.idle if self.parent[c] == content]
                open_ += below
                leaves += [] if below else [content]
            victim = next((c for c in leaves if c in due), None)
            assert victim is not None, "neither the oldest block nor a last descendant went"
            due.remove(victim)
            self.idle.remove(victim)
            del self.cache[victim]

    def _write(self, seq_id, first):
        for position in range(first, len(self.content[seq_id])):
            column, offset = divmod(position, self.block_size)
            self.memory[self.rows[seq_id][column], offset] = self.content[seq_id][position]

    def _let_go(self, blocks):
        still = set(self._references())
        holds = {block: content for content, block in self.cache.items()}
        for block in blocks:
            if block not in still and block in holds:
                self.idle.append(holds[block])

    # ------------------------------------------------------------------------ both together

    def allocate(self, seq_id, tokens):
        contents = self._extended([], self._tokens(tokens))
        ends = contents[self.block_size - 1 :: self.block_size]
        hits = []
        if self.caching and not isinstance(tokens, int):
            for content in ends:
                if content not in self.cache:
                    break
                hits.append(content)
        needed = -(-len(contents) // self.block_size) - len(hits)
        if needed + len(set(hits) & set(self.idle)) > self._available():
            self._refused(self.pool.allocate, seq_id, tokens)
            return False
        got = self.pool.allocate(seq_id, tokens)
        assert got.num_cached_tokens == len(hits) * self.block_size
        assert got.block_ids[: len(hits)] == [self.cache[c] for c in hits]
        self.idle = [c for c in self.idle if c not in hits]
        row = self.pool.block_ids(seq_id)
        self.rows[seq_id] = row[: len(hits)]
        self._evicted(set(row[len(hits) :]))
        self.rows[seq_id] = row
        self.content[seq_id] = contents
        self.named[seq_id] = not isinstance(tokens, int) or tokens == 0
        self.lost[seq_id] = False
        self.published[seq_id] = len(hits)
        self.released[seq_id] = 0
        self._write(seq_id, got.num_cached_tokens)
        return True

    def append(self, seq_id, tokens):
        row = self.rows[seq_id]
        before = self.content[seq_id]
        contents = self._extended(before, self._tokens(tokens))
        room = len(row) * self.block_size - len(before)
        shared = bool(room) and self._references().count(row[-1]) > 1
        copies = int(shared and len(contents) > len(before))
        needed = max(-(-(len(contents) - len(before) - room) // self.block_size), 0)
        if needed + copies > self._available():
            self._refused(self.pool.append, seq_id, tokens)
            return False
        self.pool.append(seq_id, tokens)
        got = self.pool.block_ids(seq_id)
        kept = len(row) - copies
        assert got[:kept] == row[:kept]
        assert len(got) == len(row) + needed
        self._evicted(set(got[kept:]))
        due = self.pool.take_copies().tolist()
        assert due == ([[row[-1], got[kept]]] if copies else [])
        for source, destination in due:
            for offset in range(self.block_size):
                if (source, offset) in self.memory:
                    self.memory[destination, offset] = self.memory[source, offset]
        self.rows[seq_id] = got
        self.content[seq_id] = contents
        self.named[seq_id] &= not (isinstance(tokens, int) and tokens > 0)
        self._write(seq_id, len(before))
        return True

    def fork(self, seq_id, child_id):
        self.pool.fork(seq_id, child_id)
        for state in self._of_sequences():
            value = state[seq_id]
            state[child_id] = list(value) if isinstance(value, list) else value

    def publish(self, seq_id, num_tokens):
        contents = self.content[seq_id]
        first = self.published[seq_id]
        number = 0
        if self.caching and not self.named[seq_id]:
            self._refused(self.pool.publish, seq_id, num_tokens, error=ValueError)
            return
        if self.caching and not self.lost[seq_id]:
            for column in range(first, num_tokens // self.block_size):
                block = self.rows[seq_id][column]
                if block < 0:
                    self.lost[seq_id] = True
                    break
                end = contents[(column + 1) * self.block_size - 1]
                self.parent[end] = contents[column * self.block_size - 1] if column else _ROOT
                self.cache.setdefault(end, block)
                number += 1
        assert self.pool.publish(seq_id, num_tokens) == number
        self.published[seq_id] += number

    def release_outside_window(self, seq_id, window):
        row = self.rows[seq_id]
        passed = max(len(self.content[seq_id]) - window, 0) // self.block_size
        gone = [row[i] for i in range(passed) if row[i] >= 0]
        assert self.pool.release_outside_window(seq_id, window) == len(gone)
        self.rows[seq_id] = [-1 if i < passed else block for i, block in enumerate(row)]
        self._let_go(reversed(gone))

    def free(self, seq_id, *, preempt=False):
        if preempt:
            again = self.pool.preempt(seq_id)
            n = again if isinstance(again, int) else len(again)
            assert n == len(self.content[seq_id])
        else:
            self.pool.free(seq_id)
        blocks = [block for block in reversed(self.rows[seq_id]) if block >= 0]
        for state in self._of_sequences():
            del state[seq_id]
        self._let_go(blocks)
        for call in (self.pool.free, self.pool.append):
            try:
                call(seq_id)
            except ValueError:
                continue
            raise AssertionError(f"a freed sequence was accepted by {call.__name__}")

    def _of_sequences(self):
        return (self.rows, self.content, self.named, self.lost, self.published, self.released)

    def _refused(self, call, *args, error=PoolExhausted):
        try:
            call(*args)
        except error:
            return
        raise AssertionError(f"{call.__name__}{args} was accepted")

    def _check_tree(self, cache):
        """The entries hang together, and nothing useless is kept."""
        reached, parents = [], [cache.root]
        while parents:
            parent = parents.pop()
            child, before = parent.first_child, None
            while child is not None:
                assert child.parent is parent
                assert child.previous_sibling is before
                reached.append(child)
                parents.append(child)
                child, before = child.next_sibling, child
        assert len(set(reached)) == len(reached)
        assert not set(reached) & set(cache._forgotten)
        assert {*reached, *cache._forgotten} == set(cache._entries.values())
        assert {e.block for e in reached} - {None} == set(self.cache.values())
        by_block = [cache.entry_of(block) for block in range(self.num_blocks)]
        assert {e for e in by_block if e} == {e for e in reached if e.block is not None}
        assert all(e is None or e.block == block for block, e in enumerate(by_block))
        assert all(e.first_child or e.pins or e.block is not None for e in reached)

    def check(self):
        """The invariants that hold after every step."""
        pool = self.pool
        if self.caching:
            self._check_tree(pool._cache)
        assert pool.seq_ids == tuple(self.rows)
        used = self._references()
        for block in range(self.num_blocks):
            assert pool.ref_count(block) == used.count(block)
        idle = {self.cache[content] for content in self.idle}
        assert len(idle) == len(self.idle)
        assert not idle & set(used)
        assert len(set(pool._free)) == len(pool._free), "a block is in the free list twice"
        assert not set(pool._free) & (idle | set(used))
        assert list(pool._idle.blocks()) == [self.cache[content] for content in self.idle]
        assert pool.num_used_blocks == len(set(used))
        assert pool.num_cached_blocks == len(idle)
        assert pool.num_free_blocks + pool.num_cached_blocks + pool.num_used_blocks == (
            self.num_blocks
        )
        for content, block in self.cache.items():
            assert self.memory[block, self.block_size - 1] == content
        for seq_id, row in self.rows.items():
            assert pool.block_ids(seq_id) == row
            assert pool.seq_len(seq_id) == len(self.content[seq_id])
            for position, content in enumerate(self.content[seq_id]):
                block = row[position // self.block_size]
                if block >= 0:
                    assert self.memory[block, position % self.block_size] == content


def random_program(num_steps, seed, *, progress=False):
    """Run random steps, each checked; a fresh pool every 1,000 steps."""
    rng = random.Random(seed)
    names = count()
    done = dict.fromkeys(
        ("allocate", "append", "fork", "publish", "window", "free", "refused", "hit", "evicted"), 0
    )
    for step in trange(num_steps, disable=not progress):
        if step % 1000 == 0:
            model = PoolModel(
                rng.randint(1, 20),
                rng.randint(1, 4),
                seed=rng.choice([None, 1, 2]),
                prefix_caching=rng.random() < 0.9,
            )
            evicted = 0
        live = list(model.rows)
        tokens = rng.choices(range(2), k=rng.randint(0, 10))
        what = rng.choice(["allocate", "append", "publish", "publish", "window", "free", "fork"])
        if len(live) > rng.randint(1, 6):
            what = "free"
        if what == "allocate" or not live:
            what = "allocate"
            name = next(names)
            accepted = model.allocate(name, len(tokens) if rng.random() < 0.1 else tokens)
            done["refused"] += not accepted
            done["hit"] += accepted and model.published[name] > 0
        else:
            seq_id = rng.choice(live)
            if what == "append":
                new = tokens[: rng.randint(0, 5)]
                done["refused"] += not model.append(
                    seq_id, len(new) if rng.random() < 0.02 else new
                )
            elif what == "fork":
                model.fork(seq_id, next(names))
            elif what == "publish":
                n = len(model.content[seq_id])
                model.publish(seq_id, n if rng.random() < 0.8 else rng.randint(0, n))
            elif what == "window":
                model.release_outside_window(seq_id, rng.randint(1, 8))
            else:
                model.free(seq_id, preempt=rng.random() < 0.3)
        done[what] += 1
        done["evicted"] += model.pool.num_evictions - evicted
        evicted = model.pool.num_evictions
        model.check()
    return done


if __name__ == "__main__":
    print(random_program(int(sys.argv[1]), seed=0, progress=True), "no violation")
