"""The shared case collection, run against the public operators of any backend.

The collection brings its own oracle and asks for a handful of operations in its own conventions;
``make_adapter`` translates them.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cupy_decode as cd

#: Keys per split where a case wants graph-captured steps.
_SPLIT_SIZE = 128


def load_oracle(path: Path) -> ModuleType:
    """The collection's module, loaded from its file."""
    spec = importlib.util.spec_from_file_location("shared_case_oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _heads(q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray) -> cd.HeadConfig:
    return cd.HeadConfig(q.shape[1], k_cache.shape[2], q.shape[2], v_cache.shape[3])


class _Allocator:
    """The collection's view of a block pool: ids and reused tokens, a free count, a commit."""

    def __init__(self, num_blocks: int, block_size: int, **options: Any) -> None:
        self._pool = cd.BlockPool(num_blocks, block_size, **options)
        self.free = self._pool.free
        self.commit = self._pool.publish

    def allocate(self, seq_id: str, tokens: list[int]) -> tuple[list[int], int]:
        got = self._pool.allocate(seq_id, tokens)
        return got.block_ids, got.num_cached_tokens

    def num_free(self) -> int:
        return self._pool.num_available_blocks


class _HostStep:
    """A step whose plan buffers were sized and filled once and are rewritten in place.

    Without ``planned`` the step has no plan and finds its splits by itself.
    """

    def __init__(
        self, backend: str, problem: dict[str, Any], max_seq_len: int, planned: bool
    ) -> None:
        self._backend, self._problem = backend, problem
        batch = len(problem["q"])
        full = cd.SplitPlan.from_split_size([max_seq_len] * batch, _SPLIT_SIZE)
        self._plan = _planned(problem["seq_lens"]).to(np, capacity=full.num_rows)
        if backend == "emulator":
            heads = _heads(problem["q"], problem["k_cache"], problem["v_cache"])
            plan = {"plan": self._plan} if planned else {"plan": None, "batch": batch}
            self._step = cd.DecodeStep(heads, dtype=problem["q"].dtype, backend="emulator", **plan)

    def replay(self, **arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._plan.assign(_planned(arrays["seq_lens"]))
        problem = {**self._problem, **arrays}
        if self._backend == "emulator":
            return self._step(**problem)
        return cd.decode_attention(**problem, plan=self._plan, backend=self._backend)


class _GraphStep:
    """The same step captured as a CUDA graph."""

    def __init__(
        self, cupy: Any, on_device: Any, problem: dict[str, Any], max_seq_len: int, planned: bool
    ) -> None:
        heads = _heads(problem["q"], problem["k_cache"], problem["v_cache"])
        scale = problem.pop("scale")
        batch = len(problem["q"])
        full = cd.SplitPlan.from_split_size([max_seq_len] * batch, _SPLIT_SIZE)
        self._plan = _planned(problem["seq_lens"]).to(cupy, capacity=full.num_rows)
        self._arrays = {name: on_device(x, cupy) for name, x in problem.items()}
        plan = {"plan": self._plan} if planned else {"plan": None, "batch": batch}
        self._step = cd.DecodeStep(heads, dtype=problem["q"].dtype, **plan)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        with self._stream:
            self._step(**self._arrays, scale=scale)  # compiles
            self._stream.synchronize()
            self._stream.begin_capture()
            self._step(**self._arrays, scale=scale)
            self._graph = self._stream.end_capture()

    def replay(self, **arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with self._stream:
            for name, x in arrays.items():
                self._arrays[name].set(np.ascontiguousarray(x))
            self._plan.assign(_planned(arrays["seq_lens"]))
            self._graph.launch(self._stream)
            self._stream.synchronize()
        return self._step.out.get(), self._step.lse.get()


def _planned(seq_lens: np.ndarray) -> cd.SplitPlan:
    return cd.SplitPlan.from_split_size(seq_lens, _SPLIT_SIZE)


def make_adapter(oracle: ModuleType, backend: str, kernel: str = "auto") -> Any:
    """An adapter on ``backend``: "reference", "emulator" or "cuda".

    With ``kernel`` "readable" nothing goes to the fast kernel, and steps have a plan. What it does
    not define, the collection reports as not offered.
    """
    if backend == "cuda":
        import cupy

        def to(x: Any) -> Any:
            return oracle.on_device(np.asarray(x), cupy)

        def back(x: Any) -> np.ndarray:
            return x.get()
    else:
        to = back = np.asarray
    planned = kernel == "readable"

    class Adapter(oracle.Adapter):  # type: ignore[name-defined, misc]
        def decode(
            self,
            q: Any,
            k_cache: Any,
            v_cache: Any,
            block_table: Any,
            seq_lens: Any,
            scale: Any,
            **options: Any,
        ) -> tuple[np.ndarray, np.ndarray]:
            if "softcap" in options:
                options["logits_soft_cap"] = options.pop("softcap")
            for name in options.keys() & {"sinks", "alibi_slopes"}:
                options[name] = to(options[name])
            k_device = to(k_cache)
            out, lse = cd.decode_attention(
                to(q),
                k_device,
                k_device if v_cache is k_cache else to(v_cache),
                to(block_table),
                to(seq_lens),
                scale=scale,
                backend=backend,
                kernel=kernel,
                **options,
            )
            return back(out), back(lse)

        def merge(self, o1: Any, lse1: Any, o2: Any, lse2: Any) -> tuple[np.ndarray, np.ndarray]:
            out, lse = cd.merge_states(to(o1), to(lse1), to(o2), to(lse2), backend=backend)
            return back(out), back(lse)

        def reduce(self, o: Any, m: Any, l: Any, n_active: Any) -> tuple[np.ndarray, np.ndarray]:  # noqa: E741
            # Active rows first, as a plan orders them; the others go where no plan row points.
            batch, num_q_heads, num_splits, dim = o.shape
            active = np.arange(num_splits) < np.asarray(n_active)[:, None]
            order = np.argsort(~active.ravel(), kind="stable")
            plan = cd.SplitPlan.from_num_splits(
                n_active, n_active, tile=1, capacity=batch * num_splits
            )
            rows = o.transpose(0, 2, 1, 3).reshape(-1, num_q_heads, dim)[order]
            m_rows = m.transpose(0, 2, 1).reshape(-1, num_q_heads)[order] * math.log2(math.e)
            l_rows = l.transpose(0, 2, 1).reshape(-1, num_q_heads)[order]
            states = (to(np.ascontiguousarray(x, np.float32)) for x in (rows, m_rows, l_rows))
            out, lse = cd.reduce_splits(cd.Partials(*states, plan), backend=backend)
            return back(out), back(lse)

        def write_kv(
            self, k_cache: Any, v_cache: Any, k: Any, v: Any, slots: Any
        ) -> tuple[np.ndarray, np.ndarray]:
            caches = to(k_cache), to(v_cache)
            cd.write_kv(to(k), to(v), *caches, to(slots), backend=backend)
            return back(caches[0]), back(caches[1])

        def map_to_kernel_blocks(self, table: Any, block_size: int, kernel_block_size: int) -> Any:
            return cd.map_to_kernel_blocks(table, block_size, kernel_block_size)

        def slot_mapping(self, table: Any, positions: Any, block_size: int) -> Any:
            return cd.slot_mapping(table, positions, block_size)

        def allocator(self, num_blocks: int, block_size: int, **options: Any) -> _Allocator:
            return _Allocator(num_blocks, block_size, **options)

        def capture(self, problem: dict[str, Any], max_seq_len: int) -> Any:
            if backend == "cuda":
                on_device = oracle.on_device
                return _GraphStep(cupy, on_device, dict(problem), max_seq_len, planned)
            return _HostStep(backend, dict(problem), max_seq_len, planned)

    return Adapter()
