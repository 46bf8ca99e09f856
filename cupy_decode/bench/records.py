"""Results as JSON lines, each with the machine and the software it was measured on."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cupy_decode import backends, experiments
from cupy_decode.split_commands import require_folder


def require_gpu(what: str) -> None:
    """Refuse what times kernels where none can run; ``what`` begins the sentence."""
    backends.runner("cuda")
    if not experiments.gpu_is_visible():
        raise ValueError(f"{what} times kernels and needs a CUDA GPU; none is visible")


def file_argument(doc: str) -> Path:
    """The one argument of a module that measures: the file for its rows.

    Exits with status 2 and a sentence where nothing can be measured or written.

    Parameters
    ----------
    doc : str
        The module's docstring; its first line describes the command.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("file", metavar="FILE", type=Path, help="write the rows as JSON lines")
    file: Path = parser.parse_args().file
    try:
        require_folder("FILE", file)
        require_gpu("this")
    except (ValueError, backends.BackendUnavailableError) as error:
        parser.exit(2, f"error: {error}\n")
    return file


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
