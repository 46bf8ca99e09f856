"""Markdown tables and sentences of the committed results, as the README quotes them.

``python -m cupy_decode.results.tables`` rewrites the blocks between ``<!-- results: NAME -->`` and
``<!-- end -->`` in the README of the current directory; a test holds the README to them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cupy_decode import results


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured_on(row: dict[str, Any]) -> str:
    """Where and when a result was measured."""
    return f"{row['gpu']}, CUDA {row['driver_cuda']}, CuPy {row['cupy']}, {row['date']}"


def walkthrough() -> str:
    """The guided run's times, with the machine they were taken on."""
    reports = results.load("walkthrough_h200")
    rows = [
        [
            scene["scene"],
            f"{scene['batch']}",
            f"{scene['tokens']:,}",
            policy["policy"],
            f"{policy['rows']}",
            f"{policy['our_blocks']}",
            f"{policy['microseconds']:.1f}",
            f"{100 * policy['read_fraction']:.0f} %",
        ]
        for report in reports
        for scene in report["scenes"]
        for policy in scene["policies"]
    ]
    header = ["scene", "batch", "keys", "policy", "plan rows", "blocks", "µs", "of read limit"]
    limit = reports[0]["read_bandwidth"] / 1e9
    return (
        markdown(header, rows)
        + f"\n\n({measured_on(reports[0])}; read limit of the first run {limit:,.0f} GB/s; "
        "graph replay, cold L2, both stages.)"
    )


def _experiment(name: str) -> list[dict[str, Any]]:
    return [row for row in results.load("experiments_h200") if row["experiment"] == name]


def flip() -> str:
    """Both paths on both sides of vLLM's threshold, and the one that its gate takes."""
    header = ["KV heads", "batch", "vLLM takes", "split µs", "unsplit µs"]
    return markdown(
        header,
        [
            [
                str(row["num_kv_heads"]),
                str(row["batch"]),
                "split" if row["split"] else "unsplit",
                f"{row['split_us']:.1f}",
                f"{row['unsplit_us']:.1f}",
            ]
            for row in _experiment("flip")
        ],
    )


def graph() -> str:
    """Kernels in a captured step of 32 layers."""
    header = ["batch", "`paged_split_k`", "`reduce_splits`"]
    rows = [
        [str(row[key]) for key in ("batch", "paged_split_k", "reduce_splits")]
        for row in _experiment("graph")
    ]
    return markdown(header, rows)


def off() -> str:
    """What the split is worth to one sequence."""
    header = ["keys", "split µs", "unsplit µs", "ratio", "ms a token in 32 layers"]
    return markdown(
        header,
        [
            [
                f"{row['seq_len']:,}",
                f"{row['split_us']:.1f}",
                f"{row['unsplit_us']:.1f}",
                f"{row['speedup']:.1f}",
                f"{row['ms_per_token_saved']:.1f}",
            ]
            for row in _experiment("off")
        ],
    )


def sweep() -> str:
    """One long sequence against the number of splits."""
    header = ["splits", "SMs with work", "µs", "GB/s of K and V"]
    return markdown(
        header,
        [
            [
                str(row["num_splits"]),
                f"{100 * row['sm_coverage']:.0f} %",
                f"{row['us']:.1f}",
                f"{row['kv_gb_per_s']:.0f}",
            ]
            for row in _experiment("sweep")
            if row["num_splits"].bit_count() == 1
        ],
    )


def mixed() -> str:
    """What one prefill row costs the 15 decodes beside it."""
    header = ["KV heads", "keys", "split µs", "unsplit µs", "ratio"]
    return markdown(
        header,
        [
            [
                str(row["num_kv_heads"]),
                f"{row['seq_len']:,}",
                f"{row['split_us']:.1f}",
                f"{row['unsplit_us']:.1f}",
                f"{row['slower']:.1f}",
            ]
            for row in _experiment("mixed")
        ],
    )


def bits() -> str:
    """What a tree of sums takes, and what engines do instead of one."""
    rows = _experiment("bits")
    others = {"one_split": "one split", "fixed_256": "256 keys", "fixed_2048": "2,048 keys"}
    header = ["keys", "kernel", "tree µs", "free µs"]
    header += [cell for name in others.values() for cell in (f"{name} µs", "won")]
    body = []
    for row in rows:
        cells = [f"{row['seq_len']:,}", row["kernel"]]
        for key in ("tree", "free", *others):
            cells.append(f"{row[f'{key}_us']:.1f}" if f"{key}_us" in row else "-")
            if key in others:
                cells.append(f"{row[f'{key}_won']:.2f}" if f"{key}_won" in row else "-")
        body.append(cells)
    return markdown(header, body) + f"\n\n({rows[0]['model']}, bf16; {measured_on(rows[0])}.)"


def determinism() -> str:
    """What moves the bits of a sequence under each rule, and its time over the fastest."""
    rows = results.load("determinism_h200")
    words = {None: "-", False: "same", True: "moves"}
    changes = list(rows[0]["changes"])
    fastest = min(row["us"] for row in rows if row["us"] is not None)
    body = [
        [
            row["path"],
            *(words[row["changes"][change]] for change in changes),
            f"{max(row['worst_ulp'].values(), default=0):,}",
            "-" if row["us"] is None else f"{row['us'] / fastest:.2f}",
        ]
        for row in rows
    ]
    return (
        markdown(["path", *changes, "worst ULP", "/ fastest"], body)
        + f"\n\n({rows[0]['model']}, {rows[0]['seq_len']:,} keys; the fastest takes "
        f"{fastest:.1f} µs; {measured_on(rows[0])}.)"
    )


def _bench_sets(
    name: str = "fast_h200",
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The environment of a ``bench`` run, and its timed rows by shape set."""
    environment, *rows = results.load(name)
    apart = ("flash-decoding", "mooncake", "fp8")
    sets: dict[str, list[dict[str, Any]]] = {"peers": [], **{name: [] for name in apart}}
    for row in rows:
        if "us" in row:
            sets[row["model"] if row["model"] in apart else "peers"].append(row)
    return environment, sets


#: Other packages in the tables: the name that ``bench`` uses, and theirs.
_PEERS = {"cudnn": "cuDNN", "fa3": "FlashAttention-3"}


#: For every shape its rows by kernel.
_Shapes = list[dict[str, dict[str, Any]]]


def _by_shape(rows: list[dict[str, Any]]) -> _Shapes:
    """For every shape its rows by kernel, in the order of the file."""
    shapes: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        shapes.setdefault((row["model"], row["label"]), {})[row["kernel"]] = row
    return list(shapes.values())


def _bands(shapes: _Shapes) -> dict[str, _Shapes]:
    """Shapes by size of the KV cache, and then all of them."""
    names = dict.fromkeys(s["fast"]["band"] for s in shapes)
    return {n: [s for s in shapes if s["fast"]["band"] == n] for n in names} | {"all": shapes}


def geomean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def fast() -> str:
    """The tensor-core kernel over both floors of the same run, by size of the KV cache."""
    environment, sets = _bench_sets()
    shapes = _by_shape(sets["peers"])
    header = ["KV bytes", "shapes", "/ floor", "worst", "/ loose floor", "worst"]
    header += [f"{name} / floor" for name in _PEERS.values()]

    def cells(chosen: _Shapes) -> list[str]:
        found = [str(len(chosen))]
        for over in ("times_floor", "times_loose_floor"):
            factors = [shape["fast"][over] for shape in chosen]
            found += [f"{geomean(factors):.3f}", f"{max(factors):.2f}"]
        for peer in _PEERS:
            found.append(f"{geomean([s[peer]['times_floor'] for s in chosen]):.3f}")
        return found

    body = [[band, *cells(of_band)] for band, of_band in _bands(shapes).items()]
    ahead = [
        f"{sum(s['fast']['us'] < s[peer]['us'] for s in shapes)} shapes than {name}"
        for peer, name in _PEERS.items()
    ]
    versions = ", ".join(environment["peers"].values())
    return (
        markdown(header, body)
        + f"\n\n(Geometric means of times over the floor; {measured_on(environment)}; {versions}; "
        f"median of {environment['replays']} graph replays, cold L2. Faster on "
        f"{' and on '.join(ahead)}.)"
    )


def split_invariance() -> str:
    """What the sums that do not depend on the split cost, by band of the 48 shapes."""
    environment, sets = _bench_sets()
    shapes = _by_shape(sets["peers"])
    free, both = "float maxima", "the faster of both"
    columns = {free: (free,), "the best peer": (*_PEERS,), both: (free, *_PEERS)}

    def excess(shape: dict[str, dict[str, Any]], others: Sequence[str]) -> float:
        return 100 * (shape["fast"]["us"] / min(shape[k]["us"] for k in others) - 1)

    def cells(chosen: _Shapes) -> list[str]:
        values = [[excess(shape, others) for shape in chosen] for others in columns.values()]
        return [f"{x:+.1f} %" for v in values for x in (statistics.median(v), max(v))]

    body = [[band, *cells(of_band)] for band, of_band in _bands(shapes).items()]
    header = [x for name in columns for x in (f"over {name}, median", "worst")]
    worst = max(shapes, key=lambda shape: excess(shape, columns[both]))
    faster = min(columns[both], key=lambda kernel: float(worst[kernel]["us"]))
    return markdown(["KV bytes", *header], body) + (
        f"\n\n(All {len(shapes)} shapes, {measured_on(environment)}. Worst: "
        f"{worst['fast']['model']} {worst['fast']['label']}, {worst['fast']['us']:.1f} µs where "
        f"{_PEERS.get(faster, faster)} takes {worst[faster]['us']:.1f}.)"
    )


def overlap() -> str:
    """The fast kernel launched with overlap and without, over the floor of the same run."""
    name = "overlap_h200" if "overlap_h200" in results.names() else "fast_h200"
    environment, sets = _bench_sets(name)
    shapes = _by_shape(sets["peers"])
    body = []
    for band, of_band in _bands(shapes).items():
        plain, with_it = (
            [shape[kernel]["times_floor"] for shape in of_band] for kernel in ("fast", "overlap")
        )
        gain = geomean(with_it) / geomean(plain)
        means = [f"{geomean(plain):.3f}", f"{geomean(with_it):.3f}"]
        body.append([band, str(len(of_band)), *means, f"{max(with_it):.2f}", f"{gain:.3f}"])
    header = ["KV bytes", "shapes", "/ floor", "with overlap", "worst", "overlap / without"]
    return markdown(header, body) + (
        f"\n\n(Geometric means; {measured_on(environment)}; median of "
        f"{environment['replays']} graph replays, cold L2.)"
    )


def flash_decoding() -> str:
    """One number of keys in ever fewer, longer sequences."""
    _, sets = _bench_sets()
    shapes = _by_shape(sets["flash-decoding"])
    header = ["sequences", "keys of each", "floor µs", "fast µs", "GB/s"]
    header += [f"{name} µs" for name in _PEERS.values()]
    body = [
        [
            str(s["fast"]["batch"]),
            f"{s['fast']['longest']:,}",
            f"{s['floor']['us']:.1f}",
            f"{s['fast']['us']:.1f}",
            f"{s['fast']['gb_per_s']:,.0f}",
            *(f"{s[peer]['us']:.1f}" for peer in _PEERS),
        ]
        for s in sorted(shapes, key=lambda s: -s["fast"]["batch"])
    ]
    spread = {k: [s[k]["us"] for s in shapes] for k in ("fast", *_PEERS)}
    ratios = {k: max(us) / min(us) for k, us in spread.items()}
    others = " and ".join(f"{ratios[peer]:.2f} ({name})" for peer, name in _PEERS.items())
    return (
        markdown(header, body)
        + f"\n\n(The slowest takes {ratios['fast']:.2f} times as long as the fastest; {others}.)"
    )


def mooncake() -> str:
    """Ragged batches of a recorded conversation trace."""
    _, sets = _bench_sets()
    shapes = _by_shape(sets["mooncake"])
    header = ["live at", "sequences", "longest", "GB", "floor µs", "fast µs", "/ floor"]
    header += [f"{name} / floor" for name in _PEERS.values()]
    body = [
        [
            s["fast"]["label"],
            str(s["fast"]["batch"]),
            f"{s['fast']['longest']:,}",
            f"{s['fast']['kv_bytes'] / 1e9:.2f}",
            f"{s['floor']['us']:.0f}",
            f"{s['fast']['us']:.0f}",
            f"{s['fast']['times_floor']:.3f}",
            *(f"{s[peer]['times_floor']:.3f}" for peer in _PEERS),
        ]
        for s in sorted(shapes, key=lambda s: int(s["fast"]["label"].split()[0]))
    ]
    return markdown(header, body)


def fp8() -> str:
    """Caches of 8-bit floats beside the same steps in bf16, in the same run."""
    _, sets = _bench_sets()
    bf16 = {f"{r['model']} {r['label']}": r["us"] for r in sets["peers"] if r["kernel"] == "fast"}
    shapes = _by_shape(sets["fp8"])
    header = ["shape", "e4m3 GB", "floor µs", "e4m3 µs", "/ floor", "bf16 µs", "e4m3 / bf16"]
    body = [
        [
            s["fast"]["label"],
            f"{s['fast']['kv_bytes'] / 1e9:.2f}",
            f"{s['floor']['us']:.0f}",
            f"{s['fast']['us']:.0f}",
            f"{s['fast']['times_floor']:.3f}",
            f"{bf16[s['fast']['label']]:.0f}",
            f"{s['fast']['us'] / bf16[s['fast']['label']]:.3f}",
        ]
        for s in shapes
    ]
    ratios = [s["fast"]["us"] / bf16[s["fast"]["label"]] for s in shapes]
    return markdown(header, body) + (
        f"\n\n(Geometric mean of the last column {geomean(ratios):.3f}, worst {max(ratios):.3f}.)"
    )


def dram() -> str:
    """Bytes that the hardware read from DRAM beside those that have to be read."""
    rows = results.load("dram_h200")
    header = ["shape", "K and V", "to be read", "read from DRAM", "ratio"]
    body = [
        [
            f"{row['model']} {row['label']}",
            *(f"{row[key]:,}" for key in ("kv_bytes", "bytes_to_read", "dram_bytes")),
            f"{row['ratio']:.4f}",
        ]
        for row in rows
    ]
    return markdown(header, body) + f"\n\n(Bytes; bf16; {measured_on(rows[0])}.)"


def reduce() -> str:
    """The merge of a step's splits: inside the fast kernel, and as a launch of its own."""
    rows = results.load("reduce_h200")
    header = ["shape", "splits", "step µs", "without merge", "merge inside", "`reduce_splits`"]
    body = [
        [
            f"{row['model']} {row['label']}",
            str(row["splits"]),
            *(f"{row[key]:.2f}" for key in ("step_us", "unmerged_us", "fused_us", "separate_us")),
        ]
        for row in rows
    ]
    return markdown(header, body) + f"\n\n(µs; bf16; {measured_on(rows[0])}.)"


def fast_options() -> str:
    """One step of the fast kernel, plain and with each of its options."""
    rows = results.load("fast_options_h200")
    body = [[row["option"], f"{row['median_us']:.1f}", f"{row['over_plain']:.3f}"] for row in rows]
    step = f"{rows[0]['batch']} sequences of {rows[0]['seq_len']:,} keys, {rows[0]['model']}"
    return (
        markdown(["option", "µs", "/ none"], body) + f"\n\n({step}, bf16; {measured_on(rows[0])}.)"
    )


def allocator() -> str:
    """What the size of a pool costs: medians, and the worst ratios to the smallest pool."""
    rows = results.load("allocator_scaling")
    body = []
    for operation, what in {
        "append": "append a token, no block taken",
        "append a block": "append a token, a block taken",
        "allocate": "allocate 512 tokens",
        "publish": "publish them",
        "free": "give them back",
    }.items():
        for state, blocks in {
            "free": "free",
            "evicting": "cached, in order",
            "evicting at random": "cached, at random",
        }.items():
            found = [r for r in rows if (r["operation"], r["state"]) == (operation, state)]
            if found:
                by_size = {row["num_blocks"]: row for row in found}
                medians = [f"{by_size[size]['p50_us']:.2f}" for size in (10**3, 10**6)]
                worst = [f"{max(r[k] for r in found):.2f}" for k in ("p50_ratio", "p99_ratio")]
                body.append([what, blocks, *medians, *worst])
    header = ["call", "blocks", "µs, 10³ blocks", "µs, 10⁶ blocks", "p50 ratio", "p99 ratio"]
    appends = next(r for r in rows if r["operation"] == "append")
    rest = next(r for r in rows if r["operation"] == "allocate")
    a, b = (f"{r['cpu']}, Python {r['python']}, {r['date']}" for r in (appends, rest))
    note = f"(Medians, blocks of 16 tokens. Appends: {a}; the rest: {b}.)"
    return f"{markdown(header, body)}\n\n{note}"


def _same_bits(kind: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of ``tests.same_bits`` by where they were run, the GPU first."""
    files = {"same_bits_h200": "NVIDIA H200", "same_bits_emulator": "CPU emulator"}
    return {
        where: [row for row in results.load(name) if row["kind"] == kind]
        for name, where in files.items()
        if name in results.names()
    }


def pairs() -> str:
    """What random pairs of calls were compared, and how many differed."""
    by_place = {where: row for where, (row,) in _same_bits("pairs").items()}
    caches = ("float16", "bfloat16", "float32", "e4m3", "e5m2")
    kinds = {
        "of the fast kernel": "fast",
        "of the readable kernels": "readable",
        **{f"{name} cache": f"{name} cache" for name in caches},
        "with a window": "window",
        "with sinks": "sinks",
        "with a split of several subtrees": "several subtrees of one split",
    }
    changes = {
        "splits, or who plans them": "splits",
        "the other sequences": "mates",
        "place in the batch": "position",
        "capacity of the plan": "spare_rows",
        "order of the pages": "page_seed",
        "block size": "block_size",
        "strides": "layout",
        "grid": "num_blocks",
        "length of the units": "unit_blocks",
        "call, step, stages, shards, stream, graph": "how",
    }
    rows = list(by_place.values())
    body = [
        ["pairs", *(f"{row['pairs']:,}" for row in rows)],
        ["that differ in any bit", *(f"{row['differ']:,}" for row in rows)],
        *([name, *(f"{row['kinds'][key]:,}" for row in rows)] for name, key in kinds.items()),
        *(
            [f"changed: {name}", *(f"{row['changed'][key]:,}" for row in rows)]
            for name, key in changes.items()
        ),
    ]
    return markdown(["", *by_place], body)


def accuracy() -> str:
    """Errors with the tree and without."""
    where, rows = next(iter(_same_bits("accuracy").items()))
    header = ["case", "largest, tree", "without", "root mean square, tree", "without"]
    names = ("tree_max", "plain_max", "tree_rms", "plain_rms")
    body = [[row["case"], *(f"{row[name]:.3e}" for name in names)] for row in rows]
    return markdown(header, body) + f"\n\n({where}.)"


def host_time() -> str:
    """What the host does in one call."""
    rows = [row for row in results.load("host_time_h200") if row["bench"] == "host_time"]
    header = ["call", "µs of the host", "of them Python"]
    body = [[row["call"], f"{row['host_us']:.1f}", f"{row['python_us']:.1f}"] for row in rows]
    return markdown(header, body) + f"\n\n({measured_on(rows[0])}; medians.)"


#: Tables by the name that the README's markers use.
TABLES: dict[str, Callable[[], str]] = {
    "walkthrough": walkthrough,
    "flip": flip,
    "graph": graph,
    "off": off,
    "sweep": sweep,
    "mixed": mixed,
    "bits": bits,
    "determinism": determinism,
    "fast": fast,
    "split-invariance": split_invariance,
    "overlap": overlap,
    "dram": dram,
    "reduce": reduce,
    "flash-decoding": flash_decoding,
    "mooncake": mooncake,
    "fp8": fp8,
    "host-time": host_time,
    "fast-options": fast_options,
    "allocator": allocator,
    "pairs": pairs,
    "accuracy": accuracy,
}

_BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """``text`` with every marked block replaced by its table."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def main() -> None:
    readme = Path("README.md")
    readme.write_text(fill(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
