"""The command ``determinism``: what changes the bits of one sequence's attention, path by path.

One sequence is watched. Each change leaves its query, keys and values as they are, so in exact
arithmetic nothing of its output could move.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from cupy_decode import backends, decode, experiments, fast, policies
from cupy_decode.backends.emulator import trace_launch
from cupy_decode.explore import align
from cupy_decode.heads import HeadConfig, presets
from cupy_decode.split_commands import append, require_folder

CHANGES = ("run", "batch mates", "position", "page order", "block size", "S", "graph")
LEGEND = """\
run          the same call again; on the emulator with threads and blocks in reverse order
batch mates  128 // num_kv_heads other sequences of a quarter of its length, instead of none
position     second of a batch of two instead of first
page order   the same keys in other blocks of the pool
block size   32 tokens instead of 16, also in what the split rule is told
S            one split, or 2 where there was 1; of the fast kernel, longer units
graph        the call captured in a CUDA graph and replayed (GPU only)
same         no bit moved on these inputs
-            does not apply: the rule leaves no S to choose, there is no GPU, the kernel refuses
time         of the sequence alone, over that of the fastest path (GPU only)

Worst ULP and share of rows are the largest over all changes, of the output and the float32 lse;
rows are those of (watched sequence, query head) with any bit changed. The readable kernels write
their output in float32 here, since rounding to 16 bits hides most changes; the fast kernel writes
float16."""

_LONGEST = 2**20
Backend = Literal["cuda", "emulator"]
Order = Literal["forward", "reverse"]
Result = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Scene:
    """One batch that holds the watched sequence, number 0.

    Attributes
    ----------
    heads : HeadConfig
    batch : tuple of (number, keys)
        A sequence's content follows from its number and the seed alone.
    seed, page_seed : int
    block_size : int
    """

    heads: HeadConfig
    batch: tuple[tuple[int, int], ...]
    seed: int = 0
    page_seed: int = 0
    block_size: int = 16

    @property
    def watched(self) -> int:
        """Where the watched sequence stands in the batch."""
        return [number for number, _ in self.batch].index(0)

    @property
    def seq_lens(self) -> list[int]:
        """Keys of each sequence."""
        return [keys for _, keys in self.batch]

    def arrays(self) -> dict[str, np.ndarray]:
        """Arguments of ``decode_attention``: float16, blocks in random order."""
        heads, size = self.heads, self.block_size
        blocks = [-(-keys // size) for keys in self.seq_lens]
        ids = np.random.default_rng([self.seed, self.page_seed]).permutation(sum(blocks))
        table = np.zeros((len(blocks), max(blocks)), np.int32)
        q = np.empty((len(blocks), heads.num_q_heads, heads.head_dim), np.float16)
        k_cache = np.zeros((len(ids), size, heads.num_kv_heads, heads.head_dim), np.float16)
        v_cache = np.zeros((*k_cache.shape[:3], heads.value_dim), np.float16)
        first = 0
        for row, (number, keys) in enumerate(self.batch):
            own = ids[first : first + blocks[row]]
            first += blocks[row]
            table[row, : len(own)] = own
            q[row], *content = _content(heads, keys, self.seed, number)
            slots = own[np.arange(keys) // size], np.arange(keys) % size
            k_cache[slots], v_cache[slots] = content
        lens = np.array(self.seq_lens, np.int32)
        return dict(q=q, k_cache=k_cache, v_cache=v_cache, block_table=table, seq_lens=lens)


@cache  # drawn once for all scenes and paths: drawing takes longer than all that follows
def _content(heads: HeadConfig, keys: int, seed: int, number: int) -> tuple[np.ndarray, ...]:
    """Query (num_q_heads, head_dim), keys and values (keys, num_kv_heads, ..) of a sequence."""
    rng = np.random.default_rng([seed, 1, number])
    shapes = (
        (heads.num_q_heads, heads.head_dim),
        (keys, heads.num_kv_heads, heads.head_dim),
        (keys, heads.num_kv_heads, heads.value_dim),
    )
    return tuple(rng.standard_normal(shape, np.float32).astype(np.float16) for shape in shapes)


#: A step ready to run, given the order of threads (the emulator's); returns out and lse.
Step = Callable[[Order], tuple[Any, Any]]


@dataclass(frozen=True)
class Path:
    """A kernel and the rule that cuts its work.

    Attributes
    ----------
    name : str
    policy : str or Policy, optional
        Of the readable kernels; None: the fast kernel, which plans on the device.
    has_s : bool
        Whether there is a number of splits to choose.
    tree : bool
        Whether the readable kernels add along the tree (``deterministic=True``).
    """

    name: str
    policy: Any = None
    has_s: bool = True
    tree: bool = False

    @property
    def promises(self) -> bool:
        """Whether no change may move a bit."""
        return self.policy is None or self.tree

    def refusal(self, scene: Scene) -> str | None:
        """Why this kernel does not take such arrays, if it does not."""
        if self.policy is not None:
            return None
        return fast.refusal(*scene.arrays().values())

    def prepare(self, scene: Scene, backend: Backend, other_s: bool = False) -> Step:
        """A step on a scene's arrays; everything but the launches happens here."""
        arrays = _placed(scene.arrays(), backend)
        prepare = self._fast if self.policy is None else self._readable
        return prepare(scene, arrays, backend, other_s)

    def _readable(self, scene: Scene, arrays: Any, backend: Backend, other_s: bool) -> Step:
        lens, num_sms = scene.seq_lens, _num_sms(backend)
        size = scene.block_size
        plan = policies.plan_splits(lens, scene.heads, self.policy, num_sms, page_size=size)
        if other_s:
            count = 1 if plan.counts[scene.watched] > 1 else 2
            plan = policies.plan_splits(lens, scene.heads, num_splits=count)
        if backend == "cuda":
            import cupy

            plan = plan.to(cupy)
        shape = (*arrays["q"].shape[:2], scene.heads.value_dim)

        def step(order: Order) -> tuple[Any, Any]:
            out = backends.runner(backend).empty(shape, np.float32)
            call = dict(**arrays, plan=plan, out=out, kernel="readable", deterministic=self.tree)
            if order == "forward":
                return decode.decode_attention(**call, backend=backend)
            return trace_launch(decode.decode_attention, **call, schedule=order).result

        return step

    def _fast(self, scene: Scene, arrays: Any, backend: Backend, other_s: bool) -> Step:
        runner = backends.runner(backend)
        q = arrays["q"]
        spec = fast.spec_of(q, arrays["k_cache"], block_table=arrays["block_table"])
        machine = fast.Machine.of(runner) if backend == "cuda" else fast.Machine()
        space = fast.workspace(runner, spec, machine)
        unit_pages = None
        if other_s:
            pages = -(-scene.seq_lens[scene.watched] // fast.PAGE)
            leaf_block = spec.readers * spec.leaf_pages(pages)
            unit_pages = 2 * leaf_block

        def step(order: Order) -> tuple[Any, Any]:
            out, lse = runner.empty(q.shape, q.dtype), runner.empty(q.shape[:2], np.float32)
            scale = scene.heads.head_dim**-0.5
            results = dict(out=out, lse=lse, scale=scale, space=space, machine=machine)
            if backend == "cuda" and unit_pages is None:
                fast.run(runner, **arrays, **results)
            elif backend == "cuda":
                runner.run(fast.launch(**arrays, **results, unit_pages=unit_pages))
            else:
                launch = fast.launch(**arrays, **results, unit_pages=unit_pages)
                runner.run(launch, schedule=order)
            return out, lse

        return step


#: What is compared: the fast kernel, and the readable ones under plans of the engines' rules.
PATHS = (
    Path("fast kernel"),
    Path("readable, along the tree", "sglang-triton", tree=True),
    *(
        Path(name, name)
        for name in ("vllm-triton", "sglang-triton", "flashinfer-tensor-core", "fa3")
    ),
    Path("split size 256", policies.split_size(256), has_s=False),
    Path("split size 2048", policies.split_size(2048), has_s=False),
    Path("one split", policies.fixed(1), has_s=False),
)


@dataclass
class Row:
    """What one path showed.

    Attributes
    ----------
    path : str
    changes : dict of str to (bool or None)
        Whether a change moved bits of the watched sequence; None where it does not apply.
    worst_ulp : dict of str to int
        By change that applies.
    rows_changed : dict of str to float
        Share of the watched rows, by change that applies.
    us : float or None
        Microseconds of the watched sequence alone: graph replay, cold L2. None without a GPU.
    note : str
    """

    path: str
    changes: dict[str, bool | None] = field(default_factory=lambda: dict.fromkeys(CHANGES))
    worst_ulp: dict[str, int] = field(default_factory=dict)
    rows_changed: dict[str, float] = field(default_factory=dict)
    us: float | None = None
    note: str = ""

    def record(self, change: str, before: Result, after: Result) -> None:
        """Compare outputs (heads, v_head_dim) and lse (heads,)."""
        steps = np.concatenate(
            [ulps(b, a).reshape(len(b), -1) for b, a in zip(before, after, strict=True)], axis=1
        )
        self.changes[change] = bool(steps.any())
        self.worst_ulp[change] = int(steps.max())
        self.rows_changed[change] = float(steps.any(axis=1).mean())


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Steps from each float of ``a`` to that of ``b``, int64; from -0.0 to 0.0 it is one.

    Parameters
    ----------
    a, b : float16 or float32 arrays of one shape and dtype, without NaN

    Raises
    ------
    ValueError
        If there is a NaN.
    """
    if np.isnan(a).any() or np.isnan(b).any():
        raise ValueError("a result holds NaN; the bits of one are not compared")
    signed = np.dtype(f"i{a.itemsize}")

    def place(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x).view(signed).astype(np.int64)
        return np.where(bits < 0, -(bits - np.iinfo(signed).min) - 1, bits)

    return np.abs(place(a) - place(b))


def _num_sms(backend: Backend) -> int:
    return int(backends.runner("cuda").num_sms()) if backend == "cuda" else 132


def _placed(arrays: dict[str, np.ndarray], backend: Backend) -> dict[str, Any]:
    if backend == "emulator":
        return dict(arrays)
    import cupy

    return {name: cupy.asarray(array) for name, array in arrays.items()}


def _watched(scene: Scene, result: tuple[Any, Any]) -> Result:
    out, lse = (x if isinstance(x, np.ndarray) else x.get() for x in result)
    return out[scene.watched].copy(), lse[scene.watched].copy()


def _replayed(step: Step) -> tuple[Any, Any]:
    """The results of a captured graph, after one replay."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        step("forward")  # compiles, and leaves memory in the pool
        stream.begin_capture()
        result = step("forward")
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    return result


def examine(path: Path, heads: HeadConfig, seq_len: int, seed: int, backend: Backend) -> Row:
    """Apply every change to one path.

    Parameters
    ----------
    path : Path
    heads : HeadConfig
    seq_len : int
        Keys of the watched sequence, at least 1.
    seed : int
    backend : {"cuda", "emulator"}
    """
    row = Row(path.name)
    alone = Scene(heads, ((0, seq_len),), seed)
    refused = path.refusal(alone)
    if refused:
        row.note = refused
        return row
    short = max(seq_len // 4, 1)
    mates = tuple((i, short) for i in range(1, max(128 // heads.num_kv_heads, 1) + 1))
    first = replace(alone, batch=((0, seq_len), mates[0]))
    second = replace(alone, batch=(mates[0], (0, seq_len)))

    def run(scene: Scene, **other: bool) -> Result:
        return _watched(scene, path.prepare(scene, backend, **other)("forward"))

    step = path.prepare(alone, backend)
    before = _watched(alone, step("forward"))
    row.record(
        "run", before, _watched(alone, step("reverse" if backend == "emulator" else "forward"))
    )
    row.record("batch mates", before, run(replace(alone, batch=((0, seq_len), *mates))))
    row.record("position", run(first), run(second))
    row.record("page order", before, run(replace(alone, page_seed=1)))
    row.record("block size", before, run(replace(alone, block_size=32)))
    if path.has_s:
        row.record("S", before, run(alone, other_s=True))
    if backend == "cuda":
        from cupy_decode.bench.timing import time_us

        row.record("graph", before, _watched(alone, _replayed(step)))
        row.us = round(time_us(partial(step, "forward")), 2)
    return row


def text(rows: Sequence[Row]) -> str:
    """The table."""
    words = {None: "-", False: "same", True: "CHANGES"}
    lines: list[tuple[str, ...]] = [("path", *CHANGES, "worst ULP", "rows", "time")]
    fastest = min((row.us for row in rows if row.us is not None), default=1.0)
    for row in rows:
        largest = ("-", "-")
        time = "-" if row.us is None else f"{row.us / fastest:.2f}"
        if row.worst_ulp:
            share = max(row.rows_changed.values())
            largest = (f"{max(row.worst_ulp.values()):,}", f"{100 * share:.0f} %")
        lines.append((row.path, *(words[row.changes[c]] for c in CHANGES), *largest, time))
    notes = [f"{row.path}: {row.note}" for row in rows if row.note]
    return "\n".join([align(lines, left={0}), *notes])


def add_parser(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    command = commands.add_parser(
        "determinism",
        help="what changes the last bits of one sequence's output",
        description="What changes the last bits of one sequence's output, under the split rules of "
        "engines and along the tree: on a GPU, or without one on the CPU emulator (half a minute).",
    )
    command.set_defaults(run=_run)
    command.add_argument(
        "--backend",
        choices=["auto", "emulator"],
        default="auto",
        help="the emulator also where there is a GPU",
    )
    command.add_argument(
        "--model", choices=sorted(presets), default="llama-3.2-1b", help="heads (%(default)s)"
    )
    command.add_argument(
        "--seq-len", type=int, help="keys of the watched sequence (8192; on the emulator 528)"
    )
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--jsonl", metavar="FILE", help="append the rows to a file")


def _run(arguments: argparse.Namespace) -> int:
    gpu = arguments.backend == "auto" and experiments.gpu_is_visible()
    backend: Backend = "cuda" if gpu else "emulator"
    seq_len = arguments.seq_len
    if seq_len is None:
        seq_len = 8192 if gpu else 528
    if not 1 <= seq_len <= _LONGEST:
        raise ValueError(f"--seq-len must be from 1 to {_LONGEST}; got {seq_len}")
    if arguments.seed < 0:
        raise ValueError(f"--seed must be at least 0; got {arguments.seed}")
    if arguments.jsonl:
        require_folder("--jsonl", arguments.jsonl)
    heads = presets[arguments.model]
    rows = []
    with tqdm(PATHS, disable=arguments.json, leave=False, unit="path") as paths:
        for path in paths:
            paths.set_description(path.name)  # each takes seconds, also where nobody looks on
            rows.append(examine(path, heads, seq_len, arguments.seed, backend))
    broken = [
        row.path
        for path, row in zip(PATHS, rows, strict=True)
        if path.promises and any(row.changes.values())
    ]
    ok = not broken
    what = dict(model=arguments.model, seq_len=seq_len, seed=arguments.seed, backend=backend)
    if arguments.jsonl:
        append(arguments.jsonl, ({**what, **vars(row)} for row in rows))
    if arguments.json:
        print(json.dumps({**what, "ok": ok, "rows": [vars(row) for row in rows]}))
    else:
        where = "on the GPU" if gpu else "the kernels run on the CPU emulator"
        print(f"{arguments.model}, {seq_len} keys, float16, {where}\n\n{text(rows)}\n\n{LEGEND}")
        for name in broken:
            print(f"\nTHE BITS OF THE PATH {name!r} CHANGED; they must not.")
    return 0 if ok else 1
