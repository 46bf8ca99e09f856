"""The operators people call, over three backends that accept and refuse the same arguments.

``backend="auto"`` follows the arrays: CuPy arrays run the CUDA kernels, NumPy arrays the NumPy
reference. ``"emulator"`` runs the CUDA sources on the CPU, on NumPy arrays. There is no silent
fallback: a backend that cannot take the arrays is a TypeError.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import numpy as np

from cupy_decode import checks, device_plans, grid, policies, reference, specs
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import Partials, SplitPlan

Backend = Literal["auto", "cuda", "emulator", "reference"]


def _resolve(backend: str, **arrays: Any) -> str:
    family = checks.array_family(**arrays)
    if backend not in ("auto", "cuda", "emulator", "reference"):
        raise ValueError(
            f"backend must be 'auto', 'cuda', 'emulator' or 'reference'; got {backend!r}"
        )
    if backend == "auto":
        return "cuda" if family == "cuda" else "reference"
    if (backend == "cuda") != (family == "cuda"):
        raise TypeError(
            f"backend={backend!r} needs {'CuPy' if backend == 'cuda' else 'NumPy'} arrays but got "
            f"{'CuPy' if family == 'cuda' else 'NumPy'} arrays; convert them or use backend='auto'"
        )
    return backend


def _runner(backend: str) -> Any:
    """The module that runs launches and allocates arrays for them."""
    if backend == "cuda":
        from cupy_decode.backends import cuda

        return cuda
    from cupy_decode.backends import emulator

    return emulator


def _validating(validate: bool | None) -> bool:
    return os.environ.get("CUPY_DECODE_VALIDATE", "0") == "1" if validate is None else validate


def _raise_on_fault(fault: Any, block_table_width: int, v_cache: Any) -> None:
    """Wait for the kernels and turn the fault they recorded, if any, into an exception."""
    record = fault if checks.is_host(fault) else fault.get()
    if record[0]:
        num_blocks, block_size = v_cache.shape[:2]
        raise ValueError(checks.device_fault(record, block_table_width, block_size, num_blocks))


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
    out: Any = None,
    return_lse: bool = True,
    backend: Backend = "auto",
    validate: bool | None = None,
) -> Any:
    """Attention of one query token per sequence over its paged KV cache.

    Parameters
    ----------
    q : (batch, num_q_heads, head_dim) float32, float16 or bfloat16
    k_cache : (num_blocks, block_size, num_kv_heads, head_dim)
        Any strides whose rows are whole, aligned 16-byte vectors, so NHD and HND views both do.
    v_cache : (num_blocks, block_size, num_kv_heads, v_head_dim)
    block_table : (batch, max_blocks) int32
        Block of the cache for each run of ``block_size`` keys. Entries past a row's need are never
        looked at.
    seq_lens : (batch,) int32
        Keys of each sequence; the query is the newest one. 0 is allowed: output 0, lse -inf.
    plan : SplitPlan, optional
        Which keys each thread block reads. Without it ``num_splits`` or ``split_size`` decides, and
        without those the first-wave count does.
    num_splits, split_size : int, optional
        Splits per sequence, or keys per split.
    scale : float, optional
        Multiplies q . k; ``1 / sqrt(head_dim)`` when left out.
    window : int, optional
        Newest keys that are visible, the current one included.
    logits_soft_cap : float, optional
        ``cap * tanh(score / cap)``, before ALiBi and the mask; 0 or None for none.
    alibi_slopes : (num_q_heads,) float32, optional
        Adds ``slope * (key - newest key)`` to the score.
    sinks : (num_q_heads,) float32, optional
        One extra logit per query head without a value vector; the lse leaves it out.
    out : (batch, num_q_heads, v_head_dim), optional
        Written and returned; q's dtype.
    return_lse : bool
        Return ``(out, lse)`` rather than ``out``.
    backend : {"auto", "cuda", "emulator", "reference"}
    validate : bool, optional
        Wait, and raise on block ids or lengths on the device that the kernels refused to follow.
        Without it such a row comes out as NaN. Default: the environment's CUPY_DECODE_VALIDATE.

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim)
        In q's dtype.
    lse : (batch, num_q_heads) float32
        Natural log-sum-exp of the visible scores.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched or written, naming the argument, the rule and a fix.
    """
    chosen = _resolve(
        backend,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        out=out,
    )
    heads = checks.decode(q, k_cache, v_cache, block_table, seq_lens)
    options = checks.scores(heads, scale, window, logits_soft_cap, alibi_slopes)
    if sinks is not None:
        checks.per_head("sinks", sinks, heads)
    shape = (q.shape[0], heads.num_q_heads, heads.value_dim)
    if out is not None:
        checks.output("out", out, shape, specs.dtype_name(q))
    if plan is not None and (num_splits is not None or split_size is not None):
        raise ValueError("give plan, or num_splits, or split_size; got plan and another")
    if plan is not None:
        checks.plan(plan, q.shape[0], "cuda" if chosen == "cuda" else "host")
    rule = _split_rule(num_splits, split_size, q.shape[0], heads, chosen)

    if chosen == "reference":
        exact, lse = reference.decode_attention(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            plan=plan or _host_plan(rule, seq_lens),
            scale=options.scale,
            window=options.window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=options.alibi_slopes,
            sinks=sinks,
        )
        if out is None:
            out = np.empty(shape, q.dtype)
        out[...] = exact
        return (out, lse.astype(np.float32)) if return_lse else out

    runner = _runner(chosen)
    fault = runner.zeros((4,), np.int32) if _validating(validate) else None
    if plan is None:
        plan = _plan_for(rule, seq_lens, block_table.shape[1] * k_cache.shape[1], runner)
    elif chosen == "cuda" and not plan.on_device:
        plan = plan.to(_Uploader(runner))
    if out is None:
        out = runner.empty(shape, q.dtype)
    lse = runner.empty(shape[:2], np.float32)
    _run(runner, q, k_cache, v_cache, block_table, seq_lens, plan, options, sinks, out, lse, fault)
    if fault is not None:
        _raise_on_fault(fault, block_table.shape[1], v_cache)
    return (out, lse) if return_lse else out


def _run(
    runner: Any,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    plan: SplitPlan,
    options: checks.Scores,
    sinks: Any,
    out: Any,
    lse: Any,
    fault: Any,
    partials: Partials | None = None,
) -> None:
    """One launch where no sequence is split, else stage 1 and stage 2."""
    arrays = (q, k_cache, v_cache, block_table, seq_lens, plan)
    if plan.unsplit and sinks is None and partials is None:
        runner.run(_stage_1(arrays, options, out=out, lse=lse, fault=fault))
        return
    if partials is None:
        partials = _empty_partials(runner, plan, out.shape[1], out.shape[2])
    states = dict(acc=partials.acc, m=partials.m, l=partials.l)
    runner.run(_stage_1(arrays, options, fault=fault, **states))
    runner.run(specs.reduce_splits(partials, out, lse, sinks))


def _stage_1(arrays: tuple[Any, ...], options: checks.Scores, **outputs: Any) -> specs.Launch:
    return specs.paged_split_k(
        *arrays,
        scale=options.scale,
        window=options.window,
        logits_soft_cap=options.logits_soft_cap,
        alibi_slopes=options.alibi_slopes,
        **outputs,
    )


def _empty_partials(runner: Any, plan: SplitPlan, num_q_heads: int, v_head_dim: int) -> Partials:
    rows = plan.capacity
    return Partials(
        runner.empty((rows, num_q_heads, v_head_dim), np.float32),
        runner.empty((rows, num_q_heads), np.float32),
        runner.empty((rows, num_q_heads), np.float32),
        plan,
    )


class _Uploader:
    """The ``xp`` that ``SplitPlan.to`` expects, for a backend's arrays."""

    def __init__(self, runner: Any) -> None:
        self.asarray = runner.asarray


# ---------------------------------------------------------------------- plans


def _split_rule(
    num_splits: Any, split_size: Any, batch: int, heads: HeadConfig, backend: str
) -> tuple[Literal["count", "size"], int]:
    """The rule in force when no plan is given, and its number."""
    if num_splits is not None and split_size is not None:
        raise ValueError(
            f"give num_splits or split_size, not both; got {num_splits} and {split_size}"
        )
    if num_splits is not None:
        return "count", checks.whole("num_splits", num_splits, 1)
    if split_size is not None:
        return "size", checks.whole("split_size", split_size, 1)
    num_sms = _runner("cuda").num_sms() if backend == "cuda" else policies.Device().num_sms
    blocks = batch * heads.num_kv_heads * -(-heads.group_size // specs.MAX_HEADS_PER_BLOCK)
    return "count", grid.first_wave_splits(blocks, num_sms)


def _host_plan(rule: tuple[str, int], seq_lens: Any) -> SplitPlan:
    kind, value = rule
    if kind == "size":
        return SplitPlan.from_split_size(seq_lens, value)
    return SplitPlan.from_num_splits(seq_lens, value)


def _plan_for(
    rule: tuple[Literal["count", "size"], int], seq_lens: Any, max_seq_len: int, runner: Any
) -> SplitPlan:
    """A plan for lengths that may live on the device, where reading them would mean waiting."""
    if checks.is_host(seq_lens):
        return _host_plan(rule, seq_lens)
    kind, value = rule
    name = "fixed" if kind == "count" else "split-size"
    return device_plans.write_plan(
        runner, seq_lens, policies.DeviceRule(kind, value), max(max_seq_len, 1), name
    )


# ---------------------------------------------------------------------- the stages by themselves


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
    chosen = _resolve(
        backend,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        alibi_slopes=alibi_slopes,
        acc=None if partials is None else partials.acc,
    )
    heads = checks.decode(q, k_cache, v_cache, block_table, seq_lens)
    options = checks.scores(heads, scale, window, logits_soft_cap, alibi_slopes)
    checks.plan(plan, q.shape[0], "cuda" if chosen == "cuda" else "host")
    if partials is not None:
        checks.workspace(partials, plan, heads)
    if chosen == "reference":
        if partials is not None:
            raise TypeError("the reference allocates its own float64 partials; leave partials out")
        return reference.paged_split_k(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            plan,
            scale=options.scale,
            window=options.window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=options.alibi_slopes,
        )
    runner = _runner(chosen)
    if chosen == "cuda" and not plan.on_device:
        plan = plan.to(_Uploader(runner))
    fault = runner.zeros((4,), np.int32) if _validating(validate) else None
    if partials is None:
        partials = _empty_partials(runner, plan, heads.num_q_heads, heads.value_dim)
    else:
        partials = Partials(partials.acc, partials.m, partials.l, plan)
    arrays = (q, k_cache, v_cache, block_table, seq_lens, plan)
    states = dict(acc=partials.acc, m=partials.m, l=partials.l)
    runner.run(_stage_1(arrays, options, fault=fault, **states))
    if fault is not None:
        _raise_on_fault(fault, block_table.shape[1], v_cache)
    return partials


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
        Written and returned.
    dtype : dtype
        Output type when ``out`` is not given; the reference always returns float64.

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim)
    lse : (batch, num_q_heads)
        Natural log, without the sink; -inf where the output is 0 for want of keys.
    """
    heads = checks.partials(partials)
    chosen = _resolve(backend, acc=partials.acc, m=partials.m, l=partials.l, sinks=sinks, out=out)
    if sinks is not None:
        checks.per_head("sinks", sinks, heads)
    plan = partials.plan
    shape = (plan.batch, heads.num_q_heads, heads.head_dim)
    if out is not None:
        checks.output("out", out, shape, specs.dtype_name(out))
    if chosen == "reference":
        exact, lse = reference.reduce_splits(partials, sinks=sinks)
        if out is None:
            return exact, lse
        out[...] = exact
        return out, lse
    runner = _runner(chosen)
    if chosen == "cuda" and not plan.on_device:
        partials = Partials(partials.acc, partials.m, partials.l, plan.to(_Uploader(runner)))
    if out is None:
        out = runner.empty(shape, dtype)
    lse = runner.empty(shape[:2], np.float32)
    runner.run(specs.reduce_splits(partials, out, lse, sinks))
    return out, lse


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
        Written and returned.

    Returns
    -------
    out : (tokens, num_q_heads, v_head_dim)
        In the inputs' dtype; float64 from the reference. 0 where both sides are empty.
    lse : (tokens, num_q_heads)
        -inf where both sides are empty.
    """
    chosen = _resolve(
        backend, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, sinks=sinks, out=out
    )
    heads = checks.states(out_a, lse_a, out_b, lse_b)
    if sinks is not None:
        checks.per_head("sinks", sinks, heads)
    if out is not None:
        checks.output("out", out, out_a.shape, specs.dtype_name(out_a))
    if chosen == "reference":
        exact, lse = reference.merge_states(out_a, lse_a, out_b, lse_b, sinks=sinks)
        if out is None:
            return exact, lse
        out[...] = exact
        return out, lse
    runner = _runner(chosen)
    if out is None:
        out = runner.empty(out_a.shape, out_a.dtype)
    lse = runner.empty(out_a.shape[:2], np.float32)
    runner.run(specs.merge_states(out, lse, out_a, lse_a, out_b, lse_b, sinks))
    return out, lse


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
        The cache's dtype.
    k_cache, v_cache : (num_blocks, block_size, num_kv_heads, dim)
    slot_mapping : (tokens,) int64
        ``block * block_size + offset``; a negative slot is padding and writes nothing.
    """
    chosen = _resolve(
        backend, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping
    )
    checks.write_kv(k, v, k_cache, v_cache, slot_mapping)
    if chosen == "reference":
        reference.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    if slot_mapping.shape[0] == 0:
        return
    runner = _runner(chosen)
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
        Query and output type.
    backend : {"auto", "cuda", "emulator"}

    Attributes
    ----------
    out, lse : arrays
        Written by every call.
    partials : Partials
    """

    def __init__(
        self, heads: HeadConfig, plan: SplitPlan, dtype: Any, backend: Backend = "auto"
    ) -> None:
        self.backend = _resolve(backend, plan=plan.split_begin)
        if self.backend == "reference":
            raise TypeError("DecodeStep runs kernels; use backend='emulator' for NumPy arrays")
        self._runner = _runner(self.backend)
        self.heads = heads
        self.plan = plan
        self.out = self._runner.empty((plan.batch, heads.num_q_heads, heads.value_dim), dtype)
        self.lse = self._runner.empty((plan.batch, heads.num_q_heads), np.float32)
        self.fault = self._runner.zeros((4,), np.int32)
        self.partials = _empty_partials(self._runner, plan, heads.num_q_heads, heads.value_dim)

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
    ) -> tuple[Any, Any]:
        """Launch both stages on the current stream; allocates nothing. Returns (out, lse)."""
        _resolve(
            self.backend,
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=block_table,
            seq_lens=seq_lens,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
        )
        heads = checks.decode(q, k_cache, v_cache, block_table, seq_lens)
        if heads != HeadConfig(
            self.heads.num_q_heads,
            self.heads.num_kv_heads,
            self.heads.head_dim,
            self.heads.value_dim,
        ):
            raise ValueError(f"this step was made for {self.heads}; the arrays have {heads}")
        checks.output(
            "q", q, (self.plan.batch, heads.num_q_heads, heads.head_dim), specs.dtype_name(self.out)
        )
        options = checks.scores(heads, scale, window, logits_soft_cap, alibi_slopes)
        if sinks is not None:
            checks.per_head("sinks", sinks, heads)
        self._geometry = (block_table.shape[1], v_cache)
        _run(
            self._runner,
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            self.plan,
            options,
            sinks,
            self.out,
            self.lse,
            self.fault,
            self.partials,
        )
        return self.out, self.lse

    def check(self) -> None:
        """Wait, and raise if any call since the last check met a bad id or length."""
        try:
            _raise_on_fault(self.fault, *self._geometry)
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
    """
    from cupy_decode.backends import cuda

    return cuda.kernel(name, spec)
