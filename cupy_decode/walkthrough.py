"""The guided run: one decode step from the allocator to a checked result, with its numbers.

Two scenes by default: a single sequence, where an unsplit grid leaves the GPU idle, and a ragged
batch of chat-like requests.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from cupy_decode import checks, decode, grid, policies, reference, tolerance, traffic
from cupy_decode.heads import HeadConfig
from cupy_decode.paging import BlockPool, choose_kernel_block_size, map_to_kernel_blocks

#: ln of the chat-like lengths: mean and standard deviation of ln(ContextTokens) in the Azure 2023
#: conversation trace (19,366 requests, 2 to 14,050 tokens).
CHAT_LOG_MEAN, CHAT_LOG_DEVIATION = 6.633, 0.985
CHAT_SHORTEST, CHAT_LONGEST = 2, 14_050

KV_DTYPE = np.dtype(ml_dtypes.bfloat16)


def chat_lengths(batch: int, seed: int) -> np.ndarray:
    """Chat-like context lengths: log-normal, median 760 tokens, clipped to 2..14,050."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(CHAT_LOG_MEAN, CHAT_LOG_DEVIATION, batch))
    return np.clip(lengths.round(), CHAT_SHORTEST, CHAT_LONGEST).astype(np.int32)


def read_lengths(path: str, limit: int) -> np.ndarray:
    """The first ``limit`` lengths of a file: a CSV with a ContextTokens column, or one a line.

    Raises
    ------
    ValueError
        If the file holds no length, or a line is not a whole number.
    """
    text = Path(path).read_text(encoding="utf-8-sig")
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and "ContextTokens" in lines[0]:
        found = [row["ContextTokens"] for row in csv.DictReader(lines)]
    else:
        found = lines
    try:
        lengths = np.array([int(x) for x in found[:limit]], np.int64)
    except ValueError as error:
        raise ValueError(
            f"{path} must hold one length a line, or a CSV column ContextTokens; {error}"
        ) from None
    if lengths.size == 0:
        raise ValueError(f"{path} holds no lengths")
    if lengths.min() < 0 or lengths.max() > 2**20:
        raise ValueError(f"{path} must hold lengths from 0 to {2**20}; got {lengths.max()}")
    return lengths.astype(np.int32)


@dataclass(frozen=True)
class Step:
    """One decode step's arrays, in host memory.

    ``k_blocks`` and ``v_blocks`` are in allocator blocks, ``allocator_table`` names those; the
    kernels see the same bytes cut to ``kernel_block_size`` through ``block_table``.
    """

    heads: HeadConfig
    seq_lens: np.ndarray
    q: np.ndarray
    k_blocks: np.ndarray
    v_blocks: np.ndarray
    allocator_table: np.ndarray
    block_table: np.ndarray
    kernel_block_size: int

    def _cut(self, cache: np.ndarray) -> np.ndarray:
        return cache.reshape(-1, self.kernel_block_size, *cache.shape[2:])

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any, Any]:
        """Positional arguments of ``decode_attention``."""
        return (
            self.q,
            self._cut(self.k_blocks),
            self._cut(self.v_blocks),
            self.block_table,
            self.seq_lens,
        )


def build_step(
    heads: HeadConfig,
    seq_lens: np.ndarray,
    block_size: int,
    kernel_block_size: int,
    seed: int,
) -> Step:
    """Allocate the sequences from a shuffled, fragmented pool and fill their blocks with noise.

    The pool is twice as large as the batch needs and has already handed out and taken back blocks,
    so a sequence's blocks are scattered. Blocks that belong to nobody hold NaN.
    """
    rng = np.random.default_rng(seed)
    need = int((-(-seq_lens.astype(np.int64) // block_size)).sum())
    pool = BlockPool(2 * max(need, 4), block_size, seed=seed)
    for i in range(4):  # earlier tenants of a block or more, two of which leave holes
        pool.allocate(f"earlier-{i}", max(need // 8, 1) * block_size)
    pool.free("earlier-0")
    pool.free("earlier-2")
    ids = list(range(len(seq_lens)))
    for b in rng.permutation(len(seq_lens)).tolist():
        pool.allocate(b, int(seq_lens[b]))
    table = pool.block_table(ids)
    shape = (pool.num_blocks, block_size, heads.num_kv_heads)
    k_blocks = np.full((*shape, heads.head_dim), np.nan, KV_DTYPE)
    v_blocks = np.full((*shape, heads.value_dim), np.nan, KV_DTYPE)
    for b in ids:
        keys = np.arange(seq_lens[b])
        where = table[b, keys // block_size], keys % block_size
        for cache in (k_blocks, v_blocks):
            rows = rng.standard_normal((len(keys), *cache.shape[2:]), np.float32)
            cache[where] = rows.astype(KV_DTYPE)
    q = rng.standard_normal((len(ids), heads.num_q_heads, heads.head_dim), np.float32)
    kernel_table = map_to_kernel_blocks(table, block_size, kernel_block_size)
    return Step(
        heads,
        seq_lens,
        q.astype(KV_DTYPE),
        k_blocks,
        v_blocks,
        table,
        kernel_table,
        kernel_block_size,
    )


def dense_result(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Dense float64 attention over keys gathered through the *allocator's* table.

    It knows nothing of kernel blocks, so a wrong mapping cannot pass the check.
    """
    return reference.decode_attention(
        step.q, step.k_blocks, step.v_blocks, step.allocator_table, step.seq_lens
    )


def _policy_rows(
    step: Step, policy: str, device: policies.Device, max_segments_shown: int
) -> dict[str, Any]:
    """Numbers of one policy on one step that need no kernel."""
    heads, lens = step.heads, step.seq_lens
    plan, account = policies.explain(
        lens, heads, policy, device, page_size=step.kernel_block_size, q_bytes=2, kv_bytes=2
    )
    unsplit = grid.blocks_2d(len(lens), len(lens), heads)
    ours = plan.num_rows * grid.blocks_per_row(heads)
    active = sum(begin < end for _, begin, end in plan.ranges(lens))
    split_traffic = 0 if plan.unsplit else active
    longest = int(lens.argmax())
    segments = [(begin, end) for b, begin, end in plan.ranges(lens) if b == longest]
    return {
        "policy": policy,
        "split": not plan.unsplit,
        "reason": account.reason,
        "engine_grid": account.grid,
        "engine_blocks": account.thread_blocks,
        "engine_coverage_percent": 100 * grid.sm_coverage(account.thread_blocks, device.num_sms),
        "unsplit_blocks": unsplit,
        "unsplit_coverage_percent": 100 * grid.sm_coverage(unsplit, device.num_sms),
        "first_wave_splits": grid.first_wave_splits(unsplit, device.num_sms),
        "rows": plan.num_rows,
        "active_rows": active,
        "our_blocks": ours,
        "our_coverage_percent": 100 * grid.sm_coverage(ours, device.num_sms),
        "segments_of_longest": segments[:max_segments_shown],
        "num_segments_of_longest": len(segments),
        "kv_bytes": traffic.kv_bytes(lens, heads),
        "partial_bytes_allocated": account.scratch_bytes,
        "partial_round_trip_active": traffic.partial_round_trip_bytes(split_traffic, heads),
        "block_table_bytes": traffic.block_table_bytes(lens, step.kernel_block_size),
        "intensity": traffic.intensity(lens, heads),
        "intensity_with_partials": traffic.intensity(lens, heads, rows=split_traffic),
        "ridge": traffic.ridge_point(),
        "plan": plan,
    }


def _execute(
    step: Step,
    plan: Any,
    backend: decode.Backend,
    ref: tuple[np.ndarray, np.ndarray],
    allowed: Any,
) -> dict[str, Any]:
    """Run both stages on a backend and compare with the dense result."""
    arrays = step.arrays
    if backend == "cuda":
        from cupy_decode.backends import cuda

        q, k_cache, v_cache, table, lens = (cuda.asarray(a) for a in arrays)
        arrays = q, k_cache, v_cache, table, lens
        plan = plan.to(cuda)
    out, lse = decode.decode_attention(*arrays, plan, backend=backend)
    result: dict[str, Any] = {}
    if backend == "cuda":
        from cupy_decode import bench

        result["microseconds"] = bench.time_us(lambda: decode.decode_attention(*arrays, plan))
        out, lse = out.get(), lse.get()
    result["max_error"] = float(np.abs(out.astype(np.float64) - ref[0]).max(initial=0.0))
    result["allowed_error"] = allowed.out_max
    try:
        tolerance.assert_close(out, lse, *ref, allowed)
        result["ok"], result["fault"] = True, ""
    except AssertionError as error:
        result["ok"], result["fault"] = False, str(error)
    return result


def run_scene(
    name: str,
    heads: HeadConfig,
    seq_lens: np.ndarray,
    policy_names: Sequence[str],
    *,
    block_size: int,
    kernel_block_size: int,
    backend: decode.Backend,
    device: policies.Device,
    seed: int,
    read_bandwidth: float | None,
    progress: bool,
) -> dict[str, Any]:
    """One scene: build the step, run each policy, check and time it."""
    steps = ["allocate", "float64 reference", *policy_names]
    bar = tqdm(total=len(steps), desc=name, disable=not progress, leave=False)

    def tick(label: str) -> None:
        bar.set_postfix_str(label)
        bar.update()

    step = build_step(heads, seq_lens, block_size, kernel_block_size, seed)
    tick("allocated")
    ref = dense_result(step)
    allowed = tolerance.bound(*step.arrays, *ref)
    tick("reference")
    rows = []
    for policy in policy_names:
        row = _policy_rows(step, policy, device, max_segments_shown=4)
        row |= _execute(step, row.pop("plan"), backend, ref, allowed)
        if read_bandwidth and "microseconds" in row:
            row["read_fraction"] = row["kv_bytes"] / (row["microseconds"] * 1e-6) / read_bandwidth
        rows.append(row)
        tick(policy)
    bar.close()
    return {
        "scene": name,
        "batch": len(seq_lens),
        "tokens": int(seq_lens.sum()),
        "shortest": int(seq_lens.min()),
        "longest": int(seq_lens.max()),
        "block_size": block_size,
        "kernel_block_size": kernel_block_size,
        "allocator_table_columns": step.allocator_table.shape[1],
        "kernel_table_columns": step.block_table.shape[1],
        "policies": rows,
    }


# ---------------------------------------------------------------------- text


def _bytes(n: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table with a header; all columns but the first are right-aligned."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells)


def render(scene: dict[str, Any]) -> str:
    """A scene as readable tables."""
    rows = scene["policies"]
    first = rows[0]
    lengths = (
        f"s = {scene['longest']:,}"
        if scene["shortest"] == scene["longest"]
        else f"s = {scene['shortest']:,} to {scene['longest']:,}, {scene['tokens']:,} keys in all"
    )
    lines = [
        f"{scene['scene']}: batch {scene['batch']}, {lengths}",
        f"  blocks of {scene['block_size']} tokens from a shuffled pool, cut to "
        f"{scene['kernel_block_size']} for the kernel: table {scene['allocator_table_columns']} -> "
        f"{scene['kernel_table_columns']} columns, {_bytes(first['block_table_bytes'])} in use",
        f"  K and V to read: {_bytes(first['kv_bytes'])}; unsplit grid {first['unsplit_blocks']} "
        f"thread blocks, {first['unsplit_coverage_percent']:.1f} % of the SMs; "
        f"S* = {first['first_wave_splits']} fills the first wave",
        "",
        *table(
            ["policy", "engine grid", "blocks", "SMs", "our blocks", "rows", "active"],
            [
                [
                    r["policy"],
                    "x".join(map(str, r["engine_grid"])),
                    str(r["engine_blocks"]),
                    f"{r['engine_coverage_percent']:.0f} %",
                    str(r["our_blocks"]),
                    str(r["rows"]),
                    str(r["active_rows"]),
                ]
                for r in rows
            ],
        ),
        "",
        *table(
            ["policy", "scratch", "round trip", "FLOP/B", "with partials", "ridge"],
            [
                [
                    r["policy"],
                    _bytes(r["partial_bytes_allocated"]),
                    _bytes(r["partial_round_trip_active"]),
                    f"{r['intensity']:.2f}",
                    f"{r['intensity_with_partials']:.2f}",
                    f"{r['ridge']:.0f}",
                ]
                for r in rows
            ],
        ),
        "",
    ]
    timed = "microseconds" in first
    header = ["policy", "max error", "allowed", "check"]
    if timed:
        header += ["us", "GB/s", "of read limit"]
    body = []
    for r in rows:
        row = [
            r["policy"],
            f"{r['max_error']:.2e}",
            f"{r['allowed_error']:.2e}",
            "ok" if r["ok"] else "WRONG",
        ]
        if timed:
            rate = r["kv_bytes"] / r["microseconds"] / 1e3
            row += [f"{r['microseconds']:.1f}", f"{rate:.0f}", f"{100 * r['read_fraction']:.0f} %"]
        body.append(row)
    lines += table(header, body)
    for r in rows:
        shown = ", ".join(f"[{a}, {b})" for a, b in r["segments_of_longest"])
        more = r["num_segments_of_longest"] - len(r["segments_of_longest"])
        lines.append(
            f"  {r['policy']}: {r['reason']}; longest sequence: {shown}"
            + (f" and {more} more" if more else "")
        )
        if not r["ok"]:
            lines.append(f"    {r['fault']}")
    return "\n".join(lines)


def choose_backend(backend: decode.Backend) -> tuple[decode.Backend, str]:
    """The backend to run on, and one line that says why."""
    if backend != "auto":
        return backend, f"backend: {backend} (asked for)"
    try:
        import cupy
    except ImportError:
        return "reference", (
            "backend: NumPy reference, since CuPy is not installed; on a machine with a GPU, "
            "install the extra cuda13 or cuda12"
        )
    if not cupy.cuda.is_available():
        return "reference", "backend: NumPy reference, since CuPy sees no CUDA device"
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return "cuda", f"backend: CUDA kernels on {name}"


def kernel_blocks_of(block_size: int, kernel_block_size: int | None) -> int:
    """The kernel's block size: the given one if it divides, else the largest supported one."""
    if kernel_block_size is None:
        return choose_kernel_block_size(block_size, [16])
    checks.whole("kernel_block_size", kernel_block_size, 1)
    return choose_kernel_block_size(block_size, [kernel_block_size])
