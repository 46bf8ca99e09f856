"""Shapes, records and, on a GPU, the measurements: never how fast, only whether they are right."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import kernels_cu
from cupy_decode import backends, bench, decode_attention, fast, standalone, trace_launch
from cupy_decode.bench import allocator_scaling, dram, peers, reduce
from cupy_decode.bench.compare import float_maxima
from cupy_decode.heads import HeadConfig
from cupy_decode.results import tables
from cupy_decode.trace_replay import Request

from . import shared_data


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


def _row(shape: bench.Shape, kernel: str, us: float, floor_us: float, **more: object) -> dict:
    return dict(
        model=shape.model,
        label=shape.label,
        band=shape.band,
        kv_bytes=shape.kv_bytes,
        keys=sum(shape.seq_lens),
        longest=max(shape.seq_lens),
        kernel=kernel,
        us=us,
        gb_per_s=shape.kv_bytes / us / 1e3,
        times_floor=us / floor_us,
        times_loose_floor=us / floor_us / 2,
        read_fraction=0.5,
        **more,
    )


def _rows() -> list[dict]:
    shapes = [s for s in bench.SHAPES if s.band == "< 2.2 MB"][:2]
    rows: list[dict] = [dict(kernel="environment")]
    about = dict(entry="kernel<128>", registers=231, spilled_bytes=12, blocks_per_sm=2)
    for s, floor_us, us in zip(shapes, (2.0, 4.0), (4.0, 32.0), strict=True):
        rows.append(_row(s, "floor", floor_us, floor_us))
        rows.append(_row(s, "fast", us, floor_us, **about))
    rows.append({**{k: rows[3][k] for k in ("model", "label", "kv_bytes")}, "kernel": "fa3"})
    rows[-1]["failed"] = "ImportError: of something"
    return rows


def test_table_sums_up_bands_by_geometric_mean():
    lines = bench.table(_rows()).splitlines()
    fast = [line for line in lines if line.split()[:1] == ["fast"]]
    assert fast[0].split() == ["fast", "4.0", "524", "2.000", "1.000", "50.0", "%"]
    over_floor, over_loose = (lines.index(i) for i in lines if i.startswith("time over the"))
    for start, mean, worst in ((over_floor, "4.000", "8.00"), (over_loose, "2.000", "4.00")):
        assert lines[start].split()[-1] == "fast"
        assert lines[start + 1].split() == ["<", "2.2", "MB", mean, "max", worst]
        assert lines[start + 2].split() == ["all", mean, "max", worst]


def test_table_sums_up_other_sets_by_their_name():
    rows = [
        _row(s, "fast", us, 1.0) for s, us in zip(bench.FLASH_DECODING[:2], (2.0, 8.0), strict=True)
    ]
    lines = bench.table(rows).splitlines()
    assert not [line for line in lines if line.startswith(("all", "35-100 MB"))]
    assert [x.split()[1:] for x in lines if x.startswith("flash-decoding ")][-1][-3:] == [
        "2.000", "max", "4.00"
    ]  # fmt: skip


def test_table_says_what_failed_and_what_a_specialisation_takes():
    lines = bench.table(_rows()).splitlines()
    assert [x for x in lines if "fa3" in x] == [
        " " * 39 + "fa3           ImportError: of something"
    ]
    assert lines[-1].split() == ["fast:", "kernel<128>", "231", "12", "2"]


def test_flash_decoding_holds_the_number_of_keys():
    assert len(bench.FLASH_DECODING) == 9
    assert {sum(s.seq_lens) for s in bench.FLASH_DECODING} == {65536}
    assert [len(s.seq_lens) for s in bench.FLASH_DECODING] == [256 >> i for i in range(9)]
    assert {(s.dtype, s.heads) for s in bench.FLASH_DECODING} == {
        ("float16", HeadConfig(16, 2, 128))
    }


def test_8_bit_caches_are_half_of_the_largest_shapes():
    large = [s for s in bench.SHAPES if s.kv_bytes >= 1e9]
    assert [s.label for s in bench.FP8] == [f"{s.model} {s.label}" for s in large]
    assert [2 * s.kv_bytes for s in bench.FP8] == [s.kv_bytes for s in large]
    assert bench.shape_set("fp8") == bench.FP8


def test_the_table_of_8_bit_caches_divides_by_bf16(monkeypatch):
    large = next(s for s in bench.SHAPES if s.kv_bytes >= 1e9)
    rows = [dict(kernel="environment")]
    for shape, us in ((large, 500.0), (bench.FP8[0], 260.0)):
        rows += [_row(shape, "floor", 0.9 * us, 0.9 * us), _row(shape, "fast", us, 0.9 * us)]
    monkeypatch.setattr(tables.results, "load", {"fast_h200": rows}.get)
    assert tables.fp8().splitlines()[2] == (
        f"| {bench.FP8[0].label} | {bench.FP8[0].kv_bytes / 1e9:.2f} "
        "| 234 | 260 | 1.111 | 500 | 0.520 |"
    )


def test_a_request_is_live_from_its_arrival_to_its_last_token():
    requests = [
        Request(0.0, 100, 2000),  # until just before 60 s
        Request(0.0, 100, 2001),  # one token more
        Request(57.0, 7, 200),
        Request(60.0, 5, 1),
        Request(60.001, 5, 1),
    ]
    assert bench.live_lengths(requests, 60.0) == (2100, 107, 5)


def test_shape_sets(tmp_path):
    assert bench.shape_set("peers") == bench.SHAPES
    assert bench.shape_set("flash-decoding") == bench.FLASH_DECODING
    with pytest.raises(ValueError, match="no shape set 'peer'; the sets are peers, flash-dec"):
        bench.shape_set("peer")
    with pytest.raises(ValueError, match="mooncake is cut from a trace; give --trace FILE"):
        bench.shape_set("mooncake")
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 400, "hash_ids": [1, 2]}\n'
    trace.write_text(line % 0 + line % 359_000 + line % 3_240_000)
    shapes = bench.shape_set("mooncake", trace)
    assert [(s.label, s.seq_lens) for s in shapes] == [("6 min", (633,)), ("54 min", (600,))]


def test_the_recorded_trace_gives_the_sizes_it_is_known_for():
    trace = shared_data.shared_path("traces/mooncake_conversation.jsonl")
    shapes = bench.shape_set("mooncake", trace)
    assert [s.label for s in shapes] == [f"{t} min" for t in range(6, 60, 6)]
    gigabytes = [s.kv_bytes / 1e9 for s in shapes]
    assert 1.35 <= min(gigabytes) < max(gigabytes) <= 2.5


def test_a_peer_that_is_not_installed_is_left_out_with_a_reason(monkeypatch):
    with pytest.raises(ValueError, match="no peer 'cudn'; the peers are cudnn, flashinfer, fa3"):
        peers.unavailable("cudn")
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert "cudnn is left out: nvidia-cudnn-frontend cannot be imp" in peers.unavailable("cudnn")
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    assert peers.unavailable("cudnn") is None


@pytest.mark.parametrize("state", ["free", "evicting", "evicting at random"])
def test_every_timed_allocation_takes_the_blocks_that_its_state_names(state):
    service = allocator_scaling._Service(2000, state)
    pool = service.pool
    for _ in range(20):
        evictions, sequences = pool.num_evictions, len(pool.seq_ids)
        times = service.serve()
        assert pool.num_evictions - evictions == (0 if state == "free" else 32)
        assert len(pool.seq_ids) == sequences
        assert set(times) == {"allocate", "free"} | ({"publish"} if state != "free" else set())
        appends = service.decode()
        assert {what: len(times) for what, times in appends.items()} == {
            "append": 480,
            "append a block": 31,
        }
        service.refill()
        assert bool(pool.num_free_blocks) == (state == "free")
        assert pool.num_used_blocks >= 0.85 * pool.num_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_8_bit_caches_are_checked_and_timed(kv_dtype):
    shape = bench.Shape("tiny", HeadConfig(8, 2, 128), "2,ragged", (700, 33), kv_dtype=kv_dtype)
    rows = list(bench.compare({"fast": bench.FastPath()}, [shape], replays=3, progress=False))
    assert rows[-1]["kernel"] == "fast"
    assert 0 < rows[-1]["error"] < 5e-3


@pytest.mark.gpu
def test_compare_checks_before_it_times():
    shape = bench.Shape("tiny", HeadConfig(8, 2, 128), "3,ragged", (700, 16, 33))

    def wrong(p):
        import cupy

        return [lambda out=launch: cupy.zeros_like(out()) for launch in bench.FastPath()(p)]

    rows = list(
        bench.compare(
            {"fast": bench.FastPath()}, [shape], peers={"wrong": wrong}, replays=3, progress=False
        )
    )
    kernels = [r["kernel"] for r in rows]
    assert kernels == ["environment", "floor", "loose floor", "fast", "wrong"]
    assert 0 < rows[3]["error"] < 5e-3
    assert 0 < rows[3]["registers"] <= 255
    assert rows[3]["blocks_per_sm"] >= 1
    assert rows[4]["failed"].startswith("RuntimeError: wrong is wrong on tiny 3,ragged: relative")
    with pytest.raises(RuntimeError, match="wrong is wrong on tiny 3,ragged"):
        list(bench.compare({"wrong": wrong}, [shape], replays=3, progress=False))


@pytest.mark.gpu
def test_another_text_of_the_kernel_is_what_runs():
    import cupy

    p = bench.problem(HeadConfig(32, 8, 128), [100, 100], copies=1)
    text = standalone.source("paged_split_k_mma")
    same, own = bench.FastPath(text), bench.FastPath()
    assert same.resources(p) == own.resources(p)
    cupy.testing.assert_array_equal(same(p)[0](), own(p)[0]())
    with pytest.raises(cupy.cuda.compiler.CompileException, match="planted"):
        bench.FastPath("#error planted\n" + text)(p)[0]()


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


@pytest.mark.gpu
def test_gpu_smaller_blocks_hold_the_same_keys() -> None:
    import cupy

    from cupy_decode import decode_attention
    from cupy_decode.bench.fast_options import in_smaller_blocks

    p = bench.problem(HeadConfig(8, 2, 64), np.array([300, 17], np.int32), copies=1)
    whole = decode_attention(**p.arguments(), kernel="fast")
    for block_size in (1, 8):
        smaller = decode_attention(**in_smaller_blocks(p, block_size), kernel="fast")
        for a, b in zip(whole, smaller, strict=True):
            assert cupy.array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.gpu
def test_gpu_options_are_timed_beside_the_plain_step() -> None:
    from cupy_decode.bench.fast_options import fast_options

    rows = fast_options(batch=2, seq_len=5000, replays=2)
    assert rows[0]["option"] == "none"
    assert len(rows) == 6
    assert all(row["median_us"] > 0 for row in rows)


def test_the_text_that_adds_nothing_up_stops_in_one_place():
    source = kernels_cu.source("paged_split_k_mma")
    text = reduce.unmerged(source)
    assert len(text.splitlines()) == len(source.splitlines()) + 1
    with pytest.raises(ValueError, match="must have one"):
        reduce.unmerged(text)


@pytest.mark.emulator
@pytest.mark.parametrize("seq_len", [20, 1000])
def test_what_is_not_added_up_is_missing_where_there_are_several_units(seq_len):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 64, 16, 2, 64)).astype(np.float16)
    q = rng.standard_normal((1, 8, 64)).astype(np.float16)
    table, lens = rng.permutation(64)[None].astype(np.int32), np.array([seq_len], np.int32)
    own = (Path(kernels_cu.__file__).parent / "paged_split_k_mma.cu").read_text(encoding="utf-8")
    outs = [
        trace_launch(
            decode_attention, q, k, v, table, lens, kernel="fast", files={"paged_split_k_mma.cu": x}
        ).result[0]
        for x in (own, reduce.unmerged(own))
    ]
    assert bool((outs[0] == outs[1]).all()) == (seq_len == 20)


@pytest.mark.gpu
def test_units_that_are_not_added_up_are_parts_of_the_result():
    text = reduce.unmerged(kernels_cu.source("paged_split_k_mma"))
    machine = fast.Machine.of(backends.runner("cuda"))
    for lens, same in (([40], True), ([16384], False)):
        p = bench.problem(HeadConfig(8, 2, 128), lens, copies=1)
        assert (max(reduce.splits(p, machine)) == 1) == same
        own, parts = bench.FastPath(), bench.FastPath(text)
        whole, part = (path(p)[0]().view(np.uint16) for path in (own, parts))
        assert bool((whole == part).all()) == same
        assert reduce.separate_us(p, reduce.splits(p, machine)) > 0


def test_bytes_are_counted_on_four_steps_of_100_mb():
    assert [s.kv_bytes >= 1e8 for s in dram.shapes()] == [True] * 4
    ragged = next(s for s in dram.shapes() if s.label == "64,ragged")
    pages = sum(-(-s // 16) for s in bench.RAGGED)
    assert dram.bytes_to_read(ragged) == ragged.kv_bytes + 64 * 32 * 128 * 2 + 4 * pages


def test_a_report_of_ncu_is_read():
    report = """\
==PROF== Connected to process 814
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void k<a, 1>(T1 *, int)","dram__bytes_read.sum","byte","134,303,232"
"0","void k<a, 1>(T1 *, int)","dram__bytes_write.sum","byte","7"
"1","void k<a, 2>(T1 *, int)","dram__bytes_read.sum","byte","17"
"""
    assert dram.bytes_read(report) == [134303232, 17]
    assert dram.bytes_read("==ERROR== no permission") == []


@pytest.mark.parametrize("status", [0, 1])
def test_launches_that_were_not_counted_are_an_error(monkeypatch, status):
    script = f"print('==ERROR== no permission'); raise SystemExit({status})"
    monkeypatch.setattr(dram, "_NCU", (sys.executable, "-c", script))
    with pytest.raises(RuntimeError, match="ncu counted 0 of 4 launches: ==ERROR== no permission"):
        dram.dram()


def test_other_versions_run_beside_whatever_is_compared(tmp_path):
    from cupy_decode.bench.command import _contestants

    text = tmp_path / "other.cu"
    text.write_text("")
    for kernels, names in (([], ["fast", "overlap"]), ([text], ["other", "overlap"])):
        found = _contestants(kernels, False, True)
        assert list(found) == names
        assert [dict(c.cut) for c in found.values()] == [{}, {"overlap": True}]
        assert list(_contestants(kernels, False, False)) == names[:1]
        assert list(_contestants(kernels, True, True)) == [names[0], "float maxima", "overlap"]


def test_the_text_with_float_maxima_has_them_once():
    source = kernels_cu.source("paged_split_k_mma")
    text = float_maxima(source)
    assert "fmaxf(m[n][h], top)" in text
    assert "ceilf" not in text
    with pytest.raises(ValueError, match="must have one"):
        float_maxima(text)
