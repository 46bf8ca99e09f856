"""The launches of checked calls: all but the pointers is fixed, and only those are handed over.

``Readable`` runs the kernels of split plans, ``Fast`` the one that needs no plan. Of both,
``room`` allocates what the kernels need beside a call's own arrays, and ``launch`` runs.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np

from cupy_decode import backends, checks, device_plans, fast, policies, specs
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import Partials
from cupy_decode.specs import ArrayType

#: Pointers that every call gives, in order, by the names that the kernels have for them.
GIVEN = (
    *("null", "q", "k_cache", "v_cache", "block_table", "seq_lens", "alibi_slopes", "sinks"),
    *("k_scales", "v_scales", "out", "lse", "fault"),
)
_STATES = ("acc", "m", "l", "width")
#: Stage 1 writes what stage 2 reads.
_WRITTEN = {"acc_out": "acc", "m_out": "m", "l_out": "l", "width_out": "width"}


def _places(*names: str) -> dict[str, int]:
    places = {name: i for i, name in enumerate((*GIVEN, *names))}
    return places | {written: places[name] for written, name in _WRITTEN.items() if name in places}


class Checked(Protocol):
    """What launches need to know of a call."""

    backend: str
    device: int | None
    batch: int
    heads: HeadConfig
    types: Any
    out_type: ArrayType | None
    rule: tuple[Any, int]
    deterministic: bool
    overlap: bool

    @property
    def longest(self) -> int: ...

    @property
    def leaf_rows(self) -> int: ...

    def score_options(self, arrays: Any) -> dict[str, Any]: ...


def _outputs(call: Checked) -> dict[str, Any]:
    rows = (call.batch, call.heads.num_q_heads)

    def new(shape: tuple[int, ...], dtype: Any) -> ArrayType:
        return ArrayType.contiguous(shape, np.dtype(dtype), call.device)

    out = call.out_type or new((*rows, call.heads.value_dim), call.types.q.dtype)
    return dict(out=out, lse=new(rows, np.float32), fault=new((4,), np.int32))


class Readable:
    """The readable kernels under plans of one capacity.

    One launch where nothing is split; else stage 1 and stage 2, after planning where the lengths
    live on the device and no plan is given. Where bits must not depend on the plan, always two
    stages, and states of subtrees between them.

    Attributes
    ----------
    launches : list of Launch
        On types.
    room_types : tuple of ArrayType or None
        The partial states, and the plan where it is made on the device.
    own_room : () -> (owner, pointers)
        Allocates those.
    launch : (pointers) -> None
        Takes those of a call, of ``room`` and then of the plan, where one is given.
    """

    def __init__(self, call: Checked, plan: checks.PlanType | None) -> None:
        heads, types = call.heads, call.types

        def new(shape: tuple[int, ...], dtype: Any = np.float32) -> ArrayType:
            return ArrayType.contiguous(shape, np.dtype(dtype), call.device)

        outputs = _outputs(call)
        fault = outputs.pop("fault")
        self.launches: list[specs.Launch] = []
        plan_room: tuple[ArrayType | None, ...] = () if plan is not None else (None, None)
        whole = call.rule == ("count", 1) if plan is None else plan.unsplit
        tree = call.deterministic
        if plan is None and not (whole and (tree or types.sinks is None)):
            rule = policies.DeviceRule(*call.rule)
            longest = min(call.longest, device_plans.MAX_SEQ_LEN)
            plan = checks.PlanType(
                new((call.batch + 1,), np.int32),
                new((rule.max_rows(call.batch, longest),), np.int32),
                False,
            )
            plan_room = plan.split_offsets, plan.split_begin
            self.launches.append(
                specs.plan_splits(
                    plan,
                    types.seq_lens,
                    rule=rule.rule,
                    value=min(rule.value, device_plans.MAX_SEQ_LEN),
                    max_seq_len=longest,
                )
            )
        options = call.score_options(types)
        stage_1 = functools.partial(
            specs.paged_split_k, plan=plan, fault=fault, **types.problem, **options
        )
        states: tuple[ArrayType | None, ...] = (None, None, None, None)
        if whole and types.sinks is None and not tree:
            self.launches.append(stage_1(**outputs))
        else:
            width = new((call.batch, call.leaf_rows), np.int32) if tree else None
            rows = call.batch * call.leaf_rows if plan is None or tree else plan.split_begin.size
            m = new((rows, heads.num_q_heads))
            acc = new((*m.shape, heads.value_dim))
            states = acc, m, m, width
            self.launches.append(stage_1(acc=acc, m=m, l=m, width=width))
            partials = Partials(acc, m, m, plan, width)  # type: ignore[arg-type]
            stage_2 = specs.reduce_subtrees if tree else specs.reduce_splits
            self.launches.append(stage_2(partials, sinks=types.sinks, **outputs))
        self.room_types = (*states, *plan_room)
        self.own_room = backends.scratch(call.backend, self.room_types)
        places = _places(*_STATES, "split_offsets", "split_begin")
        self.launch = backends.bind(call.backend, self.launches, places)

    def room(self, queue: Any) -> tuple[Any, tuple[Any, ...]]:
        """Room for one call."""
        return self.own_room()


class Fast:
    """The fast kernel: one launch.

    Attributes
    ----------
    launches : list of Launch
        On types.
    spec : fast.FastSpec
    room_types : (ArrayType, ArrayType)
        The two arrays of the workspace.
    launch : (pointers) -> None
        Takes those of a call, then those of ``room``.
    """

    def __init__(self, call: Checked, machine: fast.Machine) -> None:
        types = call.types
        batch, max_blocks = types.block_table.shape
        block_size = types.k_cache.shape[1]
        options = fast_options(call)
        outputs = _outputs(call)
        scale = options.pop("scale")
        self.spec = fast.spec_of(
            types.q,
            types.k_cache,
            block_table=types.block_table,
            machine=machine,
            out=outputs["out"],
            **options,
        )
        space = fast.workspace_types(
            self.spec, machine, batch, max_blocks * block_size, call.device
        )
        self.room_types = space.partials, space.arrivals
        launch = fast.launch(
            **types.problem, **outputs, space=space, machine=machine, scale=scale, **options
        )
        self.launches = [launch]
        self.launch = backends.bind(call.backend, self.launches, _places("partials", "arrivals"))
        self._device = call.device
        self._bytes = [x.size * x.dtype.itemsize for x in self.room_types]
        if call.device is not None:
            self._workspace = backends.runner("cuda").workspace

    def room(self, queue: Any) -> tuple[Any, tuple[Any, ...]]:
        """The workspace of a queue of the CUDA backend; a new one in the emulator."""
        if self._device is None:
            return self.own_room()
        space = self._workspace(self._device, queue, *self._bytes)
        return space, space.pointers

    def own_room(self) -> tuple[Any, tuple[Any, ...]]:
        """A workspace of the caller's own: what owns it, and pointers."""
        if self._device is None:
            emulator = backends.runner("emulator")
            partials, arrivals = self.room_types
            return None, (
                emulator.empty(partials.shape, partials.dtype),
                emulator.zeros(arrivals.shape, arrivals.dtype),
            )
        space = backends.runner("cuda").Workspace(*self._bytes)
        return space, space.pointers


def fast_options(call: Checked) -> dict[str, Any]:
    """The options of a call as the fast kernel takes them; None where they are not set."""
    options = call.score_options(call.types)
    return {**options, "sinks": call.types.sinks, "overlap": call.overlap}
