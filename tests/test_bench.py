"""Shapes, records and, on a GPU, the measurements: never how fast, only whether they are right."""

import numpy as np
import pytest

from cupy_decode import bench
from cupy_decode.heads import HeadConfig


def test_the_48_shapes_span_the_bands():
    assert len(bench.SHAPES) == 48
    assert len({(s.model, s.label) for s in bench.SHAPES}) == 48
    assert {s.band for s in bench.SHAPES} == {name for name, _ in bench.BANDS}
    largest = max(bench.SHAPES, key=lambda s: s.kv_bytes)
    assert (largest.model, largest.label) == ("llama-2-7b", "256,4096")
    assert largest.kv_bytes == 2 * 32 * 128 * 256 * 4096 * 2


def test_ragged_lengths_are_log_uniform_from_128_to_32768():
    lens = np.array(bench.RAGGED)
    assert lens.size == 64
    assert lens.min() >= 128
    assert lens.max() < 32768
    drawn = np.random.default_rng(0).uniform(np.log(128), np.log(32768), 64)
    np.testing.assert_array_equal(lens, np.exp(drawn).astype(np.int32))


def test_jsonl_round_trip(tmp_path):
    rows = [{"shape": "1,512", "us": 4.5}, {"shape": "8,2560", "us": 20.25}]
    bench.write_jsonl(tmp_path / "rows.jsonl", rows)
    assert bench.read_jsonl(tmp_path / "rows.jsonl") == rows


def test_table_sums_up_bands_by_geometric_mean():
    shapes = [s for s in bench.SHAPES if s.band == "< 2.2 MB"][:2]
    rows: list[dict] = [dict(kernel="environment")]
    for s, floor_us, us in zip(shapes, (2.0, 4.0), (4.0, 32.0), strict=True):
        common = dict(model=s.model, label=s.label, band=s.band, kv_bytes=s.kv_bytes)
        rows.append(dict(kernel="floor", us=floor_us, times_floor=1.0, **common))
        rows.append(dict(kernel="fast", us=us, times_floor=us / floor_us, **common))
    lines = bench.table(rows).splitlines()
    assert len(lines) == 1 + 2 + len(bench.BANDS) + 1
    assert lines[1].split()[-2:] == ["4.0", "x2.00"]
    assert lines[3].split()[-3:] == ["4.000", "max", "8.00"]
    assert lines[4].split()[-1] == "-"
    assert lines[-1].split()[-3:] == ["4.000", "max", "8.00"]


@pytest.mark.gpu
def test_compare_checks_before_it_times():
    shape = bench.Shape("tiny", HeadConfig(8, 2, 128), "3,ragged", (700, 16, 33))
    rows = bench.compare({"fast": bench.fast_path()}, [shape], replays=3, progress=False)
    assert [r["kernel"] for r in rows] == ["environment", "floor", "fast"]
    assert 0 < rows[2]["error"] < 5e-3

    def wrong(p):
        import cupy

        return [lambda out=launch: cupy.zeros_like(out()) for launch in bench.fast_path()(p)]

    with pytest.raises(RuntimeError, match="wrong is wrong on tiny 3,ragged"):
        bench.compare({"wrong": wrong}, [shape], replays=3, progress=False)


@pytest.mark.gpu
def test_problem_has_permuted_pages_and_spare_ones():
    heads = HeadConfig(8, 2, 64)
    p = bench.problem(heads, [40, 16, 1], copies=2)
    pages = p.pages.get()
    assert len(set(pages.tolist())) == 5
    assert not (np.diff(pages) == 1).all()
    assert p.k_caches[0].shape == (7, 16, 2, 64)
    assert (p.k_caches[0].view(np.uint16) != p.k_caches[1].view(np.uint16)).mean() > 0.9
    table = p.block_table.get()
    np.testing.assert_array_equal(table[0, :3], pages[:3])
    assert table[2, 1] == 2**31 - 1


@pytest.mark.gpu
def test_time_graph_runs_every_launch_in_every_replay():
    import cupy

    counter = cupy.zeros(1, np.int64)
    timing = bench.time_graph([lambda: cupy.add(counter, 1, out=counter)] * 3, replays=4)
    assert int(counter[0]) == 2 + 3 * (1 + 4)
    assert 0 < timing.min_us <= timing.median_us


@pytest.mark.gpu
def test_floor_is_slower_than_the_stream_and_both_are_plausible():
    p = bench.problem(HeadConfig(32, 8, 128), [4096] * 64)
    timing, (blocks, threads) = bench.floor(p, replays=5)
    moved = 2 * p.pages.size * 16 * 8 * 128 * 2
    assert moved / timing.median_us * 1e6 < 1.05 * bench.read_bandwidth()
    assert blocks >= 1
    assert threads % 32 == 0
