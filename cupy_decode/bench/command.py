"""``python -m cupy_decode bench``: the fast path, the floor and other packages' kernels."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kernels_cu
from cupy_decode import plots
from cupy_decode.bench.compare import Contestant, FastPath, compare, float_maxima, table
from cupy_decode.bench.peers import PEERS, peer, unavailable, version
from cupy_decode.bench.records import require_gpu
from cupy_decode.bench.shapes import SETS, Shape, shape_set
from cupy_decode.split_commands import require_folder


def add_parser(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    command = commands.add_parser(
        "bench",
        help="time the fast kernel over the floor, beside other packages (needs a GPU)",
        description="Check, then time kernels as replays of a CUDA graph, with a cold L2 cache and "
        "shuffled pages; the floor is a kernel that only reads the same pages.",
    )
    command.set_defaults(run=run)
    command.add_argument(
        "--shapes", nargs="+", choices=SETS, default=["peers"], help="sets of decode steps (peers)"
    )
    command.add_argument(
        "--trace", metavar="FILE", help="recorded requests, which mooncake needs (none)"
    )
    command.add_argument(
        "--only", default="", help="shapes whose 'model label' contains this text (all)"
    )
    command.add_argument(
        "--peers",
        default="",
        help=f"comma-separated, where installed: {','.join(PEERS)} (none)",
    )
    command.add_argument(
        "--kernel",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="a version of paged_split_k_mma.cu as `source` prints it; where given several times, "
        "all are compared (the package's own)",
    )
    command.add_argument(
        "--float-maxima",
        action="store_true",
        help="also the package's kernel without the sums whose bits do not depend on the split",
    )
    command.add_argument(
        "--overlap",
        action="store_true",
        help="also the package's kernel with overlap=True, each launch behind another one of its "
        "own, which reads as early as any launch can: an engine's other kernels leave less",
    )
    command.add_argument(
        "--replays", type=int, default=30, help="timed, of each kernel (%(default)s)"
    )
    command.add_argument(
        "--out", metavar="FILE", type=Path, help="keep the results as JSON lines (no file)"
    )
    command.add_argument(
        "--plot", metavar="FILE", help="draw time against length, over the floor (no file)"
    )


def _contestants(
    kernels: list[Path], with_float_maxima: bool, with_overlap: bool
) -> dict[str, Contestant]:
    others: dict[str, Contestant] = {}
    if with_float_maxima:
        others["float maxima"] = FastPath(float_maxima(kernels_cu.source("paged_split_k_mma")))
    if with_overlap:
        others["overlap"] = FastPath(cut={"overlap": True})
    if not kernels:
        return {"fast": FastPath()} | others
    names = [path.stem for path in kernels]
    if len(set(names)) < len(names):
        names = [str(path) for path in kernels]
    texts = [path.read_text(encoding="utf-8") for path in kernels]
    return {n: FastPath(text) for n, text in zip(names, texts, strict=True)} | others


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    if arguments.trace and "mooncake" not in arguments.shapes:
        raise ValueError("--trace is for the shape set mooncake; give --shapes mooncake too")
    sets = [shape_set(name, arguments.trace) for name in dict.fromkeys(arguments.shapes)]
    shapes = [s for one in sets for s in one if arguments.only in f"{s.model} {s.label}"]
    if not shapes:
        raise ValueError(f"--only {arguments.only!r} leaves no shape")
    return shapes


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 when a peer failed."""
    if arguments.replays < 1:
        raise ValueError(f"--replays must be at least 1; got {arguments.replays}")
    if arguments.plot:
        plots.require_figure("--plot", arguments.plot)
    if arguments.out:
        require_folder("--out", arguments.out)
    for path in arguments.kernel:
        if not path.is_file():
            raise ValueError(f"--kernel must be a file that exists; got {path}")
    shapes = _shapes(arguments)
    wanted = [name for name in arguments.peers.split(",") if name]
    for name in wanted:
        peer(name)
    require_gpu("bench")
    contestants = _contestants(arguments.kernel, arguments.float_maxima, arguments.overlap)
    missing = {name: why for name in wanted if (why := unavailable(name))}
    for why in missing.values():
        print(why)
    peers = {name: PEERS[name].launches for name in wanted if name not in missing}
    rows = []
    with open(arguments.out, "w", encoding="utf-8") if arguments.out else nullcontext() as file:
        for row in compare(contestants, shapes, peers=peers, replays=arguments.replays):
            if row["kernel"] == "environment":
                row |= {"peers": {name: version(name) for name in peers}}
            rows.append(row)
            if file:
                print(json.dumps(row), file=file, flush=True)
    print(table(rows))
    if arguments.plot:
        plots.time_against_length(rows).savefig(arguments.plot, dpi=150)
        print(f"\nFigure: {arguments.plot}")
    return int(any("failed" in row for row in rows))
