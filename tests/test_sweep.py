"""A slice of the random sweep in every run; the whole of it by ``python -m tests.sweep``."""

from __future__ import annotations

import os

import pytest

import cupy_decode as cd

from . import sweep
from .sweep import Config

#: Calls and specialisations of the slice; the environment asks for more.
COUNT = int(os.environ.get("CUPY_DECODE_SWEEP", "60"))
SPECIALISATIONS = 12 if COUNT <= 120 else 60


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("emulator", marks=pytest.mark.emulator),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_random_calls_equal_the_reference(backend: str) -> None:
    configs = sweep.sweep(COUNT, SPECIALISATIONS, seed=1)
    assert len(sweep.kernels(configs)) <= SPECIALISATIONS
    wrong = sweep.failures(configs, backend)
    assert not wrong, "\n".join(wrong)


def test_most_pairs_of_options_meet() -> None:
    met, possible = sweep.coverage(sweep.sweep(500, 60, seed=0))
    assert met / possible > 0.97, f"{met} of {possible} pairs"


def test_a_seed_gives_the_same_calls() -> None:
    assert sweep.sweep(20, 5, seed=3) == sweep.sweep(20, 5, seed=3)
    assert sweep.sweep(20, 5, seed=3) != sweep.sweep(20, 5, seed=4)


def test_a_wrong_result_is_found_and_made_simple(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window one key too wide, what is left of a failing call is the window."""
    right = cd.decode_attention

    def too_wide(*arrays: object, window: int | None = None, **options: object) -> object:
        return right(*arrays, window=window and window + 1, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cd, "decode_attention", too_wide)
    configs = [c for c in sweep.sweep(60, 12, seed=1) if c.call == "decode"]
    wrong = sweep.failures(configs, "reference")
    assert wrong
    for window in (1, 17):
        least = {Config(window=window), Config(finish=True, splits="1", window=window)}
        assert {w.split("\n")[0] for w in wrong} & {str(c) for c in least}
    assert not [w for w in wrong if "window" not in w]
