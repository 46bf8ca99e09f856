"""Who runs a ``specs.Launch``: one module per backend, imported when it is first asked for."""

from __future__ import annotations

from typing import Any, Literal


def runner(backend: Literal["cuda", "emulator"]) -> Any:
    """The module that runs launches and allocates arrays for them."""
    if backend == "cuda":
        from cupy_decode.backends import cuda

        return cuda
    from cupy_decode.backends import emulator

    return emulator
