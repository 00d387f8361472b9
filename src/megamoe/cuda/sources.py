"""Where kernel sources are, what they include, and the header that carries a plan's constants into them.

No CUDA library is needed here: the simulator builds the same sources with the same header.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from megamoe.errors import CompileError

__all__ = ["CONFIG_HEADER", "KERNELS", "Config", "config_header", "include_dirs", "source_digest"]

KERNELS: Final = Path(__file__).resolve().parent.parent / "kernels"
"""Directory of the device code, package data."""

CONFIG_HEADER: Final = "config.cuh"
"""Name under which a kernel includes its generated constants; no such file exists on disk."""

Config = Mapping[str, "bool | int | float"]
"""Constants of one compilation: identifier -> value."""

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_INCLUDE: Final = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)


def config_header(config: Config) -> str:
    """C++ text of the constants of one compilation, the same text for equal configurations.

    ``{"kHidden": 4096, "kExact": True}`` becomes ``namespace config { constexpr int kHidden = 4096; ... }``. Integers
    are ``int``, or ``long long`` where they do not fit; floats are exact (hexadecimal literals).

    Raises:
        CompileError: a name that is no identifier, or a value that is neither bool, int nor finite float.
    """
    lines = ["// Generated: the constants of this plan.", "#pragma once", "namespace config {"]
    for name in sorted(config):
        value = config[name]
        if not _IDENTIFIER.match(name):
            raise CompileError("config", name, "C++ identifiers as names", "Rename the entry.")
        if isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {'true' if value else 'false'};")
        elif isinstance(value, int):
            if not -(2**63) < value < 2**63:
                raise CompileError(f"config[{name!r}]", value, "integers of 64 bits", "Pass it as an argument instead.")
            small = -(2**31) < value < 2**31
            lines.append(f"constexpr {'int' if small else 'long long'} {name} = {value}{'' if small else 'll'};")
        elif isinstance(value, float) and value - value == 0:
            lines.append(f"constexpr float {name} = static_cast<float>({value.hex()});  // {value!r}")
        else:
            raise CompileError(
                f"config[{name!r}]", value, "bool, int or finite float", "Pass it as an argument instead."
            )
    return "\n".join([*lines, "}  // namespace config", ""])


@functools.lru_cache(maxsize=1)
def include_dirs() -> tuple[Path, ...]:
    """Directories searched for ``#include``: the kernels, then the CUDA headers that pip installed.

    The headers (``cuda_fp8.h`` and what it includes) come with ``nvidia-cuda-runtime``; `compile` says so when they
    are missing.
    """
    found = [KERNELS]
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations if spec else None) or ():
        found += [d for d in sorted(Path(place).glob("cu*/include"), reverse=True) if (d / "cuda_fp8.h").is_file()][:1]
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _scan(path: str, mtime_ns: int, size: int) -> tuple[bytes, tuple[str, ...]]:
    """SHA-256 of a file and the names it includes, by whatever preprocessor condition."""
    text = Path(path).read_bytes()
    names = tuple(dict.fromkeys(m.decode() for m in _INCLUDE.findall(text)))
    return hashlib.sha256(text).digest(), names


def _find(name: str, including: Path, dirs: Iterable[Path]) -> Path | None:
    for directory in (including.parent, *dirs):
        candidate = directory / name
        if candidate.is_file():
            return candidate.resolve()
    return None


def source_digest(source: Path, dirs: Iterable[Path] | None = None) -> str:
    """Hash of every file that `source` can reach through ``#include``, itself included.

    Conditions are not evaluated, so this covers more than one compilation reads, never less. An include that is found
    nowhere (the compiler has some headers built in) counts by its name; it changes the hash when it appears.

    Raises:
        CompileError: `source` does not exist.
    """
    if not source.is_file():
        raise CompileError("source", str(source), f"a file under {KERNELS}", "Check the name of the kernel file.")
    dirs = tuple(dirs) if dirs is not None else include_dirs()
    total = hashlib.sha256()
    seen: set[Path] = set()
    todo = [source.resolve()]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        stat = path.stat()
        digest, names = _scan(str(path), stat.st_mtime_ns, stat.st_size)
        total.update(digest)
        for name in names:
            found = _find(name, path, dirs)
            total.update(name.encode() + (b"+" if found else b"-"))
            if found is not None:
                todo.append(found)
    return total.hexdigest()
