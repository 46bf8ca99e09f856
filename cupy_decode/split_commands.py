"""The commands ``explore`` and ``experiment``: split rules as tables, figures and measurements."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cupy_decode import experiments, explore, plots, policies, results
from cupy_decode.heads import presets

_LONGEST = 2**20


def add_parsers(commands: Any) -> None:
    """Add both commands to a parser's subcommands."""
    table = commands.add_parser("explore", help="one decode step under every split policy")
    table.set_defaults(run=_explore)
    table.add_argument("--model", choices=sorted(presets), default="llama-3-8b")
    table.add_argument("--batch", type=int, default=1)
    table.add_argument("--seq-len", type=int, default=2560, help="keys of every sequence")
    table.add_argument("--num-sms", type=int, help="of the machine (this GPU's, or 132)")
    table.add_argument(
        "--sweep",
        action="store_true",
        help="time 1, 2, 4, ... splits and every policy's plan (needs a GPU)",
    )
    table.add_argument(
        "--plot",
        metavar="FILE",
        help="draw those times; without a GPU, times recorded on an H200, where this step has any",
    )
    table.add_argument("--json", action="store_true", help="print one JSON object")
    table.add_argument(
        "--jsonl", metavar="FILE", help="append what --sweep measures to a file of JSON lines"
    )

    experiment = commands.add_parser(
        "experiment",
        help="what a split rule decides, and what it costs",
        description="\n".join(f"{name:6} {e.help}" for name, e in experiments.EXPERIMENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    experiment.set_defaults(run=_experiment)
    experiment.add_argument("name", nargs="?", choices=list(experiments.EXPERIMENTS))
    experiment.add_argument("--model", choices=sorted(presets), default="llama-3-8b")
    experiment.add_argument("--seq-len", type=int, help="keys of every sequence")
    experiment.add_argument("--jsonl", metavar="FILE", help="append the rows to a file")


def _environment() -> dict[str, Any]:
    if not experiments.gpu_is_visible():
        return {}
    from cupy_decode import bench

    return bench.environment()


def require_folder(argument: str, file: str | Path) -> None:
    """Refuse a file that cannot be written, before the work that it is to keep."""
    folder = Path(file).parent
    if not folder.is_dir() or Path(file).is_dir():
        raise ValueError(
            f"{argument} must name a file in a folder that exists; got {file}"
            + ("" if folder.is_dir() else f"; make {folder}")
        )


def append(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a file of JSON lines, each with the GPU that it was measured on."""
    environment = _environment()
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps({**row, **environment}) + "\n" for row in rows)


def _check_seq_len(seq_len: int) -> None:
    if not 1 <= seq_len <= _LONGEST:
        raise ValueError(f"--seq-len must be from 1 to {_LONGEST}; got {seq_len}")


def _explore(arguments: argparse.Namespace) -> int:
    _check_seq_len(arguments.seq_len)
    if arguments.batch < 1:
        raise ValueError(f"--batch must be at least 1; got {arguments.batch}")
    gpu = experiments.gpu_is_visible()
    if arguments.sweep and not gpu:
        raise ValueError("--sweep times kernels and needs a CUDA GPU; none is visible")
    if arguments.jsonl and not (gpu and (arguments.sweep or arguments.plot)):
        raise ValueError("--jsonl keeps what --sweep measures; give --sweep too (needs a CUDA GPU)")
    if arguments.jsonl:
        require_folder("--jsonl", arguments.jsonl)
    if arguments.plot:
        plots.require_figure("--plot", arguments.plot)
    device = experiments.this_device()
    if arguments.num_sms is not None:
        device = policies.Device(arguments.num_sms)
    step = policies.StepShape([arguments.seq_len] * arguments.batch, presets[arguments.model])
    rows = explore.table(step, device)
    what = dict(model=arguments.model, batch=arguments.batch, seq_len=arguments.seq_len)
    measured: list[dict[str, Any]] = []
    origin, machine = "Measured now", f"{device.num_sms} SMs"
    if gpu and (arguments.sweep or arguments.plot):
        timed = experiments.measure(step, device, [row.policy for row in rows])
        measured = list(tqdm(timed, "timing plans", disable=None, leave=False))
    elif arguments.plot:
        measured = _recorded({**what, "num_sms": device.num_sms})
        machine = " and ".join(sorted({f"{row['gpu']}, {row['date']}" for row in measured}))
        origin = f"Recorded on an {machine}, not measured now"
    if arguments.jsonl:
        append(arguments.jsonl, ({"experiment": "explore", **what, **row} for row in measured))
    if arguments.json:
        report: dict[str, Any] = {
            **what,
            "num_sms": device.num_sms,
            "rows": [dataclasses.asdict(row) for row in rows],
            "measured": measured,
        }
        print(json.dumps({**report, **_environment()}))
    else:
        print(f"{arguments.model}, batch {arguments.batch}, {arguments.seq_len} keys, ", end="")
        print(f"{device.num_sms} SMs\n\n{explore.text(rows)}\n\n{explore.LEGEND}")
        if measured:
            print(f"\n{origin}; this package's kernels, caches cold:\n")
            print(experiments.text(measured, experiments.MEASURED))
            print(f"\n{experiments.MEASURED_LEGEND}")
    if arguments.plot:
        title = f"{arguments.model}, batch {arguments.batch}, {arguments.seq_len:,} keys"
        plots.split_sweep(measured, f"{title} ({machine})").savefig(arguments.plot, dpi=150)
        if not arguments.json:
            print(f"\nFigure: {arguments.plot}")
    return 0


def _recorded(what: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of a step that come with the package."""
    found = [row for row in results.load("experiments_h200") if row["experiment"] == "explore"]
    rows = [row for row in found if all(row[key] == value for key, value in what.items())]
    if not rows:
        steps = sorted({tuple(row[key] for key in what) for row in found})
        options = ["--" + key.replace("_", "-") for key in what]
        known = [" ".join(f"{o} {v}" for o, v in zip(options, s, strict=True)) for s in steps]
        raise ValueError(
            "--plot draws times of kernels; no CUDA GPU is visible, and of this step no times were "
            f"recorded. There are records of:  {';  '.join(known)}"
        )
    return rows


def _experiment(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        names = [
            (name, experiment.help, "needs a GPU" if experiment.needs_gpu else "")
            for name, experiment in experiments.EXPERIMENTS.items()
        ]
        print(explore.align(names, left={0, 1, 2}))
        return 0
    experiment = experiments.EXPERIMENTS[arguments.name]
    if experiment.needs_gpu and not experiments.gpu_is_visible():
        raise ValueError(
            f"experiment {arguments.name} runs kernels and needs a CUDA GPU; none is visible"
        )
    seq_len = experiment.seq_len if arguments.seq_len is None else arguments.seq_len
    _check_seq_len(seq_len)
    if arguments.jsonl:
        require_folder("--jsonl", arguments.jsonl)
    run = experiment.run(presets[arguments.model], seq_len)
    rows = list(tqdm(run, arguments.name, disable=None, leave=False))
    print(f"{experiment.help}\n{arguments.model}\n")
    print(experiments.text(rows, experiment.columns))
    if experiment.note:
        print(f"\n{experiment.note}")
    if arguments.jsonl:
        what = dict(experiment=arguments.name, model=arguments.model)
        append(arguments.jsonl, ({**what, **row} for row in rows))
    return 0
