"""What a measurement was made on: device, driver, versions, commit and date."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["cpu_name", "device_slug", "facts"]


def cpu_name() -> str:
    """The processor's model name with the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found.group(1).strip() if found else name
    except OSError:
        pass
    return f"{name}, {cores()} cores"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_slug(device: str) -> str:
    """Part of a result file's name: ``"cpu-2c"``, or the GPU's short product name (``"h200"``)."""
    if device == "cpu":
        return f"cpu-{cores()}c"
    import torch

    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(device).lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "graphics", "device"))


def _commit() -> str:
    """Commit of the source tree, ``-dirty`` if files of it were changed; ``"unknown"`` for an installed package."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def facts(topic: str, *, device: str = "cpu", gpus: int = 0, protocol: str = "") -> dict[str, Any]:
    """Top-level fields of a result file.

    Args:
        topic: what the file measures, the first part of its name.
        device: ``"cpu"`` or a torch CUDA device.
        gpus: GPUs that took part.
        protocol: one sentence that says how a sample was taken.
    """
    import torch

    driver: str | None = None
    name = cpu_name()
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        try:
            driver = Path("/sys/module/nvidia/version").read_text().strip()
        except OSError:
            driver = None
    return {
        "topic": topic,
        "device": name,
        "gpus": gpus,
        "driver": driver,
        "nvrtc": _version("nvidia-cuda-nvrtc"),
        "torch": torch.__version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "protocol": protocol,
    }
