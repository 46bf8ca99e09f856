from __future__ import annotations

import sys

import pytest

from cupy_decode import backends


def _no_gpu() -> str | None:
    try:
        import cupy
    except ImportError as error:
        return f"needs a CUDA GPU: cupy is not importable ({error})"
    return None if cupy.cuda.is_available() else "needs a CUDA GPU: none is visible"


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where CuPy is not installed."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy_decode.backends.cuda", raising=False)
    monkeypatch.delattr(backends, "cuda", raising=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if gpu else None
    if reason:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
