"""The exercise of the notebook on the same bits takes its solution and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="notebooks need the extra test")

from tests.test_notebooks import ROOT, _read, _run, _solution, _with_answer, nbclient

NOTEBOOK = ROOT / "notebooks" / "07_the_same_bits.ipynb"


@pytest.mark.notebook
def test_the_solution_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    solution = _solution(_read(NOTEBOOK))
    assert "Right:" in _run(_with_answer(_read(NOTEBOOK), solution), monkeypatch, tmp_path)


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("begin % (2 * width) == 0 and ", ""), ("<= end:", "< end:")],
)
def test_a_mistake_is_refused(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = _solution(_read(NOTEBOOK)).replace(right, wrong)
    assert answer != _solution(_read(NOTEBOOK))
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="not yet"):
        _run(_with_answer(_read(NOTEBOOK), answer), monkeypatch, tmp_path)
