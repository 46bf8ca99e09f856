"""Placeholder: the launch description shared by the backends (filled in below)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Arg:
    """One kernel argument: its name in the CUDA signature, its C type and its value."""

    name: str
    ctype: Literal["ptr", "i32", "i64", "u32", "f32"]
    value: Any


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready for any backend.

    Attributes
    ----------
    source : str
        Name of the file in ``kernels_cu``, without ``.cu``.
    entry : str
        C++ name expression of the specialisation.
    grid, block : (int, int, int)
    shared_mem : int
        Dynamic shared memory in bytes.
    args : tuple of Arg
        In the order of the CUDA signature.
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem: int
    args: tuple[Arg, ...]
