"""A small fixed set of emulated launches per kernel; a fault in the kernel must fail one of them.

A check takes the changed files and a schedule. It fails with an AssertionError where a result or a
count is wrong, or with an EmulatorError where the kernel did something undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import cupy_decode as cd
import kernels_cu
from cupy_decode import specs, tolerance, traffic, tree
from cupy_decode.backends import emulator
from cupy_decode.backends.emulator import LaunchTrace, trace_launch
from cupy_decode.specs import Arg, Launch

from ..decode_cases import Case, Problem, build

Files = Mapping[str, str]
Check = Callable[[Files, Any], None]


def expect(problem: Problem, out: np.ndarray, lse: np.ndarray) -> None:
    ref = cd.reference.decode_attention(*problem.arrays, **problem.options)
    tolerance.assert_close(
        out, lse, *ref, tolerance.bound(*problem.arrays, *ref, **problem.options)
    )


def expect_each_key_read_once(
    case: Case, problem: Problem, plan: Any, stage_1: LaunchTrace
) -> traffic.Ledger:
    """The bytes of K and V that were loaded are the ledger's, which is returned."""
    ledger = traffic.ledger(
        plan,
        case.seq_lens,
        case.heads,
        problem.k_cache.itemsize,
        case.block_size,
        window=case.window,
    )
    for name, size in (("k_cache", ledger.k_bytes), ("v_cache", ledger.v_bytes)):
        assert stage_1[name]["load_bytes"].sum() == size, name
    return ledger


def run(
    launch: Launch, files: Files, schedule: Any, late: Sequence[np.ndarray] = ()
) -> LaunchTrace:
    def operator(*, backend: str) -> None:
        emulator.run(launch, late=late)

    return trace_launch(operator, schedule=schedule, files=files).launches[0]


# ---------------------------------------------------------------------- paged_split_k


def decode(case: Case) -> Check:
    """The whole step against the reference, with rows to spare and their partials poisoned."""

    def check(files: Files, schedule: Any) -> None:
        problem, plan = build(case), case.plan()
        if not case.spec.finish:
            plan = plan.to(np, capacity=plan.num_rows + 2)
        (out, lse), launches = trace_launch(
            cd.decode_attention,
            *problem.arrays,
            plan,
            files=files,
            schedule=schedule,
            **problem.options,
        )
        expect(problem, out, lse)
        ledger = expect_each_key_read_once(case, problem, plan, launches[0])
        table = launches[0]["block_table"]["distinct_load_bytes"].sum()
        assert table == ledger.table_bytes, "block_table"

    return check


def along_the_tree(case: Case) -> Check:
    """Against the reference, and the same bits from every plan, spare rows or none."""

    def check(files: Files, schedule: Any) -> None:
        problem, found = build(case), []
        for plan in (
            case.plan(),
            cd.SplitPlan.from_split_size(case.seq_lens, 64).to(np, capacity=40),
            cd.SplitPlan.from_num_splits(case.seq_lens, 1),
        ):
            (out, lse), launches = trace_launch(
                cd.decode_attention,
                *problem.arrays,
                plan,
                files=files,
                schedule=schedule,
                kernel="readable",
                deterministic=True,
                out=np.empty((*problem.q.shape[:2], case.heads.value_dim), np.float32),
                **problem.options,
            )
            expect(problem, out, lse)
            found.append((out.tobytes(), lse.tobytes()))
            expect_each_key_read_once(case, problem, plan, launches[0])
        assert len(set(found)) == 1, "the bits depend on the plan"

    return check


def widths(files: Files, schedule: Any) -> None:
    """Which rows hold a state, and of how many leaves: what is left of an earlier call is gone."""
    problem = build(Case("widths", (700, 64)))
    plan = cd.SplitPlan.from_bounds([[0, 200, 400], [0]], problem.seq_lens)
    acc = emulator.empty((2 * 11, 8, 64), np.float32)
    m, l = (emulator.empty((2 * 11, 8), np.float32) for _ in range(2))  # noqa: E741
    width = np.full((2, 11), 3, np.int32)
    states = dict(acc=acc, m=m, l=l, width=width)
    run(specs.paged_split_k(*problem.arrays, plan, **states, scale=0.125), files, schedule)
    # Splits of leaves 0 to 3, 4 to 6 and 7 to 10.
    np.testing.assert_array_equal(width[0], [4, 0, 0, 0, 2, 0, 1, 1, 2, 0, 1])
    np.testing.assert_array_equal(width[1], [1, *[0] * 10])


def refused_along_the_tree(files: Files, schedule: Any) -> None:
    """A bad id or length makes NaN of its own sequence, however many subtrees there were before."""
    for name, at, value in (
        ("block_table", (1, 21), -1),  # lane 0 of its tile is not concerned
        ("seq_lens", (1,), 1000),
        ("seq_lens", (1,), -1),
    ):
        problem = build(Case("refused", (40, 700, 33), extra_columns=1))
        clean = cd.reference.decode_attention(*problem.arrays)
        plan = cd.SplitPlan.from_num_splits(problem.seq_lens, 3)
        getattr(problem, name)[at] = value
        fault = np.zeros(4, np.int32)
        acc = emulator.empty((3 * 12, 8, 64), np.float32)
        m, l = (emulator.empty((3 * 12, 8), np.float32) for _ in range(2))  # noqa: E741
        width = np.full((3, 12), 3, np.int32)  # of another call
        states = dict(acc=acc, m=m, l=l, width=width)
        run(
            specs.paged_split_k(*problem.arrays, plan, **states, fault=fault, scale=0.125),
            files,
            schedule,
        )
        out, lse = emulator.empty((3, 8, 64), np.float32), emulator.empty((3, 8), np.float32)
        run(specs.reduce_subtrees(cd.Partials(**states, plan=plan), out, lse), {}, schedule)
        assert fault[1] == 1
        assert np.isnan(out[1]).all()
        assert np.isnan(lse[1]).all()
        np.testing.assert_allclose(out[::2], clean[0][::2], rtol=1e-5, atol=1e-5)


def shrunk_lengths(files: Files, schedule: Any) -> None:
    """A plan outlives its lengths: splits past them are empty, the last one ends at them."""
    problem = build(Case("shrunk", (100, 60)))
    plan = cd.SplitPlan.from_num_splits([100, 60], 4)
    problem.seq_lens[...] = (40, 3)
    result = trace_launch(
        cd.decode_attention, *problem.arrays, plan, files=files, schedule=schedule
    ).result
    expect(problem, *result)


def refused_values(files: Files, schedule: Any) -> None:
    """Ids and lengths that lead outside: the row becomes NaN, the record says where.

    The operators refuse host arrays like these before any launch, so the kernels are launched here
    as they would be on values that only the device knows.
    """
    num_blocks = build(Case("refused", (40, 70, 33), extra_columns=1)).k_cache.shape[0]
    for name, at, value, record in (
        ("block_table", (1, 2), -1, (1, 1, 2, -1)),
        ("block_table", (1, 1), num_blocks, (1, 1, 1, num_blocks)),
        ("seq_lens", (1,), 97, (2, 1, 6, 97)),
        ("seq_lens", (1,), 300, (2, 1, 6, 300)),
        ("seq_lens", (1,), -1, (2, 1, 6, -1)),
    ):
        problem = build(Case("refused", (40, 70, 33), extra_columns=1))
        clean = cd.reference.decode_attention(*problem.arrays)
        plan = cd.SplitPlan.from_num_splits(problem.seq_lens, 2)
        getattr(problem, name)[at] = value
        for finish in (True, False):
            out = emulator.empty((3, 8, 64), np.float32)
            lse = emulator.empty((3, 8), np.float32)
            fault = np.zeros(4, np.int32)
            if finish:
                unsplit = cd.SplitPlan.from_num_splits([1, 1, 1], 1)
                launch = specs.paged_split_k(
                    *problem.arrays, unsplit, out=out, lse=lse, fault=fault, scale=0.125
                )
                run(launch, files, schedule)
            else:
                rows = (plan.capacity, 8)
                acc = emulator.empty((*rows, 64), np.float32)
                m, l = (emulator.empty(rows, np.float32) for _ in range(2))  # noqa: E741
                states = dict(acc=acc, m=m, l=l, fault=fault)
                launch = specs.paged_split_k(*problem.arrays, plan, **states, scale=0.125)
                run(launch, files, schedule)
                partials = cd.Partials(acc, m, l, plan)
                run(specs.reduce_splits(partials, out, lse), {}, schedule)
            np.testing.assert_array_equal(fault, record)
            assert np.isnan(out[1]).all()
            assert np.isnan(lse[1]).all()
            np.testing.assert_allclose(out[::2], clean[0][::2], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(lse[::2], clean[1][::2], rtol=1e-6)


def strided(files: Files, schedule: Any) -> None:
    """Views with junk between their elements, in and out, split and whole."""
    problem = build(Case("strided", (20, 5, 70)))

    def apart(x: np.ndarray) -> np.ndarray:
        wide = np.full((*x.shape[:-1], 3 * x.shape[-1]), 99, x.dtype)
        wide[..., 1::3] = x
        return wide[..., 1::3]

    q, table, lens = (apart(x) for x in (problem.q, problem.block_table, problem.seq_lens))
    for num_splits in (1, 3):
        out = apart(np.zeros(q.shape, np.float32))
        _, lse = trace_launch(
            cd.decode_attention,
            *(q, problem.k_cache, problem.v_cache, table, lens),
            num_splits=num_splits,
            out=out,
            files=files,
            schedule=schedule,
        ).result
        expect(problem, out.copy(), lse)
        assert (out.base[..., ::3] == 99).all()


SPLIT_K: list[Check] = [
    decode(Case("ragged", (0, 1, 16, 17, 100), num_splits=3)),
    decode(Case("unsplit", (0, 5, 70), num_splits=1)),
    refused_values,
    shrunk_lengths,
    strided,
    decode(
        Case(
            "bf16, group of 5, window",
            (70, 150),
            cd.HeadConfig(10, 2, 64),
            dtype="bfloat16",
            window=37,
            num_splits=3,
        )
    ),
    decode(
        Case(
            "soft cap and ALiBi",
            (90, 20),
            cd.HeadConfig(6, 2, 64),
            layout="interleaved",
            logits_soft_cap=3.0,
            alibi=True,
            num_splits=2,
        )
    ),
    decode(Case("scores of thousands", (100,), scale=100.0, num_splits=1)),
    decode(Case("two head tiles", (40,), cd.HeadConfig(17, 1, 64), num_splits=2)),
    decode(Case("small heads", (35,), cd.HeadConfig(4, 2, 8), dtype="float16", num_splits=2)),
    decode(
        Case(
            "8-bit cache, scales",
            (5, 90),
            dtype="bfloat16",
            kv_dtype="e4m3",
            scales="sequence",
            num_splits=2,
        )
    ),
    decode(Case("pages of 24", (50, 24), block_size=24, num_splits=2)),
    decode(Case("more sequences than threads", (3,) * 150, cd.HeadConfig(1, 1, 64), num_splits=2)),
    along_the_tree(Case("a tree", (0, 1, 200, 700), cd.HeadConfig(6, 2, 64), num_splits=3)),
    along_the_tree(
        Case(
            "a tree, window, bf16",
            (130, 700),
            cd.HeadConfig(40, 2, 64),
            dtype="bfloat16",
            window=333,
            scales="head",
            num_splits=5,
        )
    ),
    along_the_tree(
        Case("a tree of longer leaves", (700,), cd.HeadConfig(64, 64, 8), dtype="float16")
    ),
    widths,
    refused_along_the_tree,
]


# ---------------------------------------------------------------------- stage 2 and the merge


def reduce(files: Files, schedule: Any) -> None:
    """States of every kind: far apart, empty with a poisoned acc, more rows than threads."""
    rng = np.random.default_rng(0)
    counts = (1, 150, 3, 140)
    plan = cd.SplitPlan.from_bounds([range(n) for n in counts], counts, capacity=sum(counts) + 3)
    rows, heads = sum(counts), 3
    for v_head_dim, dtype in ((136, np.float32), (64, np.float16)):
        shape = (plan.capacity, heads)
        acc = rng.standard_normal((*shape, v_head_dim)).astype(np.float32)
        m = rng.uniform(-20, 20, shape).astype(np.float32)
        m[1 + 100], m[154 + 135] = 700, 700  # maxima of the last warp, and of a second round
        l = rng.uniform(1, 2, shape).astype(np.float32)  # noqa: E741
        empty = np.zeros(plan.capacity, bool)
        empty[[0, 5, 152]] = True  # the whole of sequence 0, and a row each of two others
        acc[empty], m[empty], l[empty] = np.nan, -np.inf, 0
        acc[rows:], m[rows:], l[rows:] = np.nan, np.nan, np.nan
        want_acc = np.where(empty[:, None, None], 0, acc)
        for sinks in (None, np.array([-np.inf, 3.0, 12.0], np.float32)):
            out = emulator.empty((4, heads, v_head_dim), dtype)
            lse = emulator.empty((4, heads), np.float32)
            launch = specs.reduce_splits(cd.Partials(acc, m, l, plan), out, lse, sinks)
            run(launch, files, schedule)
            want = cd.reference.reduce_splits(cd.Partials(want_acc, m, l, plan), sinks=sinks)
            rtol = 1e-3 if dtype == np.float16 else 5e-6
            np.testing.assert_allclose(out.astype(np.float64), want[0], rtol=rtol, atol=rtol)
            np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want[1]))
            np.testing.assert_allclose(lse, want[1], rtol=2e-6, atol=2e-6)


def add_subtrees(files: Files, schedule: Any) -> None:
    """Subtrees of every kind: the twin's bits, whatever lies in rows that hold none."""
    rng = np.random.default_rng(0)
    leaf_rows, heads, dim = 300, 3, 136
    widths = (
        [],  # no keys
        [0] * 5 + [1, 2] + [8] * 3,  # a window: the first leaves are not there
        [128, 128, 32, 8, 1],
        [1] * 299,  # more than threads
        [16],
        [4, *[0] * 4, 1],  # a shard is missing
    )
    width = np.zeros((len(widths), leaf_rows), np.int32)
    for b, row in enumerate(widths):
        leaf = 0
        for w in row:
            width[b, leaf] = w
            leaf += max(w, 1)
    rows = (width.size, heads)
    acc = rng.standard_normal((*rows, dim)).astype(np.float32)
    m = rng.integers(-20, 20, rows).astype(np.float32)
    m[1 * leaf_rows + 6] = -np.inf  # a leaf without weight
    m[3 * leaf_rows + 290] = 90  # the maximum of the last round of threads
    l = rng.uniform(1, 2, rows).astype(np.float32)  # noqa: E741
    none = m == -np.inf
    l[none], acc[none] = 0, -0.0
    unused = width.ravel() == 0
    acc[unused], m[unused], l[unused] = np.nan, 1000, np.nan
    plan = cd.SplitPlan(np.arange(7, dtype=np.int32), np.zeros(6, np.int32))
    partials = cd.Partials(acc, m, l, plan, width)
    for sinks in (None, np.array([-np.inf, 3.0, 12.0], np.float32)):
        out = emulator.empty((len(widths), heads, dim), np.float32)
        lse = emulator.empty(out.shape[:2], np.float32)
        run(specs.reduce_subtrees(partials, out, lse, sinks), files, schedule)
        want = cd.reference.reduce_splits(partials, sinks=sinks)
        np.testing.assert_allclose(out, want[0], rtol=3e-6, atol=3e-6)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want[1]))
        np.testing.assert_allclose(lse, want[1], rtol=2e-6, atol=2e-6)
        for b, head in np.ndindex(out.shape[:2]) if sinks is None else ():
            if 0 < b < 5:
                state = tree.merge_subtrees(tree.subtrees(partials, b, head))
                exact, _ = tree.result(state, divide=True)
                assert out[b, head].tobytes() == exact.tobytes(), "not the tree's bits"
    # A sequence without a row: nobody wrote what lies in its place.
    plan = cd.SplitPlan(np.array([0, 1, 2, 2, 3, 4, 5], np.int32), np.zeros(5, np.int32))
    run(specs.reduce_subtrees(cd.Partials(acc, m, l, plan, width), out, lse), files, schedule)
    assert not out[2].any()
    assert np.isneginf(lse[2]).all()


def merge(files: Files, schedule: Any) -> None:
    """Strided operands, "no keys" in both spellings, weights of exactly zero over NaN."""
    rng = np.random.default_rng(1)
    for dtype, rtol in ((np.float32, 4e-6), (ml_dtypes.bfloat16, 8e-3)):
        tokens, heads, dim = 6, 3, 136
        out_a = rng.standard_normal((tokens, heads, dim)).astype(dtype)
        wide = np.full((tokens, heads + 1, dim), np.nan, dtype)
        out_b = wide[:, :heads]
        out_b[...] = rng.standard_normal((tokens, heads, dim))
        lse_a = rng.uniform(-8, 8, (tokens, heads)).astype(np.float32)
        lse_b = rng.uniform(-8, 8, (heads, tokens)).astype(np.float32).T
        lse_a[0], lse_b[0] = -np.inf, np.inf
        lse_a[1], lse_b[2] = -np.inf, np.inf
        lse_a[3], lse_b[3] = 500, -500
        lse_a[4], lse_b[4] = -500, 500
        for bad_a, bad_b in ((0, 0), (1, 2), (4, 3)):
            out_a[bad_a], out_b[bad_b] = np.nan, np.nan
        for sinks in (None, np.array([-np.inf, 0.5, 6], np.float32)):
            operands = (out_a, lse_a, out_b, lse_b)
            out, lse = trace_launch(
                cd.merge_states, *operands, sinks=sinks, files=files, schedule=schedule
            ).result
            want = cd.reference.merge_states(*operands, sinks=sinks)
            np.testing.assert_allclose(out.astype(np.float64), want[0], rtol=rtol, atol=rtol / 4)
            np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want[1]))
            np.testing.assert_allclose(lse, want[1], rtol=2e-6, atol=2e-6)


# ---------------------------------------------------------------------- cache writes and plans


def write(files: Files, schedule: Any) -> None:
    """Slots at both ends of an HND cache, padding, and one past the end, which is not written."""
    rng = np.random.default_rng(2)
    k, v = (rng.standard_normal((4, 2, d)).astype(np.float32) for d in (136, 24))
    hnd = np.full((3, 2, 4, 136), 7, np.float32)
    caches = [hnd.transpose(0, 2, 1, 3), np.full((3, 4, 2, 24), 7, np.float32)]
    want = [c.copy() for c in caches]
    cd.reference.write_kv(k, v, want[0], want[1], np.array([11, -1, 6, -1], np.int64))
    fault = np.zeros(4, np.int32)
    slots = np.array([11, -2, 6, 12], np.int64)
    run(specs.write_kv(k, v, caches[0], caches[1], slots, fault), files, schedule)
    for cache, expected in zip(caches, want, strict=True):
        np.testing.assert_array_equal(cache, expected)
    np.testing.assert_array_equal(fault, (3, 3, 0, 12))


def plan(files: Files, schedule: Any) -> None:
    """Rows to spare and rows too few; lengths outside what the plan was sized for."""
    lengths = np.random.default_rng(3).integers(0, 90, 300)
    lengths[:5] = 0, 1, 16, 17, 90
    for rule, value, host in (
        ("count", 5, cd.SplitPlan.from_num_splits(lengths, 5)),
        ("size", 33, cd.SplitPlan.from_split_size(lengths, 33)),
    ):
        for spare in (0, 3, -4):
            lens = lengths.astype(np.int32)
            lens[lengths == 0] = -8  # planned as 0
            lens[lengths == 90] = 10**6  # planned as 90
            capacity = host.num_rows + spare
            device = cd.SplitPlan(
                emulator.empty((len(lens) + 1,), np.int32), emulator.empty((capacity,), np.int32)
            )
            launch = specs.plan_splits(device, lens, rule=rule, value=value, max_seq_len=90)
            run(launch, files, schedule)
            used = min(capacity, host.num_rows)
            want = np.minimum(host.split_offsets, capacity)
            np.testing.assert_array_equal(device.split_offsets, want)
            np.testing.assert_array_equal(device.split_begin[:used], host.split_begin[:used])
            np.testing.assert_array_equal(device.split_begin[used:], -1)


def plan_by_batch(files: Files, schedule: Any) -> None:
    """The rules that look at the whole batch, against the host's."""
    rng = np.random.default_rng(4)
    heads = cd.HeadConfig(32, 8, 128)
    batches = (
        rng.integers(0, 5000, 7),
        rng.integers(900, 5000, 150),
        *(rng.integers(50, 5000, n) for n in (5, 6, 9, 12, 20)),
        np.r_[np.zeros(3, int), 4999, np.zeros(2, int), 60, 0],
    )
    for lens in (b.astype(np.int32) for b in batches):
        for policy in ("sglang-triton", "fa3-dynamic", "equal-shares"):
            made, account = cd.policies.explain(lens, heads, policy, 132)
            workers = account.details.get("worker_offsets")
            offsets = None if workers is None else emulator.empty((len(workers),), np.int32)
            got = trace_launch(
                cd.plan_splits_on_device,
                np.where(lens == 0, -8, lens).astype(np.int32),  # negative lengths count as 0
                heads,
                policy,
                132,
                max_seq_len=5000,
                worker_offsets=offsets,
                files=files,
                schedule=schedule,
            ).result
            np.testing.assert_array_equal(got.split_offsets, made.split_offsets)
            rows = made.num_rows
            np.testing.assert_array_equal(got.split_begin[:rows], made.split_begin[:rows])
            if offsets is not None:
                np.testing.assert_array_equal(offsets, workers)


# ---------------------------------------------------------------------- the reading kernels

#: What a thread must have folded its loads into before it writes the sink.
FOLD = 0x9E3779B9


def _launch(name: str, entry: str, grid: int, threads: int, values: dict[str, Any]) -> Launch:
    args = tuple(Arg(p.name, p.kind, values[p.name]) for p in kernels_cu.signature(name))
    return Launch(name, entry, (grid, 1, 1), (threads, 1, 1), 0, args, False)


def stream(files: Files, schedule: Any) -> None:
    for vectors in (0, 1000, 1024):
        data, sink = np.zeros((1024, 4), np.uint32)[:vectors], np.zeros(1, np.uint32)
        values = dict(sink=sink, data=data, num_vectors=vectors)
        launch = _launch("read_stream", "read_stream<4>", 2, 32, values)
        trace = run(launch, files, schedule)
        # past the end the last vector is read again, by the threads that would have left
        assert trace["data"]["loads"].sum() == -(-vectors // 256) * 256
        distinct = trace["data"]["distinct_load_bytes"].sum()
        assert 16 * vectors <= distinct <= 16 * (vectors + 1)
        assert sink[0] == 0
        for column in range(4 if vectors else 0):
            data[500] = 0
            data[500, column] = FOLD
            run(launch, files, schedule)
            assert sink[0] == FOLD, column
            sink[0] = 0


def pages(files: Files, schedule: Any) -> None:
    vectors, block_size, heads = 8, 32, 3
    caches = [np.zeros((7, block_size, heads, vectors, 4), np.uint32) for _ in range(2)]
    used, sink = np.array([5, 0, 3], np.int32), np.zeros(1, np.uint32)
    block, slot, head = (s // 16 for s in caches[0].strides[:3])
    values = dict(
        sink=sink,
        k_cache=caches[0],
        v_cache=caches[1],
        pages=used,
        num_pages=3,
        num_kv_heads=heads,
        block_size=block_size,
        stride_block=block,
        stride_slot=slot,
        stride_head=head,
    )
    launch = _launch("read_pages", f"read_pages<{vectors}, 1>", 1, 64, values)
    trace = run(launch, files, schedule)
    for name in ("k_cache", "v_cache"):
        assert trace[name]["load_bytes"].sum() == caches[0][used].nbytes
        assert trace[name]["distinct_load_bytes"].sum() == caches[0][used].nbytes
    assert sink[0] == 0
    for cache in caches:
        for page, where, column in ((5, 31, 0), (3, 1, 1), (0, 7, 2), (3, 16, 3)):
            cache[page, where, 1, 5, column] = FOLD
            run(launch, files, schedule)
            assert sink[0] == FOLD, (page, where, column)
            cache[...], sink[...] = 0, 0
    for cache in caches:
        cache[[1, 2, 4, 6]] = FOLD  # pages that are not on the list
    run(launch, files, schedule)
    assert sink[0] == 0


CHECKS: dict[str, list[Check]] = {
    "paged_split_k": SPLIT_K,
    "reduce_splits": [reduce],
    "reduce_subtrees": [add_subtrees],
    "merge_states": [merge],
    "write_kv": [write],
    "plan_splits": [plan, plan_by_batch],
    "read_stream": [stream],
    "read_pages": [pages],
}
