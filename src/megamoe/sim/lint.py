"""Rules that kernel sources keep so that the simulator can run them and both compilers agree, checked on the text.

A breach is a line and a sentence. The rules and their reasons are in docs/simulator.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megamoe.cuda.sources import KERNELS

__all__ = ["CLOCK_FILES", "MOST_LINES", "Breach", "breaches", "lint"]

MOST_LINES: Final = 400

CLOCK_FILES: Final = {
    "sync.cuh": "deadlines of waits",
    "trace.cuh": "time stamps",
    "gemm_sm90.cu": "cycles of a CTA, written out and not looked at",
}
"""Files that may read a clock, and for what."""

_LINES: Final[tuple[tuple[str, str], ...]] = (
    (r"\basm\b", "asm belongs into kernels/ptx/: wrap the instruction"),
    (r"\bvolatile\b", "volatile: use ptx::ld_* and ptx::st_*, which name semantics and scope"),
    (r"\b(printf|assert)\s*\(", "printf and assert make stack frames and serialise WGMMA"),
    (
        r"\b__(shfl|ballot|any|all|match|reduce|activemask|syncwarp)\w*\s*\(",
        "warp collectives go through ptx.cuh, over all 32 lanes",
    ),
    (r"\b__(nanosleep|trap|threadfence\w*|cvta\w*)\s*\(", "use the wrapper of ptx.cuh"),
    (r"\batomic[A-Z]\w*\s*\(", "atomics go through ptx.cuh, which names semantics and scope"),
    (r"\bclock(64)?\s*\(\s*\)(?<!ptx::clock\(\))", "clocks go through ptx.cuh"),
    (r"#\s*include\s*<", "only ptx.cuh includes the CUDA headers"),
    (r"\.(address|pointer)\b", "a shared address is opaque: add bytes to it"),
    (r"\b__constant__\b", "no __constant__ data: there is one copy for all ranks in the simulator"),
)
_CLOCKS: Final = re.compile(r"\bptx::(clock|globaltimer|deadline_after|deadline_passed)\s*\(")
_SHARED: Final = re.compile(r"\bextern\s+__shared__\b[^;]*;")
_SHARED_TEXT: Final = re.compile(r"extern __shared__ __align__\(1024\) (ptx::u8|unsigned char) smem\[\];\Z")
_LOOP: Final = re.compile(r"\b(?:while|for)\s*\(")
_NOTHING: Final = re.compile(r"\s*(?:;|\{\s*\})")
_STATIC: Final = re.compile(r"\bstatic\s+(?!constexpr\b|const\b|inline\b|MEGAMOE_DEVICE\b)[^()=;{]*[=;{]")
_DEVICE_VARIABLE: Final = re.compile(
    r"^\s*(?:static\s+)?__device__\s+(?!constexpr\b|const\b)[^()]*[=;\[]", re.MULTILINE
)
_TOKEN: Final = re.compile(r"\bnamespace\b[^{;]*[{;]|[{}]|\b__global__\b")


@dataclass(frozen=True)
class Breach:
    """One breach of a rule."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def _without_comments(text: str) -> str:
    """The same text with comments and string contents blanked, so that line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        if found.startswith('"'):
            return '"' + " " * (len(found) - 2) + '"'
        return re.sub(r"[^\n]", " ", found)

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.DOTALL)


def _outside_global_namespace(code: str) -> Iterator[int]:
    """Positions of kernels that stand inside a namespace."""
    stack: list[bool] = []
    for token in _TOKEN.finditer(code):
        text = token[0]
        if text == "__global__":
            if any(stack):
                yield token.start()
        elif text == "}":
            if stack:
                stack.pop()
        elif text.endswith("{"):
            stack.append(text.startswith("namespace"))


def _closing(code: str, position: int) -> int:
    """Position of the parenthesis that closes the one at `position`."""
    depth = 0
    for i in range(position, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if depth == 0:
            return i
    return len(code) - 1


def _ends_do(code: str, position: int) -> bool:
    """Whether the ``while`` at `position` is the end of a ``do`` block."""
    before = code[:position].rstrip()
    if not before.endswith("}"):
        return False
    depth = 0
    for i in range(len(before) - 1, -1, -1):
        depth += {"}": 1, "{": -1}.get(before[i], 0)
        if depth == 0:
            return re.search(r"\bdo\s*\Z", before[:i]) is not None
    return False


def breaches(path: Path, text: str | None = None) -> list[Breach]:
    """Breaches in one kernel file outside ``kernels/ptx/``; `text` replaces the file's own."""
    source = path.read_text() if text is None else text
    code = _without_comments(source)
    found: list[Breach] = []

    def add(position: int, what: str) -> None:
        found.append(Breach(path, code.count("\n", 0, position) + 1, what))

    count = source.count("\n")
    if count > MOST_LINES:
        found.append(Breach(path, count, f"{count} lines, at most {MOST_LINES}: split the file by role"))
    if path.suffix == ".cuh" and "#pragma once" not in source:
        found.append(Breach(path, 1, "a header without #pragma once"))
    is_door = path.name == "ptx.cuh"
    for pattern, what in _LINES:
        if is_door and "include" in pattern:
            continue
        for match in re.finditer(pattern, code):
            add(match.start(), what)
    if path.name not in CLOCK_FILES:
        for match in _CLOCKS.finditer(code):
            add(match.start(), f"clocks are for {', '.join(CLOCK_FILES)} only: no control flow may depend on time")
    for match in _SHARED.finditer(code):
        if not _SHARED_TEXT.match(match[0]):
            add(match.start(), "dynamic shared memory is `extern __shared__ __align__(1024) ptx::u8 smem[];`")
    for match in _LOOP.finditer(code):
        end = _closing(code, match.end() - 1) + 1
        empty = _NOTHING.match(code, end) and not _ends_do(code, match.start())
        if empty and "ptx::" not in code[match.start() : end]:
            add(match.start(), "a spin without a wrapper: the simulator cannot schedule it, the compiler may hoist it")
    for match in _STATIC.finditer(code):
        add(match.start(), "a mutable static: one copy for all CTAs and ranks")
    for match in _DEVICE_VARIABLE.finditer(code):
        add(match.start(), "a mutable __device__ variable: pass a pointer")
    for position in _outside_global_namespace(code):
        add(position, "kernels stand in the global namespace: `smem` belongs to it")
    return sorted(found, key=lambda b: b.line)


def lint(directory: Path = KERNELS) -> list[Breach]:
    """Breaches in all kernel files of a directory, those under ``ptx/`` excepted."""
    files = sorted(p for p in directory.rglob("*.cu*") if p.parent.name != "ptx")
    return [breach for path in files for breach in breaches(path)]
