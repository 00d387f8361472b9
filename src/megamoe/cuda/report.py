"""What the compiler said about a kernel, as data, and which of it the policy forbids.

NVRTC's log (with ``--ptxas-options=-v``) carries the report of ptxas. Codes that matter here, all of them "potential
performance loss" notes of ptxas: C7508 (``setmaxnreg`` ignored), C7510, C7511, C7514, C7515, C7517 and C7519 (WGMMA
serialised, or waits added around it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["FORBIDDEN_CODES", "Diagnostic", "FunctionReport", "Report", "parse_log"]

FORBIDDEN_CODES: Final = frozenset({"C7508", "C7510", "C7511", "C7514", "C7515", "C7517", "C7519"})
"""ptxas notes that mean that a kernel is not the kernel that was written."""

_ENTRY: Final = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION: Final = re.compile(r"Function properties for (\S+)")
_FRAME: Final = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS: Final = re.compile(r"Used (\d+) registers")
_SHARED: Final = re.compile(r"(\d+) bytes smem")
_BARRIERS: Final = re.compile(r"used (\d+) barriers")
_CODE: Final = re.compile(r"\((C7\d{3})\)\s*(.*)")
_FRONT_END: Final = re.compile(r"\b(?:warning|error)\b[^:]*:\s*(.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Diagnostic:
    """One remark of the compiler: `code` is ptxas' number ("C7508") or "" for a warning of the front end."""

    code: str
    text: str


@dataclass(frozen=True)
class FunctionReport:
    """ptxas' figures for one function; sizes in bytes, `registers` a thread.

    A device function that was not inlined has its own entry, with `entry` False and no registers of its own.
    """

    name: str
    entry: bool
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0
    barriers: int = 0

    @property
    def spills(self) -> bool:
        """Whether registers go to local memory."""
        return self.spill_stores > 0 or self.spill_loads > 0


@dataclass(frozen=True)
class Report:
    """Report of one compilation: its functions, and the compiler's remarks."""

    functions: tuple[FunctionReport, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()

    @property
    def violations(self) -> tuple[str, ...]:
        """What the policy forbids, one sentence each: any spill, any of `FORBIDDEN_CODES`."""
        found = [
            f"{f.name} spills {f.spill_stores} bytes of stores and {f.spill_loads} of loads"
            for f in self.functions
            if f.spills
        ]
        return (*found, *(f"{w.code}: {w.text}" for w in self.warnings if w.code in FORBIDDEN_CODES))

    @property
    def clean(self) -> bool:
        """Whether nothing forbidden was reported. Callers pick the nearest plan whose report is clean."""
        return not self.violations

    def function(self, name: str) -> FunctionReport:
        """The report of kernel `name`. Raises KeyError when there is none."""
        for f in self.functions:
            if f.name == name:
                return f
        raise KeyError(name)


def parse_log(log: str) -> Report:
    """Read NVRTC's log. Lines that are not understood are ignored: a new compiler may say more, not less."""
    functions: dict[str, dict[str, int]] = {}
    entries: set[str] = set()
    warnings: list[Diagnostic] = []
    current: dict[str, int] | None = None
    for line in log.splitlines():
        if m := _ENTRY.search(line):
            entries.add(m[1])
            current = functions.setdefault(m[1], {})
        elif m := _FUNCTION.search(line):
            current = functions.setdefault(m[1], {})
        elif m := _CODE.search(line):
            warnings.append(Diagnostic(m[1], m[2].strip()))
        elif m := _FRAME.search(line):
            if current is not None:
                current.update(stack=int(m[1]), spill_stores=int(m[2]), spill_loads=int(m[3]))
        elif m := _REGISTERS.search(line):
            if current is not None:
                current["registers"] = int(m[1])
                for key, pattern in (("shared", _SHARED), ("barriers", _BARRIERS)):
                    if more := pattern.search(line):
                        current[key] = int(more[1])
        elif m := _FRONT_END.search(line):
            warnings.append(Diagnostic("", m[1].strip()))
    return Report(tuple(FunctionReport(n, n in entries, **f) for n, f in functions.items()), tuple(warnings))
