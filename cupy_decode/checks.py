"""Every argument check, once: the reference, the emulator and the GPU refuse the same calls.

Most checks look at what the host can see without waiting, types, shapes, strides and devices, and
take arrays or their ``ArrayType`` alike; their verdict holds for every call with the same types.
``addresses``, ``contents`` and ``overlaps`` look at the arrays of one call. All run before anything
is launched or written.
"""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupy_decode.grid import MAX_LEAVES
from cupy_decode.heads import INT32_MAX, HeadConfig
from cupy_decode.heads import whole as any_whole
from cupy_decode.plan import Partials, SplitPlan
from cupy_decode.specs import FP8_DTYPES, ArrayType, check_head_dim, dtype_name, vector_bytes

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
#: Most entries of an int64 array or a list that are converted to int32 on the way in.
MAX_CONVERTED = 1 << 20
#: Keys that a row of the block table may reach: the kernels look three tiles of 32 ahead.
_MOST_KEYS = INT32_MAX - 3 * 32
_INT32 = np.dtype(np.int32)
_new_tuple: Any = tuple.__new__
_FLOAT_MAX = float(np.finfo(np.float32).max)
_FLOAT_TINY = float(np.finfo(np.float32).tiny)


# ---------------------------------------------------------------------- arrays


def is_host(array: Any) -> bool:
    """A NumPy array, or the type of one."""
    if isinstance(array, ArrayType):
        return array.device is None
    return isinstance(array, np.ndarray)


@functools.cache
def _is_cupy_type(kind: type) -> bool:
    # By name, so that asking does not import CuPy.
    return kind.__module__.partition(".")[0] == "cupy" and hasattr(kind, "data")


def is_cupy(array: Any) -> bool:
    return _is_cupy_type(type(array))  # type: ignore[arg-type]


def array_type(name: str, array: Any) -> ArrayType | None:
    """What the checks and the launches need to know of an array.

    Raises
    ------
    TypeError
        If it is neither a NumPy nor a CuPy array.
    """
    if array is None:
        return None
    # A NamedTuple's own constructor takes longer.
    if _is_cupy_type(type(array)):  # type: ignore[arg-type]
        parts = (array.shape, array.strides, array.dtype, array.data.device_id)
        return _new_tuple(ArrayType, parts)  # type: ignore[no-any-return]
    if isinstance(array, np.ndarray):
        return ArrayType(array.shape, array.strides, array.dtype, None)
    fix = "cupy.from_dlpack(x)" if hasattr(array, "__dlpack__") else "numpy.asarray(x)"
    if name in ("alibi_slopes", "sinks"):
        fix = fix.replace("asarray(x)", "asarray(x, 'float32')")
    raise TypeError(
        f"{name} must be a NumPy or CuPy array; got {type(array).__name__}: convert it with {fix}"
    )


def required(name: str, array: Any) -> ArrayType:
    """The type of an array that may not be left out."""
    kind = array_type(name, array)
    if kind is None:
        raise TypeError(f"{name} must be a NumPy or CuPy array; got None")
    return kind


def one_device(**arrays: ArrayType | None) -> int | None:
    """The CUDA device that all given arrays live on, or None for host memory.

    Raises
    ------
    TypeError
        If some are NumPy and some CuPy arrays.
    ValueError
        If CUDA arrays live on different devices.
    """
    given = [(name, array.device) for name, array in arrays.items() if array is not None]
    if not given:
        return None
    first, device = given[0]
    for name, other in given:
        if (other is None) != (device is None):
            kinds = ["NumPy" if d is None else "CuPy" for d in (other, device)]
            raise TypeError(
                f"{name} is a {kinds[0]} array but {first} is a {kinds[1]} array; put all of them "
                "on one side"
            )
        if other != device:
            raise ValueError(f"{name} is on CUDA device {other} but {first} is on device {device}")
    return device


def array_family(**arrays: Any) -> str:
    """``"host"`` or ``"cuda"``: where the given arrays live, all in one place."""
    types = {name: array_type(name, array) for name, array in arrays.items()}
    return "host" if one_device(**types) is None else "cuda"


def integers(name: str, value: Any, like: Any) -> Any:
    """Block ids or lengths as int32, where converting them is cheap.

    Parameters
    ----------
    value : array or nested list of ints
        Lists and int64 arrays of at most ``MAX_CONVERTED`` entries are converted; other arrays are
        returned as they are, for the checks to judge.
    like : array
        Lists go where this array is.

    Notes
    -----
    What does not fit int32 becomes -1 or 2**31 - 1: no block and no length either.
    """
    if getattr(value, "dtype", None) is _INT32:
        return value
    array = _from_list(name, value) if isinstance(value, list | tuple) else value
    if not (is_host(array) or is_cupy(array)) or array.dtype != np.int64:
        return value
    if array.size > MAX_CONVERTED:
        raise TypeError(
            f"{name} must be int32; got {array.size} entries of int64, and more than "
            f"{MAX_CONVERTED} are not converted on every call: convert it once with "
            ".astype('int32')"
        )
    if is_host(array):
        array = np.clip(array, -1, INT32_MAX).astype(np.int32)
        if not is_cupy(like) or not isinstance(value, list | tuple):
            return array
    import cupy

    if is_host(array):
        with like.device:
            return cupy.asarray(array)
    device: Any = array.device
    with device:
        return cupy.clip(array, -1, INT32_MAX).astype(np.int32)


def _from_list(name: str, value: Any) -> np.ndarray:
    try:
        array = np.array(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a rectangular list of integers: {error}") from None
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers; got a list of {array.dtype}")
    return array.astype(np.int64)


def _shape(name: str, array: Any, shape: tuple[int | None, ...], meaning: str) -> None:
    got = tuple(array.shape)
    ok = len(got) == len(shape) and all(
        w is None or w == g for w, g in zip(shape, got, strict=True)
    )
    if not ok:
        wanted = ", ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(f"{name} must have shape {meaning} = ({wanted}); got {got}")


def _dtype(name: str, array: Any, allowed: tuple[str, ...], fix: str | None = None) -> None:
    if dtype_name(array) not in allowed:
        kind = allowed[0]
        made = f"ml_dtypes.{FP8_DTYPES[kind]}" if kind in FP8_DTYPES else repr(kind)
        raise TypeError(
            f"{name} must be {' or '.join(dict.fromkeys(allowed))}; got {dtype_name(array)}: "
            f"{fix or f'convert it with .astype({made})'}"
        )


def _steps(name: str, array: Any) -> None:
    """Strides are whole elements: views of packed records may have others."""
    size = array.dtype.itemsize
    if any(s % size and n > 1 for s, n in zip(array.strides, array.shape, strict=True)):
        raise ValueError(
            f"{name} must step in whole elements of {size} bytes; got strides {array.strides}: "
            "make a copy"
        )


def contiguous_rows(name: str, array: Any) -> None:
    """Strides, having refused arrays whose rows of elements are not contiguous."""
    _steps(name, array)
    size = array.dtype.itemsize
    if array.size and array.shape[-1] > 1 and array.strides[-1] != size:
        raise ValueError(
            f"{name} must be contiguous along its last axis; got strides {array.strides} bytes for "
            f"items of {size}: make a copy with that axis last"
        )


def _contiguous(name: str, array: Any) -> None:
    if not array.size:
        return
    step = array.dtype.itemsize
    for n, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if n > 1 and stride != step:
            raise ValueError(
                f"{name} must be C-contiguous; got strides {array.strides}: copy it with "
                "numpy.ascontiguousarray or cupy.ascontiguousarray"
            )
        step *= n


def _vector_rows(name: str, array: Any) -> None:
    """The kernels read cache rows as vectors: each stride must allow it."""
    contiguous_rows(name, array)
    align = alignment(array)
    steps = [s for s, n in zip(array.strides[:-1], array.shape[:-1], strict=True) if n > 1]
    if any(s % align for s in steps):
        raise ValueError(misaligned(name, array, align))


def misaligned(name: str, array: Any, align: int) -> str:
    """What to say of an array that does not start or step where the kernels can read it."""
    got = f"strides {array.strides}"
    if not isinstance(array, ArrayType):
        got = f"address ...{address(array) % 256:#04x} and {got}"
    return (
        f"{name} must start and step in multiples of {align} bytes; got {got}: slice at a multiple "
        f"of {align // array.dtype.itemsize} elements or make a copy"
    )


def _no_overlap_with_itself(name: str, array: Any) -> None:
    """Every element to write has a place of its own."""
    if not array.size:
        return
    axes = sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    end = array.dtype.itemsize
    for stride, n in axes:
        if stride < end:
            raise ValueError(
                f"{name} must not overlap itself; got strides {array.strides} for shape "
                f"{tuple(array.shape)}: give an array of its own memory"
            )
        end = stride * (n - 1) + end


# ---------------------------------------------------------------------- arrays of one call


def address(array: Any) -> int:
    """First byte of element 0."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def alignment(cache: Any) -> int:
    """Bytes that the address and the strides of a cache must be multiples of."""
    return 1 if 0 in cache.shape else vector_bytes(cache.shape[3] * cache.dtype.itemsize)


@functools.lru_cache(maxsize=1024)
def extent(array: ArrayType) -> tuple[int, int]:
    """Bytes that an array covers, relative to element 0."""
    if not array.size:
        return 0, 0
    reach = [s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)]
    low, high = (sum(pick(r, 0) for r in reach) for pick in (min, max))
    return low, high + array.dtype.itemsize


def writable(name: str, array: Any) -> None:
    if is_host(array) and not array.flags.writeable:
        raise ValueError(f"{name} must be writable; got a read-only array: make a copy")


def overlaps(name: str, array: Any, kind: ArrayType, others: dict[str, Any]) -> None:
    """An array to write must not share memory with one that is read meanwhile."""
    writable(name, array)
    low, high = (address(array) + edge for edge in extent(kind))
    for other_name, other in others.items():
        if other is None:
            continue
        other_kind = array_type(other_name, other)
        assert other_kind is not None
        start = address(other)
        first, last = extent(other_kind)
        if low < start + last and start + first < high:
            raise ValueError(
                f"{name} must not share memory with {other_name}, which is read while {name} is "
                "written; give an array of its own"
            )


def _on_host(array: Any) -> np.ndarray:
    return array if is_host(array) else array.get()


def numbers_in_range(
    sinks: Any = None, alibi_slopes: Any = None, k_scale: Any = None, v_scale: Any = None
) -> None:
    """Contents of the small arrays of numbers; waits for those on a device."""
    if alibi_slopes is not None:
        _every("alibi_slopes", _on_host(alibi_slopes), np.isfinite, "finite")
    if sinks is not None:
        _every("sinks", _on_host(sinks), lambda x: x < np.inf, "finite or -inf (no sink)")
    for name, array in (("k_scale", k_scale), ("v_scale", v_scale)):
        if is_host(array) or is_cupy(array):
            _every(name, _on_host(array), lambda x: (x > 0) & (x < np.inf), "positive and finite")


def _every(name: str, array: np.ndarray, test: Any, rule: str) -> None:
    bad = np.argwhere(~test(array))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise ValueError(f"{name}[{', '.join(map(str, at))}] must be {rule}; got {array[at]}")


def contents(
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    num_blocks: int,
    size: int,
    shard: tuple[int, int] = (0, INT32_MAX),
) -> None:
    """Lengths and the table entries they reach, in host memory; entries past a row's need and
    before or past a shard's keys are not looked at. ``size`` is the cache's block_size."""
    capacity = block_table.shape[1] * size
    for b, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(length_fault(b, length, block_table.shape[1], size))
        first = shard[0] // size
        ids = block_table[b, first : -(-min(length, shard[1]) // size)]
        outside = np.flatnonzero((ids < 0) | (ids >= num_blocks))
        if outside.size:
            at = int(outside[0])
            raise ValueError(block_fault(b, first + at, int(ids[at]), num_blocks))


# ---------------------------------------------------------------------- faults, in words


def length_fault(row: int, length: int, max_blocks: int, block_size: int) -> str:
    fix = "the length of a sequence without keys is 0"
    if length > 0:
        fix = (
            "widen block_table or shorten the sequence; a table of larger blocks than the cache's "
            "goes through map_to_kernel_blocks first"
        )
    return (
        f"seq_lens[{row}] must be from 0 to {max_blocks * block_size} (max_blocks {max_blocks} x "
        f"block_size {block_size}, axis 1 of the caches); got {length}: {fix}"
    )


def block_fault(row: int, column: int, block: int, num_blocks: int) -> str:
    return (
        f"block_table[{row}, {column}] must be a block of the cache, 0 to {num_blocks - 1}; got "
        f"{block}: the sequence's length reaches this entry"
    )


def device_fault(fault: Any, max_blocks: int, block_size: int, num_blocks: int) -> str:
    """The message for a fault record ``[code, row, column, value]`` that a kernel left."""
    code, row, column, value = (int(x) for x in fault)
    if code == 1:
        return block_fault(row, column, value, num_blocks)
    if code == 2:
        return length_fault(row, value, max_blocks, block_size)
    return slot_fault(row, value, num_blocks * block_size)


def slot_fault(token: int, slot: int, num_slots: int) -> str:
    return (
        f"slot_mapping[{token}] must be below {num_slots}, the slots of the cache, or negative for "
        f"padding; got {slot}"
    )


# ---------------------------------------------------------------------- numbers


def real(name: str, value: Any) -> float:
    """A Python float from any real number type; finite, in float32 as well."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | ml_dtypes.bfloat16):
        raise TypeError(f"{name} must be a real number; got {type(value).__name__} {value!r}")
    number = float(value)
    if not math.isfinite(number) or abs(number) > _FLOAT_MAX:
        raise ValueError(f"{name} must be finite in float32; got {value}")
    return number


def whole(name: str, value: Any, least: int) -> int:
    """A Python int from any integer type, at least ``least`` and however large."""
    return any_whole(name, value, least, most=None)


@dataclass(frozen=True)
class Options:
    """Checked options of stage 1; what they mean is said by ``decode_attention``."""

    scale: float
    window: int | None
    logits_soft_cap: float | None
    alibi_slopes: Any
    kv_dtype: str
    k_scale: Any
    v_scale: Any


def options(
    heads: HeadConfig,
    kv_dtype: str,
    batch: int,
    scale: Any,
    window: Any,
    logits_soft_cap: Any,
    alibi_slopes: Any,
    k_scale: Any,
    v_scale: Any,
) -> Options:
    """Check the options of stage 1; the default scale is ``1 / sqrt(head_dim)``."""
    cap = None if logits_soft_cap is None else real("logits_soft_cap", logits_soft_cap)
    if cap is not None and (cap < 0 or 0 < cap < _FLOAT_TINY):
        raise ValueError(f"logits_soft_cap must be positive, or 0 or None for none; got {cap}")
    if alibi_slopes is not None:
        per_head("alibi_slopes", alibi_slopes, heads)
    checked = Options(
        heads.head_dim**-0.5 if scale is None else real("scale", scale),
        None if window is None else whole("window", window, 1),
        cap or None,
        alibi_slopes,
        kv_dtype,
        _factor("k_scale", k_scale, heads, batch),
        _factor("v_scale", v_scale, heads, batch),
    )
    if isinstance(checked.k_scale, float):
        real("scale times k_scale", checked.scale * checked.k_scale)  # what the kernel is given
    return checked


def _factor(name: str, value: Any, heads: HeadConfig, batch: int) -> Any:
    """A scale of K or V: a positive number, or an array per tensor, KV head or sequence."""
    if value is None:
        return None
    if isinstance(value, ArrayType):
        shapes = ((), (1,), (heads.num_kv_heads,), (batch, heads.num_kv_heads))
        if value.shape not in shapes:
            raise ValueError(
                f"{name} must be a number or have shape (num_kv_heads,) = ({heads.num_kv_heads},) "
                f"or (batch, num_kv_heads) = ({batch}, {heads.num_kv_heads}); got {value.shape}"
            )
        _dtype(name, value, ("float32",))
        _steps(name, value)
        return value
    if isinstance(value, list | tuple):
        raise TypeError(
            f"{name} must be a real number or a float32 array; got {type(value).__name__} "
            f"{value!r}: convert it with numpy.asarray(x, 'float32')"
        )
    number = real(name, value)
    if number < _FLOAT_TINY:
        raise ValueError(f"{name} must be positive; got {value}")
    return number


def per_head(name: str, array: Any, heads: HeadConfig) -> None:
    """A float32 vector with one entry per query head."""
    _shape(name, array, (heads.num_q_heads,), "(num_q_heads,)")
    _dtype(name, array, ("float32",))
    _contiguous(name, array)


# ---------------------------------------------------------------------- operators


def cache_dtype(name: str, array: Any, kv_dtype: Any) -> str:
    """The element type of a cache; ``kv_dtype`` says what the bytes of a uint8 cache are."""
    got = dtype_name(array)
    if kv_dtype is not None and kv_dtype not in (*FLOAT_DTYPES, *FP8_DTYPES):
        known = ", ".join(FP8_DTYPES if got == "uint8" else (*FLOAT_DTYPES, *FP8_DTYPES))
        raise ValueError(f"kv_dtype must be one of {known}; got {kv_dtype!r}")
    if got == "uint8":
        if kv_dtype not in FP8_DTYPES:
            raise TypeError(
                f"{name} is uint8, so kv_dtype must say what its bytes are: 'e4m3' or 'e5m2'; got "
                f"{kv_dtype!r}"
            )
        return str(kv_dtype)
    _dtype(name, array, (*FLOAT_DTYPES, *FP8_DTYPES))
    if kv_dtype not in (None, got):
        raise TypeError(f"{name} is {got} but kv_dtype says {kv_dtype}; leave kv_dtype out")
    return got


def decode(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, kv_dtype: Any = None
) -> tuple[HeadConfig, str]:
    """Check the five arrays of a decode step; returns head geometry and the caches' elements."""
    for name, array, axes in (
        ("q", q, "(batch, num_q_heads, head_dim)"),
        ("k_cache", k_cache, "(num_blocks, block_size, num_kv_heads, head_dim)"),
        ("v_cache", v_cache, "(num_blocks, block_size, num_kv_heads, v_head_dim)"),
        ("block_table", block_table, "(batch, max_blocks)"),
        ("seq_lens", seq_lens, "(batch,)"),
    ):
        if array.ndim != axes.count(",") + (not axes.endswith(",)")):
            fix = ": there is one query token a sequence; give it no axis" * (
                name == "q" and array.ndim == 4
            )
            raise ValueError(f"{name} must have axes {axes}; got shape {tuple(array.shape)}{fix}")
    _dtype("q", q, FLOAT_DTYPES)
    elements = cache_dtype("k_cache", k_cache, kv_dtype)
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(
            f"v_cache must have elements of k_cache's type, {dtype_name(k_cache)}; got "
            f"{dtype_name(v_cache)}: fill both caches with one type"
        )
    _dtype("block_table", block_table, ("int32",))
    _dtype("seq_lens", seq_lens, ("int32",))

    batch, num_q_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, k_dim = k_cache.shape
    if k_dim != head_dim:
        raise ValueError(
            f"k_cache has head_dim {k_dim} (its last axis) but q has {head_dim}; they must be equal"
        )
    _shape(
        "v_cache",
        v_cache,
        (num_blocks, block_size, num_kv_heads, None),
        "(num_blocks, block_size, num_kv_heads, v_head_dim)",
    )
    if min(block_size, num_kv_heads) < 1:
        raise ValueError(f"k_cache must have blocks and heads; got shape {tuple(k_cache.shape)}")
    _shape("block_table", block_table, (batch, None), "(batch, max_blocks)")
    _shape("seq_lens", seq_lens, (batch,), "(batch,)")
    if block_table.shape[1] * block_size > _MOST_KEYS:
        raise ValueError(
            f"block_table must reach at most {_MOST_KEYS} keys a row, which the kernels count in "
            f"int32; got {block_table.shape[1]} blocks of {block_size}: cut the table's columns"
        )
    check_head_dim("head_dim", head_dim, elements)
    check_head_dim("v_head_dim", v_cache.shape[3], elements)
    if num_q_heads % num_kv_heads and num_q_heads % block_size == 0:
        raise ValueError(
            f"num_kv_heads {num_kv_heads}, axis 2 of k_cache, must divide num_q_heads "
            f"{num_q_heads}; got k_cache of shape {tuple(k_cache.shape)}: if that is (num_blocks, "
            "num_kv_heads, block_size, head_dim), pass .transpose(0, 2, 1, 3) of both caches"
        )
    heads = HeadConfig(num_q_heads, num_kv_heads, head_dim, v_cache.shape[3])

    for name, array in (("q", q), ("block_table", block_table), ("seq_lens", seq_lens)):
        _steps(name, array)
    _vector_rows("k_cache", k_cache)
    _vector_rows("v_cache", v_cache)
    return heads, elements


class PlanType(NamedTuple):
    """What the checks and the launches need to know of a plan."""

    split_offsets: ArrayType
    split_begin: ArrayType
    unsplit: bool


def plan_type(plan: Any) -> PlanType | None:
    """The types of a plan's arrays."""
    if plan is None:
        return None
    if not isinstance(plan, SplitPlan):
        raise TypeError(f"plan must be a SplitPlan; got {type(plan).__name__}")
    offsets = array_type("plan.split_offsets", plan.split_offsets)
    begin = array_type("plan.split_begin", plan.split_begin)
    assert offsets is not None
    assert begin is not None
    return PlanType(offsets, begin, plan.unsplit)


def plan_arrays(plan: PlanType, device: int | None) -> None:
    """The arrays of a plan: contiguous int32, on the calls' side or where they can be copied."""
    arrays = {"plan.split_offsets": plan.split_offsets, "plan.split_begin": plan.split_begin}
    for name, array in arrays.items():
        _shape(name, array, (None,), "(batch + 1,) or (capacity,)")
        _dtype(name, array, ("int32",))
        _contiguous(name, array)
        if array.device is not None and device is None:
            raise TypeError("plan lives on the device but the arrays are NumPy; use plan.to_host()")
        if array.device not in (None, device):
            raise ValueError(f"{name} is on CUDA device {array.device} but q is on {device}")
    one_device(**arrays)


def plan(plan: PlanType, batch: int, device: int | None) -> None:
    """A split plan that fits the batch and lives where the arrays do, or can be copied there."""
    plan_arrays(plan, device)
    planned = plan.split_offsets.shape[0] - 1
    if planned != batch:
        raise ValueError(f"plan is for a batch of {planned} but q has {batch} sequences")


def step(q: ArrayType, batch: int, heads: HeadConfig, dtype: Any) -> None:
    """A query that fits the workspace of a prepared step."""
    shape = (batch, heads.num_q_heads, heads.head_dim)
    _shape("q", q, shape, "(batch, num_q_heads, head_dim) of this step")
    if q.dtype != dtype:
        raise TypeError(f"q must be {dtype}, as this step was made; got {q.dtype}")


def output(name: str, array: Any, shape: tuple[int, ...], *dtypes: str) -> None:
    """An array to write into."""
    _shape(name, array, shape, "of the result")
    _dtype(name, array, dtypes, f"allocate it as {dtypes[0]}")
    _steps(name, array)
    _no_overlap_with_itself(name, array)


def partials(states: Any, reference: bool) -> HeadConfig:
    """Check partial states; returns their head geometry (KV heads are not known: 1)."""
    if not isinstance(states, Partials):
        raise TypeError(f"partials must be a Partials; got {type(states).__name__}")
    if states.acc.ndim != 3:
        raise ValueError(
            f"partials.acc must have axes (rows, num_q_heads, v_head_dim); got {states.acc.shape}"
        )
    rows, num_q_heads, v_head_dim = states.acc.shape
    for name, array, shape in (
        ("partials.acc", states.acc, states.acc.shape),
        ("partials.m", states.m, (rows, num_q_heads)),
        ("partials.l", states.l, (rows, num_q_heads)),
    ):
        _shape(name, array, shape, "(rows, num_q_heads[, v_head_dim])")
        _dtype(name, array, ("float32", "float64") if reference else ("float32",))
        _contiguous(name, array)
    if states.width is not None:
        _shape("partials.width", states.width, (states.plan.batch, None), "(batch, leaf_rows)")
        _dtype("partials.width", states.width, ("int32",))
        _contiguous("partials.width", states.width)
        if rows < math.prod(states.width.shape):
            raise ValueError(f"partials hold {rows} rows but width has shape {states.width.shape}")
        leaf_rows = states.width.shape[1]
        if leaf_rows > MAX_LEAVES:
            raise ValueError(
                f"partials.width must have at most {MAX_LEAVES} rows for each sequence, the leaves "
                f"that it can have; got {leaf_rows}: leave out those behind"
            )
    elif not states.plan.on_device and states.plan.num_rows > rows:
        raise ValueError(f"partials hold {rows} rows but their plan has {states.plan.num_rows}")
    return HeadConfig(num_q_heads, 1, v_head_dim)


def states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, reference: bool) -> HeadConfig:
    """Check two merge operands."""
    if out_a.ndim != 3:
        raise ValueError(
            f"out_a must have axes (tokens, num_q_heads, v_head_dim); got {tuple(out_a.shape)}"
        )
    wide = ("float64",) if reference else ()
    _dtype("out_a", out_a, (*FLOAT_DTYPES, *wide))
    _shape("out_b", out_b, out_a.shape, "(tokens, num_q_heads, v_head_dim)")
    _dtype("out_b", out_b, (dtype_name(out_a),))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _shape(name, lse, out_a.shape[:2], "(tokens, num_q_heads)")
        _dtype(name, lse, ("float32", *wide))
        _steps(name, lse)
    contiguous_rows("out_a", out_a)
    contiguous_rows("out_b", out_b)
    return HeadConfig(out_a.shape[1], 1, out_a.shape[2])


def write_kv(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """Check new rows, caches and slots; host-resident slots by value."""
    if k_cache.ndim != 4 or v_cache.ndim != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must both have axes (num_blocks, block_size, num_kv_heads, dim); "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    num_blocks, block_size, num_kv_heads, k_dim = k_cache.shape
    _dtype("k_cache", k_cache, (*FLOAT_DTYPES, *FP8_DTYPES, "uint8"))
    tokens = slot_mapping.shape[0] if slot_mapping.ndim == 1 else None
    _shape("slot_mapping", slot_mapping, (tokens,), "(tokens,)")
    for name, array, dim in (("k", k, k_dim), ("v", v, v_cache.shape[3])):
        _shape(name, array, (tokens, num_kv_heads, dim), "(tokens, num_kv_heads, dim)")
    for name, array in (("v_cache", v_cache), ("k", k), ("v", v)):
        _dtype(name, array, (dtype_name(k_cache),))
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        contiguous_rows(name, array)
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache)):
        _no_overlap_with_itself(name, array)
        writable(name, array)
    _dtype("slot_mapping", slot_mapping, ("int64",))
    _contiguous("slot_mapping", slot_mapping)
    if is_host(slot_mapping):
        bad = np.flatnonzero(slot_mapping >= num_blocks * block_size)
        if bad.size:
            token = int(bad[0])
            raise ValueError(slot_fault(token, int(slot_mapping[token]), num_blocks * block_size))


def workspace(
    states: Partials, plan: SplitPlan, heads: HeadConfig, leaf_rows: int | None = None
) -> None:
    """Partials to write into: large enough for the plan, or for so many leaves; float32."""
    rows = states.acc.shape[0]
    if leaf_rows is not None:
        if states.width is None:
            raise ValueError("partials has no width; deterministic=True writes subtrees of leaves")
        output("partials.width", states.width, (plan.batch, leaf_rows), "int32")
        _contiguous("partials.width", states.width)
    least = plan.capacity if leaf_rows is None else plan.batch * leaf_rows
    if rows < least:
        raise ValueError(
            f"partials hold {rows} rows but the plan's capacity is {plan.capacity}; allocate "
            f"{plan.capacity} rows"
            if leaf_rows is None
            else f"partials hold {rows} rows but {plan.batch} sequences of {leaf_rows} leaves need "
            f"{least}; allocate those"
        )
    shape = (rows, heads.num_q_heads)
    for name, array, wanted in (
        ("partials.acc", states.acc, (*shape, heads.value_dim)),
        ("partials.m", states.m, shape),
        ("partials.l", states.l, shape),
    ):
        output(name, array, wanted, "float32")
        _contiguous(name, array)
