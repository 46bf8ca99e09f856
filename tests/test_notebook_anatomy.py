"""The notebook on one kernel: its exercise, and its recorded run where no compiler exists."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import cupy_decode as cd

nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra test")

from tests.test_notebooks import ROOT, _code, _read, _run, _solution, _with_answer  # noqa: E402

PATH = ROOT / "notebooks" / "02_anatomy_of_a_kernel.ipynb"
pytestmark = [pytest.mark.notebook, pytest.mark.emulator]


def test_solution_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = _with_answer(_read(PATH), _solution(_read(PATH)))
    assert "Right, and caught:" in _run(notebook, monkeypatch, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"ipython"}  # it leaves nothing behind


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("is in place", "not yet: one"),
        ("tile (and, at first, q)", "not yet, this fails in the first tile: .*race"),
        ("p and rescale are in place", "not yet, this fails in the first tile: .*unwritten"),
        ("one state per head", "not yet: one"),
    ],
)
def test_other_barriers_are_refused(
    reason: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = _solution(_read(PATH)).replace("everyone is done with this tile", reason)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=message):
        _run(_with_answer(_read(PATH), answer), monkeypatch, tmp_path)


def test_it_runs_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "Replaying a recorded run" in _run(_read(PATH), monkeypatch, tmp_path)


def test_the_recorded_run_is_what_the_kernel_does(tmp_path: Path) -> None:
    """To record it anew, save the notebook's ``stage_1`` to that file."""
    variables: dict[str, object] = {}
    problem = [c.source for c in _code(_read(PATH)) if c.source.startswith("rng = ")]
    exec(problem[0], {"np": np, "cd": cd}, variables)
    arrays, plan = variables["problem"], variables["plan"]
    assert isinstance(arrays, tuple)
    fresh = cd.trace_launch(cd.decode_attention, *arrays, plan).launches[0]
    with resources.as_file(resources.files("cupy_decode.results")) as folder:
        recorded = cd.LaunchTrace.load(folder / "paged_split_k_trace.npz")
    for name in ("k_cache", "v_cache", "block_table"):
        np.testing.assert_array_equal(recorded[name], fresh[name])
    np.testing.assert_array_equal(recorded.idle("k_cache"), fresh.idle("k_cache"))
