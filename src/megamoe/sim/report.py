"""What a simulated run found, with call sites resolved to source lines."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Finding", "Report", "resolve", "resolve_sites"]

_SITE = re.compile(r"@\{(\d+):([0-9a-f]+)\}")
_SKIP = ("ptx_sim/", "runtime/sim.h")
"""Frames that are not the kernel's."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its kind ("race", "deadlock", "bounds", "misuse", "trap", ...) and a sentence."""

    kind: str
    text: str


@dataclass(frozen=True)
class Report:
    """Result of one run.

    Attributes:
        seed, checked: how it was run.
        findings: what is wrong; empty when the run is clean.
        waiting: for a deadlock or livelock, who waits for what, one line for each group of threads.
        seconds, cpu_seconds: time of the run itself, and of the processor in it.
        arrivals: when recorded, for each mbarrier (without its index), who arrived in a phase, as "role
            arrivals/warps", and how many phases had that.
        counters: threads, steps, switches, products (WGMMA), events (copies and products), syncs,
            expiries (deadlines that passed).
    """

    seed: int
    checked: bool
    findings: tuple[Finding, ...] = ()
    waiting: tuple[str, ...] = ()
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    sites: tuple[tuple[str, int, int], ...] = ()
    arrivals: tuple[tuple[str, str, int], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def has(self, text: str) -> bool:
        """Whether `text` occurs in the findings or in the table of waiting threads."""
        return any(text in f"{f.kind}: {f.text}" for f in self.findings) or any(text in w for w in self.waiting)

    def __str__(self) -> str:
        head = f"seed {self.seed}{', checked' if self.checked else ''}: "
        if self.ok:
            return head + f"ok in {self.seconds * 1e3:.1f} ms"
        lines = [head + f"{len(self.findings)} finding(s)"]
        lines += [f"  {f.kind}: {f.text}" for f in self.findings]
        lines += [f"    {w}" for w in self.waiting]
        return "\n".join(lines)


@functools.lru_cache(maxsize=4096)
def _frames(library: str, offset: int) -> str:
    return _resolve_many(library, (offset,))[0]


def _resolve_many(library: str, offsets: Sequence[int]) -> list[str]:
    """``file:line`` of each return address, then of the callers it was inlined into, innermost first."""
    if not offsets:
        return []
    # The address before the return address lies in the call.
    addresses = [f"{offset - 1:#x}" for offset in offsets]
    command = ["addr2line", "-a", "-i", "-e", library, *addresses]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    found: list[list[str]] = []
    for line in lines:
        if line.startswith("0x"):
            found.append([])
        elif found and not any(skip in line for skip in _SKIP) and not line.startswith("??"):
            path, _, number = line.partition(":")
            entry = f"{Path(path).name}:{number.split(' ')[0]}"
            if not found[-1] or found[-1][-1] != entry:
                found[-1].append(entry)
    return [" < ".join(f) if f else "?" for f in found]


def resolve(text: str, libraries: Sequence[Path]) -> str:
    """Replace the call sites in `text` by source lines."""

    def line(match: re.Match[str]) -> str:
        module = int(match[1])
        return _frames(str(libraries[module]), int(match[2], 16)) if module < len(libraries) else "?"

    return _SITE.sub(line, text)


def resolve_sites(sites: Iterable[int], libraries: Sequence[Path]) -> dict[int, str]:
    """Source lines of numeric call sites (module + 1 in the high byte, offset below)."""
    by_module: dict[int, list[int]] = {}
    for site in sites:
        by_module.setdefault((site >> 24) - 1, []).append(site)
    found: dict[int, str] = {}
    for module, members in by_module.items():
        if not 0 <= module < len(libraries):
            found.update(dict.fromkeys(members, "?"))
            continue
        offsets = [m & 0xFFFFFF for m in members]
        found.update(zip(members, _resolve_many(str(libraries[module]), offsets), strict=True))
    return found
