"""The command that says what changes the bits of a sequence's output."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupy_decode import determinism
from cupy_decode.__main__ import main
from cupy_decode.heads import HeadConfig, presets

PATHS = {path.name: path for path in determinism.PATHS}
SMALL = HeadConfig(4, 2, 64)


def test_ulps_count_steps_between_floats():
    for dtype in (np.float16, np.float32):
        a = np.array([1, -1, 0, 2, -np.inf], dtype)
        assert not determinism.ulps(a, a).any()
        up = np.nextafter(a[:4], np.array(9, dtype), dtype=dtype)
        assert (determinism.ulps(a[:4], up) == 1).all()
    pair = np.array([-0.0, -1e-45], np.float32), np.array([0.0, 1e-45], np.float32)
    assert determinism.ulps(*pair).tolist() == [1, 3]
    with pytest.raises(ValueError, match="NaN"):
        determinism.ulps(np.array([np.nan], np.float32), np.zeros(1, np.float32))


def test_changes_leave_the_watched_sequence_as_it_is():
    """Same query, keys and values, wherever they lie."""
    scenes = [
        determinism.Scene(SMALL, ((0, 50),)),
        determinism.Scene(SMALL, ((3, 7), (1, 20), (0, 50)), page_seed=4),
        determinism.Scene(SMALL, ((0, 50), (1, 9)), block_size=32),
    ]
    found, tables = [], []
    for scene in scenes:
        a, j = scene.arrays(), np.arange(50)
        row = a["block_table"][scene.watched]
        where = row[j // scene.block_size], j % scene.block_size
        caches = [a[name][where].tobytes() for name in ("k_cache", "v_cache")]
        found.append((a["q"][scene.watched].tobytes(), *caches))
        tables.append(row.tolist())
        assert a["seq_lens"][scene.watched] == 50
    assert found[0] == found[1] == found[2]
    assert tables[0] != tables[1][:4]


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["fast kernel", "readable, along the tree", "split size 256"])
def test_some_paths_keep_their_bits(name: str):
    row = determinism.examine(PATHS[name], SMALL, 300, 1, "emulator")
    applies = {change: moved for change, moved in row.changes.items() if moved is not None}
    assert not any(applies.values())
    without = {"graph"} if PATHS[name].promises else {"S", "graph"}
    assert set(applies) == set(determinism.CHANGES) - without
    assert set(row.worst_ulp.values()) == set(row.rows_changed.values()) == {0}


@pytest.mark.emulator
def test_vllms_rule_does_not():
    """17 sequences of 8 KV heads are past its threshold of 16: from many splits to one."""
    heads = presets["llama-3.2-1b"]
    row = determinism.examine(PATHS["vllm-triton"], heads, 400, 0, "emulator")
    changed = [change for change, moved in row.changes.items() if moved]
    assert changed == ["batch mates", "S"]
    assert row.worst_ulp["batch mates"] >= 1
    assert 0 < row.rows_changed["batch mates"] <= 1
    assert row.worst_ulp["page order"] == 0


@pytest.mark.emulator
def test_a_broken_promise_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Another rule under the name of one that keeps its bits, without the tree."""
    monkeypatch.setattr(determinism.Path, "promises", True)
    monkeypatch.setattr(determinism, "PATHS", (PATHS["vllm-triton"],))
    arguments = ["determinism", "--backend", "emulator", "--seq-len", "400", "--model"]
    assert main([*arguments, "llama-3.2-1b"]) == 1
    assert "THE BITS OF THE PATH 'vllm-triton' CHANGED" in capsys.readouterr().out


def test_times_are_given_over_the_fastest():
    rows = [determinism.Row("a", us=30.0), determinism.Row("b", us=20.0), determinism.Row("c")]
    *_, a, b, c = determinism.text(rows).splitlines()
    assert [line.split()[-1] for line in (a, b, c)] == ["1.50", "1.00", "-"]


def test_a_refused_path_says_why():
    row = determinism.examine(PATHS["fast kernel"], presets["phi-3-mini"], 20, 0, "emulator")
    assert "head_dim is 96" in row.note
    assert set(row.changes.values()) == {None}
    text = determinism.text([row])
    assert text.count("-  ") >= len(determinism.CHANGES)
    assert text.endswith(row.note)


@pytest.mark.emulator
def test_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    paths = (PATHS["fast kernel"], PATHS["readable, along the tree"], PATHS["fa3"])
    monkeypatch.setattr(determinism, "PATHS", paths)
    arguments = ["determinism", "--backend", "emulator", "--seq-len", "40", "--seed", "3"]
    lines = tmp_path / "rows.jsonl"
    assert main([*arguments, "--json", "--jsonl", str(lines)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in report["rows"]] == [path.name for path in paths]
    written = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [row["changes"] for row in written] == [row["changes"] for row in report["rows"]]
    assert {row["seq_len"] for row in written} == {40}
    assert report["ok"] is True
    assert {row["us"] for row in written} == {None}
    assert report["rows"][0]["changes"]["graph"] is None
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "fast kernel" in printed
    assert determinism.LEGEND in printed


def test_bad_arguments(capsys: pytest.CaptureFixture[str]):
    assert main(["determinism", "--seq-len", "0"]) == 2
    assert "--seq-len must be from 1" in capsys.readouterr().err
    assert main(["determinism", "--seed", "-1"]) == 2
    assert "--seed must be at least 0" in capsys.readouterr().err
