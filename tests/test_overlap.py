"""overlap=True: the same bits, and nothing touched early that the launch before may still use."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_decode as cd
import kernels_cu
from cupy_decode import fast
from cupy_decode.backends.emulator import EmulatorError, trace_launch

from .decode_cases import Case, Problem, build
from .mutations.checks_mma import fast_step
from .problems import paged_problem
from .test_fast import assert_same_bits

CASE = Case("overlap", (40, 0, 70), dtype="float16")
CASES = [
    CASE,
    Case("one", (333,), cd.HeadConfig(4, 1, 128), dtype="bfloat16"),
    Case("large blocks", (16, 17, 100), cd.HeadConfig(21, 1, 64), dtype="float16", block_size=48),
    Case("small blocks", (33, 5), dtype="bfloat16", block_size=4, sinks=True, alibi=True),
    Case("one key a block", (1, 50), dtype="float16", block_size=1),
    Case("window", (130, 70, 8), dtype="float16", window=40),
    Case("8 bits", (130, 0), dtype="bfloat16", kv_dtype="e4m3", scales="sequence"),
]


# ---------------------------------------------------------------------- in the emulator


@pytest.mark.emulator
@pytest.mark.parametrize("schedule", ["forward", "reverse"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_the_same_and_nothing_is_touched_early(case: Case, schedule: str) -> None:
    problem = build(case)
    plain = fast_step(problem, {}, schedule)
    assert_same_bits(plain, fast_step(problem, {}, schedule, overlap=True))
    cut = dict(num_blocks=2, unit_pages=4)
    assert_same_bits(plain, fast_step(problem, {}, schedule, overlap=True, **cut))


@pytest.mark.emulator
def test_older_pages_are_read_before_the_wait() -> None:
    """What else would overlap be for: were they late as well, that would be noticed."""
    problem = build(CASE)
    block = problem.block_table[0, 0]

    class AllLate(Problem):
        def newest(self) -> list[Any]:
            return [self.k_cache[block]]

    with pytest.raises(EmulatorError, match=r"ahead of the wait.* bytes at byte \d+ of k_cache"):
        fast_step(AllLate(*problem.arrays, problem.options), {}, "forward", overlap=True)


@pytest.mark.emulator
def test_a_wait_behind_the_queries_is_noticed() -> None:
    name = "paged_split_k_mma.cu"
    text = kernels_cu.read(name)
    wait, load = "            griddepcontrol_wait();\n", "            load_queries(work);\n"
    assert text.count(wait + load) == 1
    files = {name: text.replace(wait + load, load + wait)}
    fast_step(build(CASE), files, "forward")
    with pytest.raises(EmulatorError, match=r"access ahead of the wait .*of q ") as caught:
        fast_step(build(CASE), files, "forward", overlap=True)
    assert "load_queries" in caught.value.source or "QueryTile" in caught.value.source


@pytest.mark.emulator
def test_the_operators_pass_it_on() -> None:
    problem = build(CASE)
    call = dict(backend="emulator", explain=True)
    out, lse, said = cd.decode_attention(*problem.arrays, **call)
    again = cd.decode_attention(*problem.arrays, overlap=True, **call)
    assert_same_bits((out, lse), again)
    assert not said.overlap
    assert again[2].overlap
    assert "Overlap: it reads its first pages before" in str(again[2])
    assert "Overlap" not in str(said)
    traced = trace_launch(cd.decode_attention, *problem.arrays, overlap=True)
    assert traced.launches[0].kernel.endswith(", OVERLAP>")

    step = cd.DecodeStep(CASE.heads, None, np.float16, "emulator", batch=3, overlap=True)
    assert_same_bits((out, lse), step(*problem.arrays))


def test_the_reference_takes_what_the_kernels_take() -> None:
    problem = build(CASE)
    plain = cd.decode_attention(*problem.arrays)
    assert_same_bits(plain, cd.decode_attention(*problem.arrays, overlap=True))


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_what_cannot_overlap_is_refused(backend: str) -> None:
    half = build(CASE).arrays
    wide = build(replace(CASE, dtype="float32")).arrays
    for arrays, options, words in (
        (wide, {}, "q is float32"),
        (half, {"kernel": "readable"}, "kernel='readable' asks for it"),
        (half, {"num_splits": 2}, "num_splits is set"),
        (half, {"plan": CASE.plan()}, "plan is set"),
    ):
        with pytest.raises(ValueError, match=f"overlap must be False where .*{words}"):
            cd.decode_attention(*arrays, overlap=True, backend=backend, **options)
    with pytest.raises(TypeError, match="overlap must be True or False; got 1"):
        cd.decode_attention(*half, overlap=1, backend=backend)
    room = np.zeros(half[0].size + 1, np.float16)
    odd = room[1:].reshape(half[0].shape)
    assert odd.ctypes.data % fast.ALIGNMENT == 2
    with pytest.raises(ValueError, match=r"overlap must be False where .*q must start and step"):
        cd.decode_attention(odd, *half[1:], overlap=True, backend=backend)


def test_a_step_that_cannot_overlap_is_refused_when_it_is_made() -> None:
    made = dict(backend="emulator", overlap=True)
    for dtype, options, words in (
        (np.float32, dict(plan=None, batch=2), "q is float32"),
        (np.float16, dict(plan=CASE.plan()), "plan is set"),
        (np.float16, dict(plan=None, batch=2, kernel="readable"), "kernel='readable' asks for it"),
    ):
        with pytest.raises(ValueError, match=f"overlap must be False where .*{words}"):
            cd.DecodeStep(CASE.heads, dtype=dtype, **made, **options)
    with pytest.raises(TypeError, match="overlap must be True or False; got None"):
        cd.DecodeStep(CASE.heads, None, np.float16, "emulator", batch=2, overlap=None)


def test_only_what_is_asked_for_is_compiled_with_it() -> None:
    spec = fast.FastSpec("bfloat16", 128, 8, 4)
    assert "OVERLAP" not in spec.entry
    assert replace(spec, options=("OVERLAP",)).shared_mem == spec.shared_mem
    bits = dict(re.findall(r"constexpr int (\w+) = (\d+); ", kernels_cu.read("scores.cuh")))
    assert [int(bits[name]) for name in fast.OPTIONS] == [1 << i for i in range(len(fast.OPTIONS))]


# ---------------------------------------------------------------------- on a GPU

HEADS, LENS = cd.HeadConfig(8, 2, 64), (800, 33, 16, 257)

#: A kernel of one block that lets the launch behind go at once, or not, takes its time and then
#: writes what depends on a counter: q and every sequence's newest key, and what `also` says.
WRITER = r"""
extern "C" __global__ void writer(unsigned short* q, unsigned short* k_cache,
                                  unsigned short* v_cache, const int* block_table, int* seq_lens,
                                  unsigned int* counter, int q_size, int row, int columns,
                                  int batch, int early, int also) {
    if (early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const unsigned int n = *counter;
    const long long begin = clock64();
    while (clock64() - begin < 20000 + n % 7 * 3000) {}
    auto number = [&](unsigned int i) {          // a float16 between 1 and 2
        unsigned int x = (i + 1) * 2654435761u ^ n * 40503u;
        x ^= x >> 15, x *= 2246822519u;
        return (unsigned short)(0x3c00 | (x >> 16 & 0x3ff));
    };
    for (int i = threadIdx.x; i < q_size; i += blockDim.x) q[i] = number(i);
    for (int b = 0; b < batch; b++) {
        const int key = seq_lens[b] - 1;
        auto write = [&](int key) {
            const long long at = (block_table[b * columns + key / 16] * 16ll + key % 16) * row;
            for (int i = threadIdx.x; i < row; i += blockDim.x) {
                k_cache[at + i] = number(1000 * b + i);
                v_cache[at + i] = number(2000 * b + i + 7);
            }
        };
        write(key);
        if (also == 1)                           // older pages
            for (int older = 0; older < key / 16 * 16; older++) write(older);
    }
    __syncthreads();
    if (also == 2 && threadIdx.x < batch && seq_lens[threadIdx.x] % 16 != 0)
        seq_lens[threadIdx.x] ^= 8;              // within the page
    if (threadIdx.x == 0) *counter = n + 1;
}

// Adds up what two launches have left, and how often that differs.
extern "C" __global__ void compare(const unsigned short* a, const unsigned short* b, int size,
                                   unsigned long long* differ, unsigned long long* sum) {
    __shared__ unsigned int any;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    unsigned long long mine = 0;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        mine += (unsigned long long)a[i] * (i + 1);
        if (a[i] != b[i]) any = 1;
    }
    atomicAdd(sum, mine);
    __syncthreads();
    if (threadIdx.x == 0) *differ += any;
}
"""


class Replays:
    """A graph: writer, launch that overlaps with it, the same launch without, comparison."""

    def __init__(self, early: bool, also: int = 0, launches: int = 1) -> None:
        import cupy

        from cupy_decode.backends import cuda

        problem = paged_problem(0, LENS, HEADS, dtype=np.float16)
        self.arrays = {name: cupy.asarray(x) for name, x in problem.items()}
        a = self.arrays
        q, k_cache = a["q"], a["k_cache"]
        machine = fast.Machine.of(cuda)
        spec = fast.spec_of(q, k_cache, block_table=a["block_table"])
        self.space = fast.workspace(cuda, spec, machine)
        self.outs = [cupy.empty_like(q) for _ in range(2)]
        lse = cupy.empty(q.shape[:2], np.float32)
        common = dict(lse=lse, space=self.space, scale=0.1, machine=machine)
        late, plain = (
            fast.launch(**a, out=out, overlap=overlap, **common)
            for out, overlap in zip(self.outs, (True, False), strict=True)
        )
        self.counter = cupy.zeros(1, np.uint32)
        self.differ, self.sum = cupy.zeros((2, 1), np.uint64)
        module = cupy.RawModule(code=WRITER, options=("-std=c++17",))
        writer, compare = module.get_function("writer"), module.get_function("compare")
        row = k_cache.shape[2] * k_cache.shape[3]
        numbers = (q.size, row, a["block_table"].shape[1], len(LENS), int(early), also)
        written = (q, k_cache, a["v_cache"], a["block_table"], a["seq_lens"], self.counter)

        def step() -> None:
            writer((1,), (256,), (*written, *map(np.int32, numbers)))
            for _ in range(launches):
                cuda.run(late)
            cuda.run(plain)
            compare((1,), (256,), (*self.outs, np.int32(q.size), self.differ, self.sum))

        stream = self.stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            step()  # compiles
            stream.synchronize()
            stream.begin_capture()
            step()
            self.graph = stream.end_capture()

    def run(self, times: int) -> int:
        """How many of so many replays differ."""
        before = int(self.differ[0])
        for _ in range(times):
            self.graph.launch(self.stream)
        self.stream.synchronize()
        assert int(self.counter[0]) >= times
        assert not self.space.arrivals.any()
        return int(self.differ[0]) - before


@pytest.fixture
def hopper() -> None:
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("launches overlap from compute capability 9.0 on")


@pytest.mark.gpu
@pytest.mark.parametrize("launches", [1, 3])
@pytest.mark.parametrize("early", [False, True])
def test_gpu_ten_thousand_replays_equal_those_without(
    early: bool, launches: int, hopper: None
) -> None:
    replays = Replays(early, launches=launches)
    sums = []
    for _ in range(10):
        assert replays.run(1000) == 0
        sums.append(int(replays.sum[0]))
    assert len(set(np.diff(np.array(sums, np.uint64)).tolist())) > 1  # results change all the time


@pytest.mark.gpu
@pytest.mark.parametrize("also", [1, 2], ids=["older pages", "seq_lens"])
def test_gpu_a_launch_before_that_breaks_the_contract_is_too_late(also: int, hopper: None) -> None:
    assert Replays(early=True, also=also).run(1000) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("prepared", [False, True])
def test_gpu_calls_and_steps_overlap_eagerly_and_in_graphs(prepared: bool, hopper: None) -> None:
    import cupy

    problem = paged_problem(1, LENS, HEADS, dtype=np.float16)
    arrays = [cupy.asarray(x) for x in problem.values()]
    want = [x.get() for x in cd.decode_attention(*arrays)]
    call: Any = cd.decode_attention
    options: dict[str, Any] = {"overlap": True}
    if prepared:
        call = cd.DecodeStep(HEADS, None, np.float16, batch=len(LENS), **options)
        options = {}
    for _ in range(3):  # checked, then as remembered
        assert_same_bits(want, [x.get() for x in call(*arrays, **options)])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(4):
            found = call(*arrays, **options)
        graph = stream.end_capture()
        for x in found:
            x.fill(-1)
        graph.launch()
    stream.synchronize()
    assert_same_bits(want, [x.get() for x in found])


@pytest.mark.gpu
def test_gpu_what_would_be_converted_is_refused(hopper: None) -> None:
    import cupy

    problem = paged_problem(1, LENS, HEADS, dtype=np.float16)
    arrays = [cupy.asarray(x) for x in problem.values()]
    step = cd.DecodeStep(HEADS, None, np.float16, batch=len(LENS), overlap=True)
    for call, options in ((cd.decode_attention, {"overlap": True}), (step, {})):
        with pytest.raises(TypeError, match="seq_lens must be int32 on the GPU with overlap=True"):
            call(*arrays[:4], arrays[4].astype(np.int64), **options)
        with pytest.raises(TypeError, match="block_table must be int32 on the GPU with overlap"):
            call(*arrays[:3], arrays[3].get().tolist(), arrays[4], **options)
