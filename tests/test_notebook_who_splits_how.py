"""The exercise of the notebook on split policies takes its solution and refuses near misses."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra test")

from tests.test_notebooks import ROOT, _read, _run, _solution, _with_answer  # noqa: E402

PATH = ROOT / "notebooks" / "03_who_splits_how.ipynb"


@pytest.mark.notebook
def test_solution_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = _with_answer(_read(PATH), _solution(_read(PATH)))
    assert "Right:" in _run(notebook, monkeypatch, tmp_path)


@pytest.mark.notebook
@pytest.mark.parametrize(("right", "wrong"), [("256", "128"), ("256, 1, ", "256, 0, ")])
def test_near_misses_are_refused(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = _solution(_read(PATH)).replace(right, wrong)
    assert answer != _solution(_read(PATH))
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="not yet"):
        _run(_with_answer(_read(PATH), answer), monkeypatch, tmp_path)
