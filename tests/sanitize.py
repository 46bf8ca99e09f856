"""A representative slice of all kernels, for compute-sanitizer.

``compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.sanitize`` must find
nothing, and so must ``initcheck`` and, with ``--arrivals-wait``, ``racecheck``; with ``--plant
TOOL`` a fault of the kind that the tool looks for is put into a kernel first, and it must be found.
CuPy's memory pool is off, so that every array is an allocation of its own.
"""

from __future__ import annotations

import argparse
from unittest import mock

import numpy as np

import cupy_decode as cd
import kernels_cu
from cupy_decode import backends

from . import sweep

#: Kernel, its text, and the text that makes it wrong, for each tool.
FAULTS = {
    "memcheck": ("reduce_splits", "out[d * out_stride_dim] =", "out[(d + 8) * out_stride_dim] ="),
    "initcheck": (
        "reduce_splits",
        "const int last = min(split_offsets[sequence + 1], capacity);",
        "const int last = capacity;",
    ),
    "racecheck": (
        "paged_split_k",
        "__syncthreads();                                 // tile (and, at first, q) is in place",
        "",
    ),
}

#: Where warps come to a named barrier without waiting there, and the same with a wait. racecheck
#: does not follow the former: it takes what the readers of the fast kernel store, arrive and leave
#: for the mergers to be a race, although the mergers wait for all arrivals. Waits keep the order of
#: all that the arrivals order, so what races without a barrier does so with them.
ARRIVAL = ("bar.arrive %0", "bar.sync %0")


def slice_of_everything() -> None:
    """Decode calls of some specialisations, merges, cache writes, device plans."""
    import cupy

    for config in sweep.sweep(36, 12, seed=2):
        wrong = sweep.check(config, "cuda")
        print("." if wrong is None else f"\n{config}: {wrong}", end="", flush=True)
    # a plan with rows to spare, and launches that are planned on the device
    plan = cd.plan_splits([40, 70], cd.HeadConfig(8, 2, 64), num_splits=2).to(cupy, capacity=7)
    q = cupy.ones((2, 8, 64), np.float32)
    cache = cupy.ones((9, 16, 2, 64), np.float32)
    table = cupy.zeros((2, 5), np.int32)
    lens = cupy.array([40, 70], np.int32)
    out, lse = cd.decode_attention(q, cache, cache, table, lens, plan)
    for options in ({}, {"num_splits": 1}, {"split_size": 16}):
        cd.decode_attention(q, cache, cache, table, lens, **options)
    # the fast kernel: sequences alone and in a batch, of one unit and of several
    for heads, seq_lens in (((8, 2, 64), [1500]), ((12, 1, 128), [700, 0, 40, 2000])):
        num_q_heads, num_kv_heads, head_dim = heads
        pages = sum(seq_lens) // 16 + 8
        half = cupy.ones((pages, 16, num_kv_heads, head_dim), np.float16)
        rows = cupy.arange(len(seq_lens) * 128, dtype=np.int32).reshape(len(seq_lens), -1) % pages
        query = cupy.ones((len(seq_lens), num_q_heads, head_dim), np.float16)
        keys = cupy.array(seq_lens, np.int32)
        cd.decode_attention(query, half, half, rows, keys, kernel="fast")
        # the readable one along the tree, several subtrees of each split
        tree = dict(num_splits=3, deterministic=True, kernel="readable")
        cd.decode_attention(query, half, half, rows, keys, **tree)
    cd.merge_states(out, lse, out, lse)
    rows = cupy.ones((3, 2, 64), np.float32)
    cd.write_kv(rows, rows, cache, cache.copy(), cupy.array([5, -1, 143]))
    cupy.cuda.Device().synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plant", choices=sorted(FAULTS))
    parser.add_argument(
        "--arrivals-wait", action="store_true", help="let warps that only arrive at a barrier wait"
    )
    arguments = parser.parse_args()
    planted = arguments.plant
    try:
        backends.runner("cuda")
    except backends.BackendUnavailableError as error:
        parser.exit(2, f"error: {error}\n")

    import cupy

    cupy.cuda.set_allocator(None)
    sound = kernels_cu.source

    def text(name: str, *args: object) -> str:
        source = sound(name, *args)  # type: ignore[arg-type]
        if arguments.arrivals_wait:
            source = source.replace(*ARRIVAL)
        if planted is None or FAULTS[planted][0] != name:
            return source
        _, old, new = FAULTS[planted]
        assert source.count(old) == 1
        return source.replace(old, new)

    with mock.patch.object(kernels_cu, "source", text):
        slice_of_everything()
    print(" done")


if __name__ == "__main__":
    main()
