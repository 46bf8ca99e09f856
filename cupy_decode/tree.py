"""The sums along a tree in plain NumPy and float32: the same bits whoever adds up which part.

Those of ``paged_split_k_mma``, and of the readable kernels with ``deterministic=True``.

A softmax state is ``(m, l, w, acc)``: a maximum ``m`` in log2 units and, over the keys with
``p = 2**(x - m)``, the sums of ``p``, of ``p`` as rounded for the product with V, and of that
times ``v``. Two states add up to

    M = max(m, m'),  l * 2**(m - M) + l' * 2**(m' - M),  and so on for w and acc.

Two choices make the bits of a sum the same whoever adds up which part:

- ``m`` is rounded up to an integer. The factors are then powers of two, and
  ``(a * 2**i + b * 2**j) * 2**k`` is ``a * 2**(i + k) + b * 2**(j + k)`` to the last bit: it does
  not matter when a state is brought to a larger maximum, only in which order states are added.
- The order is one binary tree over the leaf index, counted from the sequence's first key; with a
  window the fast kernel counts from the first page of 16 keys that it reaches into. Leaves ``2i``
  and ``2i + 1`` are siblings, and so are their parents. A missing right sibling is the empty state
  ``(-inf, 0, 0, -0.0)``: ``x + -0.0`` is ``x`` for every ``x``, and ``-0.0 + 0.0`` is not.

Anybody who owns a run of leaves folds it to its maximal aligned subtrees; merging those completes
the same tree.

The limit is the exponent. Factors below 2**-126 are 0, and a product below 2**-126 loses bits, so
where the maxima of one sequence's leaves are some hundred units of log2 apart, what such terms
leave behind may depend on when they were rescaled. They matter only where the other operand is 0 or
as small itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

_LOG2_E = np.float32(math.log2(math.e))
_LN_2 = np.float32(math.log(2))
#: Keys of a page: where a window's leaves begin is a multiple of it.
_PAGE = 16


@dataclass(frozen=True, eq=False)
class States:
    """Softmax states of ``n`` runs of keys of one (sequence, head), all float32.

    Attributes
    ----------
    m : (n,)
        Maxima in log2 units, rounded up to integers; -inf: no key.
    l : (n,)
        Sums of ``2**(x - m)``.
    w : (n,)
        The same sums of weights as rounded for the product with V; they divide ``acc``. The
        readable kernels round none: theirs is ``l``.
    acc : (n, v_head_dim)
        Sums of rounded weight times value.
    """

    m: np.ndarray
    l: np.ndarray  # noqa: E741  the field's own letter
    w: np.ndarray
    acc: np.ndarray

    def __len__(self) -> int:
        return len(self.m)

    def __getitem__(self, rows: slice) -> States:
        return States(self.m[rows], self.l[rows], self.w[rows], self.acc[rows])


@dataclass(frozen=True, eq=False)
class Subtree:
    """The sum of the leaves ``first .. first + width``; ``first`` is a multiple of ``width``.

    Attributes
    ----------
    first, width : int
        Counted in leaves; the width is a power of two.
    state : States
        A single one.
    """

    first: int
    width: int
    state: States


def empty(v_head_dim: int) -> States:
    """The state of no keys, the identity of every sum: (1,) and (1, v_head_dim)."""
    zero = np.zeros(1, np.float32)
    acc = np.full((1, v_head_dim), -0.0, np.float32)
    return States(np.full(1, -np.inf, np.float32), zero, zero, acc)


def weight(m: np.ndarray, top: np.ndarray) -> np.ndarray:
    """``2**(m - top)`` in float32, exact for integers; 0 below 2**-126 and for an empty state.

    Parameters
    ----------
    m, top : float32 arrays that broadcast
        ``m <= top``.
    """
    with np.errstate(invalid="ignore"):  # -inf - -inf, of two empty states
        below = m - top
    normal = below >= -126
    return np.where(normal, np.exp2(np.where(normal, below, 0)), 0).astype(np.float32)


def rescale(states: States, top: np.ndarray) -> States:
    """The same states at the maxima ``top``, a float32 array (n,) or (1,)."""
    f = weight(states.m, top)
    m = np.broadcast_to(top, states.m.shape)
    return States(m, states.l * f, states.w * f, states.acc * f[:, None])


def leaf_states(
    q: Any,
    k: Any,
    v: Any,
    leaf_keys: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    weights_dtype: Any = np.float32,
    integer_maxima: bool = True,
) -> States:
    """The leaves of one (sequence, head), each ``leaf_keys`` keys, the last one maybe fewer.

    The arithmetic is this function's own; the kernel's leaves agree with it to rounding.

    Parameters
    ----------
    q : (head_dim,)
    k : (seq_len, head_dim)
    v : (seq_len, v_head_dim)
    leaf_keys : int
        At least 1. The bits of every sum depend on it.
    scale : float, optional
        Multiplies q . k; ``1 / sqrt(head_dim)`` when left out.
    window : int, optional
        Newest keys that count. Leaves begin at the page of the first of them, which may hold fewer.
    weights_dtype : dtype
        What weights are rounded to before they meet ``v``; tensor cores take 16-bit ones.
    integer_maxima : bool
        False leaves the maxima as they are, to show what is lost.

    Returns
    -------
    States of ``max(ceil(seq_len / leaf_keys), 1)`` leaves; of a window, fewer. Scores must be
    finite.

    Raises
    ------
    ValueError
        If ``leaf_keys`` or ``window`` is below 1 or k and v differ in length.
    """
    q, k, v = (np.asarray(array).astype(np.float32) for array in (q, k, v))
    if leaf_keys < 1:
        raise ValueError(f"leaf_keys must be at least 1; got {leaf_keys}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, or None for all keys; got {window}")
    if len(k) != len(v):
        raise ValueError(f"k has {len(k)} keys but v has {len(v)}; give one value per key")
    factor = np.float32(len(q) ** -0.5 if scale is None else scale) * _LOG2_E
    rows = [empty(v.shape[1])] if not len(k) else []
    first = 0 if window is None else max(len(k) - window, 0)
    for begin in range(first // _PAGE * _PAGE, len(k), leaf_keys):
        keys = slice(max(begin, first), begin + leaf_keys)
        x = (k[keys] * q).sum(axis=1) * factor
        m = np.ceil(x.max()) if integer_maxima else x.max()
        p = np.exp2(x - m)
        rounded = p.astype(weights_dtype).astype(np.float32)
        acc = (rounded[:, None] * v[keys]).sum(axis=0)
        rows.append(States(m[None], p.sum()[None], rounded.sum()[None], acc[None]))
    return _concatenate(rows)


def _concatenate(rows: list[States]) -> States:
    names = ("m", "l", "w", "acc")
    return States(*(np.concatenate([getattr(row, name) for row in rows]) for name in names))


def add(left: States, right: States) -> States:
    """The parents of siblings, (n,) and (n,), each pair at the larger of its two maxima."""
    top = np.maximum(left.m, right.m)
    a, b = rescale(left, top), rescale(right, top)
    return States(top, a.l + b.l, a.w + b.w, a.acc + b.acc)


def fold(leaves: States) -> States:
    """The sum of (n,) states along the tree, a single state; n is at least 1.

    Every node is at the maximum of its own leaves.
    """
    while len(leaves) > 1:
        if len(leaves) % 2:
            leaves = _concatenate([leaves, empty(leaves.acc.shape[1])])
        leaves = add(leaves[0::2], leaves[1::2])
    return leaves


def fold_range(leaves: States, begin: int, end: int) -> list[Subtree]:
    """The maximal aligned subtrees of the leaves ``begin .. end``, in order.

    Parameters
    ----------
    leaves : States
        All leaves of the sequence; only those of the range are looked at.
    begin, end : int
        ``0 <= begin <= end <= len(leaves)``.

    Raises
    ------
    ValueError
        If the range is not within the leaves.

    Examples
    --------
    >>> ones = leaf_states(np.ones(2), np.ones((11, 2)), np.ones((11, 2)), leaf_keys=1)
    >>> [(t.first, t.width) for t in fold_range(ones, 3, 11)]
    [(3, 1), (4, 4), (8, 2), (10, 1)]
    """
    if not 0 <= begin <= end <= len(leaves):
        raise ValueError(
            f"begin and end must satisfy 0 <= begin <= end <= {len(leaves)}, the number of leaves; "
            f"got {begin} and {end}"
        )
    found = []
    while begin < end:
        fits = 1 << ((end - begin).bit_length() - 1)
        width = min(begin & -begin, fits) if begin else fits
        found.append(Subtree(begin, width, fold(leaves[begin : begin + width])))
        begin += width
    return found


def merge_subtrees(subtrees: Iterable[Subtree]) -> States:
    """The sum of all leaves from the subtrees that cover them, a single state.

    As whoever merges partial states does, this brings all of them to the largest maximum first and
    adds then. With integer maxima the result is ``fold`` of all leaves, bit for bit.

    Raises
    ------
    ValueError
        If the subtrees do not cover the leaves from 0 on, each once.
    """
    trees = sorted(subtrees, key=lambda tree: tree.first)
    end = 0
    for tree in trees:
        if tree.first != end or tree.width < 1 or tree.width & -tree.width != tree.width:
            raise ValueError(
                "subtrees must cover every leaf once, in widths that are powers of two; after leaf "
                f"{end} comes leaf {tree.first} of width {tree.width}"
            )
        if tree.first % tree.width:
            raise ValueError(
                f"a subtree of width {tree.width} begins at a multiple of that; got {tree.first}"
            )
        end += tree.width
    if not trees:
        raise ValueError("subtrees is empty; a sequence without keys has one empty leaf")
    top = np.max([tree.state.m for tree in trees], axis=0)
    found = {(tree.first, tree.width): rescale(tree.state, top) for tree in trees}

    def total(first: int, width: int) -> States:
        if (first, width) in found:
            return found[first, width]
        left, middle = total(first, width // 2), first + width // 2
        return left if middle >= end else add(left, total(middle, width // 2))

    return total(0, 1 << (end - 1).bit_length())


def subtrees(partials: Any, sequence: int, head: int) -> list[Subtree]:
    """What ``paged_split_k(..., deterministic=True)`` left of one (sequence, head), in order.

    Parameters
    ----------
    partials : Partials
        On the host, float32, with ``width``.
    sequence, head : int

    Returns
    -------
    list of Subtree
        From leaf 0 on: leaves before the first that a window shows are empty ones.
    """
    widths = partials.width[sequence].tolist()
    found: list[Subtree] = []
    for leaf, width in enumerate(widths):
        row = sequence * len(widths) + leaf
        if width > 0:
            m, l, acc = (x[row, head][None] for x in (partials.m, partials.l, partials.acc))  # noqa: E741
            found.append(Subtree(leaf, width, States(m, l, l, acc)))
        elif not any(widths[:leaf]):
            found.append(Subtree(leaf, 1, empty(partials.acc.shape[2])))
    return found


def result(state: States, *, divide: bool = False) -> tuple[np.ndarray, np.floating]:
    """Output (v_head_dim,) and natural lse () of one (sequence, head); 0 and -inf of no keys.

    The fast kernel multiplies by the reciprocal of ``w``; with ``divide`` the sums are divided by
    it, as the readable kernels do.
    """
    if state.l[0] == 0:
        return np.zeros(state.acc.shape[1], np.float32), np.float32(-np.inf)
    acc, w = state.acc[0], state.w[0]
    out = acc / w if divide else acc * (np.float32(1) / w)
    return out, (state.m[0] + np.log2(state.l[0])) * _LN_2
