"""Measure kernels: graph replays with cold caches, beside the machine's limits in the same run.

Times are microseconds, bandwidths bytes per second. CuPy is imported by the functions that need a
GPU, so shapes and results can be read anywhere.
"""

from cupy_decode.bench.compare import Contestant, check, compare, fast_path, table
from cupy_decode.bench.limits import copy_bandwidth, empty_launch, floor, limits, read_bandwidth
from cupy_decode.bench.problems import Problem, problem, random_pool
from cupy_decode.bench.records import environment, read_jsonl, write_jsonl
from cupy_decode.bench.shapes import BANDS, MODELS, RAGGED, SHAPES, UNIFORM, Shape
from cupy_decode.bench.timing import Timing, time_graph, time_us

__all__ = [
    "BANDS",
    "MODELS",
    "RAGGED",
    "SHAPES",
    "UNIFORM",
    "Contestant",
    "Problem",
    "Shape",
    "Timing",
    "check",
    "compare",
    "copy_bandwidth",
    "empty_launch",
    "environment",
    "fast_path",
    "floor",
    "limits",
    "problem",
    "random_pool",
    "read_bandwidth",
    "read_jsonl",
    "table",
    "time_graph",
    "time_us",
    "write_jsonl",
]
