"""Launch grids, SM coverage and segment layout."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_decode import grid
from cupy_decode.heads import HeadConfig

from .shared_data import shared_json

LLAMA_8B = HeadConfig(32, 8, 128)
LLAMA_70B_TP8 = HeadConfig(64, 8, 128).shard(8)


def test_batch_one_reaches_eight_of_132_sms():
    blocks = grid.blocks_2d(1, 1, LLAMA_8B)
    assert blocks == 8
    assert grid.sm_coverage(blocks, 132) == pytest.approx(0.0606, abs=5e-5)
    assert grid.idle_sms(blocks, 132) == 124
    assert grid.first_wave_splits(blocks, 132) == 17
    assert grid.blocks_3d(1, 1, LLAMA_8B, 16) == 128
    assert grid.idle_sms(128, 132) == 4


def test_tensor_parallelism_leaves_one_thread_block():
    blocks = grid.blocks_2d(1, 1, LLAMA_70B_TP8)
    assert blocks == 1
    assert grid.sm_coverage(blocks, 132) == pytest.approx(0.0076, abs=5e-5)
    assert grid.first_wave_splits(blocks, 132) == 132


def test_spare_tiles_appear_once_block_q_tokens_are_there():
    assert [grid.blocks_2d(b, b, LLAMA_8B) for b in (3, 4, 7, 8)] == [24, 40, 64, 80]


@pytest.mark.parametrize(
    ("group_size", "block_m", "block_q"),
    [(1, 16, 16), (5, 16, 3), (16, 16, 1), (17, 32, 1), (71, 128, 1), (128, 128, 1)],
)
def test_query_tiles_follow_the_group_size(group_size, block_m, block_q):
    heads = HeadConfig(group_size, 1, 64)
    assert (grid.block_m(heads), grid.block_q(heads)) == (block_m, block_q)


def test_coverage_is_capped_and_waves_are_not():
    assert grid.sm_coverage(264, 132) == 1.0
    assert grid.waves(264, 132) == 2.0
    assert grid.waves(264, 132, blocks_per_sm=4) == 0.5
    assert grid.idle_sms(264, 132) == 0


def test_split_threshold():
    assert grid.split_threshold(8) == 16
    assert grid.split_threshold(1) == 128


def test_segments_fall_off_the_end():
    layout = grid.segments(257)
    assert (layout.tiles_per_segment, layout.keys_per_segment, layout.active) == (2, 32, 9)
    assert layout.bounds(8) == (256, 257)
    with pytest.raises(ValueError, match=r"segment must lie in 0\.\.8; got 9"):
        layout.bounds(9)


def test_segments_of_nothing_are_inactive():
    assert grid.segments(0) == grid.Segments(0, 0, 0, 0)


@settings(deadline=None)
@given(st.integers(1, 5000), st.sampled_from([1, 16, 32]), st.integers(1, 70))
def test_active_segments_cover_every_key_once(seq_len, tile, num_segments):
    layout = grid.segments(seq_len, tile, num_segments)
    keys = [k for i in range(layout.active) for k in range(*layout.bounds(i))]
    assert keys == list(range(seq_len))
    assert 1 <= layout.active <= num_segments


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 500))
def test_first_wave_is_the_smallest_count_that_covers(blocks, num_sms):
    splits = grid.first_wave_splits(blocks, num_sms)
    assert grid.sm_coverage(blocks * splits, num_sms) == 1.0
    assert splits == 1 or blocks * (splits - 1) < num_sms


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grid.blocks_2d(0, 0, LLAMA_8B), "batch must be at least 1 sequence; got 0"),
        (lambda: grid.blocks_2d(1, 2, LLAMA_8B), "num_query_tokens must be at least 2"),
        (lambda: grid.blocks_3d(1, 1, LLAMA_8B, 0), "num_splits must be at least 1 split; got 0"),
        (lambda: grid.first_wave_splits(0, 132), "blocks must be at least 1"),
        (lambda: grid.sm_coverage(1, 0), "num_sms must be at least 1 SM; got 0"),
        (lambda: grid.waves(1, 132, 0), "blocks_per_sm must be at least 1"),
        (lambda: grid.split_threshold(0), "num_kv_heads must be at least 1"),
        (lambda: grid.segments(-1), "seq_len must be at least 0 keys; got -1"),
        (lambda: grid.segments(1, tile=0), "tile must be at least 1 key; got 0"),
        (lambda: grid.segments(1, num_segments=0), "num_segments must be at least 1"),
    ],
)
def test_bad_numbers_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_published_grid_figures():
    figures = shared_json("vectors/chapter_figures.json")
    assert len(figures["grid"]) == 40
    for row in figures["grid"]:
        heads = HeadConfig(row["num_q_heads"], row["num_kv_heads"], 128)
        batch = row["batch"]
        blocks = grid.blocks_2d(batch, batch, heads)
        got = {
            "batch": batch,
            "num_q_heads": heads.num_q_heads,
            "num_kv_heads": heads.num_kv_heads,
            "block_m": grid.block_m(heads),
            "block_q": grid.block_q(heads),
            "blocks_2d": blocks,
            "sm_coverage_percent": round(100 * grid.sm_coverage(blocks, 132), 2),
            "first_wave_splits": grid.first_wave_splits(blocks, 132),
            "blocks_3d_16": grid.blocks_3d(batch, batch, heads, 16),
            "splits": batch <= grid.split_threshold(heads.num_kv_heads),
        }
        assert got == row


def test_published_segment_figures():
    figures = shared_json("vectors/chapter_figures.json")
    for row in figures["segments"]:
        layout = grid.segments(row["seq_len"])
        assert layout == grid.Segments(**row)
    for name, threshold in figures["split_threshold"].items():
        assert grid.split_threshold(int(name.removeprefix("num_kv_heads "))) == threshold
    walk = figures["walkthrough_batch1_seq2560"]
    layout = grid.segments(2560)
    tiles = grid.blocks_2d(1, 1, LLAMA_8B) // LLAMA_8B.num_kv_heads
    assert [tiles, LLAMA_8B.num_kv_heads, layout.active] == walk["grid"]
    assert grid.blocks_3d(1, 1, LLAMA_8B, 16) == walk["blocks_stage1"]
    assert layout.tiles_per_segment == walk["tiles_per_segment"]
    assert list(layout.bounds(0)) == walk["segment_0"]
    assert list(layout.bounds(15)) == walk["segment_15"]
    assert grid.idle_sms(grid.blocks_2d(1, 1, LLAMA_8B), 132) == walk["idle_sms_unsplit"]
