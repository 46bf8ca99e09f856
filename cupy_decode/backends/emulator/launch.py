"""Running one launch on the CPU, every access checked."""

from __future__ import annotations

import ctypes
import functools
import inspect
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

import kernels_cu
from cupy_decode.backends.emulator import build
from cupy_decode.backends.emulator.trace import BLOCKS, COUNTS, LaunchTrace
from cupy_decode.specs import Arg, Launch

#: Most shared memory a thread block may ask for, of which static arrays take at most 48 KiB.
MAX_SHARED = 227 * 1024
#: Accesses a thread may make without waiting for another before it counts as stuck.
MAX_ACCESSES = 1 << 26

#: Unused addresses on both sides of an argument: more than a 32-bit index of elements of 16 bytes
#: can stray. Where a process may not reserve that much, the smaller one.
_GUARDS = (1 << 35, 1 << 20)
#: Alignment that an argument keeps, in bytes.
_ALIGN = 256
#: Reserve addresses without a claim on memory. Python names the flag from 3.13 on; it is the same
#: number on Linux for x86-64 and aarch64.
_NORESERVE = 0x4000
#: Bytes from which copying an argument costs too much.
_IN_PLACE = 1 << 28

Schedule = Literal["forward", "reverse"]

_CODES = {"ptr": "p", "i32": "i", "i64": "l", "f32": "f"}
_SCALARS = {"i32": np.int32, "i64": np.int64, "f32": np.float32}
_ACCESSES = ("load", "store", "atomic access")
_SHARED, _FREE = 2, 0
_lock = threading.Lock()  # the runtime's state is the process's


class EmulatorError(RuntimeError):
    """A fault of the kernel, stopped before it did harm.

    No argument was changed, but for those too large to be copied (256 MiB).

    Attributes
    ----------
    kernel : str
        C++ name expression.
    block, thread : (int, int, int)
        ``blockIdx`` and ``threadIdx`` of the thread that was stopped.
    what : str
        The fault.
    source : str
        ``file:line`` of the access or wait, innermost call first; empty where unknown.
    """

    def __init__(
        self,
        kernel: str,
        block: tuple[int, ...],
        thread: tuple[int, ...],
        what: str,
        source: str,
    ) -> None:
        place = f" at {source}" if source else ""
        super().__init__(f"{kernel}, block {block}, thread {thread}{place}: {what}")
        self.kernel, self.block, self.thread = kernel, block, thread
        self.what, self.source = what, source


class _Segment(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("owner", ctypes.c_void_p),
        ("argument", ctypes.c_int64),
        ("load_stamp", ctypes.c_void_p),
        ("store_stamp", ctypes.c_void_p),
        ("late", ctypes.c_void_p),
        ("stored", ctypes.c_int32),
    )


class _Static(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_bytes", ctypes.c_uint64),
        ("kernel", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("num_segments", ctypes.c_int32),
        ("num_statics", ctypes.c_int32),
        ("statics", ctypes.c_void_p),
        ("read_only", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("block_counters", ctypes.c_void_p),
        ("num_pointers", ctypes.c_int32),
        ("reverse", ctypes.c_int32),
        ("max_accesses", ctypes.c_uint64),
        ("overlap", ctypes.c_int32),
    )


class _Failure(ctypes.Structure):
    _fields_ = (
        ("failed", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("space", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("address", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("shared_offset", ctypes.c_uint64),
        ("text", ctypes.c_char * 1024),
    )


class _Memory:
    """The pointer arguments in memory of the emulator's own, far apart.

    Each group of overlapping arguments becomes one segment with unused addresses around it, so that
    an index gone wrong meets nobody else's bytes and the nearest argument is the one that was
    meant. A segment keeps the alignment of its original. Where it has gaps or several owners, a
    byte for each of its bytes says which argument owns it, so that views are bounded element by
    element; and another one, where there are some, which of them are in ``late``.

    Arguments of more than _IN_PLACE bytes are used where they are, without that guard zone.
    """

    def __init__(self, arrays: list[np.ndarray], trace: bool, late: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        bounds = [byte_bounds(a) for a in arrays]
        groups: list[tuple[int, int, list[int]]] = []
        for i in sorted(range(len(arrays)), key=lambda i: bounds[i]):
            low, high = bounds[i]
            if groups and low < groups[-1][1] and arrays[i].size:
                first, last, members = groups.pop()
                groups.append((first, max(last, high), [*members, i]))
            else:
                groups.append((low, high if arrays[i].size else low, [i]))

        def whole(members: list[int]) -> bool:
            """One array without gaps, so that bounds are all there is to check: K and V of a
            step may be the same."""
            same = {(arrays[i].ctypes.data, arrays[i].shape, arrays[i].strides) for i in members}
            return len(same) == 1 and arrays[members[0]].flags.forc

        def arena(guard: int) -> tuple[np.ndarray, list[int | None]]:
            """Memory, and the place of each group in it; None for one that is used in place."""
            places: list[int | None] = []
            end = guard
            for low, high, members in groups:
                if whole(members) and high - low > _IN_PLACE:
                    places.append(None)
                    continue
                start = -(-end // _ALIGN) * _ALIGN + low % _ALIGN
                places.append(start)
                end = start + high - low + 2 * max(guard, high - low)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            return np.frombuffer(mmap.mmap(-1, end, flags=flags), np.uint8), places

        try:
            self.arena, places = arena(_GUARDS[0])
        except OSError:
            self.arena, places = arena(_GUARDS[1])
        self.views = list(arrays)
        self.members = [members for _, _, members in groups]
        self.segments = (_Segment * max(len(groups), 1))()
        self.keep: list[np.ndarray] = []  # what the segments point to
        for (low, high, members), place, segment in zip(
            groups, places, self.segments, strict=False
        ):
            segment.size = high - low
            segment.base = low if place is None else self.arena.ctypes.data + place
            segment.argument = members[0]
            for i in members:
                if place is None:
                    continue
                a = arrays[i]
                offset = place + a.ctypes.data - low
                self.views[i] = np.ndarray(a.shape, a.dtype, self.arena, offset, a.strides)
                self.views[i][...] = a
            if not whole(members):
                owner = np.zeros(high - low, np.uint8)
                for i in members:
                    mine = _bytes_of(arrays[i], owner, low)
                    mine[mine == 0] = i + 1
                segment.owner = owner.ctypes.data
                self.keep.append(owner)
            within = [x for x in late if x.size and low <= byte_bounds(x)[0] < high]
            if within:
                mask = np.zeros(high - low, np.uint8)
                for x in within:
                    _bytes_of(x, mask, low)[...] = 1
                segment.late = mask.ctypes.data
                self.keep.append(mask)
            if trace:
                stamps = [np.zeros(high - low, np.uint32) for _ in range(2)]
                segment.load_stamp, segment.store_stamp = (x.ctypes.data for x in stamps)
                self.keep += stamps

    def write_back(self) -> None:
        for members, segment in zip(self.members, self.segments, strict=False):
            for i in members:
                if segment.stored and self.arrays[i].flags.writeable:
                    self.arrays[i][...] = self.views[i]

    def locate(self, address: int, names: list[str]) -> str:
        """Where an address lies relative to the nearest argument, in words."""
        if address < 1 << 16:
            return f"address {address:#x}, so a null argument was followed"
        best: tuple[int, str] | None = None
        for name, view in zip(names, self.views, strict=True):
            low, high = byte_bounds(view) if view.size else (view.ctypes.data,) * 2
            what = f"{name} ({view.dtype}, shape {view.shape}, {high - low} bytes)"
            if low <= address < high:
                return f"byte {address - low} of {what}"
            before, after = low - address, address - high
            words = f"{before} bytes before" if before > 0 else f"{after} bytes past the end of"
            if best is None or max(before, after) < best[0]:
                best = (max(before, after), f"{words} {what}")
        return f"address {address:#x}" if best is None else best[1]


def _bytes_of(array: np.ndarray, numbers: np.ndarray, low: int) -> np.ndarray:
    """Of a number for each byte from address ``low`` on, those of the bytes of an array."""
    shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
    return np.ndarray(shape, np.uint8, numbers, array.ctypes.data - low, strides)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose every byte is 0xff: NaN or -1, so that a value nobody wrote shows."""
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xFF
    return array


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of zeros."""
    return np.zeros(shape, dtype)


def asarray(array: Any) -> np.ndarray:
    """The array itself: what the emulator runs on is on the host already."""
    return np.asarray(array)


def pointer(array: Any) -> Any:
    """What launches take for an array, or for None: the array itself."""
    return array


def run(
    launch: Launch,
    *,
    schedule: Schedule = "forward",
    source_text: str | None = None,
    trace: bool = False,
    late: Sequence[np.ndarray] = (),
) -> LaunchTrace | None:
    """Run a launch on the CPU; NumPy arguments are changed in place.

    Parameters
    ----------
    launch : Launch
    schedule : {"forward", "reverse"}
        Order of lanes, warps and blocks. A correct kernel gives the same result in both.
    source_text : str, optional
        Self-contained CUDA C++ to use instead of ``kernels_cu.source(launch.source)``.
    trace : bool
        Count accesses.
    late : sequence of arrays
        Arguments or parts of them that the launch before writes, of a launch that overlaps with it:
        reading them without waiting for it is an error, as is any write.

    Returns
    -------
    LaunchTrace or None
        The counts where asked for.

    Raises
    ------
    EmulatorError
        The kernel did something undefined; no argument was changed.
    EmulatorUnavailableError
        The compiler or a header is missing.
    RuntimeError
        The text does not compile.
    ValueError, TypeError
        The launch does not fit the kernel's signature or the machine's limits.
    """
    observer = _observer.get()
    if observer is not None:
        schedule, trace = observer.schedule, True
    if schedule not in ("forward", "reverse"):
        raise ValueError(f"schedule must be 'forward' or 'reverse'; got {schedule!r}")
    if source_text is None:
        source_text = _source(launch.source, () if observer is None else observer.files)
    module = build.load(source_text, launch.entry)
    _check(launch, module)
    with _lock:
        result = _run(launch, module, schedule == "reverse", trace, late)
    if observer is not None and result is not None:
        observer.launches.append(result)
    return result


@functools.cache
def _source(name: str, files: tuple[tuple[str, str], ...]) -> str:
    twins = (build.INCLUDE / "ptx.cuh").read_text(encoding="utf-8")
    return kernels_cu.source(name, substitute={"ptx.cuh": twins, **dict(files)})


class Traced(NamedTuple):
    """What an operator returned, and a trace of each launch it made."""

    result: Any
    launches: tuple[LaunchTrace, ...]

    def __repr__(self) -> str:
        parts = self.result if isinstance(self.result, tuple) else (self.result,)
        results = [f"{x.dtype} {x.shape}" if hasattr(x, "shape") else repr(x) for x in parts]
        launches = [f"{x.kernel} on a grid of {x.grid}" for x in self.launches]
        return f"Traced(result: {', '.join(results)}; launches: {', '.join(launches)})"


@dataclass
class _Observer:
    """In force while ``trace_launch`` runs an operator."""

    schedule: Schedule
    files: tuple[tuple[str, str], ...]
    launches: list[LaunchTrace] = field(default_factory=list)


_observer: ContextVar[_Observer | None] = ContextVar("_observer", default=None)


def trace_launch(
    operator: Callable[..., Any],
    *args: Any,
    schedule: Schedule = "forward",
    files: Mapping[str, str] | None = None,
    **options: Any,
) -> Traced:
    """Call an operator with ``backend="emulator"`` and count what its kernels do.

    Parameters
    ----------
    operator : callable
        ``decode_attention``, ``paged_split_k``, ``reduce_splits``, ``merge_states``, ``write_kv``.
    *args, **options
        Its arguments.
    schedule : {"forward", "reverse"}
        Order of lanes, warps and blocks.
    files : mapping of str to str, optional
        Texts to use instead of files of ``kernels_cu``, by file name: a kernel with a line changed.

    Returns
    -------
    Traced
        ``result`` and ``launches``, a ``LaunchTrace`` per launch in order.

    Raises
    ------
    EmulatorError
        A kernel did something undefined.
    TypeError
        ``operator`` takes no ``backend``, ``backend`` is among the options, or ``files`` holds
        something other than texts.
    ValueError
        ``files`` names a file that ``kernels_cu`` does not have.
    RuntimeError
        A text does not compile; the message has the compiler's lines.

    Notes
    -----
    ``print(traced.launches[i].table())`` is the quick look: loads, stores and bytes of every
    pointer argument. A kernel that has not been compiled before takes g++ seconds.

    Examples
    --------
    ::

        traced = trace_launch(decode_attention, q, k_cache, v_cache, block_table, seq_lens)
        out, lse = traced.result
        print(traced.launches[0]["k_cache"]["load_bytes"])  # of every thread block
    """
    if not _takes_backend(operator):
        raise TypeError(
            f"operator must be one of cupy_decode that takes backend=...; got {operator!r}"
        )
    if options.get("backend", "emulator") != "emulator":
        raise TypeError(
            f"backend={options['backend']!r}: trace_launch counts on the emulator only; "
            "leave backend out"
        )
    options["backend"] = "emulator"
    if files is not None and not isinstance(files, Mapping):
        raise TypeError(f"files must map file names to texts; got {type(files).__name__}")
    for name, text in (files or {}).items():
        if not (Path(kernels_cu.__file__).parent / str(name)).is_file():
            raise ValueError(f"files names {name!r}, which kernels_cu does not have")
        if not isinstance(text, str):
            raise TypeError(
                f"files[{name!r}] must be the text of the file, a str; got {type(text).__name__}; "
                "of a path give path.read_text()"
            )
    observer = _Observer(schedule, tuple((files or {}).items()))
    token = _observer.set(observer)
    try:
        result = operator(*args, **options)
    finally:
        _observer.reset(token)
    return Traced(result, tuple(observer.launches))


def _takes_backend(operator: Any) -> bool:
    try:
        parameters = inspect.signature(operator).parameters
    except (TypeError, ValueError):  # not callable, or built in
        return False
    kinds = [p.kind for p in parameters.values()]
    return "backend" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _check(launch: Launch, module: build.Module) -> None:
    for name, dims in (("grid", launch.grid), ("block", launch.block)):
        if len(dims) != 3 or min(dims) < 1:
            raise ValueError(f"{name} must be three positive sizes; got {dims}")
    threads = int(np.prod(launch.block))
    if threads > 1024:
        raise ValueError(f"block {launch.block} has {threads} threads; at most 1024 fit")
    static = sum(s.size for s in module.statics)
    if static > 48 * 1024 or not 0 <= launch.shared_mem <= MAX_SHARED - static:
        raise ValueError(
            f"shared_mem {launch.shared_mem} and {static} static bytes exceed the block's "
            f"{MAX_SHARED} (48 KiB of them static)"
        )
    given = "".join(_CODES[a.ctype] for a in launch.args)
    if given != module.signature:
        names = [a.name for a in launch.args]
        raise TypeError(
            f"{launch.entry} takes parameters of the types {module.signature!r} but the launch "
            f"has {given!r} (p pointer, i int, l 64-bit, f float): {', '.join(names)}"
        )
    for a in launch.args:
        if a.ctype == "ptr" and not (a.value is None or isinstance(a.value, np.ndarray)):
            raise TypeError(f"{a.name} must be a NumPy array or None; got {type(a.value).__name__}")


def _word(arg: Arg) -> int:
    value = np.array(arg.value, _SCALARS[arg.ctype])
    return int.from_bytes(value.tobytes().ljust(8, b"\0"), "little")


def _address(x: np.ndarray | None) -> Any:
    return None if x is None else x.ctypes.data


def _run(
    launch: Launch, module: build.Module, reverse: bool, trace: bool, late: Sequence[np.ndarray]
) -> LaunchTrace | None:
    pointers = [a for a in launch.args if a.ctype == "ptr"]
    present = [a for a in pointers if a.value is not None]
    memory = _Memory([a.value for a in present], trace, late)
    addresses = {a.name: v.ctypes.data for a, v in zip(present, memory.views, strict=True)}
    words = [addresses.get(a.name, 0) if a.ctype == "ptr" else _word(a) for a in launch.args]
    values = np.array(words, np.uint64)
    read_only = np.array([not a.value.flags.writeable for a in present], np.uint8)
    statics = (_Static * max(len(module.statics), 1))()
    for place, static in zip(statics, module.statics, strict=False):
        place.offset, place.size = static.offset, static.size
    num_blocks = int(np.prod(launch.grid))
    counts = np.zeros((num_blocks, len(present)), COUNTS) if trace else None
    blocks = np.zeros(num_blocks, BLOCKS) if trace else None
    what = _Launch(
        launch.grid,
        launch.block,
        launch.shared_mem,
        ctypes.cast(module.library.emu_call_kernel, ctypes.c_void_p),
        ctypes.addressof(memory.segments),
        len(memory.members),
        len(module.statics),
        ctypes.addressof(statics),
        read_only.ctypes.data,
        _address(counts),
        _address(blocks),
        len(present),
        reverse,
        MAX_ACCESSES,
        launch.overlap,
    )
    failure = _Failure()
    module.library.emu_prepare(values.ctypes.data_as(ctypes.c_void_p), len(values))
    if module.runtime.emu_run(ctypes.byref(what), ctypes.byref(failure)):
        raise _explain(launch, module, memory, [a.name for a in present], failure)
    memory.write_back()
    if counts is None or blocks is None:
        return None
    names = tuple(a.name for a in present)
    return LaunchTrace(launch.entry, launch.grid, launch.block, names, counts, blocks)


def _explain(
    launch: Launch, module: build.Module, memory: _Memory, names: list[str], failure: _Failure
) -> EmulatorError:
    what = failure.text.decode(errors="replace")
    if failure.size:
        access = f"{_ACCESSES[failure.access]} of {failure.size} bytes"
        if failure.space == _SHARED:
            where = _shared_place(launch, module, failure.shared_offset)
            what += f" ({access} at {where})"
        elif failure.space != _FREE:
            what += f" ({access} at {memory.locate(failure.address, names)})"
    if failure.other_pc:
        what += f"; the other access is at {_where(module, failure.other_pc)}"
    return EmulatorError(
        launch.entry,
        tuple(failure.block),
        tuple(failure.thread),
        what,
        _where(module, failure.pc),
    )


def _where(module: build.Module, pc: int) -> str:
    frames = build.source_lines(module, pc)
    return ", called from ".join(f"{place} ({function})" for function, place in frames)


def _shared_place(launch: Launch, module: build.Module, offset: int) -> str:
    if offset < MAX_SHARED:
        return f"byte {offset} of {launch.shared_mem} dynamic shared bytes"
    offset -= MAX_SHARED
    for s in module.statics:
        if s.offset <= offset < s.offset + s.size:
            return f"byte {offset - s.offset} of the {s.size} bytes of {s.name}"
    return "no __shared__ array"
