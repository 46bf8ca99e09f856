"""Who runs a ``specs.Launch``: one module per backend, imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from cupy_decode.specs import ArrayType, Launch


class BackendUnavailableError(RuntimeError):
    """Something that a backend needs is not installed; the message says what to install."""


def runner(backend: Literal["cuda", "emulator"]) -> Any:
    """The module that runs launches and allocates arrays for them.

    Raises
    ------
    BackendUnavailableError
        If it is the CUDA backend and CuPy is not installed.
    """
    if backend == "cuda":
        try:
            from cupy_decode.backends import cuda
        except ModuleNotFoundError as error:
            if error.name != "cupy":
                raise
            raise BackendUnavailableError(
                "the CUDA backend needs CuPy:  python -m pip install -e '.[cuda13]'  (or cuda12)"
            ) from None
        return cuda
    from cupy_decode.backends import emulator

    return emulator


class Bound(Protocol):
    """Launches, one after the other, whose pointers are given by name on every call.

    A pointer is an array, an address, or None for null; of one name it is the same in all launches.
    """

    def fix(self, pointers: Mapping[str, Any]) -> None:
        """Set pointers for good: calls need not give them any more."""

    def __call__(self, pointers: Mapping[str, Any]) -> None:
        """Launch, on the current device and stream; every pointer that is not fixed is given."""


class _EmulatorBound:
    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches
        self._fixed: dict[str, Any] = {}

    def fix(self, pointers: Mapping[str, Any]) -> None:
        self._fixed.update(pointers)

    def __call__(self, pointers: Mapping[str, Any]) -> None:
        given = {**pointers, **self._fixed}
        for launch in self._launches:
            runner("emulator").run(launch.with_pointers(given))


def bind(backend: str, launches: Sequence[Launch]) -> Bound:
    """Launches whose pointers are given anew on every call."""
    if backend == "cuda":
        return runner("cuda").Bound(launches)  # type: ignore[no-any-return]
    return _EmulatorBound(launches)


def scratch(
    backend: str, arrays: Mapping[str, ArrayType], aliases: Mapping[str, str]
) -> Callable[[], tuple[Any, dict[str, Any]]] | None:
    """A function that allocates buffers which nobody but kernels looks at; None for no buffers.

    It returns what owns the memory, and a pointer by name; ``aliases`` are second names.
    """
    if not arrays:
        return None
    aliases = {second: first for second, first in aliases.items() if first in arrays}
    if backend == "cuda":
        return runner("cuda").scratch(arrays, aliases)  # type: ignore[no-any-return]
    emulator = runner("emulator")

    def allocate() -> tuple[Any, dict[str, Any]]:
        new = {name: emulator.empty(a.shape, a.dtype) for name, a in arrays.items()}
        return None, new | {second: new[first] for second, first in aliases.items()}

    return allocate
