"""The readable kernels along a tree: no bit depends on the split; shards, accuracy, the limit."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import checks, grid, tolerance, tree

from . import same_bits
from .decode_cases import Case, build
from .problems import paged_problem
from .same_bits import Setting, Subject

#: Pairs of the slice; the environment asks for more.
COUNT = int(os.environ.get("CUPY_DECODE_SAME_BITS", "100"))
SMALL = cd.HeadConfig(4, 2, 64)
BACKENDS = [
    pytest.param("emulator", marks=pytest.mark.emulator),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def host(*arrays: Any) -> list[np.ndarray]:
    return [x if isinstance(x, np.ndarray) else x.get() for x in arrays]


def placed(backend: str, given: dict[str, Any]) -> dict[str, Any]:
    if backend != "cuda":
        return given
    import cupy

    return {name: cupy.asarray(x) for name, x in given.items()}


def on_host(partials: cd.Partials) -> cd.Partials:
    acc, m, l, width = host(partials.acc, partials.m, partials.l, partials.width)  # noqa: E741
    return cd.Partials(acc, m, l, partials.plan.to_host(), width)


# ---------------------------------------------------------------------- the sweep


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_pairs_agree_in_every_bit(backend: str) -> None:
    chosen = same_bits.groups(COUNT, 1, backend, 700)
    wrong = [pair for group in chosen for pair in same_bits.differences(group, backend)]
    assert not wrong, "\n".join(wrong)


def test_the_sweep_covers_what_it_should() -> None:
    for backend in ("emulator", "cuda"):
        found = same_bits.coverage(same_bits.groups(400, 0, backend, 700))
        kinds, changed = found["kinds"], found["changed"]
        assert found["pairs"] == 400
        assert kinds["several subtrees of one split"] >= 100
        names = [*(f"{t} cache" for t in ("float16", "bfloat16", "e4m3", "e5m2")), "window"]
        assert min(kinds[name] for name in (*names, "sinks", "fast", "readable")) >= 30
        assert set(changed) == {*Setting.__dataclass_fields__}
        assert min(changed.values()) >= 30
        hows = {s.how for g in same_bits.groups(400, 0, backend, 700) for s in g.settings}
        assert hows == set(same_bits.HOWS[backend])


@pytest.mark.emulator
def test_a_split_that_moves_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sweep without the tree."""
    ordinary = cd.decode_attention

    def loose(*args: Any, deterministic: bool, **options: Any) -> Any:
        return ordinary(*args, **options)

    monkeypatch.setattr(cd, "decode_attention", loose)
    who = Subject("readable", "float16", "float16", cd.HeadConfig(8, 2, 64), 600)
    group = same_bits.Group(who, (Setting(), Setting(splits="7"), Setting(mates=(50,))))
    (found,) = same_bits.differences(group, "emulator")
    assert "splits='7'" in found


# ---------------------------------------------------------------------- the twin


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    ("heads", "dtype"), [(SMALL, np.float16), (cd.HeadConfig(3, 1, 80), np.float32)], ids=str
)
def test_from_the_kernels_own_leaves_come_the_kernels_bits(
    backend: Any, heads: cd.HeadConfig, dtype: Any, window: int | None
) -> None:
    lens = [1000, 130]
    given = paged_problem(3, lens, heads, dtype=dtype)
    given["q"] *= 4  # maxima that differ
    given = placed(backend, given)

    def states(plan: cd.SplitPlan) -> cd.Partials:
        call = dict(plan=plan, window=window, deterministic=True, backend=backend)
        return cd.paged_split_k(**given, **call)

    single = states(cd.SplitPlan.from_split_size(lens, grid.MIN_LEAF))
    leaves = on_host(single)
    assert leaves.width.max() == 1
    for plan in (cd.SplitPlan.from_num_splits(lens, 3), cd.SplitPlan.from_num_splits(lens, 1)):
        raw = states(plan)
        larger = on_host(raw)
        assert larger.width.max() > 1
        out, lse = host(*cd.reduce_splits(raw, backend=backend))
        for b, head in np.ndindex(2, heads.num_q_heads):
            own = tree.subtrees(leaves, b, head)
            first = [one.state for one in own]
            names = ("m", "l", "w", "acc")
            all_leaves = tree.States(
                *(np.concatenate([getattr(one, name) for one in first]) for name in names)
            )
            for found in tree.subtrees(larger, b, head):
                want = tree.fold(all_leaves[found.first : found.first + found.width])
                for name in names:
                    got = getattr(found.state, name)
                    assert got.tobytes() == getattr(want, name).tobytes(), (found.first, name)
            merged = tree.merge_subtrees(tree.subtrees(larger, b, head))
            exact, exact_lse = tree.result(merged, divide=True)
            assert out[b, head].tobytes() == exact.tobytes()
            np.testing.assert_allclose(lse[b, head], exact_lse, rtol=3e-7)


@pytest.mark.emulator
@pytest.mark.parametrize("heads", [SMALL, cd.HeadConfig(64, 64, 8)], ids=str)
def test_the_host_knows_the_kernels_leaves(heads: cd.HeadConfig) -> None:
    lens = [0, 1, 64, 65, 500, 512, 513, 1025]
    given = paged_problem(0, lens, heads)
    plan = cd.SplitPlan.from_split_size(lens, grid.MIN_LEAF)
    found = cd.paged_split_k(**given, plan=plan, deterministic=True, backend="emulator")
    leaves = [-(-s // grid.leaf_keys(s, heads)) for s in lens]
    assert found.width.sum(axis=1).tolist() == leaves
    assert max(leaves) <= found.width.shape[1] <= grid.max_leaves(grid.blocks_per_row(heads))
    exact = cd.paged_split_k(**given, plan=plan, deterministic=True)
    np.testing.assert_array_equal(exact.width > 0, found.width > 0)


# ---------------------------------------------------------------------- shards


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_reduce_to_the_bits_of_the_whole(backend: Any) -> None:
    """Each shard has the blocks of its own keys only, and plans as it likes."""
    lens = [900, 40, 600, 256]
    given = paged_problem(5, lens, SMALL, dtype=np.float16)
    plan = cd.SplitPlan.from_num_splits(lens, 3)
    options = dict(window=700, deterministic=True, backend=backend)
    whole = cd.paged_split_k(**placed(backend, given), plan=plan, **options)
    want = host(*cd.reduce_splits(whole, backend=backend))
    cuts = [0, 256, 512, 2**31 - 1]
    shards = []
    for i, (begin, end) in enumerate(pairwise(cuts)):
        mine = dict(given)
        mine["block_table"] = given["block_table"].copy()
        columns = np.arange(mine["block_table"].shape[1]) * 16
        mine["block_table"][:, (columns < begin) | (columns >= end)] = -1
        own = cd.SplitPlan.from_num_splits(lens, i + 1)
        shards.append(
            cd.paged_split_k(
                **placed(backend, mine), plan=own, shard=(begin, end), validate=True, **options
            )
        )
    joined = shards[2].join(shards[0], shards[1])
    got = host(*cd.reduce_splits(joined, backend=backend))
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]
    # Outputs have been divided, and lse's are no powers of two: their merge has other bits.
    alone = [replace(x, origin=None) for x in shards]  # else the others are missed
    (a, lse_a), (b, lse_b), (c, lse_c) = (cd.reduce_splits(x, backend=backend) for x in alone)
    ab, lse_ab = cd.merge_states(a, lse_a, b, lse_b, backend=backend)
    merged = host(*cd.merge_states(ab, lse_ab, c, lse_c, backend=backend))
    np.testing.assert_allclose(merged[0], want[0], rtol=1e-4, atol=1e-6)
    assert merged[0].tobytes() != want[0].tobytes()


def test_the_reference_joins_shards_too() -> None:
    lens = [700, 100]
    given = paged_problem(5, lens, SMALL)
    plan = cd.SplitPlan.from_num_splits(lens, 2)
    parts = [
        cd.paged_split_k(**given, plan=plan, window=400, deterministic=True, shard=shard)
        for shard in ((0, 448), (448, 1000))
    ]
    got = cd.reduce_splits(parts[0].join(parts[1]))
    want = cd.reference.decode_attention(**given, window=400)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.emulator
@pytest.mark.parametrize("own_workspace", [False, True])
def test_a_sequence_without_a_row_holds_nothing(own_workspace: bool) -> None:
    """Nobody writes its widths, so what an earlier call left there must not count."""
    lens = [700, 300, 100]
    given = paged_problem(3, lens, SMALL)
    whole = cd.SplitPlan.from_num_splits(lens, 2)
    call = dict(deterministic=True, backend="emulator")
    before = cd.paged_split_k(**given, plan=whole, **call)
    before.width[...] = 1
    plan = cd.SplitPlan(np.array([0, 2, 2, 3], np.int32), np.array([0, 352, 0], np.int32))
    options = dict(partials=before) if own_workspace else {}
    states = cd.paged_split_k(**given, plan=plan, **call, **options)
    assert not states.width[1].any()
    assert [len(tree.subtrees(states, b, 0)) > 0 for b in (0, 2)] == [True, True]
    assert all(s.state.l[0] == 0 for s in tree.subtrees(states, 1, 0))
    for backend in ("emulator", "reference"):
        out, lse = cd.reduce_splits(states, backend=backend)
        assert not out[1].any()
        np.testing.assert_array_equal(np.isneginf(lse).all(axis=1), [False, True, False])
    # All of the sequence is in another shard: its plan has to be the result's.
    early, late = (
        cd.paged_split_k(**given, plan=p, **call, shard=shard)
        for p, shard in ((plan, (0, 256)), (whole, (256, 1024)))
    )
    with pytest.raises(ValueError, match="shard 1 holds leaves of sequence 1, but shard 0's plan"):
        early.join(late)
    joined = late.join(early)
    with pytest.raises(ValueError, match=r"leaves 0..3 of sequence 1, its keys 0 to 256, are miss"):
        cd.reduce_splits(joined, backend="emulator")
    joined = replace(joined, origin=None)
    assert not np.isneginf(cd.reduce_splits(joined, backend="emulator")[1][1]).any()


@pytest.mark.emulator
def test_a_device_plan_past_its_capacity_reads_nothing_outside() -> None:
    """Rows that do not fit are nobody's; widths that reach past the last leaf end there."""
    lens = [300, 300]
    given = paged_problem(3, lens, SMALL)
    plan = cd.SplitPlan(np.array([0, 1, 3], np.int32), np.zeros(1, np.int32))
    call = dict(plan=plan, deterministic=True, backend="emulator")
    states = cd.paged_split_k(**given, **call)
    want = cd.reference.decode_attention(**given)
    for garbage in (1, 7, -5, 2**31 - 1):
        states.width[1] = garbage
        out, lse = cd.reduce_splits(states, backend="emulator")
        np.testing.assert_allclose(out[0], want[0][0], rtol=1e-5, atol=1e-6)
        assert not out[1].any()
        assert np.isneginf(lse[1]).all()
    # With a row of its own, a sequence is what its widths say, but no row behind them is read.
    every = cd.SplitPlan(np.array([0, 1, 2], np.int32), np.zeros(2, np.int32))
    states = cd.paged_split_k(**given, **{**call, "plan": every})
    states = replace(states, origin=None)  # else the leaves taken away are missed
    rows = states.width.shape[1]
    for garbage in (1, 7, -5, 2**31 - 1):
        states.width[1] = 0
        states.width[1, rows - 1] = garbage
        states.m[rows:], states.l[rows:], states.acc[rows:] = 0, 1, 1
        out, lse = cd.reduce_splits(states, backend="emulator")
        assert (out[1] == (garbage > 0)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_joined_shards_are_the_readable_kernels_whole(backend: Any) -> None:
    """Also where the fast kernel takes the call, which has other leaves."""
    lens, heads = [700, 60], cd.HeadConfig(4, 1, 128)
    given = placed(backend, paged_problem(5, lens, heads, dtype=np.float16))
    options = dict(deterministic=True, backend=backend)
    plan = cd.SplitPlan.from_num_splits(lens, 2)
    halves = [
        cd.paged_split_k(**given, plan=plan, shard=shard, **options)
        for shard in ((0, 320), (320, 2**31 - 1))
    ]
    joined = halves[1].join(halves[0])
    got = host(*cd.reduce_splits(joined, dtype=np.float16, backend=backend))
    call = dict(kernel="readable", explain=True, num_splits=3, **options)
    *want, said = cd.decode_attention(**given, **call)
    assert not said.is_fast
    assert [x.tobytes() for x in got] == [x.tobytes() for x in host(*want)]
    *fast, said = cd.decode_attention(**given, explain=True, **options)
    assert said.is_fast
    assert host(*fast)[0].tobytes() != got[0].tobytes()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("window", [None, 300])
def test_a_forgotten_shard_is_named(backend: Any, window: int | None) -> None:
    lens = [64, 700, 0]
    given = placed(backend, paged_problem(5, lens, SMALL))
    plan = cd.SplitPlan.from_num_splits(lens, 2)
    call = dict(plan=plan, window=window, deterministic=True, backend=backend)
    cuts = ((0, 320), (320, 448), (448, 1000))
    first, second, third = (cd.paged_split_k(**given, **call, shard=cut) for cut in cuts)
    cases = [
        ([first, second], r"leaves 7..10 of sequence 1, its keys 448 to 700, are missing: join"),
        ([first, third], r"leaves [56]..6 of sequence 1"),
    ]
    if window is None:
        cases.append(([second, third], r"leaves 0..0 of sequence 0, its keys 0 to 64"))
    for (one, other), words in cases:
        with pytest.raises(ValueError, match=words):
            cd.reduce_splits(one.join(other), backend=backend, validate=True)
    whole = cd.paged_split_k(**given, **call)
    got, want = (
        host(*cd.reduce_splits(states, backend=backend, validate=True))
        for states in (third.join(second, first), whole)
    )
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


def test_shards_of_other_calls_are_refused() -> None:
    lens = [700, 100]
    given = paged_problem(5, lens, SMALL)
    plan = cd.SplitPlan.from_num_splits(lens, 2)
    call = dict(plan=plan, deterministic=True)
    first = cd.paged_split_k(**given, **call, shard=(0, 448))
    changes: list[tuple[dict[str, Any], str]] = [
        (dict(seq_lens=[699, 100]), r"shards 0 and 1 have seq_lens\[0\] 700 and 699"),
        (dict(window=650), "window None and 650"),
        (dict(scale=1.0), "scale .* and 1.0"),
        (dict(k_scale=2.0), "k_scale False and 2.0"),
        (dict(alibi_slopes=np.ones(SMALL.num_q_heads, np.float32)), "alibi_slopes False and True"),
    ]
    for changed, words in changes:
        other = cd.paged_split_k(**{**given, **call, **changed}, shard=(448, 1000))
        with pytest.raises(ValueError, match=words):
            first.join(other)


@pytest.mark.emulator
def test_partials_and_traces_print_shapes() -> None:
    lens = [700, 100]
    given = paged_problem(5, lens, SMALL)
    plan = cd.SplitPlan.from_num_splits(lens, 2)
    text = repr(cd.paged_split_k(**given, plan=plan, deterministic=True))
    assert text.startswith("Partials(acc float64 (")
    assert text.endswith("plan 'fixed' of batch 2)")
    assert "width int32 (2, " in text
    assert len(text) < 200
    out, lse = np.ones((1, 2, 8), np.float32), np.ones((1, 2), np.float32)
    traced = cd.trace_launch(cd.merge_states, out, lse, out, lse)
    text = repr(traced)
    assert text.startswith(
        "Traced(result: float32 (1, 2, 8), float32 (1, 2); launches: merge_states<"
    )
    assert len(text) < 200


@pytest.mark.emulator
def test_a_step_follows_its_lengths() -> None:
    """Widths of an earlier call do not linger."""
    plan = cd.SplitPlan.from_num_splits([600, 300], 3)
    step = cd.DecodeStep(SMALL, plan, np.float32, "emulator", deterministic=True)
    for seed, lens in enumerate(([600, 300], [90, 0], [33, 580])):
        given = paged_problem(seed, [600, 300], SMALL)
        given["seq_lens"] = np.minimum(np.array(lens, np.int32), [600, 300]).astype(np.int32)
        out, lse = (x.copy() for x in step(**given))
        call = dict(num_splits=1, deterministic=True, backend="emulator", kernel="readable")
        want = cd.decode_attention(**given, **call)
        assert [out.tobytes(), lse.tobytes()] == [x.tobytes() for x in want]


@pytest.mark.emulator
def test_the_kernel_does_not_follow_from_the_layout() -> None:
    heads = cd.HeadConfig(4, 1, 64)
    given = paged_problem(0, [100], heads, dtype=np.float16)
    call = dict(backend="emulator", deterministic=True, explain=True)
    assert cd.decode_attention(**given, num_splits=3, **call)[2].is_fast
    readable = cd.decode_attention(**given, window=7, kernel="readable", **call)[2]
    assert readable.kernels[-1] == "reduce_subtrees"
    assert readable.leaf_keys == (64,)
    assert "next leaf" in str(readable)
    given["block_table"] = np.repeat(given["block_table"], 2, axis=1)[:, ::2]
    with pytest.raises(ValueError, match="use kernel='readable' for all calls"):
        cd.decode_attention(**given, **call)
    assert cd.decode_attention(**given, kernel="readable", **call)[2].kernels


@pytest.mark.emulator
@pytest.mark.parametrize("kernel", ["auto", "readable"])
def test_nothing_to_do(kernel: Any) -> None:
    """No sequence, and sequences without keys or blocks."""
    cache = np.zeros((4, 16, 2, 64), np.float16)
    call = dict(deterministic=True, backend="emulator", kernel=kernel)
    for batch in (0, 2):
        q = np.ones((batch, 4, 64), np.float16)
        table, lens = np.zeros((batch, 0), np.int32), np.zeros(batch, np.int32)
        out, lse = cd.decode_attention(q, cache, cache, table, lens, **call)
        assert out.shape == q.shape
        assert not out.any()
        assert np.isneginf(lse).all()


# ---------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", same_bits.ACCURACY, ids=str)
def test_errors_are_no_larger_than_without_the_tree(backend: str, case: Case) -> None:
    """In float32 a last bit shows: the largest weights are no exact 1 along the tree."""
    row = same_bits.accuracy(case, backend)
    most = 1.3 if case.dtype == "float32" else 1.005
    assert row["tree_rms"] <= most * row["plain_rms"]
    assert row["tree_max"] <= most * row["plain_max"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [60, 100, 125, 126, 127, 140])
def test_where_the_powers_of_two_end(backend: Any, depth: int) -> None:
    """Leaves some 126 units of log2 below the largest: what is lost is less than rounding.

    The first leaf holds the maximum; those behind it score ``depth`` units of log2 lower.
    """
    heads = cd.HeadConfig(1, 1, 8)
    lens = [512]
    given = paged_problem(1, lens, heads)
    given["q"][...] = 0
    given["q"][..., 0] = 1
    scale = float(np.log(2))  # a score of 1 is one unit of log2
    table, j = given["block_table"][0], np.arange(512)
    given["k_cache"][table[j // 16], j % 16] = 0
    below = j[64:]
    given["k_cache"][table[below // 16], below % 16, 0, 0] = -depth
    given = placed(backend, given)
    found = set()
    for splits in (1, 2, 3, 8):
        out, lse = host(
            *cd.decode_attention(
                **given, num_splits=splits, scale=scale, deterministic=True, backend=backend
            )
        )
        found.add((out.tobytes(), lse.tobytes()))
        plain = {name: host(x)[0] for name, x in given.items()}
        exact, _ = cd.reference.decode_attention(**plain, scale=scale)
        np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-6)
    assert len(found) == 1  # beside an operand of ordinary size nothing is left to differ


# ---------------------------------------------------------------------- refused


def test_bad_input() -> None:
    lens = [1000]
    given = paged_problem(0, lens, SMALL)
    plan = cd.SplitPlan.from_num_splits(lens, 2)
    with pytest.raises(TypeError, match="deterministic must be True or False; got 1"):
        cd.decode_attention(**given, deterministic=1)
    with pytest.raises(ValueError, match="shard goes with deterministic=True"):
        cd.paged_split_k(**given, plan=plan, shard=(0, 64))
    with pytest.raises(ValueError, match="got 64 to 64"):
        cd.paged_split_k(**given, plan=plan, deterministic=True, shard=(64, 64))
    with pytest.raises(TypeError, match=r"shard must be two integers.*got 64"):
        cd.paged_split_k(**given, plan=plan, deterministic=True, shard=64)
    with pytest.raises(TypeError, match=r"shard\[1\] must be an integer; got NoneType"):
        cd.paged_split_k(**given, plan=plan, deterministic=True, shard=(64, None))
    with pytest.raises(ValueError, match=r"multiples of 64 keys.*use 64 or 128"):
        cd.paged_split_k(**given, plan=plan, deterministic=True, shard=(100, 1000))
    call = dict(plan=plan, deterministic=True, backend="emulator")
    whole = cd.paged_split_k(**given, **call)
    with pytest.raises(ValueError, match="shard 1 holds a leaf that another shard holds"):
        whole.join(cd.paged_split_k(**given, **call, shard=(0, 64)))
    exact = cd.paged_split_k(**given, plan=plan, deterministic=True, shard=(64, 1000))
    with pytest.raises(ValueError, match="shard 1 has float64 states but shard 0 float32"):
        cd.paged_split_k(**given, **call, shard=(0, 64)).join(exact)
    splits = cd.paged_split_k(**given, plan=plan, backend="emulator")
    with pytest.raises(ValueError, match="shard 1 holds splits"):
        whole.join(splits)
    with pytest.raises(ValueError, match="partials has no width"):
        cd.paged_split_k(**given, **call, partials=splits)
    short = cd.Partials(whole.acc[:4], whole.m[:4], whole.l[:4], plan, whole.width)
    with pytest.raises(ValueError, match="partials hold 4 rows"):
        cd.paged_split_k(**given, **call, partials=short)
    with pytest.raises(ValueError, match="partials hold 4 rows but width"):
        checks.partials(short, False)
    wide = cd.Partials(
        *(np.zeros((513, *x.shape[1:]), np.float32) for x in (whole.acc, whole.m, whole.l)),
        plan,
        np.zeros((1, 513), np.int32),
    )
    with pytest.raises(ValueError, match=r"width must have at most 512 rows.*got 513"):
        cd.reduce_splits(wide, backend="emulator")
    again = cd.paged_split_k(**given, **call, partials=whole)
    assert again.acc is whole.acc
    fewer = paged_problem(0, [300], SMALL)
    with pytest.raises(ValueError, match="give all shards tables that reach as many keys"):
        whole.join(
            cd.paged_split_k(**fewer, **{**call, "plan": cd.SplitPlan.from_num_splits([300], 2)})
        )


@pytest.mark.emulator
def test_poison_and_scores_without_weight() -> None:
    """Values of keys whose scores are -inf do not count, a NaN of any other does."""
    lens = [300]
    given = paged_problem(2, lens, SMALL)
    j = np.arange(300)
    where = given["block_table"][0][j // 16], j % 16
    given["q"] = np.abs(given["q"])
    masked = where[0][64:128], where[1][64:128]
    given["k_cache"][masked], given["v_cache"][masked] = -np.inf, np.nan
    call = dict(num_splits=1, deterministic=True, backend="emulator")
    out, _ = cd.decode_attention(**given, **call)
    assert np.isfinite(out).all()
    given["v_cache"][where[0][200], where[1][200], :, 5] = np.nan
    out, lse = cd.decode_attention(**given, **call)
    assert np.isnan(out[..., 5]).all()
    assert np.isfinite(np.delete(out, 5, axis=2)).all()
    assert np.isfinite(lse).all()


@pytest.mark.emulator
def test_the_tolerance_of_the_plain_kernels_holds() -> None:
    case = Case("all options", (5, 290), window=250, logits_soft_cap=5.0, alibi=True, sinks=True)
    problem = build(case)
    call = dict(deterministic=True, backend="emulator", **problem.options)
    out, lse = cd.decode_attention(*problem.arrays, **call)
    exact = cd.reference.decode_attention(*problem.arrays, **problem.options)
    bound = tolerance.bound(*problem.arrays, *exact, **problem.options)
    tolerance.assert_close(out, lse, *exact, bound)
