"""One decode step under every split policy, as a table: what each would launch, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from cupy_decode import policies, traffic
from cupy_decode.grid import sm_coverage
from cupy_decode.policies import Device, Policy, StepShape

#: Policies that mean nothing without their parameter.
PARAMETRISED = ("fixed", "split-size")
#: What the columns of ``text`` are.
LEGEND = """\
S (num_splits): most splits asked for one sequence. active: most that one gets. grid, waves: the
engine's own grid, and how often it fills the machine. SMs: share that its thread blocks with keys
reach. partials: what stage 1 of this package writes under the plan."""


@dataclass(frozen=True)
class Row:
    """One policy's answer to one step.

    Attributes
    ----------
    policy : str
    num_splits : int
        S, the most splits asked for one sequence.
    active_splits : int
        Splits of the sequence that has most of them, in the plan.
    plan_rows : int
        Splits of the whole batch.
    grid : tuple of int
        The engine's own stage-1 grid.
    thread_blocks, busy_blocks : int
        Its product, and the thread blocks that have a key to read.
    sm_coverage : float
        Share of the SMs that a busy thread block can reach, 0 to 1.
    waves : float
    partial_bytes : int
        Partial states that one stage 1 writes when this package runs the plan; 0 unsplit.
    scratch_bytes : int
        Partial states that the engine allocates for the step.
    reason : str
    """

    policy: str
    num_splits: int
    active_splits: int
    plan_rows: int
    grid: tuple[int, ...]
    thread_blocks: int
    busy_blocks: int
    sm_coverage: float
    waves: float
    partial_bytes: int
    scratch_bytes: int
    reason: str


def row(step: StepShape, device: Device, policy: str | Policy) -> Row:
    """The row of one policy, given by name or as an object."""
    plan, account = policies.get(policy)(step, device)
    return Row(
        policy=plan.policy,
        num_splits=account.num_splits,
        active_splits=int(plan.counts.max()),
        plan_rows=plan.num_rows,
        grid=account.grid,
        thread_blocks=account.thread_blocks,
        busy_blocks=account.busy_blocks,
        sm_coverage=sm_coverage(account.busy_blocks, device.num_sms),
        waves=account.waves,
        partial_bytes=0 if plan.unsplit else traffic.partial_bytes(plan.num_rows, step.heads),
        scratch_bytes=account.scratch_bytes,
        reason=account.reason,
    )


def table(
    step: StepShape,
    device: Device | int | None = None,
    chosen: Iterable[str | Policy] | None = None,
) -> list[Row]:
    """One row per policy.

    Parameters
    ----------
    step : StepShape
    device : Device or int, optional
    chosen : names or policy objects, optional
        All registered policies that need no parameter, when left out.

    Examples
    --------
    >>> from cupy_decode.heads import presets
    >>> rows = table(StepShape([2560], presets["llama-3-8b"]), 132, ["vllm-triton", "fa3"])
    >>> [(r.policy, r.num_splits, r.active_splits, r.busy_blocks) for r in rows]
    [('vllm-triton', 16, 16, 128), ('fa3', 14, 10, 80)]
    """
    if chosen is None:
        chosen = [name for name in policies.names() if name not in PARAMETRISED]
    resolved = Device.of(device)
    return [row(step, resolved, policy) for policy in chosen]


def bytes_text(count: int) -> str:
    """Bytes with a decimal unit.

    Examples
    --------
    >>> bytes_text(133120), bytes_text(0)
    ('133.1 kB', '0 B')
    """
    for unit, size in (("MB", 1_000_000), ("kB", 1_000)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def text(rows: Sequence[Row]) -> str:
    """The table in fixed-width columns; ``LEGEND`` says what they are."""
    cells = [("policy", "S", "active", "grid", "SMs", "waves", "partials", "reason")]
    cells += [
        (
            r.policy,
            str(r.num_splits),
            str(r.active_splits),
            " x ".join(map(str, r.grid)),
            f"{100 * r.sm_coverage:.1f} %",
            f"{r.waves:.2f}",
            bytes_text(r.partial_bytes),
            r.reason,
        )
        for r in rows
    ]
    return align(cells, left={0, 3, 7})


def align(lines: Sequence[Sequence[str]], left: Set[int]) -> str:
    """Cells in columns; those with an index in ``left`` are flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
