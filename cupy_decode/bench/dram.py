"""Bytes that the fast kernel reads from DRAM, as the hardware counts them.

``python -m cupy_decode.bench.dram FILE`` runs four steps of 100 MB and more under ``ncu`` (Nsight
Compute, part of the CUDA toolkit) and writes, for each, what was read and what ``traffic`` says has
to be. Counters may be read by administrators only, unless the driver is told otherwise.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from typing import Any

from cupy_decode import traffic
from cupy_decode.bench.compare import FastPath
from cupy_decode.bench.problems import problem
from cupy_decode.bench.records import environment, file_argument, write_jsonl
from cupy_decode.bench.shapes import Shape, named

_METRIC = "dram__bytes_read.sum"
_NCU = (
    "ncu", "--clock-control", "none", "--cache-control", "all", "--metrics", _METRIC,
    "--kernel-name", "regex:paged_split_k_mma", "--print-units", "base", "--csv",
)  # fmt: skip
_WANTED = {
    "llama-3-8b": ("1,32768", "64,ragged"),
    "llama-3-70b-tp8": ("64,8192",),
    "llama-2-7b": ("16,8192",),
}


def shapes() -> list[Shape]:
    """The steps that are counted, small to large."""
    return sorted(named(_WANTED), key=lambda s: s.kv_bytes)


def bytes_to_read(shape: Shape) -> int:
    """Bytes of K, V, queries and block table, each of them once."""
    return (
        shape.kv_bytes
        + traffic.q_bytes(len(shape.seq_lens), shape.heads)
        + traffic.block_table_bytes(shape.lens, 16)
    )


def bytes_read(report: str) -> list[int]:
    """Bytes of every kernel in what ``ncu --csv`` prints, whatever stands before its table."""
    start = report.find('"ID",')
    table = csv.DictReader(report[start:].splitlines()) if start >= 0 else ()
    return [
        int(float(row["Metric Value"].replace(",", "")))
        for row in table
        if row["Metric Name"] == _METRIC
    ]


def launch() -> None:
    """Launch the fast kernel once on each of the shapes."""
    import cupy

    for shape in shapes():
        p = problem(shape.heads, shape.lens, copies=1)
        FastPath()(p)[0]()
        cupy.cuda.Device().synchronize()
        del p
        cupy.get_default_memory_pool().free_all_blocks()


def dram() -> list[dict[str, Any]]:
    """A row for each shape: ``kv_bytes``, ``bytes_to_read``, ``dram_bytes`` and their ``ratio``.

    Raises
    ------
    RuntimeError
        If ``ncu`` did not count every launch; the message holds the end of what it said.
    """
    command = [*_NCU, sys.executable, "-m", "cupy_decode.bench.dram"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    counted = bytes_read(done.stdout)
    if done.returncode or len(counted) != len(shapes()):
        said = (done.stdout + done.stderr).strip()[-500:]
        raise RuntimeError(f"ncu counted {len(counted)} of {len(shapes())} launches: {said}")
    return [
        dict(
            bench="dram",
            model=shape.model,
            label=shape.label,
            kv_bytes=shape.kv_bytes,
            bytes_to_read=bytes_to_read(shape),
            dram_bytes=found,
            ratio=found / bytes_to_read(shape),
            **environment(),
        )
        for shape, found in zip(shapes(), counted, strict=True)
    ]


def main() -> None:
    """Count, print and write; without a file be what is counted."""
    if len(sys.argv) == 1:
        return launch()
    path = file_argument(__doc__)
    if shutil.which(_NCU[0]) is None:
        sys.exit(f"error: {_NCU[0]} is not on the PATH; it is Nsight Compute, of the CUDA toolkit")
    rows = dram()
    write_jsonl(path, rows)
    for row in rows:
        print("{model:16} {label:10} {dram_bytes:16,} bytes read {ratio:8.4f}".format(**row))


if __name__ == "__main__":
    main()
