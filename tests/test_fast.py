"""The fast path: close to the float64 reference, and the same bits however the work is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_decode import fast, reference, tolerance
from cupy_decode.heads import HeadConfig

from .problems import paged_problem

#: Few SMs, so that small problems have more units than thread blocks.
SMALL = fast.Machine(num_sms=3)


@dataclass(frozen=True)
class Case:
    """A problem for the fast path."""

    seq_lens: tuple[int, ...]
    heads: HeadConfig
    dtype: str = "bfloat16"
    block_size: int = 16
    num_blocks: int | None = None
    unit_pages: int | None = None

    def __str__(self) -> str:
        h = self.heads
        lens = "-".join(map(str, self.seq_lens[:4]))
        cut = f"-{self.num_blocks}x{self.unit_pages}" if self.num_blocks else ""
        return (
            f"{lens}-h{h.num_q_heads}-{h.num_kv_heads}-d{h.head_dim}-{self.dtype}"
            f"-p{self.block_size}{cut}"
        )

    def problem(self, seed: int = 0) -> dict[str, np.ndarray]:
        dtype = np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)
        return paged_problem(
            seed, self.seq_lens, self.heads, block_size=self.block_size, dtype=dtype
        )


CORRECTNESS = (
    Case((1,), HeadConfig(4, 1, 128)),
    Case((0, 0), HeadConfig(4, 2, 64), "float16"),
    Case((16, 0, 33, 200, 1), HeadConfig(8, 2, 128)),
    Case((70, 15), HeadConfig(3, 3, 64), "float16"),
    Case((1000,), HeadConfig(8, 1, 128), num_blocks=3, unit_pages=8),
    Case((1700,), HeadConfig(2, 2, 64), num_blocks=5, unit_pages=4),
    Case((5, 300), HeadConfig(16, 1, 64), "float16"),
    Case((130,), HeadConfig(14, 1, 128)),
    Case((17, 100), HeadConfig(64, 2, 64), block_size=48),
    Case((700, 40, 0), HeadConfig(12, 1, 256), "float16", 32, 5, 4),
    Case((1,) * 70 + (60,), HeadConfig(2, 2, 64), num_blocks=6),
    Case((4096,), HeadConfig(1, 1, 64), num_blocks=9, unit_pages=4),
)


def run(
    problem: dict[str, np.ndarray],
    *,
    machine: fast.Machine = SMALL,
    schedule: Any = "forward",
    capacity: int | None = None,
    **cut: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, fault) of the kernel in the emulator; outputs start as NaN."""
    from cupy_decode.backends import emulator

    q = problem["q"]
    assert fast.refusal(**problem, machine=machine) is None
    space = fast.workspace(emulator, fast.spec_of(q, problem["k_cache"]), machine)
    if capacity is not None:
        space = fast.Workspace(space.partials[:capacity], space.arrivals[: capacity + 1])
    out = np.full(q.shape, np.nan, q.dtype)
    lse = np.full(q.shape[:2], np.nan, np.float32)
    fault = np.zeros(4, np.int32)
    scale = q.shape[2] ** -0.5
    launch = fast.launch(
        **problem, out=out, lse=lse, space=space, scale=scale, fault=fault, machine=machine, **cut
    )
    emulator.run(launch, schedule=schedule)
    assert not space.arrivals.any(), "a counter did not return to 0"
    return out, lse, fault


def assert_same_bits(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> None:
    for x, y in zip(a[:2], b[:2], strict=True):
        np.testing.assert_array_equal(
            np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8)
        )


# ---------------------------------------------------------------------- what is covered


def test_refusals_name_what_is_not_covered():
    p = paged_problem(0, [20], HeadConfig(4, 2, 64), dtype=np.float16)
    arrays = list(p.values())
    assert fast.refusal(*arrays) is None
    bytes_ = [cache.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for cache in arrays[1:3]]
    assert fast.refusal(arrays[0], *bytes_, *arrays[3:], kv_dtype="e4m3") is None
    assert "float32" in fast.refusal(arrays[0].astype(np.float32), *arrays[1:])
    mixed = [cache.astype(ml_dtypes.bfloat16) for cache in arrays[1:3]]
    assert "the cache bfloat16" in fast.refusal(arrays[0], *mixed, *arrays[3:])
    wide = paged_problem(0, [20], HeadConfig(4, 2, 96), dtype=np.float16)
    assert "head_dim is 96" in fast.refusal(**wide)
    tight = fast.Machine(num_sms=1, shared_per_sm=24 << 10)
    assert "shared memory" in fast.refusal(*arrays, machine=tight)
    strided = {
        "q": np.repeat(p["q"], 2, axis=2)[:, :, ::2],
        "block_table": np.repeat(p["block_table"], 2, axis=1)[:, ::2],
        "seq_lens": np.repeat(p["seq_lens"], 4)[::2],
    }
    for name, array in strided.items():
        assert fast.refusal(**{**p, name: array}).startswith(f"{name} has strides")
    assert fast.refusal(*arrays, out=p["q"].astype(np.float32)) is None


def test_every_specialisation_fits_an_h200_with_two_pages_a_reader():
    for head_dim in fast.MAX_HEADS_PER_TILE:
        for num_kv_heads in (1, 2, 8):
            for group_size in (*range(1, 17), 71, 128):
                spec = fast.FastSpec("bfloat16", head_dim, num_kv_heads, group_size)
                assert spec.stages >= 2, spec
                assert spec.shared_mem <= (227 << 10) - 128, spec
                tight = fast.FastSpec("bfloat16", 64, num_kv_heads, group_size, room=98 << 10)
                assert tight.stages >= 2, tight


def test_sums_that_wait_leave_room_for_two_pages_where_shared_memory_is_small():
    """Groups of 8 heads, as of Qwen-2.5-14B (5) and Llama-3-70B (8), on GPUs of 100 KB an SM."""
    room = fast.Machine(shared_per_sm=100 << 10).room
    for num_kv_heads, group_size in ((8, 4), (8, 5), (8, 8), (16, 8)):
        spec = fast.FastSpec("bfloat16", 128, num_kv_heads, group_size)
        less = replace(spec, room=room)
        assert less.stages >= 2
        assert less.leaves == (fast.LEAVES if group_size <= 4 else fast.FEW_LEAVES)
        assert replace(less, small=True).leaves == less.leaves
        assert spec.leaves == replace(spec, small=True).leaves == fast.LEAVES


@pytest.mark.parametrize("group_size", range(1, 73))
def test_every_query_head_is_in_exactly_one_tile(group_size: int):
    spec = fast.FastSpec("bfloat16", 128, 4, group_size)
    tile_heads = -(-group_size // spec.tiles)
    sizes = [min(tile_heads, group_size - t * tile_heads) for t in range(spec.tiles)]
    assert sum(sizes) == group_size
    assert min(sizes) >= 1
    assert max(sizes) <= spec.heads_per_tile


def test_leaves_fit_the_levels_that_shared_memory_is_sized_for():
    for heads in (1, 2, 3, 8, 32):
        for num_pages in (1, 7, 31, 32, 33, 160, 513, 1023, 1024, 1025, 4097, 65536, 2**20):
            for leaves in (fast.LEAVES, fast.FEW_LEAVES):
                leaf_block = 4 * fast.leaf_pages(num_pages, heads, leaves=leaves)
                blocks = -(-num_pages // leaf_block)
                assert blocks <= -(-leaves // (4 * heads)), (heads, num_pages)


# ---------------------------------------------------------------------- the kernel, on the CPU


@pytest.mark.emulator
@pytest.mark.parametrize("schedule", ["forward", "reverse"])
@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
def test_close_to_the_reference(case: Case, schedule: str):
    problem = case.problem()
    cut = dict(num_blocks=case.num_blocks, unit_pages=case.unit_pages)
    out, lse, fault = run(problem, schedule=schedule, **cut)
    ref_out, ref_lse = reference.decode_attention(**problem)
    allowed = tolerance.bound(**problem, ref_out=ref_out, ref_lse=ref_lse)
    tolerance.assert_close(out, lse, ref_out, ref_lse, allowed)
    assert not fault.any()


@pytest.mark.emulator
def test_large_scores_keep_their_weights():
    problem = Case((200,), HeadConfig(4, 1, 128), "float16").problem()
    problem["q"] *= np.float16(60)
    out, lse, _ = run(problem)
    ref_out, ref_lse = reference.decode_attention(**problem)
    allowed = tolerance.bound(**problem, ref_out=ref_out, ref_lse=ref_lse)
    tolerance.assert_close(out, lse, ref_out, ref_lse, allowed)


@pytest.mark.emulator
def test_a_scale_that_is_one_percent_off_fails():
    problem = Case((300,), HeadConfig(4, 1, 128)).problem()
    out, lse, _ = run(problem)
    scale = 1.01 * 128**-0.5
    ref_out, ref_lse = reference.decode_attention(**problem, scale=scale)
    allowed = tolerance.bound(**problem, ref_out=ref_out, ref_lse=ref_lse, scale=scale)
    with pytest.raises(AssertionError, match="largest error"):
        tolerance.assert_close(out, lse, ref_out, ref_lse, allowed)


def with_a_wide_table(problem: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same under a table with room for so much more that other readers are chosen."""
    table = np.pad(problem["block_table"], ((0, 0), (0, 16384)))
    return {**problem, "block_table": table}


@pytest.mark.emulator
@pytest.mark.parametrize(
    "case",
    [
        Case((2100, 90, 0, 640), HeadConfig(8, 2, 64)),
        Case((900, 1500), HeadConfig(9, 1, 128), "float16"),
        Case((330, 48), HeadConfig(40, 8, 128), "float16"),
    ],
    ids=str,
)
def test_no_bit_depends_on_how_the_work_is_cut(case: Case):
    problem = case.problem()
    first = run(problem)
    for num_blocks, unit_pages in (
        (1, None),
        (5, 1),
        (7, 16),
        (40, 48),
        (3, 80),
        (5, 112),
        (2, 1024),
    ):
        cut = dict(num_blocks=num_blocks, unit_pages=unit_pages)
        assert_same_bits(first, run(problem, **cut))
    assert_same_bits(first, run(problem, machine=fast.Machine(num_sms=50)))
    # more readers, as where the table has room for more
    wide = with_a_wide_table(problem)
    narrow, more = (
        fast.spec_of(p["q"], p["k_cache"], block_table=p["block_table"]) for p in (problem, wide)
    )
    assert narrow.readers < more.readers or narrow.heads_per_tile == 16
    assert_same_bits(first, run(wide))
    # fewer readers and pages in flight, as on a GPU with less shared memory
    less = fast.Machine(num_sms=3, shared_per_sm=100 << 10)
    if fast.refusal(**problem, machine=less) is None:
        assert_same_bits(first, run(problem, machine=less))
    # a workspace too small for the units that it would have chosen
    assert_same_bits(first, run(problem, num_blocks=5, unit_pages=1, capacity=4))


@pytest.mark.emulator
@pytest.mark.parametrize("capacity", [None, 6])
@pytest.mark.parametrize(
    "seq_lens",
    [(0,), (33,), (2600,), (300, 300, 300), (1, 1900, 60, 0), (500,) * 5, (129,) * 9 + (2000,)],
    ids=str,
)
def test_the_kernel_cuts_as_the_host_says(seq_lens: tuple[int, ...], capacity: int | None):
    """As many partial states are written as the host's schedule counts."""
    from cupy_decode.backends import emulator

    for heads in (HeadConfig(2, 1, 64), HeadConfig(6, 3, 64)):
        problem = Case(seq_lens, heads, "float16").problem()
        spec = fast.spec_of(problem["q"], problem["k_cache"], block_table=problem["block_table"])
        for num_blocks, unit_pages in ((3, None), (8, None), (8, 48), (8, 80)):
            space = fast.workspace(emulator, spec, fast.Machine(num_sms=8))
            room = space.partials.shape[0] if capacity is None else capacity
            space = fast.Workspace(space.partials[:room], space.arrivals[: room + 1])
            space.partials[...] = np.nan
            q = problem["q"]
            launch = fast.launch(
                **problem,
                out=np.empty_like(q),
                lse=np.empty(q.shape[:2], np.float32),
                space=space,
                scale=1.0,
                num_blocks=num_blocks,
                unit_pages=unit_pages,
            )
            emulator.run(launch)
            written = int((~np.isnan(space.partials[:, 0, 0])).sum())
            cut = fast.schedule(seq_lens, spec, num_blocks, room, unit_pages=unit_pages)
            assert written == cut.num_partials, (heads, num_blocks, cut)


@pytest.mark.emulator
def test_no_bit_depends_on_batch_mates_or_position():
    problem = Case((500, 37, 1200), HeadConfig(4, 2, 64)).problem()
    whole = run(problem)
    for order in ([2], [1, 0], [2, 2, 0, 1], [0] * 40 + [2]):
        part = dict(problem)
        for name in ("q", "block_table", "seq_lens"):
            part[name] = np.ascontiguousarray(problem[name][order])
        assert_same_bits((whole[0][order], whole[1][order]), run(part))


@pytest.mark.emulator
def test_no_bit_depends_on_pages():
    """The same keys in other pages, larger blocks and the head-major layout."""
    rng = np.random.default_rng(5)
    s, heads = 400, HeadConfig(4, 2, 64)
    q = rng.standard_normal((1, 4, 64)).astype(np.float16)
    k, v = (rng.standard_normal((s, 2, 64)).astype(np.float16) for _ in range(2))
    results = []
    for block_size, head_major in ((16, False), (16, True), (32, False), (80, True)):
        pages = -(-s // block_size)
        ids = rng.permutation(pages + 3)[:pages].astype(np.int32)
        shape = (pages + 3, 2, block_size, 64) if head_major else (pages + 3, block_size, 2, 64)
        caches = []
        for rows in (k, v):
            cache = np.full(shape, np.nan, np.float16)
            view = cache.transpose(0, 2, 1, 3) if head_major else cache
            j = np.arange(s)
            view[ids[j // block_size], j % block_size] = rows
            caches.append(view)
        problem = dict(
            q=q,
            k_cache=caches[0],
            v_cache=caches[1],
            block_table=ids[None],
            seq_lens=np.array([s], np.int32),
        )
        results.append(run(problem))
    for other in results[1:]:
        assert_same_bits(results[0], other)
    assert heads.group_size == 2


@pytest.mark.emulator
def test_bad_ids_and_lengths_become_nan_rows_and_a_record():
    problem = Case((100, 100, 100, 100), HeadConfig(4, 2, 64)).problem()
    good = run(problem)
    table = problem["block_table"].copy()
    table[1, 3] = len(problem["k_cache"])
    table[2, 0] = -7
    out, lse, fault = run({**problem, "block_table": table})
    assert np.isnan(out[1:3].astype(np.float32)).all()
    assert np.isnan(lse[1:3]).all()
    assert_same_bits((out[[0, 3]], lse[[0, 3]]), (good[0][[0, 3]], good[1][[0, 3]]))
    expected = {(1, 1, 3, len(problem["k_cache"])), (1, 2, 0, -7)}
    assert tuple(fault) in expected

    lens = problem["seq_lens"].copy()
    lens[0], lens[3] = -1, table.shape[1] * 16 + 1
    out, lse, fault = run({**problem, "seq_lens": lens})
    assert np.isnan(out[[0, 3]].astype(np.float32)).all()
    assert np.isnan(lse[[0, 3]]).all()
    assert_same_bits((out[1:3], lse[1:3]), (good[0][1:3], good[1][1:3]))
    assert fault[0] == 2
    assert (fault[1], fault[3]) in {(0, -1), (3, lens[3])}


@pytest.mark.emulator
def test_one_long_sequence_meets_in_three_steps():
    """More units than one warp merges: groups first, then groups of them."""
    problem = Case((16 * 16 * 70 - 3,), HeadConfig(16, 1, 64), "float16").problem()
    machine = fast.Machine(num_sms=8)
    spec = fast.spec_of(problem["q"], problem["k_cache"], block_table=problem["block_table"])
    cut = fast.schedule(problem["seq_lens"], spec, 4, unit_pages=1)
    assert cut.units[0] > 8 * spec.most_siblings
    out, lse, _ = first = run(problem, machine=machine, num_blocks=4, unit_pages=1)
    ref_out, ref_lse = reference.decode_attention(**problem)
    allowed = tolerance.bound(**problem, ref_out=ref_out, ref_lse=ref_lse)
    tolerance.assert_close(out, lse, ref_out, ref_lse, allowed)
    assert_same_bits(first, run(problem, machine=machine, num_blocks=1, unit_pages=4096))


@pytest.mark.emulator
@pytest.mark.parametrize("seq_lens", [(16, 16), (48, 80), (336, 33)], ids=str)
def test_a_page_that_holds_no_key_leaves_a_negative_zero(seq_lens: tuple[int, ...]):
    problem = Case(seq_lens, HeadConfig(4, 1, 128), "float16").problem()
    column = problem["v_cache"][..., 5]
    column[~np.isnan(column)] = -0.0  # NaN where nothing may be read
    first = run(problem)
    assert np.signbit(first[0][..., 5]).all()
    assert_same_bits(first, run(with_a_wide_table(problem)))


@pytest.mark.emulator
def test_units_that_fit_the_grid_and_not_the_workspace_are_longer():
    problem = Case((900,), HeadConfig(8, 2, 64), "float16").problem()
    spec = fast.spec_of(problem["q"], problem["k_cache"], block_table=problem["block_table"])
    free = fast.schedule(problem["seq_lens"], spec, 40)
    assert 4 < free.num_units <= 40
    first = run(problem, num_blocks=40)
    assert_same_bits(first, run(problem, num_blocks=40, capacity=4))


# ---------------------------------------------------------------------- on a GPU


def on_gpu(problem: dict[str, np.ndarray], **cut: Any) -> tuple[Any, Any, Any]:
    import cupy

    from cupy_decode.backends import cuda

    arrays = {name: cupy.asarray(array) for name, array in problem.items()}
    q = arrays["q"]
    machine = fast.Machine(num_sms=cuda.num_sms())
    space = fast.workspace(
        cuda, fast.spec_of(q, arrays["k_cache"], block_table=arrays["block_table"]), machine
    )
    out, lse = cupy.empty_like(q), cupy.full(q.shape[:2], np.nan, np.float32)
    scale = q.shape[2] ** -0.5
    launch = fast.launch(
        **arrays, out=out, lse=lse, space=space, scale=scale, machine=machine, **cut
    )
    cuda.run(launch)
    return out, lse, (arrays, launch, space)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
def test_gpu_is_close_to_the_reference(case: Case):
    problem = case.problem(seed=1)
    cut = dict(num_blocks=case.num_blocks, unit_pages=case.unit_pages)
    out, lse, (_, _, space) = on_gpu(problem, **cut)
    ref_out, ref_lse = reference.decode_attention(**problem)
    allowed = tolerance.bound(**problem, ref_out=ref_out, ref_lse=ref_lse)
    tolerance.assert_close(out.get(), lse.get(), ref_out, ref_lse, allowed)
    assert not space.arrivals.any()


@pytest.mark.gpu
def test_gpu_graph_replays_follow_the_lengths():
    import cupy

    from cupy_decode.backends import cuda

    case = Case((3000, 1, 500), HeadConfig(8, 2, 128))
    problem = case.problem(seed=2)
    out, lse, (arrays, launch, _) = on_gpu(problem)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cuda.run(launch)
        graph = stream.end_capture()
        for lens in ((3000, 1, 500), (17, 0, 499), (2047, 1, 1)):
            arrays["seq_lens"].set(np.array(lens, np.int32), stream=stream)
            graph.launch()
            stream.synchronize()
            problem["seq_lens"] = np.array(lens, np.int32)
            ref_out, ref_lse = reference.decode_attention(**problem)
            allowed = tolerance.bound(**problem, ref_out=ref_out, ref_lse=ref_lse)
            tolerance.assert_close(out.get(), lse.get(), ref_out, ref_lse, allowed)


@pytest.mark.gpu
def test_gpu_repeats_give_the_same_bits():
    import cupy

    from cupy_decode.backends import cuda

    problem = Case((9000, 4000, 0, 100), HeadConfig(8, 1, 128)).problem(seed=3)
    out, _, (_, launch, space) = on_gpu(problem)
    first = out.get().view(np.uint16).copy()
    changed = cupy.zeros((), np.int64)
    expected = cupy.asarray(first)
    for _ in range(2000):
        cuda.run(launch)
        changed += (out.view(np.uint16) != expected).any()
    assert int(changed) == 0
    assert not space.arrivals.any()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_a_shorter_mate_leaves_a_sequence_split(num_kv_heads: int):
    spec = fast.FastSpec("bfloat16", 128, num_kv_heads, 4)
    for keys in (1024, 2560, 20000):
        alike = fast.schedule([keys, keys], spec, 132).units[0]
        ragged = fast.schedule([keys, keys // 3], spec, 132).units[0]
        assert ragged >= min(alike, 4), keys
