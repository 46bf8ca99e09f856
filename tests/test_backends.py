"""Backends whose pieces are not installed say so in one sentence."""

from __future__ import annotations

import pytest

import cupy_decode as cd
from cupy_decode import backends
from cupy_decode.__main__ import main
from cupy_decode.backends.emulator import build

CUPY = r"^the CUDA backend needs CuPy:  python -m pip install -e '\.\[cuda13\]'  \(or cuda12\)$"


@pytest.mark.usefixtures("no_cupy")
def test_a_missing_cupy_says_what_to_install() -> None:
    with pytest.raises(backends.BackendUnavailableError, match=CUPY):
        backends.runner("cuda")
    with pytest.raises(backends.BackendUnavailableError, match=CUPY):
        cd.kernel("merge_states", cd.KernelSpec("float32"))


@pytest.mark.usefixtures("no_cupy")
def test_a_misspelt_kernel_is_refused_before_cupy_is_asked_for() -> None:
    with pytest.raises(ValueError, match="is called 'merge_state'; there are merge_states, "):
        cd.kernel("merge_state", cd.KernelSpec("float32"))


@pytest.mark.usefixtures("no_cupy")
def test_the_command_line_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("error: the CUDA backend needs CuPy:  python -m pip")


@pytest.mark.emulator
def test_the_command_line_says_what_the_emulator_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.load.cache_clear()  # loaded kernels need no compiler
    assert main(["--backend", "emulator", "--batch", "1", "--seq-len", "40"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: the emulator compiles kernels with no-such-compiler, which")
    assert message.count("\n") == 1
