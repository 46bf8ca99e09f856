"""Every notebook runs top to bottom, keeps its cells short and is committed without outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra test")
nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra test")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_LINES = 10
CELL_SECONDS = 20

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def _read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _run(notebook: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Execute away from the repository; the text that the cells printed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    outputs = [output for cell in _code(notebook) for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@every_notebook
def test_cells_are_short_and_without_outputs(path: Path) -> None:
    notebook = _read(path)
    nbformat.validate(notebook)
    for i, cell in enumerate(_code(notebook)):
        lines = cell.source.splitlines()
        assert len(lines) <= MAX_LINES, f"code cell {i} of {path.name} has {len(lines)} lines"
        assert not cell.outputs, f"code cell {i} of {path.name} was committed with outputs"
        assert cell.execution_count is None


@every_notebook
def test_notebooks_say_nothing_about_the_machine_they_were_made_on(path: Path) -> None:
    assert set(_read(path).metadata) <= {"kernelspec", "language_info"}


@pytest.mark.notebook
@every_notebook
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _run(_read(path), monkeypatch, tmp_path)


def _with_answer(notebook: Any, answer: str) -> Any:
    exercise = [c for c in _code(notebook) if "exercise" in c.metadata.get("tags", ())]
    assert len(exercise) == 1
    exercise[0].source = answer
    return notebook


def _solution(notebook: Any) -> str:
    folded = [c.source for c in notebook.cells if c.source.startswith("<details>")]
    found = re.findall(r"```python\n(.*?)```", "\n".join(folded), re.DOTALL)
    assert len(found) == 1
    return found[0]
