"""What a call of ``decode_attention`` runs, and why that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupy_decode import fast
from cupy_decode.specs import Launch

#: Why the fast kernel runs, where it does.
COVERED = "types, heads, options and strides are among those it is written for"


@dataclass(frozen=True)
class Explanation:
    """What a call runs; as text, one paragraph.

    Attributes
    ----------
    backend : {"cuda", "emulator", "reference"}
    kernels : tuple of str
        In the order of their launches; none in the reference and for an empty batch.
    grids : tuple of (int, int, int)
        Thread blocks of each.
    why : str
        Why the fast kernel runs, or why it does not.
    split_rule : str
        What decides which thread block reads which keys.
    merge : str
        Where the splits of a sequence meet.
    num_splits : tuple of int, optional
        Of the readable kernels, where the plan is on the host: splits of each sequence.
    units : tuple of int, optional
        Of the fast kernel, where the lengths are on the host: units that the keys of one KV head
        are cut into, by sequence. A unit is a run of keys that one thread block takes at a time and
        leaves one partial state or a few of; 1 says that the sequence is not split.
    leaf_keys : tuple of int, optional
        Likewise: keys of one leaf of the tree of sums, by sequence.
    overlap : bool
        Whether it starts before the launch before has ended, and waits for that after its first
        reads.
    """

    backend: str
    kernels: tuple[str, ...]
    grids: tuple[tuple[int, int, int], ...]
    why: str
    split_rule: str
    merge: str
    num_splits: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None
    leaf_keys: tuple[int, ...] | None = None
    overlap: bool = False

    @property
    def is_fast(self) -> bool:
        """Whether the fast kernel runs."""
        return self.kernels == ("paged_split_k_mma",)

    def __str__(self) -> str:
        if not self.kernels:
            text = f"No kernel is launched on the {self.backend} backend."
            if self.backend == "reference":
                text += " With backend='emulator' the kernels run on the same arrays."
            return text
        grids = [" x ".join(str(n) for n in grid) for grid in self.grids]
        launches = ", then ".join(
            f"{name} on a grid of {grid}" for name, grid in zip(self.kernels, grids, strict=True)
        )
        kernel = "fast" if self.is_fast else "readable"
        text = (
            f"On the {self.backend} backend: {launches}. The {kernel} kernel, because {self.why}. "
            f"Splits: {self.split_rule}. Merge: {self.merge}."
        )
        if self.overlap:
            text += " Overlap: it reads its first pages before the launch before has ended."
        if self.num_splits is not None:
            text += f" Number of splits, by sequence: {_some(self.num_splits)}."
        if self.units is not None:
            text += f" Units of each KV head, by sequence: {_some(self.units)}."
        if self.leaf_keys is not None:
            text += f" Keys of a leaf, by sequence: {_some(self.leaf_keys)}."
        return text

    @classmethod
    def of_fast(
        cls,
        backend: str,
        why: str,
        launch: Launch,
        spec: fast.FastSpec,
        seq_lens: list[int] | None,
        window: int | None,
    ) -> Explanation:
        """Of the fast kernel; ``seq_lens`` where they are on the host."""
        units = leaf_keys = None
        if seq_lens is not None:
            capacity = next(int(a.value) for a in launch.args if a.name == "capacity")
            cut = fast.schedule(seq_lens, spec, launch.grid[0], capacity, window)
            units, leaf_keys = cut.units, tuple(fast.PAGE * n for n in cut.leaf_pages)
        return cls(
            backend,
            (launch.source,),
            (launch.grid,),
            why,
            "thread blocks share the keys out among themselves, from seq_lens where it lies",
            "the last thread block of a sequence to arrive adds up the partial states, in the same "
            "launch and along a tree that does not depend on the splits",
            units=units,
            leaf_keys=leaf_keys,
            overlap=launch.overlap,
        )

    @classmethod
    def of_readable(
        cls,
        backend: str,
        why: str,
        launches: Sequence[Launch],
        split_rule: str,
        num_splits: tuple[int, ...] | None = None,
        leaf_keys: list[int] | None = None,
    ) -> Explanation:
        """Of the readable kernels; ``num_splits`` where the plan is on the host, ``leaf_keys``
        where they add along a tree and lengths are on the host."""
        kernels = tuple(launch.source for launch in launches)
        merge = "none, every sequence is one split"
        if "reduce_splits" in kernels:
            merge = "reduce_splits, a launch of its own"
        if "reduce_subtrees" in kernels:
            split_rule += ", each border moved up to the next leaf"
            merge = (
                "reduce_subtrees, a launch of its own, along a tree that does not depend on the "
                "splits"
            )
        leaves = None if leaf_keys is None else tuple(leaf_keys)
        grids = tuple(x.grid for x in launches)
        return cls(backend, kernels, grids, why, split_rule, merge, num_splits, leaf_keys=leaves)


def _some(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
