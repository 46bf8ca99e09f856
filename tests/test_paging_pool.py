"""The allocator: admission, reference counts, prefix reuse, eviction, windows."""

import numpy as np
import pytest

from cupy_decode.paging import BlockPool, PoolExhausted, slot_mapping


def counts(pool):
    return pool.num_free_blocks, pool.num_cached_blocks, pool.num_used_blocks


def cached_and_freed(pool, seq_id, tokens):
    """Run one request to its end: admitted, written, published, freed."""
    hit = pool.allocate(seq_id, tokens).num_cached_tokens
    pool.publish(seq_id)
    pool.free(seq_id)
    return hit


# ------------------------------------------------------------------- blocks and tables


def test_blocks_cover_the_tokens():
    pool = BlockPool(num_blocks=8, block_size=4)
    assert pool.allocate("a", 9) == ([0, 1, 2], 0)
    assert pool.allocate("b", [5, 6, 7, 8]) == ([3], 0)
    assert pool.allocate("c", 0) == ([], 0)
    pool.append("b")
    table = pool.block_table(["b", "a", "c"])
    assert table.dtype == np.int32
    assert table.tolist() == [[3, 4, -1], [0, 1, 2], [-1, -1, -1]]
    assert pool.block_table(["b"], width=4).tolist() == [[3, 4, -1, -1]]
    lens = pool.seq_lens(["b", "a", "c"])
    assert lens.dtype == np.int32
    assert lens.tolist() == [5, 9, 0]
    assert counts(pool) == (3, 0, 5)
    assert pool.owners() == {0: {"a"}, 1: {"a"}, 2: {"a"}, 3: {"b"}, 4: {"b"}}


def test_a_block_is_taken_only_when_the_last_one_is_full():
    pool = BlockPool(num_blocks=3, block_size=4)
    pool.allocate("a", 0)
    used = []
    for _ in range(9):
        pool.append("a")
        used.append(pool.num_used_blocks)
    assert used == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert slot_mapping(pool.block_table(["a"]), [8], 4).tolist() == [8]


def test_a_seed_scatters_the_blocks_and_loses_none():
    pool = BlockPool(num_blocks=64, block_size=1, seed=3)
    blocks = pool.allocate("a", 64).block_ids
    assert blocks != sorted(blocks)
    assert sorted(blocks) == list(range(64))
    assert blocks == BlockPool(64, 1, seed=3).allocate("a", 64).block_ids


def test_exhaustion_refuses_the_whole_request_and_changes_nothing():
    pool = BlockPool(num_blocks=4, block_size=2)
    cached_and_freed(pool, "old", [1, 2, 3, 4])
    pool.allocate("a", [9, 9, 9])
    before = counts(pool), pool.block_table(["a"]).tolist()
    # Two of its blocks are cached hits, which leaves nothing for the third.
    with pytest.raises(PoolExhausted, match="'b' needs 3 more blocks but only 2 are available"):
        pool.allocate("b", [1, 2, 3, 4, 5])
    with pytest.raises(PoolExhausted, match="'a' needs 3 more"):
        pool.append("a", 6)
    assert (counts(pool), pool.block_table(["a"]).tolist()) == before
    assert "b" not in pool
    assert pool.seq_len("a") == 3
    assert pool.allocate("b", [1, 2, 3, 4]).num_cached_tokens == 4


def test_double_free_is_refused_and_blocks_keep_one_owner():
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.allocate("a", list(range(12)))
    pool.free("a")
    with pytest.raises(ValueError, match="'a' is not live"):
        pool.free("a")
    assert pool.num_free_blocks == 8
    x = pool.allocate("x", list(range(100, 116))).block_ids
    y = pool.allocate("y", list(range(200, 216))).block_ids
    assert len({*x, *y}) == 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.free("no"), "'no' is not live"),
        (lambda p: p.append("no"), "'no' is not live"),
        (lambda p: p.fork("no", "b"), "'no' is not live"),
        (lambda p: p.block_table(["no"]), "'no' is not live"),
        (lambda p: p.allocate("a", 1), "'a' is live already"),
        (lambda p: p.fork("a", "a"), "'a' is live already"),
        (lambda p: p.append("a", -1), "got -1"),
        (lambda p: p.allocate("b", [2**31]), "must fit int32"),
        (lambda p: p.publish("a", 4), r"num_tokens must lie in 0\.\.3; got 4"),
        (lambda p: p.block_table(["a"], width=1), "width 1 is too small"),
        (lambda p: p.release_outside_window("a", 0), "window must be at least 1"),
        (lambda p: BlockPool(0, 4), "num_blocks must be at least 1"),
        (lambda p: BlockPool(4, 0), "block_size must be at least 1"),
        (lambda p: BlockPool(4, 2, seed=-1), "seed must be at least 0; got -1"),
        (lambda p: p.ref_count(-1), r"block_id must lie in 0\.\.3, .* got -1; leave out .* \(-1\)"),
        (lambda p: p.ref_count(4), r"block_id must lie in 0\.\.3, .* got 4"),
    ],
)
def test_bad_requests_are_refused_unchanged(call, words):
    pool = BlockPool(num_blocks=4, block_size=2)
    pool.allocate("a", [1, 2, 3])
    with pytest.raises(ValueError, match=words):
        call(pool)
    assert counts(pool) == (2, 0, 2)
    assert pool.seq_ids == ("a",)
    assert pool.seq_len("a") == 3


def test_token_ids_must_be_integers():
    pool = BlockPool(num_blocks=4, block_size=2)
    for tokens in ([1.5], [[1, 2]], "ab"):
        with pytest.raises(TypeError, match="tokens must be a number or one-dimensional"):
            pool.allocate("a", tokens)
    assert counts(pool) == (4, 0, 0)


def test_names_and_numbers_of_the_wrong_type_are_refused():
    pool = BlockPool(num_blocks=4, block_size=2)
    pool.allocate("a", 1)
    for call, words in (
        (lambda: pool.block_table("ab"), r"seq_ids must be .* got 'ab' alone; write \['ab'\]"),
        (lambda: pool.seq_lens("a"), r"seq_ids must be a sequence of ids; got 'a' alone"),
        (lambda: BlockPool(4, 2, seed="x"), "seed must be an integer; got str 'x'"),
        (lambda: BlockPool(4.0, 2), "num_blocks must be an integer; got float 4.0"),
    ):
        with pytest.raises(TypeError, match=words):
            call()


# ------------------------------------------------------------------------ prefix reuse


def test_full_blocks_of_a_prefix_are_shared():
    pool = BlockPool(num_blocks=8, block_size=2)
    a = pool.allocate("a", [1, 2, 3, 4, 5])
    pool.publish("a")
    b = pool.allocate("b", np.array([1, 2, 3, 4, 9]))
    assert b.num_cached_tokens == 4
    assert b.block_ids[:2] == a.block_ids[:2]
    assert b.block_ids[2] != a.block_ids[2]
    assert [pool.ref_count(x) for x in b.block_ids] == [2, 2, 1]


def test_nothing_is_found_before_it_is_published():
    pool = BlockPool(num_blocks=16, block_size=2)
    pool.allocate("a", [1, 2, 3, 4, 5, 6])
    assert pool.allocate("b", [1, 2, 3, 4, 5, 6]).num_cached_tokens == 0
    assert pool.publish("a", num_tokens=5) == 2
    assert pool.allocate("c", [1, 2, 3, 4, 5, 6]).num_cached_tokens == 4
    assert pool.publish("a") == 1
    assert pool.publish("a") == 0
    assert pool.allocate("d", [1, 2, 3, 4, 5, 6]).num_cached_tokens == 6


def test_generated_tokens_are_found_too():
    pool = BlockPool(num_blocks=16, block_size=2)
    pool.allocate("a", [1, 2, 3])
    for token in (4, 5, 6):
        pool.append("a", [token])
    pool.publish("a")
    pool.free("a")
    assert pool.allocate("b", [1, 2, 3, 4, 5, 6, 7]).num_cached_tokens == 6


def test_content_is_unknown_after_tokens_without_ids():
    pool = BlockPool(num_blocks=16, block_size=2)
    pool.allocate("a", [1, 2, 3, 4])
    pool.publish("a")
    pool.append("a", 2)
    pool.append("a", [7, 8])
    pool.fork("a", "twin")
    for seq_id in ("a", "twin"):
        with pytest.raises(ValueError, match=f"'{seq_id}' has tokens without ids"):
            pool.publish(seq_id)
        pool.free(seq_id)
    assert counts(pool) == (14, 2, 0)


def test_a_sequence_of_unnamed_tokens_cannot_be_published():
    pool = BlockPool(num_blocks=16, block_size=2)
    pool.allocate("a", 4)
    pool.append("a", [5, 6])
    with pytest.raises(ValueError, match="give token ids to allocate and append"):
        pool.publish("a")
    pool.allocate("b", 0)  # names all its tokens: none
    pool.append("b", [1, 2])
    pool.append("b", 0)
    assert pool.publish("b") == 1
    assert pool.allocate("c", [1, 2, 3]).num_cached_tokens == 2
    without = BlockPool(num_blocks=16, block_size=2, prefix_caching=False)
    without.allocate("a", 4)
    assert without.publish("a") == 0


def test_same_tokens_after_another_prefix_are_other_content():
    pool = BlockPool(num_blocks=16, block_size=2)
    cached_and_freed(pool, "a", [1, 2, 3, 4])
    assert pool.allocate("b", [9, 9, 3, 4, 5]).num_cached_tokens == 0


def test_a_colliding_hash_never_hands_out_other_tokens():
    pool = BlockPool(num_blocks=16, block_size=2, hash_fn=lambda parent, tokens: 0)
    a = pool.allocate("a", [1, 2, 3, 4]).block_ids
    pool.publish("a")
    pool.free("a")
    assert pool.allocate("b", [7, 8, 3, 4]).num_cached_tokens == 0
    pool.publish("b")
    assert pool.allocate("c", [1, 2, 9, 9]) == ([a[0], pool.block_ids("c")[1]], 2)


def test_hash_of_a_block_is_chained():
    seen = []

    def hash_fn(parent, tokens):
        seen.append((parent, np.frombuffer(tokens, np.int32).tolist()))
        return len(seen)

    pool = BlockPool(num_blocks=16, block_size=2, hash_fn=hash_fn)
    pool.allocate("a", [1, 2, 3, 4, 5])
    assert seen == [(b"", [1, 2])]
    pool.publish("a")
    assert seen[1:] == [(b"", [1, 2]), (2, [3, 4])]


def test_two_blocks_with_the_same_tokens_stay_two():
    pool = BlockPool(num_blocks=8, block_size=2)
    a = pool.allocate("a", [1, 2]).block_ids
    b = pool.allocate("b", [1, 2]).block_ids
    pool.publish("a")
    pool.publish("b")
    assert not set(a) & set(b)
    assert pool.allocate("c", [1, 2]).block_ids == a
    for s in "abc":
        pool.free(s)
    assert counts(pool) == (7, 1, 0)


def test_without_prefix_caching_everything_freed_is_free():
    pool = BlockPool(num_blocks=8, block_size=2, prefix_caching=False)
    assert cached_and_freed(pool, "a", [1, 2, 3, 4]) == 0
    assert cached_and_freed(pool, "b", [1, 2, 3, 4]) == 0
    assert counts(pool) == (8, 0, 0)


# ---------------------------------------------------------------------------- eviction


def test_tail_goes_before_head_and_is_then_unknown():
    pool = BlockPool(num_blocks=3, block_size=2)
    cached_and_freed(pool, "a", [1, 2, 3, 4, 5, 6])
    assert counts(pool) == (0, 3, 0)
    cached_and_freed(pool, "b", [100, 101])
    assert pool.num_evictions == 1
    assert pool.allocate("c", [1, 2, 3, 4, 5, 6]).num_cached_tokens == 4


def test_an_evicted_block_is_unknown_before_anything_else_is_published():
    pool = BlockPool(num_blocks=2, block_size=2)
    cached_and_freed(pool, "a", [1, 2, 3, 4])
    assert [pool.ref_count(block) for block in (0, 1)] == [0, 0]
    assert pool.snapshot().ref_counts.tolist() == [0, 0]
    pool.allocate("b", [7, 7, 7, 7])
    assert pool.num_evictions == 2
    assert [pool.ref_count(block) for block in (0, 1)] == [1, 1]
    pool.free("b")
    assert counts(pool) == (2, 0, 0)
    assert pool.allocate("c", [1, 2, 3, 4]).num_cached_tokens == 0
    assert pool.publish("c") == 2
    assert pool.allocate("d", [1, 2, 3, 4]).num_cached_tokens == 4


def test_the_least_recently_used_content_goes_first():
    pool = BlockPool(num_blocks=3, block_size=2)
    for seq_id, token in (("a", 1), ("b", 2), ("c", 3), ("a", 1), ("d", 4)):
        cached_and_freed(pool, seq_id, [token, token])
    assert [cached_and_freed(pool, "x", [t, t]) for t in (1, 3, 4)] == [2, 2, 2]
    assert pool.num_evictions == 1


def test_an_older_ancestor_waits_for_its_idle_descendants():
    pool = BlockPool(num_blocks=4, block_size=2)
    pool.allocate("a", [1, 2, 3, 4, 5, 6])
    pool.publish("a")
    # The window gives the head back first, so it is the oldest when the rest follows.
    assert pool.release_outside_window("a", 4) == 1
    assert pool.block_ids("a")[0] == -1
    pool.free("a")
    cached_and_freed(pool, "b", [7, 7])
    cached_and_freed(pool, "c", [8, 8])
    assert pool.num_evictions == 1
    assert pool.allocate("d", [1, 2, 3, 4, 5, 6]).num_cached_tokens == 4


def test_descendants_of_a_lost_block_are_found_again_when_it_returns():
    pool = BlockPool(num_blocks=4, block_size=2)
    pool.allocate("a", [1, 2, 3, 4])
    pool.publish("a")
    pool.release_outside_window("a", 2)
    pool.allocate("b", [7, 7, 7, 7, 7, 7])  # evicts [1, 2] while [3, 4] is in use
    assert pool.num_evictions == 1
    pool.free("b")
    assert pool.allocate("c", [1, 2]).num_cached_tokens == 0
    pool.publish("c")
    assert pool.allocate("d", [1, 2, 3, 4]).num_cached_tokens == 4
    assert pool.ref_count(pool.block_ids("a")[1]) == 2


def test_a_cached_block_that_is_hit_cannot_be_evicted_for_the_same_request():
    pool = BlockPool(num_blocks=3, block_size=2)
    cached_and_freed(pool, "a", [1, 2])
    cached_and_freed(pool, "b", [3, 4])
    got = pool.allocate("c", [1, 2, 5, 6, 7, 8])
    assert got.num_cached_tokens == 2
    assert len(set(got.block_ids)) == 3
    assert counts(pool) == (0, 0, 3)


# ------------------------------------------------------------------------ copy on write


def test_a_fork_shares_blocks_until_one_side_writes():
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.allocate("a", [1, 2, 3, 4, 5])
    pool.fork("a", "b")
    assert pool.block_ids("a") == pool.block_ids("b") == [0, 1]
    assert pool.num_used_blocks == 2
    pool.append("b", [6])
    assert pool.block_ids("b") == [0, 2]
    assert pool.take_copies().tolist() == [[1, 2]]
    assert pool.take_copies().tolist() == []
    pool.append("a", [7])  # alone again: no copy
    assert pool.block_ids("a") == [0, 1]
    assert pool.take_copies().shape == (0, 2)


def test_a_fork_at_a_block_boundary_needs_no_copy():
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.allocate("a", 4)
    pool.fork("a", "b")
    pool.append("a")
    pool.append("b")
    assert pool.take_copies().shape == (0, 2)
    assert pool.block_ids("a")[0] == pool.block_ids("b")[0]
    assert pool.block_ids("a")[1] != pool.block_ids("b")[1]


def test_a_copy_that_does_not_fit_is_refused():
    pool = BlockPool(num_blocks=2, block_size=4)
    pool.allocate("a", 5)
    pool.fork("a", "b")
    with pytest.raises(PoolExhausted, match="needs 1 more"):
        pool.append("b")
    assert pool.take_copies().shape == (0, 2)
    pool.free("a")
    pool.append("b")
    assert pool.block_ids("b") == [0, 1]


def test_a_forked_child_publishes_its_own_branch():
    pool = BlockPool(num_blocks=16, block_size=2)
    pool.allocate("a", [1, 2, 3])
    pool.publish("a")
    pool.fork("a", "b")
    pool.append("a", [4])
    pool.append("b", [5])
    pool.publish("a")
    pool.publish("b")
    pool.free("a")
    pool.free("b")
    assert pool.allocate("c", [1, 2, 3, 4]).num_cached_tokens == 4
    assert pool.allocate("d", [1, 2, 3, 5]).num_cached_tokens == 4


# ------------------------------------------------------------- preemption and windows


def test_a_preempted_sequence_finds_its_blocks_again():
    pool = BlockPool(num_blocks=4, block_size=2)
    pool.allocate("a", [1, 2, 3])
    pool.append("a", [4, 5])
    pool.publish("a")
    again = pool.preempt("a")
    assert again.tolist() == [1, 2, 3, 4, 5]
    assert counts(pool) == (2, 2, 0)
    assert pool.allocate("a", again).num_cached_tokens == 4
    pool.allocate("b", 2)
    assert pool.preempt("b") == 2


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
def test_a_window_keeps_exactly_the_blocks_that_a_query_can_see(window):
    block_size = 4
    pool = BlockPool(num_blocks=16, block_size=block_size)
    pool.allocate("a", 1)
    for length in range(2, 40):
        pool.append("a")
        pool.release_outside_window("a", window)
        seen = {p // block_size for p in range(max(0, length - window), length)}
        held = {i for i, b in enumerate(pool.block_ids("a")) if b >= 0}
        assert held == set(range(min(seen), max(seen) + 1))
        assert pool.num_used_blocks == len(held)
    pool.free("a")
    assert counts(pool) == (16, 0, 0)
