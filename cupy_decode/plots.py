"""Figures. Matplotlib is imported where a figure is drawn, so that nothing else needs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupy_decode import grid, traffic
from cupy_decode.heads import HeadConfig, whole
from cupy_decode.paging import Snapshot
from cupy_decode.trace_replay import Replay

#: Colours that stay apart for colour-blind readers (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
_GREY = "#8a8a8a"
_FORMATS = (".png", ".pdf", ".svg")
#: Points of a line over time: more than the eye keeps apart.
_MOST_POINTS = 240


def require_matplotlib() -> None:
    """Refuse at once what would end in a figure that cannot be drawn.

    Raises
    ------
    ValueError
        If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "figures need matplotlib:  python -m pip install -e '.[notebooks]'  installs it"
        )


def require_figure(argument: str, path: str) -> None:
    """Refuse a figure that cannot be drawn or written, before the work that it shows.

    Parameters
    ----------
    argument : str
        Where the path came from.
    path : str
        Of the file to write.

    Raises
    ------
    ValueError
        If matplotlib is not installed, the name ends in none of the formats offered or its folder
        does not exist.
    """
    file = Path(path)
    if file.suffix not in _FORMATS:
        raise ValueError(f"{argument} must end in {' or '.join(_FORMATS)}; got {path}")
    if not file.parent.is_dir():
        raise ValueError(
            f"{argument} must name a file in a folder that exists; got {path}; make {file.parent}"
        )
    require_matplotlib()


def _decorate(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def sm_coverage(
    models: Mapping[str, HeadConfig],
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    *,
    num_sms: int = 132,
    num_splits: int = 16,
) -> Any:
    """SM coverage against batch size, unsplit and with a fixed split count below the threshold.

    Parameters
    ----------
    models : mapping of label to HeadConfig
        Heads of one rank.
    batches : sequence of int
    num_sms : int
    num_splits : int
        Splits per sequence for batches up to ``grid.split_threshold``; above it, none.

    Returns
    -------
    matplotlib.figure.Figure
        Left the unsplit grid, right the split one.
    """
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.9), sharey=True, layout="constrained")
    titles = ("Unsplit", f"{num_splits} splits up to the batch threshold")
    for axes, title, splits in zip(panels, titles, (1, num_splits), strict=True):
        for i, (label, heads) in enumerate(models.items()):
            limit = grid.split_threshold(heads.num_kv_heads)
            percent = [
                100
                * grid.sm_coverage(
                    grid.blocks_3d(b, b, heads, splits if b <= limit else 1), num_sms
                )
                for b in batches
            ]
            axes.plot(
                batches,
                percent,
                marker=MARKERS[i % len(MARKERS)],
                markersize=4.5,
                linewidth=1.6,
                color=COLOURS[i % len(COLOURS)],
                label=label,
            )
        _decorate(axes, title, "batch size (sequences)", "")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(batches), [str(b) for b in batches])
        axes.set_ylim(0, 104)
    panels[0].set_ylabel(f"SMs with a thread block (% of {num_sms})")
    panels[1].legend(loc="lower right", fontsize=8.5, frameon=False)
    return figure


def merge_overhead(
    heads: HeadConfig,
    seq_lens: Sequence[int] = (32, 64, 128, 256, 512, 1024, 2560, 8192, 32768, 131072),
    *,
    num_splits: int = 16,
    element_bytes: int = 2,
) -> Any:
    """Round trip of the partial states in percent of the K and V bytes, against the length.

    Parameters
    ----------
    heads : HeadConfig
    seq_lens : sequence of int
    num_splits : int
        Segments allocated; the active ones follow the segment rule.
    element_bytes : int
        Bytes of one cache element.

    Returns
    -------
    matplotlib.figure.Figure
        One line charges every allocated segment, the other the active ones.
    """
    import matplotlib.pyplot as plt

    def percent(s: int, rows: int) -> float:
        moved = traffic.partial_round_trip_bytes(rows, heads)
        return 100 * moved / traffic.kv_bytes(s, heads, element_bytes)

    figure, axes = plt.subplots(figsize=(6.4, 3.9), layout="constrained")
    allocated = [percent(s, num_splits) for s in seq_lens]
    active = [percent(s, grid.segments(s, num_segments=num_splits).active) for s in seq_lens]
    axes.loglog(
        seq_lens, allocated, color=_GREY, linestyle="--", marker="o", markersize=4,
        label=f"all {num_splits} segments",
    )  # fmt: skip
    axes.loglog(
        seq_lens, active, color=COLOURS[0], marker="s", markersize=4, label="active segments"
    )
    _decorate(axes, "What the merge adds", "keys of the sequence", "partials, % of K and V bytes")
    axes.axhline(100, color=_GREY, linewidth=0.8)
    axes.annotate("as much as K and V", (seq_lens[-1], 100), xytext=(0, 4), ha="right",
                  textcoords="offset points", fontsize=8.5, color="#555555")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(seq_lens), [f"{s:,}" for s in seq_lens], rotation=40, ha="right")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def split_sweep(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Measured time against the number of splits, with each policy's choice marked.

    Parameters
    ----------
    rows : sequence of mappings
        What ``experiments.measure`` yields: ``policy`` (``"fixed"`` makes the line),
        ``active_splits``, ``us``.
    title : str

    Returns
    -------
    matplotlib.figure.Figure
        Policies whose plans are the same share a marker.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    fixed = [row for row in rows if row["policy"] == "fixed"]
    plans: dict[tuple[int, float], list[str]] = {}
    for row in rows:
        if row["policy"] != "fixed":
            plans.setdefault((row["active_splits"], row["us"]), []).append(row["policy"])
    figure, axes = plt.subplots(figsize=(9.6, 4.6), layout="constrained")
    counts = [row["active_splits"] for row in fixed]
    axes.plot(counts, [row["us"] for row in fixed], color=_GREY, marker=".", label="equal splits")
    for i, ((splits, us), names) in enumerate(sorted(plans.items())):
        axes.plot(
            splits, us, MARKERS[i // len(COLOURS) % len(MARKERS)],
            color=COLOURS[i % len(COLOURS)], markersize=8, linestyle="none",
            label="\n".join([f"{splits}: {names[0]}", *(f"     {name}" for name in names[1:])]),
        )  # fmt: skip
    _decorate(axes, title, "splits of a sequence", "microseconds of one layer's attention")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yscale("log")
    times = [row["us"] for row in rows]
    axes.set_ylim(min(times) / 1.4, max(times) * 1.4)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    return figure


def pool_snapshot(snapshot: Snapshot, *, columns: int = 32) -> Any:
    """A pool at one moment: a square for each block, coloured by its state.

    Parameters
    ----------
    snapshot : Snapshot
    columns : int
        Blocks in a row.

    Returns
    -------
    matplotlib.figure.Figure
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    columns = whole("columns", columns)
    names = ("free", "cached", "used by one", "shared")
    colours = ("#f0f0f0", COLOURS[4], COLOURS[5], COLOURS[0])
    state = np.select(
        [snapshot.cached, snapshot.ref_counts > 1, snapshot.ref_counts == 1], [1, 3, 2], 0
    )
    rows = -(-len(state) // columns)
    squares = np.full(rows * columns, np.nan)
    squares[: len(state)] = state
    height = max(0.9 + 6.6 * rows / columns, 1.6)  # as the squares are 6.6 / columns wide
    figure, axes = plt.subplots(figsize=(8.4, height), layout="constrained")
    axes.pcolormesh(
        squares.reshape(rows, columns), cmap=ListedColormap(colours), vmin=-0.5, vmax=3.5,
        edgecolors="white", linewidth=1,
    )  # fmt: skip
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_xticks([])
    labelled = np.arange(0, rows, -(-columns // 40))  # as many as there is room for
    axes.set_yticks(labelled + 0.5, [f"{row * columns:,}" for row in labelled], fontsize=8.5)
    axes.set_ylabel("first block id")
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"{snapshot.num_blocks:,} blocks of {snapshot.block_size} tokens, "
        f"{snapshot.internal_fragmentation:.1%} of the used slots empty", loc="left", fontsize=11,
    )  # fmt: skip
    counts = [int((state == i).sum()) for i in range(len(names))]
    patches = [
        Patch(color=colour, label=f"{name}: {count:,}")
        for colour, name, count in zip(colours, names, counts, strict=True)
    ]
    figure.legend(handles=patches, loc="outside right upper", frameon=False, fontsize=8.5)
    return figure


def trace_replay(result: Replay, *, title: str = "") -> Any:
    """A replay over time: occupancy, batch, lengths and table bytes.

    Of a long replay neighbouring samples are taken together: lines are their means, that of the
    longest sequence is their largest, and the shades of requests reach from least to largest.

    Parameters
    ----------
    result : Replay
    title : str
        What was replayed.

    Returns
    -------
    matplotlib.figure.Figure
    """
    import matplotlib.pyplot as plt

    s = result.samples
    firsts = np.unique(np.linspace(0, len(s["time"]), _MOST_POINTS + 1).astype(int)[:-1])

    def mean(name: str) -> np.ndarray:
        return np.add.reduceat(s[name], firsts) / np.diff(firsts, append=len(s[name]))

    minutes = mean("time") / 60
    figure, panels = plt.subplots(4, 1, sharex=True, figsize=(9, 9.6), layout="constrained")
    occupancy, batch, lengths, tables = panels
    occupancy.stackplot(
        minutes,
        100 * mean("used_blocks") / result.num_blocks,
        100 * mean("cached_blocks") / result.num_blocks,
        labels=["used", "cached"],
        colors=[COLOURS[0], COLOURS[4]],
    )
    occupancy.set_ylim(0, 100)
    for name, label, colour in (
        ("batch", "in decode", COLOURS[0]), ("waiting", "waiting", COLOURS[1]),
    ):  # fmt: skip
        reach = np.minimum.reduceat(s[name], firsts), np.maximum.reduceat(s[name], firsts)
        batch.fill_between(minutes, *reach, color=colour, alpha=0.25, linewidth=0)
        batch.plot(minutes, mean(name), label=label, color=colour)
    lengths.fill_between(
        minutes, mean("len_p10"), mean("len_p90"), color=COLOURS[5], alpha=0.4, label="p10 to p90"
    )
    lengths.plot(minutes, mean("len_p50"), color=COLOURS[0], label="median")
    longest = np.maximum.reduceat(s["len_max"], firsts)
    lengths.plot(minutes, longest, color=_GREY, linewidth=0.9, label="longest")
    sizes = result.kernel_block_sizes
    for size, colour in zip(sizes, COLOURS * len(sizes), strict=False):
        label = f"kernel blocks of {size}"
        tables.plot(minutes, mean(f"table_bytes_{size}") / 1024, label=label, color=colour)
    _decorate(occupancy, "Blocks", "", "% of the pool")
    _decorate(batch, "Requests", "", "requests")
    _decorate(lengths, "Lengths of the sequences in decode", "", "tokens")
    _decorate(tables, "Block table of the batch", "minutes", "KiB")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8.5)
    hits = f"{result.hit_rate:.1%}" if result.has_hash_ids else "unknown"
    figure.suptitle(
        f"{title}\n{result.num_blocks:,} blocks of {result.block_size} tokens: hit rate {hits}, "
        f"{result.num_preemptions:,} preemptions".lstrip(), fontsize=11,
    )  # fmt: skip
    return figure


def time_against_length(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Times of ``bench.compare``, the floor drawn as the ground under them.

    Parameters
    ----------
    rows : sequence of dict

    Returns
    -------
    matplotlib.figure.Figure
        One panel per model. Horizontally the keys of the batch, or, where all batches hold the same
        number of keys, those of the longest sequence; both axes are logarithmic.
    """
    import matplotlib.pyplot as plt

    measured = [r for r in rows if "us" in r]
    models = list(dict.fromkeys(r["model"] for r in measured))
    names = [n for n in dict.fromkeys(r["kernel"] for r in measured) if "floor" not in n]
    columns = min(len(models), 2)
    lines = -(-len(models) // columns)
    size = 5.4 * columns, 3.7 * lines
    figure, panels = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, model in zip(panels.flat, models, strict=False):
        of_model = [r for r in measured if r["model"] == model]
        one_size = len({r["keys"] for r in of_model}) == 1
        along = "longest" if one_size else "keys"

        def points(kernel: str, rows: Any = of_model, along: str = along) -> tuple[list, list]:
            found = sorted((r[along], r["us"]) for r in rows if r["kernel"] == kernel)
            return [x for x, _ in found], [us for _, us in found]

        axes.loglog()
        for i, name in enumerate(names):
            axes.plot(
                *points(name), color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)],
                markersize=4, linewidth=1.3, label=name,
            )  # fmt: skip
        lengths, floor = points("floor")
        least = min(r["us"] for r in of_model) / 1.6
        axes.fill_between(lengths, least, floor, color=_GREY, alpha=0.35, linewidth=0)
        axes.plot(lengths, floor, color=_GREY, linewidth=1.3, label="floor: only reading")
        axes.set_ylim(bottom=least)
        keys = "keys of each sequence" if one_size else "keys of the batch"
        _decorate(axes, model, keys, "µs, cold L2")
    for axes in list(panels.flat)[len(models) :]:
        axes.remove()
    panels[0, 0].legend(loc="upper left", fontsize=8.5, frameon=False)
    return figure


def study_steps(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Share of the read limit after every step of ``bench.study``, a line per shape.

    Parameters
    ----------
    rows : sequence of dict

    Returns
    -------
    matplotlib.figure.Figure
        Hollow markers at the right end are the floors: what only reading the same pages reaches.
    """
    import matplotlib.pyplot as plt

    measured = [r for r in rows if "us" in r]
    steps = list(dict.fromkeys(r["step"] for r in measured))
    shapes = list(dict.fromkeys((r["model"], r["label"], r["kv_bytes"]) for r in measured))
    figure, axes = plt.subplots(figsize=(9.6, 4.0), layout="constrained")
    for i, (model, label, kv_bytes) in enumerate(shapes):
        of_shape = [r for r in measured if (r["model"], r["label"]) == (model, label)]
        share = [100 * r["read_fraction"] for r in of_shape]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        name = f"{model} {label} ({kv_bytes / 1e6:,.0f} MB)"
        axes.plot(steps, share, color=colour, marker=marker, markersize=5, label=name)
        axes.plot(
            [len(steps)], [share[-1] * of_shape[-1]["times_floor"]], color=colour, marker=marker,
            markersize=6, markerfacecolor="white", linestyle="none",
        )  # fmt: skip
    _decorate(axes, "What each step brings", "", "% of the read limit")
    axes.set_xticks(range(len(steps) + 1), [*steps, "floor"], rotation=25, ha="right")
    axes.set_ylim(0, 104)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure
