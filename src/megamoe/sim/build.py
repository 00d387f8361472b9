"""Builds for the simulator: its worker program once, a library for each kernel configuration, cached by content.

The same kernel file and the same generated ``config.cuh`` as on the GPU go through g++; with ``checked`` the compiler
inserts a call before every load and store (``-fsanitize=thread``, with the simulator's own runtime behind it).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megamoe.cuda.cache import default_directory
from megamoe.cuda.sources import CONFIG_HEADER, KERNELS, Config, config_header, include_dirs, source_digest
from megamoe.errors import CompileError
from megamoe.sim.requirements import require

__all__ = ["Kernel", "build_all", "entries", "library", "worker"]

HERE: Final = Path(__file__).resolve().parent

_COMMON: Final = (
    "-std=c++17",
    "-mavx2",
    "-mfma",
    "-gdwarf-4",  # addr2line of binutils 2.40 mixes up file names of version 5
    "-fno-strict-aliasing",
    "-fno-stack-protector",
    "-pthread",
)
_KERNEL: Final = (
    "-DMEGAMOE_SIM",
    "-fPIC",
    "-ftls-model=initial-exec",  # shared memory is reached from the FS base
    "-fno-extern-tls-init",
    "-fno-gnu-unique",
    "-fno-threadsafe-statics",
    "-fno-exceptions",
    "-ffp-contract=off",  # the contract's arithmetic rounds each operation
    "-ftrivial-auto-var-init=pattern",  # registers start as garbage
    # A call site must stay one: reports and mutations name it by its return address.
    "-fno-optimize-sibling-calls",
    "-fno-crossjumping",
    "-fno-tree-tail-merge",
    "-fno-ipa-icf",
    "-fno-delete-null-pointer-checks",
    "-w",
)
_ENTRY: Final = re.compile(r'extern "C"\s+__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s*)?(\w+)\s*\(')

_PLAIN: Final = ("-O2",)
_CHECKED: Final = ("-O1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")


@dataclass(frozen=True)
class Kernel:
    """One ``extern "C"`` kernel of one configuration.

    Args:
        source: file under ``kernels/``, or a path.
        entry: its name.
        config: constants that the file sees as ``config::name``, as for `megamoe.cuda.toolchain.compile_kernel`.
    """

    source: str
    entry: str
    config: tuple[tuple[str, bool | int | float], ...] = field(default=())

    @classmethod
    def of(cls, source: str | Path, entry: str, config: Config | None = None) -> Kernel:
        """From a configuration as a mapping."""
        return cls(str(source), entry, tuple(sorted((config or {}).items())))

    @property
    def path(self) -> Path:
        """The source file."""
        return (KERNELS / self.source).resolve()


def _directory() -> Path:
    """Next to the compiled kernels of the GPU, or in the temporary directory when that cannot be written."""
    wanted = default_directory().with_name("sim")
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        # A file of this call alone: a thread that found another one's probe gone would go to the other directory, and a
        # library's path is what mutations know its call sites by.
        with tempfile.TemporaryFile(dir=wanted):
            pass
    except OSError:
        wanted = Path(tempfile.gettempdir()) / f"megamoe-sim-{os.getuid()}"
        wanted.mkdir(parents=True, exist_ok=True)
    return wanted


@functools.lru_cache(maxsize=1)
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((_compiler(), *parts)).encode()).hexdigest()[:32]


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        raise CompileError(what, "errors of g++", "a source that g++ compiles", "\n" + "\n".join(lines[:40]))


def _compile_worker(target: Path) -> None:
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{s.stem}.o" for s in sources]

        def compile_one(pair: tuple[Path, Path]) -> None:
            _run(["g++", *_COMMON, "-O3", "-c", str(pair[0]), "-o", str(pair[1])], pair[0].name)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(compile_one, zip(sources, objects, strict=True)))
        built = Path(scratch) / "worker"
        _run(["g++", "-pthread", "-rdynamic", *map(str, objects), "-o", str(built), "-ldl"], "the simulator")
        built.replace(target)


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by one process even when several want it; the lock of a process that dies is free again."""
    if target.exists():
        return target
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            make(target)
    return target


@functools.lru_cache(maxsize=1)
def worker() -> Path:
    """The worker program, built on first use.

    Raises:
        EngineError: this machine cannot run the simulator.
        CompileError: g++ refused.
    """
    require()
    files = sorted((HERE / "runtime").iterdir())
    key = _digest(*_COMMON, *(f.name + f.read_text() for f in files if f.suffix in {".cpp", ".h"}))
    return _once(_directory() / f"worker-{key}", _compile_worker)


def entries(path: Path) -> list[str]:
    """Names of the ``extern "C"`` kernels that a file defines itself."""
    return _ENTRY.findall(path.read_text())


def library(kernel: Kernel, *, checked: bool) -> Path:
    """The library of one kernel file in one configuration, with all of its kernels, built on first use.

    Raises:
        EngineError: this machine cannot run the simulator.
        CompileError: the file does not exist, or g++ refused.
    """
    require()
    dirs = (KERNELS, HERE, *include_dirs()[1:])
    flags = (*_COMMON, *_KERNEL, *(_CHECKED if checked else _PLAIN))
    header = config_header(dict(kernel.config))
    key = _digest(source_digest(kernel.path, dirs), header, *flags)
    name = f"{kernel.path.stem}-{'checked' if checked else 'plain'}-{key}"

    def compile_library(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            here = Path(scratch)
            (here / CONFIG_HEADER).write_text(header)
            unit = here / "unit.cpp"
            kernels = "".join(f"MEGAMOE_SIM_KERNEL({name})\n" for name in entries(kernel.path))
            unit.write_text(f'#include "{kernel.path}"\n{kernels}')
            includes = [f"-I{d}" for d in (here, *dirs)]
            compiled = here / "unit.o"
            _run(["g++", *flags, *includes, "-c", str(unit), "-o", str(compiled)], kernel.path.name)
            built = here / "kernel.so"
            _run(["g++", "-shared", str(compiled), "-o", str(built)], kernel.path.name)
            shutil.move(built, target)

    return _once(_directory() / f"{name}.so", compile_library)


def build_all(wanted: Iterable[tuple[Kernel, bool]]) -> list[Path]:
    """`library` for each (kernel, checked), several compilers at once."""
    worker()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda pair: library(pair[0], checked=pair[1]), wanted))
