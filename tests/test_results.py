"""Committed results say where they come from, and show what the README claims of them."""

from __future__ import annotations

import pytest

from cupy_decode import determinism, results

from .decode_cases import ALL
from .same_bits import ACCURACY

GPU_FILES = [name for name in results.names() if name.endswith("_h200")]


@pytest.mark.parametrize("name", GPU_FILES)
def test_every_file_names_the_gpu_the_versions_and_the_date(name: str) -> None:
    rows = results.load(name)
    first = rows[0]
    assert first["gpu"] == "NVIDIA H200"
    for key in ("cupy", "driver_cuda", "date"):
        assert first[key]


def test_emulator_and_gpu_agree_to_rounding_in_every_case() -> None:
    rows = {row["case"]: row for row in results.load("emulator_h200")}
    assert set(rows) <= {case.name for case in ALL}
    assert len(rows) >= 75
    for row in rows.values():
        assert row["out_difference"] <= row["out_allowed"], row["case"]
        assert row["lse_difference"] <= row["lse_allowed"], row["case"]


def test_the_guided_run_was_right_where_it_was_timed() -> None:
    for report in results.load("walkthrough_h200"):
        assert report["ok"]
        for scene in report["scenes"]:
            assert all(p["max_error"] <= p["allowed_error"] for p in scene["policies"])


@pytest.mark.parametrize("operation", ["append", "append a block", "allocate"])
@pytest.mark.parametrize("state", ["free", "evicting", "evicting at random"])
def test_an_allocation_costs_the_same_in_every_pool(operation: str, state: str) -> None:
    rows = results.load("allocator_scaling")
    by_size = {
        row["num_blocks"]: row
        for row in rows
        if (row["operation"], row["state"]) == (operation, state)
    }
    assert set(by_size) == {10**3, 10**4, 10**5, 10**6}
    for row in by_size.values():
        for figure in ("p50", "p99"):
            ratio = row[f"{figure}_us"] / by_size[10**3][f"{figure}_us"]
            assert ratio == pytest.approx(row[f"{figure}_ratio"], abs=0.002)
            assert ratio <= 1.3, (row["num_blocks"], figure)


def test_unknown_results_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no result is called 'nothing'; there are"):
        results.load("nothing")


@pytest.mark.parametrize("name", [n for n in results.names() if n.startswith("same_bits")])
def test_no_pair_of_calls_differed_and_the_tree_costs_no_accuracy(name: str) -> None:
    first, *accuracy = results.load(name)
    assert first["pairs"] >= 2000
    assert first["differ"] == 0
    assert first["kinds"]["several subtrees of one split"] >= first["pairs"] / 4
    assert len(accuracy) == len(ACCURACY)
    for row in accuracy:
        assert row["tree_rms"] <= 1.001 * row["plain_rms"], row["case"]
        assert row["tree_max"] <= row["plain_max"], row["case"]


def test_the_hardware_reads_what_traffic_counts() -> None:
    rows = results.load("dram_h200")
    assert len(rows) == 4
    for row in rows:
        assert row["kv_bytes"] >= 1e8
        assert 0.97 <= row["dram_bytes"] / row["bytes_to_read"] <= 1.03, row["label"]


def test_what_promises_the_same_bits_moved_none() -> None:
    rows = results.load("determinism_h200")
    for path in determinism.PATHS:
        (row,) = [row for row in rows if row["path"] == path.name]
        if path.promises:
            assert not any(row["changes"].values()), path.name
