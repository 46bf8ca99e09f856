"""The CUDA sources of this project, run on a CPU.

``run(launch)`` compiles the same ``.cu`` text with g++ and executes it on NumPy arrays: one fibre
per CUDA thread, warps and blocks in a chosen order. Every access to global and shared memory is
checked before it happens, so that what a GPU would do silently becomes an ``EmulatorError`` that
names kernel, block, thread and source line:

* accesses out of bounds or misaligned, to global or shared memory,
* reads of shared memory that nobody wrote, or whose asynchronous copy was not waited for,
* races in shared memory: two threads, one of them writing, with no barrier in between,
* barriers and warp collectives that some of the threads named never reach,
* of a launch that overlaps with the one before: what is touched without waiting for that one.

It needs Linux, g++ and the CUDA headers of the extra ``emulator``; no driver and no GPU. x86-64 is
tested; the aarch64 stack switch is written but has not been run. Not modelled: races in global
memory, the order of a GPU's float sums inside ``mma``, and time.
"""

from cupy_decode.backends.emulator.build import EmulatorUnavailableError
from cupy_decode.backends.emulator.launch import (
    EmulatorError,
    Traced,
    asarray,
    empty,
    pointer,
    run,
    trace_launch,
    zeros,
)
from cupy_decode.backends.emulator.trace import LaunchTrace

__all__ = [
    "EmulatorError",
    "EmulatorUnavailableError",
    "LaunchTrace",
    "Traced",
    "asarray",
    "empty",
    "pointer",
    "run",
    "trace_launch",
    "zeros",
]
