"""Split plans written on the GPU, from lengths that the host never reads.

The geometry of a launch, its buffers and the rule's numbers are known on the host; only the lengths
are not. So a captured graph can hold the planning with the rest of the step, and every replay plans
for the lengths it finds.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import numpy as np

from cupy_decode import backends, checks, policies, specs
from cupy_decode.heads import HeadConfig
from cupy_decode.interop import takes_torch
from cupy_decode.plan import SplitPlan

#: Longest ``max_seq_len``: key positions and split sizes are 32-bit.
MAX_SEQ_LEN = 2**30


@takes_torch
def plan_splits_on_device(
    seq_lens: Any,
    heads: HeadConfig | str,
    policy: str | policies.Policy = "auto",
    device: policies.Device | int | None = None,
    *,
    max_seq_len: int,
    out: SplitPlan | None = None,
    worker_offsets: Any = None,
    backend: Literal["auto", "cuda", "emulator"] = "auto",
    **step: Any,
) -> SplitPlan:
    """The split plan of one step, made where the lengths live; nothing waits and nothing is copied.

    The same ranges that ``plan_splits`` makes on the host, bit for bit.

    Parameters
    ----------
    seq_lens : (batch,) int32
        On the GPU (a CuPy array or a torch tensor), or a NumPy array with ``backend="emulator"``.
    heads : HeadConfig or str
        Heads of the layer, or the name of a preset.
    policy : str or callable
        A policy that has a device planner; ``"auto"`` is ``"first-wave"``.
    device : Device or int, optional
        A device or its number of SMs; the current GPU's when left out (132 in the emulator).
    max_seq_len : int
        Most keys that a sequence may come to have. It fixes the rows of the plan, and what a rule
        would take from the longest sequence (the cap of ``"fa3-dynamic"``). A longer sequence is
        planned as if it ended there, and its last split takes the rest.
    out : SplitPlan, optional
        A plan that an earlier call made for the same batch, rewritten in place and returned. With
        it the call allocates nothing.
    worker_offsets : (num_workers + 1,) int32, optional
        Written by ``"equal-shares"``: worker ``w`` owns the rows ``worker_offsets[w]`` to
        ``worker_offsets[w + 1]``.
    backend : {"auto", "cuda", "emulator"}
    **step
        Further fields of ``StepShape`` that the policy looks at: ``q_bytes``, ``kv_bytes``,
        ``page_size``, ``window``, ``cuda_graph``.

    Returns
    -------
    SplitPlan
        On the device. ``unsplit`` when the rule never splits such a batch, so that the step is one
        launch.

    Raises
    ------
    TypeError
        If ``seq_lens`` is not int32, or lives on the host and the emulator was not asked for.
    ValueError
        If the policy has no device planner, ``max_seq_len`` is out of range, or ``out`` is for
        another batch or has too few rows.

    Examples
    --------
    Captured once, replayed at any lengths up to 8,192::

        plan = cd.plan_splits_on_device(seq_lens, heads, "sglang-triton", max_seq_len=8192)
        step = cd.DecodeStep(heads, plan, q.dtype)
        with stream:
            stream.begin_capture()
            cd.plan_splits_on_device(seq_lens, heads, "sglang-triton", max_seq_len=8192, out=plan)
            step(q, k_cache, v_cache, block_table, seq_lens)
            graph = stream.end_capture()
    """
    given = dict(seq_lens=seq_lens, worker_offsets=worker_offsets)
    if out is not None:
        given |= {"out.split_offsets": out.split_offsets, "out.split_begin": out.split_begin}
    gpu = checks.one_device(**{name: checks.array_type(name, x) for name, x in given.items()})
    if backend == "auto" and gpu is None:
        raise TypeError(
            "seq_lens must live on the GPU; got a NumPy array: plan it with plan_splits, or give "
            "backend='emulator'"
        )
    if backend != "auto" and (backend == "cuda") != (gpu is not None):
        raise TypeError(
            f"backend={backend!r} needs {'CuPy' if backend == 'cuda' else 'NumPy'} arrays"
        )
    _check_lengths(seq_lens)
    out_type = checks.plan_type(out)
    if out_type is not None:
        checks.plan_arrays(out_type, gpu)
    checks.whole("max_seq_len", max_seq_len, 1)
    if max_seq_len > MAX_SEQ_LEN:
        raise ValueError(f"max_seq_len must be from 1 to {MAX_SEQ_LEN}; got {max_seq_len}")
    runner = backends.runner("emulator" if gpu is None else "cuda")
    if device is None and gpu is not None:
        device = runner.num_sms(gpu)
    if policy == "auto":
        policy = "first-wave"
    rule = policies.device_rule(seq_lens.shape[0], max_seq_len, heads, policy, device, **step)
    if worker_offsets is not None:
        _check_workers(rule, worker_offsets)
    name = getattr(policies.get(policy), "name", "custom")
    with nullcontext() if gpu is None else runner.on(gpu):
        return write_plan(runner, seq_lens, rule, max_seq_len, name, out, worker_offsets)


def _check_lengths(seq_lens: Any) -> None:
    if seq_lens.ndim != 1 or specs.dtype_name(seq_lens) != "int32" or seq_lens.shape[0] < 1:
        raise TypeError(
            "seq_lens must be a non-empty one-dimensional int32 array; got shape "
            f"{tuple(seq_lens.shape)}, dtype {specs.dtype_name(seq_lens)}"
        )
    _check_contiguous("seq_lens", seq_lens)


def _check_contiguous(name: str, array: Any) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be contiguous; got a stride of {array.strides[0]} bytes: copy it with "
            "ascontiguousarray"
        )


def _check_workers(rule: policies.DeviceRule, worker_offsets: Any) -> None:
    if rule.rule != "equal-shares":
        raise ValueError("worker_offsets go with policy 'equal-shares'; leave them out")
    shape, dtype = tuple(worker_offsets.shape), specs.dtype_name(worker_offsets)
    if shape != (rule.value + 1,) or dtype != "int32":
        raise ValueError(
            f"worker_offsets must be {rule.value + 1} int32, one more than there are workers; got "
            f"shape {shape}, dtype {dtype}"
        )
    _check_contiguous("worker_offsets", worker_offsets)


def write_plan(
    runner: Any,
    seq_lens: Any,
    rule: policies.DeviceRule,
    max_seq_len: int,
    policy: str,
    out: SplitPlan | None = None,
    worker_offsets: Any = None,
) -> SplitPlan:
    """Run a device rule with a backend's module, into new buffers or those of ``out``."""
    batch = seq_lens.shape[0]
    rows = rule.max_rows(batch, max_seq_len)
    unsplit = rows == batch
    if out is None:
        out = SplitPlan(
            runner.empty((batch + 1,), np.int32), runner.empty((rows,), np.int32), unsplit, policy
        )
    elif out.batch != batch:
        raise ValueError(f"out is a plan for a batch of {out.batch}; seq_lens has {batch} lengths")
    elif out.capacity < rows:
        raise ValueError(
            f"out holds {out.capacity} rows but {policy!r} may need {rows} for {batch} sequences "
            f"of up to {max_seq_len} keys; make it with the same policy and max_seq_len"
        )
    elif out.unsplit and not unsplit:
        raise ValueError(f"out was made unsplit, but {policy!r} may split; make another plan")
    runner.run(
        specs.plan_splits(
            out,
            seq_lens,
            rule=rule.rule,
            value=min(rule.value, MAX_SEQ_LEN),
            max_seq_len=max_seq_len,
            tile=min(rule.tile, MAX_SEQ_LEN),
            num_sms=rule.num_sms,
            num_kv_heads=rule.num_kv_heads,
            query_tiles=rule.query_tiles,
            worker_offsets=worker_offsets,
        )
    )
    return out
