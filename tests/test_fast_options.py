"""Options of the fast path: each close to the float64 reference, and no bit depends on the cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import fast, reference, tolerance

from .decode_cases import DTYPES, Case, Problem, build
from .test_fast import assert_same_bits

SMALL = fast.Machine(num_sms=3)
GQA, MHA = cd.HeadConfig(8, 2, 64), cd.HeadConfig(2, 2, 128)


def case(name: str, seq_lens: tuple[int, ...], heads: cd.HeadConfig = GQA, **options: Any) -> Case:
    return Case(name, seq_lens, heads, **{"dtype": "bfloat16", **options})


ALL_SCORES = dict(window=90, logits_soft_cap=3.0, alibi=True, sinks=True)
CASES = (
    # ---- a table entry for every key, or for fewer than a page of them
    case("block-1", (40, 0, 17), block_size=1),
    case("block-4", (70,), block_size=4, dtype="float16"),
    case("block-24-hnd", (100, 33), MHA, block_size=24, layout="HND"),
    case("block-2-window", (100, 33, 5), block_size=2, window=30),
    # ---- scores
    case("window", (300, 5, 0), window=37),
    case("window-1", (90, 20), window=1, dtype="float16"),
    case("window-of-many-units", (700,), window=500),
    case("soft-cap", (60, 200), cd.HeadConfig(12, 1, 64), logits_soft_cap=2.0, dtype="float16"),
    case("alibi", (60, 200), cd.HeadConfig(6, 2, 64), alibi=True),
    case("sinks", (60, 200, 0), sinks=True),
    case("all-scores", (200,), cd.HeadConfig(10, 1, 64), **ALL_SCORES),
    # ---- caches of 8 bits
    case("e4m3", (100, 7), kv_dtype="e4m3", dtype="float16"),
    case("e4m3-d128", (100, 0, 33), cd.HeadConfig(4, 1, 128), kv_dtype="e4m3", scales="tensor"),
    case("e4m3-d256", (50,), cd.HeadConfig(2, 1, 256), kv_dtype="e4m3", scales="sequence"),
    case("e5m2", (100, 33), cd.HeadConfig(12, 1, 128), kv_dtype="e5m2", scales="head"),
    case("e5m2-fp16", (90,), MHA, kv_dtype="e5m2", dtype="float16"),
    case("everything", (50, 200), kv_dtype="e4m3", scales="sequence", block_size=8, **ALL_SCORES),
    # ---- the rest
    case("fp32-out", (50, 20), out_dtype="float32"),
    case("scales-of-bf16", (50, 20), scales="sequence"),
    *(case(f"group-{g}", (70,), cd.HeadConfig(g, 1, 64)) for g in (3, 5, 6, 7, 12, 71)),
)


def hidden(problem: Problem, window: int) -> Problem:
    """Poison what lies before the window: keys, and the ids of blocks that hold no others."""
    table, block_size = problem.block_table.copy(), problem.k_cache.shape[1]
    for b, s in enumerate(problem.seq_lens.tolist()):
        first = max(s - window, 0)
        j = np.arange(first)
        for cache in (problem.k_cache, problem.v_cache):
            nan = np.array(np.nan, cache.dtype) if cache.dtype != np.uint8 else 0xFF
            cache[table[b, j // block_size], j % block_size] = nan
        table[b, : first // block_size] = -1
    return replace(problem, block_table=table)


def problem_of(case: Case) -> Problem:
    problem = build(case)
    return problem if case.window is None else hidden(problem, case.window)


def run(
    case: Case,
    problem: Problem,
    *,
    runner: Any = None,
    machine: fast.Machine = SMALL,
    capacity: int | None = None,
    **cut: Any,
) -> tuple[Any, Any, Any]:
    """(out, lse, fault) of the kernel, in the emulator by default; outputs start as NaN."""
    if runner is None:
        from cupy_decode.backends import emulator as runner
    q, k_cache, *_ = problem.arrays
    kv_dtype = problem.options.get("kv_dtype")
    assert fast.refusal(*problem.arrays, kv_dtype=kv_dtype, machine=machine) is None
    space = fast.workspace(runner, fast.spec_of(q, k_cache, kv_dtype=kv_dtype), machine)
    if capacity is not None:
        space = fast.Workspace(space.partials[:capacity], space.arrivals[:capacity])
    out = runner.empty(q.shape, np.dtype(DTYPES[case.out_dtype or case.dtype]))
    lse = runner.empty(q.shape[:2], np.float32)
    out.view(np.uint8)[...] = lse.view(np.uint8)[...] = 0xFF  # NaN
    fault = runner.zeros((4,), np.int32)
    options = {"scale": q.shape[2] ** -0.5, **problem.options, **cut}
    runner.run(
        fast.launch(
            *problem.arrays,
            out=out,
            lse=lse,
            space=space,
            fault=fault,
            machine=machine,
            **options,
        )
    )
    assert not space.arrivals.any(), "a counter did not return to 0"
    return out, lse, fault


def expect(problem: Problem, out: np.ndarray, lse: np.ndarray) -> None:
    want = reference.decode_attention(*problem.arrays, **problem.options)
    allowed = tolerance.bound(*problem.arrays, *want, out_dtype=out.dtype, **problem.options)
    tolerance.assert_close(out, lse, *want, allowed)


@pytest.mark.emulator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_close_to_the_reference(case: Case):
    problem = problem_of(case)
    out, lse, fault = run(case, problem)
    expect(problem, out, lse)
    assert not fault.any()


@pytest.mark.emulator
@pytest.mark.parametrize(
    "case",
    [
        case("window", (900, 37, 500), window=400),
        case("fp8", (900, 0, 300), kv_dtype="e4m3", scales="head"),
        case("rows", (300, 40), block_size=4, **ALL_SCORES),
    ],
    ids=str,
)
def test_no_bit_depends_on_the_cut_or_the_batch(case: Case):
    problem = problem_of(case)
    whole = run(case, problem)
    for num_blocks, unit_pages in ((1, None), (5, 1), (7, 16), (2, 1024)):
        assert_same_bits(whole, run(case, problem, num_blocks=num_blocks, unit_pages=unit_pages))
    assert_same_bits(whole, run(case, problem, num_blocks=5, unit_pages=1, capacity=4))
    for order in ([1], [1, 0, 0]):
        part = replace(
            problem,
            q=problem.q[order],
            block_table=problem.block_table[order],
            seq_lens=problem.seq_lens[order],
        )
        assert_same_bits((whole[0][order], whole[1][order]), run(case, part))


@pytest.mark.emulator
@pytest.mark.parametrize("window", [None, 70])
def test_no_bit_depends_on_the_block_size(window: int | None):
    rng = np.random.default_rng(5)
    s = 200
    q = rng.standard_normal((1, 4, 64)).astype(np.float16)
    rows = [rng.standard_normal((s, 2, 64)).astype(np.float16) for _ in range(2)]
    results = []
    for block_size in (16, 1, 2, 8, 24, 17, 200):
        blocks = -(-s // block_size)
        ids = rng.permutation(blocks + 3)[:blocks].astype(np.int32)
        caches = [np.full((blocks + 3, block_size, 2, 64), np.nan, np.float16) for _ in rows]
        j = np.arange(s)
        for cache, values in zip(caches, rows, strict=True):
            cache[ids[j // block_size], j % block_size] = values
        options = {} if window is None else {"window": window}
        problem = Problem(q, *caches, ids[None], np.array([s], np.int32), options)
        results.append(run(Case("", (s,), dtype="float16"), problem))
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.emulator
def test_a_window_of_all_keys_is_none():
    plain = case("", (333, 64, 0))
    problem = build(plain)
    wide = replace(problem, options={"window": 2**40})
    assert_same_bits(run(plain, problem), run(plain, wide))


@pytest.mark.emulator
def test_of_a_window_only_its_keys_are_read():
    windowed = case("", (700, 20, 64), window=50)
    problem = problem_of(windowed)

    def operator(*, backend: str) -> None:
        run(windowed, problem)

    (launch,) = cd.trace_launch(operator).launches
    for name in ("k_cache", "v_cache"):
        rows = launch[name]["load_bytes"].sum() // (GQA.num_kv_heads * GQA.head_dim * 2)
        assert rows == 50 + 20 + 50


@pytest.mark.emulator
@pytest.mark.parametrize("window", [20, 100, 1000])
def test_the_kernel_cuts_windows_as_the_host_says(window: int):
    """As many partial states are written as the host's schedule counts."""
    from cupy_decode.backends import emulator

    lens = (1500, 300, 0, 900)
    problem = build(case("", lens, window=window))
    spec = fast.spec_of(problem.q, problem.k_cache, window=window)
    space = fast.workspace(emulator, spec, SMALL)
    space.partials[...] = np.nan
    out, lse = np.empty_like(problem.q), np.empty(problem.q.shape[:2], np.float32)
    options = dict(problem.options, scale=1.0, num_blocks=8, out=out, lse=lse, space=space)
    emulator.run(fast.launch(*problem.arrays, **options))
    written = int((~np.isnan(space.partials[:, 0, 0])).sum())
    assert written == fast.schedule(lens, spec, 8, window=window).num_partials


@pytest.mark.emulator
@pytest.mark.parametrize("exponent", [-100, 20, 100])
def test_queries_may_be_beyond_float16_where_the_cache_has_8_bits(exponent: int):
    small = case("", (70, 20), kv_dtype="e4m3")
    problem = build(small)
    first = run(small, problem, scale=0.125)
    factor = ml_dtypes.bfloat16(2.0**exponent)
    scaled = replace(problem, q=problem.q * factor)
    assert_same_bits(first, run(small, scaled, scale=0.125 * 2.0**-exponent))


@pytest.mark.emulator
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_every_value_of_8_bits_counts_as_it_is(kv_dtype: str):
    """One key, so that the output is its value: all 256 bytes, NaN and infinity among them."""
    bytes_ = np.arange(256, dtype=np.uint8).reshape(4, 1, 1, 64)
    k_cache = np.zeros((4, 16, 1, 64), np.uint8)
    v_cache = np.repeat(bytes_, 16, axis=1)
    problem = Problem(
        np.ones((4, 1, 64), np.float16),
        k_cache,
        v_cache,
        np.arange(4, dtype=np.int32)[:, None],
        np.ones(4, np.int32),
        {"kv_dtype": kv_dtype},
    )
    out, _, _ = run(Case("", (1,) * 4, dtype="float16"), problem)
    want = bytes_.view(DTYPES[kv_dtype]).reshape(4, 1, 64).astype(np.float16)
    np.testing.assert_array_equal(out, want)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_visible_nan_of_8_bits_shows(name: str):
    small = case("", (40, 40), kv_dtype="e4m3", dtype="float16")
    problem = build(small)
    row = getattr(problem, name)[problem.block_table[1, 1], 3]
    row[0, 7] = 0x7F
    out, lse, _ = run(small, problem)
    want, want_lse = reference.decode_attention(*problem.arrays, **problem.options)
    assert np.isnan(want).any()
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(want_lse))


@pytest.mark.emulator
def test_a_sink_without_weight_changes_no_bit_and_a_heavy_one_leaves_nothing():
    plain = case("", (100, 0))
    problem = build(plain)
    sinks = np.zeros(8, np.float32)
    sinks[:4], sinks[4:] = -np.inf, 300
    out, lse, _ = run(plain, problem)
    with_sinks, same_lse, _ = run(plain, replace(problem, options={"sinks": sinks}))
    assert_same_bits((out[:, :4], lse), (with_sinks[:, :4], same_lse))
    np.testing.assert_array_equal(with_sinks[:, 4:], 0)


@pytest.mark.emulator
def test_bad_ids_of_small_blocks_become_nan_rows_and_a_record():
    small = case("", (30, 30, 30), block_size=4)
    problem = build(small)
    good = run(small, problem)
    problem.block_table[1, 5] = len(problem.k_cache)
    out, lse, fault = run(small, problem)
    assert np.isnan(out[1].astype(np.float32)).all()
    assert np.isnan(lse[1]).all()
    assert_same_bits((out[::2], lse[::2]), (good[0][::2], good[1][::2]))
    assert fault.tolist() == [1, 1, 5, len(problem.k_cache)]


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_is_close_to_the_reference(case: Case):
    import cupy

    from cupy_decode.backends import cuda

    problem = problem_of(case)
    machine = fast.Machine(cuda.num_sms(), cuda.shared_per_sm())
    out, lse, fault = run(case, problem.to(cupy), runner=cuda, machine=machine)
    expect(problem, out.get(), lse.get())
    assert not fault.any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        case("window", (9000, 37, 5000), MHA, window=4000),
        case("e4m3", (9000, 0, 3000), MHA, kv_dtype="e4m3", scales="head"),
        case("e5m2", (9000, 100), GQA, kv_dtype="e5m2"),
        case("rows", (3000, 40), block_size=1, **ALL_SCORES),
    ],
    ids=str,
)
def test_gpu_no_bit_depends_on_the_cut(case: Case):
    import cupy

    from cupy_decode.backends import cuda

    problem = problem_of(case)
    device = problem.to(cupy)
    machine = fast.Machine(cuda.num_sms(), cuda.shared_per_sm())
    first = run(case, device, runner=cuda, machine=machine)
    expect(problem, first[0].get(), first[1].get())
    for num_blocks, unit_pages in ((1, None), (5, 1), (60, 16), (200, 4)):
        other = run(
            case,
            device,
            runner=cuda,
            machine=machine,
            num_blocks=num_blocks,
            unit_pages=unit_pages,
        )
        assert_same_bits([x.get() for x in first], [x.get() for x in other])
