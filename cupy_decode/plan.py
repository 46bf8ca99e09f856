"""Split plans: which keys each thread block reads, as half-open ranges.

A plan is a list of ranges in CSR form. Sequence ``b`` owns the rows
``split_offsets[b] .. split_offsets[b + 1]``; row ``r`` starts at key ``split_begin[r]`` and ends
where the next row of the same sequence begins, the last one at ``seq_lens[b]``. Stage 1 writes one
partial state per row and stage 2 reads the same two arrays, so their masks cannot disagree.

Ranges, and not counts, because counts cannot say PagedAttention's 512 + 1 keys, FlashMLA's packed
parts or balanced shares of a ragged batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_decode.heads import INT32_MAX, HeadConfig, whole

#: What holds one number for each sequence.
_ARRAYS = (np.ndarray, list, tuple)


def _lengths(seq_lens: Any) -> np.ndarray:
    lens = np.asarray(seq_lens)
    if lens.ndim != 1 or lens.size == 0 or lens.dtype.kind not in "iu":
        raise ValueError(
            f"seq_lens must be a non-empty one-dimensional integer array; got shape {lens.shape}, "
            f"dtype {lens.dtype}"
        )
    lens = lens.astype(np.int64)
    if lens.min() < 0:
        b = int(lens.argmin())
        raise ValueError(f"seq_lens[{b}] is {lens[b]}; lengths count keys and cannot be negative")
    if lens.max() > INT32_MAX:
        b = int(lens.argmax())
        raise ValueError(f"seq_lens[{b}] is {lens[b]}; lengths must be at most {INT32_MAX}")
    return lens


def _positive(name: str, value: Any, batch: int) -> np.ndarray:
    """``value``, one for all sequences or one for each, as an int64 array of shape (batch,)."""
    if not isinstance(value, _ARRAYS):
        return np.full(batch, whole(name, value))
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.shape != (batch,):
        raise ValueError(
            f"{name} must be an integer or {batch} integers, one per sequence; got shape "
            f"{array.shape}, dtype {array.dtype}"
        )
    for number in (array.min(), array.max()):
        whole(name, number)
    return array.astype(np.int64)


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Key ranges of every split of every sequence.

    Attributes
    ----------
    split_offsets : int32 array, shape (batch + 1,)
        First row of each sequence; the last entry is the number of rows in use.
    split_begin : int32 array, shape (capacity,)
        First key of each row. Entries past ``split_offsets[batch]`` are unused.
    unsplit : bool
        True when every sequence is known on the host to have exactly one row; a ValueError where
        arrays on the host say otherwise.
    policy : str
        Name of the rule that made the plan.
    account : object, optional
        What the engine behind the rule would have launched (see ``cupy_decode.policies``).

    Notes
    -----
    The arrays live on the host (NumPy) or on the device (CuPy). The constructors here make host
    plans; ``to(cupy, capacity=...)`` copies one into device buffers whose size then stays fixed,
    and ``assign`` rewrites those buffers in place, which is what a captured CUDA graph needs.

    A plan stays valid when lengths change: the last split of a row ends at the *current* length,
    and a split that begins at or past it is empty and contributes nothing.
    """

    split_offsets: Any
    split_begin: Any
    unsplit: bool = False
    policy: str = "custom"
    account: Any = None

    def __post_init__(self) -> None:
        # A buffer that a kernel has yet to fill starts with -1 on the emulator and promises.
        offsets = self.split_offsets
        if self.unsplit and isinstance(offsets, np.ndarray) and offsets[0] >= 0:
            wrong = np.flatnonzero(offsets != np.arange(len(offsets)))
            if wrong.size:
                i = int(wrong[0])
                raise ValueError(
                    "unsplit says that every sequence has exactly one row, so split_offsets[i] "
                    f"must be i; got split_offsets[{i}] = {offsets[i]}: leave unsplit out"
                )

    # ------------------------------------------------------------------ constructors

    @classmethod
    def from_counts_and_sizes(
        cls, seq_lens: Any, sizes: np.ndarray, *, policy: str, capacity: int | None = None
    ) -> SplitPlan:
        """Splits of ``sizes[b]`` keys each, the last one shorter; at least one row a sequence."""
        lens = _lengths(seq_lens)
        sizes = _positive("sizes", sizes, len(lens))
        counts = np.maximum(-(-lens // sizes), 1)
        if counts.sum() > INT32_MAX:
            raise ValueError(
                f"the plan needs {counts.sum()} rows, more than {INT32_MAX}; plan fewer splits"
            )
        offsets = np.concatenate([[0], np.cumsum(counts)])
        row = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return cls._pack(offsets, row * np.repeat(sizes, counts), policy, capacity)

    @classmethod
    def from_num_splits(
        cls,
        seq_lens: Any,
        num_splits: Any,
        *,
        tile: int = 16,
        policy: str = "fixed",
        capacity: int | None = None,
    ) -> SplitPlan:
        """At most ``num_splits`` splits of ``ceil(ceil(s / tile) / num_splits) * tile`` keys.

        Trailing splits that would own no key do not exist, so s = 257 with 16 splits has 9: this is
        vLLM's segment rule (tile 16) and SGLang's (tile 32).

        Parameters
        ----------
        seq_lens : (batch,) integers
        num_splits : int or (batch,) integers
            There are never more splits than tiles, however large this is.
        tile : int
            Splits are multiples of this many keys.
        capacity : int, optional
            Rows to allocate; more than that is a ValueError.
        """
        lens = _lengths(seq_lens)
        tile = whole("tile", tile)
        if not isinstance(num_splits, _ARRAYS):
            num_splits = min(whole("num_splits", num_splits, most=None), INT32_MAX)
        n = _positive("num_splits", num_splits, len(lens))
        tiles = -(-lens // tile)
        sizes = np.maximum(-(-tiles // n), 1) * tile
        return cls.from_counts_and_sizes(lens, sizes, policy=policy, capacity=capacity)

    @classmethod
    def from_split_size(
        cls,
        seq_lens: Any,
        split_size: int,
        *,
        policy: str = "split-size",
        capacity: int | None = None,
    ) -> SplitPlan:
        """Splits of exactly ``split_size`` keys, the last one shorter (512 + 1 at s = 513).

        A size of the whole sequence or more, however large, is one split.
        """
        lens = _lengths(seq_lens)
        sizes = np.full(lens.shape, min(whole("split_size", split_size, most=None), INT32_MAX))
        return cls.from_counts_and_sizes(lens, sizes, policy=policy, capacity=capacity)

    @classmethod
    def from_bounds(
        cls,
        bounds: Sequence[Sequence[int]],
        seq_lens: Any,
        *,
        policy: str = "bounds",
        capacity: int | None = None,
    ) -> SplitPlan:
        """Splits that begin at the given keys.

        Parameters
        ----------
        bounds : one sequence of ints per row of the batch
            First key of each split: starts with 0, never decreases, never exceeds the length.
            Equal neighbours make an empty split, which is legal.
        """
        lens = _lengths(seq_lens)
        if len(bounds) != len(lens):
            raise ValueError(f"bounds has {len(bounds)} rows but seq_lens has {len(lens)}")
        for b, row in enumerate(bounds):
            keys = np.asarray(row)
            if keys.size and keys.dtype.kind not in "iu":
                raise TypeError(
                    f"bounds[{b}] must hold integers in the range of int32; got {list(row)}"
                )
            if (
                keys.ndim != 1
                or keys.size == 0
                or keys[0] != 0
                or (np.diff(keys) < 0).any()
                or keys[-1] > lens[b]
            ):
                raise ValueError(
                    f"bounds[{b}] must start with 0, never decrease and stay within "
                    f"seq_lens[{b}] = {lens[b]}; got {list(row)}"
                )
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in bounds])])
        return cls._pack(offsets, np.concatenate(list(bounds)), policy, capacity)

    @classmethod
    def _pack(
        cls, offsets: np.ndarray, begin: np.ndarray, policy: str, capacity: int | None
    ) -> SplitPlan:
        rows = int(offsets[-1])
        buffer = np.zeros(rows if capacity is None else capacity, np.int32)
        if rows > buffer.size:
            raise ValueError(
                f"the plan needs {rows} rows but capacity is {buffer.size}; plan fewer splits or "
                f"give capacity={rows}"
            )
        buffer[:rows] = begin
        unsplit = bool((np.diff(offsets) == 1).all())
        return cls(offsets.astype(np.int32), buffer, unsplit, policy)

    # ------------------------------------------------------------------ questions

    @property
    def batch(self) -> int:
        """Sequences planned for."""
        return int(self.split_offsets.shape[0]) - 1

    @property
    def capacity(self) -> int:
        """Rows that fit, in use or not; it fixes the launch grid."""
        return int(self.split_begin.shape[0])

    @property
    def on_device(self) -> bool:
        """True when the arrays are not NumPy arrays."""
        return not isinstance(self.split_begin, np.ndarray)

    def to_host(self) -> SplitPlan:
        """The same plan in NumPy arrays (synchronises when the plan is on a device)."""
        if not self.on_device:
            return self
        return replace(
            self, split_offsets=self.split_offsets.get(), split_begin=self.split_begin.get()
        )

    @property
    def num_rows(self) -> int:
        """Rows in use. Host plans only."""
        return int(self._host().split_offsets[-1])

    @property
    def counts(self) -> np.ndarray:
        """Splits of each sequence. Host plans only."""
        return np.diff(self._host().split_offsets)

    @property
    def has_rows(self) -> np.ndarray:
        """Of each sequence, whether a row that fits is its own. Host plans only."""
        offsets = self._host().split_offsets
        result: np.ndarray = np.maximum(offsets[:-1], 0) < np.minimum(offsets[1:], self.capacity)
        return result

    def ranges(self, seq_lens: Any) -> list[tuple[int, int, int]]:
        """``(sequence, begin, end)`` of every row in use, ends clipped to the current lengths."""
        plan = self._host()
        lens = _lengths(seq_lens)
        if len(lens) != plan.batch:
            raise ValueError(f"seq_lens has {len(lens)} entries but the plan has {plan.batch}")
        out = []
        for b, s in enumerate(lens.tolist()):
            first, last = int(plan.split_offsets[b]), int(plan.split_offsets[b + 1])
            edges = [*(int(k) for k in plan.split_begin[first:last]), s]
            out += [(b, min(edges[i], s), min(edges[i + 1], s)) for i in range(last - first)]
        return out

    def _host(self) -> SplitPlan:
        if self.on_device:
            raise ValueError("this plan lives on the device; call .to_host() first (it waits)")
        return self

    # ------------------------------------------------------------------ moving

    def to(self, xp: Any, capacity: int | None = None) -> SplitPlan:
        """Copy into arrays of another module: ``plan.to(cupy, capacity=4096)``.

        Unused rows are filled with 0x7fffffff, so that a kernel that read one would show it.
        """
        plan = self._host()
        begin = np.full(plan.capacity if capacity is None else capacity, 2**31 - 1, np.int32)
        rows = plan.num_rows
        if rows > begin.size:
            raise ValueError(
                f"the plan needs {rows} rows but capacity is {begin.size}; "
                f"give capacity={rows} or more"
            )
        begin[:rows] = plan.split_begin[:rows]
        # Fixed geometry may be rewritten later, so only an exact copy may claim to be unsplit.
        unsplit = self.unsplit and capacity is None
        return replace(
            self,
            split_offsets=xp.asarray(plan.split_offsets),
            split_begin=xp.asarray(begin),
            unsplit=unsplit,
        )

    def assign(self, other: SplitPlan) -> None:
        """Rewrite this plan's buffers in place with a host plan's ranges.

        Raises
        ------
        ValueError
            If the batch differs, the rows exceed this plan's capacity, or this plan promised to
            stay unsplit. Nothing is written then.
        """
        other = other._host()
        rows = other.num_rows
        if other.batch != self.batch:
            raise ValueError(f"plan is for batch {self.batch}; got one for batch {other.batch}")
        if rows > self.capacity:
            raise ValueError(
                f"the new plan needs {rows} rows but capacity is {self.capacity}; "
                "create the plan with a larger capacity"
            )
        if self.unsplit and not other.unsplit:
            raise ValueError(
                "this plan was made unsplit, so its launches have no reduce; "
                "make it with .to(xp, capacity=...) to leave room for splits"
            )
        if self.on_device:
            self.split_offsets.set(other.split_offsets)
            self.split_begin[:rows].set(other.split_begin[:rows])
        else:
            self.split_offsets[:] = other.split_offsets
            self.split_begin[:rows] = other.split_begin[:rows]


@dataclass(frozen=True, eq=False)
class Origin:
    """The call that leaves come from: what the shards of one batch have in common.

    Attributes
    ----------
    seq_lens : int32 array, shape (batch,)
        A copy; on a device the call's own array, since a captured graph reads that again.
    heads : HeadConfig
    options : mapping of str
        Options of stage 1 that are numbers, and whether there are ALiBi slopes.
    """

    seq_lens: Any
    heads: HeadConfig
    options: Mapping[str, Any]

    def lens(self) -> np.ndarray:
        """The lengths on the host; waits for those on a device."""
        return np.asarray(_to_host(self.seq_lens))

    def difference(self, other: Origin) -> str | None:
        """What another call had otherwise, in words; None where nothing is known to differ."""
        mine, its = self.lens(), other.lens()
        if mine.shape != its.shape:
            return f"{len(mine)} and {len(its)} sequences"
        if (mine != its).any():
            b = int(np.flatnonzero(mine != its)[0])
            return f"seq_lens[{b}] {mine[b]} and {its[b]}"
        if self.heads != other.heads:
            return f"{self.heads} and {other.heads}"
        for name, value in self.options.items():
            if value != other.options[name]:
                return f"{name} {value} and {other.options[name]}"
        return None


def _to_host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()


@dataclass(frozen=True, eq=False, repr=False)
class Partials:
    """Softmax states of every split, and the plan that says which rows exist.

    Attributes
    ----------
    acc : float32 array, shape (rows, num_q_heads, v_head_dim)
        Unnormalised output, sum of ``2**(x - m) * v`` over the split's visible keys.
    m : float32 array, shape (rows, num_q_heads)
        Maximum of ``x``, the scaled score in log2 units: ``x = score * log2(e)``.
    l : float32 array, shape (rows, num_q_heads)
        Sum of ``2**(x - m)``.
    plan : SplitPlan
    width : int32 array, shape (batch, leaf_rows), optional
        Only of states that add up along the tree over fixed leaves. The other arrays then have
        ``batch * leaf_rows`` rows, ``m`` is an integer, and row ``b * leaf_rows + i`` holds the sum
        of the leaves ``i .. i + width[b, i]`` of sequence ``b``, counted from its first key. Rows
        of width 0 hold nothing and must not be read.
    origin : Origin, optional
        Of leaves: the call that they come from. It tells ``reduce_splits`` which of them are
        missing, and ``join`` which shards do not belong together; without it they cannot know.
        ``dataclasses.replace(partials, origin=None)`` lets one shard be reduced by itself, for
        ``merge_states``.

    Notes
    -----
    The empty state is ``(0, -inf, 0)``, an exact identity of the merge. Rows past
    ``plan.split_offsets[batch]`` are unwritten and must not be read.
    """

    acc: Any
    m: Any
    l: Any  # noqa: E741  the field's own letter
    plan: SplitPlan
    width: Any = None
    origin: Origin | None = None

    def __repr__(self) -> str:
        names = ("acc", "m", "l", "width")
        arrays = ((name, getattr(self, name)) for name in names)
        shapes = [f"{name} {x.dtype} {x.shape}" for name, x in arrays if x is not None]
        batch = f"batch {self.plan.batch}"
        return f"Partials({', '.join(shapes)}, plan {self.plan.policy!r} of {batch})"

    def join(self, *others: Partials) -> Partials:
        """The subtrees of several shards of the same sequences, as one call would have left them.

        Every shard knows the places of its leaves in the whole sequence, so nothing is added here
        and ``reduce_splits`` of the result has the bits of an unsharded call of the readable
        kernels, ``decode_attention(..., deterministic=True, kernel="readable")``: the fast kernel
        has other leaves. Outputs and lse's have not: ``merge_states`` rescales what has been
        divided, by weights that are no powers of two.

        Parameters
        ----------
        *others : Partials
            On the same device, with rows for the same leaves, and all from calls with the same
            queries, lengths and options. Lengths, heads and options that are numbers are compared;
            the contents of other arrays cannot be.

        Raises
        ------
        ValueError
            If a shard holds no subtrees, is from a call with other lengths, heads or options, or
            from the reference where the first is a kernel's; if two hold the same leaf, or one
            holds leaves of a sequence without a row in the first one's plan, which is the result's.
            Comparing lengths and leaves waits for the device.
        """
        shards = (self, *others)
        for i, shard in enumerate(shards):
            if shard.width is None:
                raise ValueError(f"shard {i} holds splits; give paged_split_k deterministic=True")
            if shard.width.shape != self.width.shape or shard.acc.shape != self.acc.shape:
                raise ValueError(
                    f"shard {i} has states {shard.acc.shape} in rows {shard.width.shape} but shard "
                    f"0 has {self.acc.shape} in {self.width.shape}; give all shards tables that "
                    "reach as many keys"
                )
            if shard.acc.dtype != self.acc.dtype:
                raise ValueError(
                    f"shard {i} has {shard.acc.dtype} states but shard 0 {self.acc.dtype}: one is "
                    "the reference's; compute all shards on one backend"
                )
        known = [(i, shard.origin) for i, shard in enumerate(shards) if shard.origin is not None]
        for i, origin in known[1:]:
            first, expected = known[0]
            if different := expected.difference(origin):
                raise ValueError(
                    f"shards must be of one call's sequences; shards {first} and {i} have "
                    f"{different}: give all of them the same lengths and options"
                )
        acc, m, l = self.acc.copy(), self.m.copy(), self.l.copy()  # noqa: E741
        width = self.width.copy()
        planned = self.plan.to_host().has_rows
        for i, shard in enumerate(others, 1):
            if ((width > 0) & (shard.width > 0)).any():
                raise ValueError(f"shard {i} holds a leaf that another shard holds; cut at leaves")
            held = (shard.width > 0).any(axis=1)
            lost = np.flatnonzero((held if isinstance(held, np.ndarray) else held.get()) & ~planned)
            if lost.size:
                raise ValueError(
                    f"shard {i} holds leaves of sequence {lost[0]}, but shard 0's plan has no row "
                    "for it; give all shards plans with rows for every sequence"
                )
            here = shard.width.reshape(-1) > 0
            acc[here], m[here], l[here] = shard.acc[here], shard.m[here], shard.l[here]
            width += shard.width
        return Partials(acc, m, l, self.plan, width, known[0][1] if known else None)
