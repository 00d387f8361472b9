"""From a kernel source to a cubin: NVRTC, the compiler's report as data, the policy on it, and the cache.

Compiling needs no GPU and no driver. NVRTC holds one lock for the whole process, so several kernels compile in parallel
only in several processes: `compile_all`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import megamoe
from megamoe.cuda.cache import Cache, default_directory
from megamoe.cuda.report import Report, parse_log
from megamoe.cuda.sources import CONFIG_HEADER, KERNELS, Config, config_header, include_dirs, source_digest
from megamoe.errors import CompileError, EngineError

__all__ = [
    "ARCHITECTURES",
    "PINNED_NVRTC",
    "TESTED_NVRTC",
    "Compiled",
    "Job",
    "Policy",
    "compile_kernel",
    "is_cached",
    "nvrtc_version",
]

ARCHITECTURES: Final = ("sm_90a", "sm_100a")
"""Targets that the kernels are written for: Hopper, and datacenter Blackwell."""

PINNED_NVRTC: Final = "13.0.88"
"""The NVRTC whose reports are held to the policy in tests; on another one a violation is a warning."""

TESTED_NVRTC: Final = ("13.0.88",)
"""Versions of NVRTC that the shipped kernels were compiled with and run from."""

Policy = Literal["strict", "warn"]
"""What a forbidden remark of the compiler does: raise `CompileError`, or warn once (see `Report.clean`)."""

_OPTIONS: Final = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")
_LOG_LINES: Final = 40


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel file.

    Attributes:
        source: name of the source file.
        arch: the target, such as ``"sm_90a"``; the cubin runs on nothing else.
        cubin: the machine code, for `Driver.load`.
        report: the compiler's report.
        nvrtc: version of the compiler.
        key: content hash of everything that went in.
        cached: whether it came from the cache.
    """

    source: str
    arch: str
    cubin: bytes
    report: Report
    nvrtc: str
    key: str
    cached: bool = False


@dataclass(frozen=True)
class Job:
    """One compilation: arguments of `compile_kernel`."""

    source: str
    config: Config = field(default_factory=dict)
    arch: str = "sm_90a"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise EngineError(
            "nvrtc", f"no cuda-bindings ({error})", "cuda-bindings 13", "pip install 'cuda-bindings>=13,<14'"
        ) from error
    return nvrtc


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != int(nvrtc.nvrtcResult.NVRTC_SUCCESS):
        raise CompileError("nvrtc", str(code), "NVRTC_SUCCESS", "")
    return values[0] if len(values) == 1 else values


def _fetch(nvrtc: Any, size: Any, read: Any, program: Any) -> bytes:
    buffer = b" " * int(_check(nvrtc, size(program)))
    _check(nvrtc, read(program, buffer))
    return buffer


@functools.lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """Full version of the NVRTC in use, such as ``"13.0.88"``, as the compiler writes it into its PTX.

    Raises:
        EngineError: cuda-bindings or NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    try:
        program = _check(nvrtc, nvrtc.nvrtcCreateProgram(b"", b"version.cu", 0, None, None))
    except CompileError:
        raise
    except Exception as error:  # the bindings' loader has exceptions of its own
        raise EngineError(
            "nvrtc", f"not loadable ({error})", "NVRTC 13", "pip install 'nvidia-cuda-nvrtc>=13,<14'"
        ) from error
    options = [b"-arch=compute_90"]
    _check(nvrtc, nvrtc.nvrtcCompileProgram(program, len(options), options))
    ptx = _fetch(nvrtc, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    _check(nvrtc, nvrtc.nvrtcDestroyProgram(program))
    if found := re.search(rb"release [\d.]+, V(\d+\.\d+\.\d+)", ptx):
        return found[1].decode()
    return ".".join(str(v) for v in _check(nvrtc, nvrtc.nvrtcVersion()))


@functools.lru_cache(maxsize=8)
def _cache_at(directory: Path) -> Cache:
    return Cache(directory)


@functools.lru_cache(maxsize=1024)
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _options(arch: str) -> list[str]:
    return [f"-arch={arch}", *_OPTIONS, *(f"-I{d}" for d in include_dirs())]


def _key(path: Path, header: str, arch: str) -> str:
    # Paths of include directories do not change the code; what is found in them is in the digest.
    parts = [
        source_digest(path),
        header,
        arch,
        *_OPTIONS,
        nvrtc_version(),
        megamoe.__version__,
    ]
    return f"{path.stem}-{arch}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]}"


def _run(path: Path, header: str, arch: str) -> tuple[bytes, str]:
    """Cubin and log. Raises CompileError with the first lines of the log."""
    nvrtc = _nvrtc()
    source = path.read_bytes()
    program = _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(source, str(path).encode(), 1, [header.encode()], [CONFIG_HEADER.encode()]),
    )
    options = [o.encode() for o in _options(arch)]
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _fetch(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.decode(errors="replace").strip("\0 \n")
        if int(code) != int(nvrtc.nvrtcResult.NVRTC_SUCCESS):
            lines = text.splitlines()
            head = "\n".join(lines[:_LOG_LINES]) + (f"\n... {len(lines) - _LOG_LINES} more lines" * (len(lines) > 40))
            way_out = "The CUDA headers are missing: pip install 'nvidia-cuda-runtime>=13,<14'. " * (
                "cannot open source file" in text and "cuda_" in text
            )
            raise CompileError(path.name, f"{code} for {arch}", "a kernel that compiles", f"{way_out}\n{head}")
        return _fetch(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _apply(policy: Policy | None, name: str, arch: str, report: Report, config: Config) -> None:
    if report.clean:
        return
    version = nvrtc_version()
    said = "; ".join(report.violations)
    if (policy or ("strict" if version == PINNED_NVRTC else "warn")) == "strict":
        raise CompileError(
            name,
            f"{said} ({arch}, NVRTC {version}, {dict(config)})",
            "no spills and no WGMMA or register remarks",
            "Change the plan or the kernel; the report says where.",
        )
    _warn_once(f"megamoe: NVRTC {version} compiles {name} for {arch} with a loss: {said}. Tested: {PINNED_NVRTC}.")


def compile_kernel(
    source: str | Path,
    config: Config | None = None,
    arch: str = "sm_90a",
    *,
    policy: Policy | None = None,
    cache: Cache | None = None,
) -> Compiled:
    """Compile one kernel file for one architecture, or take it from the cache.

    Args:
        source: file name under ``kernels/``, or a path.
        config: constants that the file sees as ``config::name`` (see `config_header`).
        arch: one of `ARCHITECTURES`.
        policy: what a spill or a forbidden remark does; by default "strict" on `PINNED_NVRTC`, else "warn".
        cache: where to look and store; by default the user's cache directory.

    Raises:
        CompileError: an unknown architecture, a source that does not compile, or a report that breaks the policy.
        EngineError: there is no usable NVRTC.
    """
    if arch not in ARCHITECTURES:
        raise CompileError("arch", arch, " or ".join(ARCHITECTURES), "Other GPUs are not supported.")
    path = KERNELS / source
    config = config or {}
    header = config_header(config)
    key = _key(path, header, arch)
    cache = cache if cache is not None else _cache_at(default_directory())
    entry = _unpack(cache.get(key))
    cached = entry is not None
    if entry is None:
        entry = _run(path, header, arch)
        # A file edited while it was compiled: good for this call, but not under this key.
        if _key(path, header, arch) == key:
            cache.put(key, _pack(*entry))
    cubin, log = entry
    report = parse_log(log)
    _apply(policy, path.name, arch, report, config)
    return Compiled(path.name, arch, cubin, report, nvrtc_version(), key, cached)


def is_cached(job: Job, cache: Cache) -> bool:
    """Whether `compile_kernel` would find `job` in `cache`, with the sources as they are now."""
    return cache.get(_key(KERNELS / job.source, config_header(job.config), job.arch)) is not None


def _pack(cubin: bytes, log: str) -> bytes:
    text = log.encode()
    return len(text).to_bytes(8, "little") + text + cubin


def _unpack(payload: bytes | None) -> tuple[bytes, str] | None:
    if payload is None:
        return None
    end = 8 + int.from_bytes(payload[:8], "little")
    return payload[end:], payload[8:end].decode()
