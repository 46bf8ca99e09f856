"""Torch tensors in, torch tensors out: without copies, on torch's current stream.

CUDA tensors pass to CuPy and back through DLPack; host tensors share their memory with NumPy.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from cupy_decode.specs import FP8_DTYPES

Operator = TypeVar("Operator", bound=Callable[..., Any])
_FP8_NAMES = {f"torch.{name}": kv_dtype for kv_dtype, name in FP8_DTYPES.items()}


def takes_torch(operator: Operator) -> Operator:
    """Let an operator on NumPy and CuPy arrays take torch tensors.

    Tensors become CuPy arrays (CUDA) or NumPy arrays (host) that share their memory; arrays that
    come back become tensors. The operator runs on torch's current stream of the tensors' device.
    8-bit floats travel as bytes, and ``kv_dtype`` is filled in where the operator has it.
    """
    names_kv_dtype = "kv_dtype" in inspect.signature(operator).parameters

    @functools.wraps(operator)
    def call(*args: Any, **options: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:  # then nobody can have a tensor
            return operator(*args, **options)
        tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
        if not tensors:
            return operator(*args, **options)
        return _call_on_arrays(torch, operator, tensors, args, options, names_kv_dtype)

    return call  # type: ignore[return-value]


def _call_on_arrays(
    torch: Any,
    operator: Callable[..., Any],
    tensors: list[Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    names_kv_dtype: bool,
) -> Any:
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"all tensors must be on one device; got {', '.join(sorted(map(str, devices)))}"
        )
    fp8 = {_FP8_NAMES[str(x.dtype)] for x in tensors if str(x.dtype) in _FP8_NAMES}
    if len(fp8) > 1:
        raise TypeError("the caches must be of one type; got tensors of e4m3 and of e5m2")
    if fp8 and names_kv_dtype:
        options = {**options, "kv_dtype": options.get("kv_dtype") or fp8.pop()}

    device = devices.pop()
    on_gpu = device.type == "cuda"
    if not on_gpu and device.type != "cpu":
        raise TypeError(f"tensors must be on a CUDA device or on the CPU; got {device}")
    convert = _to_cupy if on_gpu else _to_numpy
    taken: dict[int, tuple[Any, Any]] = {}  # by array, the tensor it came from
    made: dict[int, Any] = {}  # by tensor, its array

    def array(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in made:  # once, so that out=out_a is still one array
            made[id(x)] = convert(torch, x)
        taken[id(made[id(x)])] = made[id(x)], x
        return made[id(x)]

    def tensor(x: Any) -> Any:
        if id(x) in taken:
            return taken[id(x)][1]
        if isinstance(x, np.ndarray):
            if x.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(x)
        # Not startswith: a plan is of cupy_decode and stays as it is.
        return torch.from_dlpack(x) if type(x).__module__.partition(".")[0] == "cupy" else x

    def run() -> Any:
        result = operator(*map(array, args), **{n: array(x) for n, x in options.items()})
        return tuple(map(tensor, result)) if isinstance(result, tuple) else tensor(result)

    if not on_gpu:
        return run()
    import cupy

    handle = torch.cuda.current_stream(device).cuda_stream
    with cupy.cuda.Device(device.index):
        stream = cupy.cuda.Stream.null
        if handle:
            stream = cupy.cuda.Stream.from_external(_Stream(handle))
        with stream:
            return run()


class _Stream:
    """A stream of another library, by the protocol that CuPy asks for."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle  # version of the protocol, stream


def _to_cupy(torch: Any, tensor: Any) -> Any:
    import cupy

    tensor = tensor.detach()
    if str(tensor.dtype) in _FP8_NAMES:
        tensor = tensor.view(torch.uint8)
    return cupy.from_dlpack(tensor)


def _to_numpy(torch: Any, tensor: Any) -> np.ndarray:
    tensor = tensor.detach()
    if str(tensor.dtype) in _FP8_NAMES:
        return tensor.view(torch.uint8).numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
