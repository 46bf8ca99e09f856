"""Time of an append and of an allocation against the size of the pool.

``python -m cupy_decode.bench.allocator_scaling`` writes ``results/allocator_scaling.jsonl``. Pools
of four sizes are 90 % full of other sequences on scattered blocks and serve the same requests in
two states: ``free``, where the remaining blocks hold nothing, and ``evicting``, where they are all
cached, so that every block taken pushes one out.

The sizes take turns for several rounds; each figure is the median over the rounds of that round's
percentile, since a shared machine slows down and speeds up by itself. Times include the clock's.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from tqdm import tqdm

import cupy_decode
from cupy_decode.bench.records import write_jsonl
from cupy_decode.paging import BlockPool

_SIZES = (10**3, 10**4, 10**5, 10**6)
_STATES = ("free", "evicting")
_BLOCK_SIZE = 16
_PROMPT = 32 * _BLOCK_SIZE
_RESULTS = Path(cupy_decode.__file__).parent / "results" / "allocator_scaling.jsonl"


def _serve_and_leave(pool: BlockPool, name: int, num_tokens: int) -> int:
    """One request that no one else resembles, from admission to release; nanoseconds to admit."""
    prompt = np.full(num_tokens, name)
    start = perf_counter_ns()
    pool.allocate(name, prompt)
    elapsed = perf_counter_ns() - start
    pool.publish(name)
    pool.free(name)
    return elapsed


def _fill_cache(pool: BlockPool, state: str, names: Iterator[int]) -> None:
    while state == "evicting" and pool.num_free_blocks:
        _serve_and_leave(pool, next(names), min(_PROMPT, pool.num_free_blocks * _BLOCK_SIZE))


def _long_used_pool(num_blocks: int, state: str, names: Iterator[int]) -> BlockPool:
    pool = BlockPool(num_blocks, _BLOCK_SIZE, seed=0, prefix_caching=state == "evicting")
    for _ in range(num_blocks * 9 // 10 * _BLOCK_SIZE // _PROMPT):
        pool.allocate(next(names), _PROMPT)
    _fill_cache(pool, state, names)
    return pool


def _one_round(
    pool: BlockPool, state: str, names: Iterator[int], repeats: int
) -> dict[str, np.ndarray]:
    """Nanoseconds of every single-token append and of every 512-token allocation."""
    appends, allocations = [], []
    for _ in range(repeats):
        allocations.append(_serve_and_leave(pool, next(names), _PROMPT))
        name = next(names)
        pool.allocate(name, 1)
        for _ in range(_PROMPT - 1):
            start = perf_counter_ns()
            pool.append(name)
            appends.append(perf_counter_ns() - start)
        pool.free(name)
        _fill_cache(pool, state, names)
    return {"append": np.array(appends), "allocate": np.array(allocations)}


def measure(*, rounds: int = 15, repeats: int = 200) -> list[dict[str, Any]]:
    """Percentiles for every operation, state and size, each with its ratio to the smallest pool.

    Parameters
    ----------
    rounds : int
    repeats : int
        Allocations in a round; each comes with 511 appends.
    """
    where = {
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy_decode": cupy_decode.__version__,
        "date": datetime.date.today().isoformat(),
    }
    rows: list[dict[str, Any]] = []
    for state in _STATES:
        names = count(1)
        pools = {size: _long_used_pool(size, state, names) for size in _SIZES}
        seen: dict[tuple[str, int], list[np.ndarray]] = {}
        for _ in tqdm(range(rounds), desc=state, unit="round"):
            for size, pool in pools.items():
                for what, times in _one_round(pool, state, names, repeats).items():
                    seen.setdefault((what, size), []).append(np.percentile(times, (50, 99)))
        for (what, size), percentiles in seen.items():
            p50, p99 = np.median(percentiles, axis=0)
            base50, base99 = np.median(seen[what, _SIZES[0]], axis=0)
            rows.append(
                {
                    "operation": what, "state": state, "num_blocks": size,
                    "p50_us": round(p50 / 1e3, 3), "p99_us": round(p99 / 1e3, 3),
                    "p50_ratio": round(p50 / base50, 3), "p99_ratio": round(p99 / base99, 3),
                    "rounds": rounds, "repeats": repeats, **where,
                }
            )  # fmt: skip
    return sorted(rows, key=lambda row: (row["state"], row["operation"], row["num_blocks"]))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    rows = measure()
    for row in rows:
        print(
            "{operation:8s} {state:8s} {num_blocks:9,d} blocks  p50 {p50_us:7.2f} us (x "
            "{p50_ratio:.2f})  p99 {p99_us:7.2f} us (x {p99_ratio:.2f})".format(**row)
        )
    write_jsonl(arguments.out, rows)


if __name__ == "__main__":
    main()
