"""Markdown tables and sentences of the committed results, as the README quotes them.

``python -m cupy_decode.results.tables`` rewrites the blocks between ``<!-- results: NAME -->`` and
``<!-- end -->`` in the README of the current directory; a test holds the README to them.
"""

from __future__ import annotations

import math
import re
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


def _bench_sets() -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The environment of the ``bench`` run, and its timed rows by shape set."""
    environment, *rows = results.load("fast_h200")
    apart = ("flash-decoding", "mooncake", "fp8")
    sets: dict[str, list[dict[str, Any]]] = {"peers": [], **{name: [] for name in apart}}
    for row in rows:
        if "us" in row:
            sets[row["model"] if row["model"] in apart else "peers"].append(row)
    return environment, sets


#: Other packages in the tables: the name that ``bench`` uses, and theirs.
_PEERS = {"cudnn": "cuDNN", "fa3": "FlashAttention-3"}


def _by_shape(rows: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """For every shape its rows by kernel, in the order of the file."""
    shapes: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        shapes.setdefault((row["model"], row["label"]), {})[row["kernel"]] = row
    return list(shapes.values())


def geomean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def fast() -> str:
    """The tensor-core kernel over both floors of the same run, by size of the KV cache."""
    environment, sets = _bench_sets()
    shapes = _by_shape(sets["peers"])
    header = ["KV bytes", "shapes", "/ floor", "worst", "/ loose floor", "worst"]
    header += [f"{name} / floor" for name in _PEERS.values()]

    def cells(chosen: list[dict[str, dict[str, Any]]]) -> list[str]:
        found = [str(len(chosen))]
        for over in ("times_floor", "times_loose_floor"):
            factors = [shape["fast"][over] for shape in chosen]
            found += [f"{geomean(factors):.3f}", f"{max(factors):.2f}"]
        for peer in _PEERS:
            found.append(f"{geomean([s[peer]['times_floor'] for s in chosen]):.3f}")
        return found

    body = [
        [band, *cells([s for s in shapes if s["fast"]["band"] == band])]
        for band in dict.fromkeys(s["fast"]["band"] for s in shapes)
    ]
    body.append(["all", *cells(shapes)])
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
    _, sets = _bench_sets()
    shapes = _by_shape(sets["peers"])

    def excess(shape: dict[str, dict[str, Any]], others: Sequence[str]) -> float:
        return shape["fast"]["us"] / min(shape[k]["us"] for k in others) - 1

    def cells(chosen: list[dict[str, dict[str, Any]]]) -> list[str]:
        found = []
        for others in (("float maxima",), (*_PEERS,), ("float maxima", *_PEERS)):
            values = sorted(excess(shape, others) for shape in chosen)
            middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
            found += [f"{100 * middle:+.1f} %", f"{100 * values[-1]:+.1f} %"]
        return found

    bands = dict.fromkeys(s["fast"]["band"] for s in shapes)
    rows = [[band, *cells([s for s in shapes if s["fast"]["band"] == band])] for band in bands]
    rows.append([f"all {len(shapes)}", *cells(shapes)])
    header = [
        *("KV bytes", "over float maxima, median", "worst"),
        *("over the best peer, median", "worst", "over the faster, median", "worst"),
    ]
    return markdown(header, rows)


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
    return markdown(header, body)


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


def _same_bits(kind: str) -> list[dict[str, Any]]:
    return [row for row in results.load("same_bits_emulator") if row["kind"] == kind]


def pairs() -> str:
    """What random pairs of calls were compared, and how many differed."""
    (row,) = _same_bits("pairs")
    kinds, changed = row["kinds"], row["changed"]
    caches = ", ".join(
        f"{kinds[f'{name} cache']} {name}" for name in ("float16", "bfloat16", "e4m3", "e5m2")
    )
    what = ", ".join(f"{name.replace('_', ' ')} in {count}" for name, count in changed.items())
    return (
        f"Of {row['pairs']:,} random pairs of calls, run on the CPU emulator, "
        f"{row['differ'] or 'none'} differed in any bit: {kinds['fast']} of the fast kernel, "
        f"{kinds['readable']} of the readable ones; caches {caches}; {kinds['window']} with a "
        f"window, {kinds['sinks']} with sinks; {kinds['several subtrees of one split']} with a "
        f"split of several subtrees. Changed were {what}."
    )


def accuracy() -> str:
    """Errors with the tree and without."""
    rows = _same_bits("accuracy")
    header = ["case", "largest, tree", "without", "root mean square, tree", "without"]
    names = ("tree_max", "plain_max", "tree_rms", "plain_rms")
    return markdown(header, [[r["case"], *(f"{r[name]:.3e}" for name in names)] for r in rows])


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
    "fast": fast,
    "split-invariance": split_invariance,
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
