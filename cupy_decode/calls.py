"""What a call comes to, worked out once per combination of types and kept.

Everything that can be said of a call from the types of its arrays (checks, kernels, grids, every
number that is passed) is kept, as a compiled kernel is. A call that has been made before only looks
at addresses and passes pointers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from cupy_decode import backends, checks, fast, grid, policies, reference, specs
from cupy_decode.explanation import COVERED, Explanation
from cupy_decode.heads import INT32_MAX, HeadConfig
from cupy_decode.launches import Fast, Readable
from cupy_decode.plan import Partials, SplitPlan
from cupy_decode.specs import ArrayType

Backend = Literal["auto", "cuda", "emulator", "reference"]
Kernel = Literal["auto", "fast", "readable"]
Rule = tuple[Literal["count", "size"], int]

#: Null pointers for alibi_slopes, sinks, k_scales and v_scales.
_NO_OTHERS = (0, 0, 0, 0)
#: Checked calls that are kept, and launches of each; older ones are worked out again.
MOST_KEPT = 4096
#: Why the readable kernels run, where they are asked for.
READABLE = "kernel='readable' asks for it"


def resolve(backend: str, device: int | None) -> str:
    """The backend that runs: the one asked for, if the arrays are where it needs them."""
    check_backend(backend)
    if backend == "auto":
        return "reference" if device is None else "cuda"
    if (backend == "cuda") == (device is None):
        raise TypeError(
            f"backend={backend!r} needs {'CuPy' if backend == 'cuda' else 'NumPy'} arrays but got "
            f"{'NumPy' if device is None else 'CuPy'} arrays; convert them or use backend='auto'"
        )
    return backend


def check_backend(backend: Any) -> None:
    if backend not in ("auto", "cuda", "emulator", "reference"):
        raise ValueError(
            f"backend must be 'auto', 'cuda', 'emulator' or 'reference'; got {backend!r}"
        )


def resolve_arrays(
    backend: str, *, sinks: Any = None, out: Any = None, **arrays: Any
) -> tuple[str, int | None]:
    types: dict[str, Any] = {name: checks.required(name, x) for name, x in arrays.items()}
    optional = {"sinks": sinks, "out": out}
    types |= {name: checks.array_type(name, x) for name, x in optional.items()}
    device = checks.one_device(**types)
    return resolve(backend, device), device


def on_device(runner: Any, device: int | None) -> Any:
    """A context in which a runner's launches and allocations go to a device."""
    return nullcontext() if device is None else runner.on(device)


_VALIDATE = os.environ.get("CUPY_DECODE_VALIDATE", "0") == "1"


def validating(validate: bool | None) -> bool:
    return _VALIDATE if validate is None else validate


def raise_on_fault(fault: Any, block_table_width: int, v_cache: Any) -> None:
    """Wait for the kernels and turn the fault they recorded, if any, into an exception."""
    record = fault if checks.is_host(fault) else fault.get()
    if record[0]:
        num_blocks, block_size = v_cache.shape[:2]
        raise ValueError(checks.device_fault(record, block_table_width, block_size, num_blocks))


class Arrays(NamedTuple):
    """The arrays that one call reads."""

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any
    alibi_slopes: Any
    sinks: Any
    k_scale: Any
    v_scale: Any

    @property
    def problem(self) -> dict[str, Any]:
        """The five that every operator of stage 1 begins with, by name."""
        return dict(zip(self._fields[:5], self, strict=False))


def scale_type(name: str, value: Any) -> Any:
    """A scale as ``call_of`` takes it: arrays by type, numbers as they are."""
    if value is not None and (checks.is_host(value) or checks.is_cupy(value)):
        return checks.array_type(name, value)
    return value


def types_of(*arrays: Any) -> list[ArrayType]:
    """The types of a call's first arrays, which may not be None."""
    return list(map(checks.required, Arrays._fields, arrays))


#: ``option_types`` where no option is set.
NO_OPTIONS = (None,) * 12


def option_types(
    alibi_slopes: Any, sinks: Any, out: Any, k_scale: Any, v_scale: Any, plan: Any, *numbers: Any
) -> tuple[Any, ...]:
    """What ``call_of`` takes after the five arrays."""
    kind = checks.array_type
    return (
        None if alibi_slopes is None else kind("alibi_slopes", alibi_slopes),
        None if sinks is None else kind("sinks", sinks),
        None if out is None else kind("out", out),
        None if k_scale is None else scale_type("k_scale", k_scale),
        None if v_scale is None else scale_type("v_scale", v_scale),
        None if plan is None else checks.plan_type(plan),
        *numbers,
    )


def gpu_key(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    options: tuple[Any, ...] | None,
    *others: Any,
) -> Any:
    """All that a call on CuPy arrays depends on, addresses apart; None for other arrays."""
    try:
        # One flat tuple: parts of it in tuples of their own would take longer.
        return (
            q.shape, q.strides, q.dtype, q.data.device_id,
            k_cache.shape, k_cache.strides, k_cache.dtype, k_cache.data.device_id,
            v_cache.shape, v_cache.strides, v_cache.dtype, v_cache.data.device_id,
            block_table.shape, block_table.strides, block_table.dtype, block_table.data.device_id,
            seq_lens.shape, seq_lens.strides, seq_lens.dtype, seq_lens.data.device_id,
            options,
            # Equal is not the same: True is no window of 1.
            None if options is None else tuple(map(type, options)),
            others,
        )  # fmt: skip
    except (AttributeError, ValueError):  # NumPy's ``data`` is another thing
        return None


class Kept:
    """What has been made, by key; nothing has under None and under what cannot be hashed."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        if key is None:
            return None
        try:
            return self._made.get(key)
        except TypeError:
            return None

    def put(self, key: Any, made: Any) -> None:
        if key is None:
            return
        if len(self._made) >= MOST_KEPT:
            self._made.clear()
        self._made[key] = made

    def clear(self) -> None:
        self._made.clear()


#: Checked calls by ``gpu_key``. Those of ``_new_call`` are kept as well, but it takes longer to ask
#: for them.
checked = Kept()


def forget() -> None:
    """Drop all checked calls and their launches: the next ones are made anew."""
    checked.clear()
    _new_call.cache_clear()


def call_of(*key: Any) -> Call:
    """The checked call of these types, from the cache where it was made before."""
    try:
        return _new_call(*key)
    except TypeError:
        # An option that cannot be hashed cannot be right either: the checks say which it is.
        return _new_call.__wrapped__(*key)


# typed: True is no window of 1.
@functools.lru_cache(maxsize=MOST_KEPT, typed=True)
def _new_call(
    backend: str,
    kernel: str,
    q: ArrayType,
    k_cache: ArrayType,
    v_cache: ArrayType,
    block_table: ArrayType,
    seq_lens: ArrayType,
    alibi_slopes: ArrayType | None,
    sinks: ArrayType | None,
    out: ArrayType | None,
    k_scale: Any,
    v_scale: Any,
    plan: checks.PlanType | None,
    num_splits: Any,
    split_size: Any,
    scale: Any,
    window: Any,
    logits_soft_cap: Any,
    kv_dtype: Any,
    deterministic: Any = False,
    overlap: Any = False,
) -> Call:
    """Everything that types and options decide.

    Raises
    ------
    TypeError, ValueError
        Where they do not fit together.
    """
    scales = {
        name: value
        for name, value in (("k_scale", k_scale), ("v_scale", v_scale))
        if isinstance(value, ArrayType)
    }
    device = checks.one_device(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        out=out,
        **scales,
    )
    chosen = resolve(backend, device)
    heads, elements = checks.decode(q, k_cache, v_cache, block_table, seq_lens, kv_dtype)
    batch = q.shape[0]
    options = checks.options(
        heads, elements, batch, scale, window, logits_soft_cap, alibi_slopes, k_scale, v_scale
    )
    if sinks is not None:
        checks.per_head("sinks", sinks, heads)
    if out is not None:
        shape = (batch, heads.num_q_heads, heads.value_dim)
        checks.output("out", out, shape, specs.dtype_name(q), "float32")
    if plan is not None:
        if num_splits is not None or split_size is not None:
            raise ValueError("give plan, or num_splits, or split_size; got plan and another")
        checks.plan(plan, batch, device)
    rule = _split_rule(num_splits, split_size, batch, heads, device)
    types = Arrays(
        q, k_cache, v_cache, block_table, seq_lens, alibi_slopes, sinks, k_scale, v_scale
    )
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True or False; got {deterministic!r}")
    check_overlap(overlap, device)
    call = Call(chosen, device, heads, options, types, out, rule, kernel, deterministic, overlap)
    given = {"plan": plan, "num_splits": num_splits, "split_size": split_size}
    call.split_rules = [name for name, value in given.items() if value is not None]
    call.refusal = _refusal(call)
    if kernel == "fast" and call.refusal is not None:
        raise ValueError(not_fast(call.refusal))
    if overlap and call.refusal is not None:
        raise ValueError(not_overlapping(call.refusal))
    return call


def check_kernel(kernel: Any) -> None:
    if kernel not in ("auto", "fast", "readable"):
        raise ValueError(f"kernel must be 'auto', 'fast' or 'readable'; got {kernel!r}")


def split_rule_is_set(name: str) -> str:
    return f"{name} is set, and only the readable kernel follows it"


def not_fast(refusal: str) -> str:
    """What to say to ``kernel="fast"`` where the fast kernel does not take the call."""
    return (
        "kernel='fast' must be left out where the fast kernel does not take the call: "
        f"{refusal}; use kernel='auto'"
    )


def check_overlap(overlap: Any, device: int | None) -> None:
    """``overlap`` is a bool, and the device can do it."""
    if not isinstance(overlap, bool):
        raise TypeError(f"overlap must be True or False; got {overlap!r}")
    if overlap and device is not None:
        backends.runner("cuda").check_overlap(device)


def not_overlapping(refusal: str) -> str:
    """What to say to ``overlap=True`` where the fast kernel does not take the call."""
    return (
        "overlap must be False where the fast kernel does not take the call, for no other overlaps "
        f"with the launch before: {refusal}"
    )


def check_not_converted(
    overlap: bool, device: int | None, name: str, given: Any, used: Any
) -> None:
    """Refuse what a launch of its own converts, right before one that does not wait for it."""
    if used is not given and overlap and device is not None:
        raise TypeError(
            f"{name} must be int32 on the GPU with overlap=True, which does not wait for the "
            "launch before, and that would convert it; convert it earlier with .astype('int32')"
        )


def _refusal(call: Call) -> str | None:
    """Why a call goes to the readable kernels; None where it goes to the fast one."""
    check_kernel(call.kernel)
    if call.kernel == "readable":
        return READABLE
    if call.split_rules and not call.deterministic:
        return split_rule_is_set(call.split_rules[0])
    judge: Any = functools.partial(
        fast.refusal, kv_dtype=call.options.kv_dtype, machine=call.machine
    )
    refusal = judge(*call.types[:5], out=call.out_type)
    if refusal is None or not call.deterministic or not call.batch:
        return refusal
    # Bits differ from kernel to kernel, so nothing they may not depend on may choose one.
    plain, out = _plain_types(call)
    if judge(*plain[:5], out=out) is None:
        raise ValueError(_undetermined(refusal))
    return refusal


def refusal_of_step(
    heads: HeadConfig, dtype: Any, kv_dtype: str | None, device: int | None
) -> str | None:
    """Why no call of a step can go to the fast kernel, as far as heads and types tell."""

    def new(shape: tuple[int, ...], dtype: Any) -> ArrayType:
        return ArrayType.contiguous(shape, np.dtype(dtype), device)

    is_fp8 = kv_dtype in specs.FP8_DTYPES
    cache = "uint8" if is_fp8 else kv_dtype or dtype
    page = (1, fast.PAGE, heads.num_kv_heads)
    return fast.refusal(
        new((1, heads.num_q_heads, heads.head_dim), dtype),
        new((*page, heads.head_dim), cache),
        new((*page, heads.value_dim), cache),
        new((1, 1), np.int32),
        new((1,), np.int32),
        kv_dtype=kv_dtype if is_fp8 else None,
        machine=_machine(device),
    )


def _plain_types(call: Call) -> tuple[Arrays, ArrayType]:
    """The same elements, heads and output as a call's, in one sequence of one plain page."""
    heads, types = call.heads, call.types

    def new(shape: tuple[int, ...], like: ArrayType) -> ArrayType:
        return ArrayType.contiguous(shape, like.dtype, call.device)

    row, page = (1, heads.num_q_heads), (1, fast.PAGE, heads.num_kv_heads)
    plain = types._replace(
        q=new((*row, heads.head_dim), types.q),
        k_cache=new((*page, heads.head_dim), types.k_cache),
        v_cache=new((*page, heads.value_dim), types.v_cache),
        block_table=new((1, 1), types.block_table),
        seq_lens=new((1,), types.seq_lens),
    )
    return plain, new((*row, heads.value_dim), call.out_type or types.q)


def _undetermined(refusal: str) -> str:
    return (
        "deterministic=True must not fall back to the readable kernel, which has other bits: the "
        f"fast one takes such heads, dtypes and options, but not this call, because {refusal}; "
        "change that, or use kernel='readable' for all calls that are to agree"
    )


@functools.cache
def _machine(device: int | None) -> fast.Machine:
    """What the fast kernel's grid follows from; in the emulator an H200's."""
    if device is None:
        return fast.Machine()
    return fast.Machine.of(backends.runner("cuda"), device)


def _split_rule(
    num_splits: Any, split_size: Any, batch: int, heads: HeadConfig, device: int | None
) -> Rule:
    """The rule in force when no plan is given, and its number."""
    if num_splits is not None and split_size is not None:
        raise ValueError(
            f"give num_splits or split_size, not both; got {num_splits} and {split_size}"
        )
    if num_splits is not None:
        return "count", checks.whole("num_splits", num_splits, 1)
    if split_size is not None:
        return "size", checks.whole("split_size", split_size, 1)
    num_sms = policies.Device().num_sms
    if device is not None:
        num_sms = backends.runner("cuda").num_sms(device)
    blocks = max(batch * grid.blocks_per_row(heads), 1)
    return "count", grid.first_wave_splits(blocks, num_sms)


@dataclass(eq=False)
class Call:
    """A decode call of certain types: checked, and its launches ready where it was made before.

    Attributes
    ----------
    refusal : str or None
        Why it goes to the readable kernels; None where it goes to the fast one.
    split_rules : list of str
        The argument that gives a split rule, if one does.
    """

    backend: str
    device: int | None
    heads: HeadConfig
    options: checks.Options
    types: Arrays
    out_type: ArrayType | None
    rule: Rule
    kernel: str
    deterministic: bool = False
    overlap: bool = False
    refusal: str | None = None
    split_rules: list[str] = field(default_factory=list)
    _launches: dict[Any, Readable | Fast] = field(default_factory=dict)
    _ready: Fast | None = None

    def __post_init__(self) -> None:
        self.batch = int(self.types.q.shape[0])
        self.machine = _machine(self.device)
        self.alignments = (
            self.types.q.dtype.itemsize,
            checks.alignment(self.types.k_cache),
            checks.alignment(self.types.v_cache),
            self.types.block_table.dtype.itemsize,
            self.types.seq_lens.dtype.itemsize,
        )
        self.out_shape = (self.batch, self.heads.num_q_heads, self.heads.value_dim)
        if self.backend != "reference":
            self.runner = backends.runner(self.backend)  # type: ignore[arg-type]
        #: Bits of addresses that need a closer look: alignments are powers of two.
        self._any_odd = max(self.alignments) - 1
        scales = self.types.k_scale, self.types.v_scale
        self._has_others = any(
            isinstance(x, ArrayType) for x in (self.types.alibi_slopes, self.types.sinks, *scales)
        )

    # ------------------------------------------------------------------ this call's arrays

    def pointers(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first of ``launches.GIVEN``, up to the outputs, for the arrays of a call.

        Raises
        ------
        ValueError
            If one starts where the kernels cannot read it: views of bytes may.
        """
        q, k_cache, v_cache, block_table, seq_lens, *others = arrays
        if self.device is None:
            self.check_addresses(arrays)
            return (None, *arrays[:7], *self._scale_arrays(arrays))
        found = (
            0,
            q.data.ptr,
            k_cache.data.ptr,
            v_cache.data.ptr,
            block_table.data.ptr,
            seq_lens.data.ptr,
        )
        if (found[1] | found[2] | found[3] | found[4] | found[5]) & self._any_odd:
            self.check_addresses(arrays)
        if not self._has_others:
            return found + _NO_OTHERS
        alibi_slopes, sinks = others[:2]
        others = [alibi_slopes, sinks, *self._scale_arrays(arrays)]
        return found + tuple([0 if x is None else x.data.ptr for x in others])

    def _scale_arrays(self, arrays: tuple[Any, ...]) -> list[Any]:
        """k_scale and v_scale, None where they are numbers, which are no pointers."""
        kinds = self.types.k_scale, self.types.v_scale
        return [
            x if isinstance(kind, ArrayType) else None
            for x, kind in zip(arrays[7:], kinds, strict=True)
        ]

    def check_addresses(self, arrays: tuple[Any, ...]) -> None:
        """Caches start at whole vectors, the others at whole elements."""
        for name, array, align in zip(Arrays._fields, arrays, self.alignments, strict=False):
            if checks.address(array) % align:
                raise ValueError(checks.misaligned(name, array, align))

    @property
    def longest(self) -> int:
        """Keys that a row of the block table reaches, at least 1."""
        return max(self.types.block_table.shape[1] * self.types.k_cache.shape[1], 1)

    @property
    def leaf_rows(self) -> int:
        """Rows of subtrees for each sequence: as many as it can have leaves."""
        most = grid.max_leaves(grid.blocks_per_row(self.heads))
        # Rounded up, so that steps whose tables widen go through few sizes of what they keep.
        return min(most, 1 << (grid.cdiv(self.longest, grid.MIN_LEAF) - 1).bit_length())

    def check_contents(self, arrays: Arrays, shard: tuple[int, int] = (0, INT32_MAX)) -> None:
        """Contents: ids and lengths in host memory, and numbers wherever they are (this waits)."""
        if self.device is None:
            num_blocks, block_size = self.types.k_cache.shape[:2]
            checks.contents(arrays.block_table, arrays.seq_lens, num_blocks, block_size, shard)
        checks.numbers_in_range(arrays.sinks, arrays.alibi_slopes, arrays.k_scale, arrays.v_scale)

    def check_output(self, out: Any, arrays: tuple[Any, ...]) -> None:
        """What is read is no part of the output."""
        assert self.out_type is not None
        if self.device is not None and self._apart(out.data.ptr, self.pointers(arrays)):
            return
        read = {
            name: array
            for name, array in zip(Arrays._fields, arrays, strict=True)
            if checks.is_host(array) or checks.is_cupy(array)
        }
        checks.overlaps("out", out, self.out_type, read)

    def _apart(self, out: int, pointers: tuple[int, ...]) -> bool:
        """Whether an output at this address shares no byte with what is read."""
        (low, high), extents = self._extents
        start, end = out + low, out + high
        for address, (first, last) in zip(pointers[1:], extents, strict=True):
            if start < address + last and address + first < end:
                return False
        return True

    @functools.cached_property
    def _extents(self) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """Bytes that the output covers, and the arrays that ``pointers`` names."""
        assert self.out_type is not None
        read = [checks.extent(x) if isinstance(x, ArrayType) else (0, 0) for x in self.types]
        return checks.extent(self.out_type), read

    def refusal_of(self, q: Any, out: Any) -> str | None:
        """``refusal``, where the addresses of this call have a say in it.

        Raises
        ------
        ValueError
            If they refuse what was to go to the fast kernel.
        """
        if self.refusal is not None:
            return self.refusal
        for name, array in (("q", q), ("out", out)):
            if array is not None and checks.address(array) % fast.ALIGNMENT:
                why = checks.misaligned(name, array, fast.ALIGNMENT)
                if self.kernel == "fast":
                    raise ValueError(f"with kernel='fast', {why}")
                if self.overlap:
                    raise ValueError(not_overlapping(why))
                if self.deterministic:
                    raise ValueError(_undetermined(why))
                return why
        return None

    # ------------------------------------------------------------------ running it

    def run(
        self, arrays: Arrays, plan: SplitPlan | None, out: Any, validating: bool
    ) -> tuple[Any, Any]:
        """Output and lse, in new arrays where none is given."""
        if self.backend == "reference":
            self.check_addresses(arrays)
            self.refusal_of(arrays.q, out)
            return self._run_reference(arrays, plan, out)
        if self.device is None:
            return self._run(arrays, plan, out, validating, None)
        runner = self.runner
        if not runner.is_current(self.device):
            with runner.on(self.device):
                return self.run(arrays, plan, out, validating)
        queue = runner.queue()
        if not queue[1]:
            return self._run(arrays, plan, out, validating, queue)
        # The graph will read and write again what this call allocates.
        with runner.relaxed():
            return self._run(arrays, plan, out, validating, queue, runner.keep_for_good)

    def run_again(self, arrays: tuple[Any, ...], out: Any) -> tuple[Any, Any] | None:
        """``run`` in a hurry, for the fast kernel where it has run before.

        None where there is more to do: on another device, for a graph, for arrays that start
        between words. Such calls are many, so as few functions as possible are called here.
        """
        if self._ready is None:
            return None
        runner = self.runner
        pointers = self.pointers(arrays)
        queue = runner.queue()
        if queue[1] or pointers[1] % fast.ALIGNMENT or not runner.is_current(self.device):
            return None
        if out is None:
            out, lse, out_at, lse_at = self._outputs()
        else:
            out_at = out.data.ptr
            if out_at % fast.ALIGNMENT:
                return None
            lse = runner.empty(self.out_shape[:2], np.float32)
            lse_at = lse.data.ptr
        _, room = self._ready.room(queue)
        self._ready.launch((*pointers, out_at, lse_at, 0, *room))
        return out, lse

    def _run(
        self,
        arrays: Arrays,
        plan: SplitPlan | None,
        out: Any,
        validating: bool,
        queue: Any,
        keep: Callable[..., None] | None = None,
    ) -> tuple[Any, Any]:
        runner = self.runner
        pointers = self.pointers(arrays)
        refusal = self.refusal_of(arrays.q, out)
        if out is None:
            out = runner.empty(self.out_shape, self.types.q.dtype)
        lse = runner.empty(self.out_shape[:2], np.float32)
        fault = runner.zeros((4,), np.int32) if validating else None
        if self.batch:
            plan = self.placed(plan, arrays.seq_lens, refusal)
            launches = self.launches(plan, refusal)
            owner, room = launches.room(queue)
            point = runner.pointer
            pointers += (point(out), point(lse), point(fault), *room)
            if plan is not None:
                pointers += self.plan_pointers(plan)
            launches.launch(pointers)
            if keep is not None:
                keep(owner, plan, out, lse)
            # The owner goes back in the order of the stream, so not before the launches.
        if fault is not None:
            raise_on_fault(fault, arrays.block_table.shape[1], arrays.v_cache)
        return out, lse

    def plan_pointers(self, plan: SplitPlan) -> tuple[Any, Any]:
        point = self.runner.pointer
        return point(plan.split_offsets), point(plan.split_begin)

    def _run_reference(
        self, arrays: Arrays, plan: SplitPlan | None, out: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        if out is None:
            out = np.empty(self.out_shape, arrays.q.dtype)
        if not self.batch:
            return out, np.empty(out.shape[:2], np.float32)
        if not self.deterministic:  # else a sequence is one sum, whatever the plan
            plan = plan or host_plan(self.rule, arrays.seq_lens)
        exact, lse = reference.decode_attention(
            **arrays.problem,
            plan=None if self.deterministic else plan,
            sinks=arrays.sinks,
            **self.score_options(arrays),
        )
        with np.errstate(over="ignore"):  # beyond float16 is inf there, as in the kernels
            out[...] = exact
            return out, lse.astype(np.float32)

    def score_options(self, arrays: Arrays) -> dict[str, Any]:
        """The options of stage 1, arrays and all."""
        o = self.options
        return dict(
            scale=o.scale,
            window=o.window,
            logits_soft_cap=o.logits_soft_cap,
            alibi_slopes=arrays.alibi_slopes,
            kv_dtype=o.kv_dtype,
            k_scale=arrays.k_scale if isinstance(o.k_scale, ArrayType) else o.k_scale,
            v_scale=arrays.v_scale if isinstance(o.v_scale, ArrayType) else o.v_scale,
        )

    def placed(
        self, plan: SplitPlan | None, seq_lens: Any, refusal: str | None
    ) -> SplitPlan | None:
        """The plan where the kernels run; None where they make their own or need none."""
        if refusal is None:
            return None
        if plan is None:
            if self.device is not None:
                return None
            return host_plan(self.rule, seq_lens)
        if self.device is not None and not plan.on_device:
            return plan.to(backends.runner("cuda"))
        return plan

    def launches(self, plan: SplitPlan | None, refusal: str | None) -> Readable | Fast:
        """The launches under a plan, compiled for the current device."""
        key = "fast" if refusal is None else None if plan is None else (plan.capacity, plan.unsplit)
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) >= MOST_KEPT:
                self._launches.clear()
            launches = self._launches[key] = self.new_launches(checks.plan_type(plan), refusal)
            if isinstance(launches, Fast) and self.device is not None:
                self._outputs = self.runner.outputs(self.out_shape, self.types.q.dtype)
                self._ready = launches
        return launches

    def new_launches(self, plan: checks.PlanType | None, refusal: str | None) -> Readable | Fast:
        return Fast(self, self.machine) if refusal is None else Readable(self, plan)

    # ------------------------------------------------------------------ saying what it does

    def explain(self, arrays: Arrays, plan: SplitPlan | None, out: Any) -> Explanation:
        """What ``run`` does with these arrays."""
        refusal = self.refusal_of(arrays.q, out)
        why = COVERED if refusal is None else refusal
        if self.backend == "reference" or not self.batch:
            return Explanation(self.backend, (), (), why, "none", "none")
        placed = self.placed(plan, arrays.seq_lens, refusal)
        launches = self.launches(placed, refusal)
        if isinstance(launches, Fast):
            lens = None if self.device is not None else arrays.seq_lens.tolist()
            (launch,) = launches.launches
            said = Explanation.of_fast(
                self.backend, why, launch, launches.spec, lens, self.options.window
            )
            if not self.split_rules:
                return said
            ignored = f"; {self.split_rules[0]} is ignored, for with deterministic=True no bit may "
            return replace(said, split_rule=f"{said.split_rule}{ignored}depend on it")
        rule = self._rule_of(plan)
        on_host = [p for p in (plan, placed) if p is not None and not p.on_device]
        num_splits = tuple(on_host[0].counts.tolist()) if on_host else None
        leaves = None
        if self.deterministic and self.device is None:
            leaves = [grid.leaf_keys(int(s), self.heads) for s in arrays.seq_lens]
        return Explanation.of_readable(
            self.backend, why, launches.launches, rule, num_splits, leaves
        )

    def _rule_of(self, plan: SplitPlan | None) -> str:
        if plan is not None:
            return f"the plan given, {plan.policy}"
        kind, value = self.rule
        if kind == "size":
            return f"split_size, {value} keys each"
        name = "num_splits" if self.split_rules else "the first-wave rule of this package"
        return f"{name}, at most {value} of a sequence"


def host_plan(rule: Rule, seq_lens: Any) -> SplitPlan:
    kind, value = rule
    if kind == "size":
        return SplitPlan.from_split_size(seq_lens, value)
    return SplitPlan.from_num_splits(seq_lens, value)


def empty_partials(
    runner: Any, plan: SplitPlan, heads: HeadConfig, leaf_rows: int | None = None
) -> Partials:
    """Room for the states of a plan's splits, or for subtrees of so many leaves a sequence."""
    num_rows, width = plan.capacity, None
    if leaf_rows is not None:
        # Nobody writes the widths of a sequence without a row in the plan.
        num_rows, width = plan.batch * leaf_rows, runner.zeros((plan.batch, leaf_rows), np.int32)
    rows = (num_rows, heads.num_q_heads)
    return Partials(
        runner.empty((*rows, heads.value_dim), np.float32),
        runner.empty(rows, np.float32),
        runner.empty(rows, np.float32),
        plan,
        width,
    )
