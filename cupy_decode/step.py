"""A decode step prepared once and launched many times."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_decode import backends, calls, checks
from cupy_decode.calls import Backend
from cupy_decode.heads import HeadConfig
from cupy_decode.interop import takes_torch
from cupy_decode.plan import SplitPlan


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
        self.backend = calls.resolve(backend, self._device)
        if self.backend == "reference":
            raise TypeError("DecodeStep runs kernels; use backend='emulator' for NumPy arrays")
        runner = backends.runner(self.backend)  # type: ignore[arg-type]
        self.heads = heads
        self.plan = plan
        self.kv_dtype = kv_dtype
        rows = (plan.batch, heads.num_q_heads)
        with calls.on_device(runner, self._device):
            self.out = runner.empty(
                (*rows, heads.value_dim), dtype if out_dtype is None else out_dtype
            )
            self.lse = runner.empty(rows, np.float32)
            self.fault = runner.zeros((4,), np.int32)
            self.partials = calls.empty_partials(runner, plan, heads)
        self._dtype = np.dtype(dtype)
        self._runner = runner
        self._plan_type = kind
        self._out_type = checks.array_type("out", self.out)
        self._last: Any = None
        self._key: Any = None
        self._numbers: Any = None
        self._call: Any = None
        self._launches: Any = None
        self._made: dict[Any, calls.Launches] = {}

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
            calls.scale_type("k_scale", k_scale),
            calls.scale_type("v_scale", v_scale),
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
            call.check_contents(calls.Arrays(*pointers.values()))
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
        call = calls.call_of(
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
            with calls.on_device(self._runner, self._device):
                found = calls.Launches(call, self._plan_type)
            for written, read in calls.STATES.items():
                state = getattr(self.partials, read)
                found.fix({written: state, read: state})
            found.fix(dict(out=self.out, lse=self.lse, fault=self.fault))
            plan = self.plan
            found.fix(dict(split_offsets=plan.split_offsets, split_begin=plan.split_begin))
            if len(self._made) >= calls.MOST_KEPT:
                self._made.clear()
            self._made[key, numbers] = found
        self._key, self._numbers, self._call, self._launches = key, numbers, call, found

    def check(self) -> None:
        """Wait, and raise if any call since the last check met a bad id or length."""
        if self._last is None:
            return
        block_table, v_cache = self._last
        try:
            calls.raise_on_fault(self.fault, block_table.shape[1], v_cache)
        finally:
            self.fault[...] = 0
