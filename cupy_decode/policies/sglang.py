"""SGLang's Triton decode kernel: a split count per sequence, computed on the device.

Sources: ``python/sglang/kernels/ops/attention/metadata.py`` (``get_num_kv_splits_triton``),
``python/sglang/kernels/ops/attention/decode_attention.py`` (grid, split ranges, Lean gate) and
``python/sglang/srt/layers/attention/triton_backend.py`` (caps, deterministic mode).

Llama-3-8B at batch 1, 2,560 keys, 132 SMs: int(132 * log2(2560 / 64)) = 702 "cores", a grid of 8
head tiles, ceil(702 / 8) = 88 splits wanted, capped at 8: chunks of 320 keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from cupy_decode.grid import cdiv
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import (
    Account,
    Device,
    DeviceRule,
    StepShape,
    make_account,
    visible_rows,
)

#: Split lengths are multiples of this many keys.
MIN_BLOCK_KV = 32
#: Query heads of one KV head that share a thread block.
GROUPED_BLOCK_H = 16


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def extended_core_count(num_sms: int, max_seq_len: int) -> int:
    """``int(num_sms * max(log2(max_seq_len / 64), 1))`` in float32.

    The factor lets long contexts ask for more thread blocks than there are SMs.

    Notes
    -----
    The logarithm is defined here as the correctly rounded float32 one of the float32 quotient.
    Taking it in float64 and rounding once gives exactly that: over all lengths below 2**31 the
    true logarithm stays at least 6.9 float64 ulp away from every point halfway between two
    float32 numbers, while a float64 ``log2`` errs by about one, on the host and on the device. At
    powers of two the true value is a float32 number, so no error of the float64 one survives.

    Examples
    --------
    132 * log2(40) = 702.5; at 128 keys the logarithm is exactly 1.

    >>> extended_core_count(132, 2560), extended_core_count(132, 128)
    (702, 132)
    """
    quotient = np.float32(max(max_seq_len, 1)) / np.float32(64)
    log2 = np.float32(np.log2(np.float64(quotient)))
    return int(np.float32(num_sms) * max(log2, np.float32(1)))


def head_tiles(num_q_heads: int, num_kv_heads: int) -> int:
    """Stage-1 thread blocks of one token and split.

    Examples
    --------
    >>> head_tiles(32, 8), head_tiles(32, 32), head_tiles(128, 1)
    (8, 32, 8)
    """
    return cdiv(num_q_heads, min(GROUPED_BLOCK_H, num_q_heads // num_kv_heads))


@dataclass(frozen=True)
class KvSplits:
    """``num_kv_splits`` of a batch and the values it came from."""

    ext_cores: int
    token_grid: int
    max_splits_1: int
    chunk_1: int
    max_splits_2: int
    chunk_2: int
    num_kv_splits: np.ndarray = field(repr=False)


def num_kv_splits(
    seq_lens: np.ndarray,
    num_q_heads: int,
    num_kv_heads: int,
    num_sms: int,
    max_kv_splits: int = 8,
    num_group: int = 1,
) -> KvSplits:
    """Splits of each sequence: the larger of an evenness rule and a filling rule.

    Rule 1 cuts long sequences to the length of the shortest, unless all are within 20 % of it.
    Rule 2 cuts the longest until the grid fills ``extended_core_count``. Both are capped.

    Parameters
    ----------
    seq_lens : (batch,) integers
    num_group : int
        Query tokens per sequence.

    Notes
    -----
    An empty sequence counts as one key in rule 1, where the engine would divide by zero, and gets
    one split, which no key fills.

    Examples
    --------
    1000 and 1250 keys differ by 25 %, so rule 1 asks for ceil(1250 / 1000) = 2; rule 2 gives 8
    chunks of 157 keys, and 7 of them hold 1000.

    >>> num_kv_splits([1000, 1250], 32, 8, 132).num_kv_splits.tolist()
    [7, 8]
    """
    lens = np.asarray(seq_lens, np.int64)
    longest, shortest = int(lens.max()), max(int(lens.min()), 1)
    if longest * 8 < shortest * 10:
        shortest = longest
    max_splits_1 = min(max(cdiv(longest, max(shortest, 1)), 1), max_kv_splits)
    chunk_1 = cdiv(longest, max_splits_1)

    ext_cores = extended_core_count(num_sms, longest)
    token_grid = len(lens) * num_group * head_tiles(num_q_heads, num_kv_heads)
    max_splits_2 = min(cdiv(ext_cores, token_grid), max_kv_splits)
    chunk_2 = cdiv(longest, max_splits_2)

    chunk = max(min(chunk_1, chunk_2), 1)
    splits = np.maximum(-(-lens // chunk), 1)
    return KvSplits(ext_cores, token_grid, max_splits_1, chunk_1, max_splits_2, chunk_2, splits)


def split_sizes(seq_lens: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Keys of each sequence's splits: ``ceil(s / n)`` rounded up to 32.

    Rounding can leave the last of the ``n`` splits without a key.

    Examples
    --------
    >>> split_sizes(np.array([2560, 33]), np.array([8, 8])).tolist()
    [320, 32]
    """
    return -(-seq_lens // (splits * MIN_BLOCK_KV)) * MIN_BLOCK_KV


def deterministic_num_kv_splits(seq_lens: np.ndarray, split_tile_size: int = 256) -> np.ndarray:
    """``ceil(s / split_tile_size)``: a function of the sequence alone.

    Examples
    --------
    >>> deterministic_num_kv_splits(np.array([1, 256, 257, 4096])).tolist()
    [1, 1, 2, 16]
    """
    return -(-np.asarray(seq_lens, np.int64) // split_tile_size)


def mla_max_kv_splits(max_kv_splits: int, num_sms: int, context_len: int) -> int:
    """The cap that MLA models get: next powers of two of the SMs and of 32-key blocks.

    Examples
    --------
    >>> mla_max_kv_splits(8, 132, 131072), mla_max_kv_splits(8, 132, 100)
    (256, 8)
    """
    if num_sms <= 0:
        return max_kv_splits
    by_context = _next_power_of_2(cdiv(context_len, MIN_BLOCK_KV))
    return max(max_kv_splits, min(_next_power_of_2(num_sms), by_context))


def lean_gate(
    num_q_heads: int, group_size: int, batch: int, total_keys: int, is_mla: bool = False
) -> bool:
    """Whether the ROCm build tries its stream-K "Lean" kernel on a batch.

    The average length must reach 16,384 keys (16 or more head tiles), 65,536 (4 or more) or
    131,072, relaxed by the batch and never below 4,096; MLA asks for a batch of 8 instead.

    Examples
    --------
    8 head tiles at batch 16: 65536 // (16 // 2) = 8192 keys on average.

    >>> lean_gate(32, 4, 16, 16 * 8192), lean_gate(32, 4, 16, 16 * 8191)
    (True, False)
    """
    if batch <= 0:
        return False
    if is_mla:
        return batch >= 8 and total_keys >= 4096 * batch
    tiles = cdiv(num_q_heads, min(GROUPED_BLOCK_H, group_size))
    least = 16384 if tiles >= 16 else 65536 if tiles >= 4 else 131072
    relaxation = max(1, batch // 2 if tiles >= 4 else batch // 4)
    return total_keys >= max(4096, least // relaxation) * batch


@dataclass(frozen=True)
class SglangTriton:
    """``num_kv_splits`` per sequence under a cap, in splits of whole 32-key blocks.

    Parameters
    ----------
    max_kv_splits : int
        The cap, ``--triton-attention-num-kv-splits``: 8 by default, 16 on AMD.
    is_mla : bool
        Raise the cap with ``mla_max_kv_splits``.
    static : bool
        Ask for ``max_kv_splits`` splits of every sequence.
    context_len : int
        Longest context that the server was started for.
    """

    name: ClassVar[str] = "sglang-triton"
    max_kv_splits: int = 8
    is_mla: bool = False
    static: bool = False
    context_len: int = 131072

    def cap(self, device: Device) -> int:
        """Most splits of a sequence."""
        if self.is_mla:
            return mla_max_kv_splits(self.max_kv_splits, device.num_sms, self.context_len)
        return self.max_kv_splits

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device."""
        if self.static:
            return DeviceRule("count", self.cap(device), MIN_BLOCK_KV)
        tiles = head_tiles(step.heads.num_q_heads, step.heads.num_kv_heads)
        return DeviceRule(
            "sglang", self.cap(device), MIN_BLOCK_KV, num_sms=device.num_sms, query_tiles=tiles
        )

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        cap = self.cap(device)
        if self.static:
            splits = np.full(step.batch, cap, np.int64)
            return _answer(self.name, step, device, splits, cap, f"static: {cap} splits each")
        found = num_kv_splits(
            step.lens,
            heads.num_q_heads,
            heads.num_kv_heads,
            device.num_sms,
            cap,
            step.max_query_len,
        )
        wanted = cdiv(found.ext_cores, found.token_grid)
        limit = f", capped at {cap}" if wanted > cap else ""
        uneven = f"; uneven lengths ask for {found.max_splits_1}" if found.max_splits_1 > 1 else ""
        reason = (
            f"{found.token_grid} blocks for {found.ext_cores} cores want {wanted} splits"
            f"{limit}{uneven}"
        )
        details = {
            "ext_device_core_count": found.ext_cores,
            "token_grid": found.token_grid,
            "kv_chunk_size_1": found.chunk_1,
            "kv_chunk_size_2": found.chunk_2,
        }
        return _answer(self.name, step, device, found.num_kv_splits, cap, reason, **details)


@dataclass(frozen=True)
class SglangDeterministic:
    """``ceil(s / split_tile_size)`` splits: the same bits whatever shares the batch.

    The splits are still made equal and rounded up to 32 keys, so 257 keys become 160 + 97 and not
    256 + 1.
    """

    name: ClassVar[str] = "sglang-deterministic"
    split_tile_size: int = 256
    context_len: int = 131072

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        splits = np.maximum(deterministic_num_kv_splits(step.lens, self.split_tile_size), 1)
        cap = cdiv(max(self.context_len, step.max_seq_len), self.split_tile_size)
        reason = f"one split per {self.split_tile_size} keys, whatever the batch"
        return _answer(self.name, step, device, splits, cap, reason)

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device."""
        return DeviceRule("chunk", self.split_tile_size, MIN_BLOCK_KV)


def _answer(
    name: str,
    step: StepShape,
    device: Device,
    splits: np.ndarray,
    cap: int,
    reason: str,
    **details: Any,
) -> tuple[SplitPlan, Account]:
    heads, tokens = step.heads, step.num_query_tokens
    tiles = head_tiles(heads.num_q_heads, heads.num_kv_heads)
    sizes = np.maximum(split_sizes(step.lens, splits), MIN_BLOCK_KV)
    plan = SplitPlan.from_counts_and_sizes(step.lens, sizes, policy=name)
    account = make_account(
        device,
        split=bool(splits.max() > 1),
        reason=reason,
        grid=(tokens, tiles, cap),
        busy_blocks=visible_rows(step, plan, step.query_len_per_sequence) * tiles,
        num_splits=int(splits.max()),
        # Allocated for the cap and used even by one split: a normalised vector and its LSE.
        scratch_bytes=tokens * heads.num_q_heads * cap * (heads.value_dim + 1) * 4,
        max_kv_splits=cap,
        num_kv_splits=splits,
        **details,
    )
    return plan, account
