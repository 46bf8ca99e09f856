"""Every exercise takes its solution and refuses near misses."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra test")

from tests.test_notebooks import NOTEBOOKS, ROOT, _read, _run, _solution, _with_answer  # noqa: E402

#: By notebook, changes of the solution that must be refused; 02 has its own file.
NEAR_MISSES = {
    "01_the_idle_gpu": [(">= share", ">= 0.5 * share")],
    "03_who_splits_how": [("256", "128"), ("256, 1, ", "256, 0, ")],
    "04_making_it_fast": [
        ("if transposed", "if not transposed"),
        ("(128, group_size, 16)", "(group_size, 128, 16)"),
    ],
    "05_two_block_sizes": [
        ("+ part", ""),
        ("(block_size // kernel_block_size)", "1"),
        (", offset\n", ", inside\n"),
    ],
    "06_paging_and_layouts": [
        ("block * strides[0]", "block * block_size * strides[1]"),
        ("+ head * strides[2]", ""),
    ],
    "07_the_same_bits": [
        ("begin % (2 * width) == 0 and ", ""),
        ("<= end:", "< end:"),
    ],
}


def _path(name: str) -> Path:
    return ROOT / "notebooks" / f"{name}.ipynb"


def test_every_exercise_is_here() -> None:
    with_exercise = {
        path.stem
        for path in NOTEBOOKS
        if any("exercise" in cell.metadata.get("tags", ()) for cell in _read(path).cells)
    }
    assert with_exercise - {"02_anatomy_of_a_kernel"} == set(NEAR_MISSES)


@pytest.mark.notebook
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_the_solution_is_taken(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = _with_answer(_read(_path(name)), _solution(_read(_path(name))))
    assert "Right:" in _run(notebook, monkeypatch, tmp_path)


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [(name, *change) for name, changes in NEAR_MISSES.items() for change in changes],
)
def test_near_misses_are_refused(
    name: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    solution = _solution(_read(_path(name)))
    answer = solution.replace(right, wrong)
    assert answer != solution
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="not yet"):
        _run(_with_answer(_read(_path(name)), answer), monkeypatch, tmp_path)
