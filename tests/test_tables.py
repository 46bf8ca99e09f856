"""Tables of results, on rows made up for them: which figures go where, and what is left out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cupy_decode import bench
from cupy_decode.results import tables

ENVIRONMENT = dict(gpu="H", driver_cuda="13.0", cupy="14", date="2026-11-29")
WHERE = "H, CUDA 13.0, CuPy 14, 2026-11-29"


def use(monkeypatch: pytest.MonkeyPatch, **files: list[dict[str, Any]]) -> None:
    """Make these files all results there are."""
    monkeypatch.setattr(tables.results, "load", files.__getitem__)
    monkeypatch.setattr(tables.results, "names", lambda: sorted(files))


def lines(text: str) -> list[list[str]]:
    """Cells of the rows below a table's header, then the note as one cell."""
    table, _, note = text.partition("\n\n")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert len({line.count("|") for line in table.splitlines()}) == 1
    return [*rows[2:], [note]]


def bench_rows(kernels: dict[str, list[float]], **more: Any) -> list[dict[str, Any]]:
    """Rows of ``bench`` on the first of the 48 shapes, smallest first; the floor takes 1."""
    shapes = sorted(bench.SHAPES, key=lambda s: s.kv_bytes)
    rows: list[dict[str, Any]] = [dict(kernel="environment", replays=30, **ENVIRONMENT, **more)]
    for kernel, times in kernels.items():
        for shape, us in zip(shapes, times, strict=False):
            row = dict(model=shape.model, label=shape.label, band=shape.band, kernel=kernel)
            rows.append(row | dict(us=us, times_floor=us, times_loose_floor=us / 2))
    return rows


def test_what_the_same_bits_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four shapes below 2.2 MB, the fifth above."""
    kernels = {
        "fast": [10.0, 10.0, 10.0, 11.0, 30.0],
        "float maxima": [10.0, 8.0, 10.0, 10.0, 30.0],
        "cudnn": [20.0, 20.0, 20.0, 10.0, 40.0],
        "fa3": [20.0, 20.0, 20.0, 40.0, 24.0],
    }
    use(monkeypatch, fast_h200=bench_rows(kernels))
    small, larger, both, note = lines(tables.split_invariance())
    assert small == ["< 2.2 MB", "+5.0 %", "+25.0 %", "-50.0 %", "+10.0 %", "+5.0 %", "+25.0 %"]
    assert larger == ["2-35 MB", "+0.0 %", "+0.0 %", "+25.0 %", "+25.0 %", "+25.0 %", "+25.0 %"]
    assert both == ["all", "+0.0 %", "+25.0 %", "-50.0 %", "+25.0 %", "+10.0 %", "+25.0 %"]
    assert note == [
        f"(All 5 shapes, {WHERE}. Worst: llama-3-70b-tp8 1,2560, 10.0 µs where float maxima takes "
        "8.0.)"
    ]
    kernels["float maxima"][1] = 10.0
    use(monkeypatch, fast_h200=bench_rows(kernels))
    worst = "Worst: llama-3-70b-tp8 1,8192, 30.0 µs where FlashAttention-3 takes 24.0.)"
    assert tables.split_invariance().endswith(worst)


def test_overlap_is_read_from_its_own_file_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = bench_rows({"fast": [2.0, 8.0], "overlap": [1.0, 4.0]})
    other = bench_rows({"fast": [2.0, 8.0], "overlap": [2.0, 2.0]})
    use(monkeypatch, fast_h200=rows)
    assert lines(tables.overlap())[-2] == ["all", "2", "4.000", "2.000", "4.00", "0.500"]
    use(monkeypatch, fast_h200=rows, overlap_h200=other)
    assert lines(tables.overlap())[-2] == ["all", "2", "4.000", "2.000", "2.00", "0.500"]


def test_splits_that_nobody_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    common = dict(experiment="bits", model="m", seq_len=8192, **ENVIRONMENT)
    readable = dict(kernel="readable", tree_us=50.85, free_us=35.24, one_split_us=551.78)
    readable |= dict(one_split_won=10.85, fixed_256_us=35.24, fixed_256_won=0.69)
    fast = dict(kernel="fast", tree_us=15.36, fixed_2048_us=27.14, fixed_2048_won=1.77)
    use(monkeypatch, experiments_h200=[common | readable, common | fast])
    assert lines(tables.bits()) == [
        ["8,192", "readable", "50.9", "35.2", "551.8", "10.85", "35.2", "0.69", "-", "-"],
        ["8,192", "fast", "15.4", "-", "-", "-", "-", "-", "27.1", "1.77"],
        [f"(m, bf16; {WHERE}.)"],
    ]


def test_what_moves_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    common = dict(model="m", seq_len=8192, **ENVIRONMENT)
    rows = [
        dict(path="a", changes={"run": False, "S": True}, worst_ulp={"run": 0, "S": 1234}, us=30.0),
        dict(path="b", changes={"run": False, "S": None}, worst_ulp={"run": 0}, us=20.0),
        dict(path="c", changes={"run": None, "S": None}, worst_ulp={}, us=None),
    ]
    use(monkeypatch, determinism_h200=[common | row for row in rows])
    assert lines(tables.determinism()) == [
        ["a", "same", "moves", "1,234", "1.50"],
        ["b", "same", "-", "0", "1.00"],
        ["c", "-", "-", "0", "-"],
        [f"(m, 8,192 keys; the fastest takes 20.0 µs; {WHERE}.)"],
    ]


def test_bytes_and_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    common = dict(model="m", label="1,2", **ENVIRONMENT)
    counted = dict(kv_bytes=10**8, bytes_to_read=100_000_500, dram_bytes=101_000_505, ratio=1.01)
    merged = dict(splits=16, step_us=38.614, unmerged_us=37.011, fused_us=1.603, separate_us=3.2)
    use(monkeypatch, dram_h200=[common | counted], reduce_h200=[common | merged])
    assert lines(tables.dram())[0] == [
        "m 1,2", "100,000,000", "100,000,500", "101,000,505", "1.0100"
    ]  # fmt: skip
    assert lines(tables.reduce())[0] == ["m 1,2", "16", "38.61", "37.01", "1.60", "3.20"]


def test_pairs_and_errors_of_the_gpu_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    (emulator,) = tables._same_bits("pairs")["CPU emulator"]
    error = dict(kind="accuracy", case="x", tree_max=0.5, plain_max=1.0, tree_rms=0.1, plain_rms=1)
    files = {"same_bits_emulator": [emulator, error]}
    use(monkeypatch, **files)
    assert tables.pairs().startswith("|  | CPU emulator |")
    other = emulator | dict(pairs=9000, kinds=emulator["kinds"] | {"fast": 8000})
    use(monkeypatch, same_bits_h200=[other, error | dict(tree_max=0.25)], **files)
    assert tables.pairs().startswith("|  | NVIDIA H200 | CPU emulator |")
    rows = {row[0]: row[1:] for row in lines(tables.pairs())}
    assert rows["pairs"] == ["9,000", "2,000"]
    assert rows["that differ in any bit"] == ["0", "0"]
    assert rows["of the fast kernel"] == ["8,000", "484"]
    assert rows["changed: order of the pages"] == ["1,998", "1,998"]
    assert lines(tables.accuracy()) == [
        ["x", "2.500e-01", "1.000e+00", "1.000e-01", "1.000e+00"],
        ["(NVIDIA H200.)"],
    ]


def test_every_table_is_named_like_its_function() -> None:
    for name, table in tables.TABLES.items():
        assert re.sub("-", "_", name) == table.__name__
