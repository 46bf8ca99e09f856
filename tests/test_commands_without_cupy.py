"""Commands for a GPU say at once that CuPy is missing, rather than half-way or many times."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from cupy_decode import __main__ as commands
from cupy_decode.bench import __main__ as bench
from cupy_decode.bench import dram, fast_options, host_time, reduce, study

from . import device_plans, sanitize, sweep


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (bench, []),
        (device_plans, []),
        (sanitize, []),
        (sweep, ["--backend", "cuda"]),
        *((module, ["rows.jsonl"]) for module in (dram, fast_options, host_time, reduce, study)),
    ],
    ids=lambda given: given.__name__ if isinstance(given, ModuleType) else "",
)
@pytest.mark.usefixtures("no_cupy")
def test_without_cupy_it_is_one_sentence(
    module: ModuleType,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *options])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 2
    message = capsys.readouterr()
    assert message.out == ""
    assert message.err.startswith("error: the CUDA backend needs CuPy:")
    assert message.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peers", "cudn"], "there is no peer 'cudn'"),
        (["--shapes", "mooncake"], "give --trace FILE"),
        (["--trace", "trace.jsonl"], "give --shapes mooncake too"),
        (["--only", "nothing like it"], "leaves no shape"),
        (["--kernel", "nowhere/a.cu"], "--kernel must be a file that exists; got nowhere/a.cu"),
        (["--out", "nowhere/rows.jsonl"], "--out must name a file in a folder that exists"),
    ],
)
@pytest.mark.usefixtures("no_cupy")
def test_wrong_options_are_named_before_cupy_is_needed(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["bench", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [["determinism"], ["experiment", "flip"]])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main([*command, "--jsonl", "nowhere/rows.jsonl"]) == 2
    message = capsys.readouterr()
    assert message.out == ""
    assert message.err == (
        "error: --jsonl must name a file in a folder that exists; got nowhere/rows.jsonl; make "
        "nowhere\n"
    )


@pytest.mark.parametrize("module", [fast_options, host_time, reduce, study])
def test_a_measurement_without_a_file_says_what_it_wants(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 2
    assert "the following arguments are required: FILE" in capsys.readouterr().err
