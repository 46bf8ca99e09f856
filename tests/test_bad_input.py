"""Every backend refuses the same wrong calls, writes nothing, and says what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cupy_decode as cd

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
        _set(
            q=lambda c, xp: xp.zeros((2, 8, 46), "float16"),
            k_cache=lambda c, xp: xp.zeros((9, 16, 2, 46), "float16"),
            v_cache=lambda c, xp: xp.zeros((9, 16, 2, 46), "float16"),
        ),
        ValueError,
        ("head_dim", "multiple of 8", "46", "48"),
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
        ("out must be float32", "float16"),
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
    pytest.param("seq_lens", (0,), -3, ("seq_lens[0]", "-3"), id="negative length"),
    pytest.param("seq_lens", (1,), 10**6, ("seq_lens[1]", "1000000", "widen"), id="long length"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "at", "value", "words"), BAD_VALUES)
def test_bad_contents_are_named(
    name: str, at: tuple[int, ...], value: int, words: tuple[str, ...], backend: str
) -> None:
    problem = build(CASE)
    getattr(problem, name)[at] = value
    placed = problem.to(module_of(backend)) if backend == "cuda" else problem
    for options in ({"num_splits": 1}, {"num_splits": 3}):
        with pytest.raises(ValueError) as raised:  # noqa: PT011  the words are compared below
            cd.decode_attention(*placed.arrays, backend=backend, validate=True, **options)
        assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "at", "value", "words"), BAD_VALUES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_bad_contents_on_the_device_become_nan(
    name: str, at: tuple[int, ...], value: int, words: tuple[str, ...], num_splits: int
) -> None:
    """Unasked, the kernel never follows them: the row is NaN and the others are right."""
    import cupy

    problem = build(CASE)
    clean = cd.reference.decode_attention(*problem.arrays)
    getattr(problem, name)[at] = value
    out, lse = cd.decode_attention(*problem.to(cupy).arrays, num_splits=num_splits)
    bad, good = at[0], 1 - at[0]
    assert cupy.isnan(out[bad]).all()
    assert cupy.isnan(lse[bad]).all()
    np.testing.assert_allclose(out[good].get(), clean[0][good], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse[good].get(), clean[1][good], rtol=1e-6)


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
