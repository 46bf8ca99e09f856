"""Kernel blocks, table widths and slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_decode.paging import (
    MultipleOf,
    block_table_width,
    choose_kernel_block_size,
    map_to_kernel_blocks,
    slot_mapping,
)
from tests.shared_data import shared_json


def published(group):
    vectors = shared_json("vectors/policies.json")["policies"][group]["vectors"]
    assert vectors
    return [(v["args"], v["kwargs"], v["out"]) for v in vectors]


# ---------------------------------------------------------------------- choosing a size


@pytest.mark.parametrize(
    ("block_size", "kernels", "want"),
    [
        (16, [[MultipleOf(16)]], 16),
        (128, [[MultipleOf(16)]], 128),
        (128, [[64]], 64),
        (128, [[MultipleOf(16)], [16, 32]], 32),
        (48, [[MultipleOf(16)], [MultipleOf(8)]], 48),
        (4192, [[16, 32]], 32),
        (2112, [[16, 32, 64]], 64),
        (1, [[1, 16]], 1),
    ],
)
def test_largest_common_size_is_chosen(block_size, kernels, want):
    assert choose_kernel_block_size(block_size, *kernels) == want


def test_no_common_size_names_the_rule_and_sizes_that_work():
    with pytest.raises(ValueError, match=r"divide block_size 1 .*multiples of 16.*16, 32"):
        choose_kernel_block_size(1, [MultipleOf(16)])
    with pytest.raises(ValueError, match=r"divide block_size 40 .*use block_size 48, 96"):
        choose_kernel_block_size(40, [MultipleOf(16)], [MultipleOf(24)])
    with pytest.raises(ValueError, match=r"\{32\} and \{64\}; these kernels have no common size"):
        choose_kernel_block_size(128, [32], [64])
    with pytest.raises(ValueError, match="at least one size"):
        choose_kernel_block_size(128)


def test_published_size_choices():
    for (block_size, kernels), _, want in published("vllm_common_block_size"):
        sizes = [[s if isinstance(s, int) else MultipleOf(s[1]) for s in k] for k in kernels]
        if want == "ValueError":
            with pytest.raises(ValueError, match="must divide"):
                choose_kernel_block_size(block_size, *sizes)
        else:
            assert choose_kernel_block_size(block_size, *sizes) == want


# ------------------------------------------------------------------------ mapping tables


def test_padding_is_never_expanded_like_a_block():
    got = map_to_kernel_blocks([[3, 0, -1], [5, -1, -1]], 128, 16)
    assert got.dtype == np.int32
    want = [
        [*range(24, 32), *range(8), *[-1] * 8],
        [*range(40, 48), *[-1] * 16],
    ]
    assert got.tolist() == want


def test_equal_sizes_are_the_identity():
    table = np.array([[3, 0, -1], [5, -1, -1]], np.int32)
    got = map_to_kernel_blocks(table, 64, 64)
    assert np.array_equal(got, table)
    assert not np.shares_memory(got, table)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,)])
def test_empty_tables_stay_empty(shape):
    got = map_to_kernel_blocks(np.zeros(shape, np.int32), 64, 16)
    assert got.shape == (*shape[:-1], shape[-1] * 4)


@given(st.data())
def test_both_tables_name_the_same_tokens(data):
    ratio = data.draw(st.integers(1, 8))
    kernel_block_size = data.draw(st.sampled_from([1, 4, 16]))
    extra = data.draw(st.integers(0, 3))
    ids = data.draw(st.lists(st.integers(-1, 1000), min_size=1, max_size=12))
    block_size = ratio * kernel_block_size
    stride = ratio + extra
    got = map_to_kernel_blocks(ids, block_size, kernel_block_size, stride=stride)
    tokens = np.arange(kernel_block_size)
    for i, block in enumerate(ids):
        part = got[i * ratio : (i + 1) * ratio]
        if block < 0:
            assert (part == -1).all()
        else:
            first = block * stride * kernel_block_size
            flat = (part[:, None] * kernel_block_size + tokens).ravel()
            assert flat.tolist() == list(range(first, first + block_size))


def test_published_mappings():
    for (ids, ratio), options, want in published("vllm_kernel_block_ids"):
        assert map_to_kernel_blocks(ids, 16 * ratio, 16, **options).tolist() == want


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: map_to_kernel_blocks([0], 24, 16), "16 must divide block_size 24; use 8 or 12"),
        (lambda: map_to_kernel_blocks([0], 16, 0), "kernel_block_size must be at least 1; got 0"),
        (lambda: map_to_kernel_blocks([0], 64, 16, stride=3), "stride 3 must be at least .* 4"),
        (lambda: map_to_kernel_blocks([2**28], 128, 16), "268435456.* leaves int32"),
        (
            lambda: map_to_kernel_blocks([[[0]]], 64, 16),
            r"1 or 2 dimensions; got shape \(1, 1, 1\)",
        ),
    ],
)
def test_bad_mappings_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_float_ids_are_refused():
    with pytest.raises(TypeError, match="block_table must hold integers; got dtype float64"):
        map_to_kernel_blocks([0.0], 64, 16)


@pytest.mark.parametrize(
    ("args", "want"), [((1, 16), 8), ((8, 16), 8), ((9, 16), 16), ((3, 128), 3), ((7, 48), 8)]
)
def test_rows_cover_whole_tiles(args, want):
    assert block_table_width(*args) == want


def test_published_widths():
    for args, options, want in published("vllm_block_table_width"):
        assert block_table_width(*args, **options) == want


# ----------------------------------------------------------------------------- slots


def test_slots_are_64_bit_and_padding_stays_padding():
    got = slot_mapping([[2**27, 1], [4, -1]], [15, -1], 2**6)
    assert got.dtype == np.int64
    assert got.tolist() == [2**33 + 15, -1]
    assert slot_mapping([[5, 9]], [0, 31, -1], 16, rows=[0, 0, 7]).tolist() == [80, 159, -1]


def test_published_slots():
    for (position, block_size, row), options, want in published("vllm_slot"):
        assert slot_mapping([row], [position], block_size, **options).tolist() == [want]


@given(
    world=st.integers(1, 5),
    run=st.sampled_from([1, 2, 4, 8]),
    blocks=st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True),
)
def test_ranks_share_the_tokens_without_gap_or_overlap(world, run, blocks):
    block_size = 8
    n = len(blocks) * block_size * world
    ranks = [
        slot_mapping(
            [blocks], np.arange(n), block_size, rows=np.zeros(n, int),
            cp_world=world, cp_rank=r, interleave=run,
        )
        for r in range(world)
    ]  # fmt: skip
    assert ((np.array(ranks) >= 0).sum(0) == 1).all()
    every = {b * block_size + o for b in blocks for o in range(block_size)}
    for r, slots in enumerate(ranks):
        here = slots[slots >= 0]
        assert len(here) == len(every)
        assert set(here.tolist()) == every
        # A rank's tokens come in order, in runs of `run` consecutive positions.
        assert (np.flatnonzero(slots >= 0) // run % world == r).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"positions": [32]}, r"positions\[0\] = 32 lies past row 0, whose 2 blocks hold 32"),
        ({"block_table": [[5, -1]]}, r"positions\[0\] = 17 meets an entry of row 0 with no block"),
        ({"rows": [1]}, r"rows\[0\] is 1 but block_table has 1 rows"),
        ({"rows": [0, 0]}, "rows has 2 entries but positions has 1"),
        ({"cp_world": 2, "cp_rank": 2}, r"cp_rank must lie in 0\.\.1; got 2"),
        ({"cp_world": 2, "interleave": 3}, "interleave 3 must divide block_size 16"),
        ({"cp_world": 0}, "cp_world must be at least 1"),
    ],
)
def test_bad_slots_are_refused(options, words):
    call = {"block_table": [[5, 9]], "positions": [17], "block_size": 16, **options}
    with pytest.raises(ValueError, match=words):
        slot_mapping(**call)
