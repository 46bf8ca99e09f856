"""The decode steps that measurements are quoted on: 4 models, 11 uniform batches and a ragged one.

They span four orders of magnitude of KV bytes, from one short sequence on one KV head to 17 GB, so
that launch overhead, split-K, bandwidth and load balance each decide some of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_decode import traffic
from cupy_decode.heads import HeadConfig, presets

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
    """

    model: str
    heads: HeadConfig
    label: str
    seq_lens: tuple[int, ...]

    @property
    def lens(self) -> np.ndarray:
        """Lengths as int32, shape (batch,)."""
        return np.array(self.seq_lens, np.int32)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V with 16-bit elements."""
        return traffic.kv_bytes(self.lens, self.heads, 2)

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
