"""The README's Python examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupy_decode.results import tables

from .mutations.judge import FAULTS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", [b for b in BLOCKS if "import cupy\n" not in b])
def test_example(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.gpu
@pytest.mark.parametrize("code", [b for b in BLOCKS if "import cupy\n" in b])
def test_gpu_example(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_the_readme_counts_the_faults() -> None:
    """Of ``python -m tests.mutations``."""
    said = re.search(
        r"`python -m tests\.mutations`\s+breaks\s+the\s+kernels\s+in\s+(\d+)\s", README
    )
    assert said
    assert int(said[1]) == len(FAULTS)


def test_the_readme_quotes_the_committed_results() -> None:
    """Run ``python -m cupy_decode.results.tables`` after measuring again."""
    assert tables.fill(README) == README
