"""Random pairs of calls that must agree in every bit: the same sequence, and all else changed.

A ``Subject`` is what bits may depend on. A ``Setting`` is what they may not: splits and who plans
them, the rest of the batch, the place in it, pages, block size, layout, grid, stream, graph. Every
subject is run in one setting and then in others, and its output and lse are compared as bytes.

``python -m tests.same_bits --count 2000 --backend cuda`` runs it on a GPU, on several processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
from collections import Counter
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import cupy_decode as cd
from cupy_decode import backends, fast, grid, tree

from .decode_cases import DTYPES, Case, build, reseeded

#: Settings that each subject is compared in.
OTHERS = 4


@dataclass(frozen=True)
class Subject:
    """One sequence, and the options of its call."""

    kernel: str
    dtype: str
    kv_dtype: str
    heads: cd.HeadConfig
    seq_len: int
    window: int | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Setting:
    """What surrounds it; ``num_blocks`` and ``unit_blocks`` cut the fast kernel's work by hand."""

    splits: str = "1"
    spare_rows: int = 0
    num_blocks: int | None = None
    unit_blocks: int | None = None
    mates: tuple[int, ...] = ()
    position: int = 0
    page_seed: int = 0
    block_size: int = 16
    layout: str = "NHD"
    how: str = "call"


SPLITS = (
    *("1", "2", "3", "5", "7", "16", "size 64", "size 100", "size 256", "size 333"),
    *("auto", "bounds", "vllm-triton", "sglang-triton", "flashinfer-tensor-core", "fa3"),
    *("on device sglang-triton", "on device vllm-triton", "on device fa3-dynamic"),
)
#: Ways to run a call; the last of each backend are its own.
HOWS = {
    "emulator": ("call", "step", "stages", "shards", "reverse order"),
    "cuda": ("call", "step", "stages", "shards", "stream", "graph"),
}
#: What is compiled: (kernel, dtype, kv_dtype, heads, its options). The readable kernel has windows
#: and sinks at run time, the fast one compiles them.
KERNELS = (
    ("readable", "float16", "float16", cd.HeadConfig(8, 2, 64), ""),
    ("readable", "float16", "e4m3", cd.HeadConfig(8, 2, 64), ""),
    ("readable", "bfloat16", "bfloat16", cd.HeadConfig(4, 1, 128), ""),
    ("readable", "bfloat16", "e5m2", cd.HeadConfig(6, 2, 80), "alibi"),
    ("readable", "bfloat16", "bfloat16", cd.HeadConfig(16, 16, 64), "soft cap"),
    ("readable", "float32", "float32", cd.HeadConfig(17, 1, 64), "soft cap, alibi"),
    ("fast", "float16", "float16", cd.HeadConfig(8, 2, 64), ""),
    ("fast", "float16", "e4m3", cd.HeadConfig(8, 2, 64), "window, sinks"),
    # and, where compiling it is quick
    ("fast", "bfloat16", "bfloat16", cd.HeadConfig(4, 1, 128), ""),
    ("fast", "bfloat16", "bfloat16", cd.HeadConfig(16, 1, 128), "soft cap, alibi, window"),
)


def subject(rng: random.Random, backend: str, longest: int) -> Subject:
    chosen = KERNELS if backend == "cuda" else KERNELS[:8]
    kernel, dtype, kv_dtype, heads, with_ = rng.choice(chosen)
    short = rng.random() < 0.15
    seq_len = rng.randint(1, 130) if short else rng.randint(131, longest)
    window, sinks = "window" in with_, "sinks" in with_
    if kernel == "readable":
        window, sinks = rng.random() < 0.6, rng.random() < 0.4
    return Subject(
        kernel,
        dtype,
        kv_dtype,
        heads,
        seq_len,
        rng.choice((1, seq_len // 2 + 1, seq_len * 4 // 5 + 1, 10**6)) if window else None,
        2.0 if "soft cap" in with_ else None,
        "alibi" in with_,
        sinks,
        rng.randrange(2**31),
    )


def setting(rng: random.Random, who: Subject, backend: str, longest: int) -> Setting:
    mates = tuple(rng.randint(0, longest // 2) for _ in range(rng.choice((0, 0, 1, 2, 5))))
    common: dict[str, Any] = dict(
        mates=mates,
        position=rng.randint(0, len(mates)),
        page_seed=rng.randrange(1000),
        block_size=rng.choice((16, 32, 64)),
        layout=rng.choice(("NHD", "HND")),
    )
    if who.kernel == "fast":
        common["how"] = rng.choice([h for h in HOWS[backend] if h not in ("stages", "shards")])
        if common["how"] != "step" and rng.random() < 0.7:  # a launch cut by hand, or a public call
            common["num_blocks"] = rng.choice((1, 3, 17, 64))
            common["unit_blocks"] = rng.choice((None, 1, 2, 8))
    else:
        common["how"] = rng.choice(HOWS[backend])
    if who.kernel == "readable" or who.kv_dtype == "e4m3":  # other blocks compile the fast one anew
        common["block_size"] = rng.choice((16, 32, 64, 1, 24))
    return Setting(splits=rng.choice(SPLITS), spare_rows=rng.choice((0, 3)), **common)


# ---------------------------------------------------------------------- one call


@cache
def content(number: int, keys: int, who: Subject) -> tuple[np.ndarray, ...]:
    """Query, keys and values of the subject (number 0) or of one of its mates."""
    rng = np.random.default_rng([who.seed, number])
    heads, kv_dtype = who.heads, DTYPES[who.kv_dtype]
    q = 3 * rng.standard_normal((heads.num_q_heads, heads.head_dim), np.float32)
    k, v = rng.standard_normal((2, keys, heads.num_kv_heads, heads.head_dim), np.float32)
    return q.astype(DTYPES[who.dtype]), k.astype(kv_dtype), v.astype(kv_dtype)


def arrays(who: Subject, where: Setting) -> dict[str, np.ndarray]:
    """Arguments of ``decode_attention``; slots without a key hold NaN."""
    members = [(i, keys) for i, keys in enumerate(where.mates, 1)]
    members.insert(where.position, (0, who.seq_len))
    size, heads = where.block_size, who.heads
    blocks = [-(-keys // size) for _, keys in members]
    rng = np.random.default_rng([who.seed, where.page_seed])
    ids = rng.permutation(sum(blocks) + 2)
    table = np.full((len(members), max(blocks) + 1), 2**31 - 1, np.int32)
    dtype = DTYPES[who.kv_dtype]
    shape = (len(ids), heads.num_kv_heads, size, heads.head_dim)
    if where.layout == "NHD":
        shape = (len(ids), size, heads.num_kv_heads, heads.head_dim)
    caches = [np.full(shape, np.nan, np.float32).astype(dtype) for _ in range(2)]
    if where.layout == "HND":
        caches = [cache.swapaxes(1, 2) for cache in caches]
    queries, first = [], 0
    for row, (number, keys) in enumerate(members):
        own = ids[first : first + blocks[row]]
        first += blocks[row]
        table[row, : len(own)] = own
        q, k, v = content(number, keys, who)
        queries.append(q)
        j = np.arange(keys)
        for cached, new in zip(caches, (k, v), strict=True):
            cached[own[j // size], j % size] = new
    lens = np.array([keys for _, keys in members], np.int32)
    bits = np.dtype(dtype).itemsize == 1
    k_cache, v_cache = (c.view(np.uint8) if bits else c for c in caches)
    return dict(
        q=np.stack(queries), k_cache=k_cache, v_cache=v_cache, block_table=table, seq_lens=lens
    )


def options(who: Subject) -> dict[str, Any]:
    rng = np.random.default_rng(who.seed)
    n = who.heads.num_q_heads
    found: dict[str, Any] = dict(window=who.window, logits_soft_cap=who.logits_soft_cap)
    if who.alibi:
        found["alibi_slopes"] = rng.uniform(0, 0.5, n).astype(np.float32)
    if who.sinks:
        found["sinks"] = rng.standard_normal(n).astype(np.float32)
    if who.kv_dtype in ("e4m3", "e5m2"):
        found.update(kv_dtype=who.kv_dtype, k_scale=0.5, v_scale=1.5)
    return found


def plan_of(who: Subject, where: Setting, seq_lens: np.ndarray) -> cd.SplitPlan | None:
    """The plan on the host; the same ranges as the device's."""
    name = where.splits.removeprefix("on device ")
    lens = seq_lens.tolist()
    if name == "auto":
        return None
    if name == "bounds":
        rng = np.random.default_rng(where.page_seed)
        bounds = [[0, *np.sort(rng.integers(0, s + 1, 4)).tolist()] for s in lens]
        return cd.SplitPlan.from_bounds(bounds, lens)
    if name.isdigit():
        return cd.SplitPlan.from_num_splits(lens, int(name))
    if name.startswith("size"):
        return cd.SplitPlan.from_split_size(lens, int(name.split()[1]))
    return cd.plan_splits(lens, who.heads, name, page_size=where.block_size)


def most_subtrees(who: Subject, where: Setting) -> int:
    """Maximal aligned subtrees of that split of the subject which has most of them."""
    if who.kernel == "fast":
        return 1
    lens = np.insert(np.array(where.mates, np.int32), where.position, who.seq_len)
    plan = plan_of(who, where, lens) or cd.plan_splits(lens, who.heads)
    leaf = grid.leaf_keys(who.seq_len, who.heads)
    leaves = grid.cdiv(who.seq_len, leaf)
    none = tree.States(*(np.zeros(leaves, np.float32),) * 3, np.zeros((leaves, 1), np.float32))
    first = 0 if who.window is None else max(who.seq_len - who.window, 0) // leaf
    most = 0
    for b, begin, end in plan.ranges(lens):
        if b == where.position:
            begin, end = (max(min(grid.cdiv(key, leaf), leaves), first) for key in (begin, end))
            most = max(most, len(tree.fold_range(none, begin, end)))
    return most


def run(who: Subject, where: Setting, backend: str) -> tuple[bytes, bytes]:
    """Output and lse of the subject, as bytes."""
    xp: Any = np
    if backend == "cuda":
        import cupy as xp
    given = arrays(who, where)
    way = _called if where.num_blocks is None else _cut
    out, lse = way(who, where, given, backend, xp)
    row = [x[where.position] for x in (out, lse)]
    host = [x if backend == "emulator" else x.get() for x in row]
    assert not any(np.isnan(x.astype(np.float32)).any() for x in host), "NaN"
    return host[0].tobytes(), host[1].tobytes()


def _put(x: Any, xp: Any) -> Any:
    """On the device, with the memory order it has."""
    if xp is np or not isinstance(x, np.ndarray):
        return x
    swapped = x.ndim == 4 and not x.flags.c_contiguous
    return xp.asarray(x.swapaxes(1, 2)).swapaxes(1, 2) if swapped else xp.asarray(x)


def _timeless(step: Any, how: str, backend: str, xp: Any) -> Any:
    """Run a step as it is, on a stream of its own, or captured and replayed."""
    if how not in ("stream", "graph"):
        return step()
    xp.cuda.Device().synchronize()
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        result = step()
        if how == "graph":
            stream.begin_capture()
            result = step()
            captured = stream.end_capture()
            captured.launch()
        stream.synchronize()
    return result


def _called(
    who: Subject, where: Setting, given: dict[str, np.ndarray], backend: str, xp: Any
) -> tuple[Any, Any]:
    call = {name: _put(x, xp) for name, x in given.items()}
    extra = {name: _put(x, xp) for name, x in options(who).items()}
    plan = plan_of(who, where, given["seq_lens"])
    if where.splits.startswith("on device"):
        plan = cd.plan_splits_on_device(
            call["seq_lens"], who.heads, where.splits.removeprefix("on device "),
            max_seq_len=int(given["seq_lens"].max()) + where.spare_rows, page_size=where.block_size,
            backend=backend,
        )  # fmt: skip
    elif plan is not None:
        spare = plan.num_rows + where.spare_rows if where.spare_rows else None
        plan = plan.to(xp, capacity=spare)
    elif where.how not in ("call", "stream", "graph"):
        plan = cd.plan_splits(given["seq_lens"], who.heads).to(xp)
    # Of the readable kernel in float32, since 16 bits hide most of what moves.
    kernel: Any = who.kernel
    out_dtype = np.float32 if kernel == "readable" else given["q"].dtype
    out = xp.empty((*given["q"].shape[:2], who.heads.value_dim), out_dtype)

    def decode(**order: Any) -> Any:
        rule = {} if plan is None else dict(plan=plan)
        options = dict(**call, **rule, **extra, out=out, deterministic=True, kernel=kernel)
        if order:
            return cd.trace_launch(cd.decode_attention, **options, **order).result
        return cd.decode_attention(**options, backend=backend)

    if where.how == "reverse order":
        return decode(schedule="reverse")
    if where.how in ("stages", "shards"):
        assert plan is not None
        sinks = extra.pop("sinks", None)
        cut = 2 * grid.leaf_keys(int(given["seq_lens"].max()), who.heads)
        shards = [None] if where.how == "stages" else [(0, cut), (cut, 2**31 - 1)]
        parts = [
            cd.paged_split_k(
                **call, plan=plan, **extra, deterministic=True, shard=shard, backend=backend
            )
            for shard in shards
        ]
        whole = parts[0].join(*parts[1:])
        return cd.reduce_splits(whole, sinks=sinks, out=out, backend=backend)
    if where.how == "step":
        assert plan is not None
        step = cd.DecodeStep(
            who.heads, plan, given["q"].dtype, backend, kv_dtype=extra.pop("kv_dtype", None),
            out_dtype=out_dtype, deterministic=True, kernel=kernel,
        )  # fmt: skip
        return step(*call.values(), **extra)
    return _timeless(decode, where.how, backend, xp)


def _cut(
    who: Subject, where: Setting, given: dict[str, np.ndarray], backend: str, xp: Any
) -> tuple[Any, Any]:
    """The fast kernel on another grid, in other units."""
    runner = backends.runner(backend)  # type: ignore[arg-type]
    call = {name: _put(x, xp) for name, x in given.items()}
    q = call["q"]
    extra = {name: _put(x, xp) for name, x in options(who).items()}
    spec = fast.spec_of(q, call["k_cache"], block_table=call["block_table"], **extra)
    machine = fast.Machine(num_sms=8)
    space = fast.workspace(runner, spec, machine)
    unit_pages = None
    if where.unit_blocks is not None:
        pages = len(fast.visible_pages(who.seq_len, who.window))
        leaf = spec.leaf_pages(pages)
        unit_pages = where.unit_blocks * spec.readers * leaf
    out, lse = runner.empty(q.shape, q.dtype), runner.empty(q.shape[:2], np.float32)
    launch = fast.launch(
        **call, out=out, lse=lse, space=space, scale=who.heads.head_dim**-0.5, machine=machine,
        num_blocks=where.num_blocks, unit_pages=unit_pages, **extra,
    )  # fmt: skip

    def step() -> tuple[Any, Any]:
        if where.how == "reverse order":
            runner.run(launch, schedule="reverse")
        else:
            runner.run(launch)
        return out, lse

    return _timeless(step, where.how, backend, xp)


# ---------------------------------------------------------------------- the pairs


@dataclass(frozen=True)
class Group:
    """A subject and the settings it is run in; the first is compared with each of the others."""

    who: Subject
    settings: tuple[Setting, ...]


def groups(count: int, seed: int, backend: str, longest: int) -> list[Group]:
    """Groups that make ``count`` pairs."""
    rng = random.Random(seed)
    found = []
    for first in range(0, count, OTHERS):
        who = subject(rng, backend, longest)
        others = min(OTHERS, count - first)
        settings = tuple(setting(rng, who, backend, longest) for _ in range(others + 1))
        found.append(Group(who, settings))
    return found


def differences(group: Group, backend: str) -> list[str]:
    """Pairs of a group whose bits differ, in words."""
    content.cache_clear()
    first = run(group.who, group.settings[0], backend)
    return [
        f"{group.who}\n    {group.settings[0]}\n    {other}"
        for other in group.settings[1:]
        if run(group.who, other, backend) != first
    ]


def coverage(chosen: list[Group]) -> dict[str, Any]:
    """How many pairs there are of everything."""
    pairs = [(g.who, g.settings[0], s) for g in chosen for s in g.settings[1:]]
    kinds: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for who, a, b in pairs:
        kinds[who.kernel] += 1
        kinds[f"{who.dtype} queries"] += 1
        kinds[f"{who.kv_dtype} cache"] += 1
        kinds["window"] += who.window is not None
        kinds["sinks"] += who.sinks
        kinds["several subtrees of one split"] += max(most_subtrees(who, s) for s in (a, b)) > 1
        for f in fields(Setting):
            changed[f.name] += getattr(a, f.name) != getattr(b, f.name)
    return dict(pairs=len(pairs), kinds=dict(kinds), changed=dict(changed))


# ---------------------------------------------------------------------- accuracy

#: What the readable kernels' errors are compared on, with the tree and without.
ACCURACY = (
    Case("fp16", (700, 300, 64), dtype="float16", num_splits=5),
    Case("bf16", (900,), cd.HeadConfig(8, 2, 128), dtype="bfloat16", num_splits=3),
    Case("e4m3", (600, 40), dtype="float16", kv_dtype="e4m3", scales="head", num_splits=4),
    Case("fp32, window, sinks", (500, 200), sinks=True, window=333, num_splits=6),
)


def accuracy(case: Case, backend: Any, problems: int = 8) -> dict[str, float]:
    """Largest and root mean square error against float64 over some problems: of one, either of the
    two may be luckier."""
    errors: dict[str, list[np.ndarray]] = {"tree": [], "plain": []}
    for seed in range(problems):
        problem = given = build(reseeded(case, seed))
        exact, _ = cd.reference.decode_attention(*problem.arrays, **problem.options)
        if backend == "cuda":
            import cupy

            given = problem.to(cupy)
        for name, found in errors.items():
            out = cd.decode_attention(
                *given.arrays, case.plan(), kernel="readable", deterministic=name == "tree",
                backend=backend, return_lse=False, **given.options,
            )  # fmt: skip
            found.append(((out if backend == "emulator" else out.get()) - exact).ravel())
    row: dict[str, float] = {}
    for name, found in errors.items():
        error = np.concatenate(found)
        row[f"{name}_max"] = float(np.abs(error).max())
        row[f"{name}_rms"] = float(np.sqrt((error**2).mean()))
    return row


def _share(job: tuple[Group, str]) -> tuple[int, list[str]]:
    return len(job[0].settings) - 1, differences(*job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["emulator", "cuda"], default="emulator")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, help="keys of a sequence (3000; emulator: 700)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, help="append the counts to a file of JSON lines")
    arguments = parser.parse_args()
    backend = arguments.backend
    longest = arguments.longest or (3000 if backend == "cuda" else 700)
    chosen = groups(arguments.count, arguments.seed, backend, longest)
    # One process compiles a kernel, and all its subjects are there.
    jobs = sorted(chosen, key=lambda g: (g.who.kernel, g.who.dtype, g.who.kv_dtype, str(g.who)))
    wrong: list[str] = []
    with (
        multiprocessing.get_context("spawn").Pool(arguments.processes) as pool,
        tqdm(total=arguments.count, unit="pair", disable=None) as bar,
    ):
        size = max(len(jobs) // (8 * arguments.processes), 1)
        for done, found in pool.imap_unordered(_share, [(g, backend) for g in jobs], size):
            bar.update(done)
            wrong += found
    print("\n".join(wrong[:20]))
    record = dict(**coverage(chosen), differ=len(wrong), seed=arguments.seed, longest=longest)
    print(json.dumps(record, indent=1))
    if arguments.output is not None:
        from cupy_decode.bench.records import environment

        with arguments.output.open("a", encoding="utf-8") as file:
            what = environment() if backend == "cuda" else {}
            file.write(json.dumps({"kind": "pairs", "backend": backend, **what, **record}) + "\n")
            for case in ACCURACY:
                row = accuracy(case, backend)
                row = {"backend": backend, "case": str(case), **row}
                file.write(json.dumps({"kind": "accuracy", **row}) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
