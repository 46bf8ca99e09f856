"""Kernels beside one another on the same shapes: checked first, then timed, each over the floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
from tqdm import tqdm

from cupy_decode import fast
from cupy_decode.bench.limits import floor, limits
from cupy_decode.bench.problems import Problem, problem, random_pool
from cupy_decode.bench.records import environment
from cupy_decode.bench.shapes import BANDS, MODELS, SHAPES, Shape
from cupy_decode.bench.timing import Timing, time_graph
from cupy_decode.specs import FP8_DTYPES, Launch

#: Makes one launch per cache of a problem; each returns the output, (batch, num_q_heads, head_dim).
Contestant = Callable[[Problem], Sequence[Callable[[], Any]]]

#: Largest error of a checked row over its norm: a few roundings of a 16-bit output.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class FastPath:
    """The tensor-core kernel, with its workspace allocated once per problem.

    Attributes
    ----------
    source : str or None
        Self-contained CUDA C++ to use instead of the package's, for comparing two versions.
    cut : mapping
        ``num_blocks``, ``unit_pages`` or ``overlap`` of ``fast.launch``.
    """

    source: str | None = None
    cut: Mapping[str, Any] = field(default_factory=dict)

    def launch(self, p: Problem, copy: int, out: Any, space: fast.Workspace) -> Launch:
        """The launch on one cache of a problem."""
        import cupy

        return fast.launch(
            **p.arguments(copy),
            out=out,
            lse=cupy.empty(p.q.shape[:2], np.float32),
            space=space,
            scale=p.heads.head_dim**-0.5,
            kv_dtype=p.kv_dtype,
            machine=_machine(),
            **self.cut,
        )

    def __call__(self, p: Problem) -> list[Callable[[], Any]]:
        import cupy

        from cupy_decode.backends import cuda

        space = _workspace(p)
        run = cuda.run if self.source is None else partial(_run_source, self.source)

        def one(copy: int) -> Callable[[], Any]:
            out = cupy.empty_like(p.q)
            launch = self.launch(p, copy, out, space)

            def go() -> Any:
                run(launch)
                return out

            return go

        return [one(copy) for copy in range(len(p.k_caches))]

    def resources(self, p: Problem) -> dict[str, Any]:
        """What the specialisation for a problem takes of an SM.

        Returns
        -------
        dict
            ``entry``, ``registers`` and ``spilled_bytes`` per thread, ``shared_bytes`` per thread
            block and ``blocks_per_sm`` that fit side by side.
        """
        import cupy

        from cupy_decode.backends import cuda

        space = _workspace(p)
        launch = self.launch(p, 0, cupy.empty_like(p.q), space)
        if self.source is None:
            kernel = cuda._kernel_of(launch)
        else:
            kernel = _compiled(self.source, launch.entry, launch.shared_mem)
        occupancy = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            kernel.kernel.ptr, math.prod(launch.block), launch.shared_mem
        )
        return dict(
            entry=launch.entry,
            registers=kernel.num_regs,
            spilled_bytes=kernel.local_size_bytes,
            shared_bytes=kernel.shared_size_bytes + launch.shared_mem,
            blocks_per_sm=occupancy,
        )


def _workspace(p: Problem) -> fast.Workspace:
    from cupy_decode.backends import cuda

    spec = fast.spec_of(p.q, p.k_caches[0], kv_dtype=p.kv_dtype)
    return fast.workspace(cuda, spec, _machine())


def _machine() -> fast.Machine:
    from cupy_decode.backends import cuda

    return fast.Machine.of(cuda)


def replace_once(source: str, old: str, new: str) -> str:
    """A text with one place of it changed; ValueError where it has not exactly one."""
    if source.count(old) != 1:
        raise ValueError(f"the source has {source.count(old)} of {old!r}; it must have one")
    return source.replace(old, new)


def float_maxima(source: str) -> str:
    """The fast kernel's text with maxima as they are and sums in any order: what most kernels do.

    Beside it the package's own shows what sums that do not depend on the split cost.

    Parameters
    ----------
    source : str
        ``kernels_cu.source("paged_split_k_mma")``.

    Raises
    ------
    ValueError
        If the text has no such sums.
    """
    changes = (
        ("fmaxf(m[n][h], ceilf(top))", "fmaxf(m[n][h], top)"),
        (
            "return __int_as_float(__float_as_int(fmaxf(m - M, -127.0f)",
            "return m == neg_inf() ? 0.0f : ex2(m - M);\n"
            "    return __int_as_float(__float_as_int(fmaxf(m - M, -127.0f)",
        ),
    )
    for old, new in changes:
        source = replace_once(source, old, new)
    # as operators they may be fused
    contracted = "#define __fadd_rn(a, b) ((a) + (b))\n#define __fmul_rn(a, b) ((a) * (b))\n"
    place = source.index("// Softmax states whose sums")
    return source[:place] + contracted + source[place:]


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


def _float32(array: Any, index: Any = slice(None), kv_dtype: str | None = None) -> Any:
    """Rows of a CuPy array of 16-bit floats, or of bytes that are 8-bit ones, as float32."""
    import cupy
    import ml_dtypes

    if kv_dtype:
        type_8 = np.dtype(getattr(ml_dtypes, FP8_DTYPES[kv_dtype]))
        values = np.arange(256, dtype=np.uint8).view(type_8).astype(np.float32)
        return cupy.asarray(values)[array[index]]
    bits = array.view(np.uint16)[index]
    if str(array.dtype) == "bfloat16":  # the upper half of a float32
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

    out = cupy.from_dlpack(out)  # of another package, perhaps
    lens = p.seq_lens.get()
    k_cache, v_cache = p.k_caches[0], p.v_caches[0]
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    worst = 0.0
    for b in sorted({0, len(lens) - 1, int(lens.argmax()), int(lens.argmin())}):
        ids = p.block_table[b, : -(-int(lens[b]) // block_size)]
        k, v = (
            _float32(cache, ids, p.kv_dtype)
            .reshape(-1, num_kv_heads, head_dim)[: lens[b]]
            .transpose(1, 0, 2)
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
    peers: Mapping[str, Contestant] = MappingProxyType({}),
    replays: int = 30,
    progress: bool = True,
) -> Iterator[dict[str, Any]]:
    """Check and time kernels on shapes, beside the floor and the limits of the same run.

    Parameters
    ----------
    contestants : mapping of str to Contestant
    shapes : iterable of Shape
    peers : mapping of str to Contestant
        Kernels of others, for caches of the queries' type. Where one fails or is wrong, its row
        says so and the rest goes on.
    replays : int
        Timed graph replays of each kernel; the median counts.
    progress : bool
        Show a progress bar.

    Yields
    ------
    dict
        First the environment with the limits, then a row per shape and kernel, the floor among
        them: ``model``, ``label``, ``band``, ``kernel``, ``batch``, ``keys``, ``longest``,
        ``kv_bytes``, ``us``, ``us_min``, ``gb_per_s``, ``times_floor``, ``times_loose_floor`` (over
        ``limits.floor`` with ``blocks_per_sm=6``), ``read_fraction`` (KV bytes per second over the
        measured read bandwidth) and ``error``; with ``FastPath`` what ``resources`` says. A peer
        that failed has ``failed`` instead of times.

    Raises
    ------
    RuntimeError
        If one of the contestants is wrong: it is not timed.
    """

    def cache_type(shape: Shape) -> str:
        return shape.kv_dtype or shape.dtype

    shapes = sorted(shapes, key=lambda s: (cache_type(s), s.kv_bytes))
    limit = limits()
    yield dict(kernel="environment", replays=replays, **environment(), **limit)
    bar = tqdm(total=len(shapes), disable=not progress, unit="shape")
    for dtype, group in groupby(shapes, key=cache_type):
        of_dtype = list(group)
        elements = of_dtype[-1].kv_bytes // (1 if of_dtype[-1].kv_dtype else 2)
        pool = random_pool(max(elements + elements // 50, 1 << 30), dtype)
        for shape in of_dtype:
            bar.set_postfix_str(f"{shape.model} {shape.label}")
            p = problem(
                shape.heads, shape.lens, dtype=shape.dtype, kv_dtype=shape.kv_dtype, pool=pool
            )
            others = {} if shape.kv_dtype else peers
            yield from _rows_of(shape, p, contestants, others, replays, limit["read_bandwidth"])
            bar.update()
        del pool, p
    bar.close()


def _rows_of(
    shape: Shape,
    p: Problem,
    contestants: Mapping[str, Contestant],
    peers: Mapping[str, Contestant],
    replays: int,
    read_bandwidth: float,
) -> Iterator[dict[str, Any]]:
    """The rows of one shape."""
    least, grid = floor(p, replays)
    loose, loose_grid = floor(p, replays, blocks_per_sm=6)
    common = dict(
        model=shape.model,
        label=shape.label,
        band=shape.band,
        batch=len(shape.seq_lens),
        keys=sum(shape.seq_lens),
        longest=max(shape.seq_lens),
        kv_bytes=shape.kv_bytes,
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
    )

    def row(kernel: str, timing: Timing, **more: Any) -> dict[str, Any]:
        return dict(
            **common,
            kernel=kernel,
            us=timing.median_us,
            us_min=timing.min_us,
            gb_per_s=shape.kv_bytes / timing.median_us / 1e3,
            times_floor=timing.median_us / least.median_us,
            times_loose_floor=timing.median_us / loose.median_us,
            read_fraction=shape.kv_bytes / timing.median_us * 1e6 / read_bandwidth,
            **more,
        )

    def timed(name: str, contestant: Contestant) -> dict[str, Any]:
        launches = contestant(p)
        error = check(p, launches[0]())
        if not error < _TOLERANCE:
            raise RuntimeError(
                f"{name} is wrong on {shape.model} {shape.label}: relative error {error:.3g}"
            )
        about = contestant.resources(p) if isinstance(contestant, FastPath) else {}
        return row(name, time_graph(launches, replays), error=error, **about)

    yield row("floor", least, grid=list(grid))
    yield row("loose floor", loose, grid=list(loose_grid))
    for name, contestant in contestants.items():
        yield timed(name, contestant)
    for name, contestant in peers.items():
        try:
            yield timed(name, contestant)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            yield dict(**common, kernel=name, failed=failed)


_COLUMNS = f"{'kernel':14}{'us':>10}{'GB/s':>8}{'x floor':>9}{'x loose':>9}{'of limit':>10}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of ``compare`` as text: shapes, then bands, then what the kernels take of an SM.

    A band of the 48 shapes, and every other set, shows for each kernel the geometric mean of its
    times over the floor and the largest of them.
    """
    measured = [r for r in rows if "times_floor" in r]
    lines = [f"{'shape':28}{'MB':>9}  {_COLUMNS}"]
    shape: tuple[str, str] | None = None
    for r in rows:
        if "model" not in r:
            continue
        first = (r["model"], r["label"]) != shape
        shape = r["model"], r["label"]
        name = f"{' '.join(shape):28}{r['kv_bytes'] / 1e6:9.1f}" if first else " " * 37
        if "failed" in r:
            lines.append(f"{name}  {r['kernel']:14}{r['failed']}")
            continue
        lines.append(
            f"{name}  {r['kernel']:14}{r['us']:10.1f}{r['gb_per_s']:8.0f}{r['times_floor']:9.3f}"
            f"{r['times_loose_floor']:9.3f}{100 * r['read_fraction']:8.1f} %"
        )
    kernels = list(dict.fromkeys(r["kernel"] for r in measured if r["kernel"] != "floor"))
    for over in ("floor", "loose floor"):
        lines += ["", f"{'time over the ' + over:28}" + "".join(f"{k:>20}" for k in kernels)]
        key = f"times_{over.replace(' ', '_')}"
        for group, of_group in _groups(measured).items():
            line = f"{group:28}"
            for k in kernels:
                factors = [r[key] for r in of_group if r["kernel"] == k]
                if factors:
                    mean = math.exp(sum(map(math.log, factors)) / len(factors))
                    line += f"{f'{mean:.3f} max {max(factors):.2f}':>20}"
                else:
                    line += f"{'-':>20}"
            lines.append(line)
    taken = {(r["kernel"], r["entry"]): r for r in measured if "entry" in r}
    if taken:
        lines += ["", f"{'specialisation':60}{'registers':>10}{'spilled':>9}{'blocks/SM':>11}"]
    for (kernel, entry), r in taken.items():
        lines.append(
            f"{kernel + ': ' + entry:60}{r['registers']:10}{r['spilled_bytes']:9}"
            f"{r['blocks_per_sm']:11}"
        )
    return "\n".join(lines)


def _groups(measured: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows that are summed up together: the 48 shapes by band, all others by model."""
    ours = [r for r in measured if r["model"] in MODELS]
    groups = {band: [r for r in ours if r["band"] == band] for band, _ in BANDS}
    groups["all"] = ours
    for r in measured:
        if r["model"] not in MODELS:
            groups.setdefault(r["model"], []).append(r)
    return {name: rows for name, rows in groups.items() if rows}
