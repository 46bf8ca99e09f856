"""Figures show the numbers of grid.py and traffic.py."""

from collections.abc import Iterator

import matplotlib
import pytest

from cupy_decode import plots
from cupy_decode.heads import presets

MODELS = {"8B": presets["llama-3-8b"], "TP 8": presets["llama-3-70b-tp8"]}


@pytest.fixture(autouse=True)
def _no_window() -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.use("agg")
        yield
        import matplotlib.pyplot as plt

        plt.close("all")


def _lines(axes: object) -> dict[str, list[float]]:
    return {line.get_label(): [float(y) for y in line.get_ydata()] for line in axes.lines}


def test_sm_coverage_stops_splitting_above_the_threshold() -> None:
    unsplit, split = plots.sm_coverage(MODELS, (1, 16, 17, 64, 129), num_sms=400).axes
    tp8 = [100 * blocks / 400 for blocks in (1, 24, 25, 96, 193)]
    assert _lines(unsplit)["8B"] == pytest.approx([2.0, 40.0, 42.0, 100.0, 100.0])
    assert _lines(split)["8B"] == pytest.approx([32.0, 100.0, 42.0, 100.0, 100.0])
    assert _lines(unsplit)["TP 8"] == pytest.approx(tp8)
    assert _lines(split)["TP 8"] == pytest.approx([4.0, 96.0, 100.0, 100.0, tp8[4]])
    assert split.get_legend() is not None


def test_merge_overhead_charges_active_segments_apart() -> None:
    (axes,) = plots.merge_overhead(MODELS["8B"], (64, 128, 2560)).axes
    drawn = _lines(axes)
    assert drawn["all 16 segments"] == pytest.approx([203.125, 101.5625, 5.078125])
    assert drawn["active segments"] == pytest.approx([50.78125, 50.78125, 5.078125])


def test_time_against_length_draws_the_floor_under_every_kernel() -> None:
    def row(model: str, kernel: str, keys: int, longest: int, us: float) -> dict[str, object]:
        return dict(model=model, kernel=kernel, keys=keys, longest=longest, us=us)

    rows: list[dict[str, object]] = [dict(kernel="environment")]
    for keys, floor, fast in ((4096, 3.0, 4.0), (512, 2.0, 7.0)):
        rows += [row("a", "floor", keys, 512, floor), row("a", "loose floor", keys, 512, floor)]
        rows += [row("a", "fast", keys, 512, fast), row("a", "fa3", keys, 512, 9.0)]
    rows += [row("b", "floor", 64, 64, 1.0), row("b", "floor", 64, 2, 1.5)]
    rows += [dict(model="b", kernel="fa3", keys=64, longest=64, failed="ImportError")]
    first, second = plots.time_against_length(rows).axes
    assert _lines(first) == {
        "fast": [7.0, 4.0],
        "fa3": [9.0, 9.0],
        "floor: only reading": [2.0, 3.0],
    }
    assert list(first.lines[0].get_xdata()) == [512, 4096]
    assert first.get_xlabel() == "keys of the batch"
    assert list(second.lines[-1].get_xdata()) == [2, 64]
    assert second.get_xlabel() == "keys of each sequence"


def test_study_steps_end_at_the_floor() -> None:
    rows: list[dict[str, object]] = [dict(step="environment")]
    for label, shares in (("1,16", (0.1, 0.2)), ("2,16", (0.5, 0.8))):
        for step, share in zip(("split", "ring"), shares, strict=True):
            what = dict(model="a", label=label, kv_bytes=2e6, step=step, us=1.0)
            rows.append({**what, "read_fraction": share, "times_floor": 1.25})
    (axes,) = plots.study_steps(rows).axes
    drawn = _lines(axes)
    assert drawn["a 1,16 (2 MB)"] == pytest.approx([10, 20])
    assert drawn["a 2,16 (2 MB)"] == pytest.approx([50, 80])
    hollow = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert [line.get_ydata()[0] for line in hollow] == pytest.approx([25, 100])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["split", "ring", "floor"]
