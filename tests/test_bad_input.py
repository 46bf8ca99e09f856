"""Every backend refuses the same wrong calls, writes nothing, and says what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import backends

from .decode_cases import Case, Problem, build
from .test_operators import module_of, to_host

BACKENDS = [
    "reference",
    pytest.param("emulator", marks=pytest.mark.emulator),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
CASE = Case("bad-input", (20, 40), cd.HeadConfig(8, 2, 64), num_splits=2)


@dataclass(frozen=True)
class Wrong:
    """One wrong call: what it changes, the error it must raise and words the message must have."""

    name: str
    change: Callable[[dict[str, Any], Any], None]
    error: type[Exception]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def _set(**values: Callable[[dict[str, Any], Any], Any]) -> Callable[[dict[str, Any], Any], None]:
    def change(call: dict[str, Any], xp: Any) -> None:
        for name, make in values.items():
            call[name] = make(call, xp)

    return change


def _head_dim(size: int) -> Callable[[dict[str, Any], Any], None]:
    """Queries and caches of this head_dim."""
    return _set(
        q=lambda c, xp: xp.zeros((2, 8, size), "float16"),
        k_cache=lambda c, xp: xp.zeros((9, 16, 2, size), "float16"),
        v_cache=lambda c, xp: xp.zeros((9, 16, 2, size), "float16"),
    )


WRONG = [
    Wrong(
        "float64 q",
        _set(q=lambda c, xp: c["q"].astype("float64")),
        TypeError,
        ("q must", "float32", "float64"),
    ),
    Wrong(
        "integer cache",
        _set(k_cache=lambda c, xp: xp.zeros(c["k_cache"].shape, "int32")),
        TypeError,
        ("k_cache", "int32"),
    ),
    Wrong(
        "caches of two types",
        _set(v_cache=lambda c, xp: c["v_cache"].astype("float16")),
        TypeError,
        ("v_cache", "float16"),
    ),
    Wrong(
        "a table of floats",
        _set(block_table=lambda c, xp: c["block_table"].astype("float32")),
        TypeError,
        ("block_table", "int32", "float32"),
    ),
    Wrong(
        "unsigned lengths",
        _set(seq_lens=lambda c, xp: c["seq_lens"].astype("uint32")),
        TypeError,
        ("seq_lens", "int32", "uint32"),
    ),
    Wrong(
        "an int64 table too large to convert on every call",
        _set(block_table=lambda c, xp: xp.zeros((2, 2**19 + 1), "int64")),
        TypeError,
        ("block_table", "1048578 entries", "convert it once"),
    ),
    Wrong(
        "a list of fractions",
        _set(seq_lens=lambda c, xp: [20.0, 40.5]),
        TypeError,
        ("seq_lens must hold integers", "float64"),
    ),
    Wrong(
        "a list of booleans",
        _set(seq_lens=lambda c, xp: [True, True]),
        TypeError,
        ("seq_lens must hold integers", "bool"),
    ),
    Wrong(
        "rows of a table of different widths",
        _set(block_table=lambda c, xp: [[0, 1], [2]]),
        ValueError,
        ("block_table", "rectangular"),
    ),
    Wrong("a number for lengths", _set(seq_lens=lambda c, xp: 20), TypeError, ("seq_lens", "int")),
    Wrong(
        "q without heads",
        _set(q=lambda c, xp: c["q"][:, 0]),
        ValueError,
        ("q must have axes", "(2, 64)"),
    ),
    Wrong(
        "q with an axis for its one token",
        _set(q=lambda c, xp: c["q"][:, None]),
        ValueError,
        ("q must have axes", "(2, 1, 8, 64)", "one query token a sequence; give it no axis"),
    ),
    Wrong(
        "heads that do not divide",
        _set(q=lambda c, xp: c["q"][:, :7]),
        ValueError,
        ("num_kv_heads 2", "num_q_heads 7"),
    ),
    Wrong(
        "fewer query than KV heads",
        _set(q=lambda c, xp: c["q"][:, :1]),
        ValueError,
        ("num_kv_heads 2", "num_q_heads 1"),
    ),
    Wrong(
        "head_dim of q and k differ",
        _set(q=lambda c, xp: c["q"][..., :32]),
        ValueError,
        ("k_cache", "64", "32"),
    ),
    Wrong(
        "head_dim not a multiple",
        _head_dim(46),
        ValueError,
        ("head_dim", "multiple of 8", "46", "48"),
    ),
    Wrong(
        "head_dim beyond the largest",
        _head_dim(640),
        ValueError,
        ("from 8 to 576", "got 640: no kernel here is written for longer rows"),
    ),
    Wrong(
        "caches with the heads before the slots",
        _set(
            k_cache=lambda c, xp: xp.zeros((9, 3, 8, 64), "float32"),
            v_cache=lambda c, xp: xp.zeros((9, 3, 8, 64), "float32"),
            q=lambda c, xp: xp.zeros((2, 12, 64), "float32"),
            out=lambda c, xp: None,
        ),
        ValueError,
        ("num_kv_heads 8, axis 2 of k_cache", "(9, 3, 8, 64)", ".transpose(0, 2, 1, 3)"),
    ),
    Wrong(
        "v_cache of other blocks",
        _set(v_cache=lambda c, xp: c["v_cache"][:-1]),
        ValueError,
        ("v_cache", "num_blocks"),
    ),
    Wrong(
        "table of another batch",
        _set(block_table=lambda c, xp: c["block_table"][:1]),
        ValueError,
        ("block_table", "batch"),
    ),
    Wrong(
        "lengths of another batch",
        _set(seq_lens=lambda c, xp: c["seq_lens"][:1]),
        ValueError,
        ("seq_lens", "batch"),
    ),
    Wrong(
        "rows not contiguous",
        _set(k_cache=lambda c, xp: xp.concatenate([c["k_cache"]] * 2, 3)[..., ::2]),
        ValueError,
        ("k_cache", "contiguous along its last axis"),
    ),
    Wrong(
        "misaligned cache",
        _set(k_cache=lambda c, xp: xp.concatenate([c["k_cache"]] * 2, 3)[..., 1:65]),
        ValueError,
        ("k_cache", "16 bytes", "multiple of 4 elements"),
    ),
    Wrong(
        "plan of another batch",
        _set(plan=lambda c, xp: cd.plan_splits([5], "llama-3-8b")),
        ValueError,
        ("batch of 1", "2 sequences"),
    ),
    Wrong(
        "plan is not a plan",
        _set(plan=lambda c, xp: [0, 1, 2]),
        TypeError,
        ("plan must be a SplitPlan", "list"),
    ),
    Wrong(
        "plan and num_splits",
        _set(plan=lambda c, xp: CASE.plan(), num_splits=lambda c, xp: 2),
        ValueError,
        ("plan", "num_splits"),
    ),
    Wrong(
        "num_splits and split_size",
        _set(num_splits=lambda c, xp: 2, split_size=lambda c, xp: 64),
        ValueError,
        ("num_splits or split_size, not both",),
    ),
    Wrong(
        "no splits",
        _set(num_splits=lambda c, xp: 0),
        ValueError,
        ("num_splits must be at least 1", "0"),
    ),
    Wrong(
        "half a split",
        _set(num_splits=lambda c, xp: 1.5),
        TypeError,
        ("num_splits must be an integer", "1.5"),
    ),
    Wrong(
        "negative split_size",
        _set(split_size=lambda c, xp: -4),
        ValueError,
        ("split_size must be at least 1",),
    ),
    Wrong(
        "window of 0", _set(window=lambda c, xp: 0), ValueError, ("window must be at least 1", "0")
    ),
    Wrong(
        "negative soft cap",
        _set(logits_soft_cap=lambda c, xp: -3.0),
        ValueError,
        ("logits_soft_cap", "positive", "-3"),
    ),
    Wrong(
        "infinite scale",
        _set(scale=lambda c, xp: float("inf")),
        ValueError,
        ("scale must be finite",),
    ),
    Wrong(
        "scale is text",
        _set(scale=lambda c, xp: "0.1"),
        TypeError,
        ("scale must be a real number", "str"),
    ),
    Wrong(
        "slopes per KV head",
        _set(alibi_slopes=lambda c, xp: xp.ones(2, "float32")),
        ValueError,
        ("alibi_slopes", "num_q_heads", "(2,)"),
    ),
    Wrong(
        "float64 sinks",
        _set(sinks=lambda c, xp: xp.zeros(8, "float64")),
        TypeError,
        ("sinks", "float32"),
    ),
    Wrong(
        "out of another shape",
        _set(out=lambda c, xp: xp.zeros((2, 8, 32), "float32")),
        ValueError,
        ("out must have shape", "(2, 8, 32)"),
    ),
    Wrong(
        "out of another type",
        _set(out=lambda c, xp: xp.zeros((2, 8, 64), "float16")),
        TypeError,
        ("out must be float32", "float16: allocate it as float32"),
    ),
    Wrong(
        "bytes of no type",
        _set(
            k_cache=lambda c, xp: xp.zeros((9, 16, 2, 64), "uint8"),
            v_cache=lambda c, xp: xp.zeros((9, 16, 2, 64), "uint8"),
        ),
        TypeError,
        ("k_cache is uint8", "kv_dtype", "'e4m3'"),
    ),
    Wrong(
        "bytes of an unknown type",
        _set(kv_dtype=lambda c, xp: "fp8"),
        ValueError,
        ("kv_dtype must be one of", "e4m3", "'fp8'"),
    ),
    Wrong(
        "bytes of an unknown 8-bit type",
        _set(
            k_cache=lambda c, xp: xp.zeros((9, 16, 2, 64), "uint8"),
            v_cache=lambda c, xp: xp.zeros((9, 16, 2, 64), "uint8"),
            kv_dtype=lambda c, xp: "fp8",
        ),
        ValueError,
        ("kv_dtype must be one of e4m3, e5m2;", "'fp8'"),
    ),
    Wrong(
        "a list of slopes",
        _set(alibi_slopes=lambda c, xp: [0.5] * 8),
        TypeError,
        ("alibi_slopes must be a NumPy or CuPy array", "numpy.asarray(x, 'float32')"),
    ),
    Wrong(
        "a cache that is not what kv_dtype says",
        _set(kv_dtype=lambda c, xp: "e5m2"),
        TypeError,
        ("k_cache is float32", "e5m2", "leave kv_dtype out"),
    ),
    Wrong(
        "8-bit rows of 12",
        _set(
            q=lambda c, xp: xp.zeros((2, 8, 12), "float16"),
            k_cache=lambda c, xp: xp.zeros((9, 16, 2, 12), "uint8"),
            v_cache=lambda c, xp: xp.zeros((9, 16, 2, 12), "uint8"),
            kv_dtype=lambda c, xp: "e4m3",
        ),
        ValueError,
        ("head_dim", "multiple of 8", "e4m3", "12", "16"),
    ),
    Wrong(
        "k_scale of 0", _set(k_scale=lambda c, xp: 0.0), ValueError, ("k_scale must be positive",)
    ),
    Wrong(
        "negative v_scale",
        _set(v_scale=lambda c, xp: np.float32(-0.5)),
        ValueError,
        ("v_scale must be positive", "-0.5"),
    ),
    Wrong(
        "k_scale that is not a number",
        _set(k_scale=lambda c, xp: float("nan")),
        ValueError,
        ("k_scale must be finite",),
    ),
    Wrong(
        "k_scale is a flag",
        _set(k_scale=lambda c, xp: True),
        TypeError,
        ("k_scale must be a real number", "bool"),
    ),
    Wrong(
        "k_scale is a list",
        _set(k_scale=lambda c, xp: [1.0, 2.0]),
        TypeError,
        ("k_scale must be a real number or a float32 array", "list", "numpy.asarray"),
    ),
    Wrong(
        "v_scale per query head",
        _set(v_scale=lambda c, xp: xp.ones(8, "float32")),
        ValueError,
        ("v_scale", "(num_kv_heads,) = (2,)", "(8,)"),
    ),
    Wrong(
        "v_scale in float64",
        _set(v_scale=lambda c, xp: xp.ones(2, "float64")),
        TypeError,
        ("v_scale must be float32",),
    ),
    Wrong(
        "scale is a flag",
        _set(scale=lambda c, xp: True),
        TypeError,
        ("scale must be a real number", "bool"),
    ),
    Wrong(
        "complex scale",
        _set(scale=lambda c, xp: 1j),
        TypeError,
        ("scale must be a real", "complex"),
    ),
    Wrong(
        "scale is a list",
        _set(scale=lambda c, xp: [0.1]),
        TypeError,
        ("scale must be a real", "list"),
    ),
    Wrong(
        "scale beyond float32",
        _set(scale=lambda c, xp: 1e300),
        ValueError,
        ("scale must be finite in float32", "1e+300"),
    ),
    Wrong(
        "scales that are finite one by one",
        _set(scale=lambda c, xp: 1e30, k_scale=lambda c, xp: 1e30),
        ValueError,
        ("scale times k_scale must be finite in float32",),
    ),
    Wrong(
        "soft cap that is 0 in float32",
        _set(logits_soft_cap=lambda c, xp: 1e-46),
        ValueError,
        ("logits_soft_cap must be positive",),
    ),
    Wrong(
        "window is a flag",
        _set(window=lambda c, xp: True),
        TypeError,
        ("window must be an integer", "bool"),
    ),
    Wrong(
        "window is a float of whole value",
        _set(window=lambda c, xp: 1.0),
        TypeError,
        ("window must be an integer", "float"),
    ),
    Wrong(
        "num_splits per sequence",
        _set(num_splits=lambda c, xp: [1, 2]),
        TypeError,
        ("num_splits must be an integer", "list"),
    ),
    Wrong(
        "out overlaps itself",
        _set(out=lambda c, xp: xp.broadcast_to(xp.zeros((1, 1, 64), "float32"), (2, 8, 64))),
        ValueError,
        ("out must not overlap itself",),
    ),
    Wrong(
        "out is q",
        _set(out=lambda c, xp: c["q"]),
        ValueError,
        ("out must not share memory with q",),
    ),
    Wrong(
        "out lies in the cache",
        _set(out=lambda c, xp: c["v_cache"].reshape(-1)[: 2 * 8 * 64].reshape(2, 8, 64)),
        ValueError,
        ("out must not share memory with v_cache",),
    ),
    Wrong(
        "bytes in the other order",
        _set(q=lambda c, xp: np.asarray(to_host(c["q"])).astype(">f4")),
        TypeError,
        ("q",),
    ),
    Wrong(
        "a cache that starts between vectors",
        _set(
            k_cache=lambda c, xp: xp.zeros(c["k_cache"].size + 1, "float32")[1:].reshape(
                c["k_cache"].shape
            )
        ),
        ValueError,
        ("k_cache", "16 bytes", "address"),
    ),
    Wrong(
        "caches with a head too few",
        _set(
            k_cache=lambda c, xp: c["k_cache"][:, :, :0],
            v_cache=lambda c, xp: c["v_cache"][:, :, :0],
        ),
        ValueError,
        ("k_cache must have blocks and heads",),
    ),
    Wrong(
        "caches with blocks of 0",
        _set(k_cache=lambda c, xp: c["k_cache"][:, :0], v_cache=lambda c, xp: c["v_cache"][:, :0]),
        ValueError,
        ("k_cache must have blocks and heads",),
    ),
    Wrong(
        "a cache of five axes",
        _set(k_cache=lambda c, xp: c["k_cache"][None]),
        ValueError,
        ("k_cache must have axes", "num_blocks, block_size"),
    ),
    Wrong(
        "a plan of int64",
        _set(
            plan=lambda c, xp: cd.SplitPlan(
                np.arange(3, dtype=np.int64), np.zeros(2, np.int64), unsplit=True
            )
        ),
        TypeError,
        ("plan.split_offsets must be int32",),
    ),
    Wrong(
        "unknown backend",
        _set(backend=lambda c, xp: "gpu"),
        ValueError,
        ("backend", "'gpu'", "cuda"),
    ),
]


def _call(problem: Problem, backend: str) -> dict[str, Any]:
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
    return dict(zip(names, problem.arrays, strict=True), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_refused_with_words_that_help(wrong: Wrong, backend: str) -> None:
    xp = module_of(backend)
    problem = build(CASE)
    call = _call(problem.to(xp) if backend == "cuda" else problem, backend)
    out = xp.full((2, 8, 64), 7.0, np.float32)
    call["out"] = out
    wrong.change(call, xp)
    with pytest.raises(wrong.error) as raised:
        cd.decode_attention(**call)
    missing = [word for word in wrong.words if word not in str(raised.value)]
    assert not missing, f"{raised.value} lacks {missing}"
    assert (to_host(out) == 7.0).all()


BAD_VALUES = [
    pytest.param("block_table", (1, 1), 10**6, ("block_table[1, 1]", "1000000"), id="far block"),
    pytest.param("block_table", (0, 0), -1, ("block_table[0, 0]", "-1"), id="negative block"),
    pytest.param(
        "seq_lens",
        (0,),
        -3,
        ("seq_lens[0]", "-3: the length of a sequence without keys"),
        id="negative length",
    ),
    pytest.param(
        "seq_lens", (1,), 10**6, ("1000000", "widen", "map_to_kernel_blocks"), id="long length"
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "at", "value", "words"), BAD_VALUES)
def test_bad_contents_are_named(
    name: str, at: tuple[int, ...], value: int, words: tuple[str, ...], backend: str
) -> None:
    problem = build(replace(CASE, dtype="float16"))
    getattr(problem, name)[at] = value
    placed = problem.to(module_of(backend)) if backend == "cuda" else problem
    for options in ({"num_splits": 1}, {"num_splits": 3}, {"kernel": "fast"}):
        with pytest.raises(ValueError) as raised:  # noqa: PT011  the words are compared below
            cd.decode_attention(*placed.arrays, backend=backend, validate=True, **options)
        assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "at", "value", "words"), BAD_VALUES)
@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_bad_contents_on_the_device_become_nan(
    name: str, at: tuple[int, ...], value: int, words: tuple[str, ...], num_splits: int | None
) -> None:
    """Unasked, the kernel never follows them: the row is NaN and the others are right."""
    import cupy

    problem = build(replace(CASE, dtype="float16"))
    clean = cd.reference.decode_attention(*problem.arrays)
    getattr(problem, name)[at] = value
    out, lse = cd.decode_attention(*problem.to(cupy).arrays, num_splits=num_splits)
    bad, good = at[0], 1 - at[0]
    assert cupy.isnan(out[bad]).all()
    assert cupy.isnan(lse[bad]).all()
    np.testing.assert_allclose(out[good].get(), clean[0][good], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(lse[good].get(), clean[1][good], rtol=1e-6)


RIGHT_FIRST = [
    ("window", 1, True),
    ("window", 1, 1.0),
    ("scale", 1, True),
    ("logits_soft_cap", 1.0, True),
    ("k_scale", 1.0, True),
    ("num_splits", 1, True),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "right", "wrong"), RIGHT_FIRST)
def test_what_equals_a_right_value_is_refused_after_it(
    name: str, right: Any, wrong: Any, backend: str
) -> None:
    """A call that was checked before is not checked again, but True is not 1."""
    problem = build(CASE)
    arrays = (problem.to(module_of(backend)) if backend == "cuda" else problem).arrays
    cd.decode_attention(*arrays, backend=backend, **{name: right})
    with pytest.raises(TypeError, match=f"{name} must be"):
        cd.decode_attention(*arrays, backend=backend, **{name: wrong})
    if backend != "reference" and name != "num_splits":
        step = cd.DecodeStep(
            CASE.heads, CASE.plan().to(module_of(backend)), np.float32, backend=backend
        )
        step(*arrays, **{name: right})
        with pytest.raises(TypeError, match=f"{name} must be"):
            step(*arrays, **{name: wrong})


BAD_NUMBERS = [
    ("sinks", np.inf, "sinks[3] must be finite or -inf"),
    ("sinks", np.nan, "sinks[3] must be finite or -inf"),
    ("alibi_slopes", np.inf, "alibi_slopes[3] must be finite"),
    ("alibi_slopes", np.nan, "alibi_slopes[3] must be finite"),
    ("k_scale", 0.0, "k_scale[1, 1] must be positive and finite"),
    ("v_scale", np.nan, "v_scale[1, 1] must be positive and finite"),
    ("v_scale", -1.0, "v_scale[1, 1] must be positive and finite"),
    ("v_scale", np.inf, "v_scale[1, 1] must be positive and finite"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "value", "words"), BAD_NUMBERS)
def test_numbers_that_make_no_sense_are_named(
    name: str, value: float, words: str, backend: str
) -> None:
    problem = build(CASE)
    numbers = np.ones((2, 2) if "scale" in name else 8, np.float32)
    numbers.reshape(-1)[3] = value
    problem.options[name] = numbers
    placed = problem.to(module_of(backend)) if backend == "cuda" else problem
    with pytest.raises(ValueError, match=re.escape(words)):
        cd.decode_attention(*placed.arrays, backend=backend, validate=True, **placed.options)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_read_only_arrays_are_not_written(backend: str) -> None:
    problem = build(CASE)
    out = np.zeros((2, 8, 64), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable"):
        cd.decode_attention(*problem.arrays, out=out, backend=backend)
    problem.k_cache.flags.writeable = False
    rows = [np.ones((1, 2, 64), np.float32)] * 2
    caches = problem.k_cache, problem.v_cache
    with pytest.raises(ValueError, match="k_cache must be writable"):
        cd.write_kv(*rows, *caches, np.array([0]), backend=backend)
    # what is only read may be read-only
    for array in problem.arrays:
        array.flags.writeable = False
    cd.decode_attention(*problem.arrays, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_strides_that_are_no_whole_elements_are_refused(backend: str) -> None:
    """Fields of packed records: a stride of 6 bytes is no number of float32."""
    problem = build(CASE)
    record = np.dtype([("x", np.int32), ("pad", np.int16)])
    for name in ("q", "block_table", "seq_lens"):
        array = getattr(problem, name)
        packed = np.zeros(array.shape, record if array.dtype == np.int32 else
                          np.dtype([("x", np.float32), ("pad", np.int16)]))  # fmt: skip
        packed["x"] = array
        call = _call(problem, backend) | {name: packed["x"]}
        with pytest.raises(ValueError, match=f"{name} must step in whole elements of 4 bytes"):
            cd.decode_attention(**call)


@pytest.mark.emulator
@pytest.mark.parametrize("backend", [BACKENDS[1]])
def test_kernels_do_not_take_float64_for_float32(backend: str) -> None:
    out, lse = np.ones((4, 2, 8), np.float32), np.zeros((4, 2), np.float32)
    with pytest.raises(TypeError, match="lse_b must be float32; got float64"):
        cd.merge_states(out, lse, out, lse.astype(np.float64), backend="emulator")
    states = cd.Partials(
        out.astype(np.float64), lse, lse, cd.SplitPlan.from_num_splits([64, 64], 2)
    )
    with pytest.raises(TypeError, match=r"partials.acc must be float32; got float64"):
        cd.reduce_splits(states, backend="emulator")


@pytest.mark.parametrize("backend", BACKENDS)
def test_stages_and_steps_refuse_what_does_not_fit(backend: str) -> None:
    xp = module_of(backend)
    problem = build(CASE)
    arrays = (problem.to(xp) if backend == "cuda" else problem).arrays
    with pytest.raises(TypeError, match="plan must be a SplitPlan; got None"):
        cd.paged_split_k(*arrays, None, backend=backend)
    with pytest.raises(TypeError, match="partials must be a Partials; got tuple"):
        cd.reduce_splits((1, 2, 3), backend=backend)
    states = cd.paged_split_k(*arrays, CASE.plan(), backend=backend)
    with pytest.raises(TypeError, match="dtype must be one of float32, float16, bfloat16"):
        cd.reduce_splits(states, dtype=np.int32, backend=backend)
    if backend == "reference":
        return
    plan = CASE.plan().to(xp, capacity=80)
    with pytest.raises(ValueError, match=r"partials hold \d+ rows but the plan's capacity is 80"):
        cd.paged_split_k(*arrays, plan, partials=states, backend=backend)
    step = cd.DecodeStep(CASE.heads, CASE.plan().to(xp), np.float16, backend=backend)
    with pytest.raises(TypeError, match="q must be float16, as this step was made; got float32"):
        step(*arrays)
    other = cd.HeadConfig(4, 2, 64)
    step = cd.DecodeStep(other, CASE.plan().to(xp), np.float32, backend=backend)
    with pytest.raises(ValueError, match=r"of this step = \(2, 4, 64\); got \(2, 8, 64\)"):
        step(*arrays)
    other = cd.HeadConfig(8, 4, 64)
    step = cd.DecodeStep(other, CASE.plan().to(xp), np.float32, backend=backend)
    with pytest.raises(ValueError, match=r"made for HeadConfig.*num_kv_heads=4.*caches have"):
        step(*arrays)
    step = cd.DecodeStep(CASE.heads, CASE.plan().to(xp), np.float32, backend=backend)
    with pytest.raises(TypeError, match="seq_lens must be int32; got uint32"):
        step(*arrays[:4], arrays[4].astype(np.uint32))


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_step_takes_the_integers_that_a_call_takes(backend: str) -> None:
    xp = module_of(backend)
    problem = build(CASE)
    arrays = (problem.to(xp) if backend == "cuda" else problem).arrays
    step = cd.DecodeStep(CASE.heads, CASE.plan().to(xp), np.float32, backend=backend)
    want = [to_host(x).copy() for x in step(*arrays)]
    table, lens = (to_host(x) for x in arrays[3:])
    for other in (
        (table.tolist(), lens.tolist()),
        (arrays[3].astype(np.int64), arrays[4].astype(np.int64)),
    ):
        got = step(*arrays[:3], *other)
        assert [to_host(x).tobytes() for x in got] == [x.tobytes() for x in want]


def test_a_step_is_refused_when_it_is_made() -> None:
    plan, made = CASE.plan(), dict(backend="emulator")
    half = cd.DecodeStep(CASE.heads, plan, np.float16, kernel="fast", deterministic=True, **made)
    assert half.plan is plan
    for error, words, options in (
        (ValueError, "kernel must be .* got 'mma'", dict(plan=plan, kernel="mma", **made)),
        (ValueError, "plan is set", dict(plan=plan, kernel="fast", dtype="float16", **made)),
        (ValueError, "q is float32", dict(plan=None, batch=2, kernel="fast", **made)),
        (ValueError, "backend must be .* got 'gpu'", dict(plan=None, batch=2, backend="gpu")),
        (TypeError, "use backend='emulator'", dict(plan=None, batch=2, backend="reference")),
        (TypeError, "use backend='emulator'", dict(plan=plan)),
    ):
        with pytest.raises(error, match=words):
            cd.DecodeStep(CASE.heads, **{"dtype": np.float32, **options})


def test_heads_and_types_that_are_none_are_named() -> None:
    lens, heads = [40, 70], (8, 2, 64)
    for call in (
        lambda: cd.DecodeStep(heads, None, np.float16, "emulator", batch=2),  # type: ignore[arg-type]
        lambda: cd.plan_splits(lens, heads),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"heads must be a HeadConfig, such as HeadConfig\("):
            call()
    with pytest.raises(TypeError, match=r"dtype must be a NumPy dtype, .* got 'fp16'"):
        cd.DecodeStep(CASE.heads, None, "fp16", "emulator", batch=2)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_8_bit_types_are_called_by_names_that_exist(backend: str) -> None:
    """NumPy has no 'e4m3'."""
    q, k_cache, v_cache, *rest = build(CASE).arrays
    k_cache = k_cache.astype(ml_dtypes.float8_e4m3fn)
    words = "k_cache's type, e4m3; got e5m2: fill both caches with one type"
    other = v_cache.astype(ml_dtypes.float8_e5m2)
    with pytest.raises(TypeError, match=words):
        cd.decode_attention(q, k_cache, other, *rest, backend=backend)
    rows, slots = k_cache[0, :2], np.arange(2)
    v_cache = v_cache.astype(k_cache.dtype)
    with pytest.raises(TypeError, match=r"k must be e4m3; .*\.astype\(ml_dtypes\.float8_e4m3fn\)"):
        cd.write_kv(rows.astype(np.float32), rows, k_cache, v_cache, slots, backend=backend)


@pytest.mark.usefixtures("no_cupy")
def test_a_step_without_cupy_says_what_runs_instead() -> None:
    with pytest.raises(backends.BackendUnavailableError, match=r"CuPy.*backend='emulator' runs"):
        cd.DecodeStep(CASE.heads, None, np.float16, batch=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "block_table", "seq_lens"])
def test_what_is_no_array_is_named(name: str, backend: str) -> None:
    problem = build(CASE)
    arrays = (problem.to(module_of(backend)) if backend == "cuda" else problem).arrays
    given = dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), arrays, strict=True))
    calls: list[Callable[..., Any]] = [
        lambda **arrays: cd.decode_attention(**arrays, backend=backend),
        lambda **arrays: cd.paged_split_k(**arrays, plan=CASE.plan(), backend=backend),
    ]
    if backend != "reference":
        calls.append(cd.DecodeStep(CASE.heads, None, np.float32, backend=backend, batch=2))
    for call in calls:
        with pytest.raises(TypeError, match=f"{name} must be a NumPy or CuPy array; got None"):
            call(**{**given, name: None})
        if name in ("q", "k_cache", "v_cache"):
            with pytest.raises(TypeError, match=f"{name} must be .* array; got list: convert"):
                call(**{**given, name: [[1.0]]})
    if backend != "reference":
        with pytest.raises(TypeError, match="q must be a NumPy or CuPy array; got None"):
            calls[-1](**dict.fromkeys(given))


def test_missing_operands_are_named() -> None:
    out, lse = np.zeros((4, 2, 8), np.float32), np.zeros((4, 2), np.float32)
    with pytest.raises(TypeError, match="lse_a must be a NumPy or CuPy array; got None"):
        cd.merge_states(out, None, out, lse)
    with pytest.raises(TypeError, match="slot_mapping must be a NumPy or CuPy array; got None"):
        cd.write_kv(out, out, out[None], out[None], None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_merges_keep_outputs_apart(backend: str) -> None:
    xp = module_of(backend)
    whole = xp.ones((5, 2, 8), np.float32)
    lse = xp.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match="out must not share memory with out_a"):
        cd.merge_states(whole[:4], lse, xp.ones((4, 2, 8), np.float32), lse, out=whole[1:],
                        backend=backend)  # fmt: skip
    # exactly one of the operands is fine
    a, b = xp.full((4, 2, 8), 3.0, np.float32), xp.ones((4, 2, 8), np.float32)
    out, _ = cd.merge_states(a, lse, b, lse, out=a, backend=backend)
    assert out is a
    np.testing.assert_allclose(to_host(a), 2.0, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_beyond_int32_are_refused_by_their_number(backend: str) -> None:
    xp = module_of(backend)
    caches = [xp.full((3, 4, 2, 8), 7.0, np.float32) for _ in range(2)]
    rows = [xp.ones((1, 2, 8), np.float32) for _ in range(2)]
    slots = xp.asarray(np.array([2**32 + 3], np.int64))
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] must be below 12") as raised:
        cd.write_kv(*rows, *caches, slots, backend=backend, validate=True)
    assert "got 3:" not in str(raised.value)
    assert not str(raised.value).endswith("got 3")
    broadcast = xp.broadcast_to(caches[0][:1], (3, 4, 2, 8))
    with pytest.raises(ValueError, match="k_cache must not overlap itself"):
        cd.write_kv(*rows, broadcast, caches[1], xp.zeros(1, np.int64), backend=backend)
    assert all((to_host(c) == 7.0).all() for c in caches)


@pytest.mark.parametrize("backend", BACKENDS)
def test_write_kv_refuses_slots_past_the_cache(backend: str) -> None:
    xp = module_of(backend)
    caches = [xp.full((3, 4, 2, 8), 7.0, np.float32) for _ in range(2)]
    rows = [xp.ones((2, 2, 8), np.float32) for _ in range(2)]
    slots = xp.asarray(np.array([-1, 12], np.int64))
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] must be below 12.*got 12"):
        cd.write_kv(*rows, *caches, slots, backend=backend, validate=True)
    assert all((to_host(c) == 7.0).all() for c in caches)


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_and_reduce_refuse_shapes_that_do_not_fit(backend: str) -> None:
    xp = module_of(backend)
    out, lse = xp.ones((4, 2, 8), np.float32), xp.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"lse_b must have shape \(tokens, num_q_heads\)"):
        cd.merge_states(out, lse, out, lse[:3], backend=backend)
    with pytest.raises(TypeError, match="out_b must be float32"):
        cd.merge_states(out, lse, out.astype(np.float16), lse, backend=backend)
    plan = cd.SplitPlan.from_num_splits([64, 64], 4)
    states = cd.Partials(out[:3], lse[:3], lse[:3], plan)
    with pytest.raises(ValueError, match="3 rows but their plan has 8"):
        cd.reduce_splits(states, backend=backend)


def test_a_backend_never_changes_silently() -> None:
    problem = build(CASE)
    with pytest.raises(TypeError, match="backend='cuda' needs CuPy arrays but got NumPy"):
        cd.decode_attention(*problem.arrays, backend="cuda")


def test_plans_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="needs 8 rows but capacity is 4"):
        cd.SplitPlan.from_num_splits([64, 64], 4, capacity=4)
    plan = cd.SplitPlan.from_num_splits([64], 2).to(np, capacity=3)
    before = plan.split_begin.copy()
    with pytest.raises(ValueError, match="needs 4 rows but capacity is 3"):
        plan.assign(cd.SplitPlan.from_num_splits([64], 4))
    with pytest.raises(ValueError, match="for batch 1; got one for batch 2"):
        plan.assign(cd.SplitPlan.from_num_splits([64, 1], 1))
    np.testing.assert_array_equal(plan.split_begin, before)
    for bounds in ([[1, 5]], [[0, 9, 5]], [[0, 65]], [[]]):
        with pytest.raises(ValueError, match=r"bounds\[0\] must start with 0, never decrease"):
            cd.SplitPlan.from_bounds(bounds, [64])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "block_table", "seq_lens"])
def test_arrays_that_start_between_elements_are_refused(name: str, backend: str) -> None:
    xp = module_of(backend)
    problem = build(CASE)
    call = _call(problem.to(xp) if backend == "cuda" else problem, backend)
    array = xp.ascontiguousarray(call[name])
    raw = xp.zeros(array.nbytes + 1, np.uint8)
    raw[1:] = array.reshape(-1).view(np.uint8)
    call[name] = raw[1:].view(array.dtype).reshape(array.shape)
    with pytest.raises(ValueError, match=f"{name} must start and step in multiples of 4 bytes"):
        cd.decode_attention(**call)


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("emulator", marks=pytest.mark.emulator)]
)
def test_a_table_that_reaches_past_int32_is_refused(backend: str) -> None:
    """Key numbers are int32 in the kernels, and they look ahead of the last one."""
    cache = np.zeros((1, 2**20, 1, 8), np.float16)
    table, lens = np.zeros((1, 2048), np.int32), np.array([2**31 - 1], np.int32)
    with pytest.raises(ValueError, match=r"block_table must reach at most 2147483551 keys a row"):
        cd.decode_attention(
            np.zeros((1, 1, 8), np.float16), cache, cache, table, lens, window=40, backend=backend
        )


def test_int64_host_tables_stay_on_the_host_side() -> None:
    """What an int32 array on the wrong side is refused for, an int64 one is refused for too."""
    from cupy_decode import checks

    class Like:
        __module__ = "cupy"
        data = None

    table = np.array([[1, 2]], np.int64)
    assert isinstance(checks.integers("block_table", table, Like()), np.ndarray)
