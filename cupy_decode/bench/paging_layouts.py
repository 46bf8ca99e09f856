"""What block size, memory layout and early table reads do to the readable kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import kernels_cu
from cupy_decode import calls, decode, grid, policies, traffic
from cupy_decode.bench.limits import read_bandwidth
from cupy_decode.bench.problems import problem
from cupy_decode.bench.records import environment
from cupy_decode.bench.timing import time_graph
from cupy_decode.heads import presets

#: The loop of stage 1 fetches a tile with places that were looked up a tile before ...
EARLY = """\
        k_copy.fetch(k_cache, k_stride_block, k_stride_slot, next);
        v_copy.fetch(v_cache, v_stride_block, v_stride_slot, next);
        next = find(tile + 2 * TILE + lane);
"""
#: ... and without early reads of the table, with places that it looks up there and then.
LATE = """\
        next = find(tile + TILE + lane);
        k_copy.fetch(k_cache, k_stride_block, k_stride_slot, next);
        v_copy.fetch(v_cache, v_stride_block, v_stride_slot, next);
"""


@contextmanager
def stage_1_text(old: str, new: str) -> Iterator[None]:
    """``paged_split_k`` compiles with a part of its text replaced."""
    from cupy_decode.backends import cuda

    sound = kernels_cu.source

    def source(name: str, *args: Any) -> str:
        text = sound(name, *args)
        if name != "paged_split_k":
            return text
        if text.count(old) != 1:
            raise ValueError("the text to replace must occur once in paged_split_k")
        return text.replace(old, new)

    def forget() -> None:
        cuda.raw_kernel.cache_clear()
        calls.forget()

    forget()
    with mock.patch.object(kernels_cu, "source", source):
        yield
    forget()


def paging_layouts(
    model: str = "llama-3-8b", batch: int = 16, seq_len: int = 8192, replays: int = 20
) -> list[dict[str, Any]]:
    """Times of one decode step by block size, layout and early table reads, as result rows."""
    heads = presets[model]
    lens = np.full(batch, seq_len, np.int32)
    bandwidth = read_bandwidth()
    num_bytes = traffic.kv_bytes(lens, heads, 2)
    blocks = batch * grid.blocks_per_row(heads)
    rows = []
    for early in (True, False):
        with stage_1_text(EARLY, EARLY if early else LATE):
            for block_size in (1, 4, 16, 64):
                case = problem(heads, lens, block_size=block_size, copies=2)
                for layout in ("NHD", "HND"):
                    rows.append(
                        {
                            "bench": "paging_layouts",
                            "model": model,
                            "batch": batch,
                            "seq_len": seq_len,
                            "block_size": block_size,
                            "layout": layout,
                            "early_table_reads": early,
                            **_measured(case, layout, blocks, replays, num_bytes, bandwidth),
                            **environment(),
                        }
                    )
    return rows


def _measured(
    case: Any, layout: str, blocks: int, replays: int, num_bytes: int, bandwidth: float
) -> dict[str, Any]:
    import cupy

    from cupy_decode.backends import cuda

    def view(cache: Any) -> Any:
        if layout == "NHD":
            return cache
        num_blocks, block_size, num_heads, dim = cache.shape
        turned = cache.reshape(num_blocks, num_heads, block_size, dim)  # as random as before
        return turned.transpose(0, 2, 1, 3)

    splits = grid.first_wave_splits(blocks, cuda.num_sms())
    plan = policies.plan_splits(case.seq_lens.get(), case.heads, num_splits=splits).to(cupy)
    launches = [
        partial(
            decode.decode_attention, case.q, view(k), view(v), case.block_table, case.seq_lens, plan
        )
        for k, v in zip(case.k_caches, case.v_caches, strict=True)
    ]
    timing = time_graph(launches, replays)
    rate = num_bytes / timing.median_us * 1e6
    return {
        "num_splits": splits,
        "median_us": round(timing.median_us, 2),
        "min_us": round(timing.min_us, 2),
        "gb_per_s": round(rate / 1e9, 1),
        "read_bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "fraction": round(rate / bandwidth, 4),
    }
