"""Compiling a kernel for the CPU: g++, the CUDA headers from wheels, and a cache.

A build is one shared library with one specialisation in it. Libraries are kept under a key of
everything that decides their contents: source text, entry, flags, compiler version, and the
emulator's own files. A build happens in a temporary directory that is then renamed, so that
processes that start together cannot see half of one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cupy_decode.backends import BackendUnavailableError

HERE = Path(__file__).parent
INCLUDE = HERE / "include"

#: Wheel and one header that proves it is there.
_WHEELS = {
    "nvidia-cuda-runtime": "cuda_fp16.h",
    "nvidia-cuda-crt": "crt/host_defines.h",
    "nvidia-cuda-cccl": "nv/target",
}
_FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off")
#: The kernel alone is instrumented; the library is linked without the sanitizer's own runtime.
_KERNEL_FLAGS = (
    *_FLAGS,
    # The names and lines of #line are right, but g++ would quote the spliced text by them.
    "-fno-diagnostics-show-caret",
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-gnu-unique",
    # Struct copies stay whole, so that a float2 is one access of 8 aligned bytes here as well.
    "-fno-tree-sra",
    "-fno-ipa-sra",
    # Alignment is what the type promises, not what the address arithmetic happens to show.
    "-fno-tree-bit-ccp",
)
#: Lines of g++ that name the function of an error, with all forty parameters.
_FRAME = re.compile(r": In (\w+ )*(function|instantiation) ")
#: Lines about what is appended to a kernel. Where that is not the kernel's own text any more, it is
#: because something in that has not ended.
_AFTER = re.compile(r"^entry:\d+:\d+: ")
_HEAD = '#line 1 "kernel.cu"\n'
#: Appended to the kernel: the arguments' place, and thread-local storage that exists once touched.
_ENTRY = """
#line 1 "entry"
static uint64_t emu_values[64];
static thread_local char emu_tls_anchor;
extern "C" void emu_prepare(const uint64_t* values, int count) {{
    for (int i = 0; i < count; i++) emu_values[i] = values[i];
    *(volatile char*)&emu_tls_anchor = 0;
}}
extern "C" void emu_call_kernel() {{ emu_call(&{entry}, emu_values); }}
extern "C" const char* emu_signature() {{ return emu_codes(&{entry}); }}
"""
#: The runtime: one for all kernels of a process, so that their fibres share one set of stacks.
_RUNTIME = "libcupy_decode_emulator.so"
_TLS_SYMBOL = re.compile(
    r"^\s*\d+:\s+([0-9a-f]+)\s+(\d+|0x[0-9a-f]+)\s+TLS\s+\S+\s+\S+\s+\d+\s+(.*)$"
)


class EmulatorUnavailableError(BackendUnavailableError):
    """The compiler or the CUDA headers are missing; the message says what to install."""


@dataclass(frozen=True)
class StaticArray:
    """A ``__shared__`` array with a fixed size: its place among them, in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Module:
    """A loaded build: library, runtime, the kernel's parameter types, its static shared arrays."""

    path: Path
    library: ctypes.CDLL
    runtime: ctypes.CDLL
    signature: str
    statics: tuple[StaticArray, ...]


def compiler() -> str:
    """Path of g++ (``CXX`` overrides).

    Raises
    ------
    EmulatorUnavailableError
        If there is none.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise EmulatorUnavailableError(
            f"the emulator compiles kernels with {name}, which is not on the PATH; install it "
            "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
        )
    return path


@functools.cache
def header_directories() -> tuple[Path, ...]:
    """Include directories of the CUDA header wheels.

    Raises
    ------
    EmulatorUnavailableError
        If a wheel or its header is missing.
    """
    found: dict[Path, None] = {}
    for wheel, header in _WHEELS.items():
        try:
            files = metadata.distribution(wheel).files or []
            path = next(f for f in files if f.as_posix().endswith(f"/include/{header}"))
        except (metadata.PackageNotFoundError, StopIteration):
            raise EmulatorUnavailableError(
                f"the emulator needs the CUDA header {header} of the wheel {wheel}, which is not "
                "installed; install the headers with  python -m pip install 'cupy-decode[emulator]'"
            ) from None
        root = Path(str(path.locate()))
        found[root.parents[header.count("/")]] = None
    return tuple(found)


def _cache() -> Path:
    """The build directory, or a temporary one where the usual one cannot be written."""
    chosen = os.environ.get("CUPY_DECODE_CACHE_DIR")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "cupy_decode"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root / "emulator"
    except OSError:
        return _temporary_cache()


@functools.cache
def _temporary_cache() -> Path:
    return Path(tempfile.mkdtemp(prefix="cupy_decode-"))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _call(command: list[str], purpose: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if not _FRAME.search(line)]
        raise RuntimeError(f"g++ could not {purpose}:\n" + "\n".join(_of_text(lines))[:6000])


def _of_text(lines: list[str]) -> list[str]:
    """What a compiler says of a kernel's own text; of what follows it only that it ended early."""
    told = [
        _AFTER.sub("end of the text: ", line)
        for line in lines
        if not _AFTER.match(line) or "at end of input" in line
    ]
    return told or lines


def _publish(work: Path, target: Path) -> None:
    """Rename a finished directory into place; whoever came first wins."""
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise


@functools.cache
def _tool_key(cxx: str) -> str:
    include = [str(d) for d in header_directories()]  # first: it says which wheels are missing
    wheels = [f"{w} {metadata.version(w)}" for w in _WHEELS]
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    files = [HERE / "runtime.cpp", *sorted(INCLUDE.iterdir())]
    return _digest(cxx, version, *_KERNEL_FLAGS, *wheels, *include, *(f.read_text() for f in files))


def _toolbox(cxx: str, cache: Path) -> Path:
    """Directory with the runtime and the precompiled prelude."""
    target = cache / f"toolbox-{_tool_key(cxx)}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        work = Path(temporary) / "toolbox"
        shutil.copytree(INCLUDE, work)
        system = [f"-I{d}" for d in header_directories()]
        source, runtime = str(HERE / "runtime.cpp"), str(work / _RUNTIME)
        flags = [*_FLAGS, "-shared", f"-Wl,-soname,{target.name}", f"-I{work}"]
        _call([cxx, *flags, source, "-o", runtime, "-ldl"], "build the runtime")
        prelude = ["-x", "c++-header", str(work / "cuda_prelude.h")]
        precompiled = str(work / "cuda_prelude.h.gch")
        _call([cxx, *_KERNEL_FLAGS, *system, *prelude, "-o", precompiled], "read the CUDA headers")
        _publish(work, target)
    return target


def build(text: str, entry: str) -> Path:
    """Compile one specialisation, or find it in the cache.

    Parameters
    ----------
    text : str
        CUDA C++ that compiles on its own; ``#include "ptx.cuh"`` finds the CPU twins.
    entry : str
        C++ name expression of the kernel.

    Returns
    -------
    pathlib.Path
        The shared library.

    Raises
    ------
    EmulatorUnavailableError
        If the compiler or a header is missing.
    RuntimeError
        If the text does not compile.
    """
    cxx = compiler()
    cache = _cache()
    target = cache / f"kernel-{_digest(_tool_key(cxx), text, entry)}"
    library = target / "kernel.so"
    if library.exists():
        return library
    tools = _toolbox(cxx, cache)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        work = Path(temporary) / "kernel"
        work.mkdir()
        source, kernel = work / "kernel.cu", str(work / "kernel.o")
        source.write_text(_HEAD + text + _ENTRY.format(entry=entry))
        include = [f"-I{d}" for d in (tools, *header_directories())]
        prelude = ["-include", str(tools / "cuda_prelude.h")]
        compile_ = [cxx, *_KERNEL_FLAGS, *prelude, *include, "-x", "c++", "-c", str(source)]
        _call([*compile_, "-o", kernel], f"compile {entry}")
        link = ["-shared", kernel, str(tools / _RUNTIME)]
        _call([cxx, *link, "-o", str(work / "kernel.so")], f"link {entry}")
        Path(kernel).unlink()
        _publish(work, target)
    return library


def _statics(library: Path) -> tuple[StaticArray, ...]:
    listing = subprocess.run(
        ["readelf", "-sWC", str(library)], capture_output=True, text=True, check=True
    ).stdout
    found = set()
    for line in listing.splitlines():
        symbol = _TLS_SYMBOL.match(line)
        if symbol and not symbol[3].endswith("emu_tls_anchor"):
            name = re.sub(r"\[.*", "", symbol[3]).rsplit("::", 1)[-1]
            found.add((int(symbol[1], 16), int(symbol[2], 0), name))
    return tuple(StaticArray(name, offset, size) for offset, size, name in sorted(found))


@functools.lru_cache(maxsize=512)
def load(text: str, entry: str) -> Module:
    """Build and load one specialisation (see ``build``)."""
    path = build(text, entry)
    runtime = _runtime(_toolbox(compiler(), path.parents[1]) / _RUNTIME)
    library = ctypes.CDLL(str(path))  # finds the runtime by the name that it was loaded under
    library.emu_signature.restype = ctypes.c_char_p
    return Module(path, library, runtime, library.emu_signature().decode(), _statics(path))


@functools.cache
def _runtime(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _plain(function: str) -> str:
    """A demangled name without its return type, template arguments and parameters."""
    while (shorter := re.sub(r"<[^<>]*>", "", function)) != function:
        function = shorter
    return re.sub(r"\(.*", "", function).rsplit(" ", 1)[-1]


def source_lines(module: Module, pc: int) -> list[tuple[str, str]]:
    """``(function, "file:line")`` of a code offset, innermost call first, twins left out."""
    if pc == 0:
        return []
    command = ["addr2line", "-e", str(module.path), "-i", "-f", "-C", "-s", hex(pc - 1)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    ours = {f.name for f in INCLUDE.iterdir()} - {"ptx.cuh"}
    frames = []
    for function, place in zip(lines[::2], lines[1::2], strict=False):
        place = place.split(" ")[0]
        file = place.split(":")[0]
        if file not in ours and file not in ("??", "entry"):
            frames.append((_plain(function), place))
    return frames
