"""Launch grids of decode attention: how many thread blocks there are, and how many SMs they reach.

The grid is the one of vLLM's Triton unified-attention launcher: query tokens are packed with the
query heads that share a KV head into tiles of ``block_m`` rows, and one thread block serves one
tile of one KV head. Every number here follows from the shapes alone; no GPU is involved.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupy_decode.heads import HeadConfig
from cupy_decode.heads import cdiv as cdiv

#: Query heads of one KV head that a thread block of the readable kernel serves at most.
MAX_HEADS_PER_BLOCK = 16
#: Rows of a query tile that tensor cores want at least.
MIN_BLOCK_M = 16
#: Keys of the shortest leaves (``leaves.cuh``).
MIN_LEAF = 64
#: Leaves of one sequence at most, over all the thread blocks of a row.
MAX_LEAVES = 512
#: vLLM splits only when the unsplit grid would hold fewer thread blocks than this.
MIN_GRID_2D = 128


def _at_least(name: str, value: int, least: int, unit: str) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least} {unit}; got {value}")


def head_tiles(heads: HeadConfig) -> int:
    """Thread blocks of the readable kernel that share the query heads of one KV head."""
    return cdiv(heads.group_size, MAX_HEADS_PER_BLOCK)


def blocks_per_row(heads: HeadConfig) -> int:
    """Thread blocks of the readable kernel for each row of a split plan.

    ``num_kv_heads * ceil(group_size / 16)``: one for each KV head and tile of query heads.

    Examples
    --------
    Llama-3-8B's 4 query heads share a thread block, Falcon-7B's 71 need five.

    >>> blocks_per_row(HeadConfig(32, 8, 128)), blocks_per_row(HeadConfig(71, 1, 64))
    (8, 5)
    """
    return heads.num_kv_heads * head_tiles(heads)


def max_leaves(blocks: int) -> int:
    """Leaves that one sequence is cut into at most where bits must not depend on the split.

    Their share of 512 thread blocks, so that a sequence alone fills a GPU whatever its heads; at
    least 8.

    Parameters
    ----------
    blocks : int
        ``blocks_per_row(heads)``.

    Examples
    --------
    >>> max_leaves(8), max_leaves(1)
    (64, 512)
    """
    return max(MAX_LEAVES // blocks, 8)


def leaf_keys(seq_len: int, heads: HeadConfig) -> int:
    """Keys of a leaf, the run that is added up in order: the host's copy of ``leaves.cuh``.

    The shortest power of two, from 64 on, that leaves the sequence at most ``max_leaves``. It
    follows from the length and the heads alone, and the bits of a result follow from it.

    Examples
    --------
    Llama-3-8B, at most 64 leaves:

    >>> [leaf_keys(s, HeadConfig(32, 8, 128)) for s in (0, 4096, 4097, 131072)]
    [64, 64, 128, 2048]
    """
    _at_least("seq_len", seq_len, 0, "keys")
    keys = MIN_LEAF
    while keys * max_leaves(blocks_per_row(heads)) < seq_len:
        keys *= 2
    return keys


def block_m(heads: HeadConfig) -> int:
    """Rows of one query tile: 16, or the next power of two when the group is larger."""
    return max(MIN_BLOCK_M, 1 << (heads.group_size - 1).bit_length())


def block_q(heads: HeadConfig) -> int:
    """Query tokens of one tile: ``block_m // group_size``."""
    return block_m(heads) // heads.group_size


def blocks_2d(num_query_tokens: int, batch: int, heads: HeadConfig) -> int:
    """Thread blocks of the unsplit grid, G_2D.

    Parameters
    ----------
    num_query_tokens : int
        Query tokens of the whole batch; equal to ``batch`` in pure decode.
    batch : int
        Sequences.
    heads : HeadConfig

    Returns
    -------
    int
        ``(num_query_tokens // block_q + batch) * num_kv_heads``. The launcher knows only the sum
        of the query lengths, so it allows one partly filled tile per sequence; tiles that turn
        out to have no query return at once.

    Raises
    ------
    ValueError
        If there is no sequence, or fewer query tokens than sequences.

    Examples
    --------
    >>> blocks_2d(1, 1, HeadConfig(32, 8, 128))
    8
    """
    _at_least("batch", batch, 1, "sequence")
    _at_least("num_query_tokens", num_query_tokens, batch, "(one query token per sequence)")
    return (num_query_tokens // block_q(heads) + batch) * heads.num_kv_heads


def blocks_3d(num_query_tokens: int, batch: int, heads: HeadConfig, num_splits: int) -> int:
    """Thread blocks of the split grid: ``blocks_2d`` times ``num_splits``."""
    _at_least("num_splits", num_splits, 1, "split")
    return blocks_2d(num_query_tokens, batch, heads) * num_splits


def sm_coverage(blocks: int, num_sms: int) -> float:
    """Share of the SMs that get at least one thread block, 0 to 1."""
    _at_least("blocks", blocks, 0, "thread blocks")
    _at_least("num_sms", num_sms, 1, "SM")
    return min(1.0, blocks / num_sms)


def idle_sms(blocks: int, num_sms: int) -> int:
    """SMs that no thread block reaches."""
    _at_least("blocks", blocks, 0, "thread blocks")
    _at_least("num_sms", num_sms, 1, "SM")
    return max(0, num_sms - blocks)


def first_wave_splits(blocks: int, num_sms: int) -> int:
    """Fewest splits that give every SM a thread block, S* = ceil(num_sms / blocks).

    Coverage of the first wave is a lower bound for a useful split count, not its optimum.

    Examples
    --------
    >>> first_wave_splits(8, 132)
    17
    """
    _at_least("blocks", blocks, 1, "thread block")
    _at_least("num_sms", num_sms, 1, "SM")
    return cdiv(num_sms, blocks)


def waves(blocks: int, num_sms: int, blocks_per_sm: int = 1) -> float:
    """Thread blocks over the number that runs at once; 1.0 is one full wave."""
    _at_least("blocks", blocks, 0, "thread blocks")
    _at_least("num_sms", num_sms, 1, "SM")
    _at_least("blocks_per_sm", blocks_per_sm, 1, "thread block")
    return blocks / (num_sms * blocks_per_sm)


def split_threshold(num_kv_heads: int, min_grid: int = MIN_GRID_2D) -> int:
    """Largest batch that vLLM still splits: ``min_grid // num_kv_heads``.

    A batch of at least this size fills ``min_grid`` thread blocks unsplit, since each sequence
    brings ``num_kv_heads`` of them.
    """
    _at_least("num_kv_heads", num_kv_heads, 1, "head")
    return min_grid // num_kv_heads


@dataclass(frozen=True)
class Segments:
    """Layout of one sequence under vLLM's segment rule.

    Attributes
    ----------
    seq_len : int
        Keys of the sequence.
    tiles_per_segment : int
        Key tiles that each segment owns.
    keys_per_segment : int
        The same in keys; the last active segment may own fewer.
    active : int
        Segments that own a key. Thread blocks of the others return at once, which keeps the
        launch grid independent of the lengths.
    """

    seq_len: int
    tiles_per_segment: int
    keys_per_segment: int
    active: int

    def bounds(self, segment: int) -> tuple[int, int]:
        """First key and end key of an active segment."""
        if not 0 <= segment < self.active:
            raise ValueError(f"segment must lie in 0..{self.active - 1}; got {segment}")
        begin = segment * self.keys_per_segment
        return begin, min(begin + self.keys_per_segment, self.seq_len)


def segments(seq_len: int, tile: int = 16, num_segments: int = 16) -> Segments:
    """Cut ``seq_len`` keys into at most ``num_segments`` runs of whole tiles.

    Every segment gets ``ceil(seq_len / (num_segments * tile))`` tiles and the last ones fall off
    the end, so s = 257 with 16 segments of 16-key tiles has 9 active segments, not 16.

    Parameters
    ----------
    seq_len : int
        Keys; 0 gives no active segment.
    tile : int
        Keys of one tile.
    num_segments : int

    Examples
    --------
    >>> segments(2560)
    Segments(seq_len=2560, tiles_per_segment=10, keys_per_segment=160, active=16)
    """
    _at_least("seq_len", seq_len, 0, "keys")
    _at_least("tile", tile, 1, "key")
    _at_least("num_segments", num_segments, 1, "segment")
    tiles = cdiv(seq_len, num_segments * tile)
    keys = tiles * tile
    return Segments(seq_len, tiles, keys, cdiv(seq_len, keys) if seq_len else 0)
