"""``python -m cupy_decode``: the guided run, and the other commands.

Run without arguments it walks one decode step from the allocator to a checked result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kernels_cu
from cupy_decode import (
    backends,
    determinism,
    experiments,
    explore,
    live_batch,
    policies,
    split_commands,
    standalone,
    trace_replay,
    walkthrough,
)
from cupy_decode.backends import BackendUnavailableError
from cupy_decode.bench import command as bench_command
from cupy_decode.heads import counted, presets
from cupy_decode.paging import PoolExhausted

#: Policies that are no rule before they are given their number.
_NEED_A_NUMBER = ("fixed", "split-size")


def _policy_choices() -> list[str]:
    return [name for name in policies.names() if name not in _NEED_A_NUMBER]


def _source(arguments: argparse.Namespace) -> int:
    text = standalone.source(
        arguments.name, arguments.dtype, arguments.head_dim, arguments.group_size
    )
    print(text, end="")
    return 0


def _walk(arguments: argparse.Namespace) -> int:
    heads = presets[arguments.model]
    backend, why = walkthrough.choose_backend(arguments.backend)
    kernel_block_size = walkthrough.kernel_blocks_of(
        arguments.block_size, arguments.kernel_block_size
    )
    device, read_bandwidth, environment = policies.Device(), None, {}
    if backend == "cuda":
        cuda = backends.runner("cuda")
        if not experiments.gpu_is_visible():
            raise ValueError("--backend cuda needs a CUDA GPU; none is visible")
        from cupy_decode import bench

        device = policies.Device(num_sms=cuda.num_sms())
        read_bandwidth = bench.read_bandwidth()
        environment = bench.environment()
    scenes: list[tuple[str, np.ndarray]] = []
    if arguments.batch is not None and arguments.batch < 1:
        raise ValueError(f"--batch must be at least 1; got {arguments.batch}")
    if arguments.lengths:
        limit = 32 if arguments.batch is None else arguments.batch
        lengths = walkthrough.read_lengths(arguments.lengths, limit)
        scenes.append((f"requests of {Path(arguments.lengths).name}", lengths))
    elif arguments.batch is not None or arguments.seq_len is not None:
        batch = 1 if arguments.batch is None else arguments.batch
        seq_len = 2560 if arguments.seq_len is None else arguments.seq_len
        if not 0 <= seq_len <= 2**20:
            raise ValueError(f"--seq-len must be from 0 to {2**20}; got {seq_len}")
        scenes.append(("one length", np.full(batch, seq_len, np.int32)))
    else:
        scenes.append(("one sequence", np.full(1, 2560, np.int32)))
        # The emulator runs every thread of every block on one CPU core: a smaller batch.
        batch = 4 if backend == "emulator" else 32
        scenes.append(("chat-like requests", walkthrough.chat_lengths(batch, arguments.seed)))
    names = [arguments.policy] if arguments.policy else ["vllm-triton", "sglang-triton"]
    if arguments.policy in _NEED_A_NUMBER:
        raise ValueError(
            f"--policy must be a rule that needs no number of its own; got {arguments.policy!r}: "
            f"choose one of {', '.join(_policy_choices())}"
        )

    if not arguments.json:
        print(
            f"{arguments.model}: {heads.num_q_heads} query heads, {heads.num_kv_heads} KV heads, "
            f"head_dim {heads.head_dim}, bf16"
        )
        print(f"{why}; SM counts and coverage are for {device.num_sms} SMs")
        if read_bandwidth:
            print(f"read bandwidth measured now: {read_bandwidth / 1e9:.0f} GB/s")
    results = []
    for name, lengths in scenes:
        scene = walkthrough.run_scene(
            name,
            heads,
            lengths,
            names,
            block_size=arguments.block_size,
            kernel_block_size=kernel_block_size,
            backend=backend,
            device=device,
            seed=arguments.seed,
            read_bandwidth=read_bandwidth,
            progress=not arguments.json and sys.stderr.isatty(),
        )
        results.append(scene)
        if not arguments.json:
            print("\n" + walkthrough.render(scene))
    ok = all(row["ok"] for scene in results for row in scene["policies"])
    if arguments.json:
        report: dict[str, Any] = {
            "model": arguments.model,
            "backend": backend,
            "num_sms": device.num_sms,
            "read_bandwidth": read_bandwidth,
            **environment,
            "ok": ok,
            "scenes": results,
        }
        print(json.dumps(report))
    else:
        print("\n" + ("All results agree with float64." if ok else "A RESULT IS WRONG."))
    return 0 if ok else 1


def _trace(arguments: argparse.Namespace) -> int:
    result = trace_replay.run(arguments)
    batch = getattr(result, "live_batch", None)
    if batch is None:
        return 0
    heads = presets[arguments.model]
    backend, _ = walkthrough.choose_backend("auto")
    device = experiments.this_device()
    print(
        f"\nlive batch at {batch.time:.1f} s, where the first step from {arguments.at:g} s on with "
        "a sequence in decode begins\n(a step that computes prompts is long): "
        f"{counted(len(batch.seq_lens), 'sequence')}, "
        f"{counted(int(batch.seq_lens.sum()), 'key')}; {device.num_sms} SMs\n"
    )
    step = policies.StepShape(batch.seq_lens, heads)
    print(explore.text(explore.table(step, device, live_batch.parameterless_policies())))
    print(f"\n{explore.LEGEND}\n")
    if backend != "cuda":
        print("times of these plans need a CUDA GPU; none is visible")
        return 0
    rows = live_batch.run(batch, heads)
    cells = [
        [
            row["policy"],
            str(row["rows"]),
            f"{row['microseconds']:.1f}",
            f"{100 * row['read_fraction']:.0f} %",
            f"{row['max_difference']:.1e}",
        ]
        for row in rows
    ]
    header = ["policy", "plan rows", "us", "of read limit", "differs from first"]
    print("\n".join(walkthrough.table(header, cells)))
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m cupy_decode",
        description="Walk one decode step from the allocator to a checked result.",
    )
    top.set_defaults(run=_walk)
    top.add_argument("--model", choices=sorted(presets), default="llama-3-8b")
    top.add_argument("--batch", type=int, help="sequences of one length instead of the two scenes")
    top.add_argument("--seq-len", type=int, help="keys of each of them")
    top.add_argument(
        "--lengths",
        metavar="FILE",
        help="lengths of a batch: one a line, or a CSV with a ContextTokens column; "
        "--batch says how many (32)",
    )
    top.add_argument("--policy", help=f"one of {', '.join(_policy_choices())}")
    top.add_argument("--block-size", type=int, default=128, help="tokens per allocator block")
    top.add_argument("--kernel-block-size", type=int, help="tokens per kernel block (16)")
    top.add_argument("--backend", choices=["auto", "cuda", "emulator", "reference"], default="auto")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    commands = top.add_subparsers(title="other commands")
    source = commands.add_parser(
        "source",
        help="print one kernel as a self-contained CUDA file",
        description="Print one kernel, headers spliced in, with one specialisation kept: "
        "nvcc -std=c++17 -arch=sm_90 -cubin compiles it as it is.",
    )
    source.add_argument("name", choices=kernels_cu.names())
    source.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    source.add_argument("--head-dim", type=int, default=128)
    source.add_argument("--group-size", type=int, default=4, help="query heads per KV head")
    source.set_defaults(run=_source)
    trace = commands.add_parser(
        "trace", help="replay a recorded trace through the allocator, and a moment of it on the GPU"
    )
    trace_replay.add_arguments(trace)
    trace.set_defaults(run=_trace)
    split_commands.add_parsers(commands)
    determinism.add_parser(commands)
    bench_command.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 when a check fails, 2 for a bad argument."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError, OSError, PoolExhausted, BackendUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
