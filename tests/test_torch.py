"""Torch tensors in, torch tensors out: no copies, on torch's current stream."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import cupy_decode as cd

from .decode_cases import Case, Problem, build
from .test_operators import expect

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch"
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASE = Case("torch", (20, 0, 41), cd.HeadConfig(8, 2, 64), num_splits=2)


def tensor(array: Any, device: str) -> Any:
    """A tensor of the same values and strides; 8-bit floats by their bytes."""
    import ml_dtypes
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def tensors(problem: Problem, device: str) -> tuple[list[Any], dict[str, Any]]:
    options = {
        name: tensor(value, device) if isinstance(value, np.ndarray) else value
        for name, value in problem.options.items()
    }
    return [tensor(x, device) for x in problem.arrays], options


def host(x: Any) -> np.ndarray:
    import ml_dtypes
    import torch

    x = x.cpu()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_trip(dtype: str, device: str) -> None:
    import torch

    problem = build(Case("torch", (20, 0, 41), dtype=dtype, sinks=True, alibi=True))
    arrays, options = tensors(problem, device)
    for splits in ({}, {"num_splits": 1}, {"split_size": 16}):
        out, lse = cd.decode_attention(*arrays, **splits, **options)
        assert isinstance(out, torch.Tensor)
        assert isinstance(lse, torch.Tensor)
        assert out.dtype == arrays[0].dtype
        assert out.device == arrays[0].device
        expect(problem, host(out), host(lse))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
def test_8_bit_caches_keep_their_type(kv_dtype: str, device: str) -> None:
    import torch

    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kv_dtype]
    problem = build(
        Case("fp8", (20, 41), dtype="bfloat16", kv_dtype=kv_dtype, scales="head", num_splits=2)
    )
    (q, k_cache, v_cache, *rest), options = tensors(problem, device)
    del options["kv_dtype"]
    caches = k_cache.view(kind), v_cache.view(kind)
    expect(problem, *map(host, cd.decode_attention(q, *caches, *rest, num_splits=2, **options)))
    rows = [torch.zeros(1, 2, 64, device=device).to(kind) for _ in range(2)]
    cd.write_kv(*rows, *caches, torch.tensor([3], device=device))
    assert not host(k_cache)[0, 3].any()
    wrong = k_cache.view(torch.float8_e4m3fn), v_cache.view(torch.float8_e5m2)
    with pytest.raises(TypeError, match="one type"):
        cd.decode_attention(q, *wrong, *rest, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_is_the_callers_memory(device: str) -> None:
    import torch

    problem = build(CASE)
    arrays, _ = tensors(problem, device)
    out = torch.full((3, 8, 64), 7.0, device=device)
    got, lse = cd.decode_attention(*arrays, num_splits=2, out=out)
    assert got is out
    expect(problem, host(out), host(lse))
    # torch's default integers
    got, lse = cd.decode_attention(*arrays[:3], arrays[3].long(), arrays[4].long(), num_splits=2)
    expect(problem, host(got), host(lse))
    merged, merged_lse = cd.merge_states(out, lse, torch.zeros_like(out), lse - torch.inf)
    np.testing.assert_allclose(host(merged), host(out), rtol=1e-6)
    np.testing.assert_allclose(host(merged_lse), host(lse), rtol=1e-6)
    rows = torch.ones(1, 2, 64, device=device, requires_grad=True)
    cd.write_kv(rows, rows, *arrays[1:3], torch.tensor([5], device=device))
    assert (host(arrays[1])[0, 5] == 1).all()


@pytest.mark.gpu
def test_the_call_follows_torchs_current_stream() -> None:
    """Written late on a side stream, read right after on the same: nothing else may order them."""
    import torch

    problem = build(CASE)
    arrays, _ = tensors(problem, "cuda")
    wanted = cd.decode_attention(*arrays, num_splits=3)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        q = torch.full_like(arrays[0], float("nan"))
        torch.cuda._sleep(50_000_000)
        q.copy_(arrays[0])
        out, lse = cd.decode_attention(q, *arrays[1:], num_splits=3)
        late = out.clone(), lse.clone()
    side.synchronize()
    for got, want in zip(late, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_call_is_captured_in_torchs_graph() -> None:
    import torch

    problem = build(Case("torch", (2000, 0, 410), dtype="bfloat16"))
    arrays, _ = tensors(problem, "cuda")
    cd.decode_attention(*arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cd.decode_attention(*arrays, kernel="fast")
    out[...] = 0
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    expect(problem, host(out), host(lse))


@pytest.mark.gpu
def test_a_step_is_captured_in_torchs_graph() -> None:
    import cupy
    import torch

    problem = build(CASE)
    arrays, _ = tensors(problem, "cuda")
    step = cd.DecodeStep(CASE.heads, CASE.plan().to(cupy), np.float32)
    step(*arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step(*arrays)
    step.out[...] = 0
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    expect(problem, host(out), host(lse))


@pytest.mark.gpu
def test_tensors_of_two_places_are_refused() -> None:
    problem = build(CASE)
    (q, *rest), _ = tensors(problem, "cuda")
    with pytest.raises(ValueError, match="all tensors must be on one device; got cpu, cuda:0"):
        cd.decode_attention(q.cpu(), *rest)
    with pytest.raises(TypeError, match="block_table is a NumPy array but q is a CuPy array"):
        cd.decode_attention(q, *rest[:2], problem.block_table, rest[3])


def test_a_tensor_given_twice_stays_one() -> None:
    """``out=out_a`` merges in place: what is read and what is written are the same array."""
    import torch

    a, b = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    lse_a, lse_b = torch.randn(3, 2), torch.randn(3, 2)
    want, _ = cd.merge_states(a.clone(), lse_a, b, lse_b)
    out, _ = cd.merge_states(a, lse_a, b, lse_b, out=a)
    assert out is a
    torch.testing.assert_close(out.double(), want.double(), rtol=1e-6, atol=1e-6)
