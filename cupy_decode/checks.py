"""Every argument check, once: the reference, the emulator and the GPU refuse the same calls.

Checks look at what the host can see without waiting: types, shapes, strides, devices, and the
contents of arrays that live in host memory. They run before anything is launched or written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_decode.heads import HeadConfig
from cupy_decode.plan import Partials, SplitPlan
from cupy_decode.specs import check_head_dim, dtype_name

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
_VECTOR_BYTES = 16


def is_host(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def is_cupy(array: Any) -> bool:
    # By name, so that asking does not import CuPy.
    return type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "data")


def _shape(name: str, array: Any, shape: tuple[int | None, ...], meaning: str) -> None:
    got = tuple(array.shape)
    ok = len(got) == len(shape) and all(
        w is None or w == g for w, g in zip(shape, got, strict=True)
    )
    if not ok:
        wanted = ", ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(f"{name} must have shape {meaning} = ({wanted}); got {got}")


def _dtype(name: str, array: Any, allowed: tuple[str, ...]) -> None:
    if dtype_name(array) not in allowed:
        raise TypeError(
            f"{name} must be {' or '.join(allowed)}; got {dtype_name(array)}: "
            f"convert it with .astype({allowed[0]!r})"
        )


def _strides_in_elements(name: str, array: Any) -> tuple[int, ...]:
    """Strides, having refused arrays whose rows of elements are not contiguous."""
    size = array.dtype.itemsize
    if array.shape[-1] > 1 and array.strides[-1] != size:
        raise ValueError(
            f"{name} must be contiguous along its last axis; got strides {array.strides} bytes for "
            f"items of {size}: make a copy with that axis last"
        )
    return tuple(s // size for s in array.strides)


def _contiguous(name: str, array: Any) -> None:
    if array.size and not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous; got strides {array.strides}: copy it with "
            "numpy.ascontiguousarray or cupy.ascontiguousarray"
        )


def _address(array: Any) -> int:
    return array.ctypes.data if is_host(array) else array.data.ptr


def _vector_rows(name: str, array: Any) -> None:
    """The kernels read cache rows as 16-byte vectors: the address and each stride must allow it."""
    _strides_in_elements(name, array)
    if array.size == 0:
        return
    steps = [s for s, n in zip(array.strides[:-1], array.shape[:-1], strict=True) if n > 1]
    if _address(array) % _VECTOR_BYTES or any(s % _VECTOR_BYTES for s in steps):
        raise ValueError(
            f"{name} must start and step in multiples of {_VECTOR_BYTES} bytes; got address "
            f"...{_address(array) % 256:#04x} and strides {array.strides}: slice at a multiple of "
            f"{_VECTOR_BYTES // array.dtype.itemsize} elements or make a copy"
        )


def array_family(**arrays: Any) -> str:
    """``"host"`` or ``"cuda"``: the one family that all given arrays belong to.

    Raises
    ------
    TypeError
        If an array is of neither family, or the families mix.
    ValueError
        If CUDA arrays live on different devices.
    """
    family = first = device = None
    for name, array in arrays.items():
        if array is None:
            continue
        if is_host(array):
            kind = "host"
        elif is_cupy(array):
            kind = "cuda"
        else:
            fix = "cupy.from_dlpack(x)" if hasattr(array, "__dlpack__") else "numpy.asarray(x)"
            raise TypeError(
                f"{name} must be a NumPy or CuPy array; got {type(array).__name__}: convert it "
                f"with {fix}"
            )
        if family is None:
            family, first = kind, name
            device = array.device.id if kind == "cuda" else None
        elif kind != family:
            raise TypeError(
                f"{name} is a {'NumPy' if kind == 'host' else 'CuPy'} array but {first} is a "
                f"{'NumPy' if family == 'host' else 'CuPy'} array; put all of them on one side"
            )
        elif kind == "cuda" and array.device.id != device:
            raise ValueError(
                f"{name} is on CUDA device {array.device.id} but {first} is on device {device}"
            )
    return family or "host"


def real(name: str, value: Any) -> float:
    """A finite Python float from any real number type."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a real number; got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
    return float(value)


def whole(name: str, value: Any, least: int) -> int:
    """A Python int from any integer type, at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer; got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return int(value)


@dataclass(frozen=True)
class Scores:
    """Checked options of the score: scale, soft cap, ALiBi, window."""

    scale: float
    window: int | None
    logits_soft_cap: float | None
    alibi_slopes: Any


def scores(
    heads: HeadConfig, scale: Any, window: Any, logits_soft_cap: Any, alibi_slopes: Any
) -> Scores:
    """Check the score options; the default scale is ``1 / sqrt(head_dim)``."""
    cap = None if logits_soft_cap is None else real("logits_soft_cap", logits_soft_cap)
    if cap is not None and cap < 0:
        raise ValueError(f"logits_soft_cap must be positive, or 0 or None for none; got {cap}")
    if alibi_slopes is not None:
        per_head("alibi_slopes", alibi_slopes, heads)
    return Scores(
        heads.head_dim**-0.5 if scale is None else real("scale", scale),
        None if window is None else whole("window", window, 1),
        cap or None,
        alibi_slopes,
    )


def per_head(name: str, array: Any, heads: HeadConfig) -> None:
    """A float32 vector with one entry per query head."""
    _shape(name, array, (heads.num_q_heads,), "(num_q_heads,)")
    _dtype(name, array, ("float32",))
    _contiguous(name, array)


def decode(q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any) -> HeadConfig:
    """Check the five arrays of a decode step and read the head geometry off them."""
    for name, array, axes in (
        ("q", q, "(batch, num_q_heads, head_dim)"),
        ("k_cache", k_cache, "(num_blocks, block_size, num_kv_heads, head_dim)"),
        ("v_cache", v_cache, "(num_blocks, block_size, num_kv_heads, v_head_dim)"),
        ("block_table", block_table, "(batch, max_blocks)"),
        ("seq_lens", seq_lens, "(batch,)"),
    ):
        if array.ndim != axes.count(",") + (not axes.endswith(",)")):
            raise ValueError(f"{name} must have axes {axes}; got shape {tuple(array.shape)}")
    _dtype("q", q, FLOAT_DTYPES)
    _dtype("k_cache", k_cache, FLOAT_DTYPES)
    _dtype("v_cache", v_cache, (dtype_name(k_cache),))
    _dtype("block_table", block_table, ("int32",))
    _dtype("seq_lens", seq_lens, ("int32",))

    batch, num_q_heads, head_dim = q.shape
    if batch < 1:
        raise ValueError("q must hold at least one sequence; got batch 0")
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
    check_head_dim("head_dim", head_dim, dtype_name(k_cache))
    check_head_dim("v_head_dim", v_cache.shape[3], dtype_name(k_cache))
    heads = HeadConfig(num_q_heads, num_kv_heads, head_dim, v_cache.shape[3])

    _strides_in_elements("q", q)
    _vector_rows("k_cache", k_cache)
    _vector_rows("v_cache", v_cache)
    _strides_in_elements("block_table", block_table)
    _contiguous("seq_lens", seq_lens)
    if is_host(seq_lens):
        _host_contents(block_table, seq_lens, num_blocks, block_size)
    return heads


def _host_contents(
    block_table: np.ndarray, seq_lens: np.ndarray, num_blocks: int, block_size: int
) -> None:
    """Lengths and the table entries they reach; entries past a row's need are not looked at."""
    capacity = block_table.shape[1] * block_size
    for b, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(length_fault(b, length, block_table.shape[1], block_size))
        ids = block_table[b, : -(-length // block_size)]
        outside = np.flatnonzero((ids < 0) | (ids >= num_blocks))
        if outside.size:
            column = int(outside[0])
            raise ValueError(block_fault(b, column, int(ids[column]), num_blocks))


def length_fault(row: int, length: int, max_blocks: int, block_size: int) -> str:
    return (
        f"seq_lens[{row}] must be from 0 to {max_blocks * block_size} (max_blocks {max_blocks} x "
        f"block_size {block_size}); got {length}: widen block_table or shorten the sequence"
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


def plan(plan: Any, batch: int, family: str) -> None:
    """A split plan that fits the batch and lives where the arrays do."""
    if not isinstance(plan, SplitPlan):
        raise TypeError(f"plan must be a SplitPlan; got {type(plan).__name__}")
    if plan.batch != batch:
        raise ValueError(f"plan is for a batch of {plan.batch} but q has {batch} sequences")
    if plan.on_device and family == "host":
        raise TypeError("plan lives on the device but the arrays are NumPy; use plan.to_host()")


def output(name: str, array: Any, shape: tuple[int, ...], dtype: str) -> None:
    """An array to write into."""
    _shape(name, array, shape, "of the result")
    _dtype(name, array, (dtype,))
    _strides_in_elements(name, array)


def partials(states: Any) -> HeadConfig:
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
        _dtype(name, array, ("float32", "float64") if is_host(array) else ("float32",))
        _contiguous(name, array)
    if not states.plan.on_device and states.plan.num_rows > rows:
        raise ValueError(f"partials hold {rows} rows but their plan has {states.plan.num_rows}")
    return HeadConfig(num_q_heads, 1, v_head_dim)


def states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> HeadConfig:
    """Check two merge operands."""
    if out_a.ndim != 3:
        raise ValueError(
            f"out_a must have axes (tokens, num_q_heads, v_head_dim); got {tuple(out_a.shape)}"
        )
    _dtype("out_a", out_a, (*FLOAT_DTYPES, "float64") if is_host(out_a) else FLOAT_DTYPES)
    _shape("out_b", out_b, out_a.shape, "(tokens, num_q_heads, v_head_dim)")
    _dtype("out_b", out_b, (dtype_name(out_a),))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _shape(name, lse, out_a.shape[:2], "(tokens, num_q_heads)")
        _dtype(name, lse, ("float32", "float64") if is_host(lse) else ("float32",))
    _strides_in_elements("out_a", out_a)
    _strides_in_elements("out_b", out_b)
    return HeadConfig(out_a.shape[1], 1, out_a.shape[2])


def write_kv(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """Check new rows, caches and slots; host-resident slots by value."""
    if k_cache.ndim != 4 or v_cache.ndim != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must both have axes (num_blocks, block_size, num_kv_heads, dim); "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    num_blocks, block_size, num_kv_heads, k_dim = k_cache.shape
    _dtype("k_cache", k_cache, FLOAT_DTYPES)
    tokens = slot_mapping.shape[0] if slot_mapping.ndim == 1 else None
    _shape("slot_mapping", slot_mapping, (tokens,), "(tokens,)")
    for name, array, dim in (("k", k, k_dim), ("v", v, v_cache.shape[3])):
        _shape(name, array, (tokens, num_kv_heads, dim), "(tokens, num_kv_heads, dim)")
    for name, array in (("v_cache", v_cache), ("k", k), ("v", v)):
        _dtype(name, array, (dtype_name(k_cache),))
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        _strides_in_elements(name, array)
    _dtype("slot_mapping", slot_mapping, ("int64",))
    _contiguous("slot_mapping", slot_mapping)
    if is_host(slot_mapping):
        bad = np.flatnonzero(slot_mapping >= num_blocks * block_size)
        if bad.size:
            token = int(bad[0])
            raise ValueError(slot_fault(token, int(slot_mapping[token]), num_blocks * block_size))


def workspace(states: Partials, plan: SplitPlan, heads: HeadConfig) -> None:
    """Partials to write into: large enough for the plan, float32."""
    rows = states.acc.shape[0]
    if rows < plan.capacity:
        raise ValueError(
            f"partials hold {rows} rows but the plan's capacity is {plan.capacity}; allocate "
            f"{plan.capacity} rows"
        )
    shape = (rows, heads.num_q_heads)
    output("partials.acc", states.acc, (*shape, heads.value_dim), "float32")
    output("partials.m", states.m, shape, "float32")
    output("partials.l", states.l, shape, "float32")
    for name, array in (("acc", states.acc), ("m", states.m), ("l", states.l)):
        _contiguous(f"partials.{name}", array)
