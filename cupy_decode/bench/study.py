"""From the readable kernel to the fast one, a step at a time, each with its share of the limit.

``python -m cupy_decode.bench.study FILE`` writes the rows as JSON lines. The steps between the two
are ``study_mma`` with more and more of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from cupy_decode import decode, policies
from cupy_decode.bench.compare import Contestant, FastPath, check
from cupy_decode.bench.limits import floor, limits
from cupy_decode.bench.problems import Problem, problem, random_pool
from cupy_decode.bench.records import environment, file_argument, write_jsonl
from cupy_decode.bench.shapes import Shape, named
from cupy_decode.bench.timing import time_graph
from cupy_decode.plan import Partials, SplitPlan
from cupy_decode.specs import C_TYPES, Launch, arguments, dtype_name

DTYPES = ("float16", "bfloat16")
_HEAD_DIM, _PAGE, _WARPS = 128, 16, 4


@dataclass(frozen=True)
class Study:
    """A specialisation of ``study_mma``.

    Attributes
    ----------
    transposed : bool
        Keys, not queries, are the rows of the products.
    stages : int
        Pages that a warp has in shared memory; from 2 on they form a ring.
    merge : bool
        The last thread block of a sequence merges, and ``reduce_splits`` is not needed.
    """

    transposed: bool
    stages: int
    merge: bool

    def entry(self, dtype: str) -> str:
        """C++ name expression for elements of a type."""
        flags = f"{self.transposed}, {self.stages}, {self.merge}".lower()
        return f"study_mma<{C_TYPES[dtype]}, {flags}>"

    def launch(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_table: Any,
        seq_lens: Any,
        *,
        plan: SplitPlan,
        splits: int,
        partials: Partials,
        arrivals: Any,
        out: Any,
        lse: Any,
    ) -> Launch:
        """One launch on contiguous arrays.

        Parameters
        ----------
        plan : SplitPlan
            On the side of the arrays; its splits start at multiples of 16.
        splits : int
            The most splits of any sequence.
        partials : Partials
            Written.
        arrivals : (batch, num_kv_heads) uint32
            Zeros, before and after.
        out, lse : arrays
            Written where ``merge`` is set.
        """
        batch, num_q_heads, head_dim = q.shape
        _, block_size, num_kv_heads, _ = k_cache.shape
        if head_dim != _HEAD_DIM or block_size != _PAGE or num_q_heads > 8 * num_kv_heads:
            raise ValueError(
                f"study_mma takes head_dim {_HEAD_DIM}, block_size {_PAGE} and up to 8 query heads "
                f"per KV head; got {head_dim}, {block_size} and {num_q_heads // num_kv_heads}"
            )
        values = dict(
            out=out,
            lse=lse,
            acc=partials.acc,
            m=partials.m,
            l=partials.l,
            arrivals=arrivals,
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=block_table,
            seq_lens=seq_lens,
            split_offsets=plan.split_offsets,
            split_begin=plan.split_begin,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            max_blocks=block_table.shape[1],
            scale_log2=head_dim**-0.5 * math.log2(math.e),
        )
        return Launch(
            "study_mma",
            self.entry(dtype_name(q)),
            (splits, num_kv_heads, batch),
            (32 * _WARPS, 1, 1),
            _WARPS * self.stages * 2 * _PAGE * head_dim * 2,
            arguments("study_mma", values),
            True,
        )


@dataclass(frozen=True)
class Step:
    """One step of the way.

    Attributes
    ----------
    name : str
    launches : callable
        A contestant for ``compare``.
    replays : int
        Timed graph replays, fewer where one takes long.
    """

    name: str
    launches: Contestant
    replays: int = 30


def _plan(p: Problem, waves: int) -> tuple[SplitPlan, int]:
    """Splits that give every SM ``waves`` thread blocks, on the device, and the most of a row."""
    import cupy

    from cupy_decode.backends import cuda

    device = policies.Device(num_sms=waves * cuda.num_sms())
    plan = policies.plan_splits(p.seq_lens.get(), p.heads, "first-wave", device)
    return plan.to(cupy), int(plan.counts.max())


def readable(splits: bool, p: Problem) -> list[Callable[[], Any]]:
    """The readable kernels, unsplit or with the first-wave rule."""
    plan = _plan(p, 1)[0] if splits else None
    how: dict[str, Any] = dict(plan=plan) if splits else dict(num_splits=1)

    def one(copy: int) -> Callable[[], Any]:
        arguments = p.arguments(copy)
        return lambda: decode.decode_attention(**arguments, **how, kernel="readable")[0]

    return [one(copy) for copy in range(len(p.k_caches))]


def studied(study: Study, p: Problem) -> list[Callable[[], Any]]:
    """``study_mma``, and ``reduce_splits`` where it does not merge, two thread blocks an SM."""
    import cupy

    from cupy_decode.backends import cuda

    plan, splits = _plan(p, 2)
    batch, num_q_heads, head_dim = p.q.shape
    rows = int(plan.split_offsets[-1])
    partials = Partials(
        cupy.empty((rows, num_q_heads, head_dim), np.float32),
        cupy.empty((rows, num_q_heads), np.float32),
        cupy.empty((rows, num_q_heads), np.float32),
        plan,
    )
    arrivals = cupy.zeros((batch, p.heads.num_kv_heads), np.uint32)

    def one(copy: int) -> Callable[[], Any]:
        out, lse = cupy.empty_like(p.q), cupy.empty((batch, num_q_heads), np.float32)
        launch = study.launch(
            **p.arguments(copy),
            plan=plan,
            splits=splits,
            partials=partials,
            arrivals=arrivals,
            out=out,
            lse=lse,
        )

        def go() -> Any:
            cuda.run(launch)
            if not study.merge:
                decode.reduce_splits(partials, out=out)
            return out

        return go

    return [one(copy) for copy in range(len(p.k_caches))]


#: The steps in between, by name.
STUDIES = {
    "tensor cores": Study(transposed=False, stages=1, merge=False),
    "transposed": Study(transposed=True, stages=1, merge=False),
    "ring": Study(transposed=True, stages=2, merge=False),
    "one launch": Study(transposed=True, stages=2, merge=True),
}
STEPS = (
    Step("unsplit", partial(readable, False), 5),
    Step("split", partial(readable, True)),
    *(Step(name, partial(studied, study)) for name, study in STUDIES.items()),
    Step("device schedule", FastPath()),
)
#: The shapes that the steps are timed on.
_WANTED = {
    "llama-3-8b": ("1,2560", "1,32768", "8,2560", "64,8192", "64,ragged"),
    "llama-3-70b-tp8": ("1,131072",),
}


def shapes() -> list[Shape]:
    """The shapes that the steps are timed on, small to large."""
    return sorted(named(_WANTED), key=lambda s: s.kv_bytes)


def measure() -> list[dict[str, Any]]:
    """The environment with the limits, then a row per shape and step: its time over the floor.

    Raises
    ------
    RuntimeError
        If a step is wrong.
    """
    limit = limits()
    rows: list[dict[str, Any]] = [dict(step="environment", **environment(), **limit)]
    pool = random_pool(max(1 << 30, max(s.kv_bytes for s in shapes()) // 2 * 51 // 50))
    for shape in tqdm(shapes(), unit="shape"):
        p = problem(shape.heads, shape.lens, pool=pool)
        least, _ = floor(p)
        common = dict(model=shape.model, label=shape.label, kv_bytes=shape.kv_bytes)
        for step in STEPS:
            launches = step.launches(p)
            error = check(p, launches[0]())
            if not error < 1e-2:
                raise RuntimeError(f"{step.name} is wrong on {shape.label}: error {error:.3g}")
            us = time_graph(launches, step.replays).median_us
            bandwidth = shape.kv_bytes / us * 1e6
            rows.append(
                dict(
                    **common,
                    step=step.name,
                    us=us,
                    times_floor=us / least.median_us,
                    read_fraction=bandwidth / limit["read_bandwidth"],
                    error=error,
                )
            )
    return rows


def main() -> None:
    """Measure, print and write the rows."""
    path = file_argument(__doc__)
    rows = measure()
    for row in rows[1:]:
        print(
            "{model:16} {label:10} {step:16} {us:9.1f} us  x floor {times_floor:7.2f}  "
            "{read_fraction:6.1%} of the read limit".format(**row)
        )
    write_jsonl(path, rows)


if __name__ == "__main__":
    main()
