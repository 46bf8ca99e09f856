"""Results as JSON lines, each with the machine and the software it was measured on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """GPU, driver, CUDA and CuPy versions, and the date: what a result line must carry."""
    import cupy

    import cupy_decode

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())

    def version(number: int) -> str:
        return f"{number // 1000}.{number % 1000 // 10}"

    return dict(
        gpu=properties["name"].decode(),
        compute_capability=f"{properties['major']}.{properties['minor']}",
        num_sms=properties["multiProcessorCount"],
        l2_bytes=properties["l2CacheSize"],
        driver_cuda=version(runtime.driverGetVersion()),
        runtime_cuda=version(runtime.runtimeGetVersion()),
        cupy=cupy.__version__,
        cupy_decode=cupy_decode.__version__,
        date=datetime.date.today().isoformat(),
    )


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, replacing the file."""
    text = "".join(json.dumps(dict(row)) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file that ``write_jsonl`` wrote."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]
