"""Every specialisation that the tests run compiles for every architecture, without a GPU."""

from __future__ import annotations

import importlib.util

import pytest

import kernels_cu
from cupy_decode import specs

from .decode_cases import all_specs

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None,
        reason="needs CuPy, NVRTC and the CUDA headers: pip install '.[compile]'",
    ),
]

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_120")


def entries(name: str, arch: str) -> list[str]:
    """Specialisations of a kernel, without bfloat16 where the architecture has none."""
    by_kernel = {
        "paged_split_k": all_specs(),
        "plan_splits": [specs.KernelSpec(plan_rule=rule) for rule in specs.PLAN_RULES],
    }
    dtypes = [specs.KernelSpec(dtype) for dtype in ("float32", "float16", "bfloat16")]
    found = [specs.entry(name, spec) for spec in by_kernel.get(name, dtypes)]
    return [e for e in dict.fromkeys(found) if arch != "sm_75" or "bfloat16" not in e]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(set(kernels_cu.names()) & set(specs.KERNELS)))
def test_compiles_without_spills(name: str, arch: str) -> None:
    from cupy_decode.backends import nvrtc

    wanted = entries(name, arch)
    used = nvrtc.resources(name, wanted, arch)
    assert sorted(used) == sorted(wanted)
    spilling = {e: r for e, r in used.items() if r.spill_stores or r.spill_loads}
    assert not spilling


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
