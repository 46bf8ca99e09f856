"""The compile cache on disk: full, shared by many processes at once, or not writable."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cupy_decode.bench import cold_start

pytestmark = pytest.mark.gpu


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    def kept() -> dict[str, float]:
        return {f.name: f.stat().st_mtime for f in tmp_path.iterdir()}

    cold_start.seconds(cold_start.child(str(tmp_path)))
    before = kept()
    assert before
    cold_start.seconds(cold_start.child(str(tmp_path)))
    assert kept() == before


def test_processes_that_start_together_share_an_empty_cache(tmp_path: Path) -> None:
    together = [cold_start.child(str(tmp_path)) for _ in range(8)]
    assert len([cold_start.seconds(p) for p in together]) == 8
    leftovers = [f.name for f in tmp_path.iterdir() if not re.fullmatch(r".*\.cubin", f.name)]
    assert not leftovers


def test_a_cache_that_cannot_be_written_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy
    import numpy as np
    from cupy.cuda import compiler

    import cupy_decode as cd
    import kernels_cu
    from cupy_decode.backends import cuda

    ours = kernels_cu.source("merge_states")
    attempts = []

    class ReadOnly(type(compiler._kernel_cache_backend)):  # type: ignore[misc]
        def load(self, name: str) -> None:
            return None

        def save(self, name: str, cubin: bytes, source: str) -> None:
            if ours not in source:  # CuPy's kernels, such as the one of `ones`: not ours to save
                return super().save(name, cubin, source)
            attempts.append(name)
            raise PermissionError("read-only")

    monkeypatch.setattr(compiler, "_kernel_cache_backend", ReadOnly())
    cuda.raw_kernel.cache_clear()
    cupy.clear_memo()  # CuPy's own memory of what it compiled
    k = cd.kernel("merge_states", cd.KernelSpec("float32"))
    assert k.raw is not None
    assert attempts
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ
    a, lse = cupy.ones((2, 3, 64), np.float32), cupy.zeros((2, 3), np.float32)
    out, _ = cd.merge_states(a, lse, a, lse)
    cupy.testing.assert_allclose(out, a)
    cuda.raw_kernel.cache_clear()
