"""Who runs a ``specs.Launch``: one module per backend, imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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


class _EmulatorBound:
    def __init__(self, launches: Sequence[Launch], places: Mapping[str, int]) -> None:
        self._launches, self._places = launches, places

    def __call__(self, pointers: tuple[Any, ...]) -> None:
        for launch in self._launches:
            names = [a.name for a in launch.args if a.ctype == "ptr" and a.value is not None]
            given = {name: pointers[self._places[name]] for name in names}
            runner("emulator").run(launch.with_pointers(given))


def bind(
    backend: str, launches: Sequence[Launch], places: Mapping[str, int]
) -> Callable[[tuple[Any, ...]], None]:
    """A function that launches, one after the other, on the current device and stream.

    It takes a tuple of pointers, addresses on the GPU and arrays in the emulator. ``places`` says
    where in it each name is; at 0 is null, 0 or None. What a launch has no value for is null.
    """
    if backend == "cuda":
        return runner("cuda").Bound(launches, places)  # type: ignore[no-any-return]
    return _EmulatorBound(launches, places)


def scratch(
    backend: str, arrays: Sequence[ArrayType | None]
) -> Callable[[], tuple[Any, tuple[Any, ...]]]:
    """A function that allocates buffers which nobody but kernels looks at.

    It returns what owns the memory, and a pointer to each; null for None.
    """
    if backend == "cuda":
        return runner("cuda").scratch(arrays)  # type: ignore[no-any-return]
    empty = runner("emulator").empty
    return lambda: (None, tuple(None if a is None else empty(a.shape, a.dtype) for a in arrays))
