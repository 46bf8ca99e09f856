"""What adding up the splits takes: inside the fast kernel, and as a launch of its own.

``python -m cupy_decode.bench.reduce FILE`` measures on the current GPU and writes the rows. Inside,
it is the difference to the same kernel whose splits write their states and stop, whose results are
wrong. On its own it is ``reduce_splits`` on as many splits, whose states are in the L2 cache, as
they are right after another kernel wrote them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tqdm import tqdm

import kernels_cu
from cupy_decode import decode, fast
from cupy_decode.bench.compare import FastPath, check, replace_once
from cupy_decode.bench.problems import Problem, problem
from cupy_decode.bench.records import environment, file_argument, write_jsonl
from cupy_decode.bench.shapes import named
from cupy_decode.bench.timing import time_graph
from cupy_decode.plan import Partials, SplitPlan

_WANTED = {
    "llama-3-8b": ("1,2560", "1,32768", "8,2560", "64,ragged"),
    "llama-3-70b-tp8": ("1,131072",),
}


def unmerged(source: str) -> str:
    """The fast kernel's text whose units add nothing up: the first of a sequence is its result.

    The condition is one that the compiler cannot know, so that all else is compiled as it was.

    Parameters
    ----------
    source : str
        ``kernels_cu.source("paged_split_k_mma")``.

    Raises
    ------
    ValueError
        If the text does not count the units to be added up in one place.
    """
    old = "int count = unit.count, index = unit.index, step = 1;"
    new = (
        "if (fixed_unit >= 0 && unit.index > 0) continue;\n"
        "int count = fixed_unit >= 0 ? 1 : unit.count, index = unit.index, step = 1;"
    )
    return replace_once(source, old, new)


def splits(p: Problem, machine: fast.Machine) -> tuple[int, ...]:
    """Units of each sequence of a problem, as the fast kernel cuts it."""
    spec = fast.spec_of(p.q, p.k_caches[0], block_table=p.block_table, machine=machine)
    batch, columns = p.block_table.shape
    blocks = fast.grid(spec, machine, batch, fast.PAGE * columns)
    capacity = fast.workspace_types(spec, machine).partials.shape[0]
    return fast.schedule(p.seq_lens.get(), spec, blocks, capacity).units


def separate_us(p: Problem, counts: tuple[int, ...]) -> float:
    """Microseconds of ``reduce_splits`` on so many splits of each sequence."""
    import cupy

    lens = p.seq_lens.get()
    bounds = [s * np.arange(n) // n for s, n in zip(lens.tolist(), counts, strict=True)]
    plan = SplitPlan.from_bounds(bounds, lens).to(cupy)
    _, num_q_heads, head_dim = p.q.shape
    rows = (sum(counts), num_q_heads)
    maxima, sums = cupy.zeros(rows, np.float32), cupy.ones(rows, np.float32)
    partials = Partials(cupy.ones((*rows, head_dim), np.float32), maxima, sums, plan)
    out = cupy.empty_like(p.q)
    return time_graph([lambda: decode.reduce_splits(partials, out=out)] * 20, cold=False).median_us


def reduce(rounds: int = 3) -> list[dict[str, Any]]:
    """A row for each step.

    Parameters
    ----------
    rounds : int
        Timings of the two kernels, in turn, of which the shortest counts.

    Returns
    -------
    list of dict
        ``splits`` of the sequence that has most, ``step_us`` and ``unmerged_us`` of the fast
        kernel, ``fused_us`` between the two, ``separate_us``, and the environment.
    """
    from cupy_decode.backends import cuda

    whole, parts = FastPath(), FastPath(unmerged(kernels_cu.source("paged_split_k_mma")))
    rows = []
    for shape in tqdm(named(_WANTED), unit="shape"):
        p = problem(shape.heads, shape.lens)
        launches = [path(p) for path in (whole, parts)]
        if not (error := check(p, launches[0][0]())) < 1e-2:
            raise RuntimeError(f"the fast kernel is wrong on {shape.label}: error {error:.3g}")
        timed = [[time_graph(one).median_us for one in launches] for _ in range(rounds)]
        step_us, unmerged_us = np.min(timed, axis=0).tolist()
        counts = splits(p, fast.Machine.of(cuda))
        rows.append(
            dict(
                bench="reduce",
                model=shape.model,
                label=shape.label,
                splits=max(counts),
                step_us=round(step_us, 3),
                unmerged_us=round(unmerged_us, 3),
                fused_us=round(step_us - unmerged_us, 3),
                separate_us=round(separate_us(p, counts), 3),
                **environment(),
            )
        )
    return rows


def main() -> None:
    """Measure, print and write."""
    path = file_argument(__doc__)
    rows = reduce()
    write_jsonl(path, rows)
    for row in rows:
        print(
            "{model:16} {label:10} step {step_us:8.2f} us, without merge {unmerged_us:8.2f}, "
            "merge inside {fused_us:6.2f}, alone {separate_us:6.2f}".format(**row)
        )


if __name__ == "__main__":
    main()
