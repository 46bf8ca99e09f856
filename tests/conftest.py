from __future__ import annotations

import pytest


def _no_gpu() -> str | None:
    try:
        import cupy
    except ImportError as error:
        return f"needs a CUDA GPU: cupy is not importable ({error})"
    return None if cupy.cuda.is_available() else "needs a CUDA GPU: none is visible"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if gpu else None
    if reason:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
