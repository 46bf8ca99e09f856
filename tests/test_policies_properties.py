"""Whatever the step, a policy's plan covers every key once and in order, and does so again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_decode import policies
from cupy_decode.grid import cdiv
from cupy_decode.heads import HeadConfig, presets
from cupy_decode.policies import Device, explain
from cupy_decode.policies.fa3 import dynamic_splits
from cupy_decode.policies.fixed import equal_shares
from cupy_decode.policies.sglang import num_kv_splits, split_sizes
from cupy_decode.policies.vllm_triton import segment_sizes

ALL = {name: name for name in policies.names()} | {
    "fixed": policies.fixed(7),
    "split-size": policies.split_size(100),
    "sglang-static": policies.get("sglang-triton", static=True, is_mla=True),
    "tensor-core-fixed": policies.get("flashinfer-tensor-core", fixed_split_pages=3),
    "tensor-core-off": policies.get("flashinfer-tensor-core", disable_split=True),
    "fa3-unpaged": policies.get("fa3", paged=False),
}

lengths = st.lists(
    st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 5000), st.integers(0, 200_000)),
    min_size=1,
    max_size=12,
)
heads = st.one_of(
    st.sampled_from([*presets.values(), HeadConfig(128, 1, 576, 512), HeadConfig(20, 1, 80)]),
    st.builds(lambda kv, g, d: HeadConfig(kv * g, kv, d), st.integers(1, 9), st.integers(1, 20),
              st.sampled_from([64, 80, 128, 256])),
)  # fmt: skip
devices = st.builds(
    Device,
    st.integers(1, 200),
    st.sampled_from([(8, 0), (9, 0), (10, 0), (12, 0)]),
    st.sampled_from([None, 1, 2, 3]),
)


def assert_covers(plan, lens):
    end_of = dict.fromkeys(range(len(lens)), 0)
    for b, begin, end in plan.ranges(lens):
        assert begin == end_of[b], f"sequence {b}: a split begins at {begin}, not {end_of[b]}"
        assert end >= begin
        end_of[b] = end
    assert end_of == dict(enumerate(lens))
    assert (plan.counts >= 1).all()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_plans_cover_every_key_once_and_in_order(name, data):
    lens = data.draw(lengths)
    step = {
        "page_size": data.draw(st.sampled_from([1, 16, 64])),
        "window": data.draw(st.sampled_from([None, 1, 100, 1024, 30_000])),
        "q_bytes": data.draw(st.sampled_from([1, 2, 4])),
        "kv_bytes": data.draw(st.sampled_from([1, 2])),
        "cuda_graph": data.draw(st.booleans()),
        "query_lens": data.draw(
            st.sampled_from([None, [1] * len(lens), [3] * len(lens), [9] + [1] * (len(lens) - 1)])
        ),
    }
    shape, device = data.draw(heads), data.draw(devices)
    plan, account = explain(lens, shape, ALL[name], device, **step)
    assert_covers(plan, lens)
    assert plan.unsplit == bool((plan.counts == 1).all())
    assert account.thread_blocks == np.prod(account.grid)
    assert 0 <= account.busy_blocks <= account.thread_blocks
    assert (account.busy_blocks > 0) == any(lens)
    assert account.num_splits >= plan.counts.max()
    assert account.scratch_bytes >= 0
    assert account.reason

    again, _ = explain(lens, shape, ALL[name], device, **step)
    assert np.array_equal(again.split_offsets, plan.split_offsets)
    assert np.array_equal(again.split_begin, plan.split_begin)


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 64), st.sampled_from([16, 32]))
def test_segment_sizes_are_vllms_segments(lens, segments, tile):
    sizes = segment_sizes(np.array(lens), segments, tile)
    for s, size in zip(lens, sizes.tolist(), strict=True):
        active = sum(i * size < s for i in range(segments))
        assert size % tile == 0
        assert active * size >= s
        assert s == 0 or size == cdiv(s, segments * tile) * tile


@settings(max_examples=200, deadline=None)
@given(lengths, heads, st.integers(1, 200), st.integers(1, 300))
def test_sglang_stays_under_its_cap_and_keeps_order(lens, shape, sms, cap):
    found = num_kv_splits(lens, shape.num_q_heads, shape.num_kv_heads, sms, cap)
    splits = found.num_kv_splits
    assert splits.max() <= cap
    assert (np.diff(splits[np.argsort(lens)]) >= 0).all()
    sizes = split_sizes(np.array(lens), splits)
    assert (sizes * splits >= lens).all()
    assert (sizes % 32 == 0).all()


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 9), st.integers(1, 200), st.integers(1, 256))
def test_fa3_dynamic_leaves_no_sm_far_above_its_share(lens, kv_heads, sms, cap):
    splits = dynamic_splits(np.array(lens), kv_heads, sms, cap)
    assert splits.min() >= 1
    assert splits.max() <= cap
    blocks = -(-np.array(lens) // 128)
    share = int(np.ceil(1.1 * blocks.sum() * kv_heads / sms)) + 1
    free = splits < cap
    assert (-(-blocks[free] // splits[free]) <= share).all()


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 300), st.sampled_from([1, 16, 64]))
def test_equal_shares_are_equal_and_few(lens, num_workers, tile):
    plan, workers = equal_shares(lens, num_workers, tile)
    assert_covers(plan, lens)
    assert plan.num_rows <= len(lens) + num_workers - 1
    ranges = plan.ranges(lens)
    loads = [
        sum(cdiv(end - begin, tile) for _, begin, end in ranges[first:last])
        for first, last in itertools.pairwise(workers)
    ]
    assert workers[0] == 0
    assert workers[-1] == len(ranges)
    assert (np.diff(workers) >= 0).all()
    assert max(loads) - min(loads) <= 1
    assert sum(loads) == sum(cdiv(s, tile) for s in lens)
