"""Who runs a ``specs.Launch``: one module per backend, imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from cupy_decode.specs import ArrayType, Launch

#: Launches on the arrays or addresses given by name.
Bound = Callable[[Mapping[str, Any]], None]


def runner(backend: Literal["cuda", "emulator"]) -> Any:
    """The module that runs launches and allocates arrays for them."""
    if backend == "cuda":
        from cupy_decode.backends import cuda

        return cuda
    from cupy_decode.backends import emulator

    return emulator


def bind(backend: str, launch: Launch) -> Bound:
    """A launch whose pointers are given anew on every call."""
    if backend == "cuda":
        return runner("cuda").bind(launch)  # type: ignore[no-any-return]
    emulator = runner("emulator")
    return lambda pointers: emulator.run(launch.with_pointers(pointers))


def scratch(
    backend: str, arrays: Mapping[str, ArrayType]
) -> Callable[[], tuple[Any, dict[str, Any]]] | None:
    """A function that allocates buffers which nobody but kernels looks at; None for no buffers.

    It returns what owns the memory, and a pointer by name.
    """
    if not arrays:
        return None
    if backend == "cuda":
        return runner("cuda").scratch(arrays)  # type: ignore[no-any-return]
    emulator = runner("emulator")

    def allocate() -> tuple[Any, dict[str, Any]]:
        return None, {name: emulator.empty(a.shape, a.dtype) for name, a in arrays.items()}

    return allocate
