"""``python -m cupy_decode.bench``: the fast path over the floor on the standard shapes."""

from __future__ import annotations

import argparse
from pathlib import Path

from cupy_decode import backends
from cupy_decode.bench import SHAPES, compare, fast_path, table, write_jsonl


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cupy_decode.bench", description=__doc__)
    parser.add_argument(
        "--shapes", default="", help="only shapes whose 'model label' contains this text"
    )
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--out", type=Path, help="JSON lines of every result")
    parser.add_argument(
        "--kernel",
        type=Path,
        action="append",
        default=[],
        help="a self-contained source of paged_split_k_mma to compare, may be given several times",
    )
    options = parser.parse_args(argv)
    try:
        backends.runner("cuda")
    except backends.BackendUnavailableError as error:
        parser.exit(2, f"error: {error}\n")
    contestants = {"fast": fast_path()}
    for path in options.kernel:
        contestants[path.stem] = fast_path(path.read_text(encoding="utf-8"))
    shapes = [s for s in SHAPES if options.shapes in f"{s.model} {s.label}"]
    if not shapes:
        parser.error(f"no shape contains {options.shapes!r}")
    rows = compare(contestants, shapes, replays=options.replays)
    print(table(rows))
    if options.out:
        write_jsonl(options.out, rows)


if __name__ == "__main__":
    main()
