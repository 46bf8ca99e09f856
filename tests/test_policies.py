"""The registry, the signature and the gates: what each policy answers, and in which words."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupy_decode import policies
from cupy_decode.heads import HeadConfig, presets
from cupy_decode.plan import SplitPlan
from cupy_decode.policies import Device, StepShape, explain, plan_splits
from cupy_decode.policies.base import make_account
from cupy_decode.policies.vllm_triton import VllmTriton, disqualifiers

LLAMA = presets["llama-3-8b"]


# ---------------------------------------------------------------- registry


def test_every_name_resolves_and_names_its_plans():
    options = {"fixed": {"num_splits": 4}, "split-size": {"split_size": 300}}
    for name in policies.names():
        policy = policies.get(name, **options.get(name, {}))
        plan, account = explain([2560, 17], LLAMA, policy, 132)
        assert plan.policy == name
        assert plan.account is account


def test_the_published_names_are_registered():
    published = {
        "fixed", "split-size", "first-wave", "equal-shares", "vllm-triton", "vllm-triton-0.33",
        "vllm-mla", "sglang-triton", "sglang-deterministic", "flashinfer-cuda-core",
        "flashinfer-tensor-core", "flashinfer-batch-attention", "fa2", "fa3", "fa3-dynamic", "fa4",
        "flashmla", "xqa", "xqa-sm90", "paged-attention", "rocm",
    }  # fmt: skip
    assert published == set(policies.names())


def test_parameters_may_be_given_by_factory_or_option():
    for policy in (policies.fixed(5), policies.get("fixed", num_splits=5)):
        assert explain([1000], LLAMA, policy)[0].ranges([1000]) == [
            (0, b, min(b + 208, 1000)) for b in range(0, 1000, 208)
        ]
    by_size = explain([1000], LLAMA, policies.split_size(400))[0]
    assert by_size.ranges([1000]) == [(0, 0, 400), (0, 400, 800), (0, 800, 1000)]


def test_any_callable_is_a_policy():
    def halves(step: StepShape, device: Device):
        plan = SplitPlan.from_bounds([[0, s // 2] for s in step.lens], step.lens, policy="halves")
        account = make_account(
            device,
            split=True,
            reason="two",
            grid=(2,),
            busy_blocks=5,
            num_splits=2,
            scratch_bytes=0,
        )
        return plan, account

    plan, account = explain([10, 20], "llama-3-8b", halves, 10)
    assert plan.ranges([10, 20]) == [(0, 0, 5), (0, 5, 10), (1, 0, 10), (1, 10, 20)]
    assert account.waves == 0.2
    assert account.busy_blocks == 2


@pytest.mark.parametrize(
    ("policy", "options", "error", "message"),
    [
        ("fa9", {}, ValueError, "policy 'fa9' is not registered; choose one of fixed"),
        ("fixed", {}, ValueError, "missing a required argument: 'num_splits'"),
        ("fa2", {"splits": 3}, ValueError, "unexpected keyword argument 'splits'"),
        (3, {}, TypeError, "policy must be a registered name or callable; got 3"),
        (policies.fixed(2), {"tile": 3}, TypeError, r"options \['tile'\] go with a policy's name"),
    ],
)
def test_get_refuses_in_words(policy, options, error, message):
    with pytest.raises(error, match=message):
        policies.get(policy, **options)


def test_unknown_options_and_devices_are_named():
    known = "query_lens, q_bytes, kv_bytes, page_size, window, cuda_graph, and those of a policy"
    with pytest.raises(TypeError, match=f"no option 'num_split'; .* num_splits, .*{known}"):
        policies.plan_splits([5], "llama-3-8b", num_split=3)
    with pytest.raises(TypeError, match=f"no option 'num_splits'; the options are {known}"):
        explain([5], "llama-3-8b", "fa2", num_splits=3)
    with pytest.raises(TypeError, match=f"no option 'pages'; the options are {known}"):
        policies.device_rule(1, 5, "llama-3-8b", "vllm-triton", pages=3)
    for device in ("h100", 132.5, True):
        with pytest.raises(TypeError, match=rf"must be .*got .*{device}"):
            policies.plan_splits([5], "llama-3-8b", device=device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": [3, -1]}, r"seq_lens\[1\] is -1"),
        ({"seq_lens": []}, "non-empty one-dimensional integer array"),
        ({"seq_lens": [1.5]}, "dtype float64"),
        ({"page_size": 0}, "page_size must be at least 1; got 0"),
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"query_lens": [1]}, "query_lens must be 2 integers of at least 1"),
        ({"query_lens": [1, 0]}, "query_lens must be 2 integers of at least 1"),
        ({"heads": "llama-9"}, "heads 'llama-9' is not a preset; choose one of llama-3-8b"),
        ({"device": 0}, "device must be at least 1; got 0"),
        (
            {"seq_lens": [3, 2**31]},
            r"seq_lens\[1\] is 2147483648; lengths must be at most 21474836",
        ),
    ],
)
def test_malformed_steps_are_refused(changes, message):
    arguments = {"seq_lens": [3, 4], "heads": LLAMA, "policy": "fa2"} | changes
    with pytest.raises(ValueError, match=message):
        explain(**arguments)


# ---------------------------------------------------------------- plan_splits


def test_auto_is_first_wave():
    assert plan_splits([8192], LLAMA).counts.tolist() == [17]
    assert plan_splits([8192], LLAMA, "first-wave", 64).counts.tolist() == [8]
    assert plan_splits([8192], LLAMA, device=Device(16)).counts.tolist() == [2]


def test_a_count_or_a_size_replaces_the_policy():
    assert plan_splits([257], LLAMA, num_splits=16).counts.tolist() == [9]
    assert plan_splits([513], LLAMA, split_size=512).ranges([513]) == [(0, 0, 512), (0, 512, 513)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 2, "split_size": 3}, "num_splits=2 and split_size=3 exclude each other"),
        ({"policy": "fa2", "num_splits": 2}, "policy='fa2' and num_splits=2 exclude each other"),
        ({"policy": "fa2", "split_size": 2}, "policy='fa2' and split_size=2 exclude each other"),
        ({"num_splits": 0}, "num_splits must be at least 1; got 0"),
        ({"split_size": 0}, "split_size must be at least 1; got 0"),
        ({"num_splits": 4, "capacity": 3}, "needs 4 rows but capacity is 3"),
    ],
)
def test_plan_splits_refuses_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        plan_splits([4096], LLAMA, **options)


def test_capacity_leaves_room_and_keeps_the_plan():
    plan = plan_splits([100, 200], LLAMA, num_splits=4, capacity=50)
    assert plan.capacity == 50
    assert not plan.unsplit
    assert plan.ranges([100, 200]) == plan_splits([100, 200], LLAMA, num_splits=4).ranges(
        [100, 200]
    )


# ---------------------------------------------------------------- vLLM's gate, word by word


@pytest.mark.parametrize(
    ("version", "options", "words"),
    [
        ("chapter", {"threshold": None}, "prepared no threshold"),
        ("chapter", {"scratch_rows": 0}, "no partial-state buffers were allocated"),
        ("chapter", {"max_query_len": 2}, "one such prefill sends the whole batch"),
        ("chapter", {"num_seqs": 17}, "batch 17 exceeds the threshold of 16 sequences"),
        ("chapter", {"batch_invariant": True}, "batch invariance"),
        ("0.33", {"threshold": None}, "prepared no threshold"),
        ("0.33", {"scratch_rows": 0}, "no partial-state buffers were allocated"),
        ("0.33", {"max_query_len": 9}, "9 query tokens, more than 8"),
        ("0.33", {"max_query_len": 2, "causal": False}, "the mask is not causal"),
        ("0.33", {"max_query_len": 2, "mm_prefix": True}, "bidirectional prefix ranges"),
        ("0.33", {"max_query_len": 2, "tuned_large_head": True}, "tuned large-head launch"),
        ("0.33", {"num_seqs": 9, "max_query_len": 5}, "make 18 query tiles, which exceed"),
        ("0.33", {"scratch_rows": 1, "num_seqs": 2}, "hold 1 of 2 query tokens"),
        ("0.33", {"batch_invariant": True}, "batch invariance"),
    ],
)
def test_each_disqualifier_alone(version, options, words):
    step = {"num_seqs": 1, "max_query_len": 1, "heads": LLAMA, "threshold": 16}
    assert disqualifiers(version, **step) == []
    (found,) = disqualifiers(version, **(step | options))
    assert words in found


def test_disqualifiers_add_up():
    found = disqualifiers("chapter", 17, 2, LLAMA, 16, batch_invariant=True)
    assert len(found) == 3
    with pytest.raises(ValueError, match="version must be 'chapter' or"):
        disqualifiers("0.34", 1, 1, LLAMA, 16)  # type: ignore[arg-type]


def test_0_33_ignores_the_mask_of_single_queries():
    options = {"causal": False, "mm_prefix": True, "tuned_large_head": True}
    assert disqualifiers("0.33", 1, 1, LLAMA, 16, **options) == []


def test_one_prefill_row_costs_fifteen_decodes_their_split():
    lens, queries = [2560] * 16, [1] * 15 + [512]
    plan, account = explain(lens, LLAMA, "vllm-triton", query_lens=queries)
    assert plan.unsplit
    assert not account.split
    assert "512 query tokens" in account.reason
    assert account.grid == (527 // 4 + 16, 8)
    assert account.busy_blocks == (15 + 128) * 8  # four tokens a tile
    plan, account = explain(lens, LLAMA, "vllm-triton-0.33", query_lens=[1] * 15 + [4])
    assert account.split
    assert plan.counts.tolist() == [16] * 16


def test_threshold_snaps_to_a_capture_size_only_under_graphs():
    heads = HeadConfig(40, 5, 128)  # 128 // 5 = 25
    lens = [512] * 25
    assert explain(lens, heads, "vllm-triton")[1].split
    assert not explain(lens, heads, "vllm-triton", cuda_graph=True)[1].split
    assert explain(lens[:24], heads, "vllm-triton", cuda_graph=True)[1].split


def test_more_segments_on_compute_capability_12():
    device = Device(188, (12, 0))
    heads = presets["llama-3-70b-tp8"]
    assert explain([65536] * 11, heads, "vllm-triton-0.33", device)[1].num_splits == 64
    assert explain([65536] * 12, heads, "vllm-triton-0.33", device)[1].num_splits == 16
    assert explain([65536] * 11, heads, "vllm-triton", device)[1].num_splits == 16


def test_batch_invariant_vllm_never_splits():
    plan, account = VllmTriton(batch_invariant=True)(StepShape([2560], LLAMA), Device())
    assert plan.unsplit
    assert account.grid == (1, 8)
    assert account.scratch_bytes == 0


# ---------------------------------------------------------------- exact ranges


def test_paged_attention_cuts_513_keys_into_512_and_1():
    plan, account = explain([513], LLAMA, "paged-attention")
    assert plan.ranges([513]) == [(0, 0, 512), (0, 512, 513)]
    assert account.details["kernel"] == "v2"
    assert explain([512], LLAMA, "paged-attention")[1].details["kernel"] == "v1"


def test_flashmla_packs_unequal_parts():
    heads = HeadConfig(128, 1, 576, 512)
    lens = [65536, 64, 64, 64]
    plan, account = explain(lens, heads, "flashmla", Device(16))
    edges = [0, 131, 262, 393, 524, 655, 786, 917, 1024]
    want = [(0, a * 64, b * 64) for a, b in itertools.pairwise(edges)]
    assert plan.ranges(lens) == want + [(b, 0, 64) for b in (1, 2, 3)]
    assert account.details["part_offsets"] == [0, 1, 2, 3, 4, 5, 6, 7, 11]


def test_flashinfer_chunks_are_longer_than_a_share():
    plan, _ = explain([16000, 160, 160, 160], LLAMA, "flashinfer-cuda-core", Device(132))
    assert plan.counts.tolist() == [63, 1, 1, 1]
    assert plan.ranges([16000, 160, 160, 160])[62] == (0, 62 * 256, 16000)


@pytest.mark.parametrize("policy", ["flashinfer-cuda-core", "flashinfer-tensor-core"])
def test_flashinfer_says_why_requests_stay_whole(policy):
    assert (
        "no request exceeds the smallest chunk, 128 keys" in explain([128], LLAMA, policy)[1].reason
    )
    rows = {"flashinfer-cuda-core": 66, "flashinfer-tensor-core": 33}[policy]
    plan, account = explain([2560] * (rows - 1), LLAMA, policy)
    assert plan.unsplit
    assert account.reason == f"cutting any request would exceed {rows} rows"


def test_flashinfer_empty_requests_overflow_the_captured_grid():
    lens = [0] * 8 + [64000] * 2
    plan, account = explain(lens, LLAMA, "flashinfer-cuda-core", cuda_graph=True)
    assert plan.num_rows == 74
    assert account.grid == (66, 8)
    assert "74 rows overflow 66 padded ones" in account.reason


def test_windowed_rules_split_only_what_is_visible():
    for name in ("fa3", "fa3-dynamic", "fa4", "flashinfer-tensor-core", "xqa"):
        plan, _ = explain([65536], presets["llama-3-70b-tp8"], name, window=4096)
        begins = plan.split_begin[1 : plan.num_rows]
        assert plan.num_rows > 1
        assert begins.min() >= 65536 - 4096, name


def test_xqa_deals_as_many_tiles_as_its_blocks_read():
    plan, account = explain([10 * 256 - 7], LLAMA, "xqa", Device(64))
    assert account.grid == (8, 8, 1)
    sizes = [end - begin for _, begin, end in plan.ranges([10 * 256 - 7])]
    assert sizes == [512, 512, 256, 256, 256, 256, 256, 249]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": 2.7}, "num_splits must be an integer; got float 2.7"),
        ({"num_splits": True}, "num_splits must be an integer; got bool True"),
        ({"num_splits": [2, 2]}, r"num_splits must be an integer; got list \[2, 2\]"),
        ({"split_size": 33.9}, "split_size must be an integer; got float 33.9"),
        ({"split_size": True}, "split_size must be an integer; got bool True"),
        ({"split_size": "64"}, "split_size must be an integer; got str '64'"),
        ({"device": "h100"}, "device must be a Device or a number of SMs; got 'h100'"),
        ({"device": 131.5}, "device must be an integer; got float 131.5"),
        ({"page_size": 16.0}, "page_size must be an integer; got float 16.0"),
    ],
)
def test_counts_that_are_no_integers_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        plan_splits([4096], LLAMA, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fixed", {"num_splits": 4, "tile": 16.0}),
        ("equal-shares", {"num_workers": 7.5}),
        ("equal-shares", {"tile": 2.5}),
    ],
)
def test_options_that_are_no_integers_are_refused(name, options):
    with pytest.raises(TypeError, match=r"must be an integer; got float"):
        policies.get(name, **options)


def test_splits_longer_than_the_sequence_are_the_sequence():
    for split_size in (100, 2**31, 10**30):
        assert plan_splits([100, 17], LLAMA, split_size=split_size).counts.tolist() == [1, 1]


def test_more_splits_than_tiles_are_as_many_as_tiles():
    for num_splits in (8, np.int64(8), 2**31, 10**30):
        assert plan_splits([100, 17], LLAMA, num_splits=num_splits).counts.tolist() == [7, 2]


def test_equal_shares_hand_runs_of_rows_to_workers():
    lens = [100, 0, 1000, 16, 3000, 0]
    plan, workers = policies.equal_shares(lens, 7)
    ranges = plan.ranges(lens)
    loads = [
        sum(-(-(end - begin) // 16) for _, begin, end in ranges[first:last])
        for first, last in itertools.pairwise(workers)
    ]
    assert max(loads) - min(loads) <= 1
    assert workers[0] == 0
    assert workers[-1] == plan.num_rows
    with pytest.raises(ValueError, match="num_workers must be at least 1; got 0"):
        policies.equal_shares(lens, 0)


# ---------------------------------------------------------------- accounts


def test_account_of_one_sequence_of_2560_keys():
    _, account = explain([2560], LLAMA, "vllm-triton", 132)
    assert account.grid == (1, 8, 16)
    assert account.thread_blocks == 128
    assert account.waves == pytest.approx(128 / 132, rel=1e-15)
    assert account.scratch_bytes == 32 * 16 * 130 * 4
    assert account.details["seq_threshold_3D"] == 16


@pytest.mark.parametrize(
    ("policy", "grid", "scratch_bytes"),
    [
        ("first-wave", (16, 8, 1), 16 * 32 * 130 * 4),  # 17 asked, 160 tiles in tens
        ("vllm-mla", (1, 8, 8), 8 * 32 * 129 * 4),
        ("sglang-triton", (1, 8, 8), 8 * 32 * 129 * 4),
        ("sglang-deterministic", (1, 8, 512), 512 * 32 * 129 * 4),
        ("flashinfer-cuda-core", (20, 8), 20 * 32 * 129 * 4),
        ("flashinfer-tensor-core", (20, 1, 8), 20 * 32 * 129 * 4 * 16),
        ("fa2", (1, 20, 8), 20 * 32 * 129 * 4),
        ("fa3", (1, 14 * 8, 1), 14 * 32 * 129 * 4),
        ("fa3-dynamic", (132,), 14 * 32 * 129 * 4),
        ("fa4", (1, 16 * 8, 1), 16 * 32 * 129 * 4),
        ("flashmla", (1, 8, 16), 17 * 32 * 129 * 4),
        ("xqa", (10, 8, 1), 10 * 32 * (256 + 8)),
        ("xqa-sm90", (1, 12, 8), 12 * 32 * (256 + 8)),
        ("paged-attention", (32, 1, 5), 5 * 32 * (256 + 8)),
        ("rocm", (1, 10, 8), 10 * 32 * (256 + 8)),
    ],
)
def test_grid_and_scratch_of_each_engine(policy, grid, scratch_bytes):
    _, account = explain([2560], LLAMA, policy, 132)
    assert account.split
    assert account.grid == grid
    assert account.thread_blocks == np.prod(grid)
    assert account.scratch_bytes == scratch_bytes


@pytest.mark.parametrize(
    ("policy", "busy"),
    [
        ("vllm-triton", 9 * 8),  # 16 segments launched, 9 with keys
        ("sglang-triton", 5 * 8),  # 8 launched, ceil(257 / 64) with keys
        ("fa2", 3 * 8),
        ("fa3", 8),  # 132 persistent blocks, 8 tiles of work
        ("flashmla", 5 * 8),
        ("flashinfer-batch-attention", 3 * 8),
        ("xqa", 2 * 8),
        ("paged-attention", 32),
        ("rocm", 2 * 8),
    ],
)
def test_busy_blocks_own_a_key(policy, busy):
    assert explain([257], LLAMA, policy, 132)[1].busy_blocks == busy


def test_a_window_leaves_segments_without_work():
    _, account = explain([65536], LLAMA, "vllm-triton", window=5000)
    assert account.thread_blocks == 128
    assert account.busy_blocks == 2 * 8  # segments of 4096 keys: one whole and a part of another
    _, account = explain([0, 0], LLAMA, "vllm-triton")
    assert account.busy_blocks == 0


def test_waves_follow_the_occupancy():
    policy = "flashinfer-cuda-core"
    assert explain([2560], LLAMA, policy, Device(132))[1].waves == 160 / 528
    assert explain([2560], LLAMA, policy, Device(132, blocks_per_sm=2))[1].waves == 160 / 264
