"""Checks of the tensor-core kernel, one launch from lengths to output."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import cupy_decode as cd
import kernels_cu
from cupy_decode import fast
from cupy_decode.backends import emulator

from ..decode_cases import Case, Problem, build
from .checks import Check, Files, expect, run


def fast_step(
    problem: Problem, files: Files, schedule: Any, **choice: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, lse and fault record of one launch on three small SMs; the counters end at 0.

    Where launches overlap, the one before is at work on all it may use.
    """
    machine = fast.Machine(num_sms=3)
    options = {"scale": problem.q.shape[2] ** -0.5, **problem.options}
    kv_dtype = options.get("kv_dtype")
    spec = fast.spec_of(problem.q, problem.k_cache, kv_dtype=kv_dtype)
    space = fast.workspace(emulator, spec, machine)
    out = emulator.empty(problem.q.shape, problem.q.dtype)
    lse = emulator.empty(problem.q.shape[:2], np.float32)
    fault = np.zeros(4, np.int32)
    launch = fast.launch(
        *problem.arrays,
        out=out,
        lse=lse,
        space=space,
        fault=fault,
        machine=machine,
        **options,
        **choice,
    )
    late = [*problem.newest(), out, lse, fault, space.partials, space.arrivals]
    trace = run(launch, files, schedule, late)
    np.testing.assert_array_equal(space.arrivals, 0)
    if not fault.any():
        visible = np.minimum(problem.seq_lens, options.get("window", 2**31 - 1))
        rows = int(visible.sum()) * problem.k_cache.shape[2] * spec.tiles
        row_bytes = problem.q.shape[2] * problem.k_cache.itemsize
        for name in ("k_cache", "v_cache"):
            assert trace[name]["load_bytes"].sum() == rows * row_bytes, name
    return out, lse, fault


def fast_decode(case: Case, *choices: dict[str, Any]) -> Check:
    """The launch against the reference; every choice of units and blocks gives the same bits."""

    def check(files: Files, schedule: Any) -> None:
        problem = build(case)
        results = [fast_step(problem, files, schedule, **choice) for choice in choices]
        for out, lse, _ in results:
            expect(problem, out, lse)
            np.testing.assert_array_equal(out.view(np.uint16), results[0][0].view(np.uint16))
            np.testing.assert_array_equal(lse.view(np.uint32), results[0][1].view(np.uint32))

    return check


def fast_refused_values(files: Files, schedule: Any, **choice: Any) -> None:
    case = Case("refused", (40, 70, 33), dtype="bfloat16", extra_columns=1)
    num_blocks = build(case).k_cache.shape[0]
    for name, at, value, record in (
        ("block_table", (1, 2), -1, (1, 1, 2, -1)),
        ("block_table", (1, 1), num_blocks, (1, 1, 1, num_blocks)),
        ("seq_lens", (1,), 97, (2, 1, 6, 97)),
        ("seq_lens", (1,), -1, (2, 1, 6, -1)),
    ):
        problem = build(case, poison=0.0)  # no block gives NaN by itself
        clean = cd.reference.decode_attention(*problem.arrays)
        getattr(problem, name)[at] = value
        out, lse, fault = fast_step(problem, files, schedule, **choice)
        np.testing.assert_array_equal(fault, record)
        assert np.isnan(out[1].astype(np.float32)).all()
        assert np.isnan(lse[1]).all()
        good = out[::2].astype(np.float64)
        np.testing.assert_allclose(good, clean[0][::2], rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(lse[::2], clean[1][::2], rtol=1e-5)


def with_leaves(check: Check, constants: dict[str, str]) -> Check:
    """The same with other constants in ``schedule.cuh``."""

    def changed(files: Files, schedule: Any) -> None:
        text = files.get("schedule.cuh") or kernels_cu.read("schedule.cuh")
        for old, new in constants.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        check({**files, "schedule.cuh": text}, schedule)

    return changed


#: 2^4 leaves in a sequence for 2^10, so that leaves have several pages.
_LONG_LEAVES = {"WAVE_LOG2 = 10,": "WAVE_LOG2 = 4,", "? 13 : 10;": "? 4 : 4;"}
#: Leaves of two pages in longer sequences too, so that there are many.
_MANY_LEAVES = {"FEW_PAGES = 64;": "FEW_PAGES = 1024;"}


_AUTO: dict[str, Any] = {}
_OVERLAP = {"overlap": True}
CHECKS_MMA: list[Check] = [
    fast_decode(
        Case("ragged", (0, 1, 16, 17, 300), dtype="bfloat16"),
        _AUTO,
        {"unit_pages": 4, "num_blocks": 6},
        {"unit_pages": 8, "num_blocks": 2},
    ),
    fast_refused_values,
    with_leaves(
        fast_decode(
            Case("many units", (4500,), cd.HeadConfig(3, 1, 64), dtype="float16", extra_columns=0),
            {"unit_pages": 4},
            {"unit_pages": 256, "num_blocks": 1},
        ),
        _MANY_LEAVES,
    ),
    with_leaves(
        fast_decode(
            Case("some units", (3300,), cd.HeadConfig(4, 1, 64), dtype="float16"),
            {"unit_pages": 4},
            {"unit_pages": 24, "num_blocks": 2},
            {"unit_pages": 56},
        ),
        _MANY_LEAVES,
    ),
    with_leaves(
        fast_decode(
            Case("long leaves", (300, 700), cd.HeadConfig(4, 1, 64), dtype="float16"),
            {"unit_pages": 64, "num_blocks": 1},
            {"unit_pages": 16},
        ),
        _LONG_LEAVES,
    ),
    fast_decode(
        Case(
            "a page at a time",
            (130, 70),
            cd.HeadConfig(4, 1, 256),
            dtype="bfloat16",
            extra_columns=0,
        ),
        _AUTO,
    ),
    fast_decode(
        Case("alike", (130, 140, 135), cd.HeadConfig(4, 2, 64), dtype="float16"),
        _AUTO,
        {"unit_pages": 4, "num_blocks": 5},
    ),
    fast_decode(
        Case(
            "two tiles, blocks of two pages",
            (130, 70),
            cd.HeadConfig(21, 1, 128),
            dtype="bfloat16",
            block_size=32,
        ),
        _AUTO,
    ),
    fast_decode(
        Case(
            "more sequences than lanes", (20, 0, 170) * 12, cd.HeadConfig(2, 2, 64), dtype="float16"
        ),
        _AUTO,
        {"unit_pages": 4, "num_blocks": 5},
    ),
    fast_decode(Case("ten heads", (65,), cd.HeadConfig(10, 1, 64), dtype="float16"), _AUTO),
    fast_decode(
        Case(
            "blocks of four, window, scores",
            (130, 70),
            dtype="bfloat16",
            block_size=4,
            window=50,
            logits_soft_cap=2.0,
            alibi=True,
            sinks=True,
        ),
        _AUTO,
        {"unit_pages": 4, "num_blocks": 2},
    ),
    fast_decode(
        Case("a window", (130, 70), dtype="float16", window=40),
        _AUTO,
    ),
    fast_decode(
        Case("overlap", (16, 300, 0, 1, 17), dtype="bfloat16"),
        _AUTO,
        _OVERLAP,
        {"unit_pages": 4, "num_blocks": 2, **_OVERLAP},
    ),
    functools.partial(fast_refused_values, **_OVERLAP),
    fast_decode(
        Case("8 bits", (130, 70), dtype="bfloat16", kv_dtype="e4m3", scales="sequence"),
        _AUTO,
    ),
]
