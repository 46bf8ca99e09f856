"""Data sets that tests compare with when the environment variable CUPY_DECODE_SHARED names them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def shared_path(name: str) -> Path:
    """A file of the shared folder; the test is skipped when no folder is named.

    A named folder that lacks the file fails the test: a check that silently stops looking at its
    data is worse than none.
    """
    folder = os.environ.get("CUPY_DECODE_SHARED")
    if not folder:
        pytest.skip("CUPY_DECODE_SHARED names no folder with the published figures and cases")
    path = Path(folder) / name
    if not path.is_file():
        pytest.fail(f"CUPY_DECODE_SHARED is {folder} but {name} is not in it")
    return path


def shared_json(name: str) -> Any:
    """The parsed JSON file ``name`` of the shared folder."""
    return json.loads(shared_path(name).read_text(encoding="utf-8"))
