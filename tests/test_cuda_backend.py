"""What only a GPU can show: graphs, the compiler's messages, kernels launched by hand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import specs

from .decode_cases import Case, Problem, build
from .test_operators import expect, to_host

pytestmark = pytest.mark.gpu

HEADS = cd.HeadConfig(8, 2, 64)
LENGTHS = ((1, 1, 1), (1000, 900, 700), (17, 0, 512), (1000, 1, 700), (1, 1, 1))


def captured(launch: Any) -> Any:
    """The graph of what ``launch`` puts on a stream."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch()  # compile and warm the memory pool outside the capture
        stream.synchronize()
        stream.begin_capture()
        launch()
        return stream.end_capture(), stream


def at_lengths(problem: Problem, lens: np.ndarray) -> Problem:
    return Problem(problem.q, problem.k_cache, problem.v_cache, problem.block_table, lens)


def test_a_graph_captured_short_replays_long_after_the_plan_is_rewritten() -> None:
    import cupy

    host = build(Case("longest", LENGTHS[1], HEADS))
    placed = host.to(cupy)
    plan = cd.plan_splits(LENGTHS[0], HEADS, num_splits=8).to(cupy, capacity=24)
    step = cd.DecodeStep(HEADS, plan, np.float32)
    placed.seq_lens[...] = cupy.asarray(np.array(LENGTHS[0], np.int32))
    graph, stream = captured(lambda: step(*placed.arrays))
    for lens in LENGTHS:
        now = np.array(lens, np.int32)
        placed.seq_lens[...] = cupy.asarray(now)
        plan.assign(cd.plan_splits(now, HEADS, num_splits=8))
        step.out[...] = np.nan
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expect(at_lengths(host, now), to_host(step.out), to_host(step.lse))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {"num_splits": 7}), ("float32", {"split_size": 128}), ("float32", {}),
     ("float16", {})],
    ids=str,
)  # fmt: skip
def test_a_graph_that_plans_on_the_device_follows_the_lengths(
    dtype: str, options: dict[str, int]
) -> None:
    import cupy

    host = build(Case("longest", LENGTHS[1], HEADS, dtype=dtype))
    placed = host.to(cupy)
    out = cupy.empty_like(placed.q)
    results: dict[str, Any] = {}

    def launch() -> None:
        results["lse"] = cd.decode_attention(*placed.arrays, out=out, **options)[1]

    graph, stream = captured(launch)
    for lens in LENGTHS:
        now = np.array(lens, np.int32)
        placed.seq_lens[...] = cupy.asarray(now)
        out[...] = np.nan
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expect(at_lengths(host, now), to_host(out), to_host(results["lse"]))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_graph_keeps_what_its_calls_allocated(dtype: str) -> None:
    """Its memory is nobody else's, though nobody but the graph knows of it."""
    import cupy

    host = build(Case("longest", LENGTHS[1], HEADS, dtype=dtype))
    placed = host.to(cupy)
    out = cupy.empty_like(placed.q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cd.decode_attention(*placed.arrays)  # compiles
        stream.begin_capture()
        for _ in range(3):
            cd.decode_attention(*placed.arrays, out=out, return_lse=False)
        graph = stream.end_capture()
        for size in 2 ** np.arange(8, 22):  # whatever the pool has left
            junk = [cupy.full(size, np.nan, np.float32) for _ in range(4)]
        cd.decode_attention(*placed.arrays)
        out[...] = np.nan
        graph.launch(stream)
        assert all(bool(cupy.isnan(x).all()) for x in junk)
    stream.synchronize()
    want, _ = cd.reference.decode_attention(*host.arrays)
    np.testing.assert_allclose(out.get(), want, rtol=2e-3, atol=2e-3)


def test_graphs_of_one_stream_can_run_side_by_side() -> None:
    """Two captured one after the other: on two streams neither touches the other's workspace."""
    import cupy

    host = build(Case("long", (3000, 2500), HEADS, dtype="float16"))
    placed = host.to(cupy)
    other = placed.q[::-1].copy()
    outs = [cupy.empty_like(placed.q) for _ in range(2)]
    stream, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    graphs = []
    with stream:
        cd.decode_attention(*placed.arrays)
        for q, out in zip((placed.q, other), outs, strict=True):
            stream.begin_capture()
            for _ in range(50):
                cd.decode_attention(q, *placed.arrays[1:], out=out, kernel="fast")
            graphs.append(stream.end_capture())
        cupy.cuda.Device().synchronize()
    for _ in range(5):
        for graph, where in zip(graphs, (stream, second), strict=True):
            graph.launch(where)
        cupy.cuda.Device().synchronize()
        for q, out in zip((placed.q, other), outs, strict=True):
            want, _ = cd.reference.decode_attention(q.get(), *host.arrays[1:])
            np.testing.assert_allclose(out.get(), want, rtol=2e-3, atol=2e-3)
            out[...] = np.nan


def test_streams_can_run_side_by_side() -> None:
    import cupy

    host = build(Case("long", (3000, 2500), HEADS, dtype="float16"))
    placed = host.to(cupy)
    want = cd.decode_attention(*placed.arrays)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    results = []
    for _ in range(100):
        for stream in streams:
            with stream:
                results.append(cd.decode_attention(*placed.arrays, kernel="fast"))
    cupy.cuda.Device().synchronize()
    for result in results:
        for got, expected in zip(result, want, strict=True):
            cupy.testing.assert_array_equal(got, expected)


def test_a_step_without_a_plan_is_captured_and_follows_the_lengths() -> None:
    import cupy

    for dtype in ("float16", "float32"):
        host = build(Case("longest", LENGTHS[1], HEADS, dtype=dtype))
        placed = host.to(cupy)
        step = cd.DecodeStep(HEADS, None, dtype, batch=3)
        graph, stream = captured(lambda s=step, p=placed: s(*p.arrays))
        for lens in LENGTHS:
            now = np.array(lens, np.int32)
            placed.seq_lens[...] = cupy.asarray(now)
            step.out[...] = np.nan
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            expect(at_lengths(host, now), to_host(step.out), to_host(step.lse))


def graph_kernels(launch: Any) -> list[str]:
    graph, _ = captured(launch)
    pattern = r"(paged_split_k_mma|paged_split_k|reduce_splits|plan_splits)"
    return sorted(set(re.findall(pattern, graph.debug_dot_str())))


def test_the_fast_kernel_is_one_launch() -> None:
    import cupy

    placed = build(Case("grid", (100, 3000), HEADS, dtype="float16")).to(cupy)
    assert graph_kernels(lambda: cd.decode_attention(*placed.arrays)) == ["paged_split_k_mma"]


def test_unsplit_is_one_kernel_and_split_is_two() -> None:
    import cupy

    placed = build(Case("grid", (100, 30), HEADS)).to(cupy)
    lens = placed.seq_lens.get()
    for num_splits, kernels in ((1, ["paged_split_k"]), (4, ["paged_split_k", "reduce_splits"])):
        plan = cd.plan_splits(lens, HEADS, num_splits=num_splits).to(cupy)
        assert graph_kernels(lambda p=plan: cd.decode_attention(*placed.arrays, p)) == kernels


@pytest.mark.parametrize("rule", ["count", "size"])
def test_device_plans_equal_host_plans(rule: str) -> None:
    import cupy

    from cupy_decode.backends import cuda

    rng = np.random.default_rng(3)
    for batch in (1, 2, 127, 128, 129, 1000):
        lens = rng.integers(0, 5000, batch).astype(np.int32)
        lens[rng.integers(0, batch)] = 0
        for value in (1, 3, 16, 200):
            if rule == "count":
                want = cd.SplitPlan.from_num_splits(lens, value)
            else:
                want = cd.SplitPlan.from_split_size(lens, value)
            got = cd.SplitPlan(
                cupy.full(batch + 1, -7, np.int32), cupy.full(want.num_rows + 5, -7, np.int32)
            )
            cuda.run(
                specs.plan_splits(got, cupy.asarray(lens), rule=rule, value=value, max_seq_len=5000)
            )
            np.testing.assert_array_equal(got.split_offsets.get(), want.split_offsets)
            np.testing.assert_array_equal(got.split_begin.get()[: want.num_rows], want.split_begin)
            assert (got.split_begin.get()[want.num_rows :] == -7).all()


def test_a_kernel_launched_by_hand_equals_the_operator() -> None:
    import cupy

    case = Case("by-hand", (50, 200), cd.HeadConfig(8, 2, 64), num_splits=3)
    placed = build(case).to(cupy)
    plan = case.plan().to(cupy)
    kernel = cd.kernel("paged_split_k", specs.KernelSpec("float32", head_dim=64, group_size=4))
    want = cd.paged_split_k(*placed.arrays, plan)
    launch = specs.paged_split_k(
        *placed.arrays, plan, acc=cupy.zeros_like(want.acc), m=cupy.zeros_like(want.m),
        l=cupy.zeros_like(want.l), scale=64**-0.5,
    )  # fmt: skip
    arguments = {a.name: a.value for a in launch.args}
    kernel(kernel.grid(plan.capacity, 2), **arguments)
    assert launch.grid == kernel.grid(plan.capacity, 2)
    assert launch.block == kernel.block
    cupy.testing.assert_array_equal(arguments["acc_out"], want.acc)
    with pytest.raises(TypeError, match="missing: \\['scale'\\]"):
        kernel(kernel.grid(1), **{k: v for k, v in arguments.items() if k != "scale"})


def test_a_compile_error_names_kernel_specialisation_and_first_error() -> None:
    import cupy

    from cupy_decode.backends import cuda

    with pytest.raises(cuda.KernelCompileError) as raised:
        cuda.raw_kernel("merge_states", "merge_states<no_such_type, 128>", 0, False, 0)
    message = str(raised.value)
    assert "kernel merge_states" in message
    assert "merge_states<no_such_type, 128>" in message
    assert "error" in message
    assert cupy.cuda.is_available()


def test_too_much_shared_memory_is_refused_before_compiling() -> None:
    from cupy_decode.backends import cuda

    with pytest.raises(ValueError, match="needs 1000000 bytes of shared memory per block"):
        cuda.raw_kernel("merge_states", "merge_states<float, 128>", 1_000_000, False, 0)


def test_a_captured_step_allocates_nothing() -> None:
    import cupy

    class Count(cupy.cuda.MemoryHook):
        name = "count"
        allocations = 0

        def malloc_preprocess(self, **_: Any) -> None:
            self.allocations += 1

        alloc_preprocess = malloc_preprocess

    case = Case("captured", (100, 30), HEADS, num_splits=4, kv_dtype="e4m3", scales="head")
    placed = build(case).to(cupy)
    del placed.options["kv_dtype"]
    step = cd.DecodeStep(HEADS, case.plan().to(cupy), np.float32, kv_dtype="e4m3")
    counter = Count()
    calls = 0

    def launch() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            step(*placed.arrays, **placed.options)
            return
        with counter:
            step(*placed.arrays, **placed.options)

    graph, stream = captured(launch)
    assert calls == 2
    assert counter.allocations == 0
    step.out[...] = np.nan
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    expect(build(case), to_host(step.out), to_host(step.lse))


@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_launches_go_to_the_arrays_device(num_splits: int | None) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    case = Case("second", (100, 0, 30), HEADS, sinks=num_splits is None)
    with cupy.cuda.Device(1):
        second = build(case).to(cupy)
    assert cupy.cuda.runtime.getDevice() == 0
    out, lse = cd.decode_attention(*second.arrays, num_splits=num_splits, **second.options)
    assert out.device.id == 1
    assert lse.device.id == 1
    assert cupy.cuda.runtime.getDevice() == 0
    expect(build(case), to_host(out), to_host(lse))
    lists = [second.block_table.get().tolist(), second.seq_lens.get().tolist()]
    out, lse = cd.decode_attention(*second.arrays[:3], *lists, **second.options)
    expect(build(case), to_host(out), to_host(lse))
    first = build(case).to(cupy)
    with pytest.raises(ValueError, match="k_cache is on CUDA device 0 but q is on device 1"):
        cd.decode_attention(second.q, *first.arrays[1:])
