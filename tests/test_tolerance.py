"""The error bound accepts what a kernel of the same precision does and nothing worse."""

import ml_dtypes
import numpy as np
import pytest

from cupy_decode import reference, tolerance
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import SplitPlan

from .problems import paged_problem

HEADS = HeadConfig(8, 2, 64)
LENS = [250, 17, 64, 0]
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def _kernel_like(problem, num_splits, **options):
    """Float32 states of each split, merged in float32, output in q's dtype."""
    wide = {n: x.astype(np.float32) if x.dtype.kind != "i" else x for n, x in problem.items()}
    plan = SplitPlan.from_num_splits(problem["seq_lens"], num_splits)
    partials = reference.paged_split_k(**wide, plan=plan, **options)
    states = [x.astype(np.float32) for x in (partials.acc, partials.m, partials.l)]
    out, lse = reference.reduce_splits(type(partials)(*states, plan))
    return out.astype(problem["q"].dtype), lse.astype(np.float32)


@pytest.fixture(params=DTYPES, ids=lambda d: np.dtype(d).name)
def case(request):
    problem = paged_problem(1, LENS, HEADS, dtype=request.param)
    want = reference.decode_attention(**problem)
    return problem, want, tolerance.bound(**problem, ref_out=want[0], ref_lse=want[1])


@pytest.mark.parametrize("num_splits", [1, 7])
def test_same_precision_passes(case, num_splits):
    problem, want, allowed = case
    tolerance.assert_close(*_kernel_like(problem, num_splits), *want, allowed)
    for integer_maxima in (False, True):
        twin = tolerance.twin_decode(**problem, integer_maxima=integer_maxima)
        tolerance.assert_close(*twin, *want, allowed)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_scale_one_percent_off_fails_in_out_and_in_lse(case, factor):
    problem, want, allowed = case
    wrong = _kernel_like(problem, 7, scale=factor / 8)
    with pytest.raises(AssertionError, match=r"out: largest error .* worst at \("):
        tolerance.assert_close(wrong[0], want[1], *want, allowed)
    with pytest.raises(AssertionError, match="lse: largest error"):
        tolerance.assert_close(want[0], wrong[1], *want, allowed)


def test_bound_is_tight(case):
    problem, want, allowed = case
    unit = tolerance.ulp(np.abs(want[0]).max(), problem["q"].dtype)
    assert 2 * unit <= allowed.out_max <= 12 * unit
    assert allowed.lse_max < 1e-5


@pytest.mark.parametrize(
    ("value", "kind"), [(np.nan, "NaN"), (np.inf, r"\+inf"), (-np.inf, "-inf")]
)
def test_non_finite_values_are_compared_by_position(case, value, kind):
    _, want, allowed = case
    out = want[0].copy()
    out[1, 3, 5] = value
    with pytest.raises(AssertionError, match=rf"out: {kind} in 1 wrong places, first at \(1, 3, 5"):
        tolerance.assert_close(out, want[1], *want, allowed)
    lse = want[1].copy()
    lse[3, 2] = 0.0
    with pytest.raises(AssertionError, match=r"lse: -inf in 1 wrong places, first at \(3, 2\)"):
        tolerance.assert_close(want[0], lse, *want, allowed)
    spoilt = want[0].copy()
    spoilt[1, 3, 5] = value
    tolerance.assert_close(spoilt, want[1], spoilt, want[1], allowed)


def test_worst_coordinate_and_both_values_are_named(case):
    _, want, allowed = case
    out = want[0].copy()
    out[2, 1, 7] += 1.0
    with pytest.raises(AssertionError, match=r"worst at \(2, 1, 7\): got .* reference "):
        tolerance.assert_close(out, want[1], *want, allowed)
    with pytest.raises(AssertionError, match=r"out has shape \(4, 8, 63\)"):
        tolerance.assert_close(want[0][..., 1:], want[1], *want, allowed)


def test_all_options_reach_the_twin():
    options = {
        "scale": 0.2,
        "window": 40,
        "logits_soft_cap": 3.0,
        "alibi_slopes": np.linspace(0.0, 0.1, 8),
        "sinks": np.linspace(-1, 3, 8),
    }
    problem = paged_problem(2, LENS, HEADS)
    want = reference.decode_attention(**problem, **options)
    for name in options:
        fewer = {n: x for n, x in options.items() if n != name}
        out, _ = tolerance.twin_decode(**problem, **fewer)
        assert np.abs(out - want[0]).max() > 1e-3
    for integer_maxima in (False, True):
        out, lse = tolerance.twin_decode(**problem, **options, integer_maxima=integer_maxima)
        assert np.abs(out - want[0]).max() < 2e-6
        finite = np.isfinite(want[1])
        assert np.abs(lse[finite] - want[1][finite]).max() < 2e-6


def test_ulp():
    assert tolerance.ulp(1.5, np.float32) == np.spacing(np.float32(1.5))
    assert tolerance.ulp(0.3, np.float16) == np.spacing(np.float16(0.3))
    assert tolerance.ulp(1.0, ml_dtypes.bfloat16) == 2.0**-7
    assert tolerance.ulp(0.0, np.float32) > 0
