"""A decode step prepared once and launched many times."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_decode import backends, calls, checks, fast
from cupy_decode.backends import BackendUnavailableError
from cupy_decode.calls import Backend, Kernel
from cupy_decode.heads import HeadConfig, whole
from cupy_decode.interop import takes_torch
from cupy_decode.plan import SplitPlan

#: What no argument is.
_NO_ARRAYS = (object(),) * 5
_NO_REFERENCE = "DecodeStep runs kernels; use backend='emulator' for NumPy arrays"


def _current_device() -> int:
    try:
        return int(backends.runner("cuda").current_device())
    except BackendUnavailableError as error:
        raise BackendUnavailableError(
            f"{error}; without a GPU, backend='emulator' runs a step on NumPy arrays"
        ) from None


class DecodeStep:
    """A decode step that owns its workspace, for repeated and graph-captured use.

    With a plan the readable kernel follows it: launch geometry and buffers are fixed by its
    capacity, and its contents on the device decide which splits do work. Rewrite those with
    ``plan.assign`` between replays. Without one the step finds its splits itself on every replay,
    from the lengths of that time: with the fast kernel where that covers the call, else with the
    readable one and a first-wave plan made on the device.

    All calls of a step use the same workspace and outputs, so no two may run at a time: neither on
    two streams, nor in two graphs, nor in one that was instantiated twice.

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
    overlap : bool
        As in ``decode_attention``, whose contract counts for every call and replay.

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
        overlap: bool = False,
    ) -> None:
        calls.check_backend(backend)
        calls.check_kernel(kernel)
        if backend == "reference":
            raise TypeError(_NO_REFERENCE)
        if not isinstance(heads, HeadConfig):
            raise TypeError(
                f"heads must be a HeadConfig, such as HeadConfig(32, 8, 128); got {heads!r}"
            )
        kind = checks.plan_type(plan)
        if (plan is None) == (batch is None):
            raise TypeError(f"give plan or batch, one of them; got plan {plan} and batch {batch}")
        if plan is None or kind is None:
            self.batch = whole("batch", batch)
            self._device = None if backend == "emulator" else _current_device()
        else:
            self.batch = plan.batch
            self._device = kind.split_begin.device
            checks.plan(kind, plan.batch, self._device)
        self.backend = calls.resolve(backend, self._device)
        if self.backend == "reference":  # a plan on the host
            raise TypeError(_NO_REFERENCE)
        try:
            checked_dtype = np.dtype(dtype)
        except TypeError:
            raise TypeError(
                f"dtype must be a NumPy dtype, such as 'float16'; got {dtype!r}"
            ) from None
        calls.check_overlap(overlap, self._device)
        if kernel == "fast" or overlap:
            refusal = calls.refusal_of_step(heads, checked_dtype, kv_dtype, self._device)
            if plan is not None and not deterministic:
                refusal = calls.split_rule_is_set("plan")
            if kernel == "readable":
                refusal = calls.READABLE
            if refusal is not None:
                say = calls.not_fast if kernel == "fast" else calls.not_overlapping
                raise ValueError(say(refusal))
        runner = backends.runner(self.backend)  # type: ignore[arg-type]
        self.heads = heads
        self.plan = plan
        self.kv_dtype = kv_dtype
        self.kernel = kernel
        self.deterministic = deterministic
        self.overlap = overlap
        rows = (self.batch, heads.num_q_heads)
        with calls.on_device(runner, self._device):
            self.out = runner.empty(
                (*rows, heads.value_dim), dtype if out_dtype is None else out_dtype
            )
            self.lse = runner.empty(rows, np.float32)
            self.fault = runner.zeros((4,), np.int32)
        self._dtype = checked_dtype
        self._runner = runner
        self._plan_type = kind
        self._last: tuple[Any, ...] = _NO_ARRAYS  # arrays of a call without options
        self._last_shapes: Any = None
        self._faults_of: Any = None
        self._key: Any = None
        self._call: Any = None
        self._launch: Any = None
        self._own: tuple[Any, ...] = ()
        self._made = calls.Kept()
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

        Arguments are those of ``decode_attention``; but while a graph is captured ``block_table``
        and ``seq_lens`` are int32 arrays, which its replays read again. The first call with arrays
        of certain types allocates and compiles; later ones do not.
        """
        options: Any = None
        if (
            alibi_slopes is sinks is k_scale is v_scale is None
            and scale is window is logits_soft_cap is None
        ):
            last = self._last
            if (
                q is last[0]
                and k_cache is last[1]
                and v_cache is last[2]
                and block_table is last[3]
                and seq_lens is last[4]
                # Of a CuPy array only the shape can be changed in place.
                and (q.shape, k_cache.shape, v_cache.shape, block_table.shape, seq_lens.shape)
                == self._last_shapes
                and self._runner.is_current(self._device)
            ):
                self._launch.again()
                return self.out, self.lse
        else:
            options = (alibi_slopes, sinks, k_scale, v_scale, scale, window, logits_soft_cap)
            options = self._options(*options)
        block_table = self._integers("block_table", block_table, q)
        seq_lens = self._integers("seq_lens", seq_lens, q)
        # The fast kernel reads q in words: which kernel runs is up to its address as well.
        try:
            start = checks.address(q) % fast.ALIGNMENT
        except AttributeError:  # no array, as the checks will say
            start = 0
        key = calls.gpu_key(q, k_cache, v_cache, block_table, seq_lens, options, start)
        arrays = (
            *(q, k_cache, v_cache, block_table, seq_lens),
            *(alibi_slopes, sinks, k_scale, v_scale),
        )
        if key is None or key != self._key:
            self._use(key, arrays, options)
        self._last = _NO_ARRAYS
        pointers = self._call.pointers(arrays) + self._own
        if self._device is None or self._runner.is_current(self._device):
            self._launch(pointers)
        else:
            with self._runner.on(self._device):
                self._launch(pointers)
        self._faults_of = block_table, v_cache
        if self._device is not None and options is None:
            self._last = arrays[:5]
            self._last_shapes = key[0:17:4]
        return self.out, self.lse

    def _integers(self, name: str, value: Any, q: Any) -> Any:
        """Lists and int64 as ``decode_attention`` takes them, but not for a graph to keep."""
        array = checks.integers(name, value, q)
        calls.check_not_converted(self.overlap, self._device, name, value, array)
        if array is not value and self._device is not None and self._runner.queue()[1]:
            raise TypeError(
                f"{name} must be int32 while a graph is captured, which would go on reading a copy "
                "that is gone by then; convert it once with .astype('int32')"
            )
        return array

    def _options(
        self,
        alibi_slopes: Any = None,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        *numbers: Any,
    ) -> tuple[Any, ...]:
        """The options of a call as ``call_of`` takes them."""
        split_rule = (None, None)
        return calls.option_types(
            alibi_slopes, sinks, self.out, k_scale, v_scale, self.plan,
            *split_rule, *(numbers or (None, None, None)), self.kv_dtype,
        )  # fmt: skip

    def _use(self, key: Any, arrays: tuple[Any, ...], options: Any) -> None:
        """Take up calls of these types: check them, compile their launches and make room."""
        found = self._made.get(key)
        if found is None:
            found = self._prepare(arrays, self._options() if options is None else options)
            self._made.put(key, found)
        self._key = key
        self._call, self._launch, self._own = found

    def _prepare(self, arrays: tuple[Any, ...], options: Any) -> Any:
        q, *others = calls.types_of(*arrays[:5])
        checks.step(q, self.batch, self.heads, self._dtype)
        call = calls.call_of(
            self.backend, self.kernel, q, *others, *options, self.deterministic, self.overlap
        )
        heads = (self.heads.num_kv_heads, self.heads.value_dim)
        if heads != (call.heads.num_kv_heads, call.heads.value_dim):
            raise ValueError(f"this step was made for {self.heads}; the caches have {call.heads}")
        call.check_addresses(arrays)
        if self._device is None:
            call.check_contents(calls.Arrays(*arrays))
        refusal = call.refusal_of(arrays[0], self.out)
        with calls.on_device(self._runner, self._device):
            launches = call.new_launches(self._plan_type, refusal)
            room = self._rooms.get(launches.room_types)
            if room is None:
                room = self._rooms[launches.room_types] = launches.own_room()
        point = self._runner.pointer
        own = (point(self.out), point(self.lse), point(self.fault), *room[1])
        if self.plan is not None and refusal is not None:
            own += call.plan_pointers(self.plan)
        return call, launches.launch, own

    def check(self) -> None:
        """Wait, and raise if any call since the last check met a bad id or length."""
        if self._faults_of is None:
            return
        block_table, v_cache = self._faults_of
        try:
            calls.raise_on_fault(self.fault, block_table.shape[1], v_cache)
        finally:
            self.fault[...] = 0
