"""Decode problems as values: the same cases drive the emulator and the GPU.

Pages are always permuted, inputs random, and whatever must not be read is poisoned: cache tails,
pages that no sequence owns, and table entries past a row's need.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

import cupy_decode as cd
from cupy_decode import fast, specs

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
#: Forms of the scales of a cache: one number, an array per KV head, per (sequence, KV head).
Scales = Literal["tensor", "head", "sequence"]
Layout = Literal["NHD", "HND", "interleaved", "one-row"]


_SMALL = cd.HeadConfig(8, 2, 64)


@dataclass(frozen=True)
class Case:
    """One decode step and how it is split."""

    name: str
    seq_lens: tuple[int, ...]
    heads: cd.HeadConfig = _SMALL
    block_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    layout: Layout = "NHD"
    num_splits: int | None = None
    split_size: int | None = None
    bounds: tuple[tuple[int, ...], ...] | None = None
    policy: str | None = None
    window: int | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    scale: float | None = None
    scales: Scales | None = None
    out_dtype: str | None = None
    extra_columns: int = 2
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> specs.KernelSpec:
        """The specialisation of stage 1 that the case compiles."""
        return specs.KernelSpec(
            self.dtype,
            self.kv_dtype,
            self.heads.head_dim,
            self.heads.value_dim,
            self.heads.group_size,
            soft_cap=self.logits_soft_cap is not None,
            alibi=self.alibi,
            finish=self.plan().unsplit and not self.sinks,
            out_dtype=self.out_dtype,
        )

    def plan(self) -> cd.SplitPlan:
        if self.bounds is not None:
            return cd.SplitPlan.from_bounds(self.bounds, self.seq_lens)
        if self.policy is not None:
            return cd.plan_splits(self.seq_lens, self.heads, self.policy)
        return cd.plan_splits(
            self.seq_lens, self.heads, num_splits=self.num_splits, split_size=self.split_size
        )


@dataclass(frozen=True)
class Problem:
    """Arrays of a case. ``arrays`` are the operators' positional arguments."""

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens

    def newest(self) -> list[Any]:
        """What the launch before may write where launches overlap: q and the newest pages."""
        found, block_size = [self.q], self.k_cache.shape[1]
        for row, length in zip(self.block_table, self.seq_lens.tolist(), strict=True):
            if not 0 < length <= row.size * block_size:
                continue
            for key in range((length - 1) // 16 * 16, length):
                block, slot = row[key // block_size], key % block_size
                found += [self.k_cache[block, slot], self.v_cache[block, slot]]
        return found

    def to(self, xp: Any) -> Problem:
        """The same problem with every array on a device, strides and offsets kept."""
        options = {
            name: on_device(value, xp) if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        return Problem(*(on_device(a, xp) for a in self.arrays), options)


def on_device(array: np.ndarray, xp: Any) -> Any:
    """Copy the whole buffer behind a view and rebuild the view on the copy."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    # The bytes of 8-bit floats: CuPy has no such type.
    flat = xp.asarray(base.reshape(-1, order="A").view(array.dtype))
    offset = (array.ctypes.data - base.ctypes.data) // array.itemsize
    return xp.lib.stride_tricks.as_strided(flat[offset:], array.shape, array.strides)


def _caches(
    case: Case, num_blocks: int, poison: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Two poisoned caches in the case's memory layout, as [block, slot, head, dim] views."""
    h, dk, dv = case.heads.num_kv_heads, case.heads.head_dim, case.heads.value_dim
    dtype, bs = DTYPES[case.kv_dtype or case.dtype], case.block_size
    if case.layout == "NHD":
        return tuple(np.full((num_blocks, bs, h, d), poison, dtype) for d in (dk, dv))
    if case.layout == "HND":
        caches = (np.full((num_blocks, h, bs, d), poison, dtype) for d in (dk, dv))
        return tuple(c.transpose(0, 2, 1, 3) for c in caches)
    if case.layout == "interleaved":
        both = np.full((num_blocks, 2, bs, h, dk), poison, dtype)
        return both[:, 0], both[:, 1]
    row = np.full((num_blocks, bs, h, dk + dv), poison, dtype)
    return row[..., :dk], row[..., dk:]


def build(case: Case, poison: float = float("nan"), unused_id: int = -1) -> Problem:
    """Random arrays for a case; two builds differ only in what must not be read."""
    rng = np.random.default_rng(case.seed)
    heads, bs = case.heads, case.block_size
    lens = np.array(case.seq_lens, np.int32)
    need = -(-lens // bs)
    num_blocks = max(3 * int(need.sum()), 4)
    pages = rng.permutation(num_blocks)
    finite_poison = np.isfinite(poison)
    dtype = DTYPES[case.kv_dtype or case.dtype]
    scales = dict.fromkeys("kv", np.float64(1))
    if case.scales is not None:
        shape = {"tensor": (), "head": (heads.num_kv_heads,)}.get(
            case.scales, (len(lens), heads.num_kv_heads)
        )
        scales = {name: rng.uniform(0.05, 0.5, shape) for name in "kv"}
    if finite_poison:
        poison = float(min(poison, float(ml_dtypes.finfo(dtype).max)))
    k_cache, v_cache = _caches(case, num_blocks, poison, rng)
    table = np.full((len(lens), int(need.max()) + case.extra_columns), unused_id, np.int32)
    at = 0
    for b, (length, blocks) in enumerate(zip(lens.tolist(), need.tolist(), strict=True)):
        table[b, :blocks] = pages[at : at + blocks]
        at += blocks
        for cache, factor in ((k_cache, scales["k"]), (v_cache, scales["v"])):
            rows = rng.standard_normal((length, heads.num_kv_heads, cache.shape[3]))
            rows /= (factor[b] if factor.ndim == 2 else factor * np.ones(heads.num_kv_heads))[
                :, None
            ]
            keys = np.arange(length)
            cache[table[b, keys // bs], keys % bs] = rows.astype(cache.dtype)
    shape = (len(lens), heads.num_q_heads, heads.head_dim)
    q = rng.standard_normal(shape).astype(DTYPES[case.dtype])
    options: dict[str, Any] = {}
    if case.scale is not None:
        options["scale"] = case.scale
    if case.window is not None:
        options["window"] = case.window
    if case.logits_soft_cap is not None:
        options["logits_soft_cap"] = case.logits_soft_cap
    if case.alibi:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, heads.num_q_heads).astype(np.float32)
    if case.sinks:
        options["sinks"] = rng.uniform(-2, 3, heads.num_q_heads).astype(np.float32)
    if case.scales is not None:
        for name in "kv":
            value = scales[name].astype(np.float32)
            options[f"{name}_scale"] = value if value.ndim else float(value)
    if case.kv_dtype in specs.FP8_DTYPES:
        # The bytes, as a library without 8-bit floats has them.
        options["kv_dtype"] = case.kv_dtype
        k_cache, v_cache = k_cache.view(np.uint8), v_cache.view(np.uint8)
    return Problem(q, k_cache, v_cache, table, lens, options)


_RAGGED = (0, 1, 15, 16, 17, 31, 32, 33, 100, 257)
_GQA4 = cd.HeadConfig(8, 2, 128)

#: What every backend must get right: dtypes, head sizes, groups, layouts, plans.
CORRECTNESS = [
    Case("fp32-1-split", _RAGGED, num_splits=1),
    Case("fp32-2-splits", _RAGGED, num_splits=2),
    Case("fp32-7-splits", _RAGGED, num_splits=7),
    Case("fp32-16-splits", (257, 1), num_splits=16),
    Case("fp32-64-splits", (257, 1000), num_splits=64),
    Case("fp32-split-size-256", (255, 256, 257, 513), split_size=256),
    Case("fp32-split-size-512", (513, 1024), split_size=512),
    Case("fp32-own-bounds", (70, 5, 40), bounds=((0, 1, 33, 33, 69), (0, 5), (0,))),
    Case("fp32-vllm", (300, 17), policy="vllm-triton"),
    Case("fp32-sglang", (300, 17), policy="sglang-triton"),
    Case("fp16-d128", (5, 130), _GQA4, dtype="float16", num_splits=3),
    Case("bf16-d128", (5, 130), _GQA4, dtype="bfloat16", num_splits=3),
    Case("bf16-d128-unsplit", (5, 130), _GQA4, dtype="bfloat16", num_splits=1),
    Case("fp32-d128", (5, 130), _GQA4, num_splits=2),
    Case("bf16-q-fp16-cache", (40,), dtype="bfloat16", kv_dtype="float16", num_splits=2),
    Case("fp16-d64", (33,), dtype="float16", num_splits=2),
    Case("e4m3", (5, 130), _GQA4, dtype="bfloat16", kv_dtype="e4m3", scales="tensor", num_splits=3),
    Case("e5m2-unsplit", (0, 70), dtype="float16", kv_dtype="e5m2", scales="head", num_splits=1),
    Case("e4m3-fp32-q", (5, 90), kv_dtype="e4m3", scales="sequence", num_splits=2),
    Case("bf16-out-fp32", (5, 90), dtype="bfloat16", out_dtype="float32", num_splits=3),
    Case("fp16-out-fp32-unsplit", (90,), dtype="float16", out_dtype="float32", num_splits=1),
]

#: Edges of the same surface, one per kind of trouble.
CORNERS = [
    Case("all-empty", (0, 0), num_splits=4),
    Case("all-empty-unsplit", (0, 0), num_splits=1),
    Case("one-key", (1,), num_splits=8),
    *(
        Case(f"group-{g}", (40, 3), cd.HeadConfig(2 * g, 2, 64), num_splits=2)
        for g in (1, 3, 5, 6, 7, 12, 16)
    ),
    Case("group-17-two-tiles", (40,), cd.HeadConfig(17, 1, 64), num_splits=2),
    Case("group-71-five-tiles", (20,), cd.HeadConfig(71, 1, 64), num_splits=1),
    *(
        Case(f"head-dim-{d}", (35,), cd.HeadConfig(4, 2, d), dtype="float16", num_splits=2)
        for d in (8, 80, 96, 112, 120, 256)
    ),
    *(
        Case(
            f"e4m3-head-dim-{d}",
            (35, 3),
            cd.HeadConfig(4, 2, d),
            dtype="float16",
            kv_dtype="e4m3",
            scales="head",
            num_splits=2,
        )
        for d in (8, 16, 120, 256)
    ),
    Case(
        "e5m2-mixed-widths",
        (40,),
        cd.HeadConfig(4, 2, 72, 48),
        dtype="float16",
        kv_dtype="e5m2",
        layout="HND",
        num_splits=2,
    ),
    Case(
        "e4m3-all-options",
        (5, 90),
        dtype="bfloat16",
        kv_dtype="e4m3",
        scales="sequence",
        window=40,
        logits_soft_cap=5.0,
        alibi=True,
        sinks=True,
        num_splits=3,
    ),
    Case("fp16-scales", (5, 60), dtype="float16", scales="head", num_splits=2),
    Case("fp32-head-dim-20", (35,), cd.HeadConfig(4, 2, 20), num_splits=2),
    Case("mla-576-512", (37,), cd.HeadConfig(4, 1, 576, 512), dtype="float16", num_splits=2),
    # just below and just above the 49,152 bytes from which a kernel must ask for shared memory; no
    # specialisation needs exactly as many (test_shared_memory_around_the_default_limit)
    Case("shared-49044", (40,), cd.HeadConfig(5, 1, 320), dtype="float16", num_splits=2),
    Case("shared-49160", (40,), cd.HeadConfig(2, 1, 352), dtype="float16", num_splits=2),
    Case("narrow-values", (35,), cd.HeadConfig(4, 2, 64, 32), num_splits=2),
    *(
        Case(f"block-size-{bs}", (1, bs, bs + 1, 3 * bs), block_size=bs, num_splits=3)
        for bs in (1, 2, 5, 24, 32, 64)
    ),
    Case("hnd", (5, 33, 70), layout="HND", num_splits=3),
    Case("interleaved", (5, 33, 70), layout="interleaved", num_splits=3),
    Case("k-and-v-in-one-row", (5, 33, 70), layout="one-row", num_splits=1),
    *(
        Case(f"window-{w}", (1, 16, 40, 100), window=w, num_splits=4)
        for w in (1, 15, 16, 17, 99, 100, 105)
    ),
    Case("window-unsplit", (1, 40, 100), window=9, num_splits=1),
    Case("soft-cap", (64, 30), logits_soft_cap=1.0, num_splits=4),
    Case("soft-cap-window", (64, 30), logits_soft_cap=30.0, window=3, num_splits=4),
    Case("alibi", (64, 30), alibi=True, num_splits=3),
    Case("sinks", (0, 3, 16, 80), cd.HeadConfig(6, 2, 64), sinks=True, num_splits=8),
    Case("sinks-one-split", (0, 3, 80), cd.HeadConfig(6, 2, 64), sinks=True, num_splits=1),
    Case(
        "all-score-options",
        (5, 90),
        window=40,
        logits_soft_cap=5.0,
        alibi=True,
        sinks=True,
        num_splits=3,
    ),
    Case("scores-near-minus-65536", (1, 40), scale=-1e4, num_splits=3),
    Case("table-exactly-wide", (48, 16), extra_columns=0, num_splits=2),
    Case("batch-beyond-a-block", (3,) * 150, cd.HeadConfig(1, 1, 64), num_splits=2),
]

ALL = CORRECTNESS + CORNERS


def covered_by_fast(case: Case) -> bool:
    """Whether the fast kernel takes the case, its split rule left out."""
    problem = build(case)
    out = None
    if case.out_dtype is not None:
        out = np.empty((*problem.q.shape[:2], case.heads.value_dim), DTYPES[case.out_dtype])
    kv_dtype = problem.options.get("kv_dtype")
    return fast.refusal(*problem.arrays, out=out, kv_dtype=kv_dtype) is None


#: The same cases for the fast kernel: float32 queries become float16, and no split rule is given.
FAST = [
    case
    for case in (
        replace(case, dtype="float16") if case.dtype == "float32" else case for case in ALL
    )
    if covered_by_fast(case)
]


def all_specs() -> list[specs.KernelSpec]:
    """Every specialisation of stage 1 that the cases compile, once."""
    seen: dict[specs.KernelSpec, None] = {}
    for case in ALL:
        seen.setdefault(case.spec)
    return list(seen)


def reseeded(case: Case, seed: int) -> Case:
    return replace(case, seed=seed)
