"""Split plans: coverage, published layouts, capacity, in-place rewriting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cupy_decode import grid
from cupy_decode.plan import SplitPlan

lengths = st.lists(st.integers(0, 400), min_size=1, max_size=5)


def _assert_covers(plan, lens):
    """Every key of every sequence lies in exactly one row, rows in order."""
    keys = [[] for _ in lens]
    for b, begin, end in plan.ranges(lens):
        keys[b] += range(begin, end)
    assert keys == [list(range(s)) for s in lens]
    assert (plan.counts >= 1).all()


@settings(deadline=None)
@given(lengths, st.integers(1, 40), st.sampled_from([1, 16, 32]))
def test_counted_splits_cover_every_key_once(lens, num_splits, tile):
    plan = SplitPlan.from_num_splits(lens, num_splits, tile=tile)
    _assert_covers(plan, lens)
    assert (plan.counts <= num_splits).all()
    assert plan.num_rows == plan.capacity == plan.counts.sum()


@settings(deadline=None)
@given(lengths, st.integers(1, 500))
def test_sized_splits_cover_every_key_once(lens, split_size):
    plan = SplitPlan.from_split_size(lens, split_size)
    _assert_covers(plan, lens)
    for b, begin, end in plan.ranges(lens):
        assert end - begin == split_size or end == lens[b]


@settings(deadline=None)
@given(lengths, lengths)
def test_any_plan_covers_any_lengths(planned, current):
    batch = min(len(planned), len(current))
    for plan in (
        SplitPlan.from_num_splits(planned[:batch], 5),
        SplitPlan.from_split_size(planned[:batch], 64),
    ):
        _assert_covers(plan, current[:batch])


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from([16, 32]))
def test_counts_follow_the_published_segment_rule(seq_len, num_segments, tile):
    layout = grid.segments(seq_len, tile, num_segments)
    plan = SplitPlan.from_num_splits([seq_len], num_segments, tile=tile)
    assert [r[1:] for r in plan.ranges([seq_len])] == [
        layout.bounds(i) for i in range(layout.active)
    ]


@settings(deadline=None)
@given(lengths, st.data())
def test_counts_may_differ_by_sequence(lens, data):
    counts = data.draw(st.lists(st.integers(1, 9), min_size=len(lens), max_size=len(lens)))
    plan = SplitPlan.from_num_splits(lens, counts)
    for b, s in enumerate(lens):
        alone = SplitPlan.from_num_splits([s], counts[b])
        first, last = plan.split_offsets[b : b + 2]
        assert_array_equal(plan.split_begin[first:last], alone.split_begin)


def test_a_fixed_size_leaves_a_short_last_split():
    assert SplitPlan.from_split_size([513], 512).ranges([513]) == [(0, 0, 512), (0, 512, 513)]


def test_bounds_are_taken_as_given():
    plan = SplitPlan.from_bounds([[0, 3, 3, 10], [0], [0, 4]], [10, 0, 9])
    assert plan.ranges([10, 0, 9]) == [
        (0, 0, 3),
        (0, 3, 3),
        (0, 3, 10),
        (0, 10, 10),
        (1, 0, 0),
        (2, 0, 4),
        (2, 4, 9),
    ]
    assert plan.ranges([5, 2, 3]) == [
        (0, 0, 3),
        (0, 3, 3),
        (0, 3, 5),
        (0, 5, 5),
        (1, 0, 2),
        (2, 0, 3),
        (2, 3, 3),
    ]


def test_arrays_are_int32_csr():
    plan = SplitPlan.from_split_size([40, 0, 16], 16, capacity=6)
    assert plan.split_offsets.dtype == plan.split_begin.dtype == np.int32
    assert plan.split_offsets.tolist() == [0, 3, 4, 5]
    assert plan.split_begin.tolist() == [0, 16, 32, 0, 0, 0]
    assert (plan.batch, plan.num_rows, plan.capacity) == (3, 5, 6)


def test_unsplit_is_known_only_when_every_sequence_has_one_row():
    assert SplitPlan.from_num_splits([40, 0], 1).unsplit
    assert not SplitPlan.from_num_splits([40, 0], 2).unsplit
    assert SplitPlan.from_split_size([40], 64).unsplit


def test_moving_fills_unused_rows_with_an_absurd_key():
    plan = SplitPlan.from_num_splits([40, 0], 1).to(np, capacity=5)
    assert plan.split_begin.tolist() == [0, 0] + [2**31 - 1] * 3
    assert not plan.unsplit  # a larger buffer may be given splits later
    assert SplitPlan.from_num_splits([40, 0], 1).to(np).unsplit
    with pytest.raises(ValueError, match="the plan needs 3 rows but capacity is 2"):
        SplitPlan.from_num_splits([48], 3).to(np, capacity=2)


def test_assign_rewrites_in_place():
    plan = SplitPlan.from_num_splits([1, 1], 1).to(np, capacity=8)
    offsets, begin = plan.split_offsets, plan.split_begin
    plan.assign(SplitPlan.from_num_splits([64, 32], 4))
    assert plan.split_offsets is offsets
    assert plan.split_begin is begin
    assert plan.ranges([64, 32]) == SplitPlan.from_num_splits([64, 32], 4).ranges([64, 32])
    plan.assign(SplitPlan.from_num_splits([7, 0], 1))
    assert plan.ranges([7, 0]) == [(0, 0, 7), (1, 0, 0)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SplitPlan.from_num_splits([9], 1), "plan is for batch 2; got one for batch 1"),
        (SplitPlan.from_split_size([9, 9], 1), "needs 18 rows but capacity is 8"),
    ],
)
def test_a_refused_assign_changes_nothing(other, message):
    plan = SplitPlan.from_num_splits([64, 32], 4).to(np, capacity=8)
    before = plan.split_offsets.copy(), plan.split_begin.copy()
    with pytest.raises(ValueError, match=message):
        plan.assign(other)
    assert_array_equal(plan.split_offsets, before[0])
    assert_array_equal(plan.split_begin, before[1])


def test_a_plan_that_promised_one_row_keeps_its_promise():
    plan = SplitPlan.from_num_splits([64, 32], 1, capacity=9)
    with pytest.raises(ValueError, match="this plan was made unsplit"):
        plan.assign(SplitPlan.from_bounds([[0, 9], [0]], [64, 32]))
    assert plan.ranges([64, 32]) == [(0, 0, 64), (1, 0, 32)]


def test_a_device_plan_is_not_read_behind_ones_back():
    plan = SplitPlan(memoryview(b""), memoryview(b""))
    assert plan.on_device
    for question in (lambda: plan.num_rows, lambda: plan.counts, lambda: plan.ranges([1])):
        with pytest.raises(ValueError, match=r"lives on the device; call \.to_host\(\) first"):
            question()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SplitPlan.from_num_splits([], 1), "seq_lens must be a non-empty"),
        (lambda: SplitPlan.from_num_splits([1.5], 1), "integer array; got shape .1,., dtype float"),
        (lambda: SplitPlan.from_num_splits([3, -2], 1), r"seq_lens\[1\] is -2"),
        (lambda: SplitPlan.from_num_splits([3], 0), "num_splits must be at least 1; got 0"),
        (lambda: SplitPlan.from_num_splits([3], 1, tile=0), "tile must be at least 1; got 0"),
        (lambda: SplitPlan.from_split_size([3], 0), "split_size must be at least 1; got 0"),
        (lambda: SplitPlan.from_split_size([3, 2**31], 64), r"seq_lens\[1\] is 2147483648; lengt"),
        (
            lambda: SplitPlan.from_num_splits([2**40], 1),
            "is 1099511627776; lengths must be at most",
        ),
        (lambda: SplitPlan.from_num_splits([3], 1, tile=2**31), "tile must be at most 2147483647"),
        (lambda: SplitPlan.from_num_splits([3, 4], [1]), "2 integers, one per sequence; got shape"),
        (lambda: SplitPlan.from_num_splits([3, 4], [1, 0]), "num_splits must be at least 1; got 0"),
        (
            lambda: SplitPlan.from_num_splits([3], [2.5]),
            "an integer or 1 integers, .* dtype float64",
        ),
        (lambda: SplitPlan.from_split_size([2**31 - 1] * 2, 1), "needs 4294967294 rows, more than"),
        (
            lambda: SplitPlan.from_counts_and_sizes([3], np.array([0]), policy="x"),
            "sizes must be at",
        ),
        (lambda: SplitPlan.from_split_size([33], 16, capacity=2), "needs 3 rows but capacity is 2"),
        (lambda: SplitPlan.from_bounds([[0]], [3, 4]), "bounds has 1 rows but seq_lens has 2"),
        (lambda: SplitPlan.from_bounds([[]], [3]), r"bounds\[0\] must start with 0"),
        (lambda: SplitPlan.from_bounds([[1]], [3]), r"bounds\[0\] must start with 0"),
        (lambda: SplitPlan.from_bounds([[0], [0, 2, 1]], [3, 3]), r"bounds\[1\] must start"),
        (lambda: SplitPlan.from_bounds([[0, 4]], [3]), r"within seq_lens\[0\] = 3; got \[0, 4\]"),
        (lambda: SplitPlan.from_num_splits([3], 1).ranges([3, 4]), "2 entries but the plan has 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: SplitPlan.from_num_splits([3], 2.7),
            "num_splits must be an integer; got float 2.7",
        ),
        (lambda: SplitPlan.from_num_splits([3], True), "num_splits must be an integer; got bool"),
        (lambda: SplitPlan.from_split_size([3], 33.9), "split_size must be an integer; got float"),
        (
            lambda: SplitPlan.from_bounds([[0, 1.5]], [3]),
            r"bounds\[0\] must hold integers in the r",
        ),
        (
            lambda: SplitPlan.from_bounds([[0, 10**30]], [3]),
            r"bounds\[0\] must hold integers in the",
        ),
    ],
)
def test_what_is_no_integer_is_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("num_splits", [7, 2**31, 10**30, [2**31 - 1, 7]])
def test_any_number_of_splits_stops_at_the_tiles(num_splits):
    plan = SplitPlan.from_num_splits([100, 17], num_splits)
    assert plan.counts.tolist() == [7, 2]


@pytest.mark.parametrize("split_size", [100, 2**31, 10**30])
def test_any_split_size_stops_at_the_sequence(split_size):
    plan = SplitPlan.from_split_size([100, 17], split_size)
    assert plan.unsplit
    assert plan.ranges([100, 17]) == [(0, 0, 100), (1, 0, 17)]


def test_the_longest_sequence_is_planned_whole():
    longest = 2**31 - 1
    plan = SplitPlan.from_split_size([longest], longest)
    assert plan.ranges([longest]) == [(0, 0, longest)]
    plan = SplitPlan.from_num_splits([longest], 2, tile=longest // 2)
    assert plan.ranges([longest])[-1] == (0, 2 * (longest // 2), longest)


@pytest.mark.parametrize("offsets", [[0, 2], [0, 1, 1], [0, 0, 2], [1, 2]])
def test_unsplit_is_not_believed_of_other_rows(offsets):
    rows = np.array(offsets, np.int32), np.zeros(2, np.int32)
    assert not SplitPlan(*rows).unsplit
    with pytest.raises(ValueError, match="every sequence has exactly one row"):
        SplitPlan(*rows, unsplit=True)


def test_unsplit_is_believed_of_one_row_a_sequence():
    assert SplitPlan(np.arange(4, dtype=np.int32), np.zeros(3, np.int32), unsplit=True).unsplit
