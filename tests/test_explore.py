"""The table of all policies: numbers from plan and account, one line each."""

from __future__ import annotations

import re

import pytest

from cupy_decode import explore, policies
from cupy_decode.heads import presets
from cupy_decode.policies import Device, StepShape

STEP = StepShape([2560], presets["llama-3-8b"])


def test_every_policy_that_needs_no_parameter_has_a_row():
    rows = explore.table(STEP)
    assert [row.policy for row in rows] == [
        name for name in policies.names() if name not in ("fixed", "split-size")
    ]


def test_a_row_says_what_plan_and_account_say():
    (row,) = explore.table(STEP, 132, ["fa3"])
    plan, account = policies.explain([2560], "llama-3-8b", "fa3", 132)
    assert (row.num_splits, row.active_splits, row.plan_rows) == (14, 10, 10)
    assert (row.grid, row.thread_blocks) == (account.grid, 112)
    assert row.busy_blocks == 80
    assert row.sm_coverage == 80 / 132
    assert row.waves == 112 / 132
    assert row.partial_bytes == plan.num_rows * 32 * 130 * 4
    assert row.scratch_bytes == 14 * 32 * 129 * 4
    assert row.reason == account.reason


def test_an_unsplit_plan_moves_no_partials():
    (row,) = explore.table(StepShape([2560] * 17, STEP.heads), 132, ["vllm-triton"])
    assert (row.num_splits, row.partial_bytes) == (1, 0)


def test_objects_and_devices_are_taken():
    rows = explore.table(STEP, Device(20), [policies.fixed(3), "first-wave"])
    assert [(row.policy, row.num_splits) for row in rows] == [("fixed", 3), ("first-wave", 3)]
    assert rows[0].sm_coverage == 1.0


@pytest.mark.parametrize(
    ("lens", "partials"), [([2560], "266.2 kB"), ([2560] * 16, "4.3 MB"), ([7], "0 B")]
)
def test_text_has_one_aligned_line_per_policy(lens, partials):
    rows = explore.table(StepShape(lens, STEP.heads), 132, ["vllm-triton", "fa2", "rocm"])
    header, *lines = explore.text(rows).splitlines()
    assert header.split() == [
        "policy", "S", "active", "grid", "SMs", "waves", "partials", "reason",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines] == ["vllm-triton", "fa2", "rocm"]
    start = header.index("reason")
    assert [line[start:] for line in lines] == [row.reason for row in rows]
    assert re.search(rf"\d\.\d\d +{partials}  ", lines[0])
