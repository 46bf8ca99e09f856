"""The float64 twins, against direct formulas, SciPy and the laws of the softmax state."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp

from cupy_decode import reference
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import Partials, SplitPlan

from .problems import paged_problem

HEADS = HeadConfig(6, 2, 16, v_head_dim=12)
LENS = [1, 15, 16, 17, 0, 100]
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def _plans(lens):
    return [
        *(SplitPlan.from_num_splits(lens, n, tile=4) for n in (1, 2, 7, 16, 64)),
        SplitPlan.from_split_size(lens, 16),
        SplitPlan.from_split_size(lens, 33),
        SplitPlan.from_bounds([[0, s // 3, s // 3, s] for s in lens], lens),
    ]


def _key_by_key(problem, b, head, *, scale, window=None, cap=None, slope=0.0, sink=None):
    """One head of one sequence, one key at a time, straight from the definition."""
    k_cache, v_cache = problem["k_cache"], problem["v_cache"]
    block_size = k_cache.shape[1]
    kv_head = head // (problem["q"].shape[1] // k_cache.shape[2])
    s = int(problem["seq_lens"][b])
    scores, values = [], []
    for j in range(s):
        if window is not None and j < s - window:
            continue
        block = problem["block_table"][b, j // block_size]
        at = (block, j % block_size, kv_head)
        x = scale * math.fsum(problem["q"][b, head].astype(float) * k_cache[at].astype(float))
        if cap is not None:
            x = cap * math.tanh(x / cap)
        scores.append(x + slope * (j - (s - 1)))
        values.append(v_cache[at].astype(float))
    if not scores:
        return np.zeros(v_cache.shape[-1]), -np.inf
    lse = logsumexp(scores)
    out = sum(math.exp(x - lse) * v for x, v in zip(scores, values, strict=True))
    share = 1.0 if sink is None else 1 / (1 + math.exp(sink - lse))
    return out * share, lse


OPTIONS = [
    {},
    {"scale": 0.3},
    {"window": 1},
    {"window": 17},
    {"window": 1000},
    {"logits_soft_cap": 1.5},
    {"alibi_slopes": np.linspace(-0.2, 0.5, 6)},
    {"sinks": np.array([0.0, 2.0, -3.0, 5.0, 1.0, -np.inf])},
    {
        "scale": 0.7,
        "window": 20,
        "logits_soft_cap": 2.0,
        "alibi_slopes": np.linspace(0.3, 0.1, 6),
        "sinks": np.linspace(-2, 2, 6),
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_decode_is_the_definition(options):
    problem = paged_problem(1, LENS, HEADS)
    out, lse = reference.decode_attention(**problem, **options)
    assert out.dtype == lse.dtype == np.float64
    for b in range(len(LENS)):
        for head in range(HEADS.num_q_heads):
            want_out, want_lse = _key_by_key(
                problem,
                b,
                head,
                scale=options.get("scale", 0.25),
                window=options.get("window"),
                cap=options.get("logits_soft_cap"),
                slope=options.get("alibi_slopes", np.zeros(6))[head],
                sink=options["sinks"][head] if "sinks" in options else None,
            )
            assert_allclose(out[b, head], want_out, **CLOSE)
            assert_allclose(lse[b, head], want_lse, **CLOSE)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_every_plan_gives_the_dense_result(options):
    problem = paged_problem(2, LENS, HEADS)
    out, lse = reference.decode_attention(**problem, **options)
    for plan in _plans(LENS):
        got_out, got_lse = reference.decode_attention(**problem, plan=plan, **options)
        assert_allclose(got_out, out, **CLOSE)
        assert_allclose(got_lse, lse, **CLOSE)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.data())
def test_any_bounds_give_the_dense_result(seed, seq_len, data):
    begins = sorted(data.draw(st.lists(st.integers(0, seq_len), max_size=6)))
    problem = paged_problem(seed, [seq_len], HEADS, block_size=5)
    plan = SplitPlan.from_bounds([[0, *begins]], [seq_len])
    out, lse = reference.decode_attention(**problem)
    got_out, got_lse = reference.decode_attention(**problem, plan=plan)
    assert_allclose(got_out, out, **CLOSE)
    assert_allclose(got_lse, lse, **CLOSE)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_inputs_are_taken_at_their_own_precision(dtype):
    problem = paged_problem(3, [30, 5], HEADS, dtype=dtype)
    wide = {n: x.astype(np.float64) if x.dtype == dtype else x for n, x in problem.items()}
    for got, want in zip(
        reference.decode_attention(**problem), reference.decode_attention(**wide), strict=True
    ):
        assert_array_equal(got, want)


def test_a_plan_made_for_other_lengths_still_covers_every_key():
    problem = paged_problem(4, LENS, HEADS)
    for planned in ([200] * 6, [0] * 6, [16, 0, 300, 17, 50, 99]):
        plan = SplitPlan.from_num_splits(planned, 5)
        got = reference.decode_attention(**problem, plan=plan)
        for x, y in zip(got, reference.decode_attention(**problem), strict=True):
            assert_allclose(x, y, **CLOSE)


def test_lse_is_scipys_and_one_key_returns_its_value():
    problem = paged_problem(5, [1, 300], HEADS)
    out, lse = reference.decode_attention(**problem)
    table, q, k_cache = problem["block_table"], problem["q"].astype(float), problem["k_cache"]
    assert_array_equal(out[0], problem["v_cache"][table[0, 0], 0].repeat(3, axis=0).astype(float))
    k = reference.gather_kv(k_cache, table[1], 300).astype(float)
    scores = np.einsum("hd,nhd->hn", q[1], k.repeat(3, axis=1)) / 4
    assert_allclose(lse[1], logsumexp(scores, axis=1), **CLOSE)


def test_window_one_is_the_newest_value():
    problem = paged_problem(6, [37], HEADS)
    out, _ = reference.decode_attention(**problem, window=1)
    newest = reference.gather_kv(problem["v_cache"], problem["block_table"][0], 37)[-1]
    assert_array_equal(out[0], newest.repeat(3, axis=0).astype(float))


def test_scores_far_below_zero_keep_their_weights():
    k = -(32 + np.arange(40.0) / 1024)[:, None, None] * np.ones((1, 1, 4)) * 128
    v = np.eye(40)[:, None, :]
    out, lse = reference.dense_attention(np.full((1, 4), 4.0), k, v, scale=1.0)
    want = np.exp(-2.0 * np.arange(40))
    assert_allclose(out[0], want / want.sum(), rtol=1e-12)
    assert_allclose(lse, -65536 + np.log(want.sum()), rtol=1e-15)


# ------------------------------------------------------------------ states


def test_an_empty_split_is_the_identity_state():
    problem = paged_problem(7, [40, 0], HEADS)
    plan = SplitPlan.from_bounds([[0, 10, 10, 25], [0]], [40, 0], capacity=7)
    partials = reference.paged_split_k(**problem, plan=plan, window=20)
    for row in (0, 1, 4):  # before the window, no keys, no sequence
        assert_array_equal(partials.acc[row], 0)
        assert_array_equal(partials.m[row], -np.inf)
        assert_array_equal(partials.l[row], 0)
    assert (partials.l[[2, 3]] > 0).all()
    assert np.isnan(partials.acc[5:]).all()


def test_state_of_a_split_is_in_log2_units():
    problem = paged_problem(8, [50], HEADS)
    plan = SplitPlan.from_bounds([[0, 20]], [50])
    partials = reference.paged_split_k(**problem, plan=plan)
    k = reference.gather_kv(problem["k_cache"], problem["block_table"][0], 20)
    v = reference.gather_kv(problem["v_cache"], problem["block_table"][0], 20)
    out, lse = reference.dense_attention(problem["q"][0], k, v)
    assert_allclose((partials.m[0] + np.log2(partials.l[0])) * math.log(2), lse, **CLOSE)
    assert_allclose(partials.acc[0] / partials.l[0][:, None], out, **CLOSE)
    assert (partials.l[0] >= 1).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38, -1e30])
def test_reduce_reads_neither_unused_rows_nor_what_empty_rows_hold(poison):
    lens = [40, 7]
    problem = paged_problem(9, lens, HEADS)
    plan = SplitPlan.from_bounds([[0, 10, 20], [0, 7]], lens, capacity=9)
    clean = reference.paged_split_k(**problem, plan=plan, window=15)
    want = reference.reduce_splits(clean)
    acc, m, l = clean.acc.copy(), clean.m.copy(), clean.l.copy()  # noqa: E741
    acc[5:], m[5:], l[5:] = poison, poison, poison
    empty = clean.l == 0
    assert empty[:5].sum() == 3 * 6
    acc[empty], m[empty] = poison, poison
    for got, exact in zip(reference.reduce_splits(Partials(acc, m, l, plan)), want, strict=True):
        assert_array_equal(got, exact)


def test_rows_have_the_same_bits_alone_and_in_any_batch():
    lens = [700, 5, 64, 1000, 33, 257, 1, 480]
    problem = paged_problem(10, lens, HEADS)
    batch = reference.decode_attention(**problem, plan=SplitPlan.from_split_size(lens, 128))
    dense = reference.decode_attention(**problem)
    for b, s in enumerate(lens):
        one = {n: x[b : b + 1] if len(x) == 8 else x for n, x in problem.items()}
        assert len(one["k_cache"]) == len(problem["k_cache"])
        alone = reference.decode_attention(**one, plan=SplitPlan.from_split_size([s], 128))
        for got, want in zip(alone, batch, strict=True):
            assert_array_equal(got[0], want[b])
        for got, want in zip(reference.decode_attention(**one), dense, strict=True):
            assert_array_equal(got[0], want[b])


# ------------------------------------------------------------------ merging


def _two_halves(seed, cut, n=60, sinks=None):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((6, 16))
    k, v = rng.standard_normal((n, 2, 16)), rng.standard_normal((n, 2, 12))
    whole = reference.dense_attention(q, k, v, sinks=sinks)
    first = reference.dense_attention(q, k[:cut], v[:cut])
    second = reference.dense_attention(q, k[cut:], v[cut:])
    return first, second, whole


@pytest.mark.parametrize("cut", [0, 1, 30, 60])
def test_merge_of_disjoint_keys_is_attention_over_their_union(cut):
    sinks = np.array([0.0, 2.0, -3.0, 50.0, 1.0, -np.inf])
    for sink in (None, sinks):
        first, second, whole = _two_halves(11, cut, sinks=sink)
        for pair in ((first, second), (second, first)):
            out, lse = reference.merge_states(*pair[0], *pair[1], sinks=sink)
            assert_allclose(out, whole[0], **CLOSE)
            assert_allclose(lse, whole[1], **CLOSE)


@pytest.mark.parametrize("mark", [-np.inf, np.inf])
@pytest.mark.parametrize("junk", [np.nan, np.inf, 3e38])
def test_an_empty_side_is_an_exact_identity(mark, junk):
    out, lse = _two_halves(12, 30)[0]
    nothing = np.full_like(out, junk), np.full_like(lse, mark)
    for got in (
        reference.merge_states(out, lse, *nothing),
        reference.merge_states(*nothing, out, lse),
    ):
        assert_array_equal(got[0], out)
        assert_array_equal(got[1], lse)
    out, lse = reference.merge_states(*nothing, *nothing, sinks=np.zeros(6))
    assert_array_equal(out, 0)
    assert_array_equal(lse, -np.inf)


def test_weight_zero_never_touches_a_nan():
    out, lse = _two_halves(13, 30)[0]
    far = np.full_like(out, np.nan), lse - 1e4
    got = reference.merge_states(out, lse, *far)
    assert_array_equal(got[0], out)
    assert_array_equal(got[1], lse)


def test_a_nan_lse_stays_nan():
    out, lse = _two_halves(14, 30)[0]
    broken = lse.copy()
    broken[2] = np.nan
    got_out, got_lse = reference.merge_states(out, broken, out, lse)
    assert_array_equal(np.isnan(got_lse), np.arange(6) == 2)
    assert_array_equal(np.isnan(got_out).all(axis=1), np.arange(6) == 2)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_merging_is_associative_and_commutative(order):
    rng = np.random.default_rng(15)
    states = [(rng.standard_normal((6, 8)), 20 * rng.standard_normal(6)) for _ in range(3)]
    want = reference.merge_states(*reference.merge_states(*states[0], *states[1]), *states[2])
    a, b, c = (states[i] for i in order)
    got = reference.merge_states(*a, *reference.merge_states(*b, *c))
    assert_allclose(got[0], want[0], **CLOSE)
    assert_allclose(got[1], want[1], **CLOSE)


# ------------------------------------------------------------------ non-finite inputs


@pytest.mark.parametrize("plan_of", [lambda s: None, lambda s: SplitPlan.from_num_splits(s, 4)])
def test_a_nan_score_spoils_its_head_and_nothing_else(plan_of):
    problem = paged_problem(16, [50, 50], HEADS)
    problem["q"][0, 4] = np.nan
    out, lse = reference.decode_attention(**problem, plan=plan_of([50, 50]))
    spoilt = np.zeros((2, 6), bool)
    spoilt[0, 4] = True
    assert_array_equal(np.isnan(lse), spoilt)
    assert_array_equal(np.isnan(out).any(axis=2), spoilt)
    assert_array_equal(np.isnan(out).all(axis=2), spoilt)


@pytest.mark.parametrize("plan_of", [lambda s: None, lambda s: SplitPlan.from_num_splits(s, 4)])
def test_a_nan_key_or_value_outside_the_window_is_never_read(plan_of):
    problem = paged_problem(17, [50], HEADS)
    want = reference.decode_attention(**problem, plan=plan_of([50]), window=10)
    for cache in ("k_cache", "v_cache"):
        for j in range(40):
            problem[cache][problem["block_table"][0, j // 16], j % 16] = np.nan
    problem["block_table"][0, :2] = -1
    got = reference.decode_attention(**problem, plan=plan_of([50]), window=10)
    for x, y in zip(got, want, strict=True):
        assert_array_equal(x, y)


@pytest.mark.parametrize("plan_of", [lambda s: None, lambda s: SplitPlan.from_num_splits(s, 4)])
def test_scores_of_minus_infinity_have_no_weight(plan_of):
    problem = paged_problem(18, [20], HeadConfig(1, 1, 4))
    problem["q"][:] = 1
    problem["k_cache"][problem["block_table"][0, 0], :] = -np.inf
    out, lse = reference.decode_attention(**problem, plan=plan_of([20]))
    k = reference.gather_kv(problem["k_cache"], problem["block_table"][0], 20, begin=16)
    v = reference.gather_kv(problem["v_cache"], problem["block_table"][0], 20, begin=16)
    want = reference.dense_attention(problem["q"][0], k, v)
    assert_allclose(out[0], want[0], **CLOSE)
    assert_allclose(lse[0], want[1], **CLOSE)
    problem["k_cache"][:] = -np.inf
    out, lse = reference.decode_attention(**problem, plan=plan_of([20]), sinks=[0.0])
    assert_array_equal(out, 0)
    assert_array_equal(lse, -np.inf)


# ------------------------------------------------------------------ pages and slots


def test_gather_follows_the_table():
    cache = np.arange(5 * 4 * 1 * 1).reshape(5, 4, 1, 1)
    row = [3, 0, 99]
    assert reference.gather_kv(cache, row, 6).ravel().tolist() == [12, 13, 14, 15, 0, 1]
    assert reference.gather_kv(cache, row, 6, begin=3).ravel().tolist() == [15, 0, 1]
    assert reference.gather_kv(cache, row, 0).shape == (0, 1, 1)


def test_bad_table_entries_are_named():
    problem = paged_problem(19, [20, 40], HEADS)
    problem["block_table"][1, 2] = len(problem["k_cache"])
    with pytest.raises(ValueError, match=r"block_table\[1, 2\] is 7 but the cache has blocks 0..6"):
        reference.decode_attention(**problem)
    problem["block_table"][1, 2] = -1
    with pytest.raises(ValueError, match=r"block_table\[1, 2\] is -1"):
        reference.decode_attention(**problem, plan=SplitPlan.from_num_splits([20, 40], 3))
    problem["block_table"] = problem["block_table"][:, :2]
    with pytest.raises(ValueError, match="block_table row 1 has 2 columns but seq_lens"):
        reference.decode_attention(**problem)


def test_write_kv_fills_slots_and_skips_padding():
    rng = np.random.default_rng(20)
    k_cache, v_cache = (np.zeros((4, 4, 2, n), ml_dtypes.bfloat16) for n in (8, 6))
    k, v = (rng.standard_normal((4, 2, n)).astype(np.float32) for n in (8, 6))
    reference.write_kv(k, v, k_cache, v_cache, np.array([5, -1, 15, -7]))
    for cache, new in ((k_cache, k), (v_cache, v)):
        want = np.zeros_like(cache)
        want[1, 1], want[3, 3] = new[0].astype(want.dtype), new[2].astype(want.dtype)
        assert_array_equal(cache, want)


@pytest.mark.parametrize("slot", [16, 2**31 - 1])
def test_a_slot_past_the_cache_writes_nothing(slot):
    k_cache, v_cache = np.zeros((4, 4, 2, 8)), np.zeros((4, 4, 2, 8))
    new = np.ones((2, 2, 8))
    with pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {slot} but the cache has slots"):
        reference.write_kv(new, new, k_cache, v_cache, [3, slot])
    assert not k_cache.any()
    assert not v_cache.any()
