"""The fast path: one launch of ``paged_split_k_mma`` on checked arrays.

Nothing is planned. The grid follows from what the host knows (SM count, shared memory, heads,
width of the block table); which keys a thread block reads follows from ``seq_lens`` on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_decode.heads import cdiv
from cupy_decode.specs import (
    C_TYPES,
    FP8_DTYPES,
    ArrayType,
    Launch,
    arguments,
    dtype_name,
    factors,
    strides,
)

#: Keys that the tensor cores take at a time; a cache block must hold whole pages.
PAGE = 16
#: Twice the leaves that a sequence is cut into at most, over all its heads, while they are shorter
#: than ``LONG_LEAF`` pages, half of that in sequences of fewer than ``LONG_LEAF_PAGES``; and how
#: many at most at all, where so many can be added up or not.
WAVE, LONG_LEAF, LONG_LEAF_PAGES = 1024, 8, 256
LEAVES, FEW_LEAVES = 8192, 1024
#: Pages of the shortest leaves of 16-bit elements, and of 8-bit ones.
MIN_LEAF, MIN_LEAF_8_BIT = 2, 8
#: Pages of a sequence from which on the shortest leaves of 16-bit elements are twice as long.
FEW_PAGES = 64
#: Query heads that one thread block serves at most, by head_dim: registers and memory decide.
MAX_HEADS_PER_TILE = {64: 16, 128: 16, 256: 8}
#: Partial states per thread block of the grid that a workspace has room for.
SLOTS_PER_BLOCK = 32
#: What a second part of a sequence costs, in pages that could be read in the meantime.
_MERGE_PAGES = 8
#: Pages over all heads, as many as the table has room for, up to which a problem is small; with
#: rows of so many pages, where pages have so many bytes that four readers keep up with memory.
_SMALL_PAGES = 4096
_SMALL_PAGES_OF_LONG_ROWS, _LONG_ROW, _LARGE_PAGE = 16384, 128, 8192
#: Units that are as good as more.
_MOST_UNITS = 1 << 19
#: log2 of the pages of the shortest unit of a ragged batch, where there are two for each block.
_RAGGED_UNIT_LOG2 = 6
#: Bytes of the page rings of a thread block: as much as keeps HBM busy.
_RING_BYTES = 128 << 10
#: Warps of a thread block that merge what the others read.
MERGERS = 4
#: Shared memory of an SM that a thread block cannot ask for: the system's, and the tickets.
_RESERVED_SHARED = 1024 + 128
#: Shared memory from which on eight warps read: the GPUs that have less get all registers for four.
_MANY_READERS_ROOM = 200 << 10
_H200_ROOM = 233472 - _RESERVED_SHARED
#: Bytes that rows of q and out start at multiples of.
ALIGNMENT = 4
_DTYPES = ("float16", "bfloat16")

#: What ``scores.cuh`` calls the options that are compiled only where they are used.
OPTIONS = (
    "SOFT_CAP",
    "ALIBI",
    "WINDOW",
    "SINKS",
    "SCALES",
    "ANY_BLOCK",
    "OVERLAP",
    "BLOCK_PARTS",
)


@dataclass(frozen=True)
class FastSpec:
    """What is compiled.

    Parameters
    ----------
    dtype : {"float16", "bfloat16"}
        Element type of the query.
    head_dim, num_kv_heads, group_size : int
    one : bool
        Whether the batch is a single sequence.
    kv_dtype : {"float16", "bfloat16", "e4m3", "e5m2"}, optional
        Element type of the cache; ``dtype`` when left out.
    out_dtype : {"float16", "bfloat16", "float32"}, optional
        Element type of the output; ``dtype`` when left out.
    options : tuple of str
        Some of ``OPTIONS``, in that order.
    small : bool
        Whether there may be so little to read that shorter rounds of fewer readers are quicker.
    room : int
        Bytes of shared memory that a thread block may have; an H200's when left out.
    """

    dtype: str
    head_dim: int
    num_kv_heads: int
    group_size: int
    one: bool = False
    kv_dtype: str | None = None
    out_dtype: str | None = None
    options: tuple[str, ...] = ()
    small: bool = False
    room: int = _H200_ROOM

    @property
    def tiles(self) -> int:
        """Tiles that the query heads of one KV head are cut into."""
        return cdiv(self.group_size, MAX_HEADS_PER_TILE[self.head_dim])

    @property
    def heads(self) -> int:
        """What the schedule calls heads: KV heads, times the tiles of each."""
        return self.num_kv_heads * self.tiles

    @property
    def heads_per_tile(self) -> int:
        """Heads that the kernel is compiled for: a power of two."""
        heads = cdiv(self.group_size, self.tiles)
        return 1 << _ceil_log2(heads)

    @property
    def cache_dtype(self) -> str:
        """Element type of the cache."""
        return self.kv_dtype or self.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page of one head."""
        return (2 if self.cache_dtype in FP8_DTYPES else 4) * PAGE * self.head_dim

    @property
    def readers(self) -> int:
        """Warps of a thread block that read, each leaves of its own; no bit depends on it."""
        fit = self.head_dim <= 128 and self.heads_per_tile <= 8  # in the registers of 12 warps
        many = fit and not self.small and self.room >= _MANY_READERS_ROOM
        return 8 if many and self._stages(8, self.leaves) >= 2 else 4

    @property
    def leaves(self) -> int:
        """Leaves that one sequence is cut into at most, over all its heads.

        The sums that wait for others must leave room for two pages of each reader, of 4 readers
        whatever is chosen, since bits depend on this.
        """
        return self._most_leaves if self._stages(4, self._most_leaves) >= 2 else FEW_LEAVES

    @property
    def _most_leaves(self) -> int:
        return LEAVES if self.head_dim <= 128 and self.heads_per_tile <= 8 else FEW_LEAVES

    def leaf_pages(self, num_pages: int) -> int:
        """Pages that one warp adds up in order: see ``leaf_pages``."""
        return leaf_pages(num_pages, self.heads, self.min_leaf, self.leaves)

    @property
    def min_leaf(self) -> int:
        """Pages of the shortest leaves."""
        return MIN_LEAF_8_BIT if self.cache_dtype in FP8_DTYPES else MIN_LEAF

    @property
    def stages(self) -> int:
        """Pages of each reader's ring, fewer where states that wait take the room."""
        return self._stages(self.readers, self.leaves)

    def _stages(self, readers: int, leaves: int) -> int:
        room = min(_RING_BYTES, self.room - self._state_bytes(readers, leaves))
        return max(room // (readers * self.page_bytes), 0)

    @property
    def entry(self) -> str:
        """C++ name expression of the specialisation."""
        types = (self.dtype, self.cache_dtype, self.out_dtype or self.dtype)
        shape = (
            self.head_dim,
            self.heads_per_tile,
            self.readers,
            self.stages,
            str(self.one).lower(),
        )
        options = " | ".join(self.options) or 0
        leaves = () if self.leaves == self._most_leaves else (_ceil_log2(self.leaves),)
        arguments = (*(C_TYPES[t] for t in types), *shape, options, *leaves)
        return f"paged_split_k_mma<{', '.join(map(str, arguments))}>"

    @property
    def most_siblings(self) -> int:
        """Partial states that meet at once at most, as the kernel works it out."""
        rows = max(self.heads_per_tile // MERGERS, 1)
        columns = self.head_dim * rows // 32
        batch = 64 // columns if columns > 4 else 16
        return min(32 // rows, 2 * batch)

    def _levels(self, readers: int, leaves: int) -> int:
        """Levels of the tree that wait in shared memory: leaf blocks of one head, halved."""
        leaf_blocks = cdiv(leaves, readers * self.heads)
        columns = max(self.heads_per_tile // MERGERS, 1) * self.head_dim // 32  # of one lane
        in_registers = 1 if columns <= 8 else 0
        return max(_ceil_log2(leaf_blocks) - in_registers, 0)

    def _state_bytes(self, readers: int, leaves: int) -> int:
        """Shared memory for leaf states and waiting sums."""
        states = readers + self._levels(readers, leaves)
        return states * self.heads_per_tile * 4 * (4 + self.head_dim)

    @property
    def shared_mem(self) -> int:
        """Dynamic shared memory of a thread block in bytes: rings, leaf states, waiting sums."""
        ring = self.readers * self.stages * self.page_bytes
        return ring + self._state_bytes(self.readers, self.leaves)


@dataclass(frozen=True)
class Machine:
    """The part of a GPU that the grid follows from.

    Attributes
    ----------
    num_sms : int
    shared_per_sm : int
        Bytes of shared memory of one SM.
    """

    num_sms: int = 132
    shared_per_sm: int = 233472

    @classmethod
    def of(cls, cuda: Any, device: int | None = None) -> Machine:
        """A device as the CUDA backend describes it, the current one when left out."""
        return cls(cuda.num_sms(device), cuda.shared_per_sm(device))

    @property
    def room(self) -> int:
        """Bytes of dynamic shared memory that one thread block may have."""
        return self.shared_per_sm - _RESERVED_SHARED


@dataclass(frozen=True)
class Workspace:
    """Room for partial states; serves any call with the same heads, one at a time.

    Attributes
    ----------
    partials : (capacity, heads_per_tile, 4 + head_dim) float32
    arrivals : (capacity + 1, 4) uint32
        Zeros before a launch, and again after it.
    """

    partials: Any
    arrivals: Any


def refusal(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    out: Any = None,
    kv_dtype: str | None = None,
    machine: Machine | None = None,
) -> str | None:
    """Why the fast path does not cover a call, or None when it does.

    Parameters
    ----------
    q, k_cache, v_cache, block_table, seq_lens
        Arrays that ``checks.decode`` accepted, or their types.
    out : array, optional
        The output, where it is the caller's.
    kv_dtype : {"e4m3", "e5m2"}, optional
        What the bytes of a uint8 cache are.
    machine : Machine, optional

    Notes
    -----
    All other options of ``decode_attention`` are covered.
    """
    machine = machine or Machine()
    dtype, head_dim, block_size = dtype_name(q), q.shape[2], k_cache.shape[1]
    cache_dtype = kv_dtype or dtype_name(k_cache)
    if dtype not in _DTYPES or cache_dtype not in (dtype, *FP8_DTYPES):
        return (
            f"q is {dtype} and the cache {cache_dtype}; q must be float16 or bfloat16 and the "
            "cache the same or an 8-bit float"
        )
    if head_dim not in MAX_HEADS_PER_TILE or v_cache.shape[3] != head_dim:
        return (
            f"head_dim is {head_dim} and v_head_dim {v_cache.shape[3]}; both must be the same of "
            "64, 128 and 256"
        )
    if q.shape[0] > 4096:
        return f"the batch is {q.shape[0]}; at most 4096"
    for name, array in (("q", q), ("out", q if out is None else out)):
        *steps, last = array.strides
        if last != array.dtype.itemsize or any(s % ALIGNMENT or abs(s) >= 2**31 for s in steps):
            return (
                f"{name} has strides {array.strides}; rows must be contiguous and {ALIGNMENT} "
                "bytes apart, or a multiple of that below 2 GiB"
            )
    for name, array in (("block_table", block_table), ("seq_lens", seq_lens)):
        if array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize:
            return f"{name} has strides {array.strides}; its last axis must be contiguous"
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache)):
        if any(abs(s) >= 2**31 for s in array.strides[:2]):
            return f"{name} has strides {array.strides}; the first two must be below 2 GiB"
    if block_table.shape[1] * block_size > 2**20 * 16:
        return f"block_table has room for {block_table.shape[1] * block_size} keys; at most 2^24"
    spec = spec_of(q, k_cache, kv_dtype=kv_dtype, machine=machine)
    if spec.heads > 1024:  # the pages of all heads are counted in 32 bits
        return (
            f"the cache has {spec.num_kv_heads} KV heads in {spec.tiles} tiles each; at most 1024"
        )
    if spec.stages < 2:
        return (
            f"two pages for each of {spec.readers} readers do not fit the {machine.shared_per_sm} "
            "bytes of shared memory of the device beside the states"
        )
    return None


def grid(spec: FastSpec, machine: Machine, batch: int, max_keys: int) -> int:
    """Thread blocks of a launch: one wave, or fewer where there cannot be work for one.

    Parameters
    ----------
    max_keys : int
        Visible keys that one row of the block table can hold.

    Examples
    --------
    Llama-3-8B with 512 keys: 8 heads, 32 pages, leaf blocks of 4 leaves of 2 pages.

    >>> grid(FastSpec("bfloat16", 128, 8, 4, small=True), Machine(), batch=1, max_keys=512)
    32
    """
    leaf_block = PAGE * spec.readers * spec.min_leaf
    most = batch * spec.heads * max(cdiv(max_keys, leaf_block), 1)
    return min(machine.num_sms, most)


def _ceil_log2(x: int) -> int:
    return (x - 1).bit_length() if x > 1 else 0


def leaf_pages(num_pages: int, heads: int, min_leaf: int = MIN_LEAF, leaves: int = LEAVES) -> int:
    """Pages that one warp adds up in order: they follow from the sequence and its heads alone.

    A sequence is cut into at most 512 leaves over all its heads, half a wave of 256 thread blocks
    of 4 warps, down to leaves of 4 pages, or of 2 below 1,024 keys. Leaves of 8 pages, below 4,096
    keys of 4, are as many as the sequence needs, up to ``leaves``: longer ones would keep a batch
    waiting for the last, and in short sequences leave half of a thread block idle at the end.

    Parameters
    ----------
    num_pages : int
        Pages of 16 keys of one sequence that hold visible ones.
    heads : int
        KV heads, times the tiles that their query heads are cut into.
    min_leaf, leaves : int
        Pages of the shortest leaves, and the most leaves, of a ``FastSpec``.

    Examples
    --------
    8 KV heads: 2,560 keys are 160 pages and 1,280 over the heads; 32,768 keys are 16,384.

    >>> leaf_pages(160, 8), leaf_pages(2048, 8)
    (4, 8)
    """
    total = num_pages * heads
    room = _ceil_log2(cdiv(total, leaves))
    half = _ceil_log2(cdiv(2 * total, WAVE))
    if min_leaf == MIN_LEAF and num_pages >= FEW_PAGES:
        min_leaf *= 2
    most = LONG_LEAF if num_pages >= LONG_LEAF_PAGES else LONG_LEAF // 2
    return 1 << max(room, min(half, _ceil_log2(most)), _ceil_log2(min_leaf))


@dataclass(frozen=True)
class Schedule:
    """What the kernel works out from the lengths, on the host.

    A unit is a run of leaf blocks, which a thread block takes at a time; a leaf block is as many
    leaves as a thread block has readers.

    Attributes
    ----------
    unit_pages : int
        Pages that a unit has at least, where the sequence has so many.
    leaf_pages : tuple of int
        Pages of a leaf, by sequence.
    leaf_blocks, spans : tuple of int
        Leaf blocks of each sequence, and of a unit of it.
    heads : int
        KV heads, times the tiles that their query heads are cut into.
    """

    unit_pages: int
    leaf_pages: tuple[int, ...]
    leaf_blocks: tuple[int, ...]
    spans: tuple[int, ...]
    heads: int

    @property
    def units(self) -> tuple[int, ...]:
        """Units of one head, by sequence; 1: the sequence is not split."""
        return tuple(
            max(cdiv(n, span), 1) for n, span in zip(self.leaf_blocks, self.spans, strict=True)
        )

    @property
    def num_units(self) -> int:
        """Units of the batch."""
        return self.heads * sum(self.units)

    @property
    def num_places(self) -> int:
        """Places for partial states: one for every aligned run of leaf blocks that may be one."""
        places = 0
        for n, span, units in zip(self.leaf_blocks, self.spans, self.units, strict=True):
            places += cdiv(n, span & -span) if units > 1 else 0
        return self.heads * places

    @property
    def num_partials(self) -> int:
        """Partial states that are written and read again: the largest aligned runs of each unit."""
        states = 0
        for n, span, units in zip(self.leaf_blocks, self.spans, self.units, strict=True):
            for unit in range(units if units > 1 else 0):
                begin, end = unit * span, min((unit + 1) * span, n)
                if end == n:  # the missing right siblings of the last ones are nothing
                    end = 1 << _ceil_log2(n)
                while begin < min(end, n):
                    width = 1 << ((end - begin).bit_length() - 1)
                    begin += min(begin & -begin, width) if begin else width
                    states += 1
        return self.heads * states


def _even_unit(rows: int, leaf_blocks: int, block: int, num_blocks: int) -> int:
    """Leaf blocks of a unit of ``rows`` (sequence, head) alike, whose leaf blocks have ``block``
    pages: the one of 31 numbers of parts of a row whose busiest thread block has least to do."""
    best = None
    step = num_blocks // (31 * rows) + 1  # up to a part for every thread block
    for parts in (*(min(n * step, leaf_blocks) for n in range(1, 32)), 1):
        unit = cdiv(leaf_blocks, parts)
        rounds = cdiv(min(rows * cdiv(leaf_blocks, unit), _MOST_UNITS), num_blocks)
        cost = rounds * (unit * block + (_MERGE_PAGES if parts > 1 else 0))
        if best is None or cost < best[0]:
            best = cost, unit
    assert best is not None
    return best[1]


def visible_pages(seq_len: int, window: int | None = None) -> range:
    """The pages of a sequence that hold visible keys; leaves are counted from the first of them.

    Examples
    --------
    Of 100 keys the newest 40 begin at key 60, in the fourth page.

    >>> visible_pages(100), visible_pages(100, window=40)
    (range(0, 7), range(3, 7))
    """
    first = 0 if window is None else max(seq_len - window, 0) // PAGE
    return range(first, cdiv(seq_len, PAGE))


def schedule(
    seq_lens: Any,
    spec: FastSpec,
    num_blocks: int,
    capacity: int | None = None,
    window: int | None = None,
    unit_pages: int | None = None,
) -> Schedule:
    """How a batch is cut on a grid of ``num_blocks``: the host's copy of ``schedule.cuh``.

    Parameters
    ----------
    seq_lens : (batch,) integers
        On the host.
    capacity : int, optional
        Places for partial states of the workspace; no limit when left out.
    window : int, optional
        Newest keys that are visible.
    unit_pages : int, optional
        Pages of a unit instead of the kernel's own choice.

    Examples
    --------
    Llama-3-8B with 8 sequences of 2,560 keys on an H200: each of the 64 (sequence, head) has 10
    leaf blocks of 16 pages, and two units of 5 leave 4 of 132 thread blocks without work.

    >>> cut = schedule([2560] * 8, FastSpec("bfloat16", 128, 8, 4, small=True), num_blocks=132)
    >>> cut.leaf_pages[0], cut.leaf_blocks[0], cut.spans[0], cut.units[0]
    (4, 10, 5, 2)
    """
    pages = [len(visible_pages(int(s), window)) for s in seq_lens]
    heads = spec.heads
    leaves = tuple(spec.leaf_pages(n) for n in pages)
    unit = unit_pages or 1
    if unit_pages is None:
        block = spec.readers * spec.leaf_pages(max(pages))
        rows, leaf_blocks = len(pages) * heads, max(cdiv(max(pages), block), 1)
        if spec.one:
            if rows * leaf_blocks > num_blocks:
                unit = _even_unit(rows, leaf_blocks, block, num_blocks) * block
        elif max(pages) * len(pages) > 1.2 * sum(pages):
            share = _ceil_log2(cdiv(sum(pages) * heads, num_blocks))
            unit = 1 << max(share - 5, min(share - 1, _RAGGED_UNIT_LOG2), 0)
        else:
            unit = _even_unit(rows, leaf_blocks, block, num_blocks) * block

    def cut(unit: int) -> Schedule:
        blocks, spans = [], []
        for n, leaf in zip(pages, leaves, strict=True):
            block = spec.readers * leaf
            count, span = cdiv(n, block), max(cdiv(unit, block), 1)
            odd = span & (span - 1) != 0
            if odd and span < count and cdiv(count, span & -span) > spec.most_siblings:
                span = 1 << _ceil_log2(span)
            blocks.append(count)
            spans.append(span)
        return Schedule(unit, leaves, tuple(blocks), tuple(spans), heads)

    result = cut(unit)
    while capacity is not None and result.num_places > capacity:
        result = cut(result.unit_pages * 2)
    return result


def workspace(runner: Any, spec: FastSpec, machine: Machine) -> Workspace:
    """Allocate a workspace for any batch of these heads on this machine."""
    kinds = workspace_types(spec, machine)
    return Workspace(
        runner.empty(kinds.partials.shape, kinds.partials.dtype),
        runner.zeros(kinds.arrivals.shape, kinds.arrivals.dtype),
    )


def workspace_types(
    spec: FastSpec, machine: Machine, batch: int = 4096, max_keys: int = 2**24, device: Any = None
) -> Workspace:
    """The types of a workspace for batches and tables up to these sizes.

    A smaller one does as well: the kernel then cuts sequences into fewer units. The capacity is a
    power of two, or as many places as the machine ever needs: a table that widens step by step goes
    through few sizes.
    """
    leaf_blocks = cdiv(max_keys, PAGE * spec.readers * spec.min_leaf)
    places = batch * spec.heads * leaf_blocks
    most = SLOTS_PER_BLOCK * machine.num_sms
    capacity = min(1 << _ceil_log2(places), most)
    return Workspace(
        ArrayType.contiguous(
            (capacity, spec.heads_per_tile, 4 + spec.head_dim), np.dtype(np.float32), device
        ),
        ArrayType.contiguous((capacity + 1, MERGERS), np.dtype(np.uint32), device),
    )


def spec_of(
    q: Any,
    k_cache: Any,
    *,
    block_table: Any = None,
    machine: Machine | None = None,
    out: Any = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    overlap: bool = False,
) -> FastSpec:
    """The specialisation for these arrays and options of ``decode_attention``.

    ``block_table`` says how much there may be to read; without it the specialisation is one for
    much. Workspaces and bits are the same for both.
    """
    num_kv_heads = k_cache.shape[2]
    used = dict(
        SOFT_CAP=bool(logits_soft_cap),
        ALIBI=alibi_slopes is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        # one factor of all of K is part of the scale
        SCALES=v_scale is not None or factors(k_scale)[1] is not None,
        ANY_BLOCK=k_cache.shape[1] % PAGE != 0,
        OVERLAP=overlap,
        BLOCK_PARTS=k_cache.shape[1] % PAGE == 0 and k_cache.shape[1] != PAGE,
    )
    spec = FastSpec(
        dtype_name(q),
        q.shape[2],
        num_kv_heads,
        q.shape[1] // num_kv_heads,
        q.shape[0] == 1,
        kv_dtype or dtype_name(k_cache),
        dtype_name(q if out is None else out),
        tuple(name for name in OPTIONS if used[name]),
        room=(machine or Machine()).room,
    )
    if block_table is None:
        return spec
    row = block_table.shape[1] * k_cache.shape[1]
    large_page = spec.page_bytes >= _LARGE_PAGE
    most = _SMALL_PAGES_OF_LONG_ROWS if large_page and row >= PAGE * _LONG_ROW else _SMALL_PAGES
    small = q.shape[0] * spec.heads * row <= PAGE * most
    # A table may have room for much more than an only sequence fills; a long one loses little.
    return replace(spec, small=small or (large_page and spec.one))


def launch(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    out: Any,
    lse: Any,
    space: Workspace,
    scale: float,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    fault: Any = None,
    machine: Machine | None = None,
    num_blocks: int | None = None,
    unit_pages: int | None = None,
    overlap: bool = False,
) -> Launch:
    """One launch on arrays that ``checks.decode`` accepted and ``refusal`` did not refuse.

    Parameters
    ----------
    window, logits_soft_cap, alibi_slopes, sinks, kv_dtype, k_scale, v_scale, overlap
        As in ``decode_attention``.
    num_blocks, unit_pages : int, optional
        Thread blocks, and pages that a block takes at a time (rounded up to whole leaf blocks),
        instead of the kernel's own choice. No bit of the result depends on either.
    """
    machine = machine or Machine()
    spec = spec_of(
        q,
        k_cache,
        block_table=block_table,
        machine=machine,
        out=out,
        window=window,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        kv_dtype=kv_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        overlap=overlap,
    )
    batch, num_q_heads, _ = q.shape
    pool_blocks, block_size, _, _ = k_cache.shape
    max_blocks = block_table.shape[1]
    max_keys = max_blocks * block_size
    if num_blocks is None:
        num_blocks = grid(spec, machine, batch, PAGE * len(visible_pages(max_keys, window)))

    k_factor, k_scales, k_scale_strides = factors(k_scale)
    v_factor, v_scales, v_scale_strides = factors(v_scale)
    q_strides, out_strides = strides(q), strides(out)
    k_strides, v_strides = strides(k_cache), strides(v_cache)
    values = dict(
        out=out,
        lse=lse,
        partials=space.partials,
        arrivals=space.arrivals,
        fault=fault,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        q_stride_token=q_strides[0],
        q_stride_head=q_strides[1],
        out_stride_token=out_strides[0],
        out_stride_head=out_strides[1],
        k_stride_head=k_strides[2],
        v_stride_head=v_strides[2],
        table_stride=strides(block_table)[0],
        k_stride_block=k_strides[0],
        k_stride_slot=k_strides[1],
        v_stride_block=v_strides[0],
        v_stride_slot=v_strides[1],
        k_scales_stride_token=k_scale_strides[0],
        k_scales_stride_head=k_scale_strides[1],
        v_scales_stride_token=v_scale_strides[0],
        v_scales_stride_head=v_scale_strides[1],
        batch=batch,
        num_q_heads=num_q_heads,
        group_size=spec.group_size,
        tiles=spec.tiles,
        tile_heads=cdiv(spec.group_size, spec.tiles),
        heads=spec.heads,
        num_blocks=pool_blocks,
        block_size=block_size,
        pages_per_block=block_size // PAGE,
        max_blocks=max_blocks,
        max_seq_len=max_keys,
        capacity=space.arrivals.shape[0] - 1,
        fixed_unit=unit_pages or 0,
        window=min(window or 0, 2**30),  # no table has so many keys; sums with it stay in range
        scale=scale * k_factor,
        v_scale=v_factor,
        soft_cap=logits_soft_cap or 0.0,
    )
    name = "paged_split_k_mma"
    return Launch(
        name,
        spec.entry,
        (num_blocks, 1, 1),
        (32 * (spec.readers + MERGERS), 1, 1),
        spec.shared_mem,
        arguments(name, values),
        True,
        overlap,
    )


def run(
    runner: Any,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    out: Any,
    lse: Any,
    scale: float,
    space: Workspace | None = None,
    fault: Any = None,
    machine: Machine | None = None,
    **options: Any,
) -> None:
    """Attention on arrays that ``checks.decode`` accepted and ``refusal`` did not refuse.

    Parameters
    ----------
    runner : module
        A backend: ``run``, ``empty`` and ``zeros``.
    q, k_cache, v_cache, block_table, seq_lens, out, lse, scale, fault
        As in ``decode_attention``; ``out`` and ``lse`` are written, ``fault`` is the record that
        ``checks.device_fault`` reads, or None.
    space : Workspace, optional
        From ``workspace``; without it one is allocated, which costs clearing its counters.
    machine : Machine, optional
        The device's, or an H200's.
    **options
        The other options of ``launch``.
    """
    machine = machine or Machine()
    if space is None:
        space = workspace(runner, spec_of(q, k_cache), machine)
    runner.run(
        launch(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            out=out,
            lse=lse,
            space=space,
            scale=scale,
            fault=fault,
            machine=machine,
            **options,
        )
    )
