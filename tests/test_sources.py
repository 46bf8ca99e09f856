"""The CUDA sources as a package: self-contained texts and signatures that can be read."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels_cu
from cupy_decode import specs, standalone
from cupy_decode.__main__ import main
from cupy_decode.backends import emulator


@pytest.mark.parametrize("name", kernels_cu.names())
def test_source_is_one_self_contained_text(name: str) -> None:
    text = kernels_cu.source(name)
    assert not re.search(r'#\s*include\s+"', text)
    assert f"void __launch_bounds__(THREADS) {name}(" in text or f" {name}(" in text
    # each header once, however many files include it
    headers = re.findall(r'^#line 1 "(.*)"$', text, re.MULTILINE)
    assert len(headers) == len(set(headers))
    assert headers[0] == f"{name}.cu"


@pytest.mark.parametrize("folder", [kernels_cu, emulator], ids=lambda f: f.__name__)
def test_lines_are_at_most_100_characters(folder: Any) -> None:
    files = [
        path
        for path in sorted(Path(folder.__file__).parent.rglob("*"))
        if path.suffix in (".cu", ".cuh", ".cpp", ".h")
    ]
    assert len(files) >= 4
    long = [
        f"{path.name}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not long


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


def test_source_command_prints_the_text_and_a_specialisation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["source", "merge_states", "--dtype", "float16"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(kernels_cu.source("merge_states"))
    assert "(void*)merge_states<__half, 128>;" in text
    assert main(["source", "paged_split_k_mma", "--head-dim", "80"]) == 2
    assert "head_dim 64, 128, 256; got bfloat16 and 80" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on the PATH")
@pytest.mark.parametrize("name", kernels_cu.names())
def test_nvcc_finds_a_kernel_in_what_source_prints(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.cu"
    path.write_text(standalone.source(name))
    command = [
        "nvcc",
        "-std=c++17",
        "-arch=sm_90",
        "-ptx",
        "-o",
        str(tmp_path / "k.ptx"),
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert re.search(rf"\.entry \w*{name}", (tmp_path / "k.ptx").read_text())


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
