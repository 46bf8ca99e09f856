"""What a first call costs: with an empty compile cache, and in a second process with a full one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from cupy_decode.bench.records import environment

#: One process: import, make arrays, decode once; seconds of the decode call alone and of the rest.
_CHILD = """
import json, sys, time
begin = time.perf_counter()
import cupy
import numpy as np
import cupy_decode as cd
q = cupy.zeros((2, 32, 128), "{dtype}")
cache = cupy.zeros((8, 16, 8, 128), "{dtype}")
table = cupy.zeros((2, 4), np.int32)
lens = cupy.full(2, 40, np.int32)
cupy.cuda.Device().synchronize()
ready = time.perf_counter()
cd.decode_attention(q, cache, cache, table, lens)
cupy.cuda.Device().synchronize()
print(json.dumps([ready - begin, time.perf_counter() - ready]))
"""


def child(cache_dir: str, dtype: str = "float16") -> subprocess.Popen[str]:
    """A process that decodes once, with CuPy's compile cache in ``cache_dir``."""
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(dtype=dtype)],
        env={**os.environ, "CUPY_CACHE_DIR": cache_dir},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def seconds(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Seconds to import and set up, and of the first decode call, of a ``child`` that succeeded.

    Raises
    ------
    RuntimeError
        If it failed; the message is what it wrote.
    """
    out, err = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(err)
    setup, call = json.loads(out)
    return setup, call


def cold_start(cache_dir: str, dtype: str = "float16") -> list[dict[str, Any]]:
    """Result rows of a first and a second process with the same, at first empty, ``cache_dir``.

    The call compiles three kernels: the plan, stage 1 and stage 2.
    """
    rows = []
    for state in ("empty", "full"):
        setup, call = seconds(child(cache_dir, dtype))
        rows.append(
            {
                "bench": "cold_start",
                "dtype": dtype,
                "compile_cache": state,
                "import_and_setup_s": round(setup, 3),
                "first_call_s": round(call, 3),
                **environment(),
            }
        )
    return rows
