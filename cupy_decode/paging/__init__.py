"""Paged KV-cache bookkeeping: the allocator, its block tables, and the checks over them."""

from cupy_decode.paging.audit import Allocator, Finding, audit
from cupy_decode.paging.kernel_blocks import (
    MultipleOf,
    block_table_width,
    choose_kernel_block_size,
    map_to_kernel_blocks,
    slot_mapping,
)
from cupy_decode.paging.pool import Allocation, BlockPool, PoolExhausted
from cupy_decode.paging.prefix_cache import chained_hash
from cupy_decode.paging.shadow import Shadow, ShadowPool, WrongSlot
from cupy_decode.paging.snapshot import Snapshot
from cupy_decode.paging.tables import BlockTableBuffer

__all__ = [
    "Allocation",
    "Allocator",
    "BlockPool",
    "BlockTableBuffer",
    "Finding",
    "MultipleOf",
    "PoolExhausted",
    "Shadow",
    "ShadowPool",
    "Snapshot",
    "WrongSlot",
    "audit",
    "block_table_width",
    "chained_hash",
    "choose_kernel_block_size",
    "map_to_kernel_blocks",
    "slot_mapping",
]
