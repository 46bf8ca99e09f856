"""The same inputs on a GPU and in the emulator: do the results agree to rounding?

``python -m tests.agreement measure FILE.npz`` runs every decode case on the GPU and keeps the
results; ``python -m tests.agreement compare FILE.npz RESULTS.jsonl`` runs the same cases in the
emulator, on any machine with g++, and writes one line a case.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tqdm import tqdm

import cupy_decode as cd
from cupy_decode import tolerance
from cupy_decode.bench import records

from .decode_cases import ALL, build


def measure(path: Path) -> None:
    """Results of every case on the GPU, bit patterns kept, and what it was run on."""
    import cupy

    kept = {"environment": np.array(json.dumps(records.environment()))}
    for case in tqdm(ALL, unit="case"):
        problem = build(case).to(cupy)
        out, lse = cd.decode_attention(*problem.arrays, case.plan(), **problem.options)
        bits = cupy.ascontiguousarray(out).view(np.uint8)
        kept[f"{case}/out"], kept[f"{case}/lse"] = bits.get(), lse.get()
    np.savez_compressed(path, **kept)  # type: ignore[arg-type]


def compare(path: Path, results: Path) -> None:
    """One line a case: the largest difference, beside what either may differ from float64."""
    lines = []
    with np.load(path) as kept:
        environment = json.loads(str(kept["environment"]))
        for case in tqdm(ALL, unit="case"):
            problem = build(case)
            out, lse = cd.decode_attention(
                *problem.arrays, case.plan(), backend="emulator", **problem.options
            )
            gpu_out = kept[f"{case}/out"].view(out.dtype).reshape(out.shape).astype(np.float64)
            gpu_lse = kept[f"{case}/lse"]
            np.testing.assert_array_equal(np.isfinite(gpu_lse), np.isfinite(lse))
            exact = cd.reference.decode_attention(*problem.arrays, **problem.options)
            allowed = tolerance.bound(*problem.arrays, *exact, **problem.options)
            finite = np.isfinite(lse)
            line = {
                "case": case.name,
                "dtype": case.dtype,
                "out_difference": float(np.abs(gpu_out - out.astype(np.float64)).max()),
                "out_allowed": allowed.out_max,
                "lse_difference": float(np.abs(gpu_lse[finite] - lse[finite]).max(initial=0)),
                "lse_allowed": allowed.lse_max,
                **environment,
            }
            for name in ("out", "lse"):
                if line[f"{name}_difference"] > line[f"{name}_allowed"]:
                    raise SystemExit(f"{case}: GPU and emulator disagree: {line}")
            lines.append(line)
    records.write_jsonl(results, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("measure").add_argument("kept", type=Path)
    comparing = steps.add_parser("compare")
    comparing.add_argument("kept", type=Path)
    comparing.add_argument("results", type=Path)
    given = parser.parse_args()
    if given.step == "measure":
        measure(given.kept)
    else:
        compare(given.kept, given.results)


if __name__ == "__main__":
    main()
