"""Published split policies behind one signature.

A policy is a pure function of a step shape and a device: ``policy(step, device) -> (plan,
account)``. The plan is what this package's kernels execute; the account is what the engine that
published the rule would have launched. ``explain`` runs one, ``plan_splits`` returns its plan.

>>> plan, account = explain([2560], "llama-3-8b", "vllm-triton", 132)
>>> plan.counts.tolist(), account.grid
([16], (1, 8, 16))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cupy_decode.heads import HeadConfig, presets
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, DeviceRule, Policy, StepShape
from cupy_decode.policies.fa2 import Fa2
from cupy_decode.policies.fa3 import Fa3, Fa3Dynamic
from cupy_decode.policies.fa4 import Fa4
from cupy_decode.policies.first_wave import FirstWave
from cupy_decode.policies.fixed import EqualShares, FixedCount, FixedSize, equal_shares
from cupy_decode.policies.flashinfer import FlashInferCudaCore, FlashInferTensorCore
from cupy_decode.policies.flashinfer_batch import FlashInferBatchAttention
from cupy_decode.policies.flashmla import FlashMla
from cupy_decode.policies.paged_attention import PagedAttention
from cupy_decode.policies.rocm import Rocm
from cupy_decode.policies.sglang import SglangDeterministic, SglangTriton
from cupy_decode.policies.vllm_mla import VllmMla
from cupy_decode.policies.vllm_triton import VllmTriton
from cupy_decode.policies.xqa import Xqa

__all__ = [
    "Account",
    "Device",
    "DeviceRule",
    "Policy",
    "StepShape",
    "device_rule",
    "equal_shares",
    "explain",
    "fixed",
    "get",
    "names",
    "plan_splits",
    "split_size",
]

#: Registered name -> what makes the policy, given its options.
_FACTORIES: dict[str, Callable[..., Policy]] = {
    "fixed": FixedCount,
    "split-size": FixedSize,
    "first-wave": FirstWave,
    "equal-shares": EqualShares,
    "vllm-triton": VllmTriton,
    "vllm-triton-0.33": partial(VllmTriton, version="0.33"),
    "vllm-mla": VllmMla,
    "sglang-triton": SglangTriton,
    "sglang-deterministic": SglangDeterministic,
    "flashinfer-cuda-core": FlashInferCudaCore,
    "flashinfer-tensor-core": FlashInferTensorCore,
    "flashinfer-batch-attention": FlashInferBatchAttention,
    "fa2": Fa2,
    "fa3": Fa3,
    "fa3-dynamic": Fa3Dynamic,
    "fa4": Fa4,
    "flashmla": FlashMla,
    "xqa": Xqa,
    "xqa-sm90": partial(Xqa, sm90=True),
    "paged-attention": PagedAttention,
    "rocm": Rocm,
}


def names() -> tuple[str, ...]:
    """Registered policies; ``"fixed"`` and ``"split-size"`` need their parameter."""
    return tuple(_FACTORIES)


def get(policy: str | Policy, **options: Any) -> Policy:
    """A policy by name, with its options; any other callable is returned as it is.

    Raises
    ------
    ValueError
        If the name is unknown, or an option is unknown or missing.
    TypeError
        If ``policy`` is neither a name nor callable, or options come with a callable.

    Examples
    --------
    >>> get("fixed", num_splits=4)
    FixedCount(num_splits=4, tile=16)
    """
    if not isinstance(policy, str):
        if not callable(policy):
            raise TypeError(f"policy must be a registered name or callable; got {policy!r}")
        if options:
            raise TypeError(
                f"options {sorted(options)} go with a policy's name, not with an object"
            )
        return policy
    if policy not in _FACTORIES:
        raise ValueError(f"policy {policy!r} is not registered; choose one of {', '.join(names())}")
    factory = _FACTORIES[policy]
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ValueError(
            f"policy {policy!r} does not go with options {options}: {error}; "
            f"its signature is {inspect.signature(factory)}"
        ) from None
    return factory(**options)


def fixed(num_splits: int) -> Policy:
    """The policy of at most ``num_splits`` splits of whole 16-key tiles."""
    return FixedCount(num_splits)


def split_size(keys: int) -> Policy:
    """The policy of splits of exactly ``keys`` keys."""
    return FixedSize(keys)


def device_rule(
    batch: int,
    max_seq_len: int,
    heads: HeadConfig | str,
    policy: str | Policy,
    device: Device | int | None = 132,
    **step: Any,
) -> DeviceRule:
    """What ``plan_splits.cu`` must know to plan by a policy, lengths left open.

    Parameters
    ----------
    batch, max_seq_len : int
        Sequences, and the most keys that one of them may come to have.
    heads, policy, device, **step
        As in ``explain``, without ``query_lens``: the steps are pure decode.

    Raises
    ------
    ValueError
        If the policy has no device planner.

    Examples
    --------
    >>> device_rule(4, 8192, "llama-3-8b", "vllm-triton")
    DeviceRule(rule='count', value=16, tile=16, num_sms=1, num_kv_heads=1, query_tiles=1)
    """
    chosen = get(policy)
    if not hasattr(chosen, "device_rule"):
        planned = [name for name, factory in _FACTORIES.items() if _plans_on_device(factory)]
        raise ValueError(
            f"policy {policy!r} plans on the host only, from lengths that it can read; "
            f"device planners: {', '.join(planned)}"
        )
    if "query_lens" in step:
        raise ValueError("query_lens cannot be planned on the device; use plan_splits on the host")
    _refuse_unknown(step)
    shape = StepShape(np.full(batch, max_seq_len), _heads(heads), **step)
    rule: DeviceRule = chosen.device_rule(shape, Device.of(device))
    return rule


def _plans_on_device(factory: Callable[..., Policy]) -> bool:
    return hasattr(factory.func if isinstance(factory, partial) else factory, "device_rule")


def _heads(heads: HeadConfig | str) -> HeadConfig:
    if isinstance(heads, HeadConfig):
        return heads
    if not isinstance(heads, str):
        raise TypeError(
            f"heads must be a HeadConfig, such as HeadConfig(32, 8, 128), or the name of a preset; "
            f"got {heads!r}"
        )
    if heads not in presets:
        raise ValueError(f"heads {heads!r} is not a preset; choose one of {', '.join(presets)}")
    return presets[heads]


def _refuse_unknown(step: Mapping[str, Any], *more: str) -> None:
    """Refuse an option that is neither a field of ``StepShape`` nor one of ``more``."""
    known = [*more, *list(inspect.signature(StepShape).parameters)[2:]]  # seq_lens, heads go first
    for name in step:
        if name not in known:
            raise TypeError(
                f"there is no option {name!r}; the options are {', '.join(known)}, and those of a "
                "policy go to policies.get"
            )


def explain(
    seq_lens: Any,
    heads: HeadConfig | str,
    policy: str | Policy,
    device: Device | int | None = 132,
    **step: Any,
) -> tuple[SplitPlan, Account]:
    """What a policy does with one step, and why.

    Parameters
    ----------
    seq_lens : (batch,) integers
        Keys of each sequence.
    heads : HeadConfig or str
        Heads of the layer, or the name of a preset.
    policy : str or callable
    device : Device or int
        A device, or its number of SMs.
    **step
        Further fields of ``StepShape``: ``query_lens``, ``q_bytes``, ``kv_bytes``, ``page_size``,
        ``window``, ``cuda_graph``.

    Returns
    -------
    plan : SplitPlan
        Carries the account as ``plan.account``.
    account : Account

    Raises
    ------
    TypeError
        If an option is no field of ``StepShape``, or ``device`` is no device.
    ValueError
        If the policy or preset is unknown, or the step is malformed.
    """
    _refuse_unknown(step)
    shape = StepShape(seq_lens, _heads(heads), **step)
    plan, account = get(policy)(shape, Device.of(device))
    return replace(plan, account=account), account


def plan_splits(
    seq_lens: Any,
    heads: HeadConfig | str,
    policy: str | Policy = "auto",
    device: Device | int | None = 132,
    *,
    num_splits: int | None = None,
    split_size: int | None = None,
    capacity: int | None = None,
    **step: Any,
) -> SplitPlan:
    """The split plan of one step.

    Parameters
    ----------
    seq_lens, heads, device, **step
        As in ``explain``.
    policy : str or callable
        ``"auto"`` is ``"first-wave"``.
    num_splits, split_size : int, optional
        Instead of a policy: that many splits at most, or splits of that many keys.
    capacity : int, optional
        Rows to allocate, so that the plan's buffers can be rewritten for other lengths.

    Raises
    ------
    TypeError
        As in ``explain``.
    ValueError
        If more than one of ``policy``, ``num_splits`` and ``split_size`` is given, or the plan
        needs more rows than ``capacity``.

    Examples
    --------
    >>> plan_splits([2560, 17], "llama-3-8b", num_splits=16).counts.tolist()
    [16, 2]
    """
    _refuse_unknown(step, "num_splits", "split_size", "capacity")
    given = [
        f"{name}={value!r}"
        for name, value in (("num_splits", num_splits), ("split_size", split_size))
        if value is not None
    ]
    if policy != "auto":
        given.insert(0, f"policy={policy!r}")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other; give one of them")
    if num_splits is not None:
        policy = FixedCount(num_splits)
    elif split_size is not None:
        policy = FixedSize(split_size)
    elif policy == "auto":
        policy = "first-wave"
    plan, _ = explain(seq_lens, heads, policy, device, **step)
    return plan if capacity is None else plan.to(np, capacity=capacity)
