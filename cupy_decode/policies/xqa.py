"""XQA, the decode kernels of TensorRT-LLM and FlashInfer: thread blocks left over per KV head.

Sources: ``csrc/xqa/mha.cu`` (generic, 256-key tiles) and ``csrc/xqa/mha_sm90.cu`` (fp8 cache on
compute capability 9.0, 64-key tiles). Both merge in the same launch: the last thread block of a
sequence to arrive combines the others' states.

Llama-3-8B, batch 1, 2,560 keys on 132 SMs: 132 // 8 = 16 thread blocks per KV head, but only
ceil(2560 / 256) = 10 tiles, so 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupy_decode.grid import cdiv
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, StepShape, make_account, visible_rows

#: Keys of one tile of the generic kernel and of the one for compute capability 9.0.
TILE, TILE_SM90 = 256, 64


def num_sub_seqs(batch: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """``min(max(1, num_sms // (batch * num_kv_heads)), ceil(max_seq_len / 256))``.

    Examples
    --------
    >>> num_sub_seqs(1, 8, 2560, 132), num_sub_seqs(16, 8, 131072, 132)
    (10, 1)
    """
    return min(max(1, num_sms // (batch * num_kv_heads)), cdiv(max(max_seq_len, 1), TILE))


def num_sub_seqs_sm90(batch: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """A quarter of three thread blocks per SM, rounded to nearest; at most the 64-key tiles.

    Examples
    --------
    3 * 132 // 8 = 49, and 49 / 4 = 12.25.

    >>> num_sub_seqs_sm90(1, 8, 2560, 132)
    12
    """
    quarter = (3 * num_sms // (batch * num_kv_heads) + 2) // 4
    return min(max(1, quarter), cdiv(max(max_seq_len, 1), TILE_SM90))


@dataclass(frozen=True)
class Xqa:
    """Tiles dealt to ``num_sub_seqs`` thread blocks per sequence and KV head.

    Parameters
    ----------
    sm90 : bool
        The fp8 kernel of compute capability 9.0 instead of the generic one.

    Notes
    -----
    XQA deals tiles like cards: thread block k reads the tiles k, k + n, k + 2n, ... A plan's
    ranges are contiguous, so each split here owns as many tiles as its XQA thread block does, in
    one run. Reads, states and balance are the same, the order of summation is not.
    """

    sm90: bool = False
    names: ClassVar[dict[bool, str]] = {False: "xqa", True: "xqa-sm90"}

    @property
    def name(self) -> str:
        """Registered name of this kernel's rule."""
        return self.names[self.sm90]

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        heads = step.heads
        tile, rule = (TILE_SM90, num_sub_seqs_sm90) if self.sm90 else (TILE, num_sub_seqs)
        blocks = rule(step.batch, heads.num_kv_heads, step.max_seq_len, device.num_sms)
        bounds = []
        for length, first in zip(step.lens.tolist(), step.first_visible.tolist(), strict=True):
            first_tile = first // tile
            tiles = cdiv(length, tile) - first_tile
            dealt = max(min(blocks, tiles), 1)
            bounds.append(
                [0, *((first_tile + _run_begin(k, tiles, dealt)) * tile for k in range(1, dealt))]
            )
        plan = SplitPlan.from_bounds(bounds, step.lens, policy=self.name)

        most = cdiv(max(step.max_seq_len, 1), tile)
        reason = f"{device.num_sms} SMs for {step.batch * heads.num_kv_heads} heads and sequences"
        if blocks == most:
            reason = f"no more than {most} tiles of {tile} keys"
        columns = heads.num_kv_heads
        account = make_account(
            device,
            split=blocks > 1,
            reason=reason,
            grid=(1, blocks, columns * step.batch) if self.sm90 else (blocks, columns, step.batch),
            busy_blocks=visible_rows(step, plan) * columns,
            num_splits=blocks,
            # 16-bit vectors, a maximum and a sum per head; row padding not counted.
            scratch_bytes=blocks
            * step.num_query_tokens
            * heads.num_q_heads
            * (2 * heads.value_dim + 8)
            if blocks > 1
            else 0,
        )
        return plan, account


def _run_begin(k: int, tiles: int, blocks: int) -> int:
    """First tile of run ``k`` when the first ``tiles % blocks`` runs get one tile more."""
    return k * (tiles // blocks) + min(k, tiles % blocks)
