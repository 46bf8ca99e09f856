"""How operators may be called: strides, integer types, number types, outputs, empty batches."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_decode as cd

from .decode_cases import Case, Problem, build, on_device
from .test_operators import expect, module_of, to_host

BACKENDS = [
    "reference",
    pytest.param("emulator", marks=pytest.mark.emulator),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
CASE = Case("calls", (20, 0, 41), cd.HeadConfig(8, 2, 64), num_splits=2)
#: One split, several, and none asked for: with 16-bit types that is the fast kernel's.
RULES: tuple[dict[str, Any], ...] = ({"num_splits": 1}, {"num_splits": 3}, {})
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float16"])


def placed(problem: Problem, backend: str) -> Problem:
    return problem.to(module_of(backend)) if backend == "cuda" else problem


def put(array: Any, backend: str) -> Any:
    return on_device(array, module_of(backend)) if backend == "cuda" else array


def apart(array: np.ndarray, axis: int, step: int = 3) -> np.ndarray:
    """The same values every ``step`` places along an axis of a buffer of junk."""
    shape = list(array.shape)
    shape[axis] *= step
    wide = np.full(shape, -7, array.dtype)
    index = [slice(None)] * array.ndim
    index[axis] = slice(1, None, step)
    wide[tuple(index)] = array
    return wide[tuple(index)]


def turned(array: np.ndarray) -> np.ndarray:
    """The same values, stored with the axes in the opposite order."""
    return np.ascontiguousarray(array.T).T


STRIDED: dict[str, dict[str, Any]] = {
    "q apart along heads": dict(q=lambda x: apart(x, 1)),
    "q apart along its last axis": dict(q=lambda x: apart(x, 2)),
    "q turned": dict(q=turned),
    "q backwards": dict(q=lambda x: x[::-1, :, ::-1].copy()[::-1, :, ::-1]),
    "table apart along columns": dict(block_table=lambda x: apart(x, 1)),
    "table turned": dict(block_table=turned),
    "table wide": dict(block_table=lambda x: apart(x, 0)),
    "lengths apart": dict(seq_lens=lambda x: apart(x, 0)),
    "lengths backwards": dict(seq_lens=lambda x: x[::-1].copy()[::-1]),
    "caches backwards": dict(
        k_cache=lambda x: x[::-1].copy()[::-1], v_cache=lambda x: x[:, ::-1].copy()[:, ::-1]
    ),
    "everything at once": dict(
        q=turned, block_table=turned, seq_lens=lambda x: apart(x, 0), k_cache=lambda x: apart(x, 1)
    ),
}


@every_backend
@every_dtype
@pytest.mark.parametrize("changes", STRIDED.values(), ids=STRIDED)
def test_strides_are_followed(changes: dict[str, Any], dtype: str, backend: str) -> None:
    problem = build(replace(CASE, dtype=dtype))
    problem = replace(problem, **{n: f(getattr(problem, n)) for n, f in changes.items()})
    for options in RULES:
        result = cd.decode_attention(*placed(problem, backend).arrays, backend=backend, **options)
        expect(problem, *map(to_host, result))


@every_backend
@pytest.mark.parametrize("num_splits", [1, 3, None])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_outputs_of_any_strides_and_of_float32(
    dtype: Any, num_splits: int | None, backend: str
) -> None:
    problem = build(replace(CASE, dtype="bfloat16"))
    clean = np.full((3, 8, 64), 7, dtype)
    for shape in (lambda x: x, turned, lambda x: apart(x, 2), lambda x: apart(x, 0)):
        host = shape(clean)
        out = put(host, backend)
        got, lse = cd.decode_attention(
            *placed(problem, backend).arrays, num_splits=num_splits, out=out, backend=backend
        )
        assert got is out
        expect(problem, to_host(out).copy(), to_host(lse))


@every_backend
@pytest.mark.parametrize("form", ["int64", "list", "tuple"])
def test_other_integers_are_converted(form: str, backend: str) -> None:
    problem = build(replace(CASE, dtype="float16"))
    given = placed(problem, backend)

    def other(x: Any) -> Any:
        if form == "int64":
            return x.astype(np.int64)
        return {"list": list, "tuple": tuple}[form](to_host(x).tolist())

    table, lens = other(given.block_table), other(given.seq_lens)
    for options in (*RULES, {"plan": CASE.plan()}):
        result = cd.decode_attention(
            given.q, given.k_cache, given.v_cache, table, lens, backend=backend, **options
        )
        expect(problem, *map(to_host, result))
    states = cd.paged_split_k(*given.arrays[:3], table, lens, CASE.plan(), backend=backend)
    expect(problem, *map(to_host, cd.reduce_splits(states, backend=backend)))


@every_backend
def test_integers_beyond_int32_do_not_wrap(backend: str) -> None:
    """2**32 + 20 is no length of 20, and 2**32 no block 0."""
    for name, at, words in (("seq_lens", 0, "seq_lens[0]"), ("block_table", (0, 0), "[0, 0]")):
        problem = build(CASE)
        wide = getattr(problem, name).astype(np.int64)
        wide[at] += 2**32
        given = placed(replace(problem, **{name: wide}), backend)
        with pytest.raises(ValueError) as raised:  # noqa: PT011  the words are compared below
            cd.decode_attention(*given.arrays, num_splits=2, backend=backend, validate=True)
        assert words in str(raised.value)


NUMBERS = (float, np.float32, np.float64, np.float16, ml_dtypes.bfloat16, Fraction)


@every_backend
def test_numbers_of_any_type_mean_the_same(backend: str) -> None:
    problem = build(CASE)
    arrays = placed(problem, backend).arrays

    def run(**options: Any) -> list[np.ndarray]:
        return [to_host(x) for x in cd.decode_attention(*arrays, backend=backend, **options)]

    def same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)

    want = run(scale=0.125, logits_soft_cap=30.0, k_scale=0.5, v_scale=2.0, num_splits=3, window=9)
    for real in NUMBERS:
        for whole in (int, np.int32, np.int64, np.uint8):
            got = run(
                scale=real(0.125),
                logits_soft_cap=real(30),
                k_scale=real(0.5),
                v_scale=real(2),
                num_splits=whole(3),
                window=whole(9),
            )
            same(got, want)
    same(run(scale=1, num_splits=2), run(scale=1.0, num_splits=2))
    for huge in (2**31 - 1, 2**31, 2**40):
        same(run(window=huge, num_splits=huge), run(num_splits=64))
        same(run(split_size=huge), run(num_splits=1))


@every_backend
def test_scales_of_every_form_mean_the_same(backend: str) -> None:
    problem = build(CASE)
    arrays = placed(problem, backend).arrays
    forms: list[Any] = [0.25]
    for shape in ((), (1,), (2,), (3, 2)):
        forms.append(np.full(shape, 0.25, np.float32))
    forms.append(np.full((6, 5), 0.25, np.float32)[::2, 1:4:2])
    results = []
    for form in forms:
        value = put(form, backend) if isinstance(form, np.ndarray) and form.ndim else form
        if isinstance(form, np.ndarray) and not form.ndim:
            value = module_of(backend).asarray(form)
        for options in (dict(k_scale=value), dict(v_scale=value)):
            result = cd.decode_attention(*arrays, num_splits=2, backend=backend, **options)
            results.append([to_host(x) for x in result])
    for i, result in enumerate(results):
        for got, want in zip(result, results[i % 2], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@every_backend
@every_dtype
def test_an_empty_batch_gives_empty_results(dtype: str, backend: str) -> None:
    problem = build(replace(CASE, dtype=dtype))
    given = placed(problem, backend)
    empty = [given.q[:0], given.k_cache, given.v_cache, given.block_table[:0], given.seq_lens[:0]]
    sinks = {"sinks": put(np.zeros(8, np.float32), backend)}
    for options in ({}, {"num_splits": 4}, sinks):
        out, lse = cd.decode_attention(*empty, backend=backend, **options)
        assert out.shape == (0, 8, 64)
        assert lse.shape == (0, 8)
    merged = cd.merge_states(out, lse, out, lse, backend=backend)
    assert merged[0].shape == (0, 8, 64)
    assert merged[1].shape == (0, 8)
    caches = given.k_cache, given.v_cache
    rows = put(np.zeros((0, 2, 64), dtype), backend)
    cd.write_kv(rows, rows, *caches, put(np.zeros(0, np.int64), backend), backend=backend)


@every_backend
@every_dtype
def test_a_table_without_columns_serves_sequences_without_keys(dtype: str, backend: str) -> None:
    problem = build(replace(CASE, seq_lens=(0, 0), extra_columns=0, dtype=dtype))
    assert problem.block_table.shape == (2, 0)
    for options in RULES:
        arrays = placed(problem, backend).arrays
        out, lse = cd.decode_attention(*arrays, backend=backend, **options)
        assert not to_host(out).any()
        assert np.isneginf(to_host(lse)).all()


@every_backend
@every_dtype
def test_what_is_not_finite_in_keys_shows_in_the_result(dtype: str, backend: str) -> None:
    """NaN and inf in what is visible reach the output in the same places as in float64."""
    junk = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
    for name, value in junk.items():
        for where in ("q", "k_cache", "v_cache"):
            problem = build(replace(CASE, dtype=dtype))
            if where == "q":
                problem.q[2, 3, 5] = value
            else:
                block = problem.block_table[2, 1]
                getattr(problem, where)[block, 4, 1, 7] = value
            ref = cd.reference.decode_attention(*problem.arrays)
            for options in RULES:
                given = placed(problem, backend)
                result = cd.decode_attention(*given.arrays, backend=backend, **options)
                for got, want in zip(map(to_host, result), ref, strict=True):
                    for test in (np.isnan, np.isposinf, np.isneginf):
                        np.testing.assert_array_equal(test(got), test(want), f"{name} in {where}")


@every_backend
@every_dtype
@pytest.mark.parametrize("num_splits", [1, 4, None])
def test_scores_of_minus_infinity_have_no_weight(
    num_splits: int | None, dtype: str, backend: str
) -> None:
    """Keys of -inf are as good as absent; where all are, the row is empty."""
    problem = build(replace(CASE, seq_lens=(40, 40), dtype=dtype))
    problem.q[...] = np.abs(problem.q) + 1
    keys = [(problem.block_table[0, j // 16], j % 16) for j in range(40)]
    for block, slot in keys[:30]:
        problem.k_cache[block, slot] = -np.inf
    for j in range(40):
        problem.k_cache[problem.block_table[1, j // 16], j % 16] = -np.inf
    given = placed(problem, backend)
    result = cd.decode_attention(*given.arrays, num_splits=num_splits, backend=backend)
    out, lse = map(to_host, result)
    assert not out[1].any()
    assert np.isneginf(lse[1]).all()
    with np.errstate(invalid="ignore"):
        expect(problem, out, lse)


# ---------------------------------------------------------------------- which kernel


@every_backend
def test_a_call_says_which_kernel_ran_and_why(backend: str) -> None:
    def explained(dtype: str, **options: Any) -> cd.Explanation:
        given = placed(build(replace(CASE, dtype=dtype)), backend)
        *results, said = cd.decode_attention(
            *given.arrays, explain=True, backend=backend, **options
        )
        assert len(results) == 2
        return said

    fast, wide, split = (
        explained("float16"),
        explained("float32"),
        explained("float16", num_splits=3),
    )
    for said, word in ((fast, "written for"), (wide, "float32"), (split, "num_splits is set")):
        assert word in said.why
        assert backend in str(said)
    assert explained("float16", kernel="readable").why == "kernel='readable' asks for it"
    if backend == "reference":
        assert not fast.kernels
        assert "With backend='emulator' the kernels run" in str(fast)
        return
    assert fast.kernels == ("paged_split_k_mma",)
    assert fast.is_fast
    assert "paged_split_k_mma on a grid of" in str(fast)
    assert split.kernels[-2:] == ("paged_split_k", "reduce_splits")
    assert not split.is_fast
    assert "num_splits, at most 3 of a sequence" in str(split)
    assert "first-wave rule of this package, at most" in wide.split_rule
    assert "split_size, 16 keys each" in str(explained("float32", split_size=16))
    ignored = explained("float16", num_splits=3, deterministic=True)
    assert ignored.is_fast
    assert "num_splits is ignored" in ignored.split_rule
    assert explained("float32", plan=CASE.plan()).num_splits == (2, 1, 2)
    if backend == "emulator":
        assert split.num_splits == (2, 1, 3)
        assert "Number of splits, by sequence: 2, 1, 3." in str(split)
        assert fast.units == (1, 1, 1)
        assert fast.leaf_keys == (32, 32, 32)
    given = placed(build(CASE), backend)
    _, said = cd.decode_attention(*given.arrays, explain=True, return_lse=False, backend=backend)
    assert isinstance(said, cd.Explanation)


@every_backend
def test_a_kernel_is_taken_or_refused_as_asked(backend: str) -> None:
    half = placed(build(replace(CASE, dtype="float16")), backend).arrays
    wide = placed(build(CASE), backend).arrays
    cd.decode_attention(*half, kernel="fast", backend=backend)
    for arrays, options, words in (
        (wide, {}, "q is float32"),
        (half, {"num_splits": 2}, "num_splits is set"),
        (half, {"plan": CASE.plan()}, "plan is set"),
    ):
        with pytest.raises(ValueError, match=f"kernel='fast' .*{words}.* kernel='auto'"):
            cd.decode_attention(*arrays, kernel="fast", backend=backend, **options)
    with pytest.raises(ValueError, match="kernel must be 'auto', 'fast' or 'readable'; got 'mma'"):
        cd.decode_attention(*half, kernel="mma", backend=backend)  # type: ignore[arg-type]


@every_backend
def test_queries_that_start_between_words_go_to_the_readable_kernel(backend: str) -> None:
    problem = build(replace(CASE, dtype="float16"))
    given = placed(problem, backend)
    xp = module_of(backend)
    room = xp.zeros(problem.q.size + 1, np.float16)
    for first in (0, 1):
        q = room[first : first + problem.q.size].reshape(problem.q.shape)
        q[...] = given.q
        odd = q.ctypes.data % 4 if xp is np else q.data.ptr % 4
        arrays = (q, *given.arrays[1:])
        out, lse, said = cd.decode_attention(*arrays, explain=True, backend=backend)
        expect(problem, to_host(out), to_host(lse))
        if backend != "reference":
            assert said.is_fast == (odd == 0)
        if odd:
            with pytest.raises(ValueError, match="kernel='fast', q must start and step in multi"):
                cd.decode_attention(*arrays, kernel="fast", backend=backend)
