"""The faults that the sanitizer's slice plants exist in the kernels' text."""

from __future__ import annotations

import pytest

import kernels_cu

from . import sanitize, sweep


@pytest.mark.parametrize("tool", sanitize.FAULTS)
def test_the_place_of_a_planted_fault_exists_once(tool: str) -> None:
    name, old, new = sanitize.FAULTS[tool]
    assert kernels_cu.source(name).count(old) == 1
    assert old != new


def test_the_slice_compiles_few_kernels() -> None:
    assert len(sweep.kernels(sweep.sweep(36, 12, seed=2))) <= 12


def test_arrivals_are_found_where_they_are_made_to_wait() -> None:
    assert kernels_cu.source("paged_split_k_mma").count(sanitize.ARRIVAL[0]) == 1
