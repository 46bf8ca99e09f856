"""The command line: what it prints, what it refuses, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_decode import tolerance, walkthrough
from cupy_decode.__main__ import main
from cupy_decode.paging import PoolExhausted

REFERENCE = ["--backend", "reference"]
SMALL = ["--model", "llama-3-70b-tp8", "--batch", "2", "--seq-len", "300"]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_walk_prints_tables_and_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *REFERENCE]) == 0
    text = capsys.readouterr().out
    for words in ("backend: reference", "vllm-triton", "sglang-triton", "S* = ", "scratch"):
        assert words in text
    assert text.rstrip().endswith("All results agree with float64.")


@pytest.mark.emulator
def test_the_walk_runs_the_kernels_on_the_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    out = report(capsys, *SMALL, "--backend", "emulator", "--policy", "first-wave")
    row = out["scenes"][0]["policies"][0]
    assert out["backend"] == "emulator"
    assert row["policy"] == "first-wave"
    assert 0 < row["max_error"] <= row["allowed_error"]


def test_the_chapters_single_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    out = report(capsys, "--batch", "1", "--seq-len", "2560", *REFERENCE)
    scene = out["scenes"][0]
    vllm, sglang = scene["policies"]
    assert scene["allocator_table_columns"] == 20
    assert scene["kernel_table_columns"] == 160
    assert vllm["engine_grid"] == [1, 8, 16]
    assert vllm["unsplit_blocks"] == 8
    assert vllm["first_wave_splits"] == 17
    assert vllm["kv_bytes"] == 10_485_760
    assert vllm["partial_bytes_allocated"] == 266_240
    assert vllm["partial_round_trip_active"] == 532_480
    assert vllm["block_table_bytes"] == 640
    assert vllm["intensity"] == 4.0
    assert sglang["rows"] == 8


@pytest.mark.parametrize("text", ["17\n40\n3\n", "TIME,ContextTokens,Gen\na,17,1\nb,40,1\nc,3,1\n"])
def test_lengths_come_from_files(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    out = report(capsys, "--lengths", str(path), *SMALL[:2], "--batch", "2", *REFERENCE)
    scene = out["scenes"][0]
    assert scene["scene"] == "requests of lengths.txt"
    assert (scene["batch"], scene["tokens"]) == (2, 57)


@pytest.mark.parametrize(("batch", "seq_len"), [(1, 0), (3, 0), (1, 1), (1, 128), (3, 128)])
def test_few_keys_fit_beside_the_earlier_tenants(
    batch: int, seq_len: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "llama-3-70b-tp8", "--batch", str(batch), "--seq-len", str(seq_len)]
    assert main([*options, *REFERENCE]) == 0
    assert capsys.readouterr().out.rstrip().endswith("All results agree with float64.")
    out = report(capsys, *options, *REFERENCE)
    assert out["scenes"][0]["tokens"] == batch * seq_len


def test_chat_lengths_are_seeded_and_in_range() -> None:
    a, b = (walkthrough.chat_lengths(20_000, seed) for seed in (1, 1))
    np.testing.assert_array_equal(a, b)
    assert a.min() >= walkthrough.CHAT_SHORTEST
    assert a.max() <= walkthrough.CHAT_LONGEST
    assert abs(np.median(a) - 760) < 25


def test_a_failed_check_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = tolerance.Bound(0.0, 0.0, 0.0, 0.0)
    monkeypatch.setattr(tolerance, "bound", lambda *a, **k: tight)
    assert main([*SMALL, *REFERENCE]) == 1
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "largest error" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-size", "24", "--kernel-block-size", "16"], "16"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--seq-len", "-1"], "--seq-len must be from 0"),
        (["--lengths", "README.md", "--batch", "-1"], "--batch must be at least 1; got -1"),
        (["--lengths", "README.md", "--batch", "0"], "--batch must be at least 1; got 0"),
        (["--policy", "nonsense"], "'nonsense' is not registered"),
        (["--policy", "fixed"], "no number of its own; got 'fixed': choose one of first-wave, "),
        (["--lengths", "no-such-file"], "no-such-file"),
    ],
)
def test_bad_arguments_are_exit_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *REFERENCE]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("error: ")


def test_an_exhausted_pool_is_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*_: Any) -> None:
        raise PoolExhausted("9 blocks are needed")

    monkeypatch.setattr(walkthrough, "build_step", exhausted)
    assert main(REFERENCE) == 2
    assert capsys.readouterr().err == "error: 9 blocks are needed\n"
