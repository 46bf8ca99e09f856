"""The steps on the way to the fast kernel: each is right, on the CPU emulator too."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_decode as cd
from cupy_decode import reference, tolerance
from cupy_decode.backends import emulator
from cupy_decode.bench.study import STEPS, STUDIES, Study, shapes
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import Partials, SplitPlan

from .problems import paged_problem


def run(study: Study, problem: dict[str, np.ndarray], num_splits: int) -> tuple[Any, Any]:
    q = problem["q"]
    batch, num_q_heads, head_dim = q.shape
    plan = SplitPlan.from_num_splits(problem["seq_lens"], num_splits)
    rows = int(plan.split_offsets[-1])
    partials = Partials(
        np.full((rows, num_q_heads, head_dim), np.nan, np.float32),
        np.full((rows, num_q_heads), np.nan, np.float32),
        np.full((rows, num_q_heads), np.nan, np.float32),
        plan,
    )
    arrivals = np.zeros((batch, problem["k_cache"].shape[2]), np.uint32)
    out, lse = np.full(q.shape, np.nan, q.dtype), np.full(q.shape[:2], np.nan, np.float32)
    launch = study.launch(
        **problem,
        plan=plan,
        splits=int(plan.counts.max()),
        partials=partials,
        arrivals=arrivals,
        out=out,
        lse=lse,
    )
    emulator.run(launch)
    assert not arrivals.any()
    if study.merge:
        return out, lse
    assert np.isnan(lse).all()
    return cd.reduce_splits(partials, out=out, backend="emulator")


@pytest.mark.emulator
@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
@pytest.mark.parametrize(
    ("dtype", "heads", "seq_lens", "num_splits"),
    [
        (np.float16, HeadConfig(8, 2, 128), (150, 0, 1, 33, 64), 2),
        (ml_dtypes.bfloat16, HeadConfig(8, 1, 128), (310,), 5),
        (np.float16, HeadConfig(3, 3, 128), (17, 80), 1),
    ],
    ids=["ragged", "split", "mha"],
)
def test_every_step_is_right(
    study: Study, dtype: Any, heads: HeadConfig, seq_lens: tuple[int, ...], num_splits: int
) -> None:
    problem = paged_problem(3, seq_lens, heads, dtype=np.dtype(dtype))
    out, lse = run(study, problem, num_splits)
    ref_out, ref_lse = reference.decode_attention(**problem)
    allowed = tolerance.bound(**problem, ref_out=ref_out, ref_lse=ref_lse)
    tolerance.assert_close(out, lse, ref_out, ref_lse, allowed)


def test_what_the_study_does_not_take_is_refused() -> None:
    problem = paged_problem(0, [20], HeadConfig(4, 2, 64), dtype=np.dtype(np.float16))
    with pytest.raises(ValueError, match=r"head_dim 128, block_size 16 .* got 64, 16 and 2"):
        run(STUDIES["ring"], problem, 1)


def test_steps_are_timed_on_shapes_that_exist() -> None:
    assert len(shapes()) == 6
    assert len({step.name for step in STEPS}) == len(STEPS)
