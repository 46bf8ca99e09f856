"""Bytes, FLOP, intensity and the ledger of the readable kernels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_decode import specs, traffic
from cupy_decode.grid import block_m
from cupy_decode.heads import HeadConfig, presets
from cupy_decode.plan import SplitPlan

from .shared_data import shared_json

LLAMA_8B = presets["llama-3-8b"]


def test_kv_bytes_of_the_worked_example():
    assert traffic.kv_bytes(2560, LLAMA_8B) == 10_485_760
    assert 32 * traffic.kv_bytes(2560, LLAMA_8B) == 335_544_320


def test_kv_bytes_sum_over_the_batch_and_stop_at_the_window():
    heads = HeadConfig(4, 2, 64, v_head_dim=32)
    assert traffic.kv_bytes([3, 0, 10], heads, 1) == 13 * 2 * 96
    assert traffic.kv_bytes([3, 0, 10], heads, 1, window=4) == 7 * 2 * 96


def test_partials_of_sixteen_segments():
    assert 16 * traffic.state_bytes(LLAMA_8B) == 8320
    assert traffic.partial_bytes(16, LLAMA_8B) == 266_240
    assert traffic.partial_round_trip_bytes(16, LLAMA_8B) == 532_480
    assert traffic.partial_round_trip_bytes(8, LLAMA_8B) == 266_240
    assert 32 * traffic.partial_round_trip_bytes(16, LLAMA_8B) == 17_039_360


def test_block_table_bytes():
    assert traffic.block_table_bytes(2560, 16) == 640
    assert traffic.block_table_bytes([1, 16, 17, 0], 16) == 4 * (1 + 1 + 2 + 0)
    assert traffic.index_overhead(LLAMA_8B, 1) == pytest.approx(0.0078, abs=5e-5)


def test_query_output_and_lse_bytes():
    heads = HeadConfig(6, 2, 64, v_head_dim=32)
    assert traffic.q_bytes(3, heads) == 3 * 6 * 64 * 2
    assert traffic.out_bytes(3, heads, 4) == 3 * 6 * 32 * 4
    assert traffic.lse_bytes(3, heads) == 3 * 6 * 4


@pytest.mark.parametrize("seq_len", [1, 128, 2560, 131072])
def test_intensity_is_that_of_the_group_at_any_length(seq_len):
    assert traffic.intensity(seq_len, LLAMA_8B) == 4.0
    assert traffic.intensity(seq_len, presets["llama-2-7b"]) == 1.0


def test_partials_lower_the_intensity():
    assert traffic.intensity(128, LLAMA_8B, rows=8) == pytest.approx(
        traffic.flop(128, LLAMA_8B) / (524_288 + 266_240)
    )
    assert traffic.intensity(0, LLAMA_8B) == 0.0


def test_ridge_and_time():
    assert round(traffic.ridge_point()) == 295
    assert round(traffic.ridge_point() / traffic.intensity(2560, LLAMA_8B)) == 74
    assert traffic.seconds_at(3.35e6) == pytest.approx(1e-6)


def test_sixteen_rows_of_which_four_are_live():
    tile = traffic.tile_account(LLAMA_8B, block_m(LLAMA_8B))
    assert (tile.kv_bytes, tile.live_rows, tile.masked_rows, tile.live_flop) == (8192, 4, 12, 32768)
    assert tile.flop_per_byte == traffic.intensity(999, LLAMA_8B)


def _counted(plan, lens, heads, kv_bytes, block_size, window):
    """The ledger by listing every byte that each thread block touches."""
    total = dict.fromkeys(("k", "v", "table", "write", "state", "acc"), 0)
    for b, begin, end in plan.ranges(lens):
        keys = [j for j in range(begin, end) if window is None or j >= int(lens[b]) - window]
        for _kv_head in range(heads.num_kv_heads):
            for _tile in range(0, heads.group_size, 16):
                total["k"] += sum(heads.head_dim * kv_bytes for _ in keys)
                total["v"] += sum(heads.value_dim * kv_bytes for _ in keys)
                total["table"] += 4 * len({j // block_size for j in keys})
        for _head in range(heads.num_q_heads):
            total["write"] += 4 * (heads.value_dim + 2)
            total["state"] += 8
            total["acc"] += 4 * heads.value_dim if keys else 0
    return total


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    num_splits=st.integers(1, 6),
    tile=st.sampled_from([1, 4, 16]),
    group_size=st.sampled_from([1, 4, 17]),
    block_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([None, 1, 7, 40]),
    spare_rows=st.integers(0, 3),
)
def test_ledger_equals_a_count_of_every_byte(
    lens, num_splits, tile, group_size, block_size, window, spare_rows
):
    rows = SplitPlan.from_num_splits(lens, num_splits, tile=tile).num_rows
    plan = SplitPlan.from_num_splits(lens, num_splits, tile=tile, capacity=rows + spare_rows)
    heads = HeadConfig(2 * group_size, 2, 8, v_head_dim=6)
    got = traffic.ledger(plan, lens, heads, 2, block_size, window=window)
    want = _counted(plan, np.asarray(lens), heads, 2, block_size, window)
    assert {
        "k": got.k_bytes,
        "v": got.v_bytes,
        "table": got.table_bytes,
        "write": got.partial_write_bytes,
        "state": got.state_read_bytes,
        "acc": got.acc_read_bytes,
    } == want
    assert got.grid == (rows + spare_rows, 2, -(-group_size // 16))
    assert len(got.rows) == rows + spare_rows
    assert all(row.sequence == -1 and row.partial_bytes == 0 for row in got.rows[rows:])


def test_splitting_adds_partials_and_never_kv():
    one = traffic.ledger(SplitPlan.from_num_splits([2560], 1), [2560], LLAMA_8B, 2, 16)
    many = traffic.ledger(SplitPlan.from_num_splits([2560], 16), [2560], LLAMA_8B, 2, 16)
    assert one.k_bytes + one.v_bytes == many.k_bytes + many.v_bytes == 10_485_760
    assert many.partial_write_bytes == 266_240
    assert many.state_read_bytes + many.acc_read_bytes == 266_240
    assert many.total_bytes - one.total_bytes == 2 * 15 * 32 * 520
    assert many.table_bytes == 8 * 640


def test_output_bytes_may_differ_from_cache_bytes():
    plan = SplitPlan.from_num_splits([5, 6], 1)
    got = traffic.ledger(plan, [5, 6], LLAMA_8B, 1, 16, q_bytes=2)
    assert (got.out_bytes, got.lse_bytes) == (2 * 32 * 128 * 2, 2 * 32 * 4)
    assert got.k_bytes == 11 * 8 * 128


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: traffic.kv_bytes([4, -1], LLAMA_8B), r"seq_lens\[1\] is -1"),
        (lambda: traffic.kv_bytes(4, LLAMA_8B, 0), "element_bytes must be at least 1; got 0"),
        (lambda: traffic.flop(4, LLAMA_8B, window=0), "window must be at least 1; got 0"),
        (lambda: traffic.block_table_bytes(4, 0), "block_size must be at least 1; got 0"),
        (lambda: traffic.seconds_at(1, 0), "bytes_per_s must be positive; got 0"),
        (
            lambda: traffic.ledger(SplitPlan.from_num_splits([4], 1), [4], LLAMA_8B, 2, -16),
            "block_size must be at least 1; got -16",
        ),
    ],
)
def test_bad_numbers_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_published_traffic_figures():
    figures = shared_json("vectors/chapter_figures.json")
    assert figures["partial_bytes"] == {
        "per_token_head_16_segments": 16 * traffic.state_bytes(LLAMA_8B),
        "batch1_32_heads_16_segments_one_way": traffic.partial_bytes(16, LLAMA_8B),
        "round_trip": traffic.partial_round_trip_bytes(16, LLAMA_8B),
        "round_trip_8_active_of_16": traffic.partial_round_trip_bytes(8, LLAMA_8B),
        "per_step_32_layers_round_trip": 32 * traffic.partial_round_trip_bytes(16, LLAMA_8B),
    }
    for row in figures["kv_bytes_per_layer"]:
        size = traffic.kv_bytes(row["seq_len"], LLAMA_8B)
        ratio = traffic.partial_round_trip_bytes(16, LLAMA_8B) / size
        assert (size, round(ratio, 4)) == (row["bytes"], row["full_partial_round_trip_over_kv"])
    assert 32 * traffic.kv_bytes(2560, LLAMA_8B) == figures["kv_bytes_32_layers_seq_2560"]
    tile = traffic.tile_account(LLAMA_8B)
    ridge = round(traffic.ridge_point())
    assert figures["tile"] == {
        "kv_tile_bytes": tile.kv_bytes,
        "live_rows_batch1": tile.live_rows,
        "masked_rows": tile.masked_rows,
        "live_flop": tile.live_flop,
        "flop_per_byte": tile.flop_per_byte,
        "h100_ridge_flop_per_byte": ridge,
        "memory_bound_factor": ridge / tile.flop_per_byte,
    }
    assert figures["paging"] == {
        "block_table_entries_seq_2560_block_16": traffic.block_table_bytes(2560, 16) // 4,
        "block_table_bytes": traffic.block_table_bytes(2560, 16),
        "kv_bytes_per_key_and_kv_head": traffic.kv_bytes(1, LLAMA_8B) // LLAMA_8B.num_kv_heads,
        "index_overhead_percent_page_size_1": round(100 * traffic.index_overhead(LLAMA_8B, 1), 2),
    }


@pytest.mark.parametrize("group_size", [1, 4, 16, 17, 71])
def test_the_ledger_tiles_heads_as_the_kernels_do(group_size):
    heads = HeadConfig(group_size, 1, 64)
    spec = specs.KernelSpec("float32", None, 64, 64, group_size)
    got = traffic.ledger(SplitPlan.from_num_splits([5], 1), [5], heads, 4, 16)
    assert got.grid[2] == spec.head_tiles
    assert got.rows[0].partial_bytes == spec.heads_per_block * traffic.state_bytes(heads)
