"""Paged KV-cache bookkeeping: the allocator, its block tables, and the checks over them."""

from cupy_decode.paging.kernel_blocks import (
    MultipleOf,
    block_table_width,
    choose_kernel_block_size,
    map_to_kernel_blocks,
    slot_mapping,
)
from cupy_decode.paging.pool import Allocation, BlockPool, PoolExhausted
from cupy_decode.paging.prefix_cache import chained_hash

__all__ = [
    "Allocation",
    "BlockPool",
    "MultipleOf",
    "PoolExhausted",
    "block_table_width",
    "chained_hash",
    "choose_kernel_block_size",
    "map_to_kernel_blocks",
    "slot_mapping",
]
