"""Split until every SM has one thread block, and no further."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupy_decode.grid import blocks_per_row, first_wave_splits
from cupy_decode.plan import SplitPlan
from cupy_decode.policies.base import Account, Device, DeviceRule, StepShape, row_account


def _unsplit_blocks(step: StepShape) -> int:
    return step.batch * blocks_per_row(step.heads)


@dataclass(frozen=True)
class FirstWave:
    """S* = ceil(num_sms / G), G being the thread blocks of this package's unsplit kernel.

    G = batch * num_kv_heads * ceil(group_size / 16): the readable kernel serves up to 16 query
    heads of one KV head per thread block. (``grid.blocks_2d`` counts vLLM's grid instead, which
    packs query tokens too and pays one partly filled tile per sequence for it.)

    S* is where the first wave is full. It is a lower bound for a good split count, not an optimum:
    more splits can still hide latency, and cost merge traffic.

    Examples
    --------
    Llama-3-8B at batch 1: G = 8, S* = ceil(132 / 8) = 17.

    >>> from cupy_decode.heads import presets
    >>> plan, account = FirstWave()(StepShape([8192], presets["llama-3-8b"]), Device())
    >>> account.num_splits, plan.counts.tolist()
    (17, [17])
    """

    name: ClassVar[str] = "first-wave"
    tile: int = 16

    def __call__(self, step: StepShape, device: Device) -> tuple[SplitPlan, Account]:
        unsplit_blocks = _unsplit_blocks(step)
        splits = first_wave_splits(unsplit_blocks, device.num_sms)
        plan = SplitPlan.from_num_splits(step.lens, splits, tile=self.tile, policy=self.name)
        if splits == 1:
            reason = f"{unsplit_blocks} thread blocks already reach all {device.num_sms} SMs"
        else:
            reason = (
                f"{unsplit_blocks} thread blocks need {splits} splits to reach {device.num_sms} SMs"
            )
        return plan, row_account(step, device, plan, reason, splits, unsplit_blocks=unsplit_blocks)

    def device_rule(self, step: StepShape, device: Device) -> DeviceRule:
        """The rule for lengths on the device."""
        splits = first_wave_splits(_unsplit_blocks(step), device.num_sms)
        return DeviceRule("count", splits, self.tile)
