"""The measured variant of stage 1 is stage 1 with two lines in another order."""

from __future__ import annotations

import numpy as np
import pytest

import cupy_decode as cd
import kernels_cu
from cupy_decode.backends import emulator
from cupy_decode.bench import paging_layouts

from .decode_cases import Case, build
from .test_operators import expect


def test_the_text_to_replace_exists_once() -> None:
    assert kernels_cu.source("paged_split_k").count(paging_layouts.EARLY) == 1


@pytest.mark.emulator
def test_late_table_reads_give_the_same_bits() -> None:
    case = Case("late", (5, 40, 130), num_splits=2)
    problem = build(case)
    text = kernels_cu.read("paged_split_k.cu").replace(paging_layouts.EARLY, paging_layouts.LATE)
    results = [
        emulator.trace_launch(cd.decode_attention, *problem.arrays, case.plan(), files=files).result
        for files in ({}, {"paged_split_k.cu": text})
    ]
    for early, late in zip(*results, strict=True):
        np.testing.assert_array_equal(early, late)
    expect(problem, *results[1])
