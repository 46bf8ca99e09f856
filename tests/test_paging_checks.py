"""Tables in step with the pool, audits, shadow tags and snapshots."""

import doctest
import importlib

import numpy as np
import pytest

from cupy_decode.paging import (
    Allocator,
    BlockPool,
    BlockTableBuffer,
    Shadow,
    ShadowPool,
    audit,
    map_to_kernel_blocks,
    slot_mapping,
)


@pytest.mark.parametrize("name", ["kernel_blocks", "pool", "audit"])
def test_examples_of_the_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"cupy_decode.paging.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


# ---------------------------------------------------------------- incremental tables


def expected(pool, seq_ids, width, kernel_block_size=4, stride=None):
    table = pool.block_table(seq_ids)
    wide = map_to_kernel_blocks(table, pool.block_size, kernel_block_size, stride=stride)
    full = np.full((len(seq_ids), width), -1, np.int32)
    full[:, : wide.shape[1]] = wide
    return full


@pytest.mark.parametrize("stride", [None, 5])
def test_rows_follow_a_random_batch(stride):
    rng = np.random.default_rng(5)
    pool = BlockPool(num_blocks=64, block_size=8, seed=1)
    buffer = BlockTableBuffer(pool, 4, 64, kernel_block_size=4, stride=stride)
    live, names = [], iter(range(1000))
    for _ in range(300):
        action = rng.integers(5)
        if action == 0 and len(live) < 4:
            live.append(next(names))
            pool.allocate(live[-1], int(rng.integers(0, 20)))
        elif action == 1 and live:
            pool.free(live.pop(rng.integers(len(live))))
        elif action == 2 and 0 < len(live) < 4:
            live.append(next(names))
            pool.fork(live[0], live[-1])
        elif action == 3 and live:
            pool.release_outside_window(live[0], 9)
        for seq_id in live:
            if pool.seq_len(seq_id) < 60:
                pool.append(seq_id, int(rng.integers(0, 5)))
        buffer.update(live)
        table, lens = buffer.upload(np)
        assert lens.tolist() == pool.seq_lens(live).tolist()
        assert (buffer.block_table[len(live) :] == -1).all()
        assert not buffer.seq_lens[len(live) :].any()
        want = expected(pool, live, table.shape[1], stride=stride)
        assert table.dtype == lens.dtype == np.int32
        assert np.array_equal(table, want)


def test_only_new_entries_are_written():
    pool = BlockPool(num_blocks=64, block_size=8)
    pool.allocate("a", 80)
    buffer = BlockTableBuffer(pool, 2, 128, kernel_block_size=4)
    assert buffer.update(["a"]) == 20
    assert buffer.update(["a"]) == 0
    pool.append("a")
    assert buffer.update(["a"]) == 2
    pool.fork("a", "b")
    pool.append("b")
    assert buffer.update(["a", "b"]) == 22
    assert buffer.update(["b", "a"]) == 44


def test_uploads_reuse_one_array():
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.allocate("a", 4)
    buffer = BlockTableBuffer(pool, 2, 16)
    buffer.update(["a"])
    first, lens = buffer.upload(np)
    pool.append("a")
    buffer.update(["a"])
    assert first.tolist() == [[0, -1, -1, -1]]
    assert lens.tolist() == [4]
    second, _ = buffer.upload(np)
    assert np.shares_memory(first, second)
    assert not np.shares_memory(first, buffer.block_table)
    assert first.tolist() == [[0, 1, -1, -1]]
    assert lens.tolist() == [5]


def test_rows_past_a_shrunken_batch_are_empty_on_both_sides():
    pool = BlockPool(num_blocks=8, block_size=4)
    for seq_id, n in (("a", 4), ("b", 9), ("c", 5)):
        pool.allocate(seq_id, n)
    buffer = BlockTableBuffer(pool, 3, 12, kernel_block_size=2)
    buffer.update(["a", "b", "c"])
    table, lens = buffer.upload(np)
    assert (table >= 0).sum(axis=1).tolist() == [2, 6, 4]
    pool.free("b")
    pool.free("a")
    buffer.update(["c"])
    shorter, _ = buffer.upload(np)
    want = [[8, 9, 10, 11, -1, -1], [-1] * 6, [-1] * 6]
    for rows, lengths in ((buffer.block_table, buffer.seq_lens), (table, lens)):
        assert rows.tolist() == want
        assert lengths.tolist() == [5, 0, 0]
    assert shorter.tolist() == want[:1]
    pool.allocate("d", 4)
    assert buffer.update(["c", "d"]) == 2
    again, _ = buffer.upload(np)
    assert np.array_equal(again, expected(pool, ["c", "d"], 6, kernel_block_size=2))


def test_what_does_not_fit_is_refused_before_a_row_changes():
    pool = BlockPool(num_blocks=8, block_size=4)
    for seq_id, n in (("a", 4), ("b", 9)):
        pool.allocate(seq_id, n)
    buffer = BlockTableBuffer(pool, 2, 8)
    with pytest.raises(ValueError, match="'b' has 9 tokens, more than max_seq_len 8"):
        buffer.update(["a", "b"])
    with pytest.raises(ValueError, match="3 sequences exceed max_num_seqs 2"):
        buffer.update(["a", "a", "a"])
    assert (buffer.block_table == -1).all()
    with pytest.raises(ValueError, match="kernel_block_size 3 must divide block_size 4"):
        BlockTableBuffer(pool, 2, 8, kernel_block_size=3)


# ------------------------------------------------------------------------------ audit


OWNERS = {10: {0}, 11: {0}, 20: {1}, 21: {1}, 5: {0, 1}, 30: {9}}


def kinds(table, lens, **options):
    found = audit(table, lens, OWNERS, block_size=4, **options)
    return [(f.kind, f.row, f.column, f.block_id) for f in found]


def test_a_sound_table_has_no_findings():
    assert kinds([[5, 10, 99], [5, 20, -1]], [8, 5]) == []
    assert kinds([[5, -1], [20, -1]], [0, 4]) == []


@pytest.mark.parametrize(
    ("table", "lens", "options", "want"),
    [
        ([[10], [20]], [5, 1], {}, [("length", 0, 1, -1)]),
        ([[10, -1], [20, 0]], [5, 1], {}, [("missing", 0, 1, -1)]),
        ([[10, 3], [20, 0]], [5, 1], {}, [("freed", 0, 1, 3)]),
        ([[30, 10], [20, 0]], [5, 1], {}, [("foreign", 0, 0, 30)]),
        ([[10, 11, 10], [20, 0, 0]], [9, 1], {}, [("repeated", 0, 2, 10)]),
        ([[-1, -1, 10], [20, 0, 0]], [9, 1], {}, [("missing", 0, 0, -1), ("missing", 0, 1, -1)]),
        ([[5, 0], [20, 0]], [3, 1], {}, [("shared write", 0, 0, 5)]),
        ([[5, 0], [20, 0]], [4, 1], {"query_lens": [0, 1]}, []),
        ([[5, 10], [20, 0]], [5, 1], {"query_lens": [2, 1]}, [("shared write", 0, 0, 5)]),
        (
            [[5, 0], [5, 0]],
            [3, 3],
            {},
            [("shared write", 0, 0, 5), ("shared write", 1, 0, 5), ("double write", 1, 0, 5)],
        ),
        ([[10, 11], [20, 0]], [5, 1], {"seq_ids": [0, 7]}, [("foreign", 1, 0, 20),
                                                            ("shared write", 1, 0, 20)]),
        ([[-1, 10], [20, 0]], [6, 1], {"window": 2}, []),
        ([[-1, 10], [20, 0]], [6, 1], {"window": 3}, [("missing", 0, 0, -1)]),
        ([[-1, 10], [20, 0]], [6, 1], {"window": 2, "query_lens": [2, 1]},
         [("missing", 0, 0, -1)]),
    ],
)  # fmt: skip
def test_each_fault_is_named(table, lens, options, want):
    assert kinds(table, lens, **options) == want


def test_a_fork_that_writes_without_a_copy_is_found():
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.allocate("a", 6)
    pool.fork("a", "b")
    table = pool.block_table(["a", "b"])
    pool.append("a")
    pool.append("b")
    found = audit(table, [7, 7], pool.owners(), block_size=4, seq_ids=["a", "b"])
    assert {f.kind for f in found} == {"foreign", "shared write", "double write"}
    right = pool.block_table(["a", "b"])
    assert audit(right, [7, 7], pool.owners(), block_size=4, seq_ids=["a", "b"]) == []


def test_audits_refuse_what_they_cannot_read():
    for call, words in (
        (lambda: audit([1], [1], {}, block_size=4), r"got \(1,\) and \(1,\)"),
        (lambda: audit([[1]], [1], {}, block_size=4, seq_ids="ab"), "seq_ids has 2 entries"),
        (lambda: audit([[1]], [1], {}, block_size=4, query_lens=-1), "query_lens must not be neg"),
        (lambda: audit([[1], [1]], [1, 1], {}, block_size=4, query_lens=[1]), r"shape \(1,\)"),
        (
            lambda: audit([[1], [1]], [4, 3], {}, block_size=4, query_lens=[1, 4]),
            r"query_lens\[1\] is 4 but seq_lens\[1\] is 3; lengths count the tokens that the st",
        ),
        (
            lambda: audit([[1, 2], [1]], [3, 3], {}, block_size=4),
            "rectangular; row 0 has 2 entries but row 1 has 1; pad rows with -1",
        ),
        (lambda: audit([[1], [2]], [3, -5], {}, block_size=4), r"seq_lens\[1\] is -5; lengths"),
        (lambda: audit([[1]], [1], {}, block_size=0), "block_size must be at least 1; got 0"),
        (lambda: audit([[1]], [1], {}, block_size=4, window=0), "window must be at least 1; got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for call, words in (
        (
            lambda: audit([[1.0]], [1], {}, block_size=4),
            "block_table must hold integers; got dtype f",
        ),
        (
            lambda: audit([[1]], [1.5], {}, block_size=4),
            "seq_lens must hold integers; got dtype fl",
        ),
        (lambda: audit([[1]], [1], {}), "block_size"),
        (lambda: audit([[1]], [1], [{0}], block_size=4), "owners must be a mapping .* got list"),
        (
            lambda: audit([[1]], [1], {0: 0}, block_size=4),
            r"owners\[0\] must be a collection of sequence ids; got int 0; write \{0\} for one",
        ),
        (lambda: audit([[1]], [1], {0: "ab"}, block_size=4), r"got str 'ab'; write \{'ab'\} for"),
        (
            lambda: audit([[1]], [1], {}, block_size=4, query_lens=0.5),
            "query_lens must hold integers; got dtype float64",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_rows_without_names_are_asked_for_names():
    owners = {1: {"a"}, 2: {"b"}}
    (found,) = audit([[1]], [3], owners, block_size=4, query_lens=0)
    assert found.message.endswith(
        "held by ['a']; the row is taken for sequence 0, which holds nothing: name each row's "
        "sequence in seq_ids"
    )
    (found,) = audit([[2]], [3], owners, block_size=4, query_lens=0, seq_ids=["a"])
    assert found.message.endswith("held by ['b']")


def test_the_pool_is_an_allocator():
    assert isinstance(BlockPool(1, 1), Allocator)


# ----------------------------------------------------------------------------- shadow


def test_tags_follow_reuse_forks_and_copies():
    pool = ShadowPool(num_blocks=16, block_size=4, seed=2)
    pool.allocate("a", [*range(10)])
    pool.publish("a")
    pool.allocate("b", [*range(8), 50, 51, 52])
    pool.fork("b", "c")
    pool.append("b", [60])
    pool.append("c", [61])
    seq_ids = ["a", "b", "c"]
    table, lens = pool.block_table(seq_ids), pool.seq_lens(seq_ids)
    assert len(pool.take_copies()) == 1
    assert pool.check(table, lens, seq_ids, query_lens=0) == []
    small = map_to_kernel_blocks(table, 4, 2)
    assert pool.shadow.check(small, lens, seq_ids, block_size=2) == []


def places(found):
    return [(w.row, w.position + i) for w in found for i in range(w.num_slots)]


def test_a_copy_counts_when_it_is_taken():
    pool = ShadowPool(num_blocks=8, block_size=4)
    pool.allocate("a", [1, 2, 3, 4, 5, 6])
    pool.fork("a", "b")
    pool.append("b", [7])
    ids = ["a", "b"]
    step = pool.block_table(ids), pool.seq_lens(ids), ids
    (forgotten,) = pool.check(*step, query_lens=[0, 1])
    assert places([forgotten]) == [(1, 4), (1, 5)]
    assert "slots 8 to 9, to where a block must first be copied: take_copies" in forgotten.message
    pool.fork("b", "c")
    pool.append("c", [8])  # a copy of what is a copy itself
    assert pool.take_copies().tolist() == [[1, 2], [2, 3]]
    ids += "c"
    assert pool.check(pool.block_table(ids), pool.seq_lens(ids), ids, query_lens=[0, 1, 1]) == []


def test_neighbours_that_are_wrong_alike_are_one_finding():
    pool = ShadowPool(num_blocks=16, block_size=4)
    for seq_id in "ab":
        pool.allocate(seq_id, 12)
    table = pool.block_table(["b", "a"])
    found = pool.shadow.check(table, [12, 9], ["a", "b"])
    runs = [(w.row, w.position, w.slot, w.num_slots) for w in found]
    assert runs == [(0, 0, 12, 12), (1, 0, 0, 9)]
    assert found[0].message == (
        "row 0 ('a') expects positions 0 to 11 in slots 12 to 23, "
        "which hold positions 0 to 11 of 'b'"
    )
    # a wrong block in between starts a new run, and so does a block that holds something else
    found = pool.shadow.check([[0, 4, -1, -1, 9]], [20], ["a"])
    assert [(w.position, w.slot, w.num_slots) for w in found] == [
        (4, 16, 4), (8, -1, 8), (16, 36, 4)
    ]  # fmt: skip
    assert found[1].message == "row 0 ('a') expects positions 8 to 15 in no block"
    assert found[2].message.endswith("positions 16 to 19 in slots 36 to 39, which hold nothing")


def test_a_pool_audits_its_own_units_only():
    pool = ShadowPool(num_blocks=16, block_size=4)
    pool.allocate("a", 6)
    call = pool.block_table(["a"]), [6], ["a"]
    assert pool.check(*call, block_size=4) == []
    with pytest.raises(ValueError, match=r"block_size must be the pool's, 4, .* got 2; .*shadow"):
        pool.check(*call, block_size=2)


def test_every_wrong_entry_is_found_and_explained():
    pool = ShadowPool(num_blocks=16, block_size=4)
    pool.allocate("a", 10)
    pool.allocate("b", 6)
    lens = [10, 6]
    table = pool.block_table(["a", "b"])
    for row, column in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        for block in {*range(-1, 17)} - {int(table[row, column])}:
            wrong = table.copy()
            wrong[row, column] = block
            found = pool.shadow.check(wrong, lens, ["a", "b"])
            first = column * 4
            want = [(row, p) for p in range(first, min(first + 4, lens[row]))]
            assert places(found) == want
    wrong = table.copy()
    wrong[0, 0] = table[1, 0]
    assert (
        "which hold positions 0 to 3 of 'b'"
        in pool.shadow.check(wrong, lens, ["a", "b"])[0].message
    )
    wrong[0, 0] = 12
    assert "which hold nothing" in pool.shadow.check(wrong, lens, ["a", "b"])[0].message
    wrong[0, 0] = 16
    assert "not in the cache" in pool.shadow.check(wrong, lens, ["a", "b"])[0].message


def test_a_length_past_the_row_or_the_tokens_is_found():
    pool = ShadowPool(num_blocks=16, block_size=4)
    pool.allocate("a", 6)
    table = pool.block_table(["a"])
    assert places(pool.shadow.check(table, [7], ["a"])) == [(0, 6)]
    assert places(pool.shadow.check(table, [9], ["a"])) == [(0, 6), (0, 7), (0, 8)]


def test_only_the_window_must_be_right():
    pool = ShadowPool(num_blocks=16, block_size=4)
    pool.allocate("a", 11)
    pool.release_outside_window("a", 5)
    table = pool.block_table(["a"])
    assert pool.shadow.check(table, [11], ["a"], window=5) == []
    assert pool.check(table, [11], ["a"], window=5) == []
    assert places(pool.shadow.check(table, [11], ["a"], window=9)) == [(0, 2), (0, 3)]


def test_reads_that_were_observed_are_held_to_the_tags():
    pool = ShadowPool(num_blocks=16, block_size=4, seed=4)
    pool.allocate("a", 10)
    pool.allocate("b", 10)
    mine = slot_mapping(pool.block_table(["a"]), range(10), 4, rows=[0] * 10)
    assert pool.shadow.check_reads("a", mine, 10).tolist() == []
    other = slot_mapping(pool.block_table(["b"]), [3], 4)
    assert pool.shadow.check_reads("a", [*mine, *other, 64, -1], 10).tolist() == [*other, 64, -1]
    assert pool.shadow.check_reads("a", mine, 9).tolist() == [mine[9]]
    assert pool.shadow.check_reads("a", mine, 10, window=9).tolist() == [mine[0]]


def test_a_freed_sequence_owns_nothing():
    pool = ShadowPool(num_blocks=4, block_size=4)
    pool.allocate("a", [1, 2, 3, 4])
    pool.publish("a")
    table = pool.block_table(["a"])
    pool.free("a")
    assert len(places(pool.shadow.check(table, [4], ["a"]))) == 4
    pool.allocate("b", [1, 2, 3, 4])
    assert pool.check(table, [4], ["b"], query_lens=0) == []


def test_reuse_by_hash_alone_is_caught(monkeypatch):
    """An allocator that trusts its hash gives other tokens away; the tags say so."""
    monkeypatch.setattr("cupy_decode.paging.prefix_cache._same", lambda *entry: True)
    pool = ShadowPool(num_blocks=8, block_size=2, hash_fn=lambda parent, tokens: len(tokens))
    pool.allocate("a", [1, 2])
    pool.publish("a")
    assert pool.allocate("b", [7, 8, 9]).num_cached_tokens == 2
    found = pool.shadow.check(pool.block_table(["b"]), [3], ["b"])
    assert places(found) == [(0, 0), (0, 1)]


def test_a_double_free_would_be_caught():
    pool = ShadowPool(num_blocks=4, block_size=2)
    blocks = pool.allocate("a", 4).block_ids
    pool._free.append(blocks[0])  # what a second free of the block would do
    pool.allocate("b", 2)
    found = pool.check(pool.block_table(["a", "b"]), [4, 2], ["a", "b"], query_lens=0)
    assert places(found) == [(0, 0), (0, 1)]


def test_tags_can_follow_another_allocator():
    shadow = Shadow(num_blocks=4, block_size=2)
    shadow.begin("a")
    shadow.extend("a", [5, 6, 7])
    shadow.write("a", [6, 7, 2], [0, 1, 2])
    assert shadow.check([[3, 1]], [3], ["a"]) == []
    shadow.fork("a", "b")
    shadow.copy(1, 0)
    shadow.extend("b", 1)
    shadow.write("b", [1], [3])
    assert shadow.check([[3, 1], [3, 0]], [3, 4], ["a", "b"]) == []
    assert places(shadow.check([[3, 1]], [4], ["b"])) == [(0, 3)]


# --------------------------------------------------------------------------- snapshot


def test_a_snapshot_counts_and_prints():
    pool = BlockPool(num_blocks=70, block_size=4)
    pool.allocate("a", [1, 2, 3, 4])
    pool.publish("a")
    pool.free("a")
    pool.allocate("b", 5)
    pool.fork("b", "c")
    snap = pool.snapshot()
    assert snap.num_tokens[:4].tolist() == [4, 4, 1, 0]
    assert snap.ref_counts[:4].tolist() == [0, 2, 2, 0]
    assert snap.internal_fragmentation == 3 / 8
    lines = str(snap).splitlines()
    assert lines[0] == (
        "70 blocks of 4 tokens: 2 used (2 shared), 1 cached, 67 free; "
        "37.5% of the used slots are empty"
    )
    assert lines[2] == "       0 c22" + "." * 61
    assert lines[3] == "      64 " + "." * 6
    assert lines[4:] == ["'b': 2 blocks: 1 2", "'c': 2 blocks: 1 2"]
