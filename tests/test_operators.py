"""The CUDA sources against the float64 reference, on the CPU emulator and on the GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import specs, tolerance

from .decode_cases import ALL, CORRECTNESS, DTYPES, FAST, Case, Problem, build

BACKENDS = [
    pytest.param("emulator", marks=pytest.mark.emulator),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
HUGE = 3e38


def module_of(backend: str) -> Any:
    if backend == "cuda":
        import cupy

        return cupy
    return np


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def run(
    problem: Problem, plan: cd.SplitPlan | None, backend: str, out_dtype: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """``decode_attention`` on a backend, results on the host; without a plan the fast kernel."""
    if backend == "cuda":
        problem = problem.to(module_of(backend))
    out = None
    if out_dtype is not None:
        shape = (*problem.q.shape[:2], problem.v_cache.shape[3])
        out = module_of(backend).full(shape, np.nan, DTYPES[out_dtype])
    kernel = "fast" if plan is None else "readable"
    out, lse = cd.decode_attention(
        *problem.arrays, plan, out=out, backend=backend, kernel=kernel, **problem.options
    )
    return to_host(out), to_host(lse)


def expect(problem: Problem, out: np.ndarray, lse: np.ndarray) -> None:
    ref = cd.reference.decode_attention(*problem.arrays, **problem.options)
    bound = tolerance.bound(*problem.arrays, *ref, out_dtype=out.dtype, **problem.options)
    tolerance.assert_close(out, lse, *ref, bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_equals_reference(case: Case, backend: str) -> None:
    problem = build(case)
    out, lse = run(problem, case.plan(), backend, case.out_dtype)
    assert out.dtype == DTYPES[case.out_dtype or case.dtype]
    assert lse.dtype == np.float32
    expect(problem, out, lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FAST, ids=str)
def test_the_fast_kernel_equals_reference(case: Case, backend: str) -> None:
    problem = build(case)
    out, lse = run(problem, None, backend, case.out_dtype)
    assert out.dtype == DTYPES[case.out_dtype or case.dtype]
    expect(problem, out, lse)


def test_shared_memory_around_the_default_limit() -> None:
    """48 KiB is where a launch has to ask: the cases lie on both sides, and none can lie on it."""
    sizes = {c.name: c.spec.split_k_shared_mem for c in ALL if c.name.startswith("shared-")}
    assert sizes == {name: int(name.removeprefix("shared-")) for name in sizes}
    assert min(sizes.values()) < 49152 < max(sizes.values())
    for kv_dtype, step in (("float32", 4), ("float16", 8), ("e4m3", 8)):
        for head_dim, group_size in itertools.product(range(step, 577, step), range(1, 17)):
            spec = specs.KernelSpec("float32", kv_dtype, head_dim, group_size=group_size)
            assert spec.split_k_shared_mem != 49152


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*CORRECTNESS[:8], *CORRECTNESS[16:19]], ids=str)
def test_partials_equal_reference(case: Case, backend: str) -> None:
    problem, plan = build(case), case.plan()
    placed = problem.to(module_of(backend)) if backend == "cuda" else problem
    got = cd.paged_split_k(*placed.arrays, plan, backend=backend, **placed.options)
    want = cd.reference.paged_split_k(*problem.arrays, plan, **problem.options)
    rows = plan.num_rows
    m, wanted_m = to_host(got.m)[:rows], want.m[:rows]
    np.testing.assert_array_equal(np.isneginf(m), np.isneginf(wanted_m))
    live = np.isfinite(wanted_m)
    np.testing.assert_allclose(m[live], wanted_m[live], rtol=2e-6, atol=2e-6)
    # acc and l are relative to m, so bring both to the reference's maximum first.
    factor = np.ones_like(wanted_m)
    factor[live] = np.exp2(m[live] - wanted_m[live])
    np.testing.assert_allclose(to_host(got.l)[:rows] * factor, want.l[:rows], rtol=2e-5)
    np.testing.assert_allclose(
        to_host(got.acc)[:rows] * factor[..., None], want.acc[:rows], rtol=2e-5, atol=1e-4
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", (0, 17, 130), cd.HeadConfig(8, 2, 128), dtype="bfloat16", num_splits=5),
        Case("fp32-unsplit", (0, 17, 130), num_splits=1),
        Case("window", (5, 100), window=20, num_splits=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["readable", "fast"])
def test_what_must_not_be_read_changes_no_bit(kernel: str, case: Case, backend: str) -> None:
    plan = case.plan()
    if kernel == "fast":
        case, plan = replace(case, dtype="float16", window=None), None
    quiet = run(build(case, poison=0.0, unused_id=0), plan, backend)
    for poison in (float("nan"), HUGE):
        for unused_id in (-1, 2**31 - 1, -(2**31)):
            loud = run(build(case, poison, unused_id), plan, backend)
            np.testing.assert_array_equal(loud[0], quiet[0])
            np.testing.assert_array_equal(loud[1], quiet[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("junk", [float("nan"), HUGE, float("inf")])
def test_stale_partials_change_no_bit(backend: str, junk: float) -> None:
    case = Case("stale", (33, 0, 90), num_splits=4)
    problem = build(case)
    xp = module_of(backend)
    placed = problem.to(xp) if backend == "cuda" else problem
    plan = case.plan().to(xp, capacity=40)
    results = []
    for fill in (0.0, junk):
        partials = cd.Partials(
            xp.full((40, 8, 64), fill, np.float32),
            xp.full((40, 8), fill, np.float32),
            xp.full((40, 8), fill, np.float32),
            plan,
        )
        states = cd.paged_split_k(*placed.arrays, plan, partials=partials, backend=backend)
        results.append([to_host(a) for a in cd.reduce_splits(states, backend=backend)])
    for clean, stale in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, stale)
    expect(problem, *results[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_scale_is_noticed(backend: str) -> None:
    """The tolerance is tight enough: one per cent on the scale fails it in every dtype."""
    for dtype in ("float32", "float16", "bfloat16"):
        case = Case(dtype, (300,), cd.HeadConfig(4, 2, 64), dtype=dtype, num_splits=2)
        problem = build(case)
        out, lse = run(Problem(*problem.arrays, {"scale": 1.01 * 64**-0.5}), case.plan(), backend)
        with pytest.raises(AssertionError, match="largest error"):
            expect(problem, out, lse)
        if dtype != "float32":
            out, lse = run(Problem(*problem.arrays, {"scale": 1.01 * 64**-0.5}), None, backend)
            with pytest.raises(AssertionError, match="largest error"):
                expect(problem, out, lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merge_states(backend: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    xp, np_dtype = (
        module_of(backend),
        np.dtype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16),
    )
    shape = (6, 3, 40)
    out_a, out_b = (rng.standard_normal(shape).astype(np_dtype) for _ in range(2))
    lse_a, lse_b = (rng.uniform(-8, 8, shape[:2]).astype(np.float32) for _ in range(2))
    lse_a[0], lse_b[0] = -np.inf, -np.inf
    lse_a[1] = -np.inf
    lse_b[2] = np.inf  # how some kernels mark "no keys"
    lse_a[3], lse_b[3] = 500.0, -500.0  # weight exactly zero
    out_a[1], out_b[2], out_b[3] = np.nan, np.nan, np.nan
    sinks = np.array([0.0, 3.0, -np.inf], np.float32)
    # strided operands: lse stored [heads, tokens], one output cut out of a wider array
    lse_b = np.ascontiguousarray(lse_b.T).T
    wide = np.full((6, 3, 48), np.nan, np_dtype)
    wide[..., :40] = out_b
    out_b = wide[..., :40]
    from .decode_cases import on_device

    place = (lambda a: on_device(a, xp)) if backend == "cuda" else (lambda a: a)
    for given_sinks in (None, sinks):
        got = cd.merge_states(
            *(place(a) for a in (out_a, lse_a, out_b, lse_b)),
            sinks=None if given_sinks is None else place(given_sinks),
            backend=backend,
        )
        want = cd.reference.merge_states(out_a, lse_a, out_b, lse_b, sinks=given_sinks)
        out, lse = (to_host(a).astype(np.float64) for a in got)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want[1]))
        rtol = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        np.testing.assert_allclose(out, want[0], rtol=rtol, atol=rtol / 4)
        np.testing.assert_allclose(lse, want[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_write_kv(backend: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    xp = module_of(backend)
    np_dtype = DTYPES.get(dtype, np.uint8)
    caches = [rng.uniform(0, 256, (5, 4, 2, d)).astype(np_dtype) for d in (24, 8)]
    rows = [rng.uniform(0, 256, (4, 2, d)).astype(np_dtype) for d in (24, 8)]
    slots = np.array([5, -1, 19, -7], np.int64)
    expected = [c.copy() for c in caches]
    for cache, row in zip(expected, rows, strict=True):
        cache[1, 1], cache[4, 3] = row[0], row[2]
    placed = [xp.asarray(a) for a in caches]
    cd.write_kv(*(xp.asarray(a) for a in rows), *placed, xp.asarray(slots), backend=backend)
    for cache, want in zip(placed, expected, strict=True):
        np.testing.assert_array_equal(to_host(cache), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_step_follows_a_rewritten_plan(backend: str) -> None:
    """Fixed geometry, changing work: short, long and short again through one workspace."""
    xp = module_of(backend)
    heads = cd.HeadConfig(8, 2, 64)
    lengths = ((1, 1, 1), (300, 90, 170), (17, 0, 12), (1, 1, 1))
    longest = build(Case("longest", lengths[1], heads))
    plan = cd.plan_splits(lengths[0], heads, num_splits=8).to(xp, capacity=24)
    step = cd.DecodeStep(heads, plan, np.float32, backend=backend)
    placed = longest.to(xp) if backend == "cuda" else longest
    for lens in lengths:
        now = np.array(lens, np.int32)
        placed.seq_lens[...] = xp.asarray(now)
        plan.assign(cd.plan_splits(now, heads, num_splits=8))
        out, lse = step(*placed.arrays)
        step.check()
        host = Problem(longest.q, longest.k_cache, longest.v_cache, longest.block_table, now)
        expect(host, to_host(out), to_host(lse))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "kernel"), [("float16", "fast"), ("float32", "auto")])
def test_a_step_without_a_plan_follows_the_lengths(dtype: str, kernel: str, backend: str) -> None:
    xp = module_of(backend)
    lengths = ((300, 90, 170), (1, 1, 1), (17, 0, 165))
    longest = build(Case("longest", lengths[0], dtype=dtype))
    step = cd.DecodeStep(cd.HeadConfig(8, 2, 64), None, dtype, backend, batch=3, kernel=kernel)
    placed = longest.to(xp) if backend == "cuda" else longest
    for lens in lengths:
        now = np.array(lens, np.int32)
        placed.seq_lens[...] = xp.asarray(now)
        out, lse = step(*placed.arrays)
        step.check()
        host = Problem(longest.q, longest.k_cache, longest.v_cache, longest.block_table, now)
        expect(host, to_host(out), to_host(lse))
