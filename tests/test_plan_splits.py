"""Plans made on the device: equal to the host's, and made without the host."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import device_plans, policies
from cupy_decode.policies import Device, DeviceRule
from cupy_decode.policies.sglang import SglangTriton, extended_core_count

from .decode_cases import Case, Problem, build
from .device_plans import (
    ALONE,
    BATCHES,
    RULES,
    Draw,
    expect_equal,
    host_plans,
    host_plans_at_once,
    nth_draw,
    planned_on,
)
from .test_operators import BACKENDS, expect, module_of, to_host

HEADS = cd.HeadConfig(8, 2, 64)
LLAMA = cd.presets["llama-3-8b"]
DEVICE_POLICIES = (
    "first-wave", "equal-shares", "vllm-triton", "vllm-triton-0.33", "sglang-triton",
    "sglang-deterministic", "fa3-dynamic", "rocm",
)  # fmt: skip


def policy_of(name: str) -> policies.Policy:
    """A registered policy, with a parameter where it needs one."""
    return policies.get(
        name, **{"fixed": {"num_splits": 3}, "split-size": {"split_size": 60}}.get(name, {})
    )


# ---------------------------------------------------------------------- equal to the host


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_random_device_plans_equal_the_hosts(rule: str, backend: str) -> None:
    launches, plans = (24, 50) if backend == "emulator" else (40, 500)
    for index in range(launches):
        case = nth_draw(rule, 1, index, plans, BATCHES)
        want = host_plans(case)
        expect_equal(case, planned_on(backend, case), want)
        if rule in ALONE:
            expect_equal(case, host_plans_at_once(case), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_large_batches_and_long_sequences(rule: str, backend: str) -> None:
    rng = np.random.default_rng(2)
    for batch in (4096, 5000):
        drawn = nth_draw(rule, 3, batch, 1, [batch])
        lens = rng.integers(0, 2**20 + 1, (1, batch)).astype(np.int32)
        case = Draw(rule, lens, drawn.heads, drawn.device, drawn.policy, 2**20)
        if rule in ("size", "chunk"):
            made = {"size": policies.split_size, "chunk": lambda n: policies.get(
                "sglang-deterministic", split_tile_size=n)}[rule]  # fmt: skip
            case = Draw(rule, lens, drawn.heads, drawn.device, made(20_000), 2**20)
        expect_equal(case, planned_on(backend, case), host_plans(case))


@pytest.mark.emulator
@pytest.mark.parametrize("rule", RULES)
def test_the_reverse_schedule_makes_the_same_plans(rule: str) -> None:
    for index in range(4):
        case = nth_draw(rule, 4, index, 20, BATCHES)
        expect_equal(case, planned_on("emulator", case, "reverse"), host_plans(case))


def _lengths_at_core_boundaries(num_sms: int) -> np.ndarray:
    """Lengths whose plan a core more or less would change, the likeliest to be miscounted first.

    Those are the lengths whose ``num_sms * log2(s / 64)`` is nearest to a whole number. A sequence
    by itself on one head gets as many splits as there are cores.
    """
    lens = np.arange(129, 2**20 + 1)
    scaled = np.float32(num_sms) * np.log2(lens / 64).astype(np.float32)
    nearest = np.rint(scaled)

    def split_sizes(cores: np.ndarray) -> np.ndarray:
        splits = -(-lens // -(-lens // cores))
        return -(-lens // (splits * 32)) * 32

    whole = nearest.astype(np.int64)
    matters = split_sizes(whole - 1) != split_sizes(whole)
    order = np.argsort(np.where(matters, np.abs(scaled - nearest), np.inf), kind="stable")
    return lens[order[:400]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_sms", [16, 64, 78, 108, 132, 148])
def test_sglang_takes_the_correctly_rounded_logarithm(num_sms: int, backend: str) -> None:
    lens = _lengths_at_core_boundaries(num_sms)
    if num_sms in (16, 64):  # a whole product, where one ulp less would be a core less
        assert 16384 in lens
        assert extended_core_count(num_sms, 16384) == num_sms * 8
    one_head = cd.HeadConfig(1, 1, 64)
    rows = lens.astype(np.int32)[:, None]
    case = Draw("sglang", rows, one_head, Device(num_sms), SglangTriton(4096), 2**20)
    expect_equal(case, planned_on(backend, case), host_plans(case))


@pytest.mark.emulator
@pytest.mark.parametrize("name", [*DEVICE_POLICIES, "fixed", "split-size"])
@pytest.mark.parametrize("lens", [(300, 17, 0, 4000), (5,), (64,) * 40, (0, 0)], ids=str)
def test_every_planner_by_name(name: str, lens: tuple[int, ...]) -> None:
    policy: Any = policy_of(name)
    if name == "fa3-dynamic":  # the cap is the bound's, as where nobody knows the lengths
        cap = policies.device_rule(len(lens), 4000, LLAMA, name, 132).value
        policy = policies.get(name, num_splits=cap)
    want = cd.plan_splits(lens, LLAMA, policy, 132)
    got = cd.plan_splits_on_device(
        np.array(lens, np.int32), LLAMA, policy, 132, max_seq_len=4000, backend="emulator"
    )
    np.testing.assert_array_equal(got.split_offsets, want.split_offsets)
    np.testing.assert_array_equal(got.split_begin[: want.num_rows], want.split_begin)
    assert got.policy == name
    assert not got.unsplit or want.unsplit


def test_device_planners_are_those_of_the_engines() -> None:
    for name in policies.names():
        if name in (*DEVICE_POLICIES, "fixed", "split-size"):
            assert isinstance(policies.device_rule(2, 100, LLAMA, policy_of(name)), DeviceRule)
        else:
            with pytest.raises(
                ValueError, match=r"plans on the host only.*device planners: fixed,"
            ):
                policies.device_rule(2, 100, LLAMA, name)


# ---------------------------------------------------------------------- room for every length


@pytest.mark.emulator
def test_shorter_lengths_may_need_more_rows_than_the_longest() -> None:
    """272 keys in 16 splits are 9 rows, 256 keys are 16: all sequences must find room."""
    lens = np.array([256, 256, 256], np.int32)
    plan = cd.plan_splits_on_device(
        lens, HEADS, policies.fixed(16), max_seq_len=272, backend="emulator"
    )
    np.testing.assert_array_equal(plan.counts, [16, 16, 16])


def test_no_random_plan_needs_more_rows_than_its_bound() -> None:
    tight = 0
    for rule in RULES:
        for index in range(30):
            case = nth_draw(rule, 5, index, 30, BATCHES)
            most = int(host_plans(case).split_offsets[:, -1].max())
            assert most <= case.capacity
            tight += most == case.capacity
    assert tight > 10


@pytest.mark.emulator
def test_lengths_beyond_the_bound_give_their_last_split_the_rest() -> None:
    lens = np.array([-3, 10**6, 50], np.int32)
    for name in DEVICE_POLICIES:
        got = cd.plan_splits_on_device(lens, HEADS, name, max_seq_len=600, backend="emulator")
        cut = cd.plan_splits_on_device(
            np.array([0, 600, 50], np.int32), HEADS, name, max_seq_len=600, backend="emulator"
        )
        np.testing.assert_array_equal(got.split_offsets, cut.split_offsets)
        used = slice(int(cut.split_offsets[-1]))
        np.testing.assert_array_equal(got.split_begin[used], cut.split_begin[used])


@pytest.mark.emulator
def test_a_plan_is_refilled_in_place() -> None:
    first = np.array([40, 700], np.int32)
    options: dict[str, Any] = dict(max_seq_len=1024, backend="emulator")
    plan = cd.plan_splits_on_device(first, HEADS, "sglang-triton", **options)
    buffers = plan.split_offsets, plan.split_begin
    for lens in ([700, 40], [0, 0], [1024, 1]):
        again = cd.plan_splits_on_device(
            np.array(lens, np.int32), HEADS, "sglang-triton", out=plan, **options
        )
        assert again is plan
        assert (plan.split_offsets, plan.split_begin) == buffers
        want = cd.plan_splits(lens, HEADS, "sglang-triton")
        np.testing.assert_array_equal(plan.split_offsets, want.split_offsets)
        np.testing.assert_array_equal(plan.split_begin[: want.num_rows], want.split_begin)


@pytest.mark.emulator
def test_workers_get_their_rows() -> None:
    lens = np.array([64, 0, 10, 48], np.int32)
    workers = np.full(3, -1, np.int32)
    policy = policies.get("equal-shares", num_workers=2)
    plan = cd.plan_splits_on_device(
        lens, HEADS, policy, max_seq_len=64, worker_offsets=workers, backend="emulator"
    )
    # 4 + 1 + 3 tiles, four for each worker; the empty sequence begins where the second run does
    assert plan.ranges(lens) == [(0, 0, 64), (1, 0, 0), (2, 0, 10), (3, 0, 48)]
    assert workers.tolist() == [0, 1, 4]


@pytest.mark.emulator
def test_a_rule_that_never_splits_such_a_batch_is_one_launch() -> None:
    options: dict[str, Any] = dict(max_seq_len=2560, backend="emulator")
    for batch, unsplit in ((16, False), (17, True)):
        lens = np.full(batch, 2560, np.int32)
        plan = cd.plan_splits_on_device(lens, LLAMA, "vllm-triton", **options)
        assert plan.unsplit is unsplit


# ---------------------------------------------------------------------- refusals

LENS = np.array([5, 9], np.int32)
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (LENS, dict(backend="auto"), TypeError, "must live on the GPU; got a NumPy array"),
    (LENS, dict(backend="cuda"), TypeError, "backend='cuda' needs CuPy arrays"),
    ([5, 9], {}, TypeError, "seq_lens must be a NumPy or CuPy array"),
    (LENS.astype(np.int64), {}, TypeError, "one-dimensional int32 array; got .* dtype int64"),
    (LENS[None], {}, TypeError, r"got shape \(1, 2\)"),
    (np.zeros(4, np.int32)[::2], {}, ValueError, "seq_lens must be contiguous; got a stride of 8"),
    (LENS, dict(policy="fa2"), ValueError, "policy 'fa2' plans on the host only"),
    (LENS, dict(policy="fa9"), ValueError, "policy 'fa9' is not registered"),
    (LENS, dict(heads="llama-9"), ValueError, "heads 'llama-9' is not a preset"),
    (LENS, dict(max_seq_len=0), ValueError, "max_seq_len must be at least 1; got 0"),
    (LENS, dict(max_seq_len=2**30 + 1), ValueError, "max_seq_len must be from 1 to"),
    (LENS, dict(max_seq_len=9.5), TypeError, "max_seq_len must be an integer"),
    (LENS, dict(query_lens=[1, 1]), ValueError, "query_lens cannot be planned on the device"),
    (LENS, dict(policy="fa3-dynamic", window=4), ValueError, "without a window only; got 4"),
    (LENS, dict(worker_offsets=np.zeros(3, np.int32)), ValueError, "go with policy 'equal-sh"),
    (
        LENS,
        dict(policy="equal-shares", worker_offsets=np.zeros(3, np.int32)),
        ValueError,
        r"worker_offsets must be 67 int32, .* got shape \(3,\), dtype int32",
    ),
    (LENS, dict(out=cd.SplitPlan.from_num_splits([1], 1)), ValueError, "plan for a batch of 1"),
    (
        LENS,
        dict(out=cd.SplitPlan.from_num_splits([64, 64], 2)),
        ValueError,
        "out holds 4 rows but 'sglang-triton' may need 16 for 2 sequences of up to 4096 keys",
    ),
    (
        LENS,
        dict(out=cd.SplitPlan.from_num_splits([1, 1], 1, capacity=99)),
        ValueError,
        "out was made unsplit, but 'sglang-triton' may split",
    ),
    (
        LENS,
        dict(out=cd.SplitPlan(np.zeros(3, np.int64), np.zeros(99, np.int64))),
        TypeError,
        "plan.split_offsets must be int32; got int64",
    ),
    (
        LENS,
        dict(out=cd.SplitPlan(np.zeros(6, np.int32)[::2], np.zeros(99, np.int32))),
        ValueError,
        "plan.split_offsets must be C-contiguous",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("lens", "options", "error", "message"), REFUSED)
def test_bad_input_is_refused_before_anything_runs(lens, options, error, message) -> None:
    given = dict(heads=HEADS, policy="sglang-triton", max_seq_len=4096, backend="emulator")
    before = np.array(lens).tolist()
    with pytest.raises(error, match=message):
        cd.plan_splits_on_device(lens, **(given | options))
    assert np.array(lens).tolist() == before


# ---------------------------------------------------------------------- without the host


class Unreadable:
    """An array of which only the outside can be known."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(np.int32)
        self.strides = np.empty(shape, np.int32).strides


def test_the_host_looks_at_no_length() -> None:
    launches: list[Any] = []
    runner = SimpleNamespace(run=launches.append, empty=lambda shape, dtype: Unreadable(shape))
    for name in DEVICE_POLICIES:
        rule = policies.device_rule(300, 8192, LLAMA, name)
        plan = device_plans.write_plan(runner, Unreadable((300,)), rule, 8192, name)
        device_plans.write_plan(runner, Unreadable((300,)), rule, 8192, name, plan)
    assert [launch.source for launch in launches] == ["plan_splits"] * 2 * len(DEVICE_POLICIES)
    assert all(launch.grid == (1, 1, 1) for launch in launches)


# ---------------------------------------------------------------------- through the kernels


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", policies.names())
def test_every_policys_plan_runs_and_equals_the_reference(name: str, backend: str) -> None:
    problem = build(Case(name, (1100, 0, 17, 1)))
    plan = cd.plan_splits(problem.seq_lens, HEADS, policy_of(name), 132)
    assert plan.counts.max() > 1
    placed = problem.to(module_of(backend)) if backend == "cuda" else problem
    out, lse = cd.decode_attention(*placed.arrays, plan, backend=backend)
    expect(problem, to_host(out), to_host(lse))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_device_plans_run_and_equal_the_reference(name: str, backend: str) -> None:
    problem = build(Case(name, (700, 0, 17, 1)))
    placed = problem.to(module_of(backend)) if backend == "cuda" else problem
    plan = cd.plan_splits_on_device(placed.seq_lens, HEADS, name, max_seq_len=1024, backend=backend)
    out, lse = cd.decode_attention(*placed.arrays, plan, backend=backend)
    expect(problem, to_host(out), to_host(lse))


# ---------------------------------------------------------------------- a hundred captured steps

STEPS = 100
LONGEST = 700


def lengths_of_steps() -> np.ndarray:
    """Every sequence grows and shrinks, at its own speed; at times some are empty."""
    step = np.arange(STEPS)[:, None]
    speed, phase = np.array([7, 14, 40, 23, 101]), np.array([0, 300, 650, 13, 99])
    wave = (phase + speed * step) % (2 * LONGEST)
    lens = np.where(wave <= LONGEST, wave, 2 * LONGEST - wave)
    lens[step[:, 0] % 9 == 4, 1] = 0
    return lens.astype(np.int32)


class Gate:
    """Holds the GPU until it is opened, so that a host that waits for the GPU gives itself away.

    Within the ``with`` block a kernel keeps the stream busy until the block ends, or gives up after
    about a second. A host that waits for anything behind it gets on only when it has given up.
    """

    SOURCE = """
    extern "C" __global__ void gate(volatile int* open, volatile int* gave_up, long long cycles) {
        const long long begin = clock64();
        while (*open == 0) {
            if (clock64() - begin > cycles) {
                *gave_up = 1;
                return;
            }
        }
    }"""

    def __init__(self, stream: Any) -> None:
        import cupy

        self._kernel = cupy.RawKernel(self.SOURCE, "gate")
        self._kernel.compile()
        self._stream = stream
        self._memory = cupy.cuda.alloc_pinned_memory(8)
        self._words = np.frombuffer(self._memory, np.int32, 2)

    def __enter__(self) -> Gate:
        self._words[:] = 0
        at = self._memory.ptr
        with self._stream:
            self._kernel((1,), (1,), (np.uint64(at), np.uint64(at + 4), np.int64(2_000_000_000)))
        return self

    def __exit__(self, *_: object) -> None:
        self.host_waited = bool(self._words[1])
        self._words[0] = 1
        self._stream.synchronize()


def count_allocations() -> Any:
    import cupy

    class Hook(cupy.cuda.MemoryHook):
        name = "count"
        requests = 0

        def alloc_preprocess(self, **_: Any) -> None:
            self.requests += 1

        def malloc_preprocess(self, **_: Any) -> None:
            self.requests += 1

    return Hook()


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_a_hundred_steps_without_host_or_allocator(name: str, captured: bool) -> None:
    """Lengths grow and shrink, the plan follows on the device, every step is right."""
    import cupy

    lens = lengths_of_steps()
    host = build(Case("longest", (LONGEST,) * lens.shape[1], HEADS))
    placed = host.to(cupy)
    seq_lens, lengths = cupy.zeros(lens.shape[1], np.int32), cupy.asarray(lens)
    arrays = (*placed.arrays[:4], seq_lens)
    options: dict[str, Any] = dict(max_seq_len=LONGEST)
    plan = cd.plan_splits_on_device(seq_lens, HEADS, name, **options)
    step = cd.DecodeStep(HEADS, plan, np.float32)

    def launch() -> None:
        cd.plan_splits_on_device(seq_lens, HEADS, name, out=plan, **options)
        step(*arrays)

    outs = cupy.full((STEPS, *step.out.shape), np.nan, np.float32)
    lses = cupy.full((STEPS, *step.lse.shape), np.nan, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        launch()  # compiles
        stream.synchronize()
        if captured:
            stream.begin_capture()
            launch()
            graph = stream.end_capture()
            graph.upload(stream)
            stream.synchronize()
    replay = graph.launch if captured else launch
    pool = cupy.get_default_memory_pool()
    held = pool.used_bytes(), pool.total_bytes(), pool.n_free_blocks()
    allocations, gate = count_allocations(), Gate(stream)
    with allocations, stream, gate:
        for i in range(STEPS):
            seq_lens.data.copy_from_device_async(lengths[i].data, seq_lens.nbytes)
            replay()
            outs[i].data.copy_from_device_async(step.out.data, step.out.nbytes)
            lses[i].data.copy_from_device_async(step.lse.data, step.lse.nbytes)
    assert not gate.host_waited
    assert allocations.requests == 0
    assert held == (pool.used_bytes(), pool.total_bytes(), pool.n_free_blocks())
    for i, now in enumerate(lens):
        problem = Problem(host.q, host.k_cache, host.v_cache, host.block_table, now)
        expect(problem, outs[i].get(), lses[i].get())


@pytest.mark.gpu
def test_lengths_may_be_a_torch_tensor() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    lens = np.array([700, 0, 41], np.int32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        placed = torch.from_numpy(lens).to("cuda", non_blocking=True)
        plan = cd.plan_splits_on_device(placed, HEADS, "sglang-triton", max_seq_len=700)
        placed.fill_(1)  # later in the stream: the plan is of the lengths before
    stream.synchronize()
    want, got = cd.plan_splits(lens, HEADS, "sglang-triton"), plan.to_host()
    np.testing.assert_array_equal(got.split_offsets, want.split_offsets)
    np.testing.assert_array_equal(got.split_begin[: want.num_rows], want.split_begin)


@pytest.mark.gpu
def test_the_gate_notices_a_host_that_waits() -> None:
    """Otherwise the test above would prove nothing."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    seq_lens = cupy.asarray(np.array([40, 700], np.int32))
    plan = cd.plan_splits_on_device(seq_lens, HEADS, "sglang-triton", max_seq_len=1024)
    cupy.cuda.Device().synchronize()
    gate = Gate(stream)
    with stream, gate:
        pass
    assert not gate.host_waited
    for wait in (plan.to_host, stream.synchronize, lambda: int(seq_lens[0])):
        with stream, gate:
            wait()
        assert gate.host_waited


@pytest.mark.gpu
def test_a_step_that_waits_cannot_be_captured() -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    seq_lens = cupy.asarray(np.array([40, 700], np.int32))
    plan = cd.plan_splits_on_device(seq_lens, HEADS, "sglang-triton", max_seq_len=1024)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError):
            plan.to_host()
        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
            stream.end_capture()
