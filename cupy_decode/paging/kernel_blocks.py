"""Two block sizes: the allocator's and the kernel's, and the slots both agree on.

The allocator likes large blocks (fewer entries to hash, shorter free lists); a kernel likes blocks
that divide its tile. When ``kernel_block_size`` divides ``block_size``, one allocator block is
``ratio = block_size / kernel_block_size`` consecutive kernel blocks, and the same memory can be
addressed in either unit. Everything here is NumPy and knows no pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_decode.heads import cdiv

#: A table entry that names no block.
PAD = -1


@dataclass(frozen=True)
class MultipleOf:
    """Every multiple of ``base`` is a supported kernel block size."""

    base: int

    def __post_init__(self) -> None:
        if self.base < 1:
            raise ValueError(f"base must be at least 1; got {self.base}")


def choose_kernel_block_size(block_size: int, *supported: Iterable[int | MultipleOf]) -> int:
    """Largest kernel block size that divides ``block_size`` and that every kernel supports.

    Parameters
    ----------
    block_size : int
        Tokens per allocator block.
    *supported : iterable of int or MultipleOf
        The sizes one kernel supports; give one iterable for each kernel that shares the table.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If no size works; the message gives the rule and allocator block sizes that would work.

    Examples
    --------
    >>> choose_kernel_block_size(128, [16, 32, 64])
    64
    >>> choose_kernel_block_size(128, [MultipleOf(16)], [64])
    64
    """
    _at_least_one("block_size", block_size)
    kernels = [list(sizes) for sizes in supported]
    if not kernels or not all(kernels):
        raise ValueError("supported must name at least one size for each kernel; got an empty list")

    def works(size: int) -> bool:
        return all(
            any(size % s.base == 0 if isinstance(s, MultipleOf) else size == s for s in sizes)
            for sizes in kernels
        )

    for size in range(block_size, 0, -1):
        if block_size % size == 0 and works(size):
            return size
    # Any common size is a product of the numbers named, so their least common multiple bounds it.
    names = [s.base if isinstance(s, MultipleOf) else s for sizes in kernels for s in sizes]
    smallest = next((n for n in range(1, min(math.lcm(*names), 1 << 16) + 1) if works(n)), None)
    rule = " and ".join(
        "{" + ", ".join(f"multiples of {s.base}" if isinstance(s, MultipleOf) else str(s)
                        for s in sizes) + "}"
        for sizes in kernels
    )  # fmt: skip
    fix = (
        "these kernels have no common size, whatever block_size is"
        if smallest is None
        else f"use block_size {smallest}, {2 * smallest} or another multiple of {smallest}"
    )
    raise ValueError(
        f"a kernel block size must divide block_size {block_size} and be one of {rule}; {fix}"
    )


def blocks_per_allocator_block(block_size: int, kernel_block_size: int) -> int:
    """The ratio of the two sizes.

    Raises
    ------
    ValueError
        If ``kernel_block_size`` does not divide ``block_size``.
    """
    _at_least_one("block_size", block_size)
    _at_least_one("kernel_block_size", kernel_block_size)
    if block_size % kernel_block_size:
        divisors = [d for d in range(1, block_size + 1) if block_size % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - kernel_block_size))[:2])
        raise ValueError(
            f"kernel_block_size {kernel_block_size} must divide block_size {block_size}; "
            f"use {' or '.join(map(str, near))}"
        )
    return block_size // kernel_block_size


def map_to_kernel_blocks(
    block_table: Any, block_size: int, kernel_block_size: int, *, stride: int | None = None
) -> np.ndarray:
    """Block ids in allocator units, rewritten in kernel units.

    Allocator block ``i`` becomes the kernel blocks ``i * stride + (0, 1, ..., ratio - 1)``.

    Parameters
    ----------
    block_table : (batch, width) or (n,) integers
        Ids in allocator units. Negative entries are padding.
    block_size, kernel_block_size : int
        Tokens per allocator block and per kernel block.
    stride : int, optional
        Kernel blocks from one allocator block to the next in memory: ``ratio`` when left out, more
        when every allocator block carries other data behind its tokens.

    Returns
    -------
    int32 array, shape (batch, width * ratio) or (n * ratio,)
        Each padding entry becomes ``ratio`` entries of -1.

    Raises
    ------
    ValueError
        If the sizes do not divide, ``stride`` is below the ratio, or an id leaves int32.

    Examples
    --------
    >>> map_to_kernel_blocks([0, 1, 2], 32, 16).tolist()
    [0, 1, 2, 3, 4, 5]
    >>> map_to_kernel_blocks([[2, -1]], 32, 16, stride=6).tolist()
    [[12, 13, -1, -1]]
    """
    ratio = blocks_per_allocator_block(block_size, kernel_block_size)
    stride = ratio if stride is None else stride
    if stride < ratio:
        raise ValueError(
            f"stride {stride} must be at least the ratio {ratio}, or neighbouring allocator blocks "
            "would overlap"
        )
    table = _integers("block_table", block_table, (1, 2)).astype(np.int64)
    if table.size and table.max() * stride + ratio - 1 > np.iinfo(np.int32).max:
        raise ValueError(
            f"block_table holds id {table.max()}, which times stride {stride} leaves int32; "
            "use a larger kernel_block_size"
        )
    wide = table[..., None] * stride + np.arange(ratio)
    wide[table < 0] = PAD
    return wide.reshape(*table.shape[:-1], table.shape[-1] * ratio).astype(np.int32)


def block_table_width(max_blocks: int, block_size: int, *, token_alignment: int = 128) -> int:
    """Columns of a block table whose rows cover a multiple of ``token_alignment`` tokens.

    A kernel whose tile is longer than a block then never runs past the end of a row.

    Parameters
    ----------
    max_blocks : int
        Blocks of the longest sequence.
    block_size : int
        Tokens per block, in the units of ``max_blocks``.
    token_alignment : int
        Longest tile, in tokens.

    Examples
    --------
    >>> block_table_width(161, 16)
    168
    """
    _at_least_one("max_blocks", max_blocks)
    _at_least_one("block_size", block_size)
    _at_least_one("token_alignment", token_alignment)
    step = token_alignment // math.gcd(token_alignment, block_size)
    return cdiv(max_blocks, step) * step


def slot_mapping(
    block_table: Any,
    positions: Any,
    block_size: int,
    *,
    rows: Any = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    interleave: int = 1,
) -> np.ndarray:
    """Cache slot of each token: ``block_id * block_size + offset``.

    With decode context parallelism the tokens of one sequence are dealt to ``cp_world`` ranks in
    runs of ``interleave``; every rank has the same table, one block holds ``block_size`` tokens on
    each rank, and a token that lives elsewhere has slot -1 here.

    Parameters
    ----------
    block_table : (batch, width) integers
    positions : (num_tokens,) integers
        Position of each token in its sequence; negative for padding.
    block_size : int
    rows : (num_tokens,) integers, optional
        Table row of each token; token ``i`` uses row ``i`` when left out.
    cp_world, cp_rank, interleave : int
        Ranks, this rank, and tokens in a run; ``interleave`` must divide ``block_size``.

    Returns
    -------
    int64 array, shape (num_tokens,)
        -1 where the token is padding or lives on another rank.

    Raises
    ------
    ValueError
        If a position lies outside its row or meets an entry that names no block.

    Examples
    --------
    >>> slot_mapping([[5, 9]], [31], 16).tolist()
    [159]
    """
    for name, value in (("block_size", block_size), ("cp_world", cp_world),
                        ("interleave", interleave)):  # fmt: skip
        _at_least_one(name, value)
    if not 0 <= cp_rank < cp_world:
        raise ValueError(f"cp_rank must lie in 0..{cp_world - 1}; got {cp_rank}")
    if block_size % interleave:
        raise ValueError(f"interleave {interleave} must divide block_size {block_size}")
    table = _integers("block_table", block_table, (2,)).astype(np.int64)
    at = _integers("positions", positions, (1,)).astype(np.int64)
    row = np.arange(len(at)) if rows is None else _integers("rows", rows, (1,)).astype(np.int64)
    if len(row) != len(at):
        raise ValueError(f"rows has {len(row)} entries but positions has {len(at)}")
    slots = np.full(len(at), PAD, np.int64)
    real = np.flatnonzero(at >= 0)
    bad = real[(row[real] < 0) | (row[real] >= len(table))]
    if bad.size:
        i = int(bad[0])
        raise ValueError(f"rows[{i}] is {row[i]} but block_table has {len(table)} rows")
    column, offset = np.divmod(at[real], block_size * cp_world)
    if (column >= table.shape[1]).any():
        i = int(real[column >= table.shape[1]][0])
        raise ValueError(
            f"positions[{i}] = {at[i]} lies past row {row[i]}, whose {table.shape[1]} blocks hold "
            f"{table.shape[1] * block_size * cp_world} tokens"
        )
    block = table[row[real], column]
    mine = offset // interleave % cp_world == cp_rank
    if (mine & (block < 0)).any():
        i = int(real[mine & (block < 0)][0])
        raise ValueError(f"positions[{i}] = {at[i]} meets an entry of row {row[i]} with no block")
    local = offset // (cp_world * interleave) * interleave + offset % interleave
    slots[real] = np.where(mine, block * block_size + local, PAD)
    return slots


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")


def _integers(name: str, value: Any, ndims: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must hold integers; got dtype {array.dtype}")
    if array.ndim not in ndims:
        raise ValueError(
            f"{name} must have {' or '.join(map(str, ndims))} dimensions; got shape {array.shape}"
        )
    return array
