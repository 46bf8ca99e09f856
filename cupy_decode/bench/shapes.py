"""The decode steps that measurements are quoted on, in sets.

``peers``: 4 models, 11 uniform batches and a ragged one. They span four orders of magnitude of KV
bytes, from one short sequence on one KV head to 17 GB, so that launch overhead, split-K, bandwidth
and load balance each decide some of them. ``flash-decoding``: one number of keys, from many short
sequences to a single long one. ``mooncake``: what is live at moments of a recorded trace. ``fp8``:
the largest of ``peers`` with caches of 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupy_decode import traffic
from cupy_decode.heads import HeadConfig, presets
from cupy_decode.trace_replay import Request, read_trace

MODELS = {
    "llama-3-8b": presets["llama-3-8b"],
    "llama-3-70b-tp8": presets["llama-3-70b-tp8"],
    "llama-2-7b": presets["llama-2-7b"],
    "qwen-g8": HeadConfig(64, 8, 128),
}

#: (batch, keys of every sequence) of the uniform shapes.
UNIFORM = (
    (1, 512),
    (1, 2560),
    (1, 8192),
    (1, 32768),
    (1, 131072),
    (8, 2560),
    (16, 8192),
    (64, 2560),
    (64, 8192),
    (256, 1024),
    (256, 4096),
)

#: 64 lengths drawn once from 128 .. 32768, uniform in their logarithm.
# fmt: off
RAGGED = (
    4376, 571, 160, 140, 11634, 20199, 3699, 7311, 2608, 22860, 11802, 129, 14860, 154, 7318, 339,
    15344, 2577, 674, 1333, 149, 254, 5275, 4632, 3883, 1074, 32264, 29464, 5730, 4717, 5823, 1106,
    270, 6994, 2357, 715, 1893, 17754, 22730, 930, 3045, 762, 3454, 833, 1122, 17832, 451, 4055,
    203, 12954, 10063, 482, 16519, 177, 825, 294, 1555, 10591, 459, 170, 1206, 384, 211, 3197,
)
# fmt: on

#: Upper ends, in bytes of 16-bit K and V, of the bands that results are summed up in.
BANDS = (
    ("< 2.2 MB", 2.2e6),
    ("2-35 MB", 35e6),
    ("35-100 MB", 100e6),
    ("100-500 MB", 500e6),
    ("> 500 MB", float("inf")),
)


@dataclass(frozen=True)
class Shape:
    """One decode step: a model's heads and the lengths of a batch.

    Attributes
    ----------
    model : str
    heads : HeadConfig
    label : str
        ``"batch,length"``, or ``"batch,ragged"``.
    seq_lens : tuple of int
    dtype : {"bfloat16", "float16"}
    kv_dtype : {"e4m3", "e5m2"} or None
        Of the caches, where they hold 8-bit floats.
    """

    model: str
    heads: HeadConfig
    label: str
    seq_lens: tuple[int, ...]
    dtype: str = "bfloat16"
    kv_dtype: str | None = None

    @property
    def lens(self) -> np.ndarray:
        """Lengths as int32, shape (batch,)."""
        return np.array(self.seq_lens, np.int32)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return traffic.kv_bytes(self.lens, self.heads, 1 if self.kv_dtype else 2)

    @property
    def band(self) -> str:
        """Name of the size band in ``BANDS``."""
        return next(name for name, end in BANDS if self.kv_bytes < end)


def _shapes() -> tuple[Shape, ...]:
    shapes = []
    for model, heads in MODELS.items():
        for batch, length in UNIFORM:
            shapes.append(Shape(model, heads, f"{batch},{length}", (length,) * batch))
        shapes.append(Shape(model, heads, f"{len(RAGGED)},ragged", RAGGED))
    return tuple(shapes)


#: All 48.
SHAPES = _shapes()


def named(labels: Mapping[str, Sequence[str]]) -> list[Shape]:
    """Those of ``SHAPES`` with the labels given for their model."""
    return [s for s in SHAPES if s.label in labels.get(s.model, ())]


#: Keys of the whole batch on every shape of ``FLASH_DECODING``.
_FLASH_DECODING_KEYS = 65536
#: FlashDecoding's figure: 16 query heads on 2 KV heads, fp16, from 256 sequences to one.
FLASH_DECODING = tuple(
    Shape(
        "flash-decoding",
        HeadConfig(16, 2, 128),
        f"{batch},{_FLASH_DECODING_KEYS // batch}",
        (_FLASH_DECODING_KEYS // batch,) * batch,
        "float16",
    )
    for batch in (256, 128, 64, 32, 16, 8, 4, 2, 1)
)

#: Those of ``SHAPES`` that read a gigabyte or more, with caches of e4m3.
FP8 = tuple(
    Shape("fp8", s.heads, f"{s.model} {s.label}", s.seq_lens, kv_dtype="e4m3")
    for s in SHAPES
    if s.kv_bytes >= 1e9
)

#: Minutes into a trace at which its live batch is taken.
_MINUTES = tuple(range(6, 60, 6))
#: Milliseconds that an answer token takes.
_TOKEN_MS = 30
SETS = ("peers", "flash-decoding", "mooncake", "fp8")


def live_lengths(requests: Sequence[Request], second: float) -> tuple[int, ...]:
    """Lengths of the sequences that are being decoded at a second, when a token takes 30 ms.

    A request is live from its arrival until its last output token; its keys are the prompt and the
    tokens since.
    """
    elapsed = ((r, 1000 * (second - r.arrival)) for r in requests)
    return tuple(
        r.input_length + int(ms // _TOKEN_MS)
        for r, ms in elapsed
        if 0 <= ms < _TOKEN_MS * r.output_length
    )


def shape_set(name: str, trace: str | Path | None = None) -> tuple[Shape, ...]:
    """The shapes of one of ``SETS``.

    Parameters
    ----------
    name : str
    trace : path, optional
        Recorded requests for ``mooncake``, in a format that ``trace_replay.read_trace`` knows.

    Raises
    ------
    ValueError
        If there is no such set, or ``mooncake`` comes without a trace.
    """
    if name == "peers":
        return SHAPES
    if name == "flash-decoding":
        return FLASH_DECODING
    if name == "fp8":
        return FP8
    if name != "mooncake":
        raise ValueError(f"there is no shape set {name!r}; the sets are {', '.join(SETS)}")
    if trace is None:
        raise ValueError("the shape set mooncake is cut from a trace; give --trace FILE")
    requests = read_trace(trace)
    return tuple(
        Shape("mooncake", presets["llama-3-8b"], f"{minute} min", lens)
        for minute in _MINUTES
        if (lens := live_lengths(requests, 60 * minute))
    )
