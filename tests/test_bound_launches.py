"""What the CUDA backend hands to the driver, read back from the slots: CuPy, but no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import calls, checks
from cupy_decode.specs import ArrayType

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None, reason="needs CuPy: pip install '.[compile]'"
    ),
]

NUMBER = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
PLANS = {
    None: None,
    "split": checks.PlanType(
        ArrayType.contiguous((4,), np.dtype(np.int32), 0),
        ArrayType.contiguous((12,), np.dtype(np.int32), 0),
        False,
    ),
    "unsplit": checks.PlanType(
        ArrayType.contiguous((4,), np.dtype(np.int32), 0),
        ArrayType.contiguous((3,), np.dtype(np.int32), 0),
        True,
    ),
}


class At:
    """An array of which only the address is asked."""

    def __init__(self, address: int) -> None:
        self.data = self
        self.ptr = address


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches that reached the driver, in place of a driver: (launch, its arguments by name)."""
    import cupy

    from cupy_decode.backends import cuda

    reached: list[Any] = []
    bound: list[Any] = []

    def kernel_of(launch: Any) -> Any:
        bound.append(launch)
        return type("Kernel", (), {"kernel": At(len(bound) - 1)})

    def launch_kernel(function: int, *rest: Any) -> None:
        launch = bound[function]
        grid, block, shared_mem, stream, parameters = (
            rest[:3], rest[3:6], rest[6], rest[7], rest[8],
        )  # fmt: skip
        assert (grid, block, shared_mem) == (launch.grid, launch.block, launch.shared_mem)
        assert stream == 7
        slots = (ctypes.c_uint64 * len(launch.args)).from_address(parameters)
        values = {
            arg.name: NUMBER.get(arg.ctype, ctypes.c_uint64).from_address(slot).value
            for arg, slot in zip(launch.args, slots, strict=True)
        }
        reached.append((launch, values))

    def scratch(arrays: Any) -> Any:
        return lambda: (None, tuple(1000 * (i + 1) for i in range(len(arrays))))

    monkeypatch.setattr(cuda, "_kernel_of", kernel_of)
    monkeypatch.setattr(cuda, "_launch_kernel", launch_kernel)
    monkeypatch.setattr(cuda, "scratch", scratch)
    monkeypatch.setattr(cuda, "num_sms", lambda device=0: 132)
    monkeypatch.setattr(cuda, "shared_per_sm", lambda device=0: 233472)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: At(7))
    return reached


@pytest.mark.parametrize("plan", [None, "size", "split", "unsplit"])
@pytest.mark.parametrize("dtypes", [("float32", "float32", None), ("float16", "uint8", "e4m3")])
def test_every_argument_arrives(plan: str | None, dtypes: Any, driver: list[Any]) -> None:
    q_dtype, kv_dtype, elements = dtypes

    def array(shape: tuple[int, ...], dtype: Any) -> ArrayType:
        return ArrayType.contiguous(shape, np.dtype(dtype), 0)

    q, cache = array((3, 8, 64), q_dtype), array((9, 16, 2, 64), kv_dtype)
    table, lens, per_head = array((3, 4), "int32"), array((3,), "int32"), array((8,), "float32")
    options = itertools.product((None, per_head), (None, per_head), (None, 9), (None, 5.0))
    for slopes, sinks, window, cap in options:
        kind = PLANS.get(plan)
        counts = {None: (1, None), "size": (None, 32)}.get(plan, (None, None))
        call = calls.call_of(
            "auto", "readable", q, cache, cache, table, lens, slopes, sinks, None, None, None,
            kind, *counts, None, window, cap, elements,
        )  # fmt: skip
        driver.clear()
        given = [At(16 * (100 + i)) for i in range(7)]
        arrays = calls.Arrays(*given[:5], slopes and given[5], sinks and given[6], None, None)
        made = None if kind is None else cd.SplitPlan(At(201), At(202))
        launches = call.new_launches(kind, call.refusal)
        _, room = launches.own_room()
        if made is not None:
            room += call.plan_pointers(made)
        launches.launch((*call.pointers(arrays), 301, 302, 0, *room))

        want = dict(zip(calls.Arrays._fields, (a.ptr for a in given), strict=False))
        want |= dict(out=301, lse=302, fault=0)
        if made is not None:
            want |= dict(split_offsets=201, split_begin=202)
        for launch, values in driver:
            for arg in launch.args:
                if arg.ctype != "ptr":
                    number = np.float32(arg.value) if arg.ctype == "f32" else arg.value
                    assert values[arg.name] == number, arg.name
                elif arg.value is None:
                    assert arg.name != "fault" or values[arg.name] == 0
                elif arg.name in want:
                    assert values[arg.name] == want[arg.name], arg.name
                else:
                    assert values[arg.name] >= 1000, f"{arg.name} is no scratch"
        names = [launch.source for launch, _ in driver]
        whole = plan in (None, "unsplit") and sinks is None
        planned = ["plan_splits"] if plan == "size" or (plan is None and not whole) else []
        stages = ["paged_split_k"] if whole else ["paged_split_k", "reduce_splits"]
        assert names == planned + stages
        if not whole:
            (_, stage_1), (_, stage_2) = driver[-2:]
            wrote = stage_1["acc_out"], stage_1["m_out"], stage_1["l_out"]
            assert wrote == (stage_2["acc"], stage_2["m"], stage_2["l"])
            assert stage_1["split_offsets"] == stage_2["split_offsets"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_argument_of_the_fast_kernel_arrives(dtype: str, driver: list[Any]) -> None:
    def array(
        *shape: int, dtype: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    ) -> Any:
        return ArrayType.contiguous(shape, np.dtype(dtype), 0)

    q, cache = array(3, 8, 64), array(9, 16, 2, 64)
    table, lens = array(3, 4, dtype="int32"), array(3, dtype="int32")
    nothing = (None,) * 12
    call = calls.call_of("auto", "auto", q, cache, cache, table, lens, *nothing)
    assert call.refusal is None
    launches = call.new_launches(None, call.refusal)
    given = [At(16 * (100 + i)) for i in range(5)]
    arrays = calls.Arrays(*given, None, None, None, None)
    launches.launch((*call.pointers(arrays), 301, 302, 0, 401, 402))
    ((launch, values),) = driver
    want = dict(zip(calls.Arrays._fields, (a.ptr for a in given), strict=False))
    want |= dict(out=301, lse=302, fault=0, partials=401, arrivals=402)
    want |= dict.fromkeys(("alibi_slopes", "sinks", "k_scales", "v_scales"), 0)
    for arg in launch.args:
        number = np.float32(arg.value) if arg.ctype == "f32" else arg.value
        assert values[arg.name] == (want[arg.name] if arg.ctype == "ptr" else number), arg.name


@pytest.fixture
def arrays_of_cupy(driver: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes CuPy arrays of memory that does not exist."""
    import cupy

    from cupy_decode.backends import cuda

    starts = itertools.count(1 << 30, 1 << 24)

    def memory(size: int) -> Any:
        owner = cupy.cuda.UnownedMemory(next(starts), max(size, 1), None, 0)
        return cupy.cuda.MemoryPointer(owner, 0)

    def array(shape: tuple[int, ...], dtype: str) -> Any:
        dtype = np.dtype(dtype)
        return cupy.ndarray(shape, dtype, memory(int(np.prod(shape)) * dtype.itemsize))

    class Workspace:
        def __init__(self, partials: int, arrivals: int) -> None:
            self.sizes, self.pointers = (partials, arrivals), (401, 402)

    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(memory)
    monkeypatch.setattr(cuda, "queue", lambda: (0, 0))
    monkeypatch.setattr(cuda, "is_current", lambda device: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "Workspace", Workspace)
    monkeypatch.setattr(cuda, "zeros", array)
    monkeypatch.setattr(cuda, "_workspaces", {})
    calls.forget()
    yield array
    calls.forget()
    cupy.cuda.set_allocator(before)


def _problem(array: Any) -> list[Any]:
    cache = array((9, 16, 2, 64), "float16")
    table, lens = array((3, 4), "int32"), array((3,), "int32")
    return [array((3, 8, 64), "float16"), cache, array((9, 16, 2, 64), "float16"), table, lens]


NAMES = ("q", "k_cache", "v_cache", "block_table", "seq_lens")


def test_a_call_made_before_hands_over_this_calls_arrays(
    driver: list[Any], arrays_of_cupy: Any
) -> None:
    for change in (None, *range(5), None):
        arrays = _problem(arrays_of_cupy)
        if change is not None:
            arrays[change] = _problem(arrays_of_cupy)[change]
        driver.clear()
        out, lse = cd.decode_attention(*arrays)
        ((launch, values),) = driver
        assert launch.source == "paged_split_k_mma"
        want = dict(zip(NAMES, (x.data.ptr for x in arrays), strict=True))
        want |= dict(out=out.data.ptr, lse=lse.data.ptr, partials=401, arrivals=402, fault=0)
        assert {name: values[name] for name in want} == want
        assert (out.shape, out.dtype, lse.shape) == ((3, 8, 64), np.float16, (3, 8))
        assert (out.data.ptr % 256, lse.data.ptr % 256) == (0, 0)
        assert lse.data.ptr >= out.data.ptr + out.nbytes
        own = arrays_of_cupy((3, 8, 64), "float16")
        assert cd.decode_attention(*arrays, out=own)[0] is own
        assert driver[-1][1]["out"] == own.data.ptr
        with pytest.raises(ValueError, match="out must not share memory with q"):
            cd.decode_attention(*arrays, out=arrays[0])
        assert len(driver) == 2


def test_a_table_that_widens_goes_through_few_workspaces(
    driver: list[Any], arrays_of_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy_decode.backends import cuda

    monkeypatch.setattr(cuda, "_kept_for_good", [])
    q, cache, *_ = _problem(arrays_of_cupy)
    lens = arrays_of_cupy((3,), "int32")
    step = cd.DecodeStep(cd.HeadConfig(8, 2, 64), None, "float16", batch=3)
    readable = cd.DecodeStep(
        cd.HeadConfig(8, 2, 64), None, "float16", batch=3, kernel="readable", deterministic=True
    )
    for columns in range(1, 3000, 7):
        table = arrays_of_cupy((3, columns), "int32")
        for call in (cd.decode_attention, step, readable):
            call(q, cache, cache, table, lens)
    kept = cuda._kept_for_good
    assert 5 < len(kept) <= 13
    assert sum(w.sizes[0] for w in kept) < 2 * cuda._workspaces[0, (0, 0)].sizes[0]
    assert len(step._rooms) <= len(kept) + 1
    # Its plan's rows grow up to the number of splits as well.
    assert len(readable._rooms) <= 9 + 22


def test_two_threads_on_one_stream_share_a_workspace(
    arrays_of_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy_decode.backends import cuda

    both = threading.Barrier(2)

    class Slow:
        def __init__(self, partials: int, arrivals: int) -> None:
            self.sizes = partials, arrivals
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # for the other thread to be here as well, if it may

    monkeypatch.setattr(cuda, "Workspace", Slow)
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda _: cuda.workspace(0, (0, 0), 512, 64), range(2))
    assert one is two


@pytest.fixture
def bindings(driver: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What stands for cuda.bindings.driver: launches with attributes, which are gathered here."""
    from cupy_decode.backends import cuda

    attributes: list[Any] = []

    def launch_kernel(config: Any, function: int, parameters: int, extra: int) -> tuple[int]:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        assert config.numAttrs == len(config.attrs)
        attributes.append({a.id: vars(a.value) for a in config.attrs})
        where = (config.sharedMemBytes, config.hStream)
        cuda._launch_kernel(function, *grid, *block, *where, parameters, extra)
        return (0,)

    made = types.SimpleNamespace(
        CUlaunchAttribute=lambda: types.SimpleNamespace(value=types.SimpleNamespace()),
        CUlaunchAttributeID=types.SimpleNamespace(
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6
        ),
        CUlaunchConfig=types.SimpleNamespace,
        CUfunction=lambda function: function,
        cuLaunchKernelEx=launch_kernel,
    )
    monkeypatch.setattr(cuda, "_bindings", lambda: made)
    return attributes


def _on_device_of(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(cupy.cuda, "Device", lambda number: device)


def test_a_call_that_overlaps_is_launched_with_the_attribute(
    bindings: list[Any], driver: list[Any], arrays_of_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy_decode.backends import cuda

    _on_device_of("90", monkeypatch)
    arrays = _problem(arrays_of_cupy)
    want = dict(zip(NAMES, (x.data.ptr for x in arrays), strict=True))
    step = cd.DecodeStep(cd.HeadConfig(8, 2, 64), None, "float16", batch=3, overlap=True)
    overlapping: list[Any] = [
        lambda: cd.decode_attention(*arrays, overlap=True),
        lambda: cd.decode_attention(*arrays, overlap=True),
        lambda: step(*arrays),
        lambda: step(*arrays),
    ]
    for number, call in enumerate(overlapping, start=1):
        out, lse = call()
        launch, values = driver[-1]
        assert launch.entry.endswith(", OVERLAP>")
        given = want | dict(out=out.data.ptr, lse=lse.data.ptr, partials=401, arrivals=402)
        assert {name: values[name] for name in given} == given
        assert bindings == [{6: {"programmaticStreamSerializationAllowed": 1}}] * number
    out, _ = cd.decode_attention(*arrays)
    assert len(bindings) == 4
    assert "OVERLAP" not in driver[-1][0].entry
    # and once, without a Bound
    cuda.run(replace(driver[-1][0], overlap=True).with_pointers(dict(q=arrays[0], out=out)))
    assert len(bindings) == 5
    values = driver[-1][1]
    assert (values["q"], values["out"], values["lse"]) == (want["q"], out.data.ptr, 0)


def test_overlap_needs_hopper_and_a_package(
    arrays_of_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy_decode.backends import BackendUnavailableError, cuda

    arrays = _problem(arrays_of_cupy)
    heads = cd.HeadConfig(8, 2, 64)
    calls_: list[Any] = [
        lambda: cd.decode_attention(*arrays, overlap=True),
        lambda: cd.DecodeStep(heads, None, "float16", batch=3, overlap=True),
    ]
    _on_device_of("89", monkeypatch)
    for call in calls_:
        with pytest.raises(ValueError, match=r"below 9\.0, .* got overlap=True on one of 8\.9"):
            call()
    _on_device_of("120", monkeypatch)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda._bindings.cache_clear()
    for call in calls_:
        with pytest.raises(BackendUnavailableError, match=r"needs the package cuda-bindings: .*13"):
            call()


def test_what_would_be_converted_does_not_overlap(
    bindings: list[Any], driver: list[Any], arrays_of_cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_device_of("90", monkeypatch)
    arrays = _problem(arrays_of_cupy)
    step = cd.DecodeStep(cd.HeadConfig(8, 2, 64), None, "float16", batch=3, overlap=True)
    for at, name in ((3, "block_table"), (4, "seq_lens")):
        copies = {name: arrays[at][:]}
        monkeypatch.setattr(checks, "integers", lambda n, x, q, made=copies: made.get(n, x))
        for call, options in ((cd.decode_attention, {"overlap": True}), (step, {})):
            with pytest.raises(TypeError, match=f"{name} must be int32 on the GPU with overlap"):
                call(*arrays, **options)  # type: ignore[operator]
    assert not driver


@pytest.mark.parametrize("planned", [False, True])
def test_a_step_called_again_notices_what_changed(
    planned: bool, driver: list[Any], arrays_of_cupy: Any
) -> None:
    """The same five arrays are launched as they were; another one, or another shape, is not."""
    plan = None
    if planned:
        plan = cd.SplitPlan(arrays_of_cupy((4,), "int32"), arrays_of_cupy((12,), "int32"))
    heads = cd.HeadConfig(8, 2, 64)
    step = cd.DecodeStep(heads, plan, "float16", batch=None if planned else 3)
    arrays = _problem(arrays_of_cupy)
    for change in (None, None, *range(5), None):
        if change is not None:
            arrays[change] = _problem(arrays_of_cupy)[change]
        driver.clear()
        out, lse = step(*arrays)
        assert len(driver) == (2 if planned else 1)
        _, values = driver[0]
        want = dict(zip(NAMES, (x.data.ptr for x in arrays), strict=True))
        assert {name: values[name] for name in want} == want
        _, values = driver[-1]
        assert (values["out"], values["lse"]) == (out.data.ptr, lse.data.ptr)
    driver.clear()
    step(*arrays, scale=0.5)
    step(*arrays)
    assert [v["scale"] for _, v in driver if "scale" in v] == [0.5, 0.125]
    arrays[3].shape = (4, 3)
    with pytest.raises(ValueError, match="block_table must have shape"):
        step(*arrays)
    arrays[3].shape = (3, 4)
    step(*arrays)
    arrays[0].shape = (3, 16, 32)
    with pytest.raises(ValueError, match="q must have shape"):
        step(*arrays)
