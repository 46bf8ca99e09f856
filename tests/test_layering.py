"""Who may import whom, and that importing the package needs no GPU library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cupy_decode

ROOT = Path(cupy_decode.__file__).parent
#: Modules of the package that each room may import; a room not named here may import anything.
ALLOWED = {
    "heads": set(),
    "grid": {"heads"},
    "plan": {"heads"},
    "traffic": {"heads", "plan", "grid"},
    "reference": {"heads", "plan"},
    "tolerance": {"reference"},
    "tree": set(),
    "specs": {"grid"},
    "policies": {"heads", "plan", "grid", "policies"},
    "paging": {"heads", "paging"},
    "backends": {"heads", "plan", "specs", "backends"},
    "checks": {"heads", "plan", "grid", "specs"},
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(text: str, package: str) -> set[str]:
    """Names under ``package`` that a source imports, anywhere in it.

    The package as a whole, which reaches every room, is ``package`` itself; a relative import,
    which this package has none of, is ``"."``.
    """
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                found.add(".")
            elif node.module == package:
                found |= {alias.name for alias in node.names}
            elif node.module and node.module.startswith(package + "."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {([*name, package])[1] for name in names if name[0] == package}
    return found


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("import cupy_decode", {"cupy_decode"}),
        ("def f():\n    import numpy, cupy_decode as cd", {"cupy_decode"}),
        ("import cupy_decode.decode as d", {"decode"}),
        ("import cupy_decode_extras, cupy_decode.paging.pool", {"paging"}),
        ("from cupy_decode import grid, heads", {"grid", "heads"}),
        ("from cupy_decode.paging.pool import BlockPool", {"paging"}),
        ("from . import decode", {"."}),
        ("from .decode import decode_attention", {"."}),
        ("import numpy\nfrom numpy import linalg", set()),
    ],
)
def test_no_way_to_import_is_overlooked(text: str, want: set[str]) -> None:
    assert imported(text, "cupy_decode") == want


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    room = room_of(path)
    if room in ALLOWED:
        assert imported(path.read_text(encoding="utf-8"), "cupy_decode") <= ALLOWED[room], room


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_cupy_is_imported_in_few_places(path: Path) -> None:
    """At module level only by the CUDA backend; elsewhere inside the functions that need it."""
    if path == ROOT / "backends" / "cuda.py":
        return
    top_level = ast.parse(path.read_text(encoding="utf-8")).body
    names = [
        name
        for node in top_level
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    ]
    assert not [n for n in names if n and n.split(".")[0] in ("cupy", "cupyx", "cupy_backends")]


def test_importing_the_package_imports_no_gpu_library() -> None:
    code = "import sys, cupy_decode; print([m for m in sys.modules if m.split('.')[0] == 'cupy'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
