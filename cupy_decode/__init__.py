"""cupy_decode: paged split-K decode attention, as CUDA sources you can read, run and change.

The operators take NumPy arrays (float64 reference, or the CUDA sources run on the CPU) and CuPy
arrays (the CUDA kernels). Importing this package never imports CuPy.
"""

from cupy_decode import grid, policies, reference, traffic
from cupy_decode.backends.emulator import EmulatorError, LaunchTrace, trace_launch
from cupy_decode.decode import (
    decode_attention,
    kernel,
    merge_states,
    paged_split_k,
    reduce_splits,
    write_kv,
)
from cupy_decode.device_plans import plan_splits_on_device
from cupy_decode.explanation import Explanation
from cupy_decode.heads import HeadConfig, presets
from cupy_decode.paging import (
    Allocator,
    BlockPool,
    BlockTableBuffer,
    MultipleOf,
    PoolExhausted,
    Shadow,
    ShadowPool,
    audit,
    block_table_width,
    choose_kernel_block_size,
    map_to_kernel_blocks,
    slot_mapping,
)
from cupy_decode.plan import Partials, SplitPlan
from cupy_decode.policies import Device, plan_splits
from cupy_decode.specs import KernelSpec
from cupy_decode.step import DecodeStep

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "BlockPool",
    "BlockTableBuffer",
    "DecodeStep",
    "Device",
    "EmulatorError",
    "Explanation",
    "HeadConfig",
    "KernelSpec",
    "LaunchTrace",
    "MultipleOf",
    "Partials",
    "PoolExhausted",
    "Shadow",
    "ShadowPool",
    "SplitPlan",
    "audit",
    "block_table_width",
    "choose_kernel_block_size",
    "decode_attention",
    "grid",
    "kernel",
    "map_to_kernel_blocks",
    "merge_states",
    "paged_split_k",
    "plan_splits",
    "plan_splits_on_device",
    "policies",
    "presets",
    "reduce_splits",
    "reference",
    "slot_mapping",
    "trace_launch",
    "traffic",
    "write_kv",
]
