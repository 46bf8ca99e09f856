"""Does a check notice a fault?"""

from __future__ import annotations

from typing import NamedTuple

import kernels_cu
from cupy_decode.backends.emulator import EmulatorError

from . import checks, faults
from .checks_mma import CHECKS_MMA
from .faults import Fault
from .faults_mma import FAULTS_MMA
from .study import CHECKS_STUDY, FAULTS_STUDY

#: Checks by kernel, in the order they are tried.
CHECKS = {**checks.CHECKS, "paged_split_k_mma": CHECKS_MMA, "study_mma": CHECKS_STUDY}
FAULTS = [*faults.FAULTS, *FAULTS_MMA, *FAULTS_STUDY]


class Verdict(NamedTuple):
    caught: bool
    how: str


def changed_text(fault: Fault) -> str:
    """The file with the fault in it."""
    text = kernels_cu.read(fault.file)
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault}: {fault.old!r} occurs {text.count(fault.old)} times")
    return text.replace(fault.old, fault.new)


def judge(fault: Fault) -> Verdict:
    """Run the kernel's checks in both schedules until one fails.

    Only a wrong result or the emulator's own exception counts; text that does not compile raises.
    """
    files = {fault.file: changed_text(fault)}
    for check in CHECKS[fault.kernel]:
        for schedule in ("forward", "reverse"):
            try:
                check(files, schedule)
            except EmulatorError as error:
                return Verdict(True, error.what)
            except AssertionError as error:
                return Verdict(True, " ".join(str(error).split())[:200] or "a wrong result")
    return Verdict(False, "every check passed")
