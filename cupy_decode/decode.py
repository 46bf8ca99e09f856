"""The operators people call, over three backends that accept and refuse the same arguments.

``backend="auto"`` follows the arrays: CuPy arrays run the CUDA kernels, NumPy arrays the NumPy
reference. ``"emulator"`` runs the CUDA sources on the CPU, on NumPy arrays. There is no silent
fallback: a backend that cannot take the arrays is a TypeError.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cupy_decode import backends, calls, checks, grid, reference, specs
from cupy_decode.calls import Backend, Kernel
from cupy_decode.heads import INT32_MAX, HeadConfig, whole
from cupy_decode.interop import takes_torch
from cupy_decode.plan import Origin, Partials, SplitPlan


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
    kernel: Kernel = "auto",
    explain: bool = False,
    deterministic: bool = False,
    overlap: bool = False,
) -> Any:
    """Attention of one query token per sequence over its paged KV cache.

    A call that gives no split rule goes to the fast kernel where that covers it: one launch that
    works out its own splits. Every other call goes to the readable kernels.

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
        Which keys each thread block of the readable kernel reads. Without it ``num_splits`` or
        ``split_size`` decides, and without those the first-wave count does.
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
    kernel : {"auto", "fast", "readable"}
        Which kernel runs. ``"fast"`` is a ValueError, with the reason, where it does not cover the
        call; the reference, which has one algorithm, refuses the same calls.
    explain : bool
        Return an ``Explanation`` as well: which kernel, on what grid, and why that one.
    deterministic : bool
        Give a sequence the same bits whatever the plan, the rest of the batch, its place in it, the
        page order, the block size, the caches' strides, the grid and the stream: maxima are rounded
        up so that rescales are powers of two, and sums follow one tree over fixed leaves of keys
        (``cupy_decode.tree``). The fast kernel always does so, and takes every call that its heads,
        dtypes and options allow, split rules or not; in the readable ones split borders move up to
        the next leaf. A call that only its layout keeps from the fast kernel is a ValueError. The
        bits still depend on the kernel, the GPU's architecture, the dtypes, the heads, the length,
        the options and the versions of this package and the compiler. Joined shards of
        ``paged_split_k`` have those of ``kernel="readable"``.
    overlap : bool
        Start while the launch before on the stream is still at work, and read keys and values
        meanwhile (programmatic dependent launch). Of what this call reads, that launch may write q
        and, in the caches, each sequence's newest keys: those from ``(seq_len - 1) // 16 * 16`` on,
        where decoding puts the new token. Everything else must be complete when that launch begins:
        ``seq_lens``, ``block_table``, older keys, scales, slopes and sinks; and if that launch
        overlaps with others itself, when the first of those begins. **Nothing checks this: a call
        that breaks it has wrong results, now and then.** No bit of the result changes where it is
        kept, and the launch behind may again be such a call. A ValueError where the fast kernel
        does not take the call and on a GPU before compute capability 9.0. Backends without a GPU
        take the same calls and have nothing to overlap.

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim)
        In q's dtype. An empty batch gives an empty array, and nothing is launched.
    lse : (batch, num_q_heads) float32
        Natural log-sum-exp of the visible scores.
    explanation : Explanation
        Where it is asked for.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched or written, naming the argument, the rule and a fix.

    Notes
    -----
    Torch tensors are taken as they are, on torch's current stream, and give tensors back.

    While a CUDA graph is captured, what the call allocates, its results too, is kept for the life
    of the process: nothing tells when the graph is gone. A ``DecodeStep`` owns what its graphs use.
    Either way the launches of a graph share that memory: what is instantiated twice from it must
    not run twice at a time.
    """
    options: Any = None
    if not (
        alibi_slopes is sinks is out is k_scale is v_scale is plan is kv_dtype is None
        and num_splits is split_size is scale is window is logits_soft_cap is None
    ):
        options = calls.option_types(
            alibi_slopes,
            sinks,
            out,
            k_scale,
            v_scale,
            plan,
            num_splits,
            split_size,
            scale,
            window,
            logits_soft_cap,
            kv_dtype,
        )
    chosen = (backend, kernel, deterministic, type(deterministic), overlap, type(overlap))
    key = calls.gpu_key(q, k_cache, v_cache, block_table, seq_lens, options, *chosen)
    call = calls.checked.get(key)
    if call is None:
        before = block_table, seq_lens
        block_table = checks.integers("block_table", block_table, q)
        seq_lens = checks.integers("seq_lens", seq_lens, q)
        types = calls.types_of(q, k_cache, v_cache, block_table, seq_lens)
        options = options or calls.NO_OPTIONS
        call = calls.call_of(backend, kernel, *types, *options, deterministic, overlap)
        calls.check_not_converted(overlap, call.device, "block_table", before[0], block_table)
        calls.check_not_converted(overlap, call.device, "seq_lens", before[1], seq_lens)
        if block_table is before[0] and seq_lens is before[1]:
            calls.checked.put(key, call)
    given = (q, k_cache, v_cache, block_table, seq_lens, alibi_slopes, sinks, k_scale, v_scale)
    validating = calls.validating(validate)
    if out is not None:
        call.check_output(out, given)
    results = None if validating else call.run_again(given, out)
    if results is None:
        arrays = calls.Arrays(*given)
        if call.device is None or validating:
            call.check_contents(arrays)
        results = call.run(arrays, plan, out, validating)
    if explain:
        explanation = call.explain(calls.Arrays(*given), plan, out)
        return (*results, explanation) if return_lse else (results[0], explanation)
    return results if return_lse else results[0]


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
    deterministic: bool = False,
    shard: tuple[int, int] | None = None,
) -> Partials:
    """Stage 1: the softmax state of every split of ``plan``.

    Other parameters are those of ``decode_attention``.

    Parameters
    ----------
    partials : Partials, optional
        A workspace to write into, of at least ``plan.capacity`` rows.
    deterministic : bool
        Leave the states of subtrees of fixed leaves instead of splits: the maximal aligned ones of
        each split, whose borders move up to the next leaf.
    shard : (int, int), optional
        With ``deterministic``: read keys ``shard[0] .. shard[1]`` of every sequence only, such as
        one of several GPUs holds. Lengths and the table's columns still count from the sequence's
        first key; entries for other keys are not looked at. Both numbers must be multiples of the
        leaves that they reach (``grid.leaf_keys``): powers of two from 64 on, so large ones do.
        The results of all shards go together with ``Partials.join``, and have the bits of
        ``decode_attention`` with ``kernel="readable"``: the fast kernel has other leaves. In the
        reference joined shards agree with each other, and with its ``decode_attention`` to
        rounding.

    Returns
    -------
    Partials
        acc (rows, num_q_heads, v_head_dim), m and l (rows, num_q_heads); float32, and float64 from
        the reference. Rows past the plan's last are unwritten. With ``deterministic`` also
        ``width``, and rows by leaf, and ``origin``.
    """
    if plan is None:
        raise TypeError("plan must be a SplitPlan; got None: make one with cupy_decode.plan_splits")
    block_table = checks.integers("block_table", block_table, q)
    seq_lens = checks.integers("seq_lens", seq_lens, q)
    arrays = calls.Arrays(
        q, k_cache, v_cache, block_table, seq_lens, alibi_slopes, None, k_scale, v_scale
    )
    kinds = calls.types_of(*arrays[:5])
    slopes = checks.array_type("alibi_slopes", alibi_slopes)
    scales = [calls.scale_type("k_scale", k_scale), calls.scale_type("v_scale", v_scale)]
    plan_kind = checks.plan_type(plan)
    rule = (None, None)
    call = calls.call_of(
        backend,
        "readable",
        *kinds,
        slopes,
        None,
        None,
        *scales,
        plan_kind,
        *rule,
        scale,
        window,
        logits_soft_cap,
        kv_dtype,
        deterministic,
    )
    if not call.batch:
        raise ValueError("q must hold at least one sequence; got batch 0, which no plan can be for")
    validating = calls.validating(validate)
    call.check_addresses(arrays)
    keys = _shard(shard, deterministic)
    if call.device is None or validating:
        call.check_contents(arrays, keys)
    heads = call.heads
    if call.device is None and shard is not None:
        _check_cuts(keys, seq_lens, heads)
    leaf_rows = call.leaf_rows if deterministic else None
    if partials is not None:
        checks.workspace(partials, plan, heads, leaf_rows)
        calls.resolve_arrays(call.backend, q=q, acc=partials.acc, m=partials.m, l=partials.l)
    if call.backend == "reference":
        if partials is not None:
            raise TypeError("the reference allocates its own float64 partials; leave partials out")
        scores = call.score_options(arrays)
        if leaf_rows is None:
            return reference.paged_split_k(plan=plan, **arrays.problem, **scores)
        leaves = [grid.leaf_keys(int(s), heads) for s in seq_lens]
        cut: dict[str, Any] = dict(leaf_keys=leaves, leaf_rows=leaf_rows, shard=keys)
        leaves_of = reference.paged_split_k_leaves(plan=plan, **arrays.problem, **cut, **scores)
        return replace(leaves_of, origin=_origin(call, seq_lens))
    runner = backends.runner(call.backend)  # type: ignore[arg-type]
    with calls.on_device(runner, call.device):
        fault = runner.zeros((4,), np.int32) if validating else None
        placed = call.placed(plan, seq_lens, call.refusal)
        assert placed is not None
        if partials is None:
            partials = calls.empty_partials(runner, placed, heads, leaf_rows)
        elif deterministic:
            partials.width.fill(0)
        partials = replace(partials, plan=placed)
        if not deterministic:
            partials = replace(partials, width=None, origin=None)
        outputs: dict[str, Any] = dict(acc=partials.acc, m=partials.m, l=partials.l, fault=fault)
        if deterministic:
            outputs.update(width=partials.width, shard=keys)
            partials = replace(partials, origin=_origin(call, seq_lens))
        scores = call.score_options(arrays)
        runner.run(specs.paged_split_k(plan=placed, **arrays.problem, **scores, **outputs))
        if fault is not None:
            calls.raise_on_fault(fault, block_table.shape[1], v_cache)
    return partials


def _origin(call: calls.Call, seq_lens: Any) -> Origin:
    """What other shards of this call's sequences must have in common with it."""
    o = call.options
    numbers = {
        name: value if isinstance(value, float) else value is not None
        for name, value in (("k_scale", o.k_scale), ("v_scale", o.v_scale))
    }
    return Origin(
        seq_lens.copy() if checks.is_host(seq_lens) else seq_lens,
        call.heads,
        dict(
            scale=o.scale,
            window=o.window,
            logits_soft_cap=o.logits_soft_cap,
            kv_dtype=o.kv_dtype,
            alibi_slopes=o.alibi_slopes is not None,
            **numbers,
        ),
    )


def _shard(shard: tuple[int, int] | None, deterministic: bool) -> tuple[int, int]:
    """Keys to read, all where none are named."""
    if shard is None:
        return 0, INT32_MAX
    if not deterministic:
        raise ValueError(
            "shard goes with deterministic=True: only then do states know their place in the whole "
            f"sequence; got shard {shard}"
        )
    try:
        first, after = shard
    except (TypeError, ValueError):
        raise TypeError(
            f"shard must be two integers, its first key and its end; got {shard!r}"
        ) from None
    begin, end = whole("shard[0]", first, 0), whole("shard[1]", after, 0)
    if begin >= end:
        raise ValueError(
            f"shard must be a range of keys; got {begin} to {end}: a shard without keys is left out"
        )
    return begin, end


def _check_cuts(shard: tuple[int, int], seq_lens: Any, heads: HeadConfig) -> None:
    """Shards end where leaves end, else two of them hold parts of one leaf."""
    for b, seq_len in enumerate(seq_lens.tolist()):
        leaf = grid.leaf_keys(seq_len, heads)
        for key in shard:
            if key < seq_len and key % leaf:
                raise ValueError(
                    f"shard must begin and end at multiples of {leaf} keys, the leaves of the "
                    f"{seq_len} keys of sequence {b}; got {shard}: use {key // leaf * leaf} or "
                    f"{(key // leaf + 1) * leaf}"
                )


def _check_cover(partials: Partials, origin: Origin) -> None:
    """All visible leaves are there: a forgotten shard would leave a plausible result."""
    width = np.asarray(partials.width if checks.is_host(partials.width) else partials.width.get())
    window, planned = origin.options["window"], partials.plan.to_host().has_rows
    for b, seq_len in enumerate(origin.lens().tolist()):
        # Lengths below 0 are a device's, and have become NaN; without a row nothing is promised.
        if seq_len < 1 or not planned[b]:
            continue
        leaf = grid.leaf_keys(seq_len, origin.heads)
        first = 0 if window is None else max(seq_len - window, 0) // leaf
        held = np.zeros(width.shape[1], bool)
        for i in np.flatnonzero(width[b] > 0):
            held[i : i + int(width[b, i])] = True
        missing = first + np.flatnonzero(~held[first : grid.cdiv(seq_len, leaf)])
        if missing.size:
            low, run = int(missing[0]), np.flatnonzero(np.diff(missing) > 1)
            high = int(missing[run[0]] if run.size else missing[-1])
            raise ValueError(
                f"partials must hold every leaf of a sequence; leaves {low}..{high} of sequence "
                f"{b}, its keys {low * leaf} to {min((high + 1) * leaf, seq_len)}, are missing: "
                "join the shard that holds them"
            )


@takes_torch
def reduce_splits(
    partials: Partials,
    *,
    sinks: Any = None,
    out: Any = None,
    dtype: Any = np.float32,
    backend: Backend = "auto",
    validate: bool | None = None,
) -> tuple[Any, Any]:
    """Stage 2: merge all splits of each sequence and divide once.

    Parameters
    ----------
    partials : Partials
        Where they hold subtrees (``deterministic``), these are added along the tree.
    sinks : (num_q_heads,) float32, optional
    out : (batch, num_q_heads, v_head_dim), optional
        Written and returned; float32, float16 or bfloat16, any strides.
    dtype : dtype
        Output type when ``out`` is not given; the reference always returns float64.
    backend : {"auto", "cuda", "emulator", "reference"}
    validate : bool, optional
        On a GPU: wait, and look for missing leaves there as well. Default as in
        ``decode_attention``.

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim)
    lse : (batch, num_q_heads)
        Natural log, without the sink; -inf where the output is 0 for want of keys.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched; also where shards have been joined and one that holds visible
        leaves is missing.
    """
    if not isinstance(partials, Partials):
        raise TypeError(f"partials must be a Partials; got {type(partials).__name__}")
    chosen, device = calls.resolve_arrays(
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
    if partials.origin is not None and (device is None or calls.validating(validate)):
        _check_cover(partials, partials.origin)
    if chosen == "reference":
        exact, lse = reference.reduce_splits(partials, sinks=sinks)
        if out is None:
            return exact, lse
        out[...] = exact
        return out, lse
    runner = backends.runner(chosen)  # type: ignore[arg-type]
    with calls.on_device(runner, device):
        if device is not None and not plan.on_device:
            partials = replace(partials, plan=plan.to(runner))
        if out is None:
            out = runner.empty(shape, dtype)
        lse = runner.empty(shape[:2], np.float32)
        stage_2 = specs.reduce_splits if partials.width is None else specs.reduce_subtrees
        runner.run(stage_2(partials, out, lse, sinks))
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
    chosen, device = calls.resolve_arrays(
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
    with calls.on_device(runner, device):
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
    chosen, device = calls.resolve_arrays(
        backend, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping
    )
    checks.write_kv(k, v, k_cache, v_cache, slot_mapping)
    if chosen == "reference":
        reference.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    if slot_mapping.shape[0] == 0:
        return
    runner = backends.runner(chosen)  # type: ignore[arg-type]
    with calls.on_device(runner, device):
        fault = runner.zeros((4,), np.int32) if calls.validating(validate) else None
        runner.run(specs.write_kv(k, v, k_cache, v_cache, slot_mapping, fault))
        if fault is not None:
            calls.raise_on_fault(fault, 0, v_cache)


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
