"""How close a kernel must come to the float64 reference.

A fixed twin computes the same attention in the kernel's own precision: inputs as given, scores in
float32, probabilities rounded to the input dtype, sums in float32, the output rounded to the input
dtype. A kernel may err twice as much as the twin, in the maximum and in the root mean square, plus
a floor for results that the twin happens to hit exactly. The bound follows the data, so it is tight
where the problem is easy, and a scale that is 1 % off fails it in every dtype.

There are two ways to round probabilities, with errors of one size that have nothing to do with each
other: below the largest score, or, as the fast kernel does, below the next power of two. With few
keys either can be lucky, so there is a twin of both, and the larger error counts. The second adds
up scores from the last product to the first: with one key and one head, that sum can be lucky too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_decode import reference

_TILE = 64


@dataclass(frozen=True)
class Bound:
    """Largest errors that ``assert_close`` accepts for one result.

    Attributes
    ----------
    out_max, out_rms, lse_max, lse_rms : float
        Absolute errors over the finite entries.
    """

    out_max: float
    out_rms: float
    lse_max: float
    lse_rms: float


def ulp(x: float, dtype: Any) -> float:
    """Spacing of ``dtype`` at the magnitude of ``x``."""
    info = ml_dtypes.finfo(dtype)
    return float(info.eps) * 2.0 ** math.floor(math.log2(max(abs(x), float(info.tiny))))


def _max_and_rms(error: np.ndarray) -> tuple[float, float]:
    if not error.size:
        return 0.0, 0.0
    return float(np.abs(error).max()), float(np.sqrt(np.mean(error**2)))


def _largest(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0


def twin_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    kv_dtype: str | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    integer_maxima: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Decode attention in the precision of a kernel, unsplit, in one fixed order of additions.

    Parameters
    ----------
    q, k_cache, v_cache, block_table, seq_lens, scale, window, logits_soft_cap, alibi_slopes, sinks
    kv_dtype, k_scale, v_scale
        As in ``cupy_decode.reference.decode_attention``.
    out_dtype : dtype, optional
        Output type; q's when left out.
    integer_maxima : bool
        Round maxima up to integers, in log2 units, divide by the sum of the rounded weights, and
        add up scores in reverse order.

    Returns
    -------
    out : (batch, num_q_heads, v_head_dim) array of ``out_dtype``
    lse : (batch, num_q_heads) float32
    """
    f32 = np.float32
    batch, num_q_heads, head_dim = q.shape
    group_size = num_q_heads // k_cache.shape[2]
    scale32 = f32(head_dim**-0.5 if scale is None else scale)
    k_cache, v_cache = (reference.elements(c, kv_dtype) for c in (k_cache, v_cache))
    k_factor, v_factor = (
        reference.factors(x, batch, k_cache.shape[2]).astype(f32) for x in (k_scale, v_scale)
    )
    out = np.zeros((batch, num_q_heads, v_cache.shape[-1]), out_dtype or q.dtype)
    lse = np.full((batch, num_q_heads), -np.inf, f32)
    with np.errstate(all="ignore"):
        for b, s in enumerate(int(n) for n in seq_lens):
            first = 0 if window is None else max(0, s - int(window))
            k = reference.gather_kv(k_cache, block_table[b], s, begin=first).astype(f32)
            v = reference.gather_kv(v_cache, block_table[b], s, begin=first).astype(f32)
            distance = np.arange(first - (s - 1), 1, dtype=f32)
            for kv_head in range(k.shape[1] if s else 0):
                group = slice(kv_head * group_size, (kv_head + 1) * group_size)
                q_group, k_head = q[b, group].astype(f32), k[:, kv_head].T.copy()
                x = np.zeros((group_size, k_head.shape[1]), f32)
                for i in range(head_dim)[:: -1 if integer_maxima else 1]:
                    x += q_group[:, i, None] * k_head[i]
                x *= scale32 * k_factor[b, kv_head]
                if logits_soft_cap is not None:
                    x = f32(logits_soft_cap) * np.tanh(x / f32(logits_soft_cap))
                if alibi_slopes is not None:
                    x += np.asarray(alibi_slopes, f32)[group, None] * distance
                top = x.max(axis=1, keepdims=True)
                if integer_maxima:
                    top = np.ceil(top * f32(reference.LOG2_E)) / f32(reference.LOG2_E)
                p = np.where(top == -np.inf, f32(0), np.exp(x - top))
                total, divisor = np.zeros((2, group_size, 1), f32)
                acc = np.zeros((group_size, v.shape[-1]), f32)
                for t in range(0, p.shape[1], _TILE):
                    tile = p[:, t : t + _TILE]
                    rounded = tile.astype(q.dtype).astype(f32)
                    total += tile.sum(axis=1, dtype=f32, keepdims=True)
                    divisor += rounded.sum(axis=1, dtype=f32, keepdims=True)
                    acc += (rounded[..., None] * v[t : t + _TILE, kv_head]).sum(axis=1, dtype=f32)
                acc *= v_factor[b, kv_head]
                lse[b, group] = (top + np.log(total))[:, 0]
                if not integer_maxima:
                    divisor = total.copy()
                if sinks is not None:
                    divisor *= 1 + np.exp(np.asarray(sinks, f32)[group, None] - top) / total
                out[b, group] = np.where(top == -np.inf, f32(0), acc / divisor).astype(out.dtype)
    return out, lse


def bound(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    ref_out: np.ndarray,
    ref_lse: np.ndarray,
    **options: Any,
) -> Bound:
    """Errors allowed for this problem: twice those of the worse twin, plus a floor.

    Parameters
    ----------
    q, k_cache, v_cache, block_table, seq_lens
        The problem.
    ref_out, ref_lse : float64 arrays
        The reference's result for it.
    **options
        Those of ``twin_decode``; ``out_dtype`` is the output's type where it is not q's.

    Notes
    -----
    The floor of a maximum is 2 ulp of the largest magnitude, in the output's dtype for ``out`` and
    in float32 for ``lse``. The floor of a root mean square is 2 float32 ulp: rounding of the output
    is in the twin already, and averages of it barely vary.
    """
    errors = []
    for integer_maxima in (False, True):
        out, lse = twin_decode(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            integer_maxima=integer_maxima,
            **options,
        )
        finite = np.isfinite(ref_out) & np.isfinite(out.astype(np.float64))
        finite_lse = np.isfinite(ref_lse) & np.isfinite(lse)
        errors.append(
            _max_and_rms(out.astype(np.float64)[finite] - ref_out[finite])
            + _max_and_rms(lse.astype(np.float64)[finite_lse] - ref_lse[finite_lse])
        )
    out_max, out_rms, lse_max, lse_rms = map(max, zip(*errors, strict=True))
    top, top_lse = _largest(ref_out), _largest(ref_lse)
    return Bound(
        out_max=2 * out_max + 2 * ulp(top, out.dtype),
        out_rms=2 * out_rms + 2 * ulp(top, np.float32),
        lse_max=2 * lse_max + 2 * ulp(top_lse, np.float32),
        lse_rms=2 * lse_rms + 2 * ulp(top_lse, np.float32),
    )


def _assert_array_close(name: str, got: Any, want: Any, max_error: float, rms_error: float) -> None:
    got, want = np.asarray(got).astype(np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{name} has shape {got.shape}; the reference has {want.shape}")
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differ = test(got) != test(want)
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            raise AssertionError(
                f"{name}: {kind} in {int(differ.sum())} wrong places, first at {at}: "
                f"got {got[at]!r}, reference {want[at]!r}"
            )
    finite = np.isfinite(want)
    error = np.where(finite, got, 0.0) - np.where(finite, want, 0.0)
    worst, rms = _max_and_rms(error[finite])
    if worst > max_error or rms > rms_error:
        at = tuple(int(i) for i in np.unravel_index(np.abs(error).argmax(), error.shape))
        raise AssertionError(
            f"{name}: largest error {worst:.3g} (allowed {max_error:.3g}), root mean square "
            f"{rms:.3g} (allowed {rms_error:.3g}); worst at {at}: "
            f"got {got[at]!r}, reference {want[at]!r}"
        )


def assert_close(out: Any, lse: Any, ref_out: Any, ref_lse: Any, allowed: Bound) -> None:
    """Compare a result with the reference: non-finite positions first, then both errors.

    Parameters
    ----------
    out, lse : array
        The result, on the host.
    ref_out, ref_lse : float64 array
    allowed : Bound
        From ``bound``.

    Raises
    ------
    AssertionError
        Names the worst coordinate and both values there.
    """
    _assert_array_close("out", out, ref_out, allowed.out_max, allowed.out_rms)
    _assert_array_close("lse", lse, ref_lse, allowed.lse_max, allowed.lse_rms)
