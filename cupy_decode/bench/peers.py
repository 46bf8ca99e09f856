"""Other packages' paged decode kernels, where they are installed, on the arrays of a ``Problem``.

Each adapter prepares what an engine prepares once per step (plans, metadata, output buffers) and
returns a launch per cache. Torch tensors share the arrays' memory, and torch runs on CuPy's current
stream, so that a launch can be captured like any other. Unused entries of the block table are 0
here: not every kernel leaves them alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_decode.bench.problems import Problem

Launches = list[Callable[[], Any]]


@dataclass(frozen=True)
class _Step:
    """A problem as torch tensors."""

    q: Any
    caches: list[tuple[Any, Any]]
    table: Any
    lens: Any
    pages: Any
    host_lens: np.ndarray
    page_size: int
    scale: float

    @property
    def heads(self) -> tuple[int, int, int]:
        """(num_q_heads, num_kv_heads, head_dim)."""
        return self.q.shape[1], self.caches[0][0].shape[2], self.q.shape[2]

    @property
    def longest(self) -> int:
        return int(self.host_lens.max())

    @property
    def page_counts(self) -> np.ndarray:
        return -(-self.host_lens // self.page_size)

    def tensor(self, values: Any) -> Any:
        """int32 numbers on the device."""
        import torch

        return torch.as_tensor(np.asarray(values, np.int32), device=self.q.device)

    def offsets(self, counts: Any) -> Any:
        """0 and the running sums of the counts, on the device."""
        return self.tensor(np.concatenate([[0], np.cumsum(counts)]))


def _step(p: Problem) -> _Step:
    import torch

    width = np.arange(p.block_table.shape[1])
    lens = p.seq_lens.get()
    page_size = p.k_caches[0].shape[1]
    used = width < -(-lens[:, None] // page_size)
    table = np.where(used, p.block_table.get(), 0).astype(np.int32)
    q = torch.from_dlpack(p.q)
    return _Step(
        q,
        [
            (torch.from_dlpack(k), torch.from_dlpack(v))
            for k, v in zip(p.k_caches, p.v_caches, strict=True)
        ],
        torch.as_tensor(table, device=q.device),
        torch.from_dlpack(p.seq_lens),
        torch.from_dlpack(p.pages),
        lens,
        page_size,
        p.heads.head_dim**-0.5,
    )


def _launches(step: _Step, call: Callable[[Any, Any], Any]) -> Launches:
    """One launch per cache, on the stream that is CuPy's current one when it is called."""
    import cupy
    import torch

    def one(k: Any, v: Any) -> Callable[[], Any]:
        def go() -> Any:
            stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)
            with torch.cuda.stream(stream):
                return call(k, v)

        return go

    torch.cuda.synchronize()  # what was prepared on torch's own stream is complete
    return [one(k, v) for k, v in step.caches]


def cudnn_paged(p: Problem) -> Launches:
    """cuDNN's attention graph with paged K and V, through nvidia-cudnn-frontend."""
    import cudnn
    import cupy
    import torch

    step = _step(p)
    (batch, num_q_heads, head_dim), num_kv_heads = step.q.shape, step.heads[1]
    io = {"torch.bfloat16": cudnn.data_type.BFLOAT16, "torch.float16": cudnn.data_type.HALF}
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=io[str(step.q.dtype)],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )

    def declare(name: str, dim: list[int], stride: list[int], **options: Any) -> Any:
        return graph.tensor(name=name, dim=dim, stride=stride, **options)

    num_pages, page, width = step.caches[0][0].shape[0], step.page_size, step.table.shape[1]
    q_dim = [batch, num_q_heads, 1, head_dim]
    q_stride = [num_q_heads * head_dim, head_dim, num_q_heads * head_dim, 1]
    kv_dim = [num_pages, num_kv_heads, page, head_dim]
    kv_stride = [page * num_kv_heads * head_dim, head_dim, num_kv_heads * head_dim, 1]
    q, k, v = (
        declare("q", q_dim, q_stride),
        declare("k", kv_dim, kv_stride),
        declare("v", kv_dim, kv_stride),
    )
    int32 = dict(data_type=cudnn.data_type.INT32)
    tables = [declare(n, [batch, 1, width, 1], [width, width, 1, 1], **int32) for n in ("kt", "vt")]
    lens = [declare(n, [batch, 1, 1, 1], [1, 1, 1, 1], **int32) for n in ("q_len", "kv_len")]
    out, _ = graph.sdpa(
        name="decode",
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=step.scale,
        use_padding_mask=True,
        seq_len_q=lens[0],
        seq_len_kv=lens[1],
        paged_attention_k_table=tables[0],
        paged_attention_v_table=tables[1],
        paged_attention_max_seq_len_kv=step.longest,
    )
    out.set_output(True).set_dim(q_dim).set_stride(q_stride)
    graph.build([cudnn.heur_mode.A])
    scratch = torch.empty(
        max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=step.q.device
    )
    result, ones = torch.empty_like(step.q), step.tensor(np.ones(batch))
    fixed = {q: step.q, tables[0]: step.table, tables[1]: step.table, out: result}
    fixed |= {lens[0]: ones, lens[1]: step.lens}

    def call(k_cache: Any, v_cache: Any) -> Any:
        cudnn.set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
        graph.execute({**fixed, k: k_cache, v: v_cache}, scratch, handle=handle)
        return result

    return _launches(step, call)


def flash_attention_3(p: Problem) -> Launches:
    """FlashAttention-3 with a page table; its scheduler metadata is computed once."""
    import flash_attn_interface as fa

    step = _step(p)
    num_q_heads, num_kv_heads, head_dim = step.heads
    metadata = fa.get_scheduler_metadata(
        len(step.host_lens),
        1,
        step.longest,
        num_q_heads,
        num_kv_heads,
        head_dim,
        step.lens,
        qkv_dtype=step.q.dtype,
        page_size=step.page_size,
        causal=True,
    )

    def call(k_cache: Any, v_cache: Any) -> Any:
        out = fa.flash_attn_with_kvcache(
            step.q[:, None],
            k_cache,
            v_cache,
            cache_seqlens=step.lens,
            page_table=step.table,
            softmax_scale=step.scale,
            causal=True,
            scheduler_metadata=metadata,
        )
        return out[:, 0]

    return _launches(step, call)


def flashinfer_decode(p: Problem) -> Launches:
    """FlashInfer's batch decode: on tensor cores from 4 query heads per KV head, as it advises."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    step = _step(p)
    num_q_heads, num_kv_heads, head_dim = step.heads
    last = (step.host_lens - 1) % step.page_size + 1
    page_list = [step.offsets(step.page_counts), step.pages, step.tensor(last)]
    names = ("indptr", "indices", "last_page_len")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(512 << 20, dtype=torch.uint8, device=step.q.device),
        "NHD",
        use_tensor_cores=num_q_heads >= 4 * num_kv_heads,
        use_cuda_graph=True,
        **{f"paged_kv_{n}_buffer": x.clone() for n, x in zip(names, page_list, strict=True)},
    )
    wrapper.plan(
        *page_list,
        num_q_heads,
        num_kv_heads,
        head_dim,
        step.page_size,
        q_data_type=step.q.dtype,
        kv_data_type=step.q.dtype,
        sm_scale=step.scale,
    )
    out = torch.empty_like(step.q)
    return _launches(step, lambda k, v: wrapper.run(step.q, (k, v), out=out))


def vllm_unified(p: Problem) -> Launches:
    """vLLM's Triton kernel for mixed batches, with its own rule for splitting."""
    import torch
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    step = _step(p)
    num_q_heads, num_kv_heads, head_dim = step.heads
    batch, segments = len(step.host_lens), 16
    float32 = dict(dtype=torch.float32, device=step.q.device)
    sums = [torch.empty(batch, num_q_heads, segments, **float32) for _ in range(2)]
    outs = torch.empty(batch, num_q_heads, segments, head_dim, **float32)
    starts, out = step.offsets(np.ones(batch)), torch.empty_like(step.q)

    def call(k_cache: Any, v_cache: Any) -> Any:
        unified_attention(
            q=step.q,
            k=k_cache,
            v=v_cache,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=step.lens,
            max_seqlen_k=step.longest,
            softmax_scale=step.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=step.table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=128 // num_kv_heads,
            num_par_softmax_segments=segments,
            softmax_segm_output=outs,
            softmax_segm_max=sums[0],
            softmax_segm_expsum=sums[1],
        )
        return out

    return _launches(step, call)


def sglang_triton(p: Problem) -> Launches:
    """SGLang's Triton decode kernel, which addresses every key by its slot; at most 8 splits."""
    import torch
    from sglang.srt.layers.attention.triton_backend import get_num_kv_splits_triton
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

    step = _step(p)
    num_q_heads, num_kv_heads, head_dim = step.heads
    batch, most = len(step.host_lens), 8
    pages = np.split(step.pages.cpu().numpy(), np.cumsum(step.page_counts)[:-1])
    slots = [
        (ids[:, None] * step.page_size + np.arange(step.page_size)).reshape(-1)[:length]
        for ids, length in zip(pages, step.host_lens, strict=True)
    ]
    indices = torch.as_tensor(np.concatenate(slots).astype(np.int64), device=step.q.device)
    starts, splits = step.offsets(step.host_lens), step.tensor(np.ones(batch))
    sms = torch.cuda.get_device_properties(step.q.device).multi_processor_count
    get_num_kv_splits_triton[(1,)](
        splits,
        step.lens,
        batch,
        1,
        num_q_heads,
        num_kv_heads,
        most,
        sms,
        MAX_NUM_SEQ=max(256, 1 << (batch - 1).bit_length()),
    )
    float32 = dict(dtype=torch.float32, device=step.q.device)
    partial_out = torch.empty(batch, num_q_heads, most, head_dim, **float32)
    partial_lse = torch.empty(batch, num_q_heads, most, **float32)
    out = torch.empty_like(step.q)

    def call(k_cache: Any, v_cache: Any) -> Any:
        decode_attention_fwd(
            step.q,
            k_cache.view(-1, num_kv_heads, head_dim),
            v_cache.view(-1, num_kv_heads, head_dim),
            out,
            starts,
            indices,
            partial_out,
            partial_lse,
            splits,
            most,
            step.scale,
            1.0,
            1.0,
        )
        return out

    return _launches(step, call)


@dataclass(frozen=True)
class Peer:
    """A package's kernel.

    Attributes
    ----------
    launches : callable
        A contestant for ``compare``.
    module : str
        What must be importable.
    package : str
        What to install for it.
    """

    launches: Callable[[Problem], Launches]
    module: str
    package: str


PEERS = {
    "cudnn": Peer(cudnn_paged, "cudnn", "nvidia-cudnn-frontend"),
    "flashinfer": Peer(flashinfer_decode, "flashinfer", "flashinfer-python"),
    "fa3": Peer(flash_attention_3, "flash_attn_interface", "flash-attn-3"),
    "vllm": Peer(vllm_unified, "vllm", "vllm"),
    "sglang": Peer(sglang_triton, "sglang", "sglang"),
}


def peer(name: str) -> Peer:
    """A peer by name.

    Raises
    ------
    ValueError
        If there is no such peer.
    """
    if name not in PEERS:
        raise ValueError(f"there is no peer {name!r}; the peers are {', '.join(PEERS)}")
    return PEERS[name]


def unavailable(name: str) -> str | None:
    """Why a peer cannot be timed here, or None when it can; ValueError where there is none."""
    found = peer(name)
    try:
        importlib.import_module("torch")
        importlib.import_module(found.module)
    except (ImportError, OSError) as error:  # OSError: a library that it links to is missing
        return f"{name} is left out: {found.package} cannot be imported ({error})"
    return None


def version(name: str) -> str:
    """Package and version that a peer's module comes from."""
    module = PEERS[name].module
    found = importlib.metadata.packages_distributions().get(module)
    if not found:
        return f"{module} of unknown version"
    return f"{found[0]} {importlib.metadata.version(found[0])}"
