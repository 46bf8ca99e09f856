"""The CUDA sources as a package: self-contained texts and signatures that can be read."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kernels_cu
from cupy_decode import specs
from cupy_decode.__main__ import main


@pytest.mark.parametrize("name", kernels_cu.names())
def test_source_is_one_self_contained_text(name: str) -> None:
    text = kernels_cu.source(name)
    assert not re.search(r'#\s*include\s+"', text)
    assert f"void __launch_bounds__(THREADS) {name}(" in text or f" {name}(" in text
    # each header once, however many files include it
    headers = re.findall(r'^#line 1 "(.*)"$', text, re.MULTILINE)
    assert len(headers) == len(set(headers))
    assert headers[0] == f"{name}.cu"


def test_line_directives_name_the_original_lines() -> None:
    """A compiler message about the spliced text points into the file a person edits."""
    name = "paged_split_k"
    file, number = "", 0
    for line in kernels_cu.source(name).splitlines():
        directive = re.match(r'#line (\d+) "(.*)"', line)
        if directive:
            number, file = int(directive[1]) - 1, directive[2]
            continue
        number += 1
        if line.strip():
            assert kernels_cu.read(file).splitlines()[number - 1] == line


def test_a_header_can_be_replaced() -> None:
    text = kernels_cu.source("reduce_splits", substitute={"ptx.cuh": "// nothing here"})
    assert "// nothing here" in text
    assert "asm" not in text


@pytest.mark.parametrize("name", kernels_cu.names())
def test_inline_assembly_lives_in_one_file(name: str) -> None:
    text = kernels_cu.source(name, substitute={"ptx.cuh": ""})
    assert not re.search(r"\basm\b", text)


def test_unknown_kernel_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no kernel is called 'nothing'; the kernels are"):
        kernels_cu.source("nothing")


def test_signature_lists_pointers_with_their_shapes() -> None:
    parameters = {p.name: p for p in kernels_cu.signature("paged_split_k")}
    assert parameters["k_cache"].kind == "ptr"
    assert parameters["k_cache"].note == "[num_blocks, block_size, num_kv_heads, DK]"
    assert parameters["k_stride_block"].kind == "i64"
    assert parameters["scale"].kind == "f32"
    assert [p.name for p in kernels_cu.signature("reduce_splits")][:2] == ["out", "lse"]


@pytest.mark.parametrize("name", specs.KERNELS)
def test_every_pointer_has_a_shape(name: str) -> None:
    for p in kernels_cu.signature(name):
        assert p.kind != "ptr" or p.note.startswith(("[", "as ")), p.name


def test_source_command_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", "merge_states"]) == 0
    assert capsys.readouterr().out == kernels_cu.source("merge_states")


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 120, 128, 256, 576])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_shared_memory_are_an_odd_number_of_vectors_apart(dim: int, dtype: str) -> None:
    """Else eight lanes reading one column of eight rows would share banks."""
    spec = specs.KernelSpec(dtype, head_dim=dim, v_head_dim=min(dim, 512))
    q_p_rescale = 4 * spec.heads_per_block * (dim + specs.TILE + 1)
    tiles = spec.split_k_shared_mem - q_p_rescale
    item = np.dtype("float32").itemsize if dtype == "float32" else 2
    assert tiles % (specs.TILE * 16) == 0
    assert tiles >= specs.TILE * item * (dim + min(dim, 512))
