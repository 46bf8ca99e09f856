"""Measured results that ship with the package, one JSON object a line.

Every figure quoted by the README or a notebook comes from one of these files; each line carries the
machine and the versions it was measured with.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def names() -> list[str]:
    """Result files, without their ending."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".jsonl") for f in files if f.name.endswith(".jsonl"))


def load(name: str) -> list[dict[str, Any]]:
    """The objects of one result file.

    Raises
    ------
    ValueError
        If there is no such file.
    """
    if name not in names():
        raise ValueError(f"no result is called {name!r}; there are {', '.join(names())}")
    text = (resources.files(__name__) / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]
