"""The emulator on kernels of its own: each check finds its fault, each twin computes the truth."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_decode as cd
import kernels_cu
from cupy_decode.backends import emulator
from cupy_decode.backends.emulator import build
from cupy_decode.specs import Arg, Launch

pytestmark = pytest.mark.emulator

_CTYPES: dict[type, Any] = {int: "i32", float: "f32", np.int64: "i64"}
SCHEDULES = ("forward", "reverse")


def run(
    text: str,
    *values: Any,
    entry: str = "k",
    grid: int | tuple[int, int, int] = 1,
    threads: int | tuple[int, int, int] = 32,
    shared: int = 0,
    **options: Any,
) -> Any:
    """Run the kernel ``entry`` of a text; the arguments are called a0, a1, ..."""
    args = tuple(Arg(f"a{i}", _CTYPES.get(type(v), "ptr"), v) for i, v in enumerate(values))
    dims = [d if isinstance(d, tuple) else (d, 1, 1) for d in (grid, threads)]
    launch = Launch("test", entry, dims[0], dims[1], shared, args, True)
    text = '#include "ptx.cuh"\n' + text
    return emulator.run(launch, source_text=text, **options)


def fault(match: str, text: str, *values: Any, **options: Any) -> emulator.EmulatorError:
    """Run a kernel that must be stopped, in both schedules; returns the forward error."""
    errors = []
    for schedule in SCHEDULES:
        with pytest.raises(emulator.EmulatorError, match=match) as caught:
            run(text, *values, schedule=schedule, **options)
        errors.append(caught.value)
    return errors[0]


def problem() -> tuple[np.ndarray, ...]:
    """A decode step of one sequence: q, k_cache, v_cache, block_table, seq_lens."""
    rng = np.random.default_rng(0)
    k_cache, v_cache = rng.standard_normal((2, 8, 16, 2, 64), np.float32)
    q = rng.standard_normal((1, 8, 64), np.float32)
    return q, k_cache, v_cache, np.array([[5, 2, 7]], np.int32), np.array([40], np.int32)


def floats(n: int, fill: float = 0.0) -> np.ndarray:
    return np.full(n, fill, np.float32)


# ---------------------------------------------------------------------- what a kernel computes


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_indices_cover_a_three_dimensional_launch(schedule: str) -> None:
    text = """__global__ void k(int* out) {
        const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1000 * block + thread;
    }"""
    out = np.zeros((24, 30), np.int32)
    run(text, out, grid=(2, 3, 4), threads=(5, 3, 2), schedule=schedule)
    np.testing.assert_array_equal(out, 1000 * np.arange(24)[:, None] + np.arange(30))


def test_scalars_arrive_with_their_types() -> None:
    text = """__global__ void k(double* out, int i, long long l, float f) {
        out[0] = i, out[1] = l, out[2] = f;
    }"""
    out = np.zeros(3)
    run(text, out, -3, np.int64(-(2**40)), 0.1, threads=1)
    np.testing.assert_array_equal(out, [-3, -(2**40), np.float32(0.1)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_reverse_blocks_warps_and_lanes(schedule: str) -> None:
    text = """__global__ void k(int* order, int* next) {
        order[atomicAdd(next, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
    }"""
    order = np.full(192, -1, np.int32)
    run(text, order, np.zeros(1, np.int32), grid=2, threads=96, schedule=schedule)
    expected = np.arange(192) if schedule == "forward" else np.arange(192)[::-1]
    np.testing.assert_array_equal(order, expected)


def test_shuffles() -> None:
    text = """__global__ void k(int* out) {
        const int x = threadIdx.x * 10;
        int* row = out + threadIdx.x;
        row[0] = __shfl_sync(~0u, x, 5);
        row[32] = __shfl_sync(~0u, x, 9, 8);
        row[64] = __shfl_xor_sync(~0u, x, 16);
        row[96] = __shfl_up_sync(~0u, x, 3);
        row[128] = __shfl_down_sync(~0u, x, 3);
        row[160] = __shfl_down_sync(~0u, x, 3, 8);
    }"""
    out = np.zeros((6, 32), np.int32)
    run(text, out)
    lane = np.arange(32)
    expected = [
        np.full(32, 5),
        lane // 8 * 8 + 1,
        lane ^ 16,
        np.where(lane < 3, lane, lane - 3),
        np.where(lane > 28, lane, lane + 3),
        np.where(lane % 8 > 4, lane, lane + 3),
    ]
    np.testing.assert_array_equal(out, 10 * np.array(expected))


def test_a_shuffle_moves_eight_bytes() -> None:
    text = """__global__ void k(double* x) {
        x[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], 1);
    }"""
    x = np.random.default_rng(0).standard_normal(32)
    expected = x.reshape(16, 2)[:, ::-1].reshape(-1).copy()
    run(text, x)
    np.testing.assert_array_equal(x, expected)


def test_votes_and_reductions() -> None:
    text = """__global__ void k(unsigned* out, const int* x) {
        const int lane = threadIdx.x, v = x[lane];
        unsigned r[9] = {__ballot_sync(~0u, v > 0), (unsigned)__any_sync(~0u, v == 7),
                         (unsigned)__all_sync(~0u, v > -100), (unsigned)__reduce_add_sync(~0u, v),
                         (unsigned)__reduce_max_sync(~0u, v), (unsigned)__reduce_min_sync(~0u, v),
                         __reduce_max_sync(~0u, (unsigned)v), __reduce_or_sync(~0u, (unsigned)v),
                         __reduce_xor_sync(~0u, (unsigned)v)};
        for (int i = 0; i < 9; i++) out[i * 32 + lane] = r[i];
    }"""
    x = np.random.default_rng(1).integers(-50, 50, 32).astype(np.int32)
    x[13] = 7
    out = np.zeros((9, 32), np.uint32)
    run(text, out, x)
    u = x.astype(np.uint32)
    expected = [
        int(sum(1 << i for i in range(32) if x[i] > 0)),
        1,
        1,
        *(int(v) & 0xFFFFFFFF for v in (x.sum(), x.max(), x.min())),
        int(u.max()),
        int(np.bitwise_or.reduce(u)),
        int(np.bitwise_xor.reduce(u)),
    ]
    np.testing.assert_array_equal(out, np.repeat(np.array(expected, np.uint32)[:, None], 32, 1))


def test_collectives_of_two_halves_do_not_mix() -> None:
    text = """__global__ void k(int* out) {
        const int lane = threadIdx.x;
        int x = lane;
        if (lane < 16) for (int i = 0; i < 3; i++) x = __reduce_add_sync(0xffffu, x) % 97;
        else x = __reduce_add_sync(0xffff0000u, x);
        out[lane] = x;
    }"""
    out = np.zeros(32, np.int32)
    run(text, out)
    np.testing.assert_array_equal(out, [120 % 97 * 16 % 97 * 16 % 97] * 16 + [376] * 16)


def test_block_votes() -> None:
    text = """__global__ void k(int* out) {
        const int t = threadIdx.x;
        out[t] = __syncthreads_count(t % 3 == 0);
        out[t + 96] = __syncthreads_and(t != 40) + 2 * __syncthreads_or(t == 40);
    }"""
    out = np.zeros((2, 96), np.int32)
    run(text, out, threads=96)
    np.testing.assert_array_equal(out, [[32] * 96, [2] * 96])


def test_atomics() -> None:
    text = """__global__ void k(int* i, unsigned* u, float* f) {
        const int t = threadIdx.x;
        atomicAdd(&i[0], t); atomicMax(&i[1], t); atomicMin(&i[2], -t); atomicOr(&i[3], 1 << t % 8);
        if (atomicCAS(&i[4], 0, t + 1) == 0) atomicExch(&i[5], t);
        atomicInc(&u[0], 5); atomicAdd(f, 0.5f);
        __shared__ int sum;
        if (t == 0) sum = 0;
        __syncthreads();
        atomicAdd(&sum, 2);
        __syncthreads();
        if (t == 0) i[6] = sum;
    }"""
    i, u, f = np.zeros(7, np.int32), np.zeros(1, np.uint32), floats(1)
    run(text, i, u, f, threads=64)
    np.testing.assert_array_equal(i, [2016, 63, -63, 255, 1, 0, 128])
    assert u[0] == 64 % 6
    assert f[0] == 32


FRAGMENTS = """
template <typename T>
__global__ void k(float* d, const T* a, const T* b) {   // a [16][16], b [8][16] (column major)
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    auto pair = [](const T* p) { return *reinterpret_cast<const unsigned*>(p); };
    const unsigned int x[4] = {pair(a + g * 16 + 2 * t), pair(a + (g + 8) * 16 + 2 * t),
                      pair(a + g * 16 + 2 * t + 8), pair(a + (g + 8) * 16 + 2 * t + 8)};
    const unsigned int y[2] = {pair(b + g * 16 + 2 * t), pair(b + g * 16 + 2 * t + 8)};
    float r[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    mma_m16n8k16(r, x, y, T());
    for (int i = 0; i < 4; i++) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = r[i];
}
"""


@pytest.mark.parametrize(
    ("entry", "dtype"), [("k<__half>", np.float16), ("k<__nv_bfloat16>", ml_dtypes.bfloat16)]
)
def test_mma(entry: str, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((16, 16), (8, 16)))
    a[3, 3] = 2.0**-20  # subnormal in float16
    d = np.zeros((16, 8), np.float32)
    run(FRAGMENTS, d, a, b, entry=entry)
    start = np.tile([[1.0, 2.0], [3.0, 4.0]], (1, 4)).repeat(8, 0)
    expected = start + a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(d, expected, rtol=3e-7, atol=1e-7)


def test_matrix_loads_and_moves() -> None:
    text = """__global__ void k(unsigned* out, const unsigned short* in) {   // in [32][8]
        DYN_SMEM(raw);
        unsigned short* tile = reinterpret_cast<unsigned short*>(raw);
        const int lane = threadIdx.x;
        for (int i = 0; i < 8; i++) tile[lane * 8 + i] = in[lane * 8 + i];
        __syncwarp();
        unsigned int a[4], b[4];
        ldmatrix_x4(a, tile + lane * 8);
        ldmatrix_x4_trans(b, tile + lane * 8);
        for (int i = 0; i < 4; i++) out[i * 32 + lane] = a[i], out[128 + i * 32 + lane] = b[i];
        out[256 + lane] = movmatrix_trans(a[0]);
    }"""
    rows = np.random.default_rng(3).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    out = np.zeros((9, 32), np.uint32)
    run(text, out, rows, shared=512)

    def fragments(m: np.ndarray) -> np.ndarray:
        """Lane 4r + c holds row r, columns 2c and 2c + 1."""
        return np.ascontiguousarray(m).reshape(-1).view(np.uint32)

    for i in range(4):
        np.testing.assert_array_equal(out[i], fragments(rows[i]))
        np.testing.assert_array_equal(out[4 + i], fragments(rows[i].T))
    np.testing.assert_array_equal(out[8], fragments(rows[0].T))


def test_ex2_flushes_subnormal_results_and_keeps_nan() -> None:
    text = "__global__ void k(float* y, const float* x) { y[threadIdx.x] = ex2(x[threadIdx.x]); }"
    x = np.array([0, -1, 10, -126, -126.5, -1e9, -np.inf, np.inf, np.nan], np.float32)
    y = floats(9, 7.0)
    run(text, y, x, threads=9)
    expected = [1, 0.5, 1024, 2.0**-126, 0, 0, 0, np.inf, np.nan]
    np.testing.assert_array_equal(y, np.array(expected, np.float32))


# ---------------------------------------------------------------------- global memory

COPY = """__global__ void k(float* out, const float* in, int shift) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i + shift];
}"""


def test_a_load_past_the_end_names_everything() -> None:
    out, x = floats(64), floats(64, 1.0)
    error = fault(r"a1 \(float32, shape \(64,\), 256 bytes\)", COPY, out, x, 1, grid=2)
    assert (error.kernel, error.block, error.thread) == ("k", (1, 0, 0), (31, 0, 0))
    assert "load of 4 bytes at 0 bytes past the end" in error.what
    assert error.source.startswith("kernel.cu:4 (k")
    np.testing.assert_array_equal(out, 0)  # nothing was changed, not even by earlier threads


def test_a_load_before_the_start() -> None:
    error = fault("4 bytes before a1", COPY, floats(64), floats(64), -1, grid=2)
    assert error.thread == (0, 0, 0)


def test_a_neighbour_in_memory_is_out_of_bounds_too() -> None:
    both = floats(128, 1.0)
    fault("a1", COPY, both[:64], both[64:], -1, grid=2)


def test_a_far_index_meets_no_other_array() -> None:
    big = floats(1 << 20)
    fault("out of bounds", COPY, big[:64].copy(), big, 1 << 20, grid=2)


@pytest.mark.parametrize("index", [1001, 1_000_001, 2**31 - 1, -1_000_001, -(2**31)])
def test_a_wild_index_is_told_from_the_argument_it_went_through(index: int) -> None:
    """Bounds come before alignment: where an access went says more than how it lies."""
    text = """__global__ void k(float* a, float* b, float* c, int i) {
        *reinterpret_cast<float2*>(b + i) = make_float2(1, 2);
    }"""
    arrays = [floats(16), floats(16), floats(16)]
    error = fault("out of bounds", text, *arrays, index, threads=1)
    away = f"{4 * index - 64} bytes past the end of" if index > 0 else f"{-4 * index} bytes before"
    assert f"(store of 8 bytes at {away} a1 (float32, shape (16,), 64 bytes))" in error.what
    fault("misaligned access .store of 8 bytes at byte 4 of a1", text, *arrays, 1, threads=1)


def test_less_address_space_means_smaller_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = importlib.import_module("cupy_decode.backends.emulator.launch")
    monkeypatch.setattr(launch, "_GUARDS", (1 << 50, 1 << 20))
    out, x = floats(64), np.arange(64, dtype=np.float32)
    run(COPY, out, x, 0, grid=2)
    np.testing.assert_array_equal(out, x)
    fault("bytes past the end of a1", COPY, out, x, 64 + 70, grid=2)


def test_an_argument_too_large_to_copy_is_used_in_place() -> None:
    huge = np.zeros(2**27, np.float32)  # 512 MiB of pages that nobody touches
    huge[-1] = 5
    text = """__global__ void k(float* x, long long i) { x[i - 1] += 1; x[i] += 1; }"""
    run(text, huge, np.int64(2**27 - 1), threads=1)
    np.testing.assert_array_equal(huge[-2:], [1, 6])
    error = fault("out of bounds", text, huge, np.int64(2**27), threads=1)
    assert "0 bytes past the end of a0" in error.what


def test_a_null_argument() -> None:
    fault("null argument", COPY, None, floats(64), 0)
    run(COPY.replace("out[i] =", "if (out) out[i] ="), None, floats(32), 0)


def test_a_store_to_a_read_only_array() -> None:
    out = floats(32)
    out.flags.writeable = False
    fault("read-only", COPY, out, floats(32), 0)


def test_strided_views_are_bounded_element_by_element() -> None:
    text = """__global__ void k(float* out, const float* in, int step) {
        out[threadIdx.x] = in[step * threadIdx.x];
    }"""
    wide = np.arange(96, dtype=np.float32)
    out = floats(32)
    run(text, out, wide[::3], 3)
    np.testing.assert_array_equal(out, wide[::3])
    fault("gap", text, out, wide[::3], 2)


def test_interleaved_arguments_keep_their_own_bytes() -> None:
    text = """__global__ void k(float* a, float* b) {
        a[2 * threadIdx.x] = 1;
        b[2 * threadIdx.x] = 2;
    }"""
    both = floats(64, 9.0).reshape(32, 2)
    run(text, both[:, 0], both[:, 1])
    np.testing.assert_array_equal(both, [[1, 2]] * 32)
    moved = text.replace("b[2 *", "b[2 * 40 +")
    fault("a1", moved, both[:, 0], both[:, 1])


def test_stores_through_a_view_leave_the_rest_of_the_buffer() -> None:
    whole = np.arange(100, dtype=np.float32)
    expected = whole.copy()
    expected[10:42] = 0
    run(COPY, whole[10:42], floats(32), 0)
    np.testing.assert_array_equal(whole, expected)


def test_misaligned_vector_loads() -> None:
    text = """__global__ void k(unsigned* out, const float* in) {
        out[threadIdx.x] = load_16(in + 1).x;
    }"""
    fault("misaligned access .load of 16 bytes", text, np.zeros(32, np.uint32), floats(64))


def test_misaligned_struct_copies() -> None:
    text = """__global__ void k(float2* out, const float* in) {
        const float2 pair = *reinterpret_cast<const float2*>(in + 1);
        out[threadIdx.x] = pair;
    }"""
    fault("misaligned access .load of 8 bytes", text, floats(64), floats(64))


def test_endless_loops_end() -> None:
    text = "__global__ void k(int* flag) { while (atomicAdd(flag, 0) == 0) {} }"
    with pytest.raises(emulator.EmulatorError, match="endless loop"):
        run(text, np.zeros(1, np.int32), threads=1)


def test_traps() -> None:
    fault(
        "__trap",
        "__global__ void k(int* x) { if (threadIdx.x == 3) __trap(); }",
        floats(1).view(np.int32),
    )


# ---------------------------------------------------------------------- shared memory

REVERSAL = """__global__ void k(float* out, const float* in) {
    __shared__ float tile[64];
    const int t = threadIdx.x;
    tile[t] = in[t];
    __syncthreads();
    out[t] = tile[63 - t];
}"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_orders(schedule: str) -> None:
    out, x = floats(64), np.arange(64, dtype=np.float32)
    run(REVERSAL, out, x, threads=64, schedule=schedule)
    np.testing.assert_array_equal(out, x[::-1])


def test_a_missing_barrier_is_unwritten_memory_or_a_race() -> None:
    broken = REVERSAL.replace("    __syncthreads();\n", "")
    error = fault("unwritten|race", broken, floats(64), floats(64), threads=64)
    assert "of the 256 bytes of tile" in error.what
    # whichever side runs first, the other is caught
    late = broken.replace("tile[63 - t]", "t < 32 ? 0 : tile[63 - t]")
    fault("race: read|unwritten", late, floats(64), floats(64), threads=64)


def test_a_barrier_missing_before_the_next_write_is_a_race() -> None:
    text = REVERSAL.replace("tile[63 - t]", "t < 32 ? tile[t + 32] : (tile[t] = 0)")
    reader_first = "race: write to shared memory that another thread read"
    writer_first = "race: read of shared memory that another thread wrote"
    arrays = floats(64), floats(64)
    with pytest.raises(emulator.EmulatorError, match=writer_first):
        run(text, *arrays, threads=64)  # the last to arrive at the barrier goes on first
    with pytest.raises(emulator.EmulatorError, match=reader_first):
        run(text, *arrays, threads=64, schedule="reverse")


def test_two_writers_are_a_race() -> None:
    text = REVERSAL.replace("tile[t] =", "tile[t / 2] =")
    error = fault("race: two threads write", text, floats(64), floats(64), threads=64)
    assert "the other access is at kernel.cu:" in error.what


def test_a_warp_needs_syncwarp_and_a_shuffle_is_none() -> None:
    exchange = """__global__ void k(float* out, const float* in) {
        __shared__ float tile[32];
        const int t = threadIdx.x;
        tile[t] = in[t];
        ORDER
        out[t] = tile[31 - t];
    }"""
    out, x = floats(32), np.arange(32, dtype=np.float32)
    for order in ("", "__shfl_sync(~0u, t, 0);", "__syncwarp(t < 16 ? 0xffffu : 0xffff0000u);"):
        fault("race|unwritten", exchange.replace("ORDER", order), out, x)
    for order in (
        "__syncwarp();",
        "__syncwarp(t % 2 ? 0x55555555u << 1 : 0x55555555u); __syncwarp();",
    ):
        run(exchange.replace("ORDER", order), out, x)
        np.testing.assert_array_equal(out, x[::-1])


def test_syncwarp_orders_no_other_warp() -> None:
    fault(
        "race|unwritten",
        REVERSAL.replace("__syncthreads()", "__syncwarp()"),
        floats(64),
        floats(64),
        threads=64,
    )


def test_unwritten_shared_memory_of_a_later_block() -> None:
    """What the previous block left behind does not count as written."""
    text = REVERSAL.replace("tile[t] = in[t]", "if (blockIdx.x == 0) tile[t] = in[t]")
    with pytest.raises(emulator.EmulatorError, match="unwritten") as caught:
        run(text, floats(64), floats(64), threads=64, grid=2)
    assert caught.value.block == (1, 0, 0)


def test_shared_bounds() -> None:
    dynamic = """__global__ void k(float* out, int n) {
        DYN_SMEM(raw);
        float* tile = reinterpret_cast<float*>(raw);
        tile[n + threadIdx.x] = 1;
        out[threadIdx.x] = tile[n + threadIdx.x];
    }"""
    run(dynamic, floats(32), 0, shared=128)
    error = fault("past shared memory", dynamic, floats(32), 0, shared=124)
    assert "byte 124 of 124 dynamic shared bytes" in error.what
    fault("past shared memory|out of bounds", dynamic, floats(32), -1, shared=128)
    static = REVERSAL.replace("tile[63", "tile[64")
    fault("past shared memory", static, floats(64), floats(64), threads=64)


def test_misaligned_shared_vectors() -> None:
    text = """__global__ void k(unsigned* out) {
        DYN_SMEM(raw);
        *reinterpret_cast<uint4*>(raw + 8 * threadIdx.x) = make_uint4(1, 2, 3, 4);
        out[0] = raw[0];
    }"""
    fault("misaligned", text, np.zeros(1, np.uint32), shared=1024)


def test_another_threads_stack_is_out_of_bounds() -> None:
    text = """__global__ void k(float* out) {
        float mine[4] = {1, 2, 3, 4};
        __shared__ float* leaked;
        if (threadIdx.x == 0) leaked = mine;
        __syncthreads();
        out[threadIdx.x] = leaked[threadIdx.x % 4];
    }"""
    fault("out of bounds", text, floats(32))


# ---------------------------------------------------------------------- barriers


# One warp hands numbers to another through a buffer of one, and does not wait for it at the end.
HANDOVER = """__global__ void k(float* out, const float* in) {
    __shared__ float box[32];
    const int lane = threadIdx.x % 32;
    enum { FREE = 1, FULL = 2 };
    if (threadIdx.x >= 32) bar_arrive(FREE, 64);
    for (int i = 0; i < 3; i++) {
        if (threadIdx.x < 32) {
            bar_sync(FREE, 64);
            box[lane] = in[32 * i + lane];
            bar_arrive(FULL, 64);
        } else {
            bar_sync(FULL, 64);
            out[32 * i + lane] = box[31 - lane];
            if (i < 2) bar_arrive(FREE, 64);
        }
    }
}"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_named_barriers_order_those_who_wait_after_those_who_came(schedule: str) -> None:
    out, x = floats(96), np.arange(96, dtype=np.float32)
    run(HANDOVER, out, x, threads=64, schedule=schedule)
    np.testing.assert_array_equal(out, x.reshape(3, 32)[:, ::-1].ravel())


@pytest.mark.parametrize("barrier", ["FREE", "FULL"])
def test_a_named_barrier_that_nobody_waits_at_orders_nothing(barrier: str) -> None:
    text = HANDOVER.replace(f"bar_sync({barrier}", f"bar_arrive({barrier}")
    fault("race|unwritten", text, floats(96), floats(96), threads=64)


def test_a_named_barrier_must_be_filled() -> None:
    extra = HANDOVER.replace("if (i < 2) bar_arrive", "bar_arrive")
    fault("barrier 1 is left with 32 of 64 threads", extra, floats(96), floats(96), threads=64)
    missing = HANDOVER.replace("if (i < 2) bar_arrive", "if (i < 1) bar_arrive")
    fault("64 threads .* wait at bar.sync", missing, floats(96), floats(96), threads=64)
    other = HANDOVER.replace("bar_sync(FREE, 64)", "bar_sync(FREE, 96)")
    fault("barrier 1 .* for (96|64) threads", other, floats(96), floats(96), threads=64)


def test_divergent_barriers_name_both_sides() -> None:
    text = """__global__ void k(int* out) {
        if (threadIdx.x < 40) __syncthreads();
        else __syncthreads();
        out[0] = 1;
    }"""
    out = np.zeros(1, np.int32)
    fault(
        r"thread 0 waits at __syncthreads \(kernel.cu:3\), thread 40 at .*kernel.cu:4",
        text,
        out,
        threads=64,
    )
    exits = "__global__ void k(int* out) { if (threadIdx.x >= 40) return; __syncthreads(); }"
    fault(
        "40 threads wait at __syncthreads .* but 24 have exited, the first of them thread 40",
        exits,
        out,
        threads=64,
    )
    stuck = """__global__ void k(int* out) {
        if (threadIdx.x < 32) __syncthreads();
        else if (threadIdx.x < 50) __syncwarp();
        else __syncthreads();
    }"""
    fault(
        "no thread can go on: 46 threads .* at __syncthreads .*; 18 threads .* at __syncwarp",
        stuck,
        out,
        threads=64,
    )


def test_collectives_name_their_lanes() -> None:
    def kernel(body: str) -> str:
        return f"__global__ void k(int* out) {{ const int t = threadIdx.x; {body} }}"

    out = np.zeros(1, np.int32)
    fault(
        "no thread can go on", kernel("if (t < 16) __syncwarp(); else __shfl_sync(~0u, t, 0);"), out
    )
    fault(
        "from lane 20, which does not take part",
        kernel("if (t < 16) __shfl_sync(0xffffu, t, 20);"),
        out,
    )
    fault("leaves out the calling lane", kernel("__ballot_sync(0xffffu, t);"), out)
    fault("needs all 32 lanes", kernel("movmatrix_trans(t);"), out, threads=16)


# ---------------------------------------------------------------------- asynchronous copies

ASYNC = """__global__ void k(float* out, const float* in) {
    DYN_SMEM(raw);
    float* tile = reinterpret_cast<float*>(raw);
    const int t = threadIdx.x;
    for (int stage = 0; stage < 2; stage++) {
        cp_async_16_or_zero(tile + stage * 128 + 4 * t, in + stage * 128 + 4 * t, THERE);
        cp_async_commit();
    }
    cp_async_wait<1>();
    __syncthreads();
    out[t] = tile[127 - t];
    cp_async_wait<0>();
    __syncthreads();
    out[t + 32] = tile[255 - t];
}""".replace("THERE", "t != 7")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_copies_arrive_in_order(schedule: str) -> None:
    out, x = floats(64), np.arange(256, dtype=np.float32)
    run(ASYNC, out, x, shared=1024, schedule=schedule)
    x[28:32], x[156:160] = 0, 0  # thread 7 asked for zeros
    np.testing.assert_array_equal(out, np.concatenate([x[127:95:-1], x[255:223:-1]]))


def test_an_asynchronous_zero_does_not_touch_its_source() -> None:
    nowhere = ASYNC.replace("t != 7", "false").replace("in + stage", "in + 1000001 + stage")
    out = floats(64, 1.0)
    run(nowhere, out, floats(256, 2.0), shared=1024)
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("cp_async_wait<1>();", "", "before its asynchronous copy arrived"),
        ("cp_async_wait<0>();", "cp_async_wait<1>();", "before its asynchronous copy arrived"),
        (
            "cp_async_wait<1>();\n    __syncthreads();",
            "cp_async_wait<1>();",
            "unwritten|before its",
        ),
        ("cp_async_wait<1>();\n", "tile[4 * t] = 0;\n", "write to shared memory under"),
        ("in + stage * 128", "in + 1 + stage * 128", "misaligned"),
        ("in + stage * 128", "in + 64 + stage * 128", "past the end"),
        ("tile + stage * 128", "tile + 2 + stage * 128", "16 aligned bytes of shared"),
        ("tile + stage * 128", "tile + stage * 192", "16 aligned bytes of shared"),
        ("tile + stage * 128", "out + stage * 16", "16 aligned bytes of shared"),
        ("tile + stage * 128", "tile + stage * 64", "race: two threads|under an asynchronous"),
    ],
)
def test_faulty_asynchronous_copies(old: str, new: str, match: str) -> None:
    assert old in ASYNC
    fault(match, ASYNC.replace(old, new), floats(64), floats(256), shared=1024)


def test_an_asynchronous_copy_may_not_overtake_a_reader() -> None:
    text = ASYNC.replace(
        "    cp_async_wait<0>();",
        "    cp_async_16_or_zero(tile + 4 * t, in, true);\n    cp_async_wait<0>();",
    )
    fault(
        "that another thread read|before its asynchronous",
        text,
        floats(64),
        floats(256),
        shared=1024,
    )


# ---------------------------------------------------------------------- traces


def test_counts_are_exact() -> None:
    text = """__global__ void k(float* out, const float* in, const int* table, int* hits) {
        __shared__ float tile[32];
        const int t = threadIdx.x;
        if (table[blockIdx.x] < 0) return;
        tile[t] = in[t / 2] + in[table[blockIdx.x]];
        __syncthreads();
        out[blockIdx.x] = tile[0];
        atomicAdd(hits, 1);
    }"""
    table = np.array([3, -1, 9], np.int32)
    trace = run(text, floats(3), floats(16), table, np.zeros(1, np.int32), grid=3, trace=True)
    assert trace.arguments == ("a0", "a1", "a2", "a3")
    np.testing.assert_array_equal(trace["a1"]["loads"], [64, 0, 64])
    np.testing.assert_array_equal(trace["a1"]["load_bytes"], [256, 0, 256])
    np.testing.assert_array_equal(trace["a1"]["distinct_load_bytes"], [64, 0, 64])
    np.testing.assert_array_equal(trace["a0"]["stores"], [32, 0, 32])
    np.testing.assert_array_equal(trace["a0"]["distinct_store_bytes"], [4, 0, 4])
    np.testing.assert_array_equal(trace["a3"]["atomics"], [32, 0, 32])
    np.testing.assert_array_equal(trace.idle("a1"), [False, True, False])
    np.testing.assert_array_equal(trace.blocks["shared_stores"], [32, 0, 32])
    np.testing.assert_array_equal(trace.blocks["barriers"], [1, 0, 1])
    with pytest.raises(KeyError, match="no argument 'q'; there are a0"):
        trace["q"]


def test_traces_survive_a_file(tmp_path: Path) -> None:
    trace = run(COPY, floats(96), floats(96), 0, grid=(3, 1, 1), trace=True)
    trace.save(tmp_path / "copy.npz")
    again = emulator.LaunchTrace.load(tmp_path / "copy.npz")
    assert again.table() == trace.table() == str(trace)
    assert (again.grid, again.block, again.kernel) == ((3, 1, 1), (32, 1, 1), "k")
    np.testing.assert_array_equal(again.counts, trace.counts)
    np.testing.assert_array_equal(again.blocks, trace.blocks)
    assert re.search(r"a1 +96 +384 +384 +0 +0 +0\n?", again.table())
    assert [again.block_index(i) for i in range(3)] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


def test_only_operators_are_traced_and_on_the_emulator() -> None:
    for wrong in (print, len, 7, "decode_attention", lambda x: x):
        with pytest.raises(TypeError, match=r"operator must be one of cupy_decode .*; got "):
            cd.trace_launch(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"backend='cuda': trace_launch counts on the emulator"):
        cd.trace_launch(cd.decode_attention, *problem(), backend="cuda")
    traced = cd.trace_launch(cd.decode_attention, *problem(), backend="emulator")
    assert len(traced.launches) == 2


def test_changed_files_are_texts() -> None:
    call = cd.decode_attention, *problem()
    path = Path(kernels_cu.__file__).parent / "paged_split_k.cu"
    with pytest.raises(
        TypeError,
        match=r"files\['paged_split_k.cu'\] must be the text .* got PosixPath; .*read_text",
    ):
        cd.trace_launch(*call, files={"paged_split_k.cu": path})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"files names 'paged.cu', which kernels_cu does not have"):
        cd.trace_launch(*call, files={"paged.cu": ""})
    with pytest.raises(TypeError, match="files must map file names to texts; got str"):
        cd.trace_launch(*call, files="paged_split_k.cu")  # type: ignore[arg-type]


def test_no_trace_unless_asked() -> None:
    assert run(COPY, floats(32), floats(32), 0) is None


# ---------------------------------------------------------------------- launches and builds


def test_launches_that_do_not_fit_are_refused() -> None:
    a = floats(32)
    with pytest.raises(
        TypeError, match="takes parameters of the types 'ppi' but the launch has 'ppf'"
    ):
        run(COPY, a, a, 0.0)
    with pytest.raises(ValueError, match="1088 threads; at most 1024"):
        run(COPY, a, a, 0, threads=1088)
    with pytest.raises(ValueError, match="shared_mem 232449"):
        run(COPY, a, a, 0, shared=232449)
    with pytest.raises(ValueError, match="grid must be three positive sizes"):
        run(COPY, a, a, 0, grid=(0, 1, 1))
    with pytest.raises(ValueError, match="schedule must be"):
        run(COPY, a, a, 0, schedule="sideways")


def test_text_that_does_not_compile_shows_its_line() -> None:
    with pytest.raises(RuntimeError, match=r"kernel.cu:3:\d+: error"):
        run("\n__global__ void k(int* x) { x[0] = nonsense; }", floats(1))


@pytest.mark.parametrize("change", ["nonsense = ;", "absent(thing);", "{"])
def test_an_error_in_a_changed_file_is_told_of_that_file_alone(change: str) -> None:
    text = kernels_cu.read("reduce_splits.cu")
    begin = text.index("{", text.index("__global__")) + 1
    changed = f"{text[:begin]} {change} {text[begin:]}"
    arrays = problem()
    plan = cd.plan_splits(arrays[-1], cd.HeadConfig(8, 2, 64), num_splits=2)
    partials = cd.paged_split_k(*arrays, plan, backend="emulator")
    with pytest.raises(RuntimeError) as caught:
        cd.trace_launch(cd.reduce_splits, partials, files={"reduce_splits.cu": changed})
    _, *found = str(caught.value).splitlines()
    assert found
    assert not [line for line in found if line.startswith("entry")]
    number = text[:begin].count("\n") + 1
    assert any(f"reduce_splits.cu:{number}:" in line for line in found)


def test_an_error_in_a_changed_file_quotes_no_other_line() -> None:
    """g++ would quote the spliced text by the line numbers of the file."""
    text = kernels_cu.read("reduce_splits.cu")
    lines = text.splitlines()
    number = next(i for i, line in enumerate(lines) if "__global__" in line)
    lines.insert(number, "nonsense;")
    arrays = problem()
    plan = cd.plan_splits(arrays[-1], cd.HeadConfig(8, 2, 64), num_splits=2)
    partials = cd.paged_split_k(*arrays, plan, backend="emulator")
    with pytest.raises(RuntimeError) as caught:
        cd.trace_launch(cd.reduce_splits, partials, files={"reduce_splits.cu": "\n".join(lines)})
    head, *found = str(caught.value).splitlines()
    assert head.startswith("g++ could not compile reduce_splits<")
    assert found
    assert found[0].startswith(f"reduce_splits.cu:{number + 1}:1: error: ")
    assert all(re.match(r"[\w.]+:\d+:(\d+:)? ", line) for line in found), found


def test_the_twins_are_the_wrappers() -> None:
    function = r"^(?:__device__ __forceinline__|inline) [\w ]+? (\w+)\("
    twins = re.findall(function, (build.INCLUDE / "ptx.cuh").read_text(), re.MULTILINE)
    # What only some architectures have, kernels do in another way on the others and here.
    everywhere = re.sub(r"#if __CUDA_ARCH__.*?#endif", "", kernels_cu.read("ptx.cuh"), flags=re.S)
    wrappers = re.findall(function, everywhere, re.MULTILINE)
    assert len(wrappers) >= 10
    assert {name for name in twins if not name.startswith("emu_")} == set(wrappers)


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        RuntimeError, match="no-such-compiler, which is not on the PATH; install it"
    ):
        build.build(COPY, "k")


def test_a_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_WHEELS", {"nvidia-cuda-no-such-thing": "cuda_fp16.h"})
    build.header_directories.cache_clear()
    build._tool_key.cache_clear()
    with pytest.raises(
        emulator.EmulatorUnavailableError,
        match=r"install the headers with  python -m pip install 'cupy-decode\[emulator\]'",
    ):
        run(COPY + "// another build", floats(32), floats(32), 0)


def _build_in(cache: str, go: Any) -> None:
    os.environ["CUPY_DECODE_CACHE_DIR"] = cache
    go.wait()
    build.build(COPY, "k")


def test_processes_that_start_together_share_one_build(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    go = spawn.Event()
    workers = [spawn.Process(target=_build_in, args=(str(tmp_path), go)) for _ in range(3)]
    for worker in workers:
        worker.start()
    go.set()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    names = sorted(p.name.split("-")[0] for p in (tmp_path / "emulator").iterdir())
    assert names == ["kernel", "toolbox"]


def test_builds_are_found_again_and_follow_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_DECODE_CACHE_DIR", str(tmp_path))
    first = build.build(COPY, "k")
    stamp = first.stat().st_mtime_ns
    assert build.build(COPY, "k") == first
    assert first.stat().st_mtime_ns == stamp
    assert build.build(COPY + "\n", "k") != first


def test_a_cache_that_cannot_be_written_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("CUPY_DECODE_CACHE_DIR", str(blocked))
    assert build.build(COPY, "k").exists()
