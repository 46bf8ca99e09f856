"""Measure kernels: graph replays with cold caches, beside the machine's limits in the same run.

Times are microseconds, bandwidths bytes per second. CuPy is imported by the functions that need a
GPU, so shapes and results can be read anywhere.
"""

from cupy_decode.bench.compare import Contestant, FastPath, check, compare, table
from cupy_decode.bench.limits import copy_bandwidth, empty_launch, floor, limits, read_bandwidth
from cupy_decode.bench.peers import PEERS
from cupy_decode.bench.problems import Problem, problem, random_pool
from cupy_decode.bench.records import environment, read_jsonl, write_jsonl
from cupy_decode.bench.shapes import (
    BANDS,
    FLASH_DECODING,
    FP8,
    MODELS,
    RAGGED,
    SETS,
    SHAPES,
    UNIFORM,
    Shape,
    live_lengths,
    shape_set,
)
from cupy_decode.bench.timing import Timing, time_graph, time_us

__all__ = [
    "BANDS",
    "FLASH_DECODING",
    "FP8",
    "MODELS",
    "PEERS",
    "RAGGED",
    "SETS",
    "SHAPES",
    "UNIFORM",
    "Contestant",
    "FastPath",
    "Problem",
    "Shape",
    "Timing",
    "check",
    "compare",
    "copy_bandwidth",
    "empty_launch",
    "environment",
    "floor",
    "limits",
    "live_lengths",
    "problem",
    "random_pool",
    "read_bandwidth",
    "read_jsonl",
    "shape_set",
    "table",
    "time_graph",
    "time_us",
    "write_jsonl",
]
