"""What to compile and how to launch it: one description that every backend can run.

A ``KernelSpec`` names a specialisation; ``Launch`` adds grid, block, shared memory and arguments.
Nothing here touches a GPU or imports CuPy: arrays are only asked for shapes and strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import kernels_cu
from cupy_decode.grid import MAX_HEADS_PER_BLOCK, max_leaves

#: Keys that ``paged_split_k`` handles at a time (``TILE`` in paged_kv.cuh).
TILE = 32
#: Threads of every kernel but ``paged_split_k``.
THREADS = 128
_INT_MAX = 2**31 - 1

#: 8-bit element types of a cache, and what ml_dtypes calls them.
FP8_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_FP8_NAMES = {name: kv_dtype for kv_dtype, name in FP8_DTYPES.items()}

#: Element types by the names that specialisations give them.
C_TYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "e4m3": "__nv_fp8_e4m3",
    "e5m2": "__nv_fp8_e5m2",
}
_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "e4m3": 1, "e5m2": 1}
_UINT_OF_SIZE = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}

#: Rules of ``plan_splits`` and what plan_splits.cu calls them.
PLAN_RULES = {
    "count": "BY_COUNT",
    "size": "BY_SIZE",
    "chunk": "BY_CHUNK",
    "sglang": "SGLANG",
    "fa3-dynamic": "FA3_DYNAMIC",
    "equal-shares": "EQUAL_SHARES",
}


@dataclass(frozen=True)
class KernelSpec:
    """A specialisation of the kernels: what is fixed when they are compiled.

    Each kernel uses the fields it needs: ``paged_split_k`` all of them, ``reduce_splits`` and
    ``merge_states`` the output's type, ``write_kv`` the width of ``kv_dtype``, ``plan_splits`` none
    but ``plan_rule``.

    Parameters
    ----------
    q_dtype : {"float32", "float16", "bfloat16"}
        Element type of the query.
    kv_dtype : {"float32", "float16", "bfloat16", "e4m3", "e5m2"}, optional
        Element type of the cache; ``q_dtype`` when left out.
    out_dtype : {"float32", "float16", "bfloat16"}, optional
        Element type of the output; ``q_dtype`` when left out.
    head_dim : int
        Elements of a key; a multiple of 8 (of 4 for a float32 cache).
    v_head_dim : int, optional
        Elements of a value; ``head_dim`` when left out.
    group_size : int
        Query heads per KV head.
    soft_cap, alibi : bool
        Compile the logits soft cap, the ALiBi bias.
    finish : bool
        Divide and write the output at once, for plans with one split per sequence.
    tree : bool
        Leave subtrees of fixed leaves instead of splits (``leaves.cuh``); goes without ``finish``.
    plan_rule : str
        Rule of ``plan_splits``, a key of ``PLAN_RULES``.
    """

    q_dtype: str = "bfloat16"
    kv_dtype: str | None = None
    head_dim: int = 128
    v_head_dim: int | None = None
    group_size: int = 1
    soft_cap: bool = False
    alibi: bool = False
    finish: bool = False
    out_dtype: str | None = None
    plan_rule: str = "count"
    tree: bool = False

    def __post_init__(self) -> None:
        floats = [name for name in C_TYPES if name not in FP8_DTYPES]
        for name, known in (("q_dtype", floats), ("kv_dtype", C_TYPES), ("out_dtype", floats)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
        for name, dim in (("head_dim", self.head_dim), ("v_head_dim", self.value_dim)):
            check_head_dim(name, dim, self.cache_dtype)
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1; got {self.group_size}")
        if self.finish and self.tree:
            raise ValueError("finish and tree do not go together: a tree's sums end in stage 2")

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.q_dtype

    @property
    def output_dtype(self) -> str:
        return self.out_dtype or self.q_dtype

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def head_tiles(self) -> int:
        """Thread blocks that share the query heads of one KV head."""
        return -(-self.group_size // MAX_HEADS_PER_BLOCK)

    @property
    def heads_per_block(self) -> int:
        """Query heads of one block; tiles are made equal (71 heads: 5 tiles of 15)."""
        return -(-self.group_size // self.head_tiles)

    # ------------------------------------------------------------------ paged_split_k's geometry

    def _row(self, dim: int) -> tuple[int, int]:
        """Vectors of a cache row and the bytes of one (``Row`` in vec.cuh)."""
        num_bytes = dim * _ITEM_SIZE[self.cache_dtype]
        width = vector_bytes(num_bytes)
        return num_bytes // width, width

    @property
    def split_k_threads(self) -> int:
        """Threads of a block: enough that a thread holds at most 18 of the tile's vectors."""
        vectors = TILE * (self._row(self.head_dim)[0] + self._row(self.value_dim)[0])
        for threads in (128, 256, 512):
            if vectors <= 18 * threads and self.value_dim // 2 <= threads:
                return threads
        raise ValueError(f"no block size fits head_dim {self.head_dim} and {self.value_dim}")

    @property
    def split_k_shared_mem(self) -> int:
        """Dynamic shared memory of a block in bytes: K and V tile, q, p and rescale."""

        def tile_bytes(dim: int) -> int:
            vectors, width = self._row(dim)
            return TILE * (vectors + (vectors % 2 == 0)) * width

        floats = self.heads_per_block * (self.head_dim + TILE + 1)
        return tile_bytes(self.head_dim) + tile_bytes(self.value_dim) + 4 * floats


#: Largest head_dim and v_head_dim that ``paged_split_k`` is compiled for.
MAX_HEAD_DIM = 576


def vector_bytes(row_bytes: int) -> int:
    """Bytes of the vectors that a cache row of so many bytes is read in."""
    return 8 if row_bytes % 16 == 8 else 16


def check_head_dim(name: str, dim: int, kv_dtype: str) -> None:
    """Refuse head sizes whose cache rows are not whole vectors."""
    step = 4 if kv_dtype == "float32" else 8
    if dim < step or dim % step or dim > MAX_HEAD_DIM:
        fix = f"pad it to {max(-(-dim // step), 1) * step}"
        if dim > MAX_HEAD_DIM:
            fix = "no kernel here is written for longer rows"
        raise ValueError(
            f"{name} must be a multiple of {step} from {step} to {MAX_HEAD_DIM} for a {kv_dtype} "
            f"cache, so that rows are whole vectors; got {dim}: {fix}"
        )


#: Kernels that a ``KernelSpec`` describes.
KERNELS = (
    *("paged_split_k", "reduce_splits", "reduce_subtrees", "merge_states", "write_kv"),
    "plan_splits",
)


def entry(name: str, spec: KernelSpec) -> str:
    """C++ name expression of a kernel's specialisation."""
    q, kv = C_TYPES[spec.q_dtype], C_TYPES[spec.cache_dtype]
    out = C_TYPES[spec.output_dtype]
    if name == "paged_split_k":
        written = out if spec.finish else "float"  # what stage 1 leaves for stage 2
        chosen = (spec.soft_cap, spec.alibi, spec.finish, spec.tree)
        flags = ", ".join(str(flag).lower() for flag in chosen)
        return (
            f"paged_split_k<{q}, {kv}, {written}, {spec.head_dim}, {spec.value_dim}, "
            f"{spec.heads_per_block}, {spec.split_k_threads}, {flags}>"
        )
    if name == "write_kv":
        return f"write_kv<{_UINT_OF_SIZE[_ITEM_SIZE[spec.cache_dtype]]}, {THREADS}>"
    if name == "plan_splits":
        return f"plan_splits<{PLAN_RULES[spec.plan_rule]}, {THREADS}>"
    if name in ("reduce_splits", "reduce_subtrees", "merge_states"):
        return f"{name}<{out}, {THREADS}>"
    raise ValueError(
        f"no kernel with a KernelSpec is called {name!r}; there are {', '.join(sorted(KERNELS))}"
    )


def block(name: str, spec: KernelSpec) -> tuple[int, int, int]:
    """Threads of one block of a kernel."""
    return (spec.split_k_threads if name == "paged_split_k" else THREADS, 1, 1)


def shared_mem(name: str, spec: KernelSpec) -> int:
    """Dynamic shared memory of one block of a kernel, in bytes."""
    return spec.split_k_shared_mem if name == "paged_split_k" else 0


def needs_half_headers(name: str, spec: KernelSpec) -> bool:
    """Whether the specialisation mentions a 16-bit or 8-bit floating type."""
    return "__half" in entry(name, spec) or "__nv_" in entry(name, spec)


# ---------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Arg:
    """One kernel argument: its name in the CUDA signature, its C type and its value."""

    name: str
    ctype: kernels_cu.Kind
    value: Any


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready for any backend.

    Attributes
    ----------
    source : str
        Name of the file in ``kernels_cu``, without ``.cu``.
    entry : str
        C++ name expression of the specialisation.
    grid, block : (int, int, int)
    shared_mem : int
        Dynamic shared memory in bytes.
    args : tuple of Arg
        In the order of the CUDA signature; a pointer's value is an array or None.
    half_headers : bool
        Whether the source needs the 16-bit floating headers.
    overlap : bool
        Whether it may start before the launch before it has ended (programmatic dependent launch).
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem: int
    args: tuple[Arg, ...]
    half_headers: bool
    overlap: bool = False

    def with_pointers(self, pointers: Mapping[str, Any]) -> Launch:
        """The same launch on other arrays; the ones not named are null."""
        args = [
            replace(a, value=pointers.get(a.name)) if a.ctype == "ptr" else a for a in self.args
        ]
        return replace(self, args=tuple(args))


class ArrayType(NamedTuple):
    """All that a launch depends on in an array, its address apart: the key of what was checked.

    Attributes
    ----------
    shape, strides : tuple of int
        Strides in bytes.
    dtype : dtype
    device : int or None
        CUDA device; None for host memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    device: int | None

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: Any, device: int | None) -> ArrayType:
        """The type of a new array."""
        steps, step = [], dtype.itemsize
        for n in reversed(shape):
            steps.append(step)
            step *= n
        return cls(shape, tuple(reversed(steps)), dtype, device)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def dtype_name(array: Any) -> str:
    """The name of an array's element type, for ml_dtypes' as well: "bfloat16", "e4m3"."""
    name = str(array.dtype)
    return _FP8_NAMES.get(name, name)


def strides(array: Any) -> tuple[int, ...]:
    """Strides in elements, as the kernels take them."""
    return tuple(s // array.dtype.itemsize for s in array.strides)


def arguments(name: str, values: Mapping[str, Any]) -> tuple[Arg, ...]:
    """Values by name in the order of a kernel's signature."""
    return tuple(Arg(p.name, p.kind, values[p.name]) for p in kernels_cu.signature(name))


def _launch(
    name: str, spec: KernelSpec, grid: tuple[int, ...], values: Mapping[str, Any]
) -> Launch:
    x, y, z = (*grid, 1, 1)[:3]
    return Launch(
        name,
        entry(name, spec),
        (x, y, z),
        block(name, spec),
        shared_mem(name, spec),
        arguments(name, values),
        needs_half_headers(name, spec),
    )


def paged_split_k(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    plan: Any,
    *,
    acc: Any = None,
    m: Any = None,
    l: Any = None,  # noqa: E741
    width: Any = None,
    out: Any = None,
    lse: Any = None,
    fault: Any = None,
    scale: float,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    shard: tuple[int, int] | None = None,
) -> Launch:
    """Stage 1 on checked arrays: partials when ``acc`` is given, else ``out`` and ``lse``.

    ``kv_dtype`` names the elements of a uint8 cache. Without a plan every sequence is one split.
    With ``width`` the partials are subtrees, of the keys ``shard`` where it is given.
    """
    batch, num_q_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, v_head_dim = v_cache.shape
    spec = KernelSpec(
        dtype_name(q),
        kv_dtype or dtype_name(k_cache),
        head_dim,
        v_head_dim,
        num_q_heads // num_kv_heads,
        soft_cap=bool(logits_soft_cap),
        alibi=alibi_slopes is not None,
        finish=acc is None,
        tree=width is not None,
        out_dtype=None if out is None else dtype_name(out),
    )
    q_strides, k_strides, v_strides = strides(q), strides(k_cache), strides(v_cache)
    out_strides = (0, 0, 0) if out is None else strides(out)
    table_strides = strides(block_table)
    k_factor, k_scales, k_scale_strides = factors(k_scale)
    v_factor, v_scales, v_scale_strides = factors(v_scale)
    values = dict(
        acc_out=acc,
        m_out=m,
        l_out=l,
        width_out=width,
        out=out,
        lse=lse,
        fault=fault,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        split_offsets=None if plan is None else plan.split_offsets,
        split_begin=None if plan is None else plan.split_begin,
        alibi_slopes=alibi_slopes,
        k_scales=k_scales,
        v_scales=v_scales,
        q_stride_token=q_strides[0],
        q_stride_head=q_strides[1],
        q_stride_dim=q_strides[2],
        out_stride_token=out_strides[0],
        out_stride_head=out_strides[1],
        out_stride_dim=out_strides[2],
        k_stride_block=k_strides[0],
        k_stride_slot=k_strides[1],
        k_stride_head=k_strides[2],
        v_stride_block=v_strides[0],
        v_stride_slot=v_strides[1],
        v_stride_head=v_strides[2],
        table_stride_token=table_strides[0],
        table_stride_column=table_strides[1],
        seq_lens_stride=strides(seq_lens)[0],
        k_scales_stride_token=k_scale_strides[0],
        k_scales_stride_head=k_scale_strides[1],
        v_scales_stride_token=v_scale_strides[0],
        v_scales_stride_head=v_scale_strides[1],
        batch=batch,
        num_q_heads=num_q_heads,
        group_size=spec.group_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks=block_table.shape[1],
        window=min(window or 0, _INT_MAX),
        leaf_rows=0 if width is None else width.shape[1],
        max_leaves=max_leaves(num_kv_heads * spec.head_tiles),
        shard_begin=shard[0] if shard else 0,
        shard_end=shard[1] if shard else _INT_MAX,
        scale=scale * k_factor,
        v_scale=v_factor,
        soft_cap=logits_soft_cap or 0.0,
    )
    rows = batch if plan is None else plan.split_begin.shape[0]
    return _launch("paged_split_k", spec, (rows, num_kv_heads, spec.head_tiles), values)


def factors(scale: Any) -> tuple[float, Any, tuple[int, int]]:
    """A factor of K or V as kernels take it: a number, an array or None, and the array's strides
    from sequence to sequence and from KV head to KV head."""
    if scale is None or isinstance(scale, float):
        return 1.0 if scale is None else scale, None, (0, 0)
    steps = strides(scale) if scale.size > 1 else ()
    token, head = (0, 0, *steps)[-2:]
    return 1.0, scale, (token, head)


def reduce_splits(partials: Any, out: Any, lse: Any, sinks: Any = None) -> Launch:
    """Stage 2 on checked arrays."""
    batch, num_q_heads, v_head_dim = out.shape
    out_strides = strides(out)
    values = dict(
        out=out,
        lse=lse,
        acc=partials.acc,
        m=partials.m,
        l=partials.l,
        split_offsets=partials.plan.split_offsets,
        sinks=sinks,
        out_stride_token=out_strides[0],
        out_stride_head=out_strides[1],
        out_stride_dim=out_strides[2],
        capacity=partials.acc.shape[0],
        num_q_heads=num_q_heads,
        v_head_dim=v_head_dim,
    )
    return _launch("reduce_splits", KernelSpec(dtype_name(out)), (batch, num_q_heads), values)


def reduce_subtrees(partials: Any, out: Any, lse: Any, sinks: Any = None) -> Launch:
    """Stage 2 along the tree, on checked arrays."""
    plan = partials.plan
    batch, num_q_heads, v_head_dim = out.shape
    out_strides = strides(out)
    values = dict(
        out=out,
        lse=lse,
        acc=partials.acc,
        m=partials.m,
        l=partials.l,
        width=partials.width,
        split_offsets=None if plan is None else plan.split_offsets,
        sinks=sinks,
        out_stride_token=out_strides[0],
        out_stride_head=out_strides[1],
        out_stride_dim=out_strides[2],
        capacity=0 if plan is None else plan.split_begin.shape[0],
        leaf_rows=partials.width.shape[1],
        num_q_heads=num_q_heads,
        v_head_dim=v_head_dim,
    )
    return _launch("reduce_subtrees", KernelSpec(dtype_name(out)), (batch, num_q_heads), values)


def merge_states(
    out: Any, lse: Any, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, sinks: Any = None
) -> Launch:
    """The two-operand merge on checked arrays."""
    tokens, num_q_heads, v_head_dim = out.shape
    values: dict[str, Any] = dict(
        out=out,
        lse=lse,
        out_a=out_a,
        lse_a=lse_a,
        out_b=out_b,
        lse_b=lse_b,
        sinks=sinks,
        v_head_dim=v_head_dim,
    )
    for name in ("out", "lse", "out_a", "lse_a", "out_b", "lse_b"):
        token, head, *_ = strides(values[name])
        values[f"{name}_stride_token"], values[f"{name}_stride_head"] = token, head
    return _launch("merge_states", KernelSpec(dtype_name(out)), (tokens, num_q_heads), values)


def write_kv(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, fault: Any = None
) -> Launch:
    """New rows into their slots, on checked arrays."""
    num_blocks, block_size, num_kv_heads, v_dim = v_cache.shape
    k_cache_strides, v_cache_strides = strides(k_cache), strides(v_cache)
    k_strides, v_strides = strides(k), strides(v)
    values = dict(
        k_cache=k_cache,
        v_cache=v_cache,
        fault=fault,
        k=k,
        v=v,
        slot_mapping=slot_mapping,
        k_cache_stride_block=k_cache_strides[0],
        k_cache_stride_slot=k_cache_strides[1],
        k_cache_stride_head=k_cache_strides[2],
        v_cache_stride_block=v_cache_strides[0],
        v_cache_stride_slot=v_cache_strides[1],
        v_cache_stride_head=v_cache_strides[2],
        k_stride_token=k_strides[0],
        k_stride_head=k_strides[1],
        v_stride_token=v_strides[0],
        v_stride_head=v_strides[1],
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        k_dim=k_cache.shape[3],
        v_dim=v_dim,
    )
    # Bits move: of the element type only the width counts.
    kv_dtype = {1: "e4m3", 2: "float16", 4: "float32"}[k_cache.dtype.itemsize]
    return _launch("write_kv", KernelSpec(kv_dtype=kv_dtype), (k.shape[0],), values)


def plan_splits(
    plan: Any,
    seq_lens: Any,
    *,
    rule: str,
    value: int,
    max_seq_len: int,
    tile: int = 16,
    num_sms: int = 1,
    num_kv_heads: int = 1,
    query_tiles: int = 1,
    worker_offsets: Any = None,
) -> Launch:
    """Write ``plan``'s buffers from lengths that live on the device.

    ``seq_lens`` is (batch,), or (plans, batch) for one thread block a plan; the plan's arrays, and
    ``worker_offsets``, then have that leading axis too.
    """
    plans, batch = (1, *seq_lens.shape)[-2:]
    values = dict(
        split_offsets=plan.split_offsets,
        split_begin=plan.split_begin,
        worker_offsets=worker_offsets,
        seq_lens=seq_lens,
        seq_lens_stride_plan=(0, *strides(seq_lens))[-2],
        seq_lens_stride=strides(seq_lens)[-1],
        batch=batch,
        capacity=plan.split_begin.shape[-1],
        max_seq_len=max_seq_len,
        value=value,
        tile=tile,
        num_sms=num_sms,
        num_kv_heads=num_kv_heads,
        query_tiles=query_tiles,
    )
    return _launch("plan_splits", KernelSpec(plan_rule=rule), (plans,), values)
