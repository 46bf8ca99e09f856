"""Replay recorded requests through an allocator: what a memory size and a block size cost.

Two replays answer two questions. ``replay_cache`` runs each request to its end before the next
one and counts prefix hits: pure caching, comparable with a plain LRU. ``replay`` lets requests
arrive when they did, decodes them side by side, preempts when memory is short, and records what
the pool looked like over time. Its clock is a model, stated in its parameters, not a measurement.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from cupy_decode.heads import HeadConfig, cdiv, counted, preset_layers, presets
from cupy_decode.paging import Allocator, BlockPool, PoolExhausted
from cupy_decode.paging.kernel_blocks import blocks_per_allocator_block

#: Tokens that one hash id of a Mooncake trace stands for.
MOONCAKE_BLOCK = 512
#: Kernel block sizes that the command accounts for where they divide the allocator's.
_KERNEL_BLOCK_SIZES = (16, 32, 64, 128)
#: Blocks that the command's pool has at most: the host keeps a list of them.
_MOST_BLOCKS = 2**26


@dataclass(frozen=True)
class Request:
    """One recorded request.

    Attributes
    ----------
    arrival : float
        Seconds since the first request.
    input_length, output_length : int
        Tokens of the prompt and of the answer.
    hash_ids : int32 array or None
        One id for each run of ``hash_block`` prompt tokens, the last run perhaps shorter. Equal ids
        after equal prefixes mean equal tokens. None where the trace does not tell.
    hash_block : int
        Tokens one id stands for. Sharing within such a run is not visible in the trace.
    """

    arrival: float
    input_length: int
    output_length: int
    hash_ids: np.ndarray | None = None
    hash_block: int = MOONCAKE_BLOCK

    def prompt(self) -> int | np.ndarray:
        """What to hand ``allocate``: token ids that repeat where the prompt does, or a count."""
        if self.hash_ids is None:
            return self.input_length
        return np.repeat(self.hash_ids, self.hash_block)[: self.input_length]


def read_trace(path: str | PathLike[str]) -> list[Request]:
    """Requests of a file, in order of arrival.

    Parameters
    ----------
    path : path
        ``.jsonl`` with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``
        (Mooncake), or ``.csv`` with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens`` (Azure).

    Raises
    ------
    ValueError
        If the format is another one or a line cannot be read; the message names the line.
    """
    path = Path(path)
    readers = {".jsonl": _mooncake_requests, ".csv": _azure_requests}
    if path.suffix not in readers:
        raise ValueError(f"a trace must end in .jsonl (Mooncake) or .csv (Azure); got {path.name}")
    requests: list[Request] = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = _Lines(file)
        try:
            requests.extend(readers[path.suffix](lines))
        except KeyError as error:
            raise ValueError(f"{path.name}, line {lines.number}: no field {error}") from error
        except (TypeError, ValueError, OverflowError, csv.Error) as error:
            raise ValueError(f"{path.name}, line {lines.number}: {error}") from error
    if not requests:
        raise ValueError(f"{path.name} holds no request")
    first = min(r.arrival for r in requests)
    requests = [
        Request(r.arrival - first, r.input_length, r.output_length, r.hash_ids) for r in requests
    ]
    return sorted(requests, key=lambda r: r.arrival)


class _Lines:
    """Lines of a file, and the number of the last one read."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.number += 1
            yield line


def _mooncake_requests(lines: Iterable[str]) -> Iterator[Request]:
    for line in lines:
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            raise TypeError(f"a request must be a JSON object; got {line.strip()[:60]}")
        ids = np.array(row["hash_ids"], np.int32)
        request = _checked(row["timestamp"] / 1000, row["input_length"], row["output_length"], ids)
        if ids.shape != (cdiv(request.input_length, MOONCAKE_BLOCK),):
            raise ValueError(
                f"hash_ids must hold one id for each {MOONCAKE_BLOCK} tokens of input_length "
                f"{request.input_length}; got shape {ids.shape}"
            )
        yield request


def _azure_requests(lines: Iterable[str]) -> Iterator[Request]:
    for row in csv.DictReader(lines):
        time = np.datetime64(row["TIMESTAMP"], "us")
        seconds = math.nan if np.isnat(time) else float(time.astype(np.int64)) / 1e6
        yield _checked(seconds, row["ContextTokens"], row["GeneratedTokens"])


def _checked(
    arrival: float, input_length: Any, output_length: Any, hash_ids: np.ndarray | None = None
) -> Request:
    request = Request(arrival, int(input_length), int(output_length), hash_ids)
    if not math.isfinite(arrival):
        raise ValueError(f"the time of arrival must be finite; got {arrival}")
    if request.input_length < 1 or request.output_length < 0:
        raise ValueError(
            "a request must have a token of input and no negative output; got "
            f"{input_length} and {output_length}"
        )
    return request


def generate_trace(
    num_requests: int = 300,
    *,
    seed: int = 0,
    num_system_prompts: int = 4,
    requests_per_second: float = 2.0,
) -> list[Request]:
    """A small artificial chat service: shared system prompts and conversations of several turns.

    Every conversation starts with one of the system prompts (200 to 1,200 tokens); each turn
    repeats all that came before it, so prefixes are shared at every 16 tokens.

    Parameters
    ----------
    num_requests : int
    seed : int
    num_system_prompts : int
    requests_per_second : float
        Mean rate; arrivals are a Poisson process.

    Returns
    -------
    list of Request
        With ``hash_block`` 16.
    """
    rng = np.random.default_rng(seed)
    fresh = count(1)
    hash_block = 16

    def new_ids(tokens: int) -> list[int]:
        return [next(fresh) for _ in range(tokens // hash_block)]

    systems = [new_ids(int(n)) for n in rng.integers(200, 1200, num_system_prompts)]
    talks: list[list[int]] = []
    requests = []
    arrivals = np.cumsum(rng.exponential(1 / requests_per_second, num_requests))
    for arrival in (arrivals - arrivals[0]).tolist():
        if talks and rng.random() < 0.6:
            ids = talks[rng.integers(len(talks))]
        else:
            ids = list(systems[rng.integers(num_system_prompts)])
            talks.append(ids)
        ids += new_ids(int(rng.lognormal(5, 1)) + hash_block)
        tail = int(rng.integers(hash_block))
        output = int(rng.lognormal(4.5, 0.7)) + 1
        prompt = np.array([*ids, next(fresh)], np.int32)
        requests.append(Request(arrival, len(ids) * hash_block + tail, output, prompt, hash_block))
        ids += new_ids(output)
    return requests


# --------------------------------------------------------------------------- caching alone


@dataclass(frozen=True)
class CacheReplay:
    """Prefix blocks of a trace and how many of them were found.

    Attributes
    ----------
    num_blocks, num_hits : int
    """

    num_blocks: int
    num_hits: int

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_blocks


def replay_cache(
    requests: Sequence[Request], num_blocks: int, *, progress: bool = True
) -> CacheReplay:
    """Run the requests one after the other through a pool with one block for each hash id.

    Each request is admitted, published and released before the next. Every id counts as a full
    block, whatever the length of the prompt.

    Parameters
    ----------
    requests : sequence of Request
        All with hash ids.
    num_blocks : int
        Size of the pool. A request that needs more is an error.
    progress : bool
        Show a bar, on a terminal.
    """
    hash_block = requests[0].hash_block
    pool = BlockPool(num_blocks, hash_block)
    blocks = hits = 0
    hidden = None if progress else True  # None: where stderr is no terminal
    for i, request in enumerate(tqdm(requests, disable=hidden, unit="request")):
        if request.hash_ids is None or request.hash_block != hash_block:
            raise ValueError(f"request {i} must come with ids of {hash_block} tokens each")
        given = pool.allocate(i, np.repeat(request.hash_ids, hash_block))
        blocks += len(request.hash_ids)
        hits += given.num_cached_tokens // hash_block
        pool.publish(i)
        pool.free(i)
    return CacheReplay(blocks, hits)


# --------------------------------------------------------------------------- live traffic


@dataclass(frozen=True, eq=False)
class LiveBatch:
    """The sequences in decode at one moment, ready for a kernel.

    Attributes
    ----------
    time : float
        Seconds on the replay's clock.
    seq_ids : tuple of hashable
    seq_lens : int32 array, shape (batch,)
    block_table : int32 array, shape (batch, width)
        In allocator units.
    num_blocks, block_size : int
        Shape of the cache that the table points into.
    """

    time: float
    seq_ids: tuple[Hashable, ...]
    seq_lens: np.ndarray
    block_table: np.ndarray
    num_blocks: int
    block_size: int


@dataclass(eq=False)
class Replay:
    """What a replay saw.

    Attributes
    ----------
    num_blocks, block_size : int
    num_requests, num_rejected : int
        Requests of the trace, and those that no empty pool could hold.
    has_hash_ids : bool
        False where the trace does not tell which prompts are equal, so that none is found.
    num_arrived : int
        Requests that had arrived by ``end_time``: all, unless the replay was stopped.
    prompt_tokens, cached_tokens : int
        Tokens of all prompts at their first admission, and how many of them were found.
    recomputed_tokens : int
        Tokens computed again after preemptions.
    num_preemptions : int
    decoded_tokens : int
    num_steps : int
    end_time : float
        Seconds on the replay's clock when its last step began.
    samples : dict of str to float64 array
        One entry per sampled step: ``time`` (s), ``batch``, ``waiting``, ``used_blocks``,
        ``cached_blocks``, ``live_tokens`` (by sequence; shared ones count for each), ``tail_slots``
        (empty slots behind the sequences' last tokens), lengths ``len_p10``, ``len_p50``,
        ``len_p90``, ``len_max``, and ``table_bytes_N`` for each kernel block size N.
    live_batch : LiveBatch or None
        The batch at the moment asked for.
    """

    num_blocks: int
    block_size: int
    num_requests: int
    has_hash_ids: bool = True
    num_arrived: int = 0
    num_rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    decoded_tokens: int = 0
    num_steps: int = 0
    end_time: float = 0.0
    samples: dict[str, Any] = field(default_factory=dict)
    live_batch: LiveBatch | None = None

    @property
    def kernel_block_sizes(self) -> list[str]:
        """Sizes that ``table_bytes`` were sampled for, as their names end."""
        names = [name for name in self.samples if name.startswith("table_bytes_")]
        return [name.removeprefix("table_bytes_") for name in names]

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found in the cache; NaN without hash ids."""
        if not self.has_hash_ids:
            return math.nan
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """Share of the slots in used blocks that hold no token, over all samples."""
        slots = self.samples["used_blocks"].sum() * self.block_size
        return float(self.samples["tail_slots"].sum() / slots) if slots else 0.0

    @property
    def tail_per_sequence(self) -> float:
        """Mean number of empty slots in a sequence's last block."""
        sequences = self.samples["batch"].sum()
        return float(self.samples["tail_slots"].sum() / sequences) if sequences else 0.0

    def __str__(self) -> str:
        s = self.samples
        arrived = counted(self.num_requests, "request")
        if self.num_arrived < self.num_requests:
            arrived = f"{self.num_arrived:,} of {arrived} arrived by {self.end_time:,.1f} s"
        hits = "unknown: the trace has no hash ids"
        if self.has_hash_ids:
            hits = f"{self.hit_rate:.2%} of {counted(self.prompt_tokens, 'prompt token')}"
        lines = [
            f"{arrived}, {self.num_rejected:,} rejected, {counted(self.num_steps, 'step')}, "
            f"{counted(self.decoded_tokens, 'token')} decoded",
            f"pool             {counted(self.num_blocks, 'block')} of "
            f"{counted(self.block_size, 'token')}",
            f"prefix hit rate  {hits}",
            f"preemptions      {self.num_preemptions:,}; "
            f"{counted(self.recomputed_tokens, 'token')} computed again",
            f"fragmentation    {self.internal_fragmentation:.2%} of the slots in used blocks are "
            f"empty, {self.tail_per_sequence:.1f} a sequence",
            f"in time          p10 / p50 / p90 of {counted(len(s['time']), 'sample')}",
        ]
        for name, unit, values in (
            ("used", "% of the blocks", 100 * s["used_blocks"] / self.num_blocks),
            ("cached", "% of the blocks", 100 * s["cached_blocks"] / self.num_blocks),
            ("batch", "sequences in decode", s["batch"]),
            ("waiting", "requests", s["waiting"]),
            ("length", "tokens, the median of the batch", s["len_p50"]),
            *(
                (f"table {size}", f"KiB, in kernel blocks of {counted(int(size), 'token')}",
                 s[f"table_bytes_{size}"] / 1024)
                for size in self.kernel_block_sizes
            ),
        ):  # fmt: skip
            p10, p50, p90 = np.percentile(values, (10, 50, 90)) if len(values) else (0, 0, 0)
            lines.append(f"{name:16s} {p10:,.1f} / {p50:,.1f} / {p90:,.1f} {unit}")
        return "\n".join(lines)


def replay(
    source: str | PathLike[str] | Iterable[Request],
    *,
    num_blocks: int,
    block_size: int = 16,
    allocator: Allocator | None = None,
    kernel_block_sizes: Sequence[int] = (16,),
    max_batch: int = 256,
    step_seconds: float = 0.02,
    prefill_tokens_per_second: float = 50_000.0,
    sample_seconds: float = 1.0,
    at: float | None = None,
    on_step: Callable[[Allocator, Sequence[Hashable]], None] | None = None,
    progress: bool = True,
) -> Replay:
    """Serve recorded traffic: arrivals, prefix reuse, decode, preemption.

    First come, first served. A step admits what fits, then appends one token to every running
    sequence; when blocks run out, the sequence admitted last loses its own and waits at the head
    of the queue to be computed again. Nothing is admitted after that until a sequence has ended,
    or the same one would be admitted and thrown out over and over.

    Parameters
    ----------
    source : path or iterable of Request
    num_blocks, block_size : int
        Shape of the cache. See ``num_blocks_in`` for a size in bytes.
    allocator : Allocator, optional
        Yours instead of a ``BlockPool`` of that shape.
    kernel_block_sizes : sequence of int
        Divisors of ``block_size`` to account table bytes for.
    max_batch : int
        Sequences in decode at once.
    step_seconds : float
        Time of a decode step.
    prefill_tokens_per_second : float
        Rate at which prompt tokens that were not found are computed.
    sample_seconds : float
        Record the pool's state this often.
    at : float, optional
        Keep the batch of the first step that begins at this second or later and has one, and stop.
    on_step : callable, optional
        Called as ``on_step(allocator, running)`` after every step's appends.
    progress : bool
        Show a bar, on a terminal.

    Returns
    -------
    Replay

    Raises
    ------
    ValueError
        If a size, a time or a rate is not positive, or a kernel block size does not divide
        ``block_size``.

    Notes
    -----
    The trace does not say which tokens were generated, so they cannot be found by later prompts;
    they are published only when their sequence is preempted, to be found by itself.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch must be at least 1 sequence; got {max_batch}")
    for name, value in (
        ("step_seconds", step_seconds),
        ("prefill_tokens_per_second", prefill_tokens_per_second),
        ("sample_seconds", sample_seconds),
    ):
        _positive(name, value)
    if at is not None and not 0 <= at < math.inf:
        raise ValueError(f"at must be a second from 0 on; got {at}")
    requests = read_trace(source) if isinstance(source, str | PathLike) else list(source)
    pool = BlockPool(num_blocks, block_size) if allocator is None else allocator
    ratios = {k: blocks_per_allocator_block(pool.block_size, k) for k in kernel_block_sizes}
    samples = _Samples(pool, ratios)
    server = _Server(pool, requests)
    arriving = deque(range(len(requests)))
    clock, next_sample, live_batch = 0.0, 0.0, None
    hidden = None if progress else True  # None: where stderr is no terminal
    with tqdm(total=len(requests), disable=hidden, unit="request") as bar:
        while arriving or server.waiting or server.running:
            if not server.waiting and not server.running:
                clock = max(clock, requests[arriving[0]].arrival)
            while arriving and requests[arriving[0]].arrival <= clock:
                server.receive(arriving.popleft())
            num_computed = server.admit(max_batch)
            server.end_answered()
            server.decode()
            server.result.num_steps += 1
            server.result.end_time = clock
            bar.update(len(requests) - len(arriving) - server.num_unfinished - bar.n)
            if on_step is not None:
                on_step(pool, tuple(server.running))
            if clock >= next_sample:
                samples.take(clock, tuple(server.running), len(server.waiting))
                next_sample = clock + sample_seconds
            if at is not None and clock >= at and server.running:
                live_batch = _cut(pool, tuple(server.running), clock)
                break
            clock += step_seconds + num_computed / prefill_tokens_per_second
    server.result.samples = samples.arrays()
    server.result.live_batch = live_batch
    return server.result


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}")


class _Server:
    """The queue in front of a pool, and the sequences in decode. Requests go by their number."""

    def __init__(self, pool: Allocator, requests: Sequence[Request]) -> None:
        self._pool = pool
        self._requests = requests
        self._preempted: dict[int, int] = {}  # answer tokens that were there already
        self._short = False  # of memory: preempted since a sequence last ended
        self.waiting: deque[int] = deque()
        self.running: dict[int, int] = {}  # answer tokens so far
        has_hash_ids = any(request.hash_ids is not None for request in requests)
        self.result = Replay(pool.num_blocks, pool.block_size, len(requests), has_hash_ids)

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def receive(self, i: int) -> None:
        """Queue a request, or reject it if the pool could not hold it alone."""
        self.result.num_arrived += 1
        longest = self._requests[i].input_length + self._requests[i].output_length - 1
        if cdiv(longest, self._pool.block_size) > self._pool.num_blocks:
            self.result.num_rejected += 1
        else:
            self.waiting.append(i)

    def admit(self, max_batch: int) -> int:
        """Start as many requests as fit; tokens to compute before their first decode step."""
        num_computed = 0
        while self.waiting and len(self.running) < max_batch and not (self._short and self.running):
            try:
                num_computed += self._start(self.waiting[0])
            except PoolExhausted:
                break
            self.waiting.popleft()
        return num_computed

    def _start(self, i: int) -> int:
        tokens = self._tokens(i)
        length = tokens if isinstance(tokens, int) else len(tokens)
        cached = self._pool.allocate(i, tokens)[1]
        self._publish(i)
        if i in self._preempted:
            self.result.recomputed_tokens += length - cached
        else:
            self.result.prompt_tokens += length
            self.result.cached_tokens += cached
        self.running[i] = self._preempted.pop(i, 1)  # the prompt yields the first answer token
        return length - cached

    def _publish(self, i: int) -> None:
        if self._requests[i].hash_ids is not None:
            self._pool.publish(i)

    def _tokens(self, i: int) -> int | np.ndarray:
        """Prompt and what was generated, of which nothing is known but whose it is."""
        prompt, generated = self._requests[i].prompt(), self._preempted.get(i, 1) - 1
        if isinstance(prompt, int):
            return prompt + generated
        return np.concatenate([prompt, np.full(generated, -1 - i, np.int32)])

    def end_answered(self) -> None:
        """Release the sequences whose answers are complete."""
        for i in [i for i, done in self.running.items() if done >= self._requests[i].output_length]:
            del self.running[i]
            self._pool.free(i)
            self._short = False

    def decode(self) -> None:
        """Append one token to every running sequence, preempting from the end where it must be."""
        for i in list(self.running):
            token = 1 if self._requests[i].hash_ids is None else [-1 - i]
            while i in self.running:
                try:
                    self._pool.append(i, token)
                except PoolExhausted:
                    self._preempt_last()
                else:
                    self.running[i] += 1
                    self.result.decoded_tokens += 1
                    break

    def _preempt_last(self) -> None:
        i, done = self.running.popitem()
        self._preempted[i] = done
        self._publish(i)
        self._pool.free(i)
        self.waiting.appendleft(i)
        self._short = True
        self.result.num_preemptions += 1


class _Samples:
    """The pool's state at chosen steps, one list a quantity."""

    def __init__(self, pool: Allocator, ratios: dict[int, int]) -> None:
        self._pool = pool
        self._ratios = ratios
        names = ["time", "batch", "waiting", "used_blocks", "cached_blocks", "live_tokens",
                 "tail_slots", "len_p10", "len_p50", "len_p90", "len_max"]  # fmt: skip
        self._values: dict[str, list[float]] = {name: [] for name in names}
        self._values |= {f"table_bytes_{size}": [] for size in ratios}

    def take(self, clock: float, running: Sequence[Hashable], waiting: int) -> None:
        pool = self._pool
        lens = pool.seq_lens(running).astype(np.int64)
        p10, p50, p90, longest = np.percentile(lens, (10, 50, 90, 100)) if len(lens) else [0] * 4
        width = cdiv(int(longest), pool.block_size)
        tail = int((-lens % pool.block_size).sum())
        row = [clock, len(running), waiting, pool.num_used_blocks, pool.num_cached_blocks,
               int(lens.sum()), tail, p10, p50, p90, longest]  # fmt: skip
        row += [4 * len(running) * width * ratio for ratio in self._ratios.values()]
        for values, value in zip(self._values.values(), row, strict=True):
            values.append(float(value))

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.array(values) for name, values in self._values.items()}


def _cut(pool: Allocator, running: Sequence[Hashable], clock: float) -> LiveBatch:
    return LiveBatch(
        clock,
        tuple(running),
        pool.seq_lens(running),
        pool.block_table(running),
        pool.num_blocks,
        pool.block_size,
    )


# --------------------------------------------------------------------------- command line


def num_blocks_in(
    memory_bytes: float, heads: HeadConfig, num_layers: int, block_size: int, kv_bytes: int = 2
) -> int:
    """Blocks of ``block_size`` tokens that a KV cache of ``memory_bytes`` holds.

    One token costs ``num_kv_heads * (head_dim + v_head_dim) * kv_bytes`` bytes in each layer.

    Examples
    --------
    >>> num_blocks_in(2**30, presets["llama-3-8b"], num_layers=32, block_size=16)
    512
    """
    per_token = heads.num_kv_heads * (heads.head_dim + heads.value_dim) * kv_bytes * num_layers
    return int(memory_bytes // (per_token * block_size))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m cupy_decode trace``."""
    parser.add_argument("file", help="a Mooncake .jsonl or an Azure .csv trace")
    parser.add_argument(
        "--memory-gib", type=float, default=60.0, help="size of the KV cache (%(default)g)"
    )
    parser.add_argument(
        "--model", choices=sorted(presets), default="llama-3-8b", help="(%(default)s)"
    )
    parser.add_argument("--layers", type=int, help="attention layers (those of the model)")
    parser.add_argument(
        "--block-size", type=int, default=128, help="tokens per allocator block (%(default)s)"
    )
    parser.add_argument(
        "--kernel-block-size", type=int, nargs="+",
        help="account table bytes for these (those of "
        f"{', '.join(map(str, _KERNEL_BLOCK_SIZES))} that divide the block size)",
    )  # fmt: skip
    parser.add_argument(
        "--max-batch", type=int, default=256, help="sequences in decode at once (%(default)s)"
    )
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="modelled time of one step (%(default)g)"
    )
    parser.add_argument(
        "--prefill-rate", type=float, default=50_000.0,
        help="prompt tokens computed in a second, modelled (%(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--at", type=float, metavar="SECOND",
        help="cut the batch of the first step from this second on, and show every policy's plan "
        "for it",
    )  # fmt: skip
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the replay into this file (.png, .pdf or .svg)"
    )
    parser.add_argument("--cache-only", action="store_true", help="count prefix hits, nothing else")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _layers(args: argparse.Namespace) -> int:
    return preset_layers[args.model] if args.layers is None else args.layers


def _pool_size(args: argparse.Namespace, block_size: int) -> int:
    """Blocks of ``block_size`` tokens in the memory that the command was given."""
    layers = _layers(args)
    blocks = num_blocks_in(args.memory_gib * 2**30, presets[args.model], layers, block_size)
    if not 1 <= blocks <= _MOST_BLOCKS:
        raise ValueError(
            f"--memory-gib {args.memory_gib:g} holds {blocks:,} blocks of {block_size} tokens of "
            f"{layers} layers of {args.model}; the pool must have from 1 to {_MOST_BLOCKS:,}"
        )
    return blocks


def _assumptions(args: argparse.Namespace, num_blocks: int, block_size: int) -> str:
    """What the command takes for granted, in two lines."""
    heads, layers = presets[args.model], _layers(args)
    token = heads.num_kv_heads * (heads.head_dim + heads.value_dim) * 2 * layers
    return (
        f"{Path(args.file).name} on {args.model}: {counted(layers, 'layer')} of "
        f"{counted(heads.num_kv_heads, 'KV head')}, bf16, {token / 1024:,.4g} KiB a token\n"
        f"{args.memory_gib:g} GiB hold {counted(num_blocks, 'block')} of "
        f"{counted(block_size, 'token')}, {token * block_size / 2**20:,.4g} MiB each"
    )


def run(args: argparse.Namespace) -> Replay | CacheReplay:
    """Carry out ``python -m cupy_decode trace``: print the replay, draw it, return it."""
    for option in ("block_size", "layers", "max_batch"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ValueError(f"{_flag(option)} must be at least 1; got {value}")
    for option in ("memory_gib", "step_ms", "prefill_rate"):
        _positive(_flag(option), getattr(args, option))
    if args.cache_only and (args.at is not None or args.plot):
        raise ValueError("--cache-only replays nothing in time: leave out --at and --plot")
    if args.plot:
        from cupy_decode import plots

        plots.require_figure("--plot", args.plot)
    requests = read_trace(args.file)
    if args.cache_only:
        if requests[0].hash_ids is None:
            raise ValueError(
                f"--cache-only counts hash ids that come again, and {Path(args.file).name} has "
                "none; give a .jsonl trace, or leave it out"
            )
        blocks = _pool_size(args, requests[0].hash_block)
        print(_assumptions(args, blocks, requests[0].hash_block))
        found = replay_cache(requests, blocks)
        print(f"{found.num_hits:,} of {counted(found.num_blocks, 'block')} found "
              f"({found.hit_rate:.3%})")  # fmt: skip
        return found
    sizes = args.kernel_block_size or [
        size for size in _KERNEL_BLOCK_SIZES if args.block_size % size == 0
    ]
    num_blocks = _pool_size(args, args.block_size)
    print(_assumptions(args, num_blocks, args.block_size))
    print(
        f"a clock, not a measurement: {args.step_ms:g} ms a step, and 1 s for "
        f"{args.prefill_rate:,g} prompt tokens computed\n"
    )
    result = replay(
        requests,
        num_blocks=num_blocks,
        block_size=args.block_size,
        kernel_block_sizes=sizes,
        max_batch=args.max_batch,
        step_seconds=args.step_ms / 1000,
        prefill_tokens_per_second=args.prefill_rate,
        at=args.at,
    )
    print(result)
    if args.at is not None and result.live_batch is None:
        print(
            f"no sequence is in decode from {args.at:g} s on: the replay ended at "
            f"{result.end_time:.1f} s"
        )
    if args.plot:
        title = f"{Path(args.file).name} on {args.model}"
        plots.trace_replay(result, title=title).savefig(args.plot, dpi=150)
        print(f"\nFigure: {args.plot}")
    return result
