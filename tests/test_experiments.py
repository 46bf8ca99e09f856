"""The commands explore and experiment: what they print, write, draw and refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_decode import experiments, plots, policies, results, specs, walkthrough
from cupy_decode.__main__ import main
from cupy_decode.heads import presets
from cupy_decode.policies import StepShape
from cupy_decode.results import tables

LLAMA = presets["llama-3-8b"]
NO_GPU = pytest.mark.skipif(experiments.gpu_is_visible(), reason="says what a machine without does")


def test_explore_prints_a_line_for_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--batch", "17", "--num-sms", "132"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama-3-8b, batch 17, 2560 keys, 132 SMs\n")
    table, legend = out.removesuffix("\n").rsplit("\n\n", 1)
    first_words = [line.split()[0] for line in table.splitlines()[3:]]
    assert first_words == [n for n in policies.names() if n not in ("fixed", "split-size")]
    assert "batch 17 exceeds the threshold of 16 sequences" in out
    header = table.splitlines()[2].split()
    assert all(name in legend for name in header if name not in ("policy", "reason")), header


def test_explore_json_holds_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--model", "llama-3-70b-tp8", "--num-sms", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["batch"], report["num_sms"]) == ("llama-3-70b-tp8", 1, 20)
    (row,) = [r for r in report["rows"] if r["policy"] == "vllm-triton"]
    assert (row["active_splits"], row["grid"], row["sm_coverage"]) == (16, [1, 1, 16], 16 / 20)
    assert report["measured"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explore", "--batch", "0"], "--batch must be at least 1; got 0"),
        (["explore", "--seq-len", "0"], "--seq-len must be from 1 to 1048576; got 0"),
        (["explore", "--num-sms", "0"], "num_sms must be at least 1; got 0"),
        (
            ["explore", "--jsonl", "never-made.jsonl"],
            "--jsonl keeps what --sweep measures; give --sweep too (needs a CUDA GPU)",
        ),
        (["experiment", "flip", "--seq-len", "-1"], "--seq-len must be from 1 to 1048576; got -1"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not Path("never-made.jsonl").exists()


@NO_GPU
@pytest.mark.parametrize("name", [n for n, e in experiments.EXPERIMENTS.items() if e.needs_gpu])
def test_what_needs_a_gpu_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, what in (
        (["experiment", name], f"experiment {name} runs kernels and"),
        (["explore", "--sweep"], "--sweep times kernels and"),
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"error: {what} needs a CUDA GPU; none is visible\n"


def test_the_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["flip", "graph", "off", "sweep", "mixed", "bits"]
    assert [line.endswith("needs a GPU") for line in lines] == [False, True, True, True, True, True]


def test_flip_shows_both_sides_of_the_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    for _ in range(2):  # appended
        assert main(["experiment", "flip", "--jsonl", str(path)]) == 0
    assert "batch 17 exceeds the threshold of 16 sequences" in capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 12
    assert [(r["num_kv_heads"], r["batch"], r["split"]) for r in rows[:6]] == [
        (8, 15, True), (8, 16, True), (8, 17, False),
        (1, 127, True), (1, 128, True), (1, 129, False),
    ]  # fmt: skip
    assert rows[1]["grid"] == [20, 8, 16]
    assert rows[2]["grid"] == [21, 8]
    assert {r["experiment"] for r in rows} == {"flip"}


def test_heads_that_no_eight_ranks_share_are_one_layer() -> None:
    qwen = presets["qwen-2.5-7b"]  # 28 query heads
    assert {row["tensor_parallel"] for row in experiments.flip(qwen, 100)} == {1}


def test_powers_of_two_stop_at_the_tiles() -> None:
    assert experiments.powers_of_two(1) == [1]
    assert experiments.powers_of_two(16 * 128) == [2**i for i in range(8)]
    assert experiments.powers_of_two(16 * 128 + 1)[-1] == 128


@pytest.mark.parametrize("model", ["llama-3-8b", "falcon-7b"])
def test_thread_blocks_are_counted_alike_everywhere(model: str) -> None:
    heads = presets[model]  # falcon-7b: 71 query heads of one KV head are five tiles of 16
    spec = specs.KernelSpec("float16", head_dim=64, group_size=heads.group_size)
    step, device = StepShape([100], heads), policies.Device()
    plan, account = policies.get("fixed", num_splits=3)(step, device)

    class Timer:
        def fields(self, plan: Any) -> dict[str, Any]:
            return {}

    timer: Any = Timer()
    row = experiments._measured("fixed", 3, plan, step, device, timer)
    want = 3 * heads.num_kv_heads * spec.head_tiles
    assert want == {"llama-3-8b": 24, "falcon-7b": 15}[model]
    assert row["thread_blocks"] == account.thread_blocks == want
    assert row["sm_coverage"] == round(want / 132, 4)
    built = walkthrough.build_step(heads, step.lens.astype(np.int32), 16, 16, seed=0)
    assert walkthrough._policy_rows(built, "first-wave", device, 1)["our_blocks"] == (
        policies.explain([100], heads, "first-wave")[1].thread_blocks
    )


def test_text_leaves_out_what_no_row_has() -> None:
    rows: list[dict[str, Any]] = [
        dict(batch=16, split=True, grid=[20, 8], sm_coverage=0.97, us=1.5, reason="so"),
        dict(batch=7, split=False, grid=[1], sm_coverage=1.0, us=12.25, reason="because"),
    ]
    columns = ("batch", "split", "grid", "sm_coverage", "us", "min_us", "reason")
    assert experiments.text(rows, columns).splitlines() == [
        "batch  split    grid  sm_coverage     us  reason",
        "   16    yes  20 x 8       97.0 %   1.50  so",
        "    7     no       1      100.0 %  12.25  because",
    ]


# ---------------------------------------------------------------------- the figure


ROWS: list[dict[str, Any]] = [
    *(dict(policy="fixed", active_splits=n, us=40 / n) for n in (1, 2, 4, 8)),
    dict(policy="a", active_splits=4, us=10.0),
    dict(policy="b", active_splits=4, us=10.0),
    dict(policy="c", active_splits=4, us=11.0),
]


def test_the_figure_marks_every_plan_once() -> None:
    import matplotlib

    matplotlib.use("agg")
    (axes,) = plots.split_sweep(ROWS, "title").axes
    line, *marks = axes.lines
    assert list(line.get_xdata()) == [1, 2, 4, 8]
    assert list(line.get_ydata()) == [40, 20, 10, 5]
    found = [(list(m.get_xdata()), list(m.get_ydata()), m.get_label().split()) for m in marks]
    assert found == [([4], [10.0], ["4:", "a", "b"]), ([4], [11.0], ["4:", "c"])]


def test_a_figure_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(experiments, "measure", None)
    monkeypatch.setattr(results, "load", None)
    assert main(["explore", "--plot", str(tmp_path / "sweep.png")]) == 2
    assert capsys.readouterr() == (
        "",
        "error: figures need matplotlib:  python -m pip install -e '.[notebooks]'  installs it\n",
    )


@NO_GPU
def test_a_figure_without_a_gpu_uses_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib

    matplotlib.use("agg")
    step = dict(experiment="explore", model="llama-3-8b", batch=2, seq_len=100, num_sms=132)
    step |= dict(gpu="NVIDIA H200", date="2026-11-29", partial_bytes=33280)
    shipped = [step | row for row in ROWS]
    monkeypatch.setattr(results, "load", lambda name: shipped)
    path = tmp_path / "sweep.png"
    arguments = ["explore", "--plot", str(path), "--seq-len", "100", "--batch"]
    for other in (["3"], ["2", "--num-sms", "108"]):
        assert main([*arguments, *other]) == 2
        error = capsys.readouterr().err
        assert "of this step no times were recorded" in error
        options = error.rsplit("There are records of:  ", 1)[1].strip()
        assert options == "--model llama-3-8b --batch 2 --seq-len 100 --num-sms 132"
        assert not path.exists()
    assert main([*arguments, "2"]) == 0
    out = capsys.readouterr().out
    assert "\nRecorded on an NVIDIA H200, 2026-11-29, not measured now; this package's" in out
    assert "Measured" not in out
    assert "33.3 kB" in out
    assert path.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_the_graph_of_a_split_step_has_two_kernels_a_layer() -> None:
    rows = list(experiments.graph(LLAMA, 300))
    assert [(r["batch"], r["paged_split_k"], r["reduce_splits"]) for r in rows] == [
        (1, 32, 32), (16, 32, 32), (17, 32, 0), (32, 32, 0),
    ]  # fmt: skip
    assert rows[0]["first_kernels"] == ["paged_split_k", "reduce_splits"] * 2


@pytest.mark.gpu
def test_measured_rows_are_whole() -> None:
    step = StepShape([200, 100], LLAMA)
    rows = list(experiments.measure(step, experiments.this_device(), ["sglang-triton", "fa3"]))
    assert [r["policy"] for r in rows] == ["fixed"] * 4 + ["sglang-triton", "fa3"]
    assert [r["num_splits"] for r in rows[:4]] == [1, 2, 4, 8]
    assert all(0 < r["min_us"] <= r["us"] for r in rows)
    assert rows[0]["partial_bytes"] == 0 < rows[1]["partial_bytes"]


@pytest.mark.gpu
def test_a_plan_is_timed_once() -> None:
    timer = experiments.Bench(LLAMA, np.array([200], np.int32))
    plan = policies.plan_splits([200], LLAMA, num_splits=2)
    assert timer.time(plan) is timer.time(policies.plan_splits([200], LLAMA, split_size=112))


# ---------------------------------------------------------------------- the committed results


def test_the_readmes_tables_hold_the_committed_rows() -> None:
    measured = {row["experiment"] for row in results.load("experiments_h200")} & {*tables.TABLES}
    names = [name for name in experiments.EXPERIMENTS if name in measured]
    sizes = {name: tables.TABLES[name]().count("\n| ") - 1 for name in names}
    assert sizes == {"flip": 6, "graph": 4, "off": 5, "sweep": 8, "mixed": 6, "bits": 6}


def test_committed_results_say_where_they_were_measured() -> None:
    rows = results.load("experiments_h200")
    assert {row["experiment"] for row in rows} == {*experiments.EXPERIMENTS, "explore"}
    assert {(row["gpu"], row["num_sms"]) for row in rows} == {("NVIDIA H200", 132)}


def test_committed_plans_are_what_the_policies_say_today() -> None:
    for row in results.load("experiments_h200"):
        if row["experiment"] == "explore" and row["policy"] != "fixed":
            lens = [row["seq_len"]] * row["batch"]
            plan, account = policies.explain(lens, row["model"], row["policy"], row["num_sms"])
            assert (row["active_splits"], row["num_splits"]) == (
                plan.counts.max(),
                account.num_splits,
            )
