"""The long comparison of device plans with the host's, as a command."""

from __future__ import annotations

import sys

import pytest

from cupy_decode import backends

from . import device_plans


def test_without_cupy_it_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy_decode.backends.cuda", raising=False)
    monkeypatch.delattr(backends, "cuda", raising=False)
    monkeypatch.setattr(device_plans, "ProcessPoolExecutor", None)
    monkeypatch.setattr(sys, "argv", ["device_plans"])
    with pytest.raises(SystemExit) as stopped:
        device_plans.main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: the CUDA backend needs CuPy:")
    assert message.count("\n") == 1
