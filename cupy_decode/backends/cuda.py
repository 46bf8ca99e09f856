"""The CUDA backend: compile with NVRTC through CuPy, cache, launch.

The only module of the package that imports CuPy, and it is imported on first use.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy
import numpy as np

import kernels_cu
from cupy_decode import specs
from cupy_decode.backends import BackendUnavailableError
from cupy_decode.heads import cdiv
from cupy_decode.specs import Arg, ArrayType, Launch

_OPTIONS = ("-std=c++17",)
#: Shared memory a block may use before the function must opt in, in bytes.
_DEFAULT_SHARED_LIMIT = 48 * 1024
_FLOAT32 = np.dtype(np.float32)
_CAST: Mapping[str, Any] = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "ptr": np.uint64}
_NULL = np.uint64(0)
_launch_kernel: Callable[..., Any] = cupy.cuda.driver.launchKernel
#: Bytes that buffers in one allocation start at multiples of.
_ALIGN = 256
#: Handle that stands for another stream in every thread.
_STREAM_PER_THREAD = 2
_CAPTURE_MODE_RELAXED = 2
_DEFAULT_QUEUE = (0, 0)
#: First of the GPUs, ten times their compute capability, whose launches can overlap.
_OVERLAP_CAPABILITY = 90


class KernelCompileError(RuntimeError):
    """A kernel did not compile; the message names kernel, specialisation and first error."""


@cache
def raw_kernel(source: str, entry: str, shared_mem: int, half_headers: bool, device: int) -> Any:
    """The compiled ``cupy.RawKernel`` of a specialisation on one device.

    Raises
    ------
    KernelCompileError
        With the first compiler error, and the package to install when a header is missing.
    ValueError
        If the device has less shared memory per block than the specialisation needs.
    """
    limit = cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
    if shared_mem > limit:
        raise ValueError(
            f"{entry} needs {shared_mem} bytes of shared memory per block but this device has "
            f"{limit}; use a smaller head_dim or a narrower cache dtype"
        )
    options = _OPTIONS if half_headers else (*_OPTIONS, "-DCUPY_DECODE_FP32_ONLY")

    def compiled() -> Any:
        code = kernels_cu.source(source)
        module = cupy.RawModule(code=code, options=options, name_expressions=[entry])
        return module.get_function(entry)

    try:
        kernel = compiled()
    except cupy.cuda.compiler.CompileException as error:
        raise KernelCompileError(_explain(source, entry, str(error))) from error
    except OSError:
        # The compile cache cannot be written. That costs the time to compile, and nothing else.
        with _environment(CUPY_CACHE_IN_MEMORY="1"):
            kernel = compiled()
    # One function serves every launch of a specialisation, whatever its shared memory: only raise.
    if shared_mem > max(_DEFAULT_SHARED_LIMIT, kernel.max_dynamic_shared_size_bytes):
        kernel.max_dynamic_shared_size_bytes = shared_mem
    return kernel


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _explain(source: str, entry: str, log: str) -> str:
    first = next((line for line in log.splitlines() if "error" in line), log.strip()[:400])
    missing = re.search(r'(?:cannot open source file|could not open source file) "([^"]+)"', log)
    hint = ""
    if missing:
        hint = (
            f"\n{missing[1]} is part of the CUDA headers, which CuPy alone does not bring: "
            'install them with  python -m pip install "cupy-cuda13x[ctk]"  (or cuda12x)'
        )
    return f"kernel {source}, specialisation {entry} did not compile: {first}{hint}"


def _cast(ctype: str, value: Any) -> Any:
    """A value as the C type of its parameter: CuPy would pass Python floats as double."""
    if ctype != "ptr":
        return _CAST[ctype](value)
    return _NULL if value is None else value


def _kernel_of(launch: Launch) -> Any:
    return raw_kernel(
        launch.source,
        launch.entry,
        launch.shared_mem,
        launch.half_headers,
        cupy.cuda.runtime.getDevice(),
    )


def run(launch: Launch) -> None:
    """Launch on the current device and stream; returns without waiting."""
    if launch.overlap:
        values = [pointer(a.value) if a.ctype == "ptr" else a.value for a in launch.args]
        slots = _slots(launch.args, values)  # alive until the driver has read them
        stream = cupy.cuda.get_current_stream().ptr
        call = _overlapping(launch, _kernel_of(launch).kernel.ptr)
        call(stream, ctypes.addressof(slots[1]), 0)
        return
    args = [_cast(a.ctype, a.value) for a in launch.args]
    _kernel_of(launch)(launch.grid, launch.block, args, shared_mem=launch.shared_mem)


def _slots(args: Sequence[Arg], values: Sequence[Any]) -> tuple[Any, Any]:
    """Arguments as the driver reads them: slots of 8 bytes each, and the addresses of those."""
    slots = (ctypes.c_uint64 * len(args))()
    first = ctypes.addressof(slots)
    for i, (arg, value) in enumerate(zip(args, values, strict=True)):
        number = _CAST[arg.ctype](value).tobytes()
        ctypes.memmove(first + 8 * i, number, len(number))
    addresses = (ctypes.c_uint64 * len(args))(*range(first, first + 8 * len(args), 8))
    return slots, addresses


def _overlapping(launch: Launch, function: int) -> Callable[[int, int, int], None]:
    """``_launch_kernel`` of one launch that may start before the one before has ended.

    CuPy has no launch with attributes. Not for two threads at a time.
    """
    driver = _bindings()
    allowed = driver.CUlaunchAttribute()
    ids = driver.CUlaunchAttributeID
    allowed.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    allowed.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_mem
    config.attrs, config.numAttrs = [allowed], 1
    handle, launch_kernel = driver.CUfunction(function), driver.cuLaunchKernelEx

    def call(stream: int, parameters: int, extra: int) -> None:
        config.hStream = stream
        (error,) = launch_kernel(config, handle, parameters, extra)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx failed: {error!r}")

    return call


@cache
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            "overlap=True needs the package cuda-bindings:  "
            "python -m pip install -e '.[cuda13]'  (or cuda12)"
        ) from error
    return driver


def check_overlap(device: int) -> None:
    """Raise where launches of a device cannot overlap.

    Raises
    ------
    ValueError
        If the device is older than Hopper.
    BackendUnavailableError
        If the package is missing that launches need then.
    """
    capability = str(cupy.cuda.Device(device).compute_capability)
    if int(capability) < _OVERLAP_CAPABILITY:
        raise ValueError(
            "overlap must be False on GPUs of compute capability below 9.0, where launches of a "
            f"stream do not overlap; got overlap=True on one of {capability[:-1]}.{capability[-1]}"
        )
    _bindings()


class Bound:
    """Launches on the current device, one after the other, whose pointers are given on every call.

    Everything else is cast and looked up once, and the arguments stay in the 8-byte slots that the
    driver reads them from: CuPy would convert all forty of them on every launch.

    Parameters
    ----------
    launches : sequence of Launch
        Kernels take their pointers first. One without a value is null in every call.
    places : mapping of str to int
        Where each pointer is in the tuple that calls give; 0 is null.
    """

    def __init__(self, launches: Sequence[Launch], places: Mapping[str, int]) -> None:
        self._lock = threading.Lock()  # the slots are read while a launch is under way
        self._calls: list[tuple[Callable[..., Any], ...]] = []
        self._kept: list[Any] = []  # what the driver's pointers point to
        for launch in launches:
            function = _kernel_of(launch).kernel
            pointers = [arg for arg in launch.args if arg.ctype == "ptr"]
            values = [0 if arg.ctype == "ptr" else arg.value for arg in launch.args]
            slots, addresses = _slots(launch.args, values)
            found = [0 if arg.value is None else places[arg.name] for arg in pointers]
            pick = operator.itemgetter(*found)
            pack = functools.partial(struct.Struct(f"{len(found)}Q").pack_into, slots, 0)
            where = (function.ptr, *launch.grid, *launch.block, launch.shared_mem)
            call: Callable[..., Any] = functools.partial(_launch_kernel, *where)
            if launch.overlap:
                call = _overlapping(launch, function.ptr)
            self._calls.append((pick, pack, call, ctypes.addressof(addresses)))  # type: ignore[arg-type]
            self._kept += [function, slots, addresses]

    def __call__(self, pointers: tuple[int, ...]) -> None:
        """Launch on the current stream."""
        stream = cupy.cuda.get_current_stream().ptr
        with self._lock:
            for pick, pack, call, parameters in self._calls:
                pack(*pick(pointers))
                call(stream, parameters, 0)

    def again(self) -> None:
        """Launch with the pointers of the last call."""
        stream = cupy.cuda.get_current_stream().ptr
        with self._lock:
            for _, _, call, parameters in self._calls:
                call(stream, parameters, 0)


# ---------------------------------------------------------------------- memory of kernels


def pointer(array: Any) -> int:
    """What ``Bound`` takes for an array, or for None."""
    return 0 if array is None else array.data.ptr


def scratch(arrays: Sequence[ArrayType | None]) -> Callable[[], tuple[Any, tuple[int, ...]]]:
    """A function that allocates buffers from the current device's pool: their owner and addresses.

    One allocation, and addresses instead of arrays, because making an array costs more than all
    the rest of it.
    """
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        if array is not None:
            end += cdiv(array.size * array.dtype.itemsize, _ALIGN) * _ALIGN

    def allocate() -> tuple[Any, tuple[int, ...]]:
        memory = cupy.cuda.alloc(end)
        base = memory.ptr
        return memory, tuple([base + start for start in starts])

    return allocate if end else lambda: (None, (0,) * len(starts))


class Workspace:
    """Room for the partial states and the counters of the fast kernel, of so many bytes.

    The counters are zero whenever no kernel uses them.
    """

    def __init__(self, partials: int, arrivals: int) -> None:
        self.sizes = partials, arrivals
        with relaxed():
            # From CUDA itself: a pool might hand out what kernels of its stream still use.
            self._owners = cupy.cuda.Memory(partials), cupy.cuda.Memory(arrivals)
            self.pointers = tuple([owner.ptr for owner in self._owners])
            stream = cupy.cuda.Stream(non_blocking=True)  # no part of any graph
            cupy.cuda.runtime.memsetAsync(self.pointers[1], 0, arrivals, stream.ptr)
            stream.synchronize()


#: By device and queue. They are never freed: kernels and graphs may still use them, and nothing
#: tells when they no longer do. Those outgrown are kept beside.
_workspaces: dict[tuple[int, tuple[int, int]], Workspace] = {}
_kept_for_good: list[Any] = []
_growing = threading.Lock()


def workspace(device: int, queue: tuple[int, int], partials: int, arrivals: int) -> Workspace:
    """A workspace of at least so many bytes that only the current device and this queue use."""
    key = device, queue
    found = _workspaces.get(key)
    if found is None or found.sizes[0] < partials or found.sizes[1] < arrivals:
        with _growing:  # else of two that two threads make, one would be freed while it is used
            found = _grown(key, partials, arrivals)
    return found


def _grown(key: tuple[int, tuple[int, int]], partials: int, arrivals: int) -> Workspace:
    found = _workspaces.get(key)
    if found is not None:
        if found.sizes[0] >= partials and found.sizes[1] >= arrivals:
            return found
        _kept_for_good.append(found)
        partials, arrivals = max(partials, found.sizes[0]), max(arrivals, found.sizes[1])
    found = _workspaces[key] = Workspace(partials, arrivals)
    return found


def queue() -> tuple[int, int]:
    """What runs one after the other: the current stream, of one thread where it is the thread's
    own, and the number of the graph that is captured on it, 0 where none is."""
    stream = cupy.cuda.get_current_stream()
    handle = stream.ptr
    if not handle:  # the default stream, which cannot be captured
        return _DEFAULT_QUEUE
    graph = _graph_number(handle) if stream.is_capturing() else 0
    return (-threading.get_ident() if handle == _STREAM_PER_THREAD else handle), graph


# ---------------------------------------------------------------------- graphs


def _graph_number(stream: int) -> int:
    """The number of the graph that is captured on a stream; no two of a process have the same."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _driver().cuStreamGetCaptureInfo_v2(  # CuPy has no such function
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo failed with CUDA driver error {error}")
    return number.value


@contextmanager
def relaxed() -> Iterator[None]:
    """Allocate while a stream of this process is being captured, in whatever mode."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def keep_for_good(*owners: Any) -> None:
    """Hold memory that a captured graph uses: nothing tells when a graph is gone."""
    _kept_for_good.extend(owners)


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


# ---------------------------------------------------------------------- arrays and devices


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    return cupy.ndarray(shape, dtype)


def outputs(shape: tuple[int, ...], dtype: Any) -> Callable[[], tuple[Any, Any, int, int]]:
    """A function that makes a new output and a new lse: the arrays and where they start.

    They share an allocation, because making one takes time.
    """
    rows = shape[:2]
    size = cdiv(math.prod(shape) * dtype.itemsize, _ALIGN) * _ALIGN
    both = size + math.prod(rows) * _FLOAT32.itemsize
    array, alloc = cupy.ndarray, cupy.cuda.alloc

    def make() -> tuple[Any, Any, int, int]:
        memory = alloc(both)
        start = memory.ptr
        out, lse = array(shape, dtype, memory), array(rows, _FLOAT32, memory + size)
        return out, lse, start, start + size

    return make


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    return cupy.zeros(shape, dtype)


def asarray(array: Any) -> Any:
    return cupy.asarray(array)


def num_sms(device: int | None = None) -> int:
    """Streaming multiprocessors of a device, the current one when left out."""
    return _num_sms(cupy.cuda.runtime.getDevice() if device is None else device)


def shared_per_sm(device: int | None = None) -> int:
    """Bytes of shared memory of one multiprocessor of a device, the current one when left out."""
    device = cupy.cuda.runtime.getDevice() if device is None else device
    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerMultiprocessor"])


@cache
def _num_sms(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def current_device() -> int:
    return int(cupy.cuda.runtime.getDevice())


def is_current(device: int) -> bool:
    """Whether launches and allocations go to this device as things stand."""
    return bool(cupy.cuda.runtime.getDevice() == device)


def on(device: int) -> Any:
    """A context in which launches and allocations go to this device."""
    return cupy.cuda.Device(device)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel to launch yourself.

    Attributes
    ----------
    raw : cupy.RawKernel
    block : (int, int, int)
        Threads of a block.
    shared_mem : int
        Dynamic shared memory per block, in bytes.
    argument_order : tuple of kernels_cu.Parameter
        The CUDA signature: name, C type and shape note of each argument.
    """

    raw: Any
    block: tuple[int, int, int]
    shared_mem: int
    argument_order: tuple[kernels_cu.Parameter, ...]
    head_tiles: int = 1

    def grid(self, *shape: int) -> tuple[int, int, int]:
        """Launch grid; for ``paged_split_k`` give (plan rows, num_kv_heads)."""
        x, y, z = (*shape, 1, 1)[:3]
        return (x, y, z * self.head_tiles)

    def __call__(self, grid: tuple[int, ...], **arguments: Any) -> None:
        """Launch with arguments by name; numbers are cast to the signature's C types."""
        wanted = [p.name for p in self.argument_order]
        if set(arguments) != set(wanted):
            missing = [n for n in wanted if n not in arguments]
            unknown = [n for n in arguments if n not in wanted]
            raise TypeError(f"arguments missing: {missing}; not in the signature: {unknown}")
        packed = [_cast(p.kind, arguments[p.name]) for p in self.argument_order]
        self.raw(grid, self.block, packed, shared_mem=self.shared_mem)


def kernel(name: str, spec: specs.KernelSpec) -> Kernel:
    """Compile a kernel for the current device."""
    shared_mem = specs.shared_mem(name, spec)
    raw = raw_kernel(
        name,
        specs.entry(name, spec),
        shared_mem,
        specs.needs_half_headers(name, spec),
        cupy.cuda.runtime.getDevice(),
    )
    tiles = spec.head_tiles if name == "paged_split_k" else 1
    return Kernel(raw, specs.block(name, spec), shared_mem, kernels_cu.signature(name), tiles)
