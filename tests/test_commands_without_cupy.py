"""Commands for a GPU say at once that CuPy is missing, rather than half-way or many times."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from cupy_decode import __main__ as commands
from cupy_decode import backends
from cupy_decode.bench import __main__ as bench

from . import device_plans, sanitize, sweep


@pytest.mark.parametrize(
    ("module", "options"),
    [(bench, []), (device_plans, []), (sanitize, []), (sweep, ["--backend", "cuda"])],
    ids=["bench", "device_plans", "sanitize", "sweep"],
)
def test_without_cupy_it_is_one_sentence(
    module: ModuleType,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy_decode.backends.cuda", raising=False)
    monkeypatch.delattr(backends, "cuda", raising=False)
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
        (["--only", "nothing like it"], "leaves no shape"),
    ],
)
def test_wrong_options_are_named_before_cupy_is_needed(
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy_decode.backends.cuda", raising=False)
    monkeypatch.delattr(backends, "cuda", raising=False)
    assert commands.main(["bench", *options]) == 2
    assert words in capsys.readouterr().err
