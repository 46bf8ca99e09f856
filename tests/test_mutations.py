"""The list of faults is sound, and every fifth of them is caught.

Breaking a kernel compiles it anew, which takes minutes for the whole list: that is
``python -m tests.mutations``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import kernels_cu

from .mutations.judge import CHECKS, FAULTS, Fault, changed_text, judge

#: The first, sixth, eleventh, ... fault of each kernel.
SOME_FAULTS = [
    fault for kernel in CHECKS for fault in [f for f in FAULTS if f.kernel == kernel][::5]
]


def test_every_kernel_has_its_faults() -> None:
    counts = Counter(fault.kernel for fault in FAULTS)
    assert set(counts) == set(kernels_cu.names()) == set(CHECKS)
    assert min(counts.values()) >= 3
    assert len(FAULTS) >= 40
    assert len({str(fault) for fault in FAULTS}) == len(FAULTS)
    assert {fault.kernel for fault in SOME_FAULTS} == set(CHECKS)
    assert len(SOME_FAULTS) >= 45


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_place_of_a_fault_exists_once(fault: Fault) -> None:
    assert changed_text(fault) != kernels_cu.read(fault.file)


@pytest.mark.emulator
@pytest.mark.parametrize("schedule", ["forward", "reverse"])
@pytest.mark.parametrize("kernel", CHECKS)
def test_the_checks_pass_on_sound_kernels(kernel: str, schedule: Any) -> None:
    for check in CHECKS[kernel]:
        check({}, schedule)


@pytest.mark.emulator
@pytest.mark.mutations
@pytest.mark.parametrize("fault", SOME_FAULTS, ids=str)
def test_the_fault_is_caught(fault: Fault) -> None:
    verdict = judge(fault)
    assert verdict.caught, verdict.how
