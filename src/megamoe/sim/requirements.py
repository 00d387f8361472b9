"""What this machine needs to run the simulator, found or refused with a sentence that says what to do."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
from pathlib import Path

from megamoe.cuda.sources import include_dirs
from megamoe.errors import EngineError

__all__ = ["missing", "require"]

_AT_HWCAP2 = 26
_HWCAP2_FSGSBASE = 2


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _kernel_allows_fsgsbase() -> bool:
    # The flag of the CPU is not enough: Linux sets this bit when user code may use the instructions (5.9 and later).
    return bool(ctypes.CDLL(None).getauxval(ctypes.c_ulong(_AT_HWCAP2)) & _HWCAP2_FSGSBASE)


@functools.lru_cache(maxsize=1)
def missing() -> str | None:
    """The first thing that is missing, as a sentence with the way out, or None when the simulator can run."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the simulator runs on Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    for flag in ("avx2", "fma"):
        if flag not in _cpu_flags():
            return f"this CPU has no {flag.upper()}"
    if not _kernel_allows_fsgsbase():
        return "user code may not set the FS base here: it needs a CPU with FSGSBASE and Linux 5.9 or later"
    for tool in ("g++", "addr2line"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed: install GCC 11 or later and binutils"
    headers = {
        "cuda_fp8.h": "nvidia-cuda-runtime",
        "crt/host_defines.h": "nvidia-cuda-crt",
        "nv/target": "nvidia-cuda-cccl",
    }
    for header, wheel in headers.items():
        if not any((directory / header).is_file() for directory in include_dirs()):
            return f"<{header}> is not found: pip install 'megamoe[sim]' (it is in {wheel})"
    return None


def require() -> None:
    """Raise EngineError unless the simulator can run here."""
    reason = missing()
    if reason is not None:
        raise EngineError("simulator", reason, "Linux x86-64 with AVX2, FSGSBASE, g++ and CUDA headers", "")
