"""One kernel as a CUDA file that compiles on its own, with a specialisation in it.

The kernels are templates: a compiler keeps nothing of one that nobody refers to.
"""

from __future__ import annotations

import kernels_cu
from cupy_decode import fast, specs
from cupy_decode.bench import study


def specialisation(name: str, dtype: str, head_dim: int, group_size: int) -> str:
    """C++ name expression of a kernel for one element type and head geometry.

    Raises
    ------
    ValueError
        If the kernel has no such specialisation.
    """
    if name == "paged_split_k_mma":
        if dtype == "float32" or head_dim not in fast.MAX_HEADS_PER_TILE:
            raise ValueError(
                "paged_split_k_mma takes float16 and bfloat16 and head_dim "
                f"{', '.join(map(str, fast.MAX_HEADS_PER_TILE))}; got {dtype} and {head_dim}"
            )
        return fast.FastSpec(dtype, head_dim, num_kv_heads=8, group_size=group_size).entry
    spec = specs.KernelSpec(dtype, head_dim=head_dim, group_size=group_size)
    if name == "read_pages":
        return f"read_pages<{head_dim * (4 if dtype == 'float32' else 2) // 16}, 1>"
    if name == "study_mma":
        if dtype == "float32" or head_dim != 128 or group_size > 8:
            raise ValueError(
                "study_mma takes float16 and bfloat16, head_dim 128 and group_size up to 8; got "
                f"{dtype}, {head_dim} and {group_size}"
            )
        return study.STUDIES["one launch"].entry(dtype)
    if name == "read_stream":
        return "read_stream<16>"
    return specs.entry(name, spec)


def source(name: str, dtype: str = "bfloat16", head_dim: int = 128, group_size: int = 4) -> str:
    """The text of one kernel, headers spliced in, ending in one specialisation that is kept.

    Parameters
    ----------
    name : str
        One of ``kernels_cu.names()``.
    dtype : {"float32", "float16", "bfloat16"}
    head_dim : int
    group_size : int
        Query heads per KV head.

    Returns
    -------
    str
        CUDA C++: ``nvcc -std=c++17 -arch=sm_90 -cubin`` leaves that specialisation in the cubin,
        and NVRTC takes others as name expressions.
    """
    entry = specialisation(name, dtype, head_dim, group_size)
    return (
        kernels_cu.source(name)
        + "\n// A specialisation to keep; write others here, or name them to NVRTC.\n"
        + "#ifndef __CUDACC_RTC__\n"
        + f"void* const kept_{name} = (void*){entry};\n"
        + "#endif\n"
    )
