"""Every specialisation that the tests run compiles for every architecture, without a GPU.

And none of them spills, but for those of the fast kernel that are named here with their bytes, and
a few registers of the readable one where it adds along a tree.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import kernels_cu
from cupy_decode import fast, specs
from cupy_decode.bench import study

from .decode_cases import all_specs

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason="needs CuPy, NVRTC and the CUDA headers: pip install '.[compile]'",
    ),
]

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_120")


#: A batch of one is a kernel of its own. The two types differ in a few instructions: to save time
#: one of them is compiled for a few shapes only.
FAST_SPECS = [
    *(
        fast.FastSpec("bfloat16", head_dim, num_kv_heads=8, group_size=group_size, one=one)
        for one, head_dim, group_size in product(
            (False, True), fast.MAX_HEADS_PER_TILE, (1, 4, 8, 16)
        )
    ),
    *(fast.FastSpec("float16", 128, num_kv_heads=8, group_size=g) for g in (4, 16)),
    *(
        fast.FastSpec("bfloat16", 128, num_kv_heads=8, group_size=g, one=one, small=True)
        for one, g in product((False, True), (4, 8))
    ),
]
#: The fast kernel with options: what they are called here, and what is compiled.
FAST_OPTIONS: dict[str, dict[str, Any]] = {
    "blocks": dict(options=("ANY_BLOCK",)),
    "parts": dict(options=("BLOCK_PARTS",)),
    "scores": dict(options=("SOFT_CAP", "ALIBI", "WINDOW", "SINKS")),
    "e4m3": dict(kv_dtype="e4m3", options=("SCALES",)),
    "overlap": dict(options=("OVERLAP",)),
    "all": dict(kv_dtype="e5m2", out_dtype="float32", options=fast.OPTIONS),
}
#: Bytes a thread spills at most of the readable kernel's trees.
TREE_SPILL = 36
#: Bytes of shared memory of an SM, by the architectures that the fast kernel is compiled for.
SHARED_PER_SM = {"sm_80": 167936, "sm_89": 102400, "sm_90": 233472, "sm_120": 102400}
#: Bytes a thread spills at most where registers are not enough for the fast kernel:
#: (architecture, head_dim, heads_per_tile) -> bytes, in steps of 64 since a few move with any
#: change. All others spill nothing.
FAST_SPILLS = {("sm_90", 128, 16): 64}
#: The same with options and 8 heads: (architecture, head_dim, option) -> bytes.
FAST_OPTION_SPILLS = {
    ("sm_90", 64, "overlap"): 64,
    ("sm_90", 128, "all"): 128,
    ("sm_90", 128, "e4m3"): 128,
    ("sm_90", 128, "overlap"): 128,
    ("sm_90", 128, "scores"): 64,
    ("sm_90", 256, "overlap"): 64,
    ("sm_90", 256, "scores"): 64,
}


def entries(name: str, arch: str) -> list[str]:
    """Specialisations of a kernel, without bfloat16 where the architecture has none."""
    by_kernel = {
        "paged_split_k": [
            *all_specs(),
            *(replace(s, finish=False, tree=True) for s in all_specs()),
        ],
        "plan_splits": [specs.KernelSpec(plan_rule=rule) for rule in specs.PLAN_RULES],
    }
    dtypes = [specs.KernelSpec(dtype) for dtype in ("float32", "float16", "bfloat16")]
    found = [specs.entry(name, spec) for spec in by_kernel.get(name, dtypes)]
    return [e for e in dict.fromkeys(found) if arch != "sm_75" or "bfloat16" not in e]


def spilling(name: str, wanted: list[str], arch: str) -> dict[str, int]:
    """Bytes spilled by those specialisations that spill; all of them compile."""
    from cupy_decode.backends import nvrtc

    used = nvrtc.resources(name, wanted, arch)
    assert sorted(used) == sorted(wanted)
    assert all(0 < r.registers <= 255 for r in used.values())
    spills = {e: max(r.spill_stores, r.spill_loads) for e, r in used.items()}
    return {e: spilled for e, spilled in spills.items() if spilled}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(set(kernels_cu.names()) & set(specs.KERNELS)))
def test_compiles_without_spills(name: str, arch: str) -> None:
    trees = {e for e in entries(name, arch) if name == "paged_split_k" and e.endswith("true>")}
    for entry, spilled in spilling(name, entries(name, arch), arch).items():
        assert spilled <= (TREE_SPILL if entry in trees else 0), entry


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("read_pages", [f"read_pages<{d // 8}, 1>" for d in fast.MAX_HEADS_PER_TILE]),
        ("read_stream", ["read_stream<16>"]),
    ],
)
def test_the_floors_compile_without_spills(name: str, wanted: list[str], arch: str) -> None:
    assert not spilling(name, wanted, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_the_steps_to_the_fast_kernel_compile_without_spills(arch: str) -> None:
    wanted = [one.entry(dtype) for one in study.STUDIES.values() for dtype in study.DTYPES]
    assert not spilling("study_mma", wanted, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_the_loose_floor_has_the_registers_it_is_meant_to_have(arch: str) -> None:
    from cupy_decode.backends import nvrtc

    wanted = [f"read_pages<{head_dim // 8}, 6>" for head_dim in fast.MAX_HEADS_PER_TILE]
    for used in nvrtc.resources("read_pages", wanted, arch).values():
        assert used.registers <= 40
        assert used.spill_stores <= 16


def on(arch: str, spec: fast.FastSpec) -> fast.FastSpec:
    """The specialisation that GPUs of this architecture take; overlap needs sm_90."""
    options = tuple(o for o in spec.options if o != "OVERLAP" or arch in ("sm_90", "sm_120"))
    room = fast.Machine(shared_per_sm=SHARED_PER_SM[arch]).room
    return replace(spec, room=room, options=options)


@pytest.mark.parametrize("arch", SHARED_PER_SM)
@pytest.mark.parametrize("head_dim", fast.MAX_HEADS_PER_TILE)
def test_the_fast_kernel_compiles_and_spills_no_more_than_is_known(
    head_dim: int, arch: str
) -> None:
    specs_there = [on(arch, spec) for spec in FAST_SPECS if spec.head_dim == head_dim]
    chosen = {spec.entry: spec for spec in specs_there if spec.stages >= 2}
    # only heads of 256, or 16 of 128, may need more shared memory than some have
    assert all(s.stages >= 2 for s in specs_there if head_dim * max(s.heads_per_tile, 8) <= 1024)
    for entry, spilled in spilling("paged_split_k_mma", list(chosen), arch).items():
        spec = chosen[entry]
        known = FAST_SPILLS.get((arch, head_dim, spec.heads_per_tile), 0)
        assert spilled <= known, entry


@pytest.mark.parametrize("arch", SHARED_PER_SM)
@pytest.mark.parametrize("head_dim", fast.MAX_HEADS_PER_TILE)
def test_the_fast_kernel_with_options_spills_no_more_than_is_known(
    head_dim: int, arch: str
) -> None:
    specs_there = {
        name: on(arch, fast.FastSpec("bfloat16", head_dim, 8, 8, **more))
        for name, more in FAST_OPTIONS.items()
    }
    chosen = {spec.entry: name for name, spec in specs_there.items() if spec.stages >= 2}
    assert head_dim == 256 or len(chosen) == len(FAST_OPTIONS)
    found = spilling("paged_split_k_mma", list(chosen), arch)
    for entry, spilled in found.items():
        key = (arch, head_dim, chosen[entry])
        assert spilled <= FAST_OPTION_SPILLS.get(key, 0), (entry, spilled)


def test_every_kernel_is_compiled_somewhere_here() -> None:
    apart = {"paged_split_k_mma", "read_pages", "read_stream", "study_mma"}
    assert set(kernels_cu.names()) - set(specs.KERNELS) == apart


def test_float32_needs_no_half_headers() -> None:
    from cupy_decode.backends import nvrtc

    spec = specs.KernelSpec("float32", group_size=4)
    used = nvrtc.resources(
        "paged_split_k", [specs.entry("paged_split_k", spec)], "sm_90", ["-DCUPY_DECODE_FP32_ONLY"]
    )
    assert len(used) == 1


@pytest.mark.parametrize("header", ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"])
def test_a_missing_header_is_named_with_the_package_that_brings_it(header: str) -> None:
    from cupy_decode.backends import cuda

    log = f'merge_states.cu(9): catastrophic error: cannot open source file "{header}"\n 1 error'
    message = cuda._explain("merge_states", "merge_states<__half, 128>", log)
    for words in (header, "cupy-cuda13x[ctk]", "merge_states<__half, 128>", "catastrophic error"):
        assert words in message
