"""Compile kernels without a GPU, and read what the assembler says about them.

Uses NVRTC with the include paths and options that ``cupy.RawModule`` would use, so that what
compiles here compiles there. Needs CuPy, the NVRTC library and the CUDA headers, but no driver.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import kernels_cu


@dataclass(frozen=True)
class Resources:
    """What one specialisation uses on one architecture.

    Attributes
    ----------
    registers : int
        Per thread.
    spill_stores, spill_loads, stack : int
        Bytes per thread in local memory.
    static_shared_mem : int
        Bytes per block, without the dynamic part.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared_mem: int


_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


def resources(
    name: str, entries: Sequence[str], arch: str, options: Sequence[str] = ()
) -> dict[str, Resources]:
    """Compile specialisations of one kernel for one architecture.

    Parameters
    ----------
    name : str
        A kernel of ``kernels_cu.names()``.
    entries : sequence of str
        C++ name expressions (``specs.entry``).
    arch : str
        Such as ``"sm_90"``.
    options : sequence of str
        Further compiler options.

    Returns
    -------
    dict
        Resources by name expression.

    Raises
    ------
    RuntimeError
        If a specialisation does not compile; the message holds the compiler's log.
    """
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(kernels_cu.source(name), f"{name}.cu", (), ())
    try:
        for entry in entries:
            nvrtc.addNameExpression(program, entry)
        flags = (
            *assemble_cupy_compiler_options(("-std=c++17", *options)),
            "-ftz=true",
            "--device-as-default-execution-space",
            f"-arch={arch}",
            "--ptxas-options=-v",
        )
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(
                f"{name} does not compile for {arch}: {nvrtc.getProgramLog(program)[:4000]}"
            ) from error
        entry_of = {nvrtc.getLoweredName(program, entry): entry for entry in entries}
        log = nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
    used = {}
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", log):
        found = _USAGE.search(part)
        if found:
            used[entry_of[found["name"]]] = Resources(
                int(found["registers"]),
                int(found["stores"]),
                int(found["loads"]),
                int(found["stack"]),
                int(found["shared"] or 0),
            )
    return used
