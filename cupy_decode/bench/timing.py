"""Time kernels as the replays of a CUDA graph, with the L2 cache emptied of their data.

A graph keeps the host out of the measurement: what is timed is the launches back to back, as an
engine replays them. Data is cold because each replay follows a read of several times the L2, and
because the launches of one graph rotate over different caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cupy_decode.specs import Arg, Launch

#: The flush reads this many times the L2 cache.
_FLUSH_FACTOR = 8


class Timing(NamedTuple):
    """Microseconds of one launch: median and minimum over the replays."""

    median_us: float
    min_us: float


def read_stream(sink: Any, data: Any, num_vectors: int, blocks: int, threads: int) -> Launch:
    """Launch of the kernel that reads ``num_vectors`` 16-byte vectors of ``data``."""
    args = (
        Arg("sink", "ptr", sink),
        Arg("data", "ptr", data),
        Arg("num_vectors", "i64", num_vectors),
    )
    return Launch("read_stream", "read_stream<16>", (blocks, 1, 1), (threads, 1, 1), 0, args, False)


@cache
def _flush(device: int) -> Launch:
    """A read of several times the L2 cache, which leaves nothing else in it.

    The buffer holds random bits: reading zeros was seen to leave small problems in the cache.
    """
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    num_bytes = _FLUSH_FACTOR * attributes["L2CacheSize"]
    data = cupy.random.RandomState(0).standard_normal(num_bytes // 4, dtype=np.float32)
    blocks = 2 * attributes["MultiProcessorCount"]
    return read_stream(cupy.zeros(1, np.uint32), data, num_bytes // 16, blocks, 512)


def time_graph(
    launches: Sequence[Callable[[], Any]], replays: int = 30, cold: bool = True
) -> Timing:
    """Time launches captured in one CUDA graph, per launch.

    Parameters
    ----------
    launches : sequence of callables
        Each launches on the current stream, without waiting; all are captured into one graph, in
        order. Give as many, over different caches, as make one replay read more than the L2 holds.
        What they return is kept until the last replay.
    replays : int
        Timed replays of the graph.
    cold : bool
        Empty the L2 cache before every replay.

    Returns
    -------
    Timing
        Median and minimum over the replays, in microseconds, divided by ``len(launches)``.
    """
    import cupy

    from cupy_decode.backends import cuda

    if replays < 1 or not launches:
        raise ValueError(f"need launches and replays; got {len(launches)} and {replays}")
    flush = _flush(cupy.cuda.runtime.getDevice())
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # what the caller queued elsewhere is complete
    with stream:
        kept = [launch() for launch in launches[:2]]  # compiles, and fills the memory pool
        stream.synchronize()
        stream.begin_capture()
        kept = [launch() for launch in launches]
        graph = stream.end_capture()
        graph.launch()
        pairs = []
        for _ in range(replays):
            if cold:
                cuda.run(flush)
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            graph.launch()
            end.record()
            pairs.append((begin, end))
        stream.synchronize()
    del kept
    us = [cupy.cuda.get_elapsed_time(b, e) * 1e3 / len(launches) for b, e in pairs]
    return Timing(statistics.median(us), min(us))


def time_us(launches: Callable[[], Any] | Sequence[Callable[[], Any]], replays: int = 30) -> float:
    """Median microseconds of one launch, L2 cold; one callable or a rotation of them.

    A single callable carries the cost of a graph launch (about 3.5 us on an H200): rotate where
    that matters. See ``time_graph``.
    """
    one = callable(launches)
    return time_graph([launches] if one else launches, replays).median_us  # type: ignore[list-item,arg-type]
