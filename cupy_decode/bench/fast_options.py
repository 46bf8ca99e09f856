"""What the options of the fast kernel cost: one long step, plain and with each of them.

``python -m cupy_decode.bench.fast_options FILE`` measures on the current GPU and writes the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupy_decode import fast
from cupy_decode.bench.problems import Problem, problem
from cupy_decode.bench.records import environment, file_argument, write_jsonl
from cupy_decode.bench.timing import Timing, time_graph
from cupy_decode.heads import presets


def in_smaller_blocks(p: Problem, block_size: int) -> dict[str, Any]:
    """The keys of a problem where they are, in blocks that are a part of its own."""
    import cupy

    ratio = p.k_caches[0].shape[1] // block_size
    table = p.block_table[:, :, None].astype(np.int64) * ratio + cupy.arange(ratio)
    caches = {
        name: cache.reshape(-1, block_size, *cache.shape[2:])
        for name, cache in (("k_cache", p.k_caches[0]), ("v_cache", p.v_caches[0]))
    }
    most = np.iinfo(np.int32).max  # of the columns that nobody looks at
    return dict(
        p.arguments(),
        **caches,
        block_table=cupy.minimum(table, most).astype(np.int32).reshape(len(table), -1),
    )


def fast_options(
    model: str = "llama-3-8b", batch: int = 64, seq_len: int = 8192, replays: int = 15
) -> list[dict[str, Any]]:
    """Times of one decode step by option, as result rows; the first is the plain one.

    Returns
    -------
    list of dict
        ``option``, ``median_us``, ``min_us``, ``over_plain`` and the environment.
    """
    import cupy

    from cupy_decode.backends import cuda

    heads = presets[model]
    p = problem(heads, np.full(batch, seq_len, np.int32), copies=1)
    machine = fast.Machine.of(cuda)
    slopes = cupy.full(heads.num_q_heads, 0.01, np.float32)
    scores: dict[str, Any] = dict(logits_soft_cap=30.0, alibi_slopes=slopes, sinks=slopes)
    plain = p.arguments()
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "none": (plain, {}),
        "soft cap, ALiBi and sinks": (plain, scores),
        **{f"window of {w:,}": (plain, {"window": w}) for w in (4096, 1024)},
        **{f"block size {b}": (in_smaller_blocks(p, b), {}) for b in (1, 8)},
    }

    def timed(arrays: dict[str, Any], options: dict[str, Any]) -> Timing:
        out, lse = cupy.empty_like(p.q), cupy.empty(p.q.shape[:2], np.float32)
        space = fast.workspace(cuda, fast.spec_of(p.q, arrays["k_cache"]), machine)
        launch: Callable[[], Any] = partial(
            cuda.run,
            fast.launch(
                **arrays,
                out=out,
                lse=lse,
                space=space,
                scale=heads.head_dim**-0.5,
                machine=machine,
                **options,
            ),
        )
        return time_graph([launch], replays)

    times = {name: timed(*case) for name, case in cases.items()}
    return [
        {
            "bench": "fast_options",
            "model": model,
            "batch": batch,
            "seq_len": seq_len,
            "option": name,
            "median_us": round(time.median_us, 2),
            "min_us": round(time.min_us, 2),
            "over_plain": round(time.median_us / times["none"].median_us, 4),
            **environment(),
        }
        for name, time in times.items()
    ]


def main() -> None:
    """Measure, write and print."""
    path = file_argument(__doc__)
    rows = fast_options()
    write_jsonl(path, rows)
    for row in rows:
        print(f"{row['option']:28}{row['median_us']:9.1f} µs {row['over_plain']:8.3f}")


if __name__ == "__main__":
    main()
