"""Faults that other decode-attention code had, one case each, against an independent oracle."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from .cases import load_oracle, make_adapter
from .shared_data import shared_json, shared_path

#: Cases in words only: a fresh compile cache on a machine with little installed, a second process.
WITHOUT_BUILDER = {"B51", "B53"}

BACKENDS = [
    "reference",
    pytest.param("emulator", marks=pytest.mark.emulator),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def _case_ids() -> list[str]:
    """Ids of the collection; one placeholder where there is none, so that the tests show up."""
    path = Path(os.environ.get("CUPY_DECODE_SHARED", "")) / "cases" / "given.json"
    if not path.is_file():
        return ["all"]
    listed = [entry["id"] for entry in json.loads(path.read_text(encoding="utf-8"))]
    return [ident for ident in listed if ident not in WITHOUT_BUILDER]


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    return load_oracle(shared_path("cases/oracle.py"))


def test_the_collection_runs_what_it_lists(oracle: ModuleType) -> None:
    listed = {entry["id"] for entry in shared_json("cases/given.json")}
    assert listed - WITHOUT_BUILDER == set(oracle.GIVEN)


@functools.cache
def _adapter(backend: str, kernel: str, oracle: ModuleType) -> Any:
    return make_adapter(oracle, backend, kernel)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", ["auto", "readable"])
@pytest.mark.parametrize("ident", _case_ids())
def test_case(ident: str, kernel: str, backend: str, oracle: ModuleType) -> None:
    with np.errstate(all="ignore"):
        result = oracle.run_case(_adapter(backend, kernel, oracle), oracle.GIVEN[ident])
    assert result == "pass"


@pytest.mark.parametrize("ident", ["B09", "B27", "B33"])
def test_a_wrong_scale_fails_the_cases(ident: str, oracle: ModuleType) -> None:
    adapter = make_adapter(oracle, "reference")

    class Wrong(type(adapter)):  # type: ignore[misc]
        def decode(self, scale: Any, **problem: Any) -> Any:
            return super().decode(scale=1.01 * scale, **problem)

    with np.errstate(all="ignore"):
        assert oracle.run_case(Wrong(), oracle.GIVEN[ident]).startswith("FAIL:")
