"""Bring your own allocator: what it must offer, and what its block tables must obey."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cupy_decode.heads import cdiv


@runtime_checkable
class Allocator(Protocol):
    """What a replay and the checks ask of an allocator; ``BlockPool`` is one.

    ``allocate`` and ``append`` raise ``PoolExhausted`` and change nothing when blocks are short.
    ``allocate`` returns a pair: block ids, and the number of leading tokens it found cached.
    ``publish`` is called only for sequences all of whose tokens came with ids.
    """

    num_blocks: int
    block_size: int

    @property
    def num_used_blocks(self) -> int: ...
    @property
    def num_cached_blocks(self) -> int: ...
    def allocate(self, seq_id: Hashable, tokens: Any) -> tuple[Sequence[int], int]: ...
    def append(self, seq_id: Hashable, tokens: Any = 1) -> None: ...
    def publish(self, seq_id: Hashable) -> int: ...
    def free(self, seq_id: Hashable) -> None: ...
    def block_table(self, seq_ids: Sequence[Hashable]) -> np.ndarray: ...
    def seq_lens(self, seq_ids: Sequence[Hashable]) -> np.ndarray: ...
    def owners(self) -> Mapping[int, Collection[Hashable]]: ...


@dataclass(frozen=True)
class Finding:
    """One fault of a block table.

    Attributes
    ----------
    kind : str
        ``"length"``: the length outruns the row; ``"missing"``: a needed entry names no block;
        ``"freed"``: nobody owns the block; ``"foreign"``: others own it; ``"repeated"``: the row
        names it twice; ``"shared write"``: this step writes a block that another sequence also
        reads; ``"double write"``: this step writes one slot twice.
    row, column : int
        Where in the table.
    block_id : int
    message : str
    """

    kind: str
    row: int
    column: int
    block_id: int
    message: str


def audit(
    block_table: Any,
    seq_lens: Any,
    owners: Mapping[int, Collection[Hashable]],
    *,
    block_size: int,
    seq_ids: Sequence[Hashable] | None = None,
    query_lens: Any = 1,
    window: int | None = None,
) -> list[Finding]:
    """Faults of any engine's block table for one step; an empty list means none.

    Parameters
    ----------
    block_table : (batch, width) integers
        In the units of ``block_size`` and ``owners``.
    seq_lens : (batch,) integers
        Tokens of each row, those that this step writes included.
    owners : mapping of block id to collection of sequence ids
        Who holds each block in use, sequences outside the batch included.
    block_size : int
        Tokens per block. Neither the table nor the owners tell it, and only with it does a length
        say which entries a row needs, so it has no default.
    seq_ids : sequence of hashable, optional
        Sequence of each row; the row numbers when left out.
    query_lens : int or (batch,) integers
        Newest tokens of each row that this step writes: 1 in decode, 0 where it writes none, as
        where a fully cached prompt is run again for its logits (see ``BlockPool.allocate``). An
        empty row writes nothing.
    window : int, optional
        Newest keys that a query sees, itself included. Entries before them are not looked at.

    Returns
    -------
    list of Finding

    Raises
    ------
    TypeError
        If ``block_table``, ``seq_lens`` or ``query_lens`` does not hold integers, or ``owners`` is
        no mapping to collections of ids.
    ValueError
        If the shapes do not go together, a length, a ``query_lens``, ``block_size`` or ``window``
        is too small, or a row writes more tokens than it has.

    Examples
    --------
    >>> [f.message for f in audit([[7, 3]], [20], {7: {0}}, block_size=16)]
    ['row 0, column 1 names block 3, which no sequence holds']
    """
    _check_owners(owners)
    table = _rectangular(block_table)
    lens = np.asarray(seq_lens)
    if table.ndim != 2 or lens.shape != table.shape[:1]:
        raise ValueError(
            "block_table must be (batch, width) and seq_lens (batch,); "
            f"got {table.shape} and {lens.shape}"
        )
    for name, array in (("block_table", table), ("seq_lens", lens)):
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{name} must hold integers; got dtype {array.dtype}")
    if (lens < 0).any():
        b = int((lens < 0).argmax())
        raise ValueError(f"seq_lens[{b}] is {lens[b]}; lengths count tokens and cannot be negative")
    for name, value in (("block_size", block_size), ("window", window)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    ids = list(range(len(lens))) if seq_ids is None else list(seq_ids)
    if len(ids) != len(lens):
        raise ValueError(f"seq_ids has {len(ids)} entries but seq_lens has {len(lens)}")
    new = _new_tokens(query_lens, lens)

    findings: list[Finding] = []
    readers: dict[int, set[Hashable]] = defaultdict(set)  # by the table, whoever owns the block
    read: list[tuple[int, int, int]] = []
    for row, (seq_id, length, num_new) in enumerate(
        zip(ids, lens.tolist(), new.tolist(), strict=True)
    ):
        needed = cdiv(length, block_size)
        if needed > table.shape[1]:
            findings.append(
                Finding("length", row, table.shape[1], -1,
                        f"row {row}: {length} tokens need {needed} blocks but the row has "
                        f"{table.shape[1]}")
            )  # fmt: skip
            needed = table.shape[1]
        oldest = 0 if window is None else max(length - max(num_new, 1) - window + 1, 0)
        for column in range(oldest // block_size, needed):
            block = int(table[row, column])
            read.append((row, column, block))
            if block >= 0 and seq_id in readers[block]:
                findings.append(
                    Finding("repeated", row, column, block,
                            f"row {row} names block {block} twice, again in column {column}")
                )  # fmt: skip
            readers[block].add(seq_id)
    known = {seq_id for holders in owners.values() for seq_id in holders}
    for row, column, block in read:
        holders = owners.get(block, ())
        kind, what = "", ""
        if block < 0:
            kind, what = "missing", "names no block"
        elif not holders:
            kind, what = "freed", f"names block {block}, which no sequence holds"
        elif ids[row] not in holders:
            kind, what = "foreign", f"names block {block}, which is held by {sorted_ids(holders)}"
            if seq_ids is None and ids[row] not in known:
                what += (
                    f"; the row is taken for sequence {row}, which holds nothing: name each row's "
                    "sequence in seq_ids"
                )
        if kind:
            findings.append(Finding(kind, row, column, block, f"row {row}, column {column} {what}"))
    findings += _write_faults(table, lens, new, ids, owners, readers, block_size)
    return findings


def _check_owners(owners: Any) -> None:
    if not isinstance(owners, Mapping):
        raise TypeError(
            "owners must be a mapping of block id to the ids of its sequences; got "
            f"{type(owners).__name__}; write {{block: {{seq_id}}}}"
        )
    for block, holders in owners.items():
        if isinstance(holders, str | bytes) or not isinstance(holders, Collection):
            raise TypeError(
                f"owners[{block!r}] must be a collection of sequence ids; got "
                f"{type(holders).__name__} {holders!r}; write {{{holders!r}}} for one sequence"
            )


def _rectangular(block_table: Any) -> np.ndarray:
    if isinstance(block_table, list | tuple):
        widths = [np.size(row) for row in block_table]
        for row, width in enumerate(widths):
            if width != widths[0]:
                raise ValueError(
                    f"block_table must be rectangular; row 0 has {widths[0]} entries but row {row} "
                    f"has {width}; pad rows with -1"
                )
    return np.asarray(block_table)


def _new_tokens(query_lens: Any, lens: np.ndarray) -> np.ndarray:
    """Tokens that the step writes into each row."""
    queries = np.asarray(query_lens)
    if queries.size and queries.dtype.kind not in "iu":
        raise TypeError(f"query_lens must hold integers; got dtype {queries.dtype}")
    if queries.shape not in ((), lens.shape):
        raise ValueError(
            f"query_lens must be one number or ({len(lens)},), one of each row; got shape "
            f"{queries.shape}"
        )
    new = np.where(lens > 0, queries, np.minimum(queries, 0))  # an empty row writes nothing
    if (new < 0).any():
        raise ValueError(f"query_lens must not be negative; got {queries.min()}")
    if (new > lens).any():
        b = int((new > lens).argmax())
        raise ValueError(
            f"query_lens[{b}] is {new[b]} but seq_lens[{b}] is {lens[b]}; lengths count the tokens "
            "that the step writes too"
        )
    return new


def sorted_ids(seq_ids: Collection[Hashable]) -> list[Hashable]:
    """Sequence ids in a stable order, whatever their types."""
    return sorted(seq_ids, key=repr)


def _write_faults(
    table: np.ndarray,
    lens: np.ndarray,
    new: np.ndarray,
    ids: Sequence[Hashable],
    owners: Mapping[int, Collection[Hashable]],
    readers: Mapping[int, set[Hashable]],
    block_size: int,
) -> list[Finding]:
    findings = []
    writer: dict[tuple[int, int], int] = {}
    for row, seq_id in enumerate(ids):
        reported = set()
        for position in range(int(lens[row] - new[row]), int(lens[row])):
            column, offset = divmod(position, block_size)
            if column >= table.shape[1] or table[row, column] < 0:
                break  # reported as a length or a missing block
            block = int(table[row, column])
            others = ({*owners.get(block, ())} | readers[block]) - {seq_id}
            if others and block not in reported:
                reported.add(block)
                findings.append(
                    Finding("shared write", row, column, block,
                            f"row {row} writes position {position} into block {block}, which "
                            f"{sorted_ids(others)} also hold; copy it first")
                )  # fmt: skip
            first = writer.setdefault((block, offset), row)
            if first != row:
                findings.append(
                    Finding("double write", row, column, block,
                            f"rows {first} and {row} both write slot {block * block_size + offset}")
                )  # fmt: skip
    return findings
