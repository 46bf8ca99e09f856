"""CUDA C++ sources of cupy_decode, readable as text; needs nothing but Python.

``source("paged_split_k")`` returns one self-contained string: the ``.cu`` file with its local
headers spliced in. One string, and no include path, because compile caches key on the text they
are given: with headers behind ``-I`` an edited header would silently load a stale binary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')


def names() -> list[str]:
    """Names of the kernels, one per ``.cu`` file."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".cu") for f in files if f.name.endswith(".cu"))


def read(filename: str) -> str:
    """Text of one file of this package, as it stands."""
    return (resources.files(__name__) / filename).read_text(encoding="utf-8")


def source(name: str, substitute: Mapping[str, str] | None = None) -> str:
    """One kernel file with every local ``#include`` replaced by the text it names.

    Parameters
    ----------
    name : str
        A kernel of ``names()``.
    substitute : mapping of str to str, optional
        Header texts to use instead of the package's own, by file name.

    Returns
    -------
    str
        CUDA C++ that compiles on its own; ``#line`` directives keep the original positions.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """
    if name not in names():
        raise ValueError(f"no kernel is called {name!r}; the kernels are {', '.join(names())}")
    return _splice(f"{name}.cu", substitute or {}, set()) + "\n"


def _splice(filename: str, substitute: Mapping[str, str], seen: set[str]) -> str:
    seen.add(filename)
    text = substitute[filename] if filename in substitute else read(filename)
    out = [f'#line 1 "{filename}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            out.append("" if line.strip() == "#pragma once" else line)
            continue
        if include[1] not in seen:
            out.append(_splice(include[1], substitute, seen))
        out.append(f'#line {number + 1} "{filename}"')
    return "\n".join(out)


#: How an argument is passed: a pointer, or a number of a C type.
Kind = Literal["ptr", "i32", "i64", "f32"]
_KINDS: Mapping[str, Kind] = {"int": "i32", "long long": "i64", "float": "f32"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, as its signature declares it.

    Attributes
    ----------
    name, ctype : str
        ``ctype`` is the declaration without ``const``: ``"float*"``, ``"int"``, ``"long long"``.
    note : str
        The comment beside it: for pointers, the shape.
    """

    name: str
    ctype: str
    note: str

    @property
    def kind(self) -> Kind:
        """``"ptr"`` for pointers, else the width and class of the number."""
        return "ptr" if self.ctype.endswith("*") else _KINDS[self.ctype]


@cache
def signature(name: str) -> tuple[Parameter, ...]:
    """Parameters of a kernel in launch order, read from its ``.cu`` file.

    The order in the file is the only copy there is: launches are packed by name from it.
    """
    if name not in names():
        raise ValueError(f"no kernel is called {name!r}; the kernels are {', '.join(names())}")
    text = read(f"{name}.cu")
    start = re.search(rf"__global__[^;{{]*?\b{name}\(", text)
    if start is None:
        raise ValueError(f"{name}.cu defines no __global__ function called {name}")
    end = text.index("{", start.end())
    parameters = []
    for line in text[start.end() : end].splitlines():
        code, _, note = line.partition("//")
        for declaration in filter(None, (part.strip(" )") for part in code.split(","))):
            ctype, _, parameter = declaration.removeprefix("const ").rpartition(" ")
            parameters.append(Parameter(parameter, ctype, note.strip()))
    return tuple(parameters)
