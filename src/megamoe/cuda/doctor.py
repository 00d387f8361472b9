"""What this machine has, what will run on it, and why the rest will not. Nothing here raises for what is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import megamoe
from megamoe.cuda import toolchain
from megamoe.cuda.cache import default_directory
from megamoe.cuda.driver import Driver, open_driver
from megamoe.cuda.sources import include_dirs
from megamoe.errors import MegaMoEError
from megamoe.integrations import hosts

__all__ = ["HOSTS", "examine"]

HOSTS: Final = ("transformers", "sglang", "vllm")
"""Packages that can host the layer, for their versions; `megamoe.integrations.hosts` looks closer."""

_RUNNING_ARCH: Final = "sm_90a"
"""The architecture that the GPU engine runs on; kernels for the others are only compiled."""

Report = dict[str, Any]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sentence(error: MegaMoEError) -> str:
    return f"{error.given}; needs {error.allowed}. {error.way_out}"


def _driver_release() -> str | None:
    """Release of the kernel module, such as "580.159.04"."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        pass
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else None
    except OSError:
        return None


def _gpus(open_it: Callable[[], Driver]) -> tuple[Report, list[Report], list[Report]]:
    """Driver, GPUs and links; a problem is a sentence in the driver's entry."""
    found: Report = {"cuda": None, "release": _driver_release(), "problem": None}
    gpus: list[Report] = []
    links: list[Report] = []
    try:
        driver = open_it()
        number = driver.version()
        found["cuda"] = f"{number // 1000}.{number % 1000 // 10}"
        count = driver.device_count()
        for i in range(count):
            gpu = driver.device(i)
            gpus.append(
                {
                    **asdict(gpu),
                    "compute_capability": list(gpu.compute_capability),
                    "arch": gpu.arch,
                    "runs": gpu.arch == _RUNNING_ARCH,
                }
            )
        links = [asdict(driver.peer(a, b)) for a in range(count) for b in range(count) if a != b]
        if count == 0:
            found["problem"] = "the driver sees no GPU"
    except MegaMoEError as error:
        found["problem"] = _sentence(error)
    return found, gpus, links


def _nvrtc() -> Report:
    found: Report = {"version": None, "tested": list(toolchain.TESTED_NVRTC), "problem": None}
    try:
        found["version"] = toolchain.nvrtc_version()
    except MegaMoEError as error:
        found["problem"] = _sentence(error)
        return found
    headers = [str(d) for d in include_dirs()[1:]]
    found["headers"] = headers
    if not headers:
        found["problem"] = "the CUDA headers are missing: pip install 'nvidia-cuda-runtime>=13,<14'"
    elif found["version"] not in toolchain.TESTED_NVRTC:
        found["note"] = "not among the tested versions: a kernel may spill; it is then reported and avoided"
    return found


def _cache() -> Report:
    directory = default_directory()
    place = next((p for p in (directory, *directory.parents) if p.exists()), Path("/"))
    return {"directory": str(directory), "writable": os.access(place, os.W_OK)}


def _torch() -> Report:
    try:
        import torch
    except ImportError as error:
        return {"version": None, "cuda": None, "available": False, "problem": str(error)}
    available = torch.cuda.is_available()
    problem = None
    if torch.version.cuda is None:
        problem = "this build of torch has no CUDA"
    elif not available:
        problem = f"built for CUDA {torch.version.cuda}, but torch.cuda.is_available() is false"
    return {"version": torch.__version__, "cuda": torch.version.cuda, "available": available, "problem": problem}


def _simulator() -> Report:
    compiler = shutil.which("g++")
    name = None
    if compiler is not None:
        try:
            asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20)
            name = asked.stdout.splitlines()[0] if asked.stdout else compiler
        except (OSError, subprocess.TimeoutExpired):
            name = compiler
    missing = [p for p in ("nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime") if _version(p) is None]
    problem = None
    if compiler is None:
        problem = "no g++ on the PATH"
    elif platform.machine() != "x86_64":
        problem = f"needs x86-64, this is {platform.machine()}"
    elif missing:
        problem = f"missing {', '.join(missing)}: pip install 'megamoe[sim]'"
    return {"compiler": name, "problem": problem}


def _verdicts(report: Report) -> list[Report]:
    """What runs, and the first reason why not."""
    able = [g for g in report["gpus"] if g["runs"]]
    reason = report["driver"]["problem"] or report["nvrtc"]["problem"]
    if reason is None and not able:
        names = ", ".join(f"{g['name']} ({g['arch']})" for g in report["gpus"])
        reason = f"needs Hopper (sm_90a: H100, H200, H800, H20); found {names}"
    if reason is None:
        reason = report["torch"]["problem"]
    ordinals = {g["ordinal"] for g in able}
    blind = [p for p in report["peers"] if not p["access"] and {p["source"], p["target"]} <= ordinals]
    several = reason
    if several is None and len(able) < 2:
        several = "needs two or more GPUs; several ranks can share one"
    elif several is None and blind:
        pairs = ", ".join(f"{p['source']}->{p['target']}" for p in blind)
        several = f"no direct access between GPUs {pairs}"
    return [
        {"what": "CPU engine", "why_not": None if report["torch"]["version"] else report["torch"]["problem"]},
        {"what": "compile the kernels", "why_not": report["nvrtc"]["problem"]},
        {"what": "GPU engine, one GPU", "why_not": reason},
        {"what": "GPU engine, several GPUs", "why_not": several},
        {"what": "kernel simulator", "why_not": report["simulator"]["problem"]},
    ]


def examine(open_it: Callable[[], Driver] = open_driver) -> Report:
    """Everything `megamoe doctor` says, as data for JSON.

    Args:
        open_it: opens the driver; for tests.

    Returns:
        ``megamoe python platform driver gpus peers nvrtc cache torch hosts simulator runs integrations``. An entry of
        the last two has ``what`` and ``why_not``, which is None for what will run.
    """
    driver, gpus, peers = _gpus(open_it)
    report: Report = {
        "megamoe": megamoe.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "driver": driver,
        "gpus": gpus,
        "peers": peers,
        "nvrtc": _nvrtc(),
        "cache": _cache(),
        "torch": _torch(),
        "hosts": {name: _version(name) for name in HOSTS},
        "simulator": _simulator(),
    }
    report["runs"] = _verdicts(report)
    report["integrations"] = hosts.examine()
    return report
