"""vLLM's Triton unified attention: one threshold on the batch, then always 16 segments.

Sources: ``vllm/v1/attention/backends/triton_attn.py`` (threshold, segment count, scratch) and
``vllm/v1/attention/ops/triton_unified_attention.py`` (tiles, gate, grid, segment bounds).

Llama-3-8B (32 query heads, 8 KV heads) at batch 1 and 2,560 keys: threshold 128 // 8 = 16, so the
step is split; grid (1 // 4 + 1, 8, 16) = 128 thread blocks; ceil(2560 / 256) = 10 tiles of 16 keys
per segment, 160 keys, 16 active segments. At batch 17 the same step is not split at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from cupy_decode.grid import MIN_GRID_2D, block_m, block_q, blocks_2d, cdiv, split_threshold
from cupy_decode.heads import HeadConfig
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import (
    Account,
    Device,
    DeviceRule,
    StepShape,
    make_account,
    partial_bytes,
    visible_rows,
)

Version = Literal["chapter", "0.33"]

#: Parallel softmax segments of one sequence.
NUM_SEGMENTS = 16
#: The same on compute capability 12.0 while 16 would leave SMs idle.
NUM_SEGMENTS_SM120 = 64
#: Longest query that release 0.33 still splits.
MAX_SPLIT_QUERY_LEN = 8
#: Batch sizes that vLLM captures by default.
CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def tile_size(head_dim: int, window: int | None, q_bytes: int, is_prefill: bool) -> int:
    """Keys of one tile.

    Examples
    --------
    >>> tile_size(128, None, 2, is_prefill=False)
    16
    """
    if window == 1024 and head_dim in (128, 256):
        return 32  # Gemma 3 is recognised by this pair
    return 16 if q_bytes >= 2 and not is_prefill else 32


def seq_threshold(
    num_kv_heads: int, capture_sizes: Sequence[int] | None = None, min_grid: int = MIN_GRID_2D
) -> int:
    """Largest batch that is split: ``min_grid // num_kv_heads``.

    With fully captured decode steps it snaps to the nearest capture size, the first of two equally
    near ones, so that one captured graph never covers both paths.

    Examples
    --------
    >>> seq_threshold(8), seq_threshold(5, [1, 2, 4, 8, 16, 24, 32])
    (16, 24)
    """
    threshold = split_threshold(num_kv_heads, min_grid)
    if capture_sizes is None:
        return threshold
    return min(capture_sizes, key=lambda size: abs(size - threshold))


def num_segments(
    num_seqs: int,
    num_kv_heads: int,
    num_sms: int = 132,
    compute_capability: tuple[int, int] = (9, 0),
) -> int:
    """16; on compute capability 12.0 it is 64 while 16 segments leave an SM idle.

    Examples
    --------
    (188 - 1) // (16 * 1) = 11 sequences of one KV head leave an SM idle, 12 do not.

    >>> num_segments(11, 1, 188, (12, 0)), num_segments(12, 1, 188, (12, 0))
    (64, 16)
    """
    if tuple(compute_capability) != (12, 0):
        return NUM_SEGMENTS
    largest_batch = (num_sms - 1) // (NUM_SEGMENTS * num_kv_heads)
    return NUM_SEGMENTS_SM120 if num_seqs <= largest_batch else NUM_SEGMENTS


def disqualifiers(
    version: Version,
    num_seqs: int,
    max_query_len: int,
    heads: HeadConfig,
    threshold: int | None,
    *,
    causal: bool = True,
    batch_invariant: bool = False,
    mm_prefix: bool = False,
    tuned_large_head: bool = False,
    scratch_rows: int | None = None,
    num_query_tokens: int | None = None,
) -> list[str]:
    """Everything that keeps a step off the split path, in words; empty when it is split.

    Parameters
    ----------
    version : {"chapter", "0.33"}
        ``"chapter"`` is the earlier gate, the one that texts on FlashDecoding quote: it splits
        only pure decode and compares the batch with the threshold. Release 0.33 admits causal
        queries of up to 8 tokens and counts query tiles instead of sequences.
    threshold : int or None
        From ``seq_threshold``; None when the backend prepared no split path.
    mm_prefix : bool
        The mask has bidirectional ranges.
    tuned_large_head : bool
        0.33's special launch for head_dim 256 on compute capability 10.x is in effect.
    scratch_rows : int, optional
        Query tokens that the partial-state buffers hold; 0 when there are none, enough when left
        out.
    num_query_tokens : int, optional
        Query tokens of the batch; ``num_seqs * max_query_len`` when left out.

    Raises
    ------
    ValueError
        If ``version`` is neither of the two.

    Examples
    --------
    >>> disqualifiers("chapter", 17, 1, HeadConfig(32, 8, 128), 16)
    ['batch 17 exceeds the threshold of 16 sequences']
    """
    if version not in ("chapter", "0.33"):
        raise ValueError(f"version must be 'chapter' or '0.33'; got {version!r}")
    found = []
    tokens = num_seqs * max_query_len if num_query_tokens is None else num_query_tokens
    if threshold is None:
        found.append("the backend prepared no threshold for the split path")
    if scratch_rows == 0:
        found.append("no partial-state buffers were allocated")
    elif version == "0.33" and scratch_rows is not None and scratch_rows < tokens:
        found.append(f"the partial-state buffers hold {scratch_rows} of {tokens} query tokens")
    if version == "chapter":
        if max_query_len > 1:
            found.append(
                f"a sequence brings {max_query_len} query tokens, and one such prefill sends the "
                "whole batch down the unsplit path"
            )
        tiles, unit = num_seqs, "sequences"
        what = f"batch {num_seqs}"
    else:
        if max_query_len > MAX_SPLIT_QUERY_LEN:
            found.append(
                f"a sequence brings {max_query_len} query tokens, more than {MAX_SPLIT_QUERY_LEN}"
            )
        elif max_query_len > 1:
            blockers = {
                "the mask is not causal": not causal,
                "the mask has bidirectional prefix ranges": mm_prefix,
                "the tuned large-head launch takes the step": tuned_large_head,
            }
            found += [
                f"a sequence brings {max_query_len} query tokens and {words}"
                for words, applies in blockers.items()
                if applies
            ]
        tiles, unit = num_seqs * cdiv(max_query_len, block_q(heads)), "query tiles"
        what = f"{num_seqs} sequences make {tiles} query tiles, which"
    if threshold is not None and tiles > threshold:
        verb = "exceeds" if version == "chapter" else "exceed"
        found.append(f"{what} {verb} the threshold of {threshold} {unit}")
    if batch_invariant:
        found.append("batch invariance forbids split counts that depend on the batch")
    return found


def grid(
    num_query_tokens: int,
    num_seqs: int,
    heads: HeadConfig,
    split: bool,
    segments: int = NUM_SEGMENTS,
) -> tuple[int, ...]:
    """Stage-1 grid: query tiles, KV heads and, on the split path, segments.

    Examples
    --------
    >>> grid(16, 16, HeadConfig(32, 8, 128), split=True)
    (20, 8, 16)
    """
    q_tiles = blocks_2d(num_query_tokens, num_seqs, heads) // heads.num_kv_heads
    return (q_tiles, heads.num_kv_heads, segments) if split else (q_tiles, heads.num_kv_heads)


def segment_sizes(seq_lens: np.ndarray, segments: int, tile: int) -> np.ndarray:
    """Keys of each sequence's segments, ``ceil(s / (segments * tile)) * tile``; at least a tile.

    Integers only, one value per sequence: the device planner evaluates the same expression.
    """
    return np.maximum(-(-seq_lens // (segments * tile)), 1) * tile


def _busy_blocks(step: StepShape, plan: SplitPlan) -> int:
    """Plan rows with a visible key times the query tiles and KV heads that read them."""
    tiles = -(-step.query_len_per_sequence // block_q(step.heads))
    return visible_rows(step, plan, tiles) * step.heads.num_kv_heads


@dataclass(frozen=True)
class VllmTriton:
    """The gate, then ``ceil(s / (segments * tile)) * tile`` keys per segment.

    Parameters
    ----------
    version : {"chapter", "0.33"}
        Which gate; see ``disqualifiers`` for it and for the remaining options.
    capture_sizes : sequence of int
        Captured batch sizes, looked at when ``step.cuda_graph``.

    Notes
    -----
    ``scratch_bytes`` counts the step's own rows, with the head dimension padded to a power of two
    as the engine pads it. The buffers themselves are allocated once for the threshold.
    """

    version: Version = "chapter"
    batch_invariant: bool = False
    causal: bool = True
    mm_prefix: bool = False
    scratch_rows: int | None = None
    capture_sizes: tuple[int, ...] = CAPTURE_SIZES
    names: ClassVar[dict[str, str]] = {"chapter": "vllm-triton", "0.33": "vllm-triton-0.33"}

    @property
    def name(self) -> str:
        """Registered name of this version of the gate."""
        return self.names[self.version]

    def _threshold(self, step: StepShape) -> int:
        return seq_threshold(
            step.heads.num_kv_heads, self.capture_sizes if step.cuda_graph else None
        )

    def _gate(self, step: StepShape, device: Device) -> tuple[list[str], int, int]:
        """What keeps the step off the split path, segments and keys per tile."""
        heads = step.heads
        current = self.version == "0.33"
        found = disqualifiers(
            self.version,
            step.batch,
            step.max_query_len,
            heads,
            self._threshold(step),
            causal=self.causal,
            batch_invariant=self.batch_invariant,
            mm_prefix=self.mm_prefix,
            tuned_large_head=current
            and heads.head_dim == 256
            and step.max_query_len > 1
            and heads.group_size <= 16
            and device.compute_capability[0] == 10,
            scratch_rows=self.scratch_rows,
            num_query_tokens=step.num_query_tokens,
        )
        segments = 1 if found else NUM_SEGMENTS
        if current and not found:
            segments = num_segments(
                step.batch, heads.num_kv_heads, device.num_sms, device.compute_capability
            )
        tile = tile_size(heads.head_dim, step.window, step.q_bytes, is_prefill=bool(found))
        return found, segments, tile

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device: segments, or none where the gate says so."""
        _, segments, tile = self._gate(step, device)
        return DeviceRule("count", segments, tile)

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        found, segments, tile = self._gate(step, device)
        split, threshold = not found, self._threshold(step)
        plan = SplitPlan.from_counts_and_sizes(
            step.lens, segment_sizes(step.lens, segments, tile), policy=self.name
        )
        head_dim_padded = 1 << (heads.value_dim - 1).bit_length()
        account = make_account(
            device,
            split=split,
            reason=(
                "; ".join(found)
                or f"{step.batch} of at most {threshold} sequences: {segments} segments each"
            ),
            grid=grid(step.num_query_tokens, step.batch, heads, split, segments),
            busy_blocks=_busy_blocks(step, plan),
            num_splits=segments,
            scratch_bytes=partial_bytes(
                step.num_query_tokens, heads.num_q_heads, head_dim_padded, segments
            )
            if split
            else 0,
            seq_threshold_3D=threshold,
            BLOCK_M=block_m(heads),
            BLOCK_Q=block_q(heads),
            TILE_SIZE=tile,
        )
        return plan, account
