"""Random batches planned on the device, many in one launch, beside the host's plans of them.

``python -m tests.device_plans --plans 1000000`` holds that many plans of every rule to the host's,
bit for bit, on a GPU; ``test_plan_splits`` does the same with fewer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

import cupy_decode as cd
from cupy_decode import backends, policies, specs
from cupy_decode.policies import Device, Policy, StepShape
from cupy_decode.policies.fa3 import Fa3Dynamic
from cupy_decode.policies.fixed import EqualShares, FixedCount, FixedSize
from cupy_decode.policies.sglang import SglangDeterministic, SglangTriton

RULES = tuple(specs.PLAN_RULES)
BATCHES = (1, 2, 3, 7, 32, 127, 128, 129, 260)
SMALL_BATCHES = (1, 2, 3, 5, 8, 13, 21)
HEADS = (cd.HeadConfig(32, 8, 128), cd.HeadConfig(8, 1, 128), cd.HeadConfig(40, 40, 64))
UNWRITTEN = -1


@dataclass(frozen=True)
class Draw:
    """Batches of one size, planned by one policy in one launch."""

    rule: str
    lens: np.ndarray  # [plans, batch]
    heads: cd.HeadConfig
    device: Device
    policy: Policy
    max_seq_len: int

    @property
    def device_rule(self) -> policies.DeviceRule:
        batch = self.lens.shape[1]
        return policies.device_rule(batch, self.max_seq_len, self.heads, self.policy, self.device)

    @property
    def capacity(self) -> int:
        return self.device_rule.max_rows(self.lens.shape[1], self.max_seq_len)


def random_lengths(
    rng: np.random.Generator, plans: int, batch: int, max_seq_len: int
) -> np.ndarray:
    """Lengths of every kind: spread, alike, near powers of two, empty, all the same."""
    shape = (plans, batch)
    spread = np.exp(rng.uniform(0, np.log(max_seq_len + 1), shape))
    level = np.exp(rng.uniform(0, np.log(max_seq_len + 1), (plans, 1)))
    alike = level * rng.uniform(0.7, 1.3, shape)
    powers = 2.0 ** rng.integers(0, 21, shape) + rng.integers(-1, 2, shape)
    kind = rng.integers(0, 5, (plans, 1))
    lens = np.select([kind == 0, kind == 1, kind == 2, kind == 3],
                     [spread, alike, powers, np.broadcast_to(level, shape)],
                     rng.integers(0, max_seq_len + 1, shape))  # fmt: skip
    lens[rng.random(shape) < 0.1 * rng.random((plans, 1))] = 0
    return np.clip(lens, 0, max_seq_len).astype(np.int32)


def draw(rule: str, rng: np.random.Generator, plans: int, batch: int) -> Draw:
    """A random policy of a rule, a machine, a layer and batches for it."""
    max_seq_len = int(2 ** rng.uniform(4, 20)) if batch < 500 else 4096
    device = Device(num_sms=int(rng.choice((8, 78, 108, 132, 188))))
    number = int(2 ** rng.uniform(0, 7))
    policy: Any = {
        "count": FixedCount(number, tile=int(rng.choice((16, 32)))),
        "size": FixedSize(max(64, max_seq_len // int(rng.integers(1, 60)))),
        "chunk": SglangDeterministic(max(64, max_seq_len // int(rng.integers(1, 60)))),
        "sglang": SglangTriton(number + 1),
        "fa3-dynamic": Fa3Dynamic(num_splits=number + 1),
        "equal-shares": EqualShares(num_workers=int(rng.integers(1, 300))),
    }[rule]
    lens = random_lengths(rng, plans, batch, max_seq_len)
    return Draw(rule, lens, HEADS[rng.integers(len(HEADS))], device, policy, max_seq_len)


@dataclass(frozen=True)
class Plans:
    """Buffers of many plans; what no plan uses holds ``UNWRITTEN``."""

    split_offsets: np.ndarray  # [plans, batch + 1]
    split_begin: np.ndarray  # [plans, capacity]
    worker_offsets: np.ndarray | None = None  # [plans, workers + 1]


def host_plans(case: Draw) -> Plans:
    """The host's plans, one policy call each."""
    (plans, batch), capacity = case.lens.shape, case.capacity
    offsets = np.empty((plans, batch + 1), np.int32)
    begin = np.full((plans, capacity), UNWRITTEN, np.int32)
    workers = None
    if case.rule == "equal-shares":
        workers = np.empty((plans, case.device_rule.value + 1), np.int32)
    for i, lens in enumerate(case.lens):
        plan, account = case.policy(StepShape(lens, case.heads), case.device)
        offsets[i] = plan.split_offsets
        begin[i, : plan.num_rows] = plan.split_begin[: plan.num_rows]
        if workers is not None:
            workers[i] = account.details["worker_offsets"]
    return Plans(offsets, begin, workers)


def host_plans_at_once(case: Draw) -> Plans:
    """The same by one call, for policies that look at each sequence alone."""
    plans, batch = case.lens.shape
    plan, _ = case.policy(StepShape(case.lens.ravel(), case.heads), case.device)
    offsets = np.zeros((plans, batch + 1), np.int32)
    np.cumsum(plan.counts.reshape(plans, batch), axis=1, out=offsets[:, 1:])
    begin = np.full((plans, case.capacity), UNWRITTEN, np.int32)
    used = np.arange(case.capacity) < offsets[:, -1:]
    begin[used] = plan.split_begin[: plan.num_rows]
    return Plans(offsets, begin)


def planned_on(backend: str, case: Draw, schedule: str = "forward") -> Plans:
    """The device's plans of the same batches, by one launch."""
    runner: Any = backends.runner("cuda" if backend == "cuda" else "emulator")
    plans, batch = case.lens.shape
    rule = case.device_rule

    def unwritten(*shape: int) -> Any:
        array = runner.empty(shape, np.int32)
        array[...] = UNWRITTEN
        return array

    plan = SimpleNamespace(
        split_offsets=unwritten(plans, batch + 1), split_begin=unwritten(plans, case.capacity)
    )
    workers = unwritten(plans, rule.value + 1) if case.rule == "equal-shares" else None
    launch = specs.plan_splits(
        plan,
        runner.asarray(case.lens),
        rule=rule.rule,
        value=rule.value,
        max_seq_len=case.max_seq_len,
        tile=rule.tile,
        num_sms=rule.num_sms,
        num_kv_heads=rule.num_kv_heads,
        query_tiles=rule.query_tiles,
        worker_offsets=workers,
    )
    if backend == "cuda":
        runner.run(launch)
        arrays = (plan.split_offsets, plan.split_begin, workers)
        return Plans(*(None if a is None else a.get() for a in arrays))
    runner.run(launch, schedule=schedule)
    return Plans(plan.split_offsets, plan.split_begin, workers)


def expect_equal(case: Draw, got: Plans, want: Plans) -> None:
    """Every offset, begin and worker, and nothing written where no plan has a row."""
    for name in ("split_offsets", "split_begin", "worker_offsets"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None)
        if a is not None and not np.array_equal(a, b):
            i = int((a != b).any(axis=1).argmax())
            raise AssertionError(
                f"{case.policy} on {case.device.num_sms} SMs, {case.heads}, max_seq_len "
                f"{case.max_seq_len}: {name} of seq_lens {case.lens[i].tolist()}\n"
                f"device {a[i].tolist()}\nhost   {b[i].tolist()}"
            )


#: Rules that look at each sequence alone.
ALONE = ("count", "size", "chunk")


def nth_draw(rule: str, seed: int, index: int, plans: int, batches: Sequence[int]) -> Draw:
    """The same draw wherever it is asked for."""
    rng = np.random.default_rng([RULES.index(rule), seed, index])
    return draw(rule, rng, plans, int(rng.choice(batches)))


def checksums(plans: Plans) -> list[int]:
    arrays = (plans.split_offsets, plans.split_begin, plans.worker_offsets)
    return [zlib.crc32(np.ascontiguousarray(a)) for a in arrays if a is not None]


def _host_checksums(rule: str, seed: int, plans: int, index: int) -> list[int]:
    case = nth_draw(rule, seed, index, plans, SMALL_BATCHES)
    return checksums(host_plans_at_once(case) if rule in ALONE else host_plans(case))


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold random device plans to the host's.")
    parser.add_argument("--plans", type=int, default=1_000_000, help="of every rule")
    parser.add_argument("--per-launch", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        backends.runner("cuda")
    except backends.BackendUnavailableError as error:
        parser.exit(2, f"error: {error}\n")
    seed, plans = arguments.seed, arguments.per_launch
    launches = range(-(-arguments.plans // plans))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        wanted = {
            rule: pool.map(partial(_host_checksums, rule, seed, plans), launches, chunksize=4)
            for rule in RULES
        }
        for rule in RULES:
            sequences = 0
            for index, want in tqdm(zip(launches, wanted[rule], strict=True), rule, disable=None):
                case = nth_draw(rule, seed, index, plans, SMALL_BATCHES)
                got = planned_on("cuda", case)
                if checksums(got) != want:
                    expect_equal(case, got, host_plans(case))
                    raise AssertionError(f"{rule}, launch {index}: checksums differ, arrays do not")
                sequences += case.lens.size
            total = len(launches) * plans
            print(
                f"{rule}: {total:,} plans of {sequences:,} sequences equal the host's", flush=True
            )


if __name__ == "__main__":
    main()
