"""Random decode calls over the whole surface, seeded, checked against the reference.

Configurations are drawn so that pairs of options that have not met yet come first: first the
specialisations to compile, then the calls of each. A third is free to go to the fast kernel.
A failing one is made simpler for as long as it still fails, and printed as a value to paste.

``python -m tests.sweep --backend cuda --count 2000`` runs it on a GPU, on several processes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from tqdm import tqdm

import cupy_decode as cd
from cupy_decode import backends, fast, specs, tolerance

from .decode_cases import DTYPES, Case, Problem, build, on_device

HUGE = 3e38


@dataclass(frozen=True, repr=False)
class Config:
    """One call. The first fields choose the kernel to compile; the defaults are the plainest."""

    kernel: str = "readable"
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    dims: tuple[int, int] = (64, 64)
    group: int = 1
    soft_cap: bool = False
    alibi: bool = False
    finish: bool = False
    deterministic: bool = False
    float32_out: bool = False
    layout: str = "NHD"
    block_size: int = 16
    splits: str = "2"
    lens: str = "one"
    window: int | None = None
    scales: str | None = None
    sinks: bool = False
    scale: float | None = None
    poison: str = "nan"
    table_form: str = "int32"
    lens_form: str = "int32"
    q_form: str = "plain"
    out_form: str = "new"
    call: str = "decode"
    seed: int = 0

    def __repr__(self) -> str:
        """What is not plain about it."""
        mine = {f.name: getattr(self, f.name) for f in fields(self)}
        other = [f"{f.name}={mine[f.name]!r}" for f in fields(self) if mine[f.name] != f.default]
        return f"Config({', '.join(other)})"

    def allowed(self) -> bool:
        """Whether the options go together at all."""
        whole = self.splits == "1"
        if self.kernel == "auto":
            return (
                self.q_dtype != "float32"
                and self.kv_dtype in (self.q_dtype, "e4m3", "e5m2")
                and self.dims in ((64, 64), (128, 128), (256, 256))
                and self.splits == "auto"
                and self.call != "stages"
                and not self.finish
                and not (self.call == "step" and self._converts)
                and not (self.float32_out and self.out_form == "new" and self.call == "decode")
            )
        return (
            self.finish
            == (whole and not self.sinks and self.call != "stages" and not self.deterministic)
            and not (self.layout == "interleaved" and self.dims[0] != self.dims[1])
            and not (self.call == "step" and (self._converts or self.splits == "auto"))
            and not (self.call == "stages" and self.splits == "auto")
            and not (self.float32_out and self.q_dtype == "float32")
            and not (self.float32_out and self.out_form == "new" and self.call == "decode")
            and case_of(self).plan().unsplit == whole
        )

    @property
    def _converts(self) -> bool:
        """Whether it asks for what a step does not do: convert integers, write where it is told."""
        forms = {self.table_form, self.lens_form}
        return bool(forms & {"int64", "list"}) or self.out_form != "new"


#: Fields that choose the specialisation of stage 1.
SPEC_FIELDS = (
    "kernel", "q_dtype", "kv_dtype", "dims", "group", "soft_cap", "alibi", "finish",
    "deterministic", "float32_out",
)  # fmt: skip
LEVELS: dict[str, tuple[Any, ...]] = {
    "kernel": ("readable",),
    "q_dtype": ("float32", "float16", "bfloat16"),
    "kv_dtype": ("float32", "float16", "bfloat16", "e4m3", "e5m2"),
    "dims": ((64, 64), (80, 80), (112, 112), (120, 120), (128, 128), (192, 128), (256, 256),
             (576, 512)),
    "group": (1, 4, 5, 7, 12, 71, 128),
    "soft_cap": (False, True),
    "alibi": (False, True),
    "finish": (False, True),
    "deterministic": (False, False, True),
    "float32_out": (False, True),
    "layout": ("NHD", "HND", "interleaved", "one-row"),
    "block_size": (1, 2, 4, 16, 24, 64, 1024),
    "splits": ("1", "2", "7", "64", "size 16", "size 96", "bounds", "vllm-triton", "auto"),
    "lens": ("one", "ragged", "empty", "edges", "long"),
    "window": (None, 1, 17, 100),
    "scales": (None, "tensor", "head", "sequence"),
    "sinks": (False, True),
    "scale": (None, 0.3),
    "poison": ("nan", "huge"),
    "table_form": ("int32", "int64", "list", "turned"),
    "lens_form": ("int32", "int64", "list", "apart"),
    "q_form": ("plain", "turned", "apart"),
    "out_form": ("new", "given", "apart"),
    "call": ("decode", "stages", "step"),
}  # fmt: skip

Pair = tuple[str, Any, str, Any]


def pairs(config: Config, names: tuple[str, ...] = tuple(LEVELS)) -> Iterator[Pair]:
    """Every two options of a configuration."""
    for a, b in itertools.combinations(names, 2):
        yield a, getattr(config, a), b, getattr(config, b)


#: What the fast kernel is for, and what its specialisation depends on beside ``SPEC_FIELDS``.
FOR_FAST: dict[str, tuple[Any, ...]] = {
    "kernel": ("auto",),
    "q_dtype": ("float16", "bfloat16"),
    "dims": ((64, 64), (128, 128), (256, 256)),
    "finish": (False,),
    "deterministic": (False,),
    "splits": ("auto",),
    "call": ("decode", "step"),
    # strides that it takes more often than those that it leaves to the readable kernel
    "table_form": ("int32", "int32", "int64", "list", "turned"),
    "lens_form": ("int32", "int32", "int64", "list", "apart"),
    "q_form": ("plain", "plain", "plain", "plain", "turned"),
    "out_form": ("new", "new", "given", "given", "apart"),
}
FAST_FIELDS = ("window", "sinks", "scales", "block_size", "lens")


def draw(rng: random.Random, fixed: Config | None, for_fast: bool = False) -> Config:
    """A random allowed configuration, with the specialisation of ``fixed``."""
    levels = LEVELS | FOR_FAST if for_fast else LEVELS
    while True:
        values = {name: rng.choice(choices) for name, choices in levels.items()}
        if for_fast:
            values["kv_dtype"] = rng.choice((values["q_dtype"], values["q_dtype"], "e4m3", "e5m2"))
        if fixed is not None:
            names = SPEC_FIELDS + FAST_FIELDS if for_fast else SPEC_FIELDS
            values.update({name: getattr(fixed, name) for name in names})
            if fixed.finish:
                values.update(splits="1", sinks=False)
        config = Config(**values, seed=rng.randrange(2**31))
        if config.allowed():
            return config


def covering(
    count: int, tries: int, new: Callable[[], Config], names: tuple[str, ...], seen: set[Pair]
) -> list[Config]:
    """Configurations, each the one of some random ones that shows most pairs not ``seen`` yet."""
    chosen = []
    for _ in range(count):
        best = max(
            (new() for _ in range(tries)), key=lambda c: sum(p not in seen for p in pairs(c, names))
        )
        seen.update(pairs(best, names))
        chosen.append(best)
    return chosen


def sweep(count: int, specialisations: int, seed: int) -> list[Config]:
    """``count`` configurations that compile at most ``specialisations`` kernels of stage 1."""
    rng = random.Random(seed)
    # What is free to go to the fast kernel goes to the readable one where strides forbid it.
    fast_bases = max(specialisations // 4, 1)
    others = max(specialisations - 2 * fast_bases, 1)
    bases = covering(others, 60, lambda: draw(rng, None), SPEC_FIELDS, set())
    names = SPEC_FIELDS + FAST_FIELDS
    bases += covering(fast_bases, 60, lambda: draw(rng, None, True), names, set())
    seen: set[Pair] = set()
    turn = itertools.cycle(bases)
    configs = []
    for _ in range(count):
        base = next(turn)

        def new(base: Config = base) -> Config:
            return draw(rng, base, base.kernel == "auto")

        configs += covering(1, 6, new, tuple(LEVELS), seen)
    return configs


def kernels(configs: list[Config]) -> set[str]:
    """Specialisations that the configurations compile, of stage 1 and of the fast kernel."""
    entries = (fast_entry(c) or specs.entry("paged_split_k", _stage_1(c)) for c in configs)
    return set(entries)


def _stage_1(config: Config) -> specs.KernelSpec:
    return replace(case_of(config).spec, finish=config.finish, tree=config.deterministic)


def fast_entry(config: Config) -> str | None:
    """The fast kernel's specialisation that a configuration compiles; None if it goes elsewhere."""
    if config.kernel != "auto":
        return None
    problem = build(case_of(config))
    heads = case_of(config).heads
    out = np.empty(
        (*problem.q.shape[:2], heads.value_dim),
        np.float32 if config.float32_out else problem.q.dtype,
    )
    forms = {"q": config.q_form, "block_table": config.table_form, "seq_lens": config.lens_form}
    arrays = {
        name: _FORMS[form](getattr(problem, name))
        for name, form in forms.items()
        if form not in ("int64", "list")
    }
    problem = replace(problem, **arrays)
    if config.out_form == "apart":
        out = _apart(out)
    options = {name: x for name, x in problem.options.items() if name != "scale"}
    kv_dtype = options.get("kv_dtype")
    if fast.refusal(*problem.arrays, out=out, kv_dtype=kv_dtype) is not None:
        return None
    return fast.spec_of(problem.q, problem.k_cache, out=out, **options).entry


def coverage(configs: list[Config]) -> tuple[int, int]:
    """Pairs of options that meet in the configurations, and pairs that could."""
    met = {p for c in configs for p in pairs(c)}
    rng = random.Random(0)
    possible = set(met)
    for _ in range(4_000):
        possible.update(pairs(draw(rng, None)))
    return len(met), len(possible)


# ---------------------------------------------------------------------- one call


_LENS = {
    "one": (21,),
    "ragged": (0, 1, 50, 17),
    "empty": (0, 0),
    "edges": (15, 16, 17, 31, 32, 33),
    "long": (3, 200),
}


def case_of(config: Config) -> Case:
    kv_heads = 1 if config.group > 16 else 2
    lens = _LENS[config.lens]
    splits: dict[str, Any] = {}
    if config.splits.isdigit():
        splits["num_splits"] = int(config.splits)
    elif config.splits.startswith("size"):
        splits["split_size"] = int(config.splits.split()[1])
    elif config.splits == "bounds":
        splits["bounds"] = tuple((0, n // 3, n // 3, n) for n in lens)
    elif config.splits != "auto":
        splits["policy"] = config.splits
    return Case(
        "sweep",
        lens,
        cd.HeadConfig(config.group * kv_heads, kv_heads, *config.dims),
        block_size=config.block_size,
        dtype=config.q_dtype,
        kv_dtype=config.kv_dtype,
        layout=config.layout,  # type: ignore[arg-type]
        window=config.window,
        logits_soft_cap=2.0 if config.soft_cap else None,
        alibi=config.alibi,
        sinks=config.sinks,
        scale=config.scale,
        scales=config.scales,  # type: ignore[arg-type]
        out_dtype="float32" if config.float32_out else None,
        seed=config.seed,
        **splits,
    )


def _apart(array: np.ndarray) -> np.ndarray:
    wide = np.full((*array.shape[:-1], array.shape[-1] * 3), 77, array.dtype)
    wide[..., 1::3] = array
    return wide[..., 1::3]


_FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "plain": lambda x: x,
    "int32": lambda x: x,
    "int64": lambda x: x.astype(np.int64),
    "list": lambda x: x.tolist(),
    "turned": lambda x: np.ascontiguousarray(x.T).T,
    "apart": _apart,
}


def check(config: Config, backend: str) -> str | None:
    """Run one configuration; what is wrong with its result, or None."""
    case = case_of(config)
    problem = build(case, HUGE if config.poison == "huge" else float("nan"), 2**31 - 1)
    try:
        out, lse = call(config, case, problem, backend)
        ref = cd.reference.decode_attention(*problem.arrays, **problem.options)
        bound = tolerance.bound(*problem.arrays, *ref, out_dtype=out.dtype, **problem.options)
        tolerance.assert_close(out, lse, *ref, bound)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def call(
    config: Config, case: Case, problem: Problem, backend: str
) -> tuple[np.ndarray, np.ndarray]:
    """The call that a configuration describes; results on the host."""
    xp: Any = np
    if backend == "cuda":
        import cupy as xp

    def put(x: Any) -> Any:
        return on_device(x, xp) if backend == "cuda" and isinstance(x, np.ndarray) else x

    def back(x: Any) -> np.ndarray:
        return x.get() if backend == "cuda" else x

    q = put(_FORMS[config.q_form](problem.q))
    caches = [put(problem.k_cache), put(problem.v_cache)]
    table = put(_FORMS[config.table_form](problem.block_table))
    lens = put(_FORMS[config.lens_form](problem.seq_lens))
    options = {name: put(x) for name, x in problem.options.items()}
    shape = (*problem.q.shape[:2], case.heads.value_dim)
    out_dtype = np.dtype(np.float32 if config.float32_out else DTYPES[config.q_dtype])
    out = None
    if config.out_form != "new":
        form = "plain" if config.out_form == "given" else "apart"
        out = put(_FORMS[form](np.full(shape, 7, out_dtype)))
    how: dict[str, Any] = dict(backend=backend, kernel=config.kernel)
    how.update(deterministic=config.deterministic)
    if config.call == "decode" and config.splits == "auto":
        result = cd.decode_attention(q, *caches, table, lens, out=out, **how, **options)
    elif config.call == "decode":
        # Rules by number go in as numbers: on a GPU the plan is then made on the device.
        rule: dict[str, Any] = dict(num_splits=case.num_splits, split_size=case.split_size)
        if case.num_splits is None and case.split_size is None:
            rule = dict(plan=case.plan())
        result = cd.decode_attention(q, *caches, table, lens, out=out, **how, **rule, **options)
    elif config.call == "stages":
        sinks = options.pop("sinks", None)
        tree = config.deterministic
        states = cd.paged_split_k(
            q, *caches, table, lens, case.plan(), backend=backend, deterministic=tree, **options
        )
        result = cd.reduce_splits(states, sinks=sinks, out=out, dtype=out_dtype, backend=backend)
    else:
        plan = None if config.splits == "auto" else case.plan().to(xp)
        kv_dtype = options.pop("kv_dtype", None)
        step = cd.DecodeStep(
            case.heads, plan, problem.q.dtype, kv_dtype=kv_dtype, out_dtype=out_dtype,
            batch=len(problem.q) if plan is None else None, **how,
        )  # fmt: skip
        result = step(q, *caches, table, lens, **options)
        step.check()
    return back(result[0]).copy(), back(result[1])


def shrink(config: Config, wrong: Callable[[Config], bool]) -> Config:
    """The simplest configuration that is still wrong, one option at a time."""
    plainest = Config()
    changed = True
    while changed:
        changed = False
        for field in fields(Config):
            simpler = replace(config, **{field.name: getattr(plainest, field.name)})
            if simpler != config and simpler.allowed() and wrong(simpler):
                config, changed = simpler, True
    return config


def failures(configs: list[Config], backend: str) -> list[str]:
    """What is wrong, configuration by configuration, each made as simple as it gets."""
    found = []
    for config in configs:
        if check(config, backend):
            least = shrink(config, lambda c: check(c, backend) is not None)
            found.append(f"{least}\n    {check(least, backend)}")
    return found


def _share(job: tuple[list[Config], str]) -> tuple[int, list[str]]:
    return len(job[0]), failures(*job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["reference", "emulator", "cuda"], default="emulator")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--specialisations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.backend == "cuda":
        try:
            backends.runner("cuda")
        except backends.BackendUnavailableError as error:
            parser.exit(2, f"error: {error}\n")
    configs = sweep(arguments.count, arguments.specialisations, arguments.seed)
    met, possible = coverage(configs)
    to_fast = sum(fast_entry(config) is not None for config in configs)
    print(
        f"{len(configs)} configurations, {to_fast} of them for the fast kernel, "
        f"{len(kernels(configs))} specialisations; "
        f"{met} of {possible} pairs of options meet ({met / possible:.1%})"
    )
    # One specialisation stays with one process: each is compiled once.
    by_base: dict[Any, list[Config]] = {}
    for config in configs:
        by_base.setdefault(tuple(getattr(config, name) for name in SPEC_FIELDS), []).append(config)
    jobs = [
        (part[i : i + 5], arguments.backend)
        for part in by_base.values()
        for i in range(0, len(part), 5)
    ]
    wrong: list[str] = []
    pool = multiprocessing.get_context("spawn").Pool(arguments.processes)
    with pool, tqdm(total=len(configs), unit="calls") as bar:
        for done, found in pool.imap_unordered(_share, jobs):
            bar.update(done)
            wrong += found
    print(*wrong, sep="\n")
    print(f"{len(wrong)} mismatches")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
