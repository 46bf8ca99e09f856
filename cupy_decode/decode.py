"""The operators people call, over three backends that accept and refuse the same arguments.

``backend="auto"`` follows the arrays: CuPy arrays run the CUDA kernels, NumPy arrays the NumPy
reference. ``"emulator"`` runs the CUDA sources on the CPU, on NumPy arrays. There is no silent
fallback: a backend that cannot take the arrays is a TypeError.

What can be said of a call from the types of its arrays (checks, kernels, grids, every number that
is passed) is worked out once per combination of types and kept, as a compiled kernel is. A call
that has been made before only looks at addresses and passes pointers.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from cupy_decode import backends, checks, device_plans, grid, policies, reference, specs
from cupy_decode.heads import HeadConfig
from cupy_decode.interop import takes_torch
from cupy_decode.plan import Partials, SplitPlan
from cupy_decode.specs import ArrayType

Backend = Literal["auto", "cuda", "emulator", "reference"]
Rule = tuple[Literal["count", "size"], int]

#: Checked calls that are kept, and launches of each; older ones are worked out again.
_MOST_KEPT = 4096


def _resolve(backend: str, device: int | None) -> str:
    """The backend that runs: the one asked for, if the arrays are where it needs them."""
    if backend not in ("auto", "cuda", "emulator", "reference"):
        raise ValueError(
            f"backend must be 'auto', 'cuda', 'emulator' or 'reference'; got {backend!r}"
        )
    if backend == "auto":
        return "reference" if device is None else "cuda"
    if (backend == "cuda") == (device is None):
        raise TypeError(
            f"backend={backend!r} needs {'CuPy' if backend == 'cuda' else 'NumPy'} arrays but got "
            f"{'NumPy' if device is None else 'CuPy'} arrays; convert them or use backend='auto'"
        )
    return backend


def _resolve_arrays(backend: str, **arrays: Any) -> tuple[str, int | None]:
    types = {name: checks.array_type(name, array) for name, array in arrays.items()}
    device = checks.one_device(**types)
    return _resolve(backend, device), device


def _on(runner: Any, device: int | None) -> Any:
    """A context in which a runner's launches and allocations go to a device."""
    return nullcontext() if device is None else runner.on(device)


_VALIDATE = os.environ.get("CUPY_DECODE_VALIDATE", "0") == "1"


def _validating(validate: bool | None) -> bool:
    return _VALIDATE if validate is None else validate


def _raise_on_fault(fault: Any, block_table_width: int, v_cache: Any) -> None:
    """Wait for the kernels and turn the fault they recorded, if any, into an exception."""
    record = fault if checks.is_host(fault) else fault.get()
    if record[0]:
        num_blocks, block_size = v_cache.shape[:2]
        raise ValueError(checks.device_fault(record, block_table_width, block_size, num_blocks))


@takes_torch
def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    plan: SplitPlan | None = None,
    *,
    num_splits: int | None = None,
    split_size: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    return_lse: bool = True,
    backend: Backend = "auto",
    validate: bool | None = None,
) -> Any:
    """Attention of one query token per sequence over its paged KV cache.

    Parameters
    ----------
    q : (batch, num_q_heads, head_dim) float32, float16 or bfloat16
        Any strides.
    k_cache : (num_blocks, block_size, num_kv_heads, head_dim)
        float32, float16, bfloat16, or 8-bit floats: uint8 with ``kv_dtype``, or ml_dtypes'
        float8_e4m3fn and float8_e5m2 on the host. head_dim is a multiple of 8 (4 for float32) up to
        576. Any strides whose rows are whole, aligned vectors of 16 bytes (8 bytes for 8-bit rows
        that are an odd multiple of 8), so NHD and HND views both do.
    v_cache : (num_blocks, block_size, num_kv_heads, v_head_dim)
    block_table : (batch, max_blocks) int32
        Block of the cache for each run of ``block_size`` keys. Entries past a row's need are never
        looked at. Lists and int64 arrays of at most 2**20 entries are converted.
    seq_lens : (batch,) int32
        Keys of each sequence; the query is the newest one. 0 is allowed: output 0, lse -inf. Lists
        and int64 arrays are converted, as for ``block_table``.
    plan : SplitPlan, optional
        Which keys each thread block reads. Without it ``num_splits`` or ``split_size`` decides, and
        without those the first-wave count does.
    num_splits, split_size : int, optional
        Splits per sequence, or keys per split.
    scale : float, optional
        Multiplies q . k; ``1 / sqrt(head_dim)`` when left out. Scores are float32 in the kernels:
        from 2**30 in magnitude on, neighbouring ones are too far apart for a softmax.
    window : int, optional
        Newest keys that are visible, the current one included.
    logits_soft_cap : float, optional
        ``cap * tanh(score / cap)``, before ALiBi and the mask; 0 or None for none.
    alibi_slopes : (num_q_heads,) float32, optional
        Adds ``slope * (key - newest key)`` to the score.
    sinks : (num_q_heads,) float32, optional
        One extra logit per query head without a value vector; the lse leaves it out. -inf: none.
    kv_dtype : {"e4m3", "e5m2"}, optional
        What the bytes of a uint8 cache are.
    k_scale, v_scale : float or float32 array, optional
        Positive factors of the keys and of the values, of a quantised cache or any other: a number
        for the whole tensor, an array (num_kv_heads,) or (batch, num_kv_heads). ``k_scale`` counts
        before the soft cap.
    out : (batch, num_q_heads, v_head_dim), optional
        Written and returned; q's dtype or float32, any strides.
    return_lse : bool
        Return ``(out, lse)`` rather than ``out``.
    backend : {"auto", "cuda", "emulator", "reference"}
    validate : bool, optional
        Wait, and raise on block ids or lengths on the device that the kernels refused to follow,
        and on numbers that make no sense (a sink of +inf). Without it such a row comes out as NaN.
        Default: whether the environment had CUPY_DECODE_VALIDATE=1 at import.

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim)
        In q's dtype. An empty batch gives an empty array, and nothing is launched.
    lse : (batch, num_q_heads) float32
        Natural log-sum-exp of the visible scores.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched or written, naming the argument, the rule and a fix.

    Notes
    -----
    Torch tensors are taken as they are, on torch's current stream, and give tensors back.
    """
    block_table = checks.integers("block_table", block_table, q)
    seq_lens = checks.integers("seq_lens", seq_lens, q)
    kind = checks.array_type
    call = _call(
        backend,
        kind("q", q),
        kind("k_cache", k_cache),
        kind("v_cache", v_cache),
        kind("block_table", block_table),
        kind("seq_lens", seq_lens),
        kind("alibi_slopes", alibi_slopes),
        kind("sinks", sinks),
        kind("out", out),
        _scale_type("k_scale", k_scale),
        _scale_type("v_scale", v_scale),
        checks.plan_type(plan),
        num_splits,
        split_size,
        scale,
        window,
        logits_soft_cap,
        kv_dtype,
    )
    arrays = _Arrays(
        q, k_cache, v_cache, block_table, seq_lens, alibi_slopes, sinks, k_scale, v_scale
    )
    validating = _validating(validate)
    call.check_addresses(q, k_cache, v_cache, block_table, seq_lens)
    if call.device is None or validating:
        call.check_contents(arrays)
    if out is not None:
        call.check_output(out, arrays)
    out, lse = call.run(arrays, plan, out, validating)
    return (out, lse) if return_lse else out


class _Arrays(NamedTuple):
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


def _scale_type(name: str, value: Any) -> Any:
    """A scale as ``_call`` takes it: arrays by type, numbers as they are."""
    if value is not None and (checks.is_host(value) or checks.is_cupy(value)):
        return checks.array_type(name, value)
    return value


def _call(*key: Any) -> _Call:
    """The checked call of these types, from the cache where it was made before."""
    try:
        return _new_call(*key)
    except TypeError:
        # An option that cannot be hashed cannot be right either: the checks say which it is.
        return _new_call.__wrapped__(*key)


# typed: True is no window of 1.
@functools.lru_cache(maxsize=_MOST_KEPT, typed=True)
def _new_call(
    backend: str,
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
) -> _Call:
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
    chosen = _resolve(backend, device)
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
    types = _Arrays(
        q, k_cache, v_cache, block_table, seq_lens, alibi_slopes, sinks, k_scale, v_scale
    )
    return _Call(chosen, device, heads, options, types, out, rule)


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
    blocks = batch * heads.num_kv_heads * -(-heads.group_size // specs.MAX_HEADS_PER_BLOCK)
    return "count", grid.first_wave_splits(max(blocks, 1), num_sms)


@dataclass(eq=False)
class _Call:
    """A decode call of certain types: checked, and its launches ready where it was made before."""

    backend: str
    device: int | None
    heads: HeadConfig
    options: checks.Options
    types: _Arrays
    out_type: ArrayType | None
    rule: Rule
    _launches: dict[Any, _Launches] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = int(self.types.q.shape[0])
        self.alignments = (
            self.types.q.dtype.itemsize,
            checks.alignment(self.types.k_cache),
            checks.alignment(self.types.v_cache),
            self.types.block_table.dtype.itemsize,
            self.types.seq_lens.dtype.itemsize,
        )

    # ------------------------------------------------------------------ this call's arrays

    def check_addresses(
        self, q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any
    ) -> None:
        """Caches start at whole vectors, the others at whole elements: views of bytes may not."""
        arrays = (q, k_cache, v_cache, block_table, seq_lens)
        for name, array, align in zip(_Arrays._fields, arrays, self.alignments, strict=False):
            if checks.address(array) % align:
                raise ValueError(checks.misaligned(name, array, align))

    def check_contents(self, arrays: _Arrays) -> None:
        """Contents: ids and lengths in host memory, and numbers wherever they are (this waits)."""
        if self.device is None:
            num_blocks, block_size = self.types.k_cache.shape[:2]
            checks.contents(arrays.block_table, arrays.seq_lens, num_blocks, block_size)
        checks.numbers_in_range(arrays.sinks, arrays.alibi_slopes, arrays.k_scale, arrays.v_scale)

    def check_output(self, out: Any, arrays: _Arrays) -> None:
        assert self.out_type is not None
        read = {
            name: array
            for name, array in arrays._asdict().items()
            if checks.is_host(array) or checks.is_cupy(array)
        }
        checks.overlaps("out", out, self.out_type, read)

    # ------------------------------------------------------------------ running it

    def run(
        self, arrays: _Arrays, plan: SplitPlan | None, out: Any, validating: bool
    ) -> tuple[Any, Any]:
        """Output and lse, in new arrays where none is given."""
        if self.backend == "reference":
            return self._run_reference(arrays, plan, out)
        runner = backends.runner(self.backend)  # type: ignore[arg-type]
        if self.device is not None and not runner.is_current(self.device):
            with runner.on(self.device):
                return self.run(arrays, plan, out, validating)
        if out is None:
            shape = (self.batch, self.heads.num_q_heads, self.heads.value_dim)
            out = runner.empty(shape, self.types.q.dtype)
        lse = runner.empty(out.shape[:2], np.float32)
        fault = runner.zeros((4,), np.int32) if validating else None
        if self.batch:
            plan = self.placed(plan, arrays.seq_lens)
            self.launches(plan)(arrays, plan, out, lse, fault)
        if fault is not None:
            _raise_on_fault(fault, arrays.block_table.shape[1], arrays.v_cache)
        return out, lse

    def _run_reference(
        self, arrays: _Arrays, plan: SplitPlan | None, out: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        if out is None:
            out = np.empty(
                (self.batch, self.heads.num_q_heads, self.heads.value_dim), arrays.q.dtype
            )
        if not self.batch:
            return out, np.empty(out.shape[:2], np.float32)
        exact, lse = reference.decode_attention(
            **arrays.problem,
            plan=plan or _host_plan(self.rule, arrays.seq_lens),
            sinks=arrays.sinks,
            **self.score_options(arrays),
        )
        with np.errstate(over="ignore"):  # beyond float16 is inf there, as in the kernels
            out[...] = exact
            return out, lse.astype(np.float32)

    def score_options(self, arrays: _Arrays) -> dict[str, Any]:
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

    def placed(self, plan: SplitPlan | None, seq_lens: Any) -> SplitPlan | None:
        """The plan where the kernels run; None where they make their own or need none."""
        if plan is None:
            if self.device is not None:
                return None
            return _host_plan(self.rule, seq_lens)
        if self.device is not None and not plan.on_device:
            return plan.to(backends.runner("cuda"))
        return plan

    def launches(self, plan: SplitPlan | None) -> _Launches:
        """The launches under a plan, compiled for the current device."""
        key = None if plan is None else (plan.capacity, plan.unsplit)
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) >= _MOST_KEPT:
                self._launches.clear()
            launches = self._launches[key] = _Launches(self, checks.plan_type(plan))
        return launches

    def stage_1(self, plan: Any, **outputs: Any) -> specs.Launch:
        """Stage 1 on these types."""
        options = {**self.score_options(self.types), **outputs}
        return specs.paged_split_k(plan=plan, **self.types.problem, **options)


#: What the kernels call the arrays of ``_Arrays``, in its order.
_POINTERS = (
    *("q", "k_cache", "v_cache", "block_table", "seq_lens", "alibi_slopes", "sinks"),
    *("k_scales", "v_scales"),
)


#: Stage 1 writes what stage 2 reads.
_STATES = {"acc_out": "acc", "m_out": "m", "l_out": "l"}


class _Launches:
    """The launches of one call under plans of one capacity: all but the pointers is fixed.

    One launch where nothing is split; else stage 1 and stage 2, after planning where the lengths
    live on the device and no plan is given.
    """

    def __init__(self, call: _Call, plan: checks.PlanType | None) -> None:
        heads, types, device = call.heads, call.types, call.device
        rows = (call.batch, heads.num_q_heads)

        def new(shape: tuple[int, ...], dtype: Any = np.float32) -> ArrayType:
            return ArrayType.contiguous(shape, np.dtype(dtype), device)

        out = call.out_type or new((*rows, heads.value_dim), types.q.dtype)
        outputs: dict[str, ArrayType] = dict(out=out, lse=new(rows))
        fault = new((4,), np.int32)
        scratch: dict[str, ArrayType] = {}
        launches: list[specs.Launch] = []
        whole = call.rule == ("count", 1) if plan is None else plan.unsplit
        if plan is None and not (whole and types.sinks is None):
            rule = policies.DeviceRule(*call.rule)
            longest = types.block_table.shape[1] * types.k_cache.shape[1]
            longest = min(max(longest, 1), device_plans.MAX_SEQ_LEN)
            plan = checks.PlanType(
                new((call.batch + 1,), np.int32),
                new((rule.max_rows(call.batch, longest),), np.int32),
                False,
            )
            scratch.update(split_offsets=plan.split_offsets, split_begin=plan.split_begin)
            launches.append(
                specs.plan_splits(
                    plan,
                    types.seq_lens,
                    rule=rule.rule,
                    value=min(rule.value, device_plans.MAX_SEQ_LEN),
                    max_seq_len=longest,
                )
            )
        if whole and types.sinks is None:
            launches.append(call.stage_1(plan, fault=fault, **outputs))
        else:
            assert plan is not None
            states = dict.fromkeys("ml", new((plan.split_begin.shape[0], heads.num_q_heads)))
            states["acc"] = new((*states["m"].shape, heads.value_dim))
            scratch.update(states)
            launches.append(call.stage_1(plan, fault=fault, **states))
            partials = Partials(states["acc"], states["m"], states["l"], plan)  # type: ignore[arg-type]
            launches.append(specs.reduce_splits(partials, sinks=types.sinks, **outputs))
        self._scratch = backends.scratch(call.backend, scratch, _STATES)
        self._bound = backends.bind(call.backend, launches)
        self.fix, self.launch = self._bound.fix, self._bound.__call__
        pointers = [a for launch in launches for a in launch.args if a.ctype == "ptr"]
        given = {a.name for a in pointers if a.value is not None}
        # What these types have not got is null in every call.
        self.fix({a.name: None for a in pointers if a.name not in given})

    def __call__(
        self, arrays: _Arrays, plan: SplitPlan | None, out: Any, lse: Any, fault: Any
    ) -> None:
        """Hand all pointers to the kernels, on the current device and stream."""
        pointers = dict(zip(_POINTERS, arrays, strict=True), out=out, lse=lse, fault=fault)
        if plan is not None:
            pointers.update(split_offsets=plan.split_offsets, split_begin=plan.split_begin)
        memory = None
        if self._scratch is not None:
            memory, buffers = self._scratch()
            pointers.update(buffers)
        self.launch(pointers)
        del memory  # given back in the order of the stream, so not before the launches


def _host_plan(rule: Rule, seq_lens: Any) -> SplitPlan:
    kind, value = rule
    if kind == "size":
        return SplitPlan.from_split_size(seq_lens, value)
    return SplitPlan.from_num_splits(seq_lens, value)


# ---------------------------------------------------------------------- the stages by themselves


@takes_torch
def paged_split_k(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    plan: SplitPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    partials: Partials | None = None,
    backend: Backend = "auto",
    validate: bool | None = None,
) -> Partials:
    """Stage 1: the softmax state of every split of ``plan``.

    Parameters are those of ``decode_attention``. ``partials`` is a workspace to write into; its
    arrays must have at least ``plan.capacity`` rows.

    Returns
    -------
    Partials
        acc (rows, num_q_heads, v_head_dim), m and l (rows, num_q_heads); float32, and float64 from
        the reference. Rows past the plan's last are unwritten.
    """
    if plan is None:
        raise TypeError("plan must be a SplitPlan; got None: make one with cupy_decode.plan_splits")
    block_table = checks.integers("block_table", block_table, q)
    seq_lens = checks.integers("seq_lens", seq_lens, q)
    arrays = _Arrays(
        q, k_cache, v_cache, block_table, seq_lens, alibi_slopes, None, k_scale, v_scale
    )
    kinds = [checks.array_type(*item) for item in zip(_Arrays._fields[:7], arrays, strict=False)]
    scales = [_scale_type("k_scale", k_scale), _scale_type("v_scale", v_scale)]
    plan_kind = checks.plan_type(plan)
    rule = (None, None)
    call = _call(
        backend, *kinds, None, *scales, plan_kind, *rule, scale, window, logits_soft_cap, kv_dtype
    )
    if not call.batch:
        raise ValueError("q must hold at least one sequence; got batch 0, which no plan can be for")
    validating = _validating(validate)
    call.check_addresses(q, k_cache, v_cache, block_table, seq_lens)
    if call.device is None or validating:
        call.check_contents(arrays)
    heads = call.heads
    if partials is not None:
        checks.workspace(partials, plan, heads)
        _resolve_arrays(call.backend, q=q, acc=partials.acc, m=partials.m, l=partials.l)
    if call.backend == "reference":
        if partials is not None:
            raise TypeError("the reference allocates its own float64 partials; leave partials out")
        options = call.score_options(arrays)
        return reference.paged_split_k(plan=plan, **arrays.problem, **options)
    runner = backends.runner(call.backend)  # type: ignore[arg-type]
    with _on(runner, call.device):
        fault = runner.zeros((4,), np.int32) if validating else None
        placed = call.placed(plan, seq_lens)
        assert placed is not None
        if partials is None:
            partials = _empty_partials(runner, placed, heads)
        partials = Partials(partials.acc, partials.m, partials.l, placed)
        outputs = dict(acc=partials.acc, m=partials.m, l=partials.l, fault=fault)
        options = {**call.score_options(arrays), **outputs}
        runner.run(specs.paged_split_k(plan=placed, **arrays.problem, **options))
        if fault is not None:
            _raise_on_fault(fault, block_table.shape[1], v_cache)
    return partials


def _empty_partials(runner: Any, plan: SplitPlan, heads: HeadConfig) -> Partials:
    rows = (plan.capacity, heads.num_q_heads)
    return Partials(
        runner.empty((*rows, heads.value_dim), np.float32),
        runner.empty(rows, np.float32),
        runner.empty(rows, np.float32),
        plan,
    )


@takes_torch
def reduce_splits(
    partials: Partials,
    *,
    sinks: Any = None,
    out: Any = None,
    dtype: Any = np.float32,
    backend: Backend = "auto",
) -> tuple[Any, Any]:
    """Stage 2: merge all splits of each sequence and divide once.

    Parameters
    ----------
    partials : Partials
    sinks : (num_q_heads,) float32, optional
    out : (batch, num_q_heads, v_head_dim), optional
        Written and returned; float32, float16 or bfloat16, any strides.
    dtype : dtype
        Output type when ``out`` is not given; the reference always returns float64.
    backend : {"auto", "cuda", "emulator", "reference"}

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim)
    lse : (batch, num_q_heads)
        Natural log, without the sink; -inf where the output is 0 for want of keys.
    """
    if not isinstance(partials, Partials):
        raise TypeError(f"partials must be a Partials; got {type(partials).__name__}")
    chosen, device = _resolve_arrays(
        backend, acc=partials.acc, m=partials.m, l=partials.l, sinks=sinks, out=out
    )
    heads = checks.partials(partials, chosen == "reference")
    if sinks is not None:
        checks.per_head("sinks", sinks, heads)
        if device is None:
            checks.numbers_in_range(sinks=sinks)
    plan = partials.plan
    plan_kind = checks.plan_type(plan)
    assert plan_kind is not None
    checks.plan(plan_kind, plan.batch, device)
    shape = (plan.batch, heads.num_q_heads, heads.head_dim)
    if out is not None:
        checks.output("out", out, shape, *checks.FLOAT_DTYPES)
        _check_apart("out", out, acc=partials.acc, m=partials.m, l=partials.l, sinks=sinks)
    elif str(np.dtype(dtype)) not in checks.FLOAT_DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(checks.FLOAT_DTYPES)}; got {dtype}")
    if chosen == "reference":
        exact, lse = reference.reduce_splits(partials, sinks=sinks)
        if out is None:
            return exact, lse
        out[...] = exact
        return out, lse
    runner = backends.runner(chosen)  # type: ignore[arg-type]
    with _on(runner, device):
        if device is not None and not plan.on_device:
            partials = Partials(partials.acc, partials.m, partials.l, plan.to(runner))
        if out is None:
            out = runner.empty(shape, dtype)
        lse = runner.empty(shape[:2], np.float32)
        runner.run(specs.reduce_splits(partials, out, lse, sinks))
    return out, lse


def _check_apart(name: str, out: Any, **read: Any) -> None:
    kind = checks.array_type(name, out)
    assert kind is not None
    checks.overlaps(name, out, kind, read)


@takes_torch
def merge_states(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    *,
    sinks: Any = None,
    out: Any = None,
    backend: Backend = "auto",
) -> tuple[Any, Any]:
    """Outputs over two disjoint sets of keys become the output over their union.

    Parameters
    ----------
    out_a, out_b : (tokens, num_q_heads, v_head_dim)
        Normalised outputs, one dtype; any strides with a contiguous last axis.
    lse_a, lse_b : (tokens, num_q_heads) float32
        Natural log-sum-exp, any strides; -inf and +inf both mean "no keys".
    sinks : (num_q_heads,) float32, optional
        For the last merge of a chain only: states that will be merged again must not hold a sink.
    out : optional
        Written and returned; may be ``out_a`` or ``out_b`` itself.
    backend : {"auto", "cuda", "emulator", "reference"}

    Returns
    -------
    out : (tokens, num_q_heads, v_head_dim)
        In the inputs' dtype; float64 from the reference. 0 where both sides are empty.
    lse : (tokens, num_q_heads)
        -inf where both sides are empty.
    """
    chosen, device = _resolve_arrays(
        backend, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, sinks=sinks, out=out
    )
    heads = checks.states(out_a, lse_a, out_b, lse_b, chosen == "reference")
    if sinks is not None:
        checks.per_head("sinks", sinks, heads)
        if device is None:
            checks.numbers_in_range(sinks=sinks)
    if out is not None:
        checks.output("out", out, out_a.shape, specs.dtype_name(out_a))
        checks.contiguous_rows("out", out)
        read = dict(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, sinks=sinks)
        _check_apart("out", out, **{name: x for name, x in read.items() if x is not out})
    if chosen == "reference":
        exact, lse = reference.merge_states(out_a, lse_a, out_b, lse_b, sinks=sinks)
        if out is None:
            return exact, lse
        out[...] = exact
        return out, lse
    runner = backends.runner(chosen)  # type: ignore[arg-type]
    with _on(runner, device):
        if out is None:
            out = runner.empty(out_a.shape, out_a.dtype)
        lse = runner.empty(out_a.shape[:2], np.float32)
        if out_a.shape[0]:
            runner.run(specs.merge_states(out, lse, out_a, lse_a, out_b, lse_b, sinks))
    return out, lse


@takes_torch
def write_kv(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    backend: Backend = "auto",
    validate: bool | None = None,
) -> None:
    """Write the newest K and V rows into their slots of the paged cache, in place.

    Parameters
    ----------
    k, v : (tokens, num_kv_heads, dim)
        The cache's dtype: bits move, and whoever fills an 8-bit cache rounds the rows first.
    k_cache, v_cache : (num_blocks, block_size, num_kv_heads, dim)
        Any dtype that ``decode_attention`` reads.
    slot_mapping : (tokens,) int64
        ``block * block_size + offset``; a negative slot is padding and writes nothing.
    backend : {"auto", "cuda", "emulator", "reference"}
    validate : bool, optional
        As in ``decode_attention``.
    """
    chosen, device = _resolve_arrays(
        backend, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping
    )
    checks.write_kv(k, v, k_cache, v_cache, slot_mapping)
    if chosen == "reference":
        reference.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    if slot_mapping.shape[0] == 0:
        return
    runner = backends.runner(chosen)  # type: ignore[arg-type]
    with _on(runner, device):
        fault = runner.zeros((4,), np.int32) if _validating(validate) else None
        runner.run(specs.write_kv(k, v, k_cache, v_cache, slot_mapping, fault))
        if fault is not None:
            _raise_on_fault(fault, 0, v_cache)


# ---------------------------------------------------------------------- repeated steps


class DecodeStep:
    """A decode step that owns its workspace, for repeated and graph-captured use.

    Launch geometry and buffers are fixed by ``plan``'s capacity, which splits do work is decided by
    the plan's contents on the device. Rewrite those with ``plan.assign`` between replays.

    Parameters
    ----------
    heads : HeadConfig
    plan : SplitPlan
        A device plan for CuPy arrays (``plan.to(cupy, capacity=...)``), a host plan for NumPy.
    dtype : dtype
        Query type.
    backend : {"auto", "cuda", "emulator"}
    kv_dtype : {"e4m3", "e5m2"}, optional
        What the bytes of a uint8 cache are.
    out_dtype : dtype, optional
        float32 for an output of that type; the query's when left out.

    Attributes
    ----------
    plan : SplitPlan
        The one it was made with; rewrite its contents.
    out, lse : arrays
        Written by every call; the same two for the step's life.
    partials : Partials
        The workspace.
    """

    def __init__(
        self,
        heads: HeadConfig,
        plan: SplitPlan,
        dtype: Any,
        backend: Backend = "auto",
        *,
        kv_dtype: str | None = None,
        out_dtype: Any = None,
    ) -> None:
        kind = checks.plan_type(plan)
        if kind is None:
            raise TypeError("plan must be a SplitPlan; got None")
        self._device = kind.split_begin.device
        checks.plan(kind, plan.batch, self._device)
        self.backend = _resolve(backend, self._device)
        if self.backend == "reference":
            raise TypeError("DecodeStep runs kernels; use backend='emulator' for NumPy arrays")
        runner = backends.runner(self.backend)  # type: ignore[arg-type]
        self.heads = heads
        self.plan = plan
        self.kv_dtype = kv_dtype
        rows = (plan.batch, heads.num_q_heads)
        with _on(runner, self._device):
            self.out = runner.empty(
                (*rows, heads.value_dim), dtype if out_dtype is None else out_dtype
            )
            self.lse = runner.empty(rows, np.float32)
            self.fault = runner.zeros((4,), np.int32)
            self.partials = _empty_partials(runner, plan, heads)
        self._dtype = np.dtype(dtype)
        self._runner = runner
        self._plan_type = kind
        self._out_type = checks.array_type("out", self.out)
        self._last: Any = None
        self._key: Any = None
        self._numbers: Any = None
        self._call: Any = None
        self._launches: Any = None
        self._made: dict[Any, _Launches] = {}

    @takes_torch
    def __call__(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_table: Any,
        seq_lens: Any,
        *,
        scale: float | None = None,
        window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> tuple[Any, Any]:
        """Launch the step on the current stream; allocates nothing. Returns (out, lse)."""
        kind = checks.array_type
        key = (
            kind("q", q),
            kind("k_cache", k_cache),
            kind("v_cache", v_cache),
            kind("block_table", block_table),
            kind("seq_lens", seq_lens),
            kind("alibi_slopes", alibi_slopes),
            kind("sinks", sinks),
            _scale_type("k_scale", k_scale),
            _scale_type("v_scale", v_scale),
            scale,
            window,
            logits_soft_cap,
        )
        # Equal is not the same: True is no window of 1.
        numbers = (type(scale), type(window), type(logits_soft_cap), type(k_scale), type(v_scale))
        if key != self._key or numbers != self._numbers:
            self._use(key, numbers)
        call = self._call
        call.check_addresses(q, k_cache, v_cache, block_table, seq_lens)
        pointers = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": block_table,
            "seq_lens": seq_lens,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "k_scales": k_scale,
            "v_scales": v_scale,
        }
        self._last = block_table, v_cache
        if self._device is None:
            call.check_contents(_Arrays(*pointers.values()))
            self._launches.launch(pointers)
        elif self._runner.is_current(self._device):
            self._launches.launch(pointers)
        else:
            with self._runner.on(self._device):
                self._launches.launch(pointers)
        return self.out, self.lse

    def _use(self, key: Any, numbers: Any) -> None:
        """Take up calls of these types: check them, and compile and bind their launches."""
        checks.step(key[0], self.plan.batch, self.heads, self._dtype)
        call = _call(
            self.backend,
            *key[:7],
            self._out_type,
            *key[7:9],
            self._plan_type,
            None,
            None,
            *key[9:],
            self.kv_dtype,
        )
        heads = (self.heads.num_kv_heads, self.heads.value_dim)
        if heads != (call.heads.num_kv_heads, call.heads.value_dim):
            raise ValueError(f"this step was made for {self.heads}; the caches have {call.heads}")
        found = self._made.get((key, numbers))
        if found is None:
            with _on(self._runner, self._device):
                found = _Launches(call, self._plan_type)
            for written, read in _STATES.items():
                state = getattr(self.partials, read)
                found.fix({written: state, read: state})
            found.fix(dict(out=self.out, lse=self.lse, fault=self.fault))
            plan = self.plan
            found.fix(dict(split_offsets=plan.split_offsets, split_begin=plan.split_begin))
            if len(self._made) >= _MOST_KEPT:
                self._made.clear()
            self._made[key, numbers] = found
        self._key, self._numbers, self._call, self._launches = key, numbers, call, found

    def check(self) -> None:
        """Wait, and raise if any call since the last check met a bad id or length."""
        if self._last is None:
            return
        block_table, v_cache = self._last
        try:
            _raise_on_fault(self.fault, block_table.shape[1], v_cache)
        finally:
            self.fault[...] = 0


def kernel(name: str, spec: specs.KernelSpec) -> Any:
    """A compiled kernel with what is needed to launch it on plain CuPy arrays.

    Parameters
    ----------
    name : str
        One of ``kernels_cu.names()``.
    spec : KernelSpec

    Returns
    -------
    Kernel
        ``raw`` is the ``cupy.RawKernel``; ``block``, ``shared_mem``, ``grid(...)`` and
        ``argument_order`` say how to launch it.

    Raises
    ------
    ValueError
        If there is no such kernel.
    BackendUnavailableError
        If CuPy is not installed.
    """
    specs.entry(name, spec)  # refuses what is no kernel before CuPy is asked for
    return backends.runner("cuda").kernel(name, spec)
