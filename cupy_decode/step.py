"""A decode step prepared once and launched many times."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_decode import backends, calls, checks, fast
from cupy_decode.calls import Backend, Kernel
from cupy_decode.heads import HeadConfig, whole
from cupy_decode.interop import takes_torch
from cupy_decode.plan import SplitPlan


class DecodeStep:
    """A decode step that owns its workspace, for repeated and graph-captured use.

    With a plan the readable kernel follows it: launch geometry and buffers are fixed by its
    capacity, and its contents on the device decide which splits do work. Rewrite those with
    ``plan.assign`` between replays. Without one the step finds its splits itself on every replay,
    from the lengths of that time: with the fast kernel where that covers the call, else with the
    readable one and a first-wave plan made on the device.

    Parameters
    ----------
    heads : HeadConfig
    plan : SplitPlan or None
        A device plan for CuPy arrays (``plan.to(cupy, capacity=...)``), a host plan for NumPy.
    dtype : dtype
        Query type.
    backend : {"auto", "cuda", "emulator"}
        ``"auto"`` is the plan's, and the GPU without one.
    kv_dtype : {"e4m3", "e5m2"}, optional
        What the bytes of a uint8 cache are.
    out_dtype : dtype, optional
        float32 for an output of that type; the query's when left out.
    batch : int, optional
        Sequences, where there is no plan to say it.
    kernel : {"auto", "fast", "readable"}
        As in ``decode_attention``.
    deterministic : bool
        As in ``decode_attention``. Where the fast kernel covers the call, a plan is then ignored.

    Attributes
    ----------
    plan : SplitPlan or None
        The one it was made with; rewrite its contents.
    out, lse : arrays
        Written by every call; the same two for the step's life.
    """

    def __init__(
        self,
        heads: HeadConfig,
        plan: SplitPlan | None,
        dtype: Any,
        backend: Backend = "auto",
        *,
        kv_dtype: str | None = None,
        out_dtype: Any = None,
        batch: int | None = None,
        kernel: Kernel = "auto",
        deterministic: bool = False,
    ) -> None:
        kind = checks.plan_type(plan)
        if (plan is None) == (batch is None):
            raise TypeError(f"give plan or batch, one of them; got plan {plan} and batch {batch}")
        if plan is None or kind is None:
            self.batch = whole("batch", batch)
            self._device = None
            if backend != "emulator":
                self._device = backends.runner("cuda").current_device()
        else:
            self.batch = plan.batch
            self._device = kind.split_begin.device
            checks.plan(kind, plan.batch, self._device)
        self.backend = calls.resolve(backend, self._device)
        if self.backend == "reference":
            raise TypeError("DecodeStep runs kernels; use backend='emulator' for NumPy arrays")
        runner = backends.runner(self.backend)  # type: ignore[arg-type]
        self.heads = heads
        self.plan = plan
        self.kv_dtype = kv_dtype
        self.kernel = kernel
        self.deterministic = deterministic
        rows = (self.batch, heads.num_q_heads)
        with calls.on_device(runner, self._device):
            self.out = runner.empty(
                (*rows, heads.value_dim), dtype if out_dtype is None else out_dtype
            )
            self.lse = runner.empty(rows, np.float32)
            self.fault = runner.zeros((4,), np.int32)
        self._dtype = np.dtype(dtype)
        self._runner = runner
        self._plan_type = kind
        self._out_type = checks.array_type("out", self.out)
        self._last: Any = None
        self._key: Any = None
        self._numbers: Any = None
        self._call: Any = None
        self._launch: Any = None
        self._own: tuple[Any, ...] = ()
        self._made: dict[Any, tuple[calls.Call, Any, tuple[Any, ...]]] = {}
        self._rooms: dict[Any, tuple[Any, tuple[Any, ...]]] = {}  # what graphs and _made point to

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
        """Launch the step on the current stream. Returns (out, lse).

        The first call with arrays of certain types allocates and compiles; later ones do not.
        """
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
            checks.address(q) % fast.ALIGNMENT,
        )
        # Equal is not the same: True is no window of 1.
        numbers = (type(scale), type(window), type(logits_soft_cap), type(k_scale), type(v_scale))
        if key != self._key or numbers != self._numbers:
            self._use(key, numbers, q)
        call = self._call
        call.check_addresses(q, k_cache, v_cache, block_table, seq_lens)
        arrays = calls.Arrays(
            q, k_cache, v_cache, block_table, seq_lens, alibi_slopes, sinks, k_scale, v_scale
        )
        self._last = block_table, v_cache
        if self._device is None:
            call.check_contents(arrays)
            self._launch(call.pointers(arrays, self.out, self.lse, self.fault) + self._own)
        elif self._runner.is_current(self._device):
            self._launch(call.pointers(arrays, self.out, self.lse, self.fault) + self._own)
        else:
            with self._runner.on(self._device):
                self._launch(call.pointers(arrays, self.out, self.lse, self.fault) + self._own)
        return self.out, self.lse

    def _use(self, key: Any, numbers: Any, q: Any) -> None:
        """Take up calls of these types: check them, compile their launches and make room."""
        checks.step(key[0], self.batch, self.heads, self._dtype)
        call = calls.call_of(
            self.backend,
            self.kernel,
            *key[:7],
            self._out_type,
            *key[7:9],
            self._plan_type,
            None,
            None,
            *key[9:12],
            self.kv_dtype,
            self.deterministic,
        )
        heads = (self.heads.num_kv_heads, self.heads.value_dim)
        if heads != (call.heads.num_kv_heads, call.heads.value_dim):
            raise ValueError(f"this step was made for {self.heads}; the caches have {call.heads}")
        found = self._made.get((key, numbers))
        if found is None:
            with calls.on_device(self._runner, self._device):
                found = self._prepare(call, call.refusal_of(q, self.out))
            if len(self._made) >= calls.MOST_KEPT:
                self._made.clear()
            self._made[key, numbers] = found
        self._key, self._numbers = key, numbers
        self._call, self._launch, self._own = found

    def _prepare(
        self, call: calls.Call, refusal: str | None
    ) -> tuple[calls.Call, Any, tuple[Any, ...]]:
        launches = call.new_launches(self._plan_type, refusal)
        room = self._rooms.get(launches.room_types)
        if room is None:
            room = self._rooms[launches.room_types] = launches.own_room()
        _, own = room
        if self.plan is not None and refusal is not None:
            own += call.plan_pointers(self.plan)
        return call, launches.launch, own

    def check(self) -> None:
        """Wait, and raise if any call since the last check met a bad id or length."""
        if self._last is None:
            return
        block_table, v_cache = self._last
        try:
            calls.raise_on_fault(self.fault, block_table.shape[1], v_cache)
        finally:
            self.fault[...] = 0
