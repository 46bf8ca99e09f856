"""Six small experiments about splitting, each one command: what a split rule decides and costs.

``python -m cupy_decode experiment`` lists them. The first runs anywhere; the others time kernels,
or capture them, and need a CUDA GPU. Rows are flat dictionaries, ready for JSON lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cupy_decode import explore, fast, policies, traffic
from cupy_decode.decode import decode_attention
from cupy_decode.grid import blocks_per_row, sm_coverage, split_threshold
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import SplitPlan
from cupy_decode.policies import Device, StepShape
from cupy_decode.policies.vllm_triton import VllmTriton

Row = dict[str, Any]

#: Query tokens of the prefill row in ``mixed``.
PREFILL_TOKENS = 512
#: Lengths over which ``off`` and ``mixed`` go.
LENGTHS = (512, 2560, 8192, 32768, 131072)
#: Split counts that ``bits`` chooses from.
TUNED_COUNTS = (32, 64, 128)
#: Split counts of ``sweep``: SGLang's flag up to 16, then beyond.
SWEEP_COUNTS = (*range(1, 17), 24, 32, 48, 64, 96, 128)


def gpu_is_visible() -> bool:
    """Whether CuPy is installed and sees a device."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


def this_device() -> Device:
    """The current GPU, or an H200's 132 SMs where there is none."""
    if not gpu_is_visible():
        return Device()
    from cupy_decode.backends import cuda

    return Device(num_sms=cuda.num_sms())


# ---------------------------------------------------------------------- measuring


@dataclass
class Bench:
    """Times plans on one random problem, each plan once however many policies make it."""

    heads: HeadConfig
    seq_lens: np.ndarray

    def __post_init__(self) -> None:
        from cupy_decode import bench

        self._problem = bench.problem(self.heads, self.seq_lens)
        self._timed: dict[bytes, Any] = {}

    def time(self, plan: SplitPlan, deterministic: bool = False) -> Any:
        """Microseconds of one decode step of the readable kernels under a host plan, caches cold.

        Median and minimum. An unsplit plan is one launch, any other is two; so is any that is
        ``deterministic``.
        """
        import cupy

        from cupy_decode import bench

        key = plan.split_offsets.tobytes() + plan.split_begin[: plan.num_rows].tobytes()
        key += bytes([deterministic])
        if key not in self._timed:
            options: dict[str, Any] = dict(plan=plan.to(cupy), kernel="readable")
            options.update(deterministic=deterministic)
            copies = range(len(self._problem.k_caches))
            launches = [
                partial(decode_attention, **self._problem.arguments(copy), **options)
                for copy in copies
            ]
            self._timed[key] = bench.time_graph(launches)
        return self._timed[key]

    def time_fast(self, unit_pages: int | None = None) -> Any:
        """The fast kernel's, its own units or of at least so many pages."""
        from cupy_decode import bench
        from cupy_decode.bench.compare import FastPath

        cut = {} if unit_pages is None else dict(unit_pages=unit_pages)
        return bench.time_graph(FastPath(cut=cut)(self._problem))

    def fields(self, plan: SplitPlan) -> Row:
        """``time`` as fields of a row, with the rate at which K and V were read."""
        timing = self.time(plan)
        moved = traffic.kv_bytes(self.seq_lens, self.heads)
        return dict(
            us=round(timing.median_us, 2),
            min_us=round(timing.min_us, 2),
            kv_gb_per_s=round(moved / timing.median_us / 1e3, 1),
        )


def powers_of_two(seq_len: int, tile: int = 16) -> list[int]:
    """1, 2, 4, ... while every split of a sequence still owns a tile.

    Examples
    --------
    >>> powers_of_two(100)
    [1, 2, 4]
    """
    tiles = -(-seq_len // tile)
    return [2**i for i in range(max(tiles, 1).bit_length()) if 2**i <= max(tiles, 1)]


def measure(step: StepShape, device: Device, chosen: Iterable[str]) -> Iterator[Row]:
    """Times of a step in 1, 2, 4, ... splits, and under each policy's own plan.

    Yields
    ------
    dict
        ``policy`` (``"fixed"`` for the counts), ``num_splits`` asked for, ``active_splits``,
        ``thread_blocks``, ``sm_coverage``, ``partial_bytes``, ``us``, ``min_us``, ``kv_gb_per_s``.
    """
    timer = Bench(step.heads, step.lens.astype(np.int32))
    for count in powers_of_two(step.max_seq_len):
        plan = SplitPlan.from_num_splits(step.lens, count)
        yield _measured("fixed", count, plan, step, device, timer)
    for name in chosen:
        plan, account = policies.get(name)(step, device)
        yield _measured(name, account.num_splits, plan, step, device, timer)


def _measured(
    policy: str, num_splits: int, plan: SplitPlan, step: StepShape, device: Device, timer: Bench
) -> Row:
    blocks = plan.num_rows * blocks_per_row(step.heads)
    return dict(
        policy=policy,
        num_splits=num_splits,
        active_splits=int(plan.counts.max()),
        thread_blocks=blocks,
        sm_coverage=round(sm_coverage(blocks, device.num_sms), 4),
        partial_bytes=0 if plan.unsplit else traffic.partial_bytes(plan.num_rows, step.heads),
        **timer.fields(plan),
    )


# ---------------------------------------------------------------------- the experiments


def _layers(heads: HeadConfig) -> tuple[tuple[int, HeadConfig], ...]:
    """The whole layer, and one rank of eight where the heads divide."""
    return ((1, heads), (8, heads.shard(8))) if heads.num_q_heads % 8 == 0 else ((1, heads),)


def flip(heads: HeadConfig, seq_len: int) -> Iterator[Row]:
    """vLLM's Triton gate on both sides of its threshold."""
    device, gpu = this_device(), gpu_is_visible()
    for ranks, layer in _layers(heads):
        threshold = split_threshold(layer.num_kv_heads)
        for batch in (threshold - 1, threshold, threshold + 1):
            step = StepShape([seq_len] * batch, layer)
            _, account = VllmTriton()(step, device)
            row: Row = dict(
                tensor_parallel=ranks,
                num_kv_heads=layer.num_kv_heads,
                batch=batch,
                seq_len=seq_len,
                split=account.split,
                grid=list(account.grid),
                busy_blocks=account.busy_blocks,
                sm_coverage=round(sm_coverage(account.busy_blocks, device.num_sms), 4),
                reason=account.reason,
            )
            if gpu:
                timer = Bench(layer, step.lens.astype(np.int32))
                segments = SplitPlan.from_num_splits(step.lens, 16)
                whole = SplitPlan.from_num_splits(step.lens, 1)
                row |= dict(
                    split_us=timer.fields(segments)["us"], unsplit_us=timer.fields(whole)["us"]
                )
            yield row


def kernels_of_graph(launches: Sequence[Callable[[], Any]]) -> list[str]:
    """Names of this package's kernels in a captured CUDA graph of ``launches``, in order."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        launches[0]()  # compiles
        stream.synchronize()
        stream.begin_capture()
        kept = [launch() for launch in launches]
        graph = stream.end_capture()
    del kept
    nodes = re.split(r'(?="graph_\d+_node_\d+"\s*\[)', graph.debug_dot_str())[1:]
    found = [re.search(r"paged_split_k|reduce_splits|plan_splits", node) for node in nodes]
    return [match[0] for match in found if match]


def graph(heads: HeadConfig, seq_len: int) -> Iterator[Row]:
    """The kernels of a captured decode step of 32 layers: two a layer when split, else one."""
    import cupy

    from cupy_decode import bench

    layers, threshold = 32, split_threshold(heads.num_kv_heads)
    for batch in (1, threshold, threshold + 1, 2 * threshold):
        lens = np.full(batch, seq_len, np.int32)
        problem = bench.problem(heads, lens, copies=1)
        plan, account = VllmTriton()(StepShape(lens, heads), this_device())
        placed = plan.to(cupy)
        one = partial(decode_attention, **problem.arguments(), plan=placed)
        names = kernels_of_graph([one] * layers)
        yield dict(
            batch=batch,
            seq_len=seq_len,
            split=account.split,
            layers=layers,
            paged_split_k=names.count("paged_split_k"),
            reduce_splits=names.count("reduce_splits"),
            first_kernels=names[:4],
        )


def off(heads: HeadConfig, seq_len: int) -> Iterator[Row]:
    """One sequence with vLLM's 16 segments, and with the split forbidden by batch invariance."""
    device = this_device()
    for length in sorted({*LENGTHS, seq_len}):
        step = StepShape([length], heads)
        timer = Bench(heads, step.lens.astype(np.int32))
        split, _ = VllmTriton()(step, device)
        whole, account = VllmTriton(batch_invariant=True)(step, device)
        on, without = timer.fields(split)["us"], timer.fields(whole)["us"]
        yield dict(
            seq_len=length,
            splits=int(split.counts.max()),
            split_us=on,
            unsplit_us=without,
            speedup=round(without / on, 2),
            ms_per_token_saved=round(32 * (without - on) / 1e3, 3),
            reason=account.reason,
        )


def sweep(heads: HeadConfig, seq_len: int) -> Iterator[Row]:
    """SGLang's flag --triton-attention-num-kv-splits from 1 to 16 at batch 1, and beyond."""
    step, device = StepShape([seq_len], heads), this_device()
    timer = Bench(heads, step.lens.astype(np.int32))
    for count in SWEEP_COUNTS:
        plan, _ = policies.get("sglang-triton", static=True, max_kv_splits=count)(step, device)
        row = _measured("sglang-triton", count, plan, step, device, timer)
        yield dict(seq_len=seq_len, **row)


def mixed(heads: HeadConfig, seq_len: int) -> Iterator[Row]:
    """15 decodes beside one prefill of 512 tokens: what an all-or-nothing gate costs the decodes.

    These kernels take one query token per sequence, so only the 15 decode rows run: under the
    unsplit plan that the gate gives the whole batch, and under the split plan they would have had
    without the prefill.
    """
    device = this_device()
    for ranks, layer in _layers(heads):
        for length in sorted({*LENGTHS[1:4], seq_len}):
            batch = StepShape([length] * 16, layer, query_lens=[1] * 15 + [PREFILL_TOKENS])
            _, gated = VllmTriton()(batch, device)
            decodes = StepShape([length] * 15, layer)
            split, account = VllmTriton()(decodes, device)
            whole = SplitPlan.from_num_splits(decodes.lens, 1)
            timer = Bench(layer, decodes.lens.astype(np.int32))
            on, without = timer.fields(split)["us"], timer.fields(whole)["us"]
            yield dict(
                tensor_parallel=ranks,
                num_kv_heads=layer.num_kv_heads,
                seq_len=length,
                with_prefill=gated.split,
                without_prefill=account.split,
                split_us=on,
                unsplit_us=without,
                cost_us=round(without - on, 2),
                slower=round(without / on, 2),
                reason=gated.reason,
            )


def bits(heads: HeadConfig, seq_len: int) -> Iterator[Row]:
    """What the same bits cost one sequence: a tree of sums, and what engines do instead."""
    for length in sorted({*LENGTHS[2:], seq_len}):
        lens = np.array([length], np.int32)
        timer = Bench(heads, lens)
        tuned = [SplitPlan.from_num_splits(lens, count) for count in TUNED_COUNTS]

        def us(timing: Any) -> float:
            return round(float(timing.median_us), 2)

        def row(kernel: str, same: float, off: dict[str, Any]) -> Row:
            found: Row = dict(seq_len=length, kernel=kernel, tree_us=same)  # noqa: B023
            for name, other in off.items():
                found |= {f"{name}_us": us(other), f"{name}_won": round(us(other) / same, 2)}
            return found

        tree = min(us(timer.time(plan, deterministic=True)) for plan in tuned)
        free = min(us(timer.time(plan)) for plan in tuned)
        off = {"one_split": timer.time(SplitPlan.from_num_splits(lens, 1))}
        for size in (256, 2048):
            off[f"fixed_{size}"] = timer.time(SplitPlan.from_split_size(lens, size))
        yield {**row("readable", tree, off), "free_us": free, "over_free": round(tree / free, 3)}
        # Its bits are the tree's always, and its units whole leaf blocks: no fixed 256 keys.
        pages = 1 << (fast.cdiv(length, fast.PAGE) - 1).bit_length()
        off = {
            "one_split": timer.time_fast(pages),
            "fixed_2048": timer.time_fast(2048 // fast.PAGE),
        }
        yield row("fast", us(timer.time_fast()), off)


@dataclass(frozen=True)
class Experiment:
    """A named experiment and how to print it."""

    run: Callable[[HeadConfig, int], Iterator[Row]]
    needs_gpu: bool
    seq_len: int
    columns: tuple[str, ...]
    note: str = ""

    @property
    def help(self) -> str:
        """First line of what it does."""
        return (self.run.__doc__ or "").splitlines()[0]


EXPERIMENTS = {
    "flip": Experiment(
        flip,
        False,
        2560,
        (
            "tensor_parallel", "num_kv_heads", "batch", "split", "grid", "busy_blocks",
            "sm_coverage", "split_us", "unsplit_us", "reason",
        ),
        "Times, where a GPU is visible, are of both paths at every batch.",
    ),
    "graph": Experiment(
        graph,
        True,
        2560,
        ("batch", "split", "layers", "paged_split_k", "reduce_splits", "first_kernels"),
    ),
    "off": Experiment(
        off,
        True,
        2560,
        ("seq_len", "splits", "split_us", "unsplit_us", "speedup", "ms_per_token_saved"),
        "Saved milliseconds are those of attention in 32 layers.",
    ),
    "sweep": Experiment(
        sweep,
        True,
        32768,
        (
            "num_splits", "active_splits", "thread_blocks", "sm_coverage", "partial_bytes",
            "us", "min_us", "kv_gb_per_s",
        ),
    ),
    "mixed": Experiment(
        mixed,
        True,
        8192,
        (
            "tensor_parallel", "num_kv_heads", "seq_len", "with_prefill", "without_prefill",
            "split_us", "unsplit_us", "cost_us", "slower",
        ),
        "Only the 15 decode rows are run: these kernels take one query token per sequence. The\n"
        "prefill row's own time is not in either number.",
    ),
    "bits": Experiment(
        bits,
        True,
        8192,
        (
            "seq_len", "kernel", "tree_us", "free_us", "over_free", "one_split_us", "one_split_won",
            "fixed_256_us", "fixed_256_won", "fixed_2048_us", "fixed_2048_won",
        ),
        "tree_us: bits that depend on the sequence alone, by a tree; free_us: the same kernel and\n"
        "choice of 32, 64 or 128 splits without it. one_split, fixed: bits that depend on\n"
        "the sequence alone because nobody may choose its splits; won: their time over the tree's.",
    ),
}  # fmt: skip


#: What ``measure`` shows.
MEASURED = (
    "policy", "num_splits", "active_splits", "thread_blocks", "sm_coverage", "partial_bytes", "us",
    "min_us", "kv_gb_per_s",
)  # fmt: skip
#: What is not obvious of it.
MEASURED_LEGEND = """\
thread_blocks, sm_coverage: of this package's grid, a thread block for each plan row, KV head and
tile of 16 query heads. us, min_us: median and least of one layer's attention, both stages."""


def text(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as a table; columns that no row has are left out."""
    shown = [name for name in columns if any(name in row for row in rows)]
    return explore.align(
        [shown, *([_cell(name, row.get(name, "")) for name in shown] for row in rows)],
        left={i for i, name in enumerate(shown) if name in ("policy", "reason", "first_kernels")},
    )


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return (" x " if name == "grid" else ", ").join(map(str, value))
    if name == "sm_coverage":
        return f"{100 * value:.1f} %"
    if name == "partial_bytes":
        return explore.bytes_text(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
