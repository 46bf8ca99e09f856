"""The tree of sums in NumPy: the same bits from any partition, and those of the kernel's merge."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_decode import fast, reference, tree
from cupy_decode.heads import HeadConfig

from .problems import paged_problem

FIELDS = ("m", "l", "w", "acc")


def bits(state: tree.States) -> list[bytes]:
    return [np.ascontiguousarray(getattr(state, name)).tobytes() for name in FIELDS]


def random_states(rng: np.random.Generator, n: int, spread: int, dim: int = 5) -> tree.States:
    """States of leaves whose maxima are up to ``spread`` apart; some hold no key."""
    m = rng.integers(-spread, 1, n).astype(np.float32)
    l, w = (rng.uniform(0.5, 9, n).astype(np.float32) for _ in range(2))  # noqa: E741
    acc = rng.standard_normal((n, dim)).astype(np.float32)
    none = rng.random(n) < 0.1
    m[none], l[none], w[none], acc[none] = -np.inf, 0, 0, -0.0
    return tree.States(m, l, w, acc)


def merged(leaves: tree.States, cuts: list[int]) -> tree.States:
    """Runs between the cuts folded one by one, and their subtrees merged."""
    edges = [0, *sorted(cuts), len(leaves)]
    runs = pairwise(edges)
    return tree.merge_subtrees(t for run in runs for t in tree.fold_range(leaves, *run))


# ---------------------------------------------------------------------- the property


@given(st.data(), st.integers(1, 70), st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 40, 90]))
@settings(max_examples=150, deadline=None)
def test_no_bit_depends_on_the_partition(data: Any, n: int, seed: int, spread: int):
    leaves = random_states(np.random.default_rng(seed), n, spread)
    cuts = data.draw(st.lists(st.integers(0, n), max_size=n))
    assert bits(merged(leaves, cuts)) == bits(tree.fold(leaves))


@given(st.data(), st.integers(0, 200))
def test_subtrees_are_aligned_maximal_and_cover_the_range(data: Any, n: int):
    begin = data.draw(st.integers(0, n))
    end = data.draw(st.integers(begin, n))
    leaves = tree.States(*(np.zeros(n, np.float32),) * 3, np.zeros((n, 1), np.float32))
    found = tree.fold_range(leaves, begin, end)
    assert [i for t in found for i in range(t.first, t.first + t.width)] == [*range(begin, end)]
    for t in found:
        assert t.first % t.width == 0
        parent = t.first - t.first % (2 * t.width)
        assert parent < begin or parent + 2 * t.width > end, "its parent would have fitted"


def test_float_maxima_do_not_have_the_property():
    rng = np.random.default_rng(0)
    q, (k, v) = rng.standard_normal(16), rng.standard_normal((2, 96, 16))
    for integer_maxima in (True, False):
        leaves = tree.leaf_states(q, k, v, 4, integer_maxima=integer_maxima)
        assert len(leaves) == 24
        results = {tuple(bits(merged(leaves, [cut]))) for cut in range(1, 24)}
        assert (len(results) == 1) is integer_maxima


def test_the_order_of_additions_matters():
    """Exact rescales alone are not enough: a plain running sum has other bits."""
    leaves = random_states(np.random.default_rng(1), 64, 5)
    running = leaves[:1]
    for i in range(1, 64):
        running = tree.add(running, leaves[i : i + 1])
    assert bits(running) != bits(tree.fold(leaves))


def test_a_missing_sibling_must_be_minus_zero():
    zero = tree.States(*(np.zeros(1, np.float32),) * 3, np.full((1, 1), -0.0, np.float32))
    assert np.signbit(tree.add(zero, tree.empty(1)).acc).all()
    assert not np.signbit(np.float32(-0.0) + np.float32(0.0))


def test_below_2_to_the_minus_126_the_property_ends():
    """Values of 0 beside a sum that is brought to the edge: half of one unit in its last place."""
    x = np.float32(0.75) + np.float32(2**-24)
    for lowest, same in ((-100, True), (-125, True), (-126, False)):
        m = np.array([0, 0, lowest, lowest], np.float32)
        acc = np.array([[0], [0], [x], [x]], np.float32)
        ones = np.ones(4, np.float32)
        leaves = tree.States(m, ones, ones, acc)
        whole, parts = tree.fold(leaves), merged(leaves, [1, 2, 3])
        assert (bits(whole) == bits(parts)) is same, lowest
        assert abs(whole.acc - parts.acc) <= 2.0**-149
    # Beside an operand that is not as small, nothing of it is left to differ.
    ordinary = np.array([[1], [0], [x], [x]], np.float32)
    leaves = tree.States(m, ones, ones, ordinary)
    assert bits(tree.fold(leaves)) == bits(merged(leaves, [1, 2, 3]))


def test_weights_are_exact_powers_of_two():
    below = np.arange(0, 140, dtype=np.float32)
    found = tree.weight(-below, np.zeros(1, np.float32))
    expected = [2.0**-i if i <= 126 else 0.0 for i in range(140)]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    inf = np.full(1, -np.inf, np.float32)
    assert tree.weight(inf, inf) == 0
    assert tree.weight(inf, np.zeros(1, np.float32)) == 0


# ---------------------------------------------------------------------- what the sums are


@pytest.mark.parametrize("seq_len", [0, 1, 7, 64, 333])
def test_the_result_is_attention(seq_len: int):
    rng = np.random.default_rng(seq_len)
    q, (k, v) = rng.standard_normal(32), rng.standard_normal((2, seq_len, 32))
    out, lse = tree.result(tree.fold(tree.leaf_states(q, k, v, 8)))
    want, want_lse = reference.dense_attention(q[None], k[:, None], v[:, None])
    np.testing.assert_allclose(out, want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want_lse[0], rtol=1e-6)


@pytest.mark.parametrize("window", [1, 16, 17, 100, 333, 1000])
def test_a_window_counts_its_leaves_from_its_first_page(window: int):
    rng = np.random.default_rng(window)
    q, (k, v) = rng.standard_normal(32), rng.standard_normal((2, 333, 32))
    leaves = tree.leaf_states(q, k, v, 16, window=window)
    assert len(leaves) == len(fast.visible_pages(333, window))
    out, lse = tree.result(tree.fold(leaves))
    want, want_lse = reference.dense_attention(q[None], k[:, None], v[:, None], window=window)
    np.testing.assert_allclose(out, want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want_lse[0], rtol=1e-6)


def test_bad_input():
    leaves = random_states(np.random.default_rng(0), 6, 3)
    with pytest.raises(ValueError, match="got 2 and 7"):
        tree.fold_range(leaves, 2, 7)
    with pytest.raises(ValueError, match="after leaf 0 comes leaf 2"):
        tree.merge_subtrees(tree.fold_range(leaves, 2, 6))
    with pytest.raises(ValueError, match="empty"):
        tree.merge_subtrees([])
    with pytest.raises(ValueError, match="multiple"):
        tree.merge_subtrees([tree.Subtree(i, w, leaves[:1]) for i, w in ((0, 1), (1, 2))])
    with pytest.raises(ValueError, match="leaf_keys"):
        tree.leaf_states([1.0], [[1.0]], [[1.0]], 0)
    with pytest.raises(ValueError, match="window must be at least 1"):
        tree.leaf_states([1.0], [[1.0]], [[1.0]], 1, window=0)
    with pytest.raises(ValueError, match="2 keys but v has 1"):
        tree.leaf_states([1.0], np.ones((2, 1)), np.ones((1, 1)), 1)


# ---------------------------------------------------------------------- the kernel's merge


def run_kernel(
    problem: dict[str, np.ndarray], unit_pages: int, options: dict[str, Any]
) -> tuple[np.ndarray, ...]:
    """(out, lse, partial states) in the emulator; states that nobody wrote are NaN."""
    from cupy_decode.backends import emulator

    q = problem["q"]
    spec = fast.spec_of(q, problem["k_cache"], **options)
    space = fast.workspace(emulator, spec, fast.Machine(num_sms=8))
    space.partials[...] = np.nan
    out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
    scale = q.shape[2] ** -0.5
    options = dict(options, scale=scale, num_blocks=4, unit_pages=unit_pages)
    launch = fast.launch(**problem, out=out, lse=lse, space=space, **options)
    emulator.run(launch)
    return out, lse, space.partials


def states_of(partials: np.ndarray, units: int, kv_head: int, row: int) -> tree.States:
    """The units of one query head: rows of m, l, w, an unused float and acc."""
    rows = partials[kv_head * units : (kv_head + 1) * units, row]
    assert not np.isnan(rows[:, [0, 1, 2]]).any()
    return tree.States(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 4:])


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("heads", "seq_len", "options"),
    [
        (HeadConfig(4, 1, 64), 1500, {}),
        (HeadConfig(4, 2, 64), 1400, {}),
        (HeadConfig(2, 2, 128), 1290, {}),
        (HeadConfig(4, 1, 64), 1500, {"window": 990}),
        (HeadConfig(4, 1, 64), 2700, {"kv_dtype": "e4m3"}),
    ],
    ids=str,
)
def test_from_the_kernels_own_states_come_the_kernels_bits(
    heads: HeadConfig, seq_len: int, options: dict[str, Any]
):
    problem = paged_problem(3, [seq_len], heads, dtype=np.float16)
    problem["q"] *= 4  # maxima that differ
    if "kv_dtype" in options:
        for name in ("k_cache", "v_cache"):
            problem[name] = problem[name].astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    spec = fast.spec_of(
        problem["q"], problem["k_cache"], block_table=problem["block_table"], **options
    )
    pages = len(fast.visible_pages(seq_len, options.get("window")))
    leaf_block = spec.readers * spec.leaf_pages(pages)
    blocks = -(-pages // leaf_block)
    assert blocks > 4
    out, lse, smallest = run_kernel(problem, leaf_block, options)
    for width in (2, 4):  # leaf blocks of a unit
        units = -(-blocks // width)
        other, _, larger = run_kernel(problem, width * leaf_block, options)
        assert other.tobytes() == out.tobytes()
        for head in range(heads.num_q_heads):
            where = divmod(head, spec.group_size)
            leaves = states_of(smallest, blocks, *where)
            stored = states_of(larger, units, *where)
            for i in range(units):
                folded = tree.fold(leaves[i * width : (i + 1) * width])
                assert bits(folded) == bits(stored[i : i + 1])
    maxima = set()
    for head in range(heads.num_q_heads):
        leaves = states_of(smallest, blocks, *divmod(head, spec.group_size))
        maxima |= set(leaves.m.tolist())
        found, found_lse = tree.result(tree.fold(leaves))
        assert found.astype(np.float16).tobytes() == out[0, head].tobytes()
        np.testing.assert_allclose(found_lse, lse[0, head], rtol=3e-7)
    assert len(maxima) > 2


@pytest.mark.emulator
def test_the_kernels_leaves_of_a_window_are_these():
    """Its partial states of single leaf blocks, against those of NumPy's leaves."""
    seq_len, window = 1500, 990
    problem = paged_problem(4, [seq_len], HeadConfig(1, 1, 64), dtype=np.float16)
    pages = fast.visible_pages(seq_len, window)
    leaf = fast.leaf_pages(len(pages), 1)
    spec = fast.spec_of(
        problem["q"], problem["k_cache"], block_table=problem["block_table"], window=window
    )
    leaf_block = spec.readers * leaf
    _, _, partials = run_kernel(problem, leaf_block, {"window": window})
    k, v = (
        reference.gather_kv(problem[name], problem["block_table"][0], seq_len)[:, 0]
        for name in ("k_cache", "v_cache")
    )
    leaves = tree.leaf_states(
        problem["q"][0, 0], k, v, leaf * fast.PAGE, window=window, weights_dtype=np.float16
    )
    units = -(-len(pages) // leaf_block)
    found = states_of(partials, units, 0, 0)
    for i in range(units):
        want = tree.fold(leaves[i * spec.readers : (i + 1) * spec.readers])
        np.testing.assert_array_equal(found.m[i], want.m[0])
        np.testing.assert_allclose(found.l[i], want.l[0], rtol=1e-4)
        np.testing.assert_allclose(found.acc[i], want.acc[0], atol=2e-2)
