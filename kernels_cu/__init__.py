"""CUDA C++ sources of cupy_decode, readable as text; needs nothing but Python.

``source("paged_split_k")`` returns one self-contained string: the ``.cu`` file with its local
headers spliced in. One string, and no include path, because compile caches key on the text they
are given: with headers behind ``-I`` an edited header would silently load a stale binary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources

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
