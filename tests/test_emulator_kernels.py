"""Every kernel of kernels_cu on the CPU: both schedules, exact load counts.

``test_operators`` holds the forward schedule to the float64 reference. Here the reverse one must
give the same bits: a correct kernel does not depend on the order of its threads.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_decode as cd
import kernels_cu
from cupy_decode import specs, traffic
from cupy_decode.backends import emulator
from cupy_decode.backends.emulator import trace_launch
from cupy_decode.specs import Arg, Launch

from .decode_cases import ALL, Case, build
from .test_operators import expect

pytestmark = pytest.mark.emulator
SCHEDULES: tuple[Any, ...] = ("forward", "reverse")


def bits(array: np.ndarray) -> np.ndarray:
    """A view to compare: equal NaN payloads are equal, 0.0 and -0.0 are not."""
    return np.ascontiguousarray(array).view(np.uint8)


# ---------------------------------------------------------------------- both schedules


@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_reverse_schedule_gives_the_same_bits(case: Case) -> None:
    problem, plan = build(case), case.plan()
    forward, reverse = (
        trace_launch(
            cd.decode_attention, *problem.arrays, plan, schedule=schedule, **problem.options
        ).result
        for schedule in SCHEDULES
    )
    for one, other in zip(forward, reverse, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
    expect(problem, *reverse)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merge_states(dtype: str, schedule: Any) -> None:
    rng = np.random.default_rng(4)
    np_dtype = np.dtype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)
    out_a, out_b = (rng.standard_normal((5, 3, 136)).astype(np_dtype) for _ in range(2))
    lse_a, lse_b = (rng.uniform(-4, 4, (5, 3)).astype(np.float32) for _ in range(2))
    lse_a[1], lse_b[2], lse_a[3], lse_b[3] = -np.inf, np.inf, -np.inf, -np.inf
    out_a[1], out_b[2] = np.nan, np.nan
    sinks = np.array([-np.inf, 0.5, 4], np.float32)
    operands = (out_a, lse_a, out_b, lse_b)
    for given in (None, sinks):
        (out, lse), launches = trace_launch(
            cd.merge_states, *operands, sinks=given, schedule=schedule
        )
        want_out, want_lse = cd.reference.merge_states(*operands, sinks=given)
        rtol = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        np.testing.assert_allclose(out.astype(np.float64), want_out, rtol=rtol, atol=rtol / 4)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
        np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)
        # a side without keys is not looked at
        read = launches[0]["out_a"]["loads"].reshape(3, 5).sum(0)
        np.testing.assert_array_equal(read, [3 * 136, 0, 3 * 136, 0, 3 * 136])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_write_kv(dtype: Any, schedule: Any) -> None:
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((4, 2, d)).astype(dtype) for d in (72, 24))
    caches = [np.full((3, 4, 2, d), np.nan, dtype) for d in (72, 24)]
    want = [c.copy() for c in caches]
    slots = np.array([11, -1, 0, 6], np.int64)
    cd.reference.write_kv(k, v, want[0], want[1], slots)
    _, (trace,) = trace_launch(cd.write_kv, k, v, *caches, slots, schedule=schedule)
    for cache, expected in zip(caches, want, strict=True):
        np.testing.assert_array_equal(bits(cache), bits(expected))
    row = 2 * 72 * np.dtype(dtype).itemsize
    np.testing.assert_array_equal(trace["k_cache"]["store_bytes"], [row, 0, row, row])


LENGTHS = {
    "ragged": (0, 1, 15, 16, 17, 500),
    "one": (64,),
    "more than a block of threads": tuple(np.random.default_rng(6).integers(0, 90, 300).tolist()),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_plan_splits_equals_the_host(lengths: tuple[int, ...], schedule: Any) -> None:
    lens = np.array(lengths, np.int32)
    plans: list[tuple[Any, int, cd.SplitPlan]] = [
        ("count", 1, cd.SplitPlan.from_num_splits(lens, 1)),
        ("count", 7, cd.SplitPlan.from_num_splits(lens, 7)),
        ("size", 16, cd.SplitPlan.from_split_size(lens, 16)),
        ("size", 33, cd.SplitPlan.from_split_size(lens, 33)),
    ]
    for rule, value, want in plans:
        for spare in (0, 5):
            got = cd.SplitPlan(
                emulator.empty((len(lens) + 1,), np.int32),
                emulator.empty((want.num_rows + spare,), np.int32),
            )
            launch = specs.plan_splits(got, lens, rule=rule, value=value, max_seq_len=500)
            emulator.run(launch, schedule=schedule)
            np.testing.assert_array_equal(got.split_offsets, want.split_offsets)
            np.testing.assert_array_equal(got.split_begin[: want.num_rows], want.split_begin)
            np.testing.assert_array_equal(got.split_begin[want.num_rows :], -1)


def test_plan_splits_follows_strides() -> None:
    """Lengths in every third place, and backwards, as a view has them."""
    lens = np.array([70, 0, 33, 5], np.int32)
    want = cd.SplitPlan.from_num_splits(lens, 3)
    wide = np.full(12, 10**6, np.int32)
    wide[1::3] = lens
    for view in (wide[1::3], lens[::-1].copy()[::-1]):
        got = cd.SplitPlan(
            emulator.empty((5,), np.int32), emulator.empty((want.num_rows,), np.int32)
        )
        emulator.run(specs.plan_splits(got, view, rule="count", value=3, max_seq_len=500))
        np.testing.assert_array_equal(got.split_offsets, want.split_offsets)
        np.testing.assert_array_equal(got.split_begin, want.split_begin)


def test_plan_splits_cuts_what_it_cannot_hold() -> None:
    """Lengths outside 0 .. max_seq_len are planned as if cut; rows stop at the capacity."""
    lens = np.array([-5, 10**9, 40], np.int32)
    got = cd.SplitPlan(emulator.empty((4,), np.int32), emulator.empty((6,), np.int32))
    emulator.run(specs.plan_splits(got, lens, rule="size", value=16, max_seq_len=64))
    np.testing.assert_array_equal(got.split_offsets, [0, 1, 5, 6])
    np.testing.assert_array_equal(got.split_begin, [0, 0, 16, 32, 48, 0])


# ---------------------------------------------------------------------- the reading kernels

#: What a thread of the reading kernels must have folded its loads into before it writes.
FOLD = 0x9E3779B9


def read_launch(
    name: str, entry: str, grid: int, threads: int, **values: Any
) -> tuple[Launch, np.ndarray]:
    sink = np.zeros(1, np.uint32)
    values["sink"] = sink
    args = tuple(Arg(p.name, p.kind, values[p.name]) for p in kernels_cu.signature(name))
    return Launch(name, entry, (grid, 1, 1), (threads, 1, 1), 0, args, False), sink


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_read_stream_reads_every_byte(schedule: Any) -> None:
    for vectors in (0, 1, 63, 64, 1000):
        data = np.zeros((max(vectors, 1), 4), np.uint32)[:vectors]
        launch, sink = read_launch(
            "read_stream", "read_stream<4>", 1, 32, data=data, num_vectors=vectors
        )
        trace = emulator.run(launch, schedule=schedule, trace=True)
        assert trace is not None
        assert trace["data"]["distinct_load_bytes"].sum() == 16 * vectors
        assert sink[0] == 0
        if vectors > 64:  # past the end the last vector is read again
            data[vectors // 2] = (FOLD, 0, 0, 0)
            emulator.run(launch, schedule=schedule)
            assert sink[0] == FOLD


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("hnd", [False, True])
def test_read_pages_reads_every_page_once(hnd: bool, schedule: Any) -> None:
    vectors, block_size, heads = 8, 32, 3
    shape = (7, heads, block_size) if hnd else (7, block_size, heads)
    caches = [np.zeros((*shape, vectors, 4), np.uint32) for _ in range(2)]
    strides = [s // 16 for s in caches[0].strides[:3]]
    if hnd:
        strides[1:] = strides[:0:-1]
    pages = np.array([5, 0, 3], np.int32)
    launch, sink = read_launch(
        "read_pages",
        f"read_pages<{vectors}, 1>",
        2,
        64,
        k_cache=caches[0],
        v_cache=caches[1],
        pages=pages,
        num_pages=3,
        num_kv_heads=heads,
        block_size=block_size,
        stride_block=strides[0],
        stride_slot=strides[1],
        stride_head=strides[2],
    )
    trace = emulator.run(launch, schedule=schedule, trace=True)
    assert trace is not None
    for name in ("k_cache", "v_cache"):
        assert trace[name]["load_bytes"].sum() == caches[0][pages].nbytes
        assert trace[name]["distinct_load_bytes"].sum() == caches[0][pages].nbytes
    for cache in caches:
        cache[3, 1, 1, 5] = (0, FOLD, 0, 0)
        emulator.run(launch, schedule=schedule)
        assert sink[0] == FOLD
        cache[...], sink[...] = 0, 0


# ---------------------------------------------------------------------- what is loaded

LEDGER_CASES = [
    Case("one split", (40, 7), num_splits=1, sinks=True),
    Case("ragged", (0, 1, 16, 17, 257), num_splits=5),
    Case("empty splits", (70, 5), bounds=((0, 1, 33, 33, 69), (0, 5))),
    Case("window", (5, 100, 300), window=40, num_splits=4),
    Case("two head tiles", (40,), cd.HeadConfig(40, 2, 64), num_splits=3),
    Case("narrow values", (35,), cd.HeadConfig(6, 2, 64, 32), dtype="float16", num_splits=2),
    Case("odd pages", (1, 24, 25, 72), block_size=24, num_splits=3, dtype="bfloat16"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", LEDGER_CASES, ids=str)
def test_load_counts_equal_the_ledger(case: Case, schedule: Any) -> None:
    problem = build(case)
    plan = case.plan().to(np, capacity=case.plan().num_rows + 2)
    _, (stage_1, stage_2) = trace_launch(
        cd.decode_attention, *problem.arrays, plan, schedule=schedule, **problem.options
    )
    size = problem.k_cache.itemsize
    ledger = traffic.ledger(
        plan, case.seq_lens, case.heads, size, case.block_size, window=case.window
    )
    assert stage_1.grid == ledger.grid

    def total(trace: emulator.LaunchTrace, field: str, *names: str) -> int:
        return int(sum(trace[name][field].sum() for name in names))

    # K and V: each visible key once, and no byte of them twice
    for name, expected in (("k_cache", ledger.k_bytes), ("v_cache", ledger.v_bytes)):
        assert total(stage_1, "load_bytes", name) == expected
        assert total(stage_1, "distinct_load_bytes", name) == expected
    assert total(stage_1, "distinct_load_bytes", "block_table") == ledger.table_bytes
    states = ("acc_out", "m_out", "l_out")
    assert total(stage_1, "store_bytes", *states) == ledger.partial_write_bytes
    assert total(stage_1, "distinct_store_bytes", *states) == ledger.partial_write_bytes
    assert total(stage_2, "distinct_load_bytes", "m", "l") == ledger.state_read_bytes
    assert total(stage_2, "load_bytes", "acc") == ledger.acc_read_bytes
    assert total(stage_2, "store_bytes", "out") == ledger.out_bytes
    assert total(stage_2, "store_bytes", "lse") == ledger.lse_bytes

    # the same block by block: x is the plan row, and every KV head and head tile reads alike
    by_row = np.array([(r.k_bytes, r.v_bytes, r.table_bytes) for r in ledger.rows])
    x = np.array([stage_1.block_index(i)[0] for i in range(len(stage_1.blocks))])
    names = ("k_cache", "v_cache", "block_table")
    counted = np.stack([stage_1[name]["distinct_load_bytes"] for name in names], 1)
    np.testing.assert_array_equal(counted, by_row[x])
    np.testing.assert_array_equal(stage_1.idle("k_cache", "v_cache"), by_row[x, 0] == 0)


def test_unused_rows_return_at_once() -> None:
    case = Case("spare", (40,), num_splits=2)
    plan = case.plan().to(np, capacity=5)
    _, (trace, _) = trace_launch(cd.decode_attention, *build(case).arrays, plan)
    unused = np.array([trace.block_index(i)[0] >= 2 for i in range(len(trace.blocks))])
    np.testing.assert_array_equal(trace.idle("q", "k_cache", "v_cache", "block_table"), unused)
    np.testing.assert_array_equal(trace.blocks["shared_loads"] == 0, unused)


def test_files_must_exist() -> None:
    with pytest.raises(ValueError, match=r"'paged\.cu', which kernels_cu does not have"):
        trace_launch(cd.merge_states, files={"paged.cu": ""})
