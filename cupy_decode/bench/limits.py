"""What the machine can do at best: bandwidths, the cost of a launch, and the floor of a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupy_decode.bench.problems import Problem
from cupy_decode.bench.timing import Timing, read_stream, time_graph
from cupy_decode.specs import Arg, Launch

#: (blocks per SM, threads per block) among which the best reader of a stream is looked for.
_STREAM_GRIDS = ((1, 512), (2, 512), (4, 512), (16, 256), (64, 512))
#: The same for the reader of pages: small grids start sooner, large ones hide more latency.
_PAGE_GRIDS = (
    (1, 256),
    (2, 256),
    (3, 256),
    (8, 256),
    (2, 128),
    (4, 128),
    (2, 64),
    (4, 64),
    (8, 64),
    (12, 64),
)


def _event_us(fn: Callable[[], Any], repeats: int) -> float:
    """Median microseconds between events around a call, for work of milliseconds."""
    import cupy

    fn()
    pairs = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    pairs[-1][1].synchronize()
    return statistics.median(cupy.cuda.get_elapsed_time(b, e) * 1e3 for b, e in pairs)


def read_bandwidth(num_bytes: int = 4 << 30, repeats: int = 5) -> float:
    """Bytes per second of a kernel that only reads, with 16-byte loads: the best of several grids.

    Parameters
    ----------
    num_bytes : int
        Size of the buffer; far above the L2 cache.
    repeats : int
        Launches per grid; the median counts.
    """
    import cupy

    from cupy_decode.backends import cuda

    # Random bits: memory full of zeros can be faster than real data.
    data = cupy.random.RandomState(0).standard_normal(num_bytes // 4, dtype=np.float32)
    sink = cupy.zeros(1, np.uint32)
    sms = cuda.num_sms()
    grids = [(m * sms, threads) for m, threads in _STREAM_GRIDS]
    launches = [read_stream(sink, data, num_bytes // 16, *grid) for grid in grids]
    best = min(_event_us(partial(cuda.run, launch), repeats) for launch in launches)
    return num_bytes / best * 1e6


def copy_bandwidth(num_bytes: int = 4 << 30, repeats: int = 5) -> float:
    """Bytes read plus bytes written per second of a device-to-device copy."""
    import cupy

    source = cupy.random.RandomState(0).standard_normal(num_bytes // 4, dtype=np.float32)
    target = cupy.empty_like(source)
    us = _event_us(lambda: target.data.copy_from_device_async(source.data, num_bytes), repeats)
    return 2 * num_bytes / us * 1e6


def empty_launch(nodes: int = 1, replays: int = 50) -> Timing:
    """Replay of a graph of ``nodes`` dependent kernels that do nothing, per graph.

    ``empty_launch(1)`` is what any measurement of one launch contains.
    """
    import cupy

    from cupy_decode.backends import cuda

    sink = cupy.zeros(1, np.uint32)
    launch = read_stream(sink, sink, 0, 2 * cuda.num_sms(), 256)
    one = time_graph([partial(cuda.run, launch)] * nodes, replays)
    return Timing(one.median_us * nodes, one.min_us * nodes)


def read_pages(
    problem: Problem, copy: int, blocks: int, threads: int, blocks_per_sm: int = 1
) -> Launch:
    """Launch of the kernel that reads one cache's pages and nothing else.

    Parameters
    ----------
    copy : int
        Which of the caches.
    blocks, threads : int
        Grid and block.
    blocks_per_sm : int
        Thread blocks that registers are rationed for (``read_pages.cu``).
    """
    import cupy

    k_cache, v_cache = problem.k_caches[copy], problem.v_caches[copy]
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if v_cache.shape != k_cache.shape or k_cache.strides != v_cache.strides:
        raise ValueError("the floor needs K and V caches of one shape and layout")
    if block_size % 16:
        raise ValueError(f"block_size must be a multiple of 16; got {block_size}")
    strides = [s // 16 for s in k_cache.strides[:3]]
    values: dict[str, tuple[Any, Any]] = dict(
        sink=("ptr", cupy.zeros(1, np.uint32)),
        k_cache=("ptr", k_cache),
        v_cache=("ptr", v_cache),
        pages=("ptr", problem.pages),
        num_pages=("i32", problem.pages.size),
        num_kv_heads=("i32", num_kv_heads),
        block_size=("i32", block_size),
        stride_block=("i64", strides[0]),
        stride_slot=("i64", strides[1]),
        stride_head=("i64", strides[2]),
    )
    args = tuple(Arg(name, kind, value) for name, (kind, value) in values.items())
    vectors = head_dim * k_cache.itemsize // 16
    entry = f"read_pages<{vectors}, {blocks_per_sm}>"
    return Launch("read_pages", entry, (blocks, 1, 1), (threads, 1, 1), 0, args, False)


def floor(
    problem: Problem, replays: int = 30, *, blocks_per_sm: int = 1
) -> tuple[Timing, tuple[int, int]]:
    """Time of only reading the pages of a step, and the (blocks, threads) that did it best.

    Every key is read once per KV head, through the page list, cold: no decode kernel that uses
    every key can be faster, whatever the bandwidth of one long stream is.

    Parameters
    ----------
    problem : Problem
    replays : int
    blocks_per_sm : int
        1 is the floor. With 6 the same reader has the 40 registers that a compiler gives it
        unasked: the floor of other benchmarks, twice as high where a step is small.
    """
    from cupy_decode.backends import cuda

    sms = cuda.num_sms()
    items = problem.pages.size * problem.heads.num_kv_heads

    def timed(grid: tuple[int, int], replays: int) -> Timing:
        copies = range(len(problem.k_caches))
        launches = [read_pages(problem, copy, *grid, blocks_per_sm) for copy in copies]
        return time_graph([partial(cuda.run, launch) for launch in launches], replays)

    grids = {(min(m * sms, -(-items // (t // 32))), t) for m, t in _PAGE_GRIDS}
    best = min(sorted(grids), key=lambda grid: timed(grid, 7).median_us)
    return timed(best, replays), best


def limits() -> dict[str, float]:
    """Bandwidths in bytes per second, launch costs in microseconds, of the current device."""
    return dict(
        read_bandwidth=read_bandwidth(),
        copy_bandwidth=copy_bandwidth(),
        empty_launch_us=empty_launch(1).median_us,
        two_empty_launches_us=empty_launch(2).median_us,
    )
