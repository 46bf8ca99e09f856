"""Worked values of every rule: splits of Llama-3-8B's heads on 132 SMs unless stated."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_decode.heads import HeadConfig, presets
from cupy_decode.policies import (
    Device,
    explain,
    fa2,
    fa3,
    flashinfer,
    flashmla,
    sglang,
    vllm_triton,
)
from cupy_decode.policies.flashinfer_batch import deal

LLAMA = presets["llama-3-8b"]
ONE_KV_HEAD = presets["llama-3-70b-tp8"]


@pytest.mark.parametrize(
    ("policy", "seq_lens", "heads", "counts"),
    [
        ("vllm-triton", [17, 128, 256, 257, 512, 2560, 2561, 4097], LLAMA,
         [2, 8, 16, 9, 16, 16, 15, 16]),
        ("vllm-triton", [2560] * 16, LLAMA, [16] * 16),
        ("vllm-triton", [2560] * 17, LLAMA, [1] * 17),
        ("vllm-mla", [8192, 5], LLAMA, [16, 5]),
        ("sglang-triton", [2560], LLAMA, [8]),
        ("sglang-triton", [2560] * 16, LLAMA, [6] * 16),
        ("sglang-triton", [2560] * 64, LLAMA, [2] * 64),
        ("sglang-triton", [2560] * 128, LLAMA, [1] * 128),
        ("sglang-triton", [4096, 100], LLAMA, [8, 1]),
        ("sglang-triton", [128], LLAMA, [4]),  # 8 asked, 4 blocks of 32 keys
        ("sglang-deterministic", [1, 256, 257, 4096], LLAMA, [1, 1, 2, 16]),
        ("flashinfer-cuda-core", [2560], LLAMA, [20]),
        ("flashinfer-cuda-core", [2560] * 16, LLAMA, [4] * 16),
        ("flashinfer-cuda-core", [128], LLAMA, [1]),
        ("flashinfer-tensor-core", [2560], LLAMA, [20]),
        ("flashinfer-tensor-core", [2560] * 16, LLAMA, [2] * 16),
        ("flashinfer-tensor-core", [2560] * 64, LLAMA, [1] * 64),
        ("flashinfer-batch-attention", [2560] * 16, LLAMA, [2] * 16),
        ("fa2", [2560], LLAMA, [20]),
        ("fa2", [2560] * 16, LLAMA, [2] * 16),
        ("fa2", [2560] * 32, LLAMA, [1] * 32),
        ("fa2", [131072], ONE_KV_HEAD, [114]),
        ("fa2", [4096], HeadConfig(32, 8, 256), [32]),
        ("fa3", [512], LLAMA, [1]),
        ("fa3", [513], LLAMA, [5]),
        ("fa3", [2560], LLAMA, [10]),  # 14 asked, 20 key blocks in twos
        ("fa3", [2560] * 16, LLAMA, [1] * 16),
        ("fa3-dynamic", [2560], LLAMA, [10]),
        ("fa3-dynamic", [8192, 4096, 1, 0], LLAMA, [10, 5, 1, 1]),
        ("flashmla", [4096] * 4, HeadConfig(128, 1, 576, 512), [13] * 4),
        ("xqa", [2560], LLAMA, [10]),
        ("xqa", [131072], LLAMA, [16]),
        ("xqa", [8192], ONE_KV_HEAD, [32]),
        ("xqa-sm90", [2560], LLAMA, [12]),
        ("paged-attention", [2560] * 16, LLAMA, [5] * 16),
        ("paged-attention", [2560] * 17, LLAMA, [1] * 17),
        ("paged-attention", [8193] * 64, LLAMA, [17] * 64),
        ("rocm", [2560, 300], LLAMA, [10, 2]),
        ("first-wave", [8192] * 4, LLAMA, [5] * 4),
    ],
)  # fmt: skip
def test_splits_that_own_a_key(policy, seq_lens, heads, counts):
    plan, _ = explain(seq_lens, heads, policy, 132)
    assert plan.counts.tolist() == counts


@pytest.mark.parametrize(
    ("num_kv_heads", "threshold"),
    [(1, 128), (2, 64), (4, 32), (5, 25), (8, 16), (12, 10), (32, 4)],
)
def test_vllm_threshold(num_kv_heads, threshold):
    assert vllm_triton.seq_threshold(num_kv_heads) == threshold


def test_vllm_threshold_takes_the_first_of_two_equally_near_sizes():
    assert vllm_triton.seq_threshold(10, [8, 16]) == 8  # 128 // 10 = 12
    assert vllm_triton.seq_threshold(10, [16, 8]) == 16


def test_sglang_evenness_flips_at_a_quarter():
    assert sglang.num_kv_splits([1000, 1249], 32, 8, 132).max_splits_1 == 1
    assert sglang.num_kv_splits([1000, 1250], 32, 8, 132).max_splits_1 == 2


def test_sglang_cap():
    found = sglang.num_kv_splits([2560], 32, 8, 132, 128)
    assert found.num_kv_splits.tolist() == [86]
    size = int(sglang.split_sizes(np.array([2560]), found.num_kv_splits)[0])
    assert -(-2560 // size) == 80
    assert sglang.num_kv_splits([4096] * 8, 128, 1, 132, 64).num_kv_splits.tolist() == [13] * 8


def test_sglang_logarithm_is_correctly_rounded():
    """Against 64-bit significands, at all powers of two and next to them, and at random."""
    assert np.finfo(np.longdouble).nmant >= 63
    rng = np.random.default_rng(5)
    powers = 2 ** np.arange(7, 31)
    lengths = np.concatenate([powers - 1, powers, powers + 1, rng.integers(128, 2**31, 20_000)])
    quotient = lengths.astype(np.float32) / np.float32(64)
    exact = np.log2(quotient.astype(np.longdouble)).astype(np.float32)
    for sms in (1, 108, 132):
        want = (np.float32(sms) * np.maximum(exact, np.float32(1))).astype(np.int64)
        got = [sglang.extended_core_count(sms, int(length)) for length in lengths]
        assert np.array_equal(got, want)


def test_sglang_cores_step_at_powers_of_two():
    assert [sglang.extended_core_count(100, 64 * 2**k) for k in range(6)] == [
        100, 100, 200, 300, 400, 500,
    ]  # fmt: skip
    assert sglang.extended_core_count(100, 255) == 199
    assert sglang.extended_core_count(100, 0) == 100


def test_flashinfer_page_of_one_token():
    found = flashinfer.cuda_core_plan([2560], 1, 8, 528)
    assert (found.chunk_pages, found.new_batch) == (128, 20)


def test_flashinfer_captured_launch_is_always_split():
    found = flashinfer.cuda_core_plan([8], 16, 8, 528, cuda_graph=True)
    assert (found.split_kv, found.padded_batch, found.valid) == (True, 66, 1)
    assert not flashinfer.cuda_core_plan([8], 16, 8, 528).split_kv


def test_flashinfer_ways_to_the_same_bits():
    fixed = flashinfer.tensor_core_plan([160], 16, 32, 8, 132, fixed_split_pages=32)
    assert fixed.chunks_per_request == [5]
    off = flashinfer.tensor_core_plan([160], 16, 32, 8, 132, disable_split=True)
    assert off.chunks_per_request == [1]
    assert not off.split_kv


def test_flashinfer_deals_the_long_request_first_to_idle_blocks():
    found = deal([131072] + [512] * 31, 32, 8, 132)
    assert found.limits.tolist() == [4608] * 32
    assert len(found.items) == 480
    assert int(found.keys_per_cta.sum()) == 8 * (131072 + 31 * 512)


def test_fa2_efficiency():
    assert fa2.num_splits_heuristic(211, 264, 64) == 5
    assert fa2.num_splits_heuristic(212, 264, 64) == 1
    assert fa2.decode(1, HeadConfig(32, 32, 128), 4096, 108).num_splits == 6


def test_fa3_tiles_and_overflowing_l2():
    assert fa3.decode(1, LLAMA, 2560, 132, paged=False).num_splits == 13  # blocks of 176 keys
    assert fa3.decode(1, LLAMA, 8192, 132, kv_bytes=1).num_splits == 15
    assert fa3.decode(1, ONE_KV_HEAD, 131072, 132).num_splits == 109
    assert fa3.num_splits_heuristic(264, 132, 2000, 264, 200 * 2**20, False) == 4
    assert fa3.num_splits_heuristic(264, 132, 2000, 264, 200 * 2**20, True) == 1


def test_fa3_dynamic_counts():
    long_and_short = np.array([131072] + [512] * 15)
    assert fa3.dynamic_splits(long_and_short, 8, 132, 32).tolist() == [15] + [1] * 15
    assert fa3.dynamic_splits(np.zeros(3, int), 8, 132, 32).tolist() == [1, 1, 1]
    assert fa3.dynamic_splits(np.full(993, 10**6), 8, 132, 32).max() == 1
    assert (
        explain([2560], LLAMA, "fa3-dynamic", cuda_graph=True)[1].details["num_splits_static"] == 32
    )


@pytest.mark.parametrize(
    ("heads", "capability", "splits"),
    [
        (LLAMA, (10, 0), 16),
        (LLAMA, (12, 0), 1),
        (HeadConfig(16, 1, 192, 128), (10, 0), 128),
        (HeadConfig(16, 1, 576, 512), (10, 0), 1),
    ],
)
def test_fa4_by_device(heads, capability, splits):
    assert explain([65536], heads, "fa4", Device(132, capability))[1].num_splits == splits


def test_flashmla_packs_requests_of_unequal_length():
    assert flashmla.pack([1000, 2000, 3000], 3).num_splits == [1, 2, 2]
    assert flashmla.pack([1, 0, 4096], 4).num_splits == [1, 1, 4]
    idle = flashmla.pack([4096], 66).parts[-1]
    assert (idle.begin_request, idle.end_request, idle.end_block) == (1, 0, 64)


def test_rocm_refuses_more_than_512_partitions():
    assert explain([131072], LLAMA, "rocm")[1].details["supported"]
    _, account = explain([131073], LLAMA, "rocm")
    assert not account.details["supported"]
    assert "refuses more than 131072 keys" in account.reason
