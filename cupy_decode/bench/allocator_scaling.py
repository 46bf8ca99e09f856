"""Time of an append and of an allocation against the size of the pool.

``python -m cupy_decode.bench.allocator_scaling --out FILE`` keeps the figures as JSON lines. Pools
of four sizes, prefix caching on, are nearly full of other sequences on scattered blocks and serve
the same requests in three states:

- ``free``: the remaining blocks hold nothing;
- ``evicting``: they are all cached, so that every block taken pushes one out. Each request ends
  before the next one comes, so blocks are evicted in the order in which they were published;
- ``evicting at random``: a tenth of the pool belongs to running requests, and a random one of them
  ends with every arrival, so the order of eviction is not that of anything else.

An append takes a block for one token in 16; those are kept apart, as "append a block". ``publish``
and ``free`` are timed as well, since a pool could make allocations cheap by leaving them work.

The sizes take turns for several rounds; each figure is the median over the rounds of that round's
percentile, since a shared machine slows down and speeds up by itself. Times include the clock's.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import random
from collections.abc import Callable, Sequence
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
_STATES = ("free", "evicting", "evicting at random")
_BLOCK_SIZE = 16
_PROMPT = 32 * _BLOCK_SIZE


def _timed(call: Callable[..., Any], *args: Any) -> int:
    start = perf_counter_ns()
    call(*args)
    return perf_counter_ns() - start


class _Service:
    """A pool long in use, and the requests that come and go."""

    def __init__(self, num_blocks: int, state: str) -> None:
        self.pool = BlockPool(num_blocks, _BLOCK_SIZE, seed=0)
        self._publishes = state != "free"
        self._names = count(1)
        self._random = random.Random(0)
        self._running: list[int] = []
        tenth = num_blocks // 10 * _BLOCK_SIZE // _PROMPT  # of the pool, in requests
        self._most_running = tenth if state == "evicting at random" else 0
        for _ in range(9 * tenth - self._most_running):
            self.pool.allocate(next(self._names), _PROMPT)
        self.refill()
        for _ in range(2 * self._most_running):  # until the first order is forgotten
            self.serve()

    def serve(self, num_tokens: int = _PROMPT) -> dict[str, int]:
        """Admit a request that resembles no other, and end one of those that run; nanoseconds."""
        name = next(self._names)
        prompt = np.full(num_tokens, name)
        times = {"allocate": _timed(self.pool.allocate, name, prompt)}
        if self._publishes:
            times["publish"] = _timed(self.pool.publish, name)
        self._running.append(name)
        if len(self._running) > self._most_running:
            i = self._random.randrange(len(self._running))
            self._running[i], self._running[-1] = self._running[-1], self._running[i]
            times["free"] = _timed(self.pool.free, self._running.pop())
        return times

    def decode(self) -> dict[str, list[int]]:
        """Grow a sequence token by token and end it; nanoseconds of each append."""
        name = next(self._names)
        append = self.pool.append
        self.pool.allocate(name, 1)
        times = []
        for _ in range(_PROMPT - 1):
            start = perf_counter_ns()
            append(name)
            times.append(perf_counter_ns() - start)
        self.pool.free(name)
        with_block = times[_BLOCK_SIZE - 1 :: _BLOCK_SIZE]  # the first block came with the prompt
        del times[_BLOCK_SIZE - 1 :: _BLOCK_SIZE]
        return {"append": times, "append a block": with_block}

    def refill(self) -> None:
        """Let published content take every block that holds nothing."""
        while self._publishes and self.pool.num_free_blocks:
            self.serve(min(_PROMPT, self.pool.num_free_blocks * _BLOCK_SIZE))


def _one_round(service: _Service, repeats: int) -> dict[str, list[int]]:
    times: dict[str, list[int]] = {}
    for _ in range(repeats):
        for operation, elapsed in service.serve().items():
            times.setdefault(operation, []).append(elapsed)
        for operation, each in service.decode().items():
            times.setdefault(operation, []).extend(each)
        service.refill()
    return times


def measure(
    states: Sequence[str] = _STATES, *, rounds: int = 21, repeats: int = 200
) -> list[dict[str, Any]]:
    """Percentiles for every operation, state and size, each with its ratio to the smallest pool.

    Parameters
    ----------
    states : sequence of str
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
    for state in states:
        services = {size: _Service(size, state) for size in _SIZES}
        seen: dict[tuple[str, int], list[np.ndarray]] = {}
        for _ in tqdm(range(rounds), desc=state, unit="round"):
            for size, service in services.items():
                for what, times in _one_round(service, repeats).items():
                    seen.setdefault((what, size), []).append(np.percentile(times, (50, 99)))
        for (what, size), percentiles in seen.items():
            p50, p99 = np.median(percentiles, axis=0)
            base50, base99 = np.median(seen[what, _SIZES[0]], axis=0)
            rows.append(
                {
                    "operation": what, "state": state, "num_blocks": size,
                    "p50_us": round(p50 / 1e3, 3), "p99_us": round(p99 / 1e3, 3),
                    "p50_ratio": round(p50 / base50, 3), "p99_ratio": round(p99 / base99, 3),
                    "block_size": _BLOCK_SIZE, "rounds": rounds, "repeats": repeats, **where,
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
    """Measure, print, and keep the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the rows as JSON lines")
    arguments = parser.parse_args()
    rows = measure()
    for row in rows:
        print(
            "{operation:14s} {state:18s} {num_blocks:9,d} blocks  p50 {p50_us:7.2f} us (x "
            "{p50_ratio:.2f})  p99 {p99_us:7.2f} us (x {p99_ratio:.2f})".format(**row)
        )
    if arguments.out:
        write_jsonl(arguments.out, rows)


if __name__ == "__main__":
    main()
