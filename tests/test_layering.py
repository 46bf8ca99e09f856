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
    "specs": set(),
    "policies": {"heads", "plan", "grid", "policies"},
    "paging": {"heads", "paging"},
    "backends": {"plan", "specs", "backends"},
    "checks": {"heads", "plan", "specs"},
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path, package: str) -> set[str]:
    """Names under ``package`` that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == package:
                found |= {alias.name for alias in node.names}
            elif node.module.startswith(package + "."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith(package + ".")}
    return found


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    room = room_of(path)
    if room in ALLOWED:
        assert imported(path, "cupy_decode") <= ALLOWED[room], room


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
