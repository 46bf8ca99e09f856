"""One workspace, 10^5 launches: the fused merge leaves its counters as it found them."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_decode import bench, fast
from cupy_decode.heads import HeadConfig

LAUNCHES, REPLAYS = 500, 200


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "seq_lens"),
    [
        (HeadConfig(32, 8, 128), [2560]),  # every thread block has a part of the one sequence
        (HeadConfig(16, 2, 128), [3000, 0, 17, 700, 1, 9000]),  # and here of none, one or several
    ],
)
def test_1e5_launches_give_equal_bits(heads: HeadConfig, seq_lens: list[int]) -> None:
    import cupy

    from cupy_decode.backends import cuda

    p = bench.problem(heads, seq_lens, copies=1)
    machine = fast.Machine(cuda.num_sms(), cuda.shared_per_sm())
    space = fast.workspace(cuda, fast.spec_of(p.q, p.k_caches[0]), machine)
    out, lse = cupy.empty_like(p.q), cupy.empty(p.q.shape[:2], np.float32)
    arrays = dict(out=out, lse=lse, space=space, scale=0.1, machine=machine)
    launch = fast.launch(**p.arguments(), **arrays)
    cuda.run(launch)
    expected = cupy.concatenate([out.view(np.uint16).ravel(), lse.view(np.uint16).ravel()])
    differing, launches = cupy.zeros(1, np.uint32), cupy.zeros(1, np.uint32)
    compare = cupy.ElementwiseKernel(
        "T first, T now",
        "raw uint32 differing, raw uint32 launches",
        "if (first != now) atomicAdd(&differing[0], 1); if (i == 0) atomicAdd(&launches[0], 1)",
        "count_differing_bits",
    )
    pieces = [
        (expected[: out.size], out.view(np.uint16).ravel()),
        (expected[out.size :], lse.view(np.uint16).ravel()),
    ]

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for first, now in pieces:
            compare(first, now, differing, launches)  # compiled before it is captured
        stream.begin_capture()
        for _ in range(LAUNCHES):
            out.fill(0)
            lse.fill(0)
            cuda.run(launch)
            for first, now in pieces:
                compare(first, now, differing, launches)
        graph = stream.end_capture()
        for _ in range(REPLAYS):
            graph.launch()
        stream.synchronize()
    assert int(launches[0]) == 2 * (LAUNCHES * REPLAYS + 1)
    assert int(differing[0]) == 0
    assert not space.arrivals.any()
