"""Kernels beside one another on the same shapes: checked first, then timed, each over the floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from tqdm import tqdm

from cupy_decode import fast
from cupy_decode.bench.limits import floor, limits
from cupy_decode.bench.problems import Problem, problem, random_pool
from cupy_decode.bench.records import environment
from cupy_decode.bench.shapes import BANDS, SHAPES, Shape
from cupy_decode.bench.timing import time_graph
from cupy_decode.specs import Launch

#: Makes one launch per cache of a problem; each returns the output, (batch, num_q_heads, head_dim).
Contestant = Callable[[Problem], Sequence[Callable[[], Any]]]

#: Largest error of a checked row over its norm: a few roundings of a 16-bit output.
_TOLERANCE = 1e-2


def fast_path(source: str | None = None, **cut: Any) -> Contestant:
    """The tensor-core kernel, with its workspace allocated once.

    Parameters
    ----------
    source : str, optional
        Self-contained CUDA C++ to use instead of the package's, for comparing two versions.
    **cut
        ``num_blocks`` or ``unit_pages`` of ``fast.launch``.
    """

    def launches(p: Problem) -> list[Callable[[], Any]]:
        import cupy

        from cupy_decode.backends import cuda

        machine = fast.Machine(cuda.num_sms(), cuda.shared_per_sm())
        space = fast.workspace(cuda, fast.spec_of(p.q, p.k_caches[0], p.block_table), machine)
        scale = p.heads.head_dim**-0.5

        def one(copy: int) -> Callable[[], Any]:
            out, lse = cupy.empty_like(p.q), cupy.empty(p.q.shape[:2], np.float32)
            launch = fast.launch(
                **p.arguments(copy),
                out=out,
                lse=lse,
                space=space,
                scale=scale,
                machine=machine,
                **cut,
            )
            run = cuda.run if source is None else partial(_run_source, source)

            def go() -> Any:
                run(launch)
                return out

            return go

        return [one(copy) for copy in range(len(p.k_caches))]

    return launches


@cache
def _compiled(source: str, entry: str, shared_mem: int) -> Any:
    """A kernel of another text than the package's."""
    import cupy

    module = cupy.RawModule(code=source, options=("-std=c++17",), name_expressions=[entry])
    kernel = module.get_function(entry)
    if shared_mem > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = shared_mem
    return kernel


def _run_source(source: str, launch: Launch) -> None:
    """Launch a kernel compiled from another text."""
    from cupy_decode.backends import cuda

    kernel = _compiled(source, launch.entry, launch.shared_mem)
    args = [cuda._cast(a.ctype, a.value) for a in launch.args]
    kernel(launch.grid, launch.block, args, shared_mem=launch.shared_mem)


def _float32(array: Any, index: Any = slice(None)) -> Any:
    """Rows of a 16-bit CuPy array as float32; a bfloat16 is the upper half of one."""
    bits = array.view(np.uint16)[index]
    if str(array.dtype) == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def check(p: Problem, out: Any) -> float:
    """Largest relative error of a few sequences against float32, from the first cache.

    Returns
    -------
    float
        ||out - reference|| / ||reference|| of the worst of them; NaN where the output has one.
    """
    import cupy

    lens = p.seq_lens.get()
    k_cache, v_cache = p.k_caches[0], p.v_caches[0]
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    worst = 0.0
    for b in sorted({0, len(lens) - 1, int(lens.argmax()), int(lens.argmin())}):
        ids = p.block_table[b, : -(-int(lens[b]) // block_size)]
        k, v = (
            _float32(cache, ids).reshape(-1, num_kv_heads, head_dim)[: lens[b]].transpose(1, 0, 2)
            for cache in (k_cache, v_cache)
        )
        q = _float32(p.q, b).reshape(num_kv_heads, p.heads.group_size, head_dim)
        x = q @ k.transpose(0, 2, 1) * head_dim**-0.5
        x = cupy.exp(x - x.max(axis=-1, keepdims=True))
        want = (x / x.sum(axis=-1, keepdims=True)) @ v
        error = _float32(out, b).reshape(want.shape) - want
        relative = float(cupy.linalg.norm(error) / cupy.linalg.norm(want))
        worst = max(worst, relative) if math.isfinite(relative) else math.nan
    return worst


def compare(
    contestants: Mapping[str, Contestant],
    shapes: Iterable[Shape] = SHAPES,
    *,
    replays: int = 30,
    dtype: str = "bfloat16",
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Check and time kernels on shapes, beside the floor and the limits of the same run.

    Parameters
    ----------
    contestants : mapping of str to Contestant
    shapes : iterable of Shape
    replays : int
        Timed graph replays of each kernel; the median counts.
    dtype : {"bfloat16", "float16"}
    progress : bool
        Show a progress bar.

    Returns
    -------
    list of dict
        First the environment with the limits, then a row per shape and kernel, the floor among
        them: ``model``, ``label``, ``band``, ``kernel``, ``kv_bytes``, ``us``, ``us_min``,
        ``times_floor``, ``read_fraction`` (KV bytes per second over the measured read bandwidth)
        and ``error``.

    Raises
    ------
    RuntimeError
        If a kernel is wrong: it is not timed.
    """
    shapes = sorted(shapes, key=lambda s: s.kv_bytes)
    limit = limits()
    rows: list[dict[str, Any]] = [dict(kernel="environment", **environment(), **limit)]
    elements = max((s.kv_bytes for s in shapes), default=0) // 2
    pool = random_pool(max(elements + elements // 50, 1 << 30), dtype)
    for shape in tqdm(shapes, disable=not progress, unit="shape"):
        p = problem(shape.heads, shape.lens, dtype=dtype, pool=pool)
        least, grid = floor(p, replays)

        def row(kernel: str, timing: Any, shape: Shape = shape, least: Any = least, **more: Any):
            return dict(
                model=shape.model,
                label=shape.label,
                band=shape.band,
                kernel=kernel,
                kv_bytes=shape.kv_bytes,
                us=timing.median_us,
                us_min=timing.min_us,
                times_floor=timing.median_us / least.median_us,
                read_fraction=shape.kv_bytes / timing.median_us * 1e6 / limit["read_bandwidth"],
                **more,
            )

        rows.append(row("floor", least, grid=list(grid)))
        for name, contestant in contestants.items():
            launches = contestant(p)
            error = check(p, launches[0]())
            if not error < _TOLERANCE:
                raise RuntimeError(
                    f"{name} is wrong on {shape.model} {shape.label}: relative error {error:.3g}"
                )
            rows.append(row(name, time_graph(launches, replays), error=error))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of ``compare`` as text: a line per shape, then the bands.

    Each cell is microseconds and the factor over the floor; a band shows the geometric mean of the
    factors and the largest.
    """
    measured = [r for r in rows if "times_floor" in r]
    kernels = list(dict.fromkeys(r["kernel"] for r in measured if r["kernel"] != "floor"))
    cells: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for r in measured:
        cells.setdefault((r["model"], r["label"]), {})[r["kernel"]] = r
    lines = [f"{'shape':28}{'MB':>9}{'floor':>9}" + "".join(f"{k:>18}" for k in kernels)]
    for (model, label), by in cells.items():
        line = (
            f"{model + ' ' + label:28}{by['floor']['kv_bytes'] / 1e6:9.1f}{by['floor']['us']:9.1f}"
        )
        for k in kernels:
            cell = f"{by[k]['us']:.1f} x{by[k]['times_floor']:.2f}" if k in by else "-"
            line += f"{cell:>18}"
        lines.append(line)
    for band in [name for name, _ in BANDS] + ["all"]:
        line = f"{'band ' + band:46}"
        for k in kernels:
            factors = [
                r["times_floor"]
                for r in measured
                if r["kernel"] == k and band in ("all", r["band"])
            ]
            if not factors:
                line += f"{'-':>18}"
                continue
            mean = math.exp(sum(map(math.log, factors)) / len(factors))
            line += f"{f'{mean:.3f} max {max(factors):.2f}':>18}"
        lines.append(line)
    return "\n".join(lines)
