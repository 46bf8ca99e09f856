"""The engines' own split arithmetic: worked values checked against their code, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import Any

import numpy as np
import pytest

from cupy_decode import grid
from cupy_decode.heads import HeadConfig
from cupy_decode.policies import (
    base,
    fa2,
    fa3,
    fa4,
    flashinfer,
    flashinfer_batch,
    flashmla,
    paged_attention,
    rocm,
    sglang,
    vllm_mla,
    vllm_triton,
    xqa,
)
from tests.shared_data import shared_json


def _heads(h: int, h_kv: int, d: int = 128, dv: int | None = None) -> HeadConfig:
    return HeadConfig(h, h_kv, d, dv)


def _vllm_use_3d(version, num_seqs, max_q, h, h_kv, threshold, total_q=None, **options):
    return not vllm_triton.disqualifiers(
        version,
        num_seqs,
        max_q,
        _heads(h, h_kv),
        threshold,
        num_query_tokens=total_q,
        **options,
    )


def _vllm_segments(seq_len, **options):
    if "nseg" in options:
        options["num_segments"] = options.pop("nseg")
    return asdict(grid.segments(seq_len, **options))


def _sglang(seq_lens, h, h_kv, sm_count, **options):
    found = sglang.num_kv_splits(seq_lens, h, h_kv, sm_count, **options)
    return asdict(found) | {"num_kv_splits": found.num_kv_splits.tolist()}


def _sglang_ranges(seq_len, splits, min_block=sglang.MIN_BLOCK_KV):
    assert min_block == sglang.MIN_BLOCK_KV
    keys = int(sglang.split_sizes(np.array([seq_len]), np.array([splits]))[0])
    return {"keys_per_split": keys, "non_empty": grid.cdiv(seq_len, keys) if keys else 0}


def _sglang_deterministic(seq_lens, tile=256, context_len=131072):
    return {
        "max_kv_splits": grid.cdiv(context_len, tile),
        "num_kv_splits": sglang.deterministic_num_kv_splits(seq_lens, tile).tolist(),
    }


def _fi_decode(pages, page_size, h_kv, max_grid, cuda_graph=False):
    found = flashinfer.cuda_core_plan(pages, page_size, h_kv, max_grid, cuda_graph)
    return asdict(found) | {"valid": found.valid}


def _fi_tc_decode(pages, page_size, h, h_kv, sm_count, q_len=1, **options):
    found = flashinfer.tensor_core_plan(
        pages, page_size, h, h_kv, sm_count, query_lens=q_len, **options
    )
    return asdict(found)


def _fi_holistic(kv_lens, h, h_kv, sm_count, head_dim=128):
    found = flashinfer_batch.deal(kv_lens, h, h_kv, sm_count, head_dim)
    return {
        "ctas": found.ctas,
        "kv_len_limit": int(found.limits[0]),
        "work_items": len(found.items),
        "max_keys_on_cta": int(found.keys_per_cta.max()),
        "min_keys_on_cta": int(found.keys_per_cta.min()),
    }


def _fa2_decode(batch, h, h_kv, d, seqlen_k, sm_count):
    return asdict(fa2.decode(batch, _heads(h, h_kv, d), seqlen_k, sm_count))


def _fa3_decode(
    batch, h, h_kv, d, seqlen_k, sm_count, paged=True, dv=None, elem=2, varlen=False, q_len=1
):
    return asdict(
        fa3.decode(
            batch,
            _heads(h, h_kv, d, dv),
            seqlen_k,
            sm_count,
            paged=paged,
            kv_bytes=elem,
            varlen=varlen,
            query_len=q_len,
        )
    )


def _fa3_dynamic(seqlens_k, *args, **options):
    return fa3.dynamic_splits(seqlens_k, *args, **options).tolist()


def _flashmla_meta(seqlens, parts, **options):
    found = flashmla.pack(seqlens, parts, **options)
    return {
        "payload": found.payload,
        "cum_splits": found.cumulative_splits,
        "splits": found.num_splits,
        "parts": [list(astuple(part)) for part in found.parts],
    }


def _first_wave(batch, h, h_kv, sm_count):
    blocks = grid.blocks_2d(batch, batch, _heads(h, h_kv))
    return {"g2d": blocks, "s_star": grid.first_wave_splits(blocks, sm_count)}


#: Name of a group of worked values -> this package's answer to its arguments.
ANSWERS: dict[str, Callable[..., Any]] = {
    "vllm_tile_size": vllm_triton.tile_size,
    "vllm_block_m_q": lambda h, h_kv: [
        grid.block_m(_heads(h, h_kv)),
        grid.block_q(_heads(h, h_kv)),
    ],
    "vllm_seq_threshold": vllm_triton.seq_threshold,
    "vllm_num_segments": vllm_triton.num_segments,
    "vllm_use_3d": _vllm_use_3d,
    "vllm_segments": _vllm_segments,
    "vllm_grid": lambda tokens, seqs, h, h_kv, split, nseg=16: list(
        vllm_triton.grid(tokens, seqs, _heads(h, h_kv), split, nseg)
    ),
    "vllm_triton_mla_splits": vllm_mla.num_kv_splits,
    "sglang_num_kv_splits": _sglang,
    "sglang_split_ranges": _sglang_ranges,
    "sglang_deterministic_splits": _sglang_deterministic,
    "sglang_mla_cap": sglang.mla_max_kv_splits,
    "sglang_lean_gate": sglang.lean_gate,
    "fi_decode_plan": _fi_decode,
    "fi_tc_decode_plan": _fi_tc_decode,
    "fi_holistic": _fi_holistic,
    "fa2_heuristic": fa2.num_splits_heuristic,
    "fa2_decode": _fa2_decode,
    "fa3_heuristic": fa3.num_splits_heuristic,
    "fa3_decode": _fa3_decode,
    "fa3_dynamic_splits": _fa3_dynamic,
    "fa4_heuristic": fa4.num_splits_heuristic,
    "flashmla_parts": flashmla.num_sm_parts,
    "flashmla_meta": _flashmla_meta,
    "xqa_sub_seqs": xqa.num_sub_seqs,
    "xqa_sub_seqs_sm90": xqa.num_sub_seqs_sm90,
    "paged_v1_or_v2": lambda *args: asdict(paged_attention.choose(*args)),
    "rocm_paged": lambda *args: asdict(rocm.launch(*args)),
    "first_wave_splits": _first_wave,
    "partial_bytes": base.partial_bytes,
}
#: Groups about block tables, which the paging tests answer.
ELSEWHERE = {
    "vllm_kernel_block_ids",
    "vllm_block_table_width",
    "vllm_common_block_size",
    "vllm_slot",
}
#: How far a value lies from the next integer: a remark, not an output of the engine.
REMARKS = {"frac_margin"}


def test_every_group_is_answered_somewhere():
    assert set(shared_json("vectors/policies.json")["policies"]) == set(ANSWERS) | ELSEWHERE


@pytest.mark.parametrize("group", ANSWERS)
def test_worked_values(group):
    vectors = shared_json("vectors/policies.json")["policies"][group]["vectors"]
    assert vectors
    for vector in vectors:
        got = ANSWERS[group](*vector["args"], **vector["kwargs"])
        want = vector["out"]
        if isinstance(want, dict):
            want = {key: value for key, value in want.items() if key not in REMARKS}
            got = {key: list(v) if isinstance(v, tuple) else v for key, v in got.items()}
            got = {key: got.get(key) for key in want}
        assert got == want, f"{group}{tuple(vector['args'])} {vector['kwargs']}"
