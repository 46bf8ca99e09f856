"""Host time of a decode call: what Python adds to the launches themselves.

Between two kernels of a few microseconds each, the time that the CPU takes to ask for the next one
decides everything. ``python -m cupy_decode.bench.host_time FILE`` writes the rows of this and of
``cold_start`` as JSON lines.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from cupy_decode import calls, decode, policies
from cupy_decode.bench.cold_start import cold_start
from cupy_decode.bench.records import environment, file_argument, write_jsonl
from cupy_decode.bench.timing import Timing
from cupy_decode.heads import presets
from cupy_decode.step import DecodeStep


def call_us(call: Callable[[], Any], calls: int = 300, repeats: int = 25) -> Timing:
    """Microseconds of the host in one call; the GPU's queue is emptied between repeats."""
    import cupy

    call()
    times = []
    for _ in range(repeats):
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    cupy.cuda.Device().synchronize()
    return Timing(statistics.median(times), min(times))


@contextmanager
def kernels_that_return_at_once() -> Iterator[None]:
    """Launches do nothing inside: what is left of a call is its Python."""
    from cupy_decode.backends import cuda

    def no_launch(*args: Any) -> None:
        pass

    calls.forget()
    with mock.patch.object(cuda, "_launch_kernel", no_launch):
        yield
    calls.forget()


def host_time(
    model: str = "llama-3-8b", batch: int = 1, seq_len: int = 2560
) -> list[dict[str, Any]]:
    """Microseconds of the host per call, with the launches and without, as result rows.

    Eager calls and a prepared ``DecodeStep``, each without a plan, which is the fast kernel's one
    launch, and with a device plan at hand, which is the readable kernel's two; the step on the
    arrays of the call before, and on another layer's caches every time.
    """
    import cupy

    heads = presets[model]
    pages = -(-seq_len // 16) * batch
    q = cupy.zeros((batch, heads.num_q_heads, heads.head_dim), np.float16)
    cache = cupy.zeros((pages, 16, heads.num_kv_heads, heads.head_dim), np.float16)
    table = cupy.arange(pages, dtype=np.int32).reshape(batch, -1)
    lens = cupy.full(batch, seq_len, np.int32)
    plan = policies.plan_splits(lens.get(), heads, num_splits=16).to(cupy)
    arrays = (q, cache, cache, table, lens)
    layers = itertools.cycle([cache, cache.copy()])

    def ways() -> dict[str, Callable[[], Any]]:
        step = DecodeStep(heads, None, np.float16, batch=batch)
        planned = DecodeStep(heads, plan, np.float16)
        return {
            "eager": lambda: decode.decode_attention(*arrays),
            "eager, plan given": lambda: decode.decode_attention(*arrays, plan),
            "prepared step": lambda: step(*arrays),
            "prepared step, next layer": lambda: step(q, next(layers), cache, table, lens),
            "prepared step, plan given": lambda: planned(*arrays),
        }

    with_launches = {name: call_us(call) for name, call in ways().items()}
    with kernels_that_return_at_once():
        python = {name: call_us(call) for name, call in ways().items()}
    return [
        {
            "bench": "host_time",
            "model": model,
            "batch": batch,
            "seq_len": seq_len,
            "call": name,
            "host_us": round(with_launches[name].median_us, 2),
            "host_min_us": round(with_launches[name].min_us, 2),
            "python_us": round(python[name].median_us, 2),
            "python_min_us": round(python[name].min_us, 2),
            **environment(),
        }
        for name in with_launches
    ]


def main() -> None:
    """Measure, write and print."""
    path = file_argument(__doc__)
    rows = host_time()
    for dtype in ("float32", "float16", "bfloat16"):
        with tempfile.TemporaryDirectory() as empty:
            rows += cold_start(empty, dtype)
    write_jsonl(path, rows)
    for row in rows:
        print({name: row[name] for name in list(row)[:9]})


if __name__ == "__main__":
    main()
