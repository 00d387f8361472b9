"""Where commands print: results to stdout (a table, or one JSON document), progress to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megamoe.errors import InputError

__all__ = [
    "PICTURES",
    "bars",
    "out",
    "plain_table",
    "print_json",
    "progress",
    "sparkline",
    "writable",
    "writable_directory",
]

_BLOCKS = " ▁▂▃▄▅▆▇█"


def out() -> Console:
    """Console for results. Made on each use, so that it writes to the stdout of that moment."""
    return Console(file=sys.stdout)


def print_json(document: dict[str, Any]) -> None:
    """Print `document` as the command's only output."""
    print(json.dumps(document, indent=2, allow_nan=False))


def progress(*, quiet: bool = False) -> Progress:
    """A progress display on stderr that leaves nothing behind; `quiet` hides it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=quiet,
    )


PICTURES: Final = (".png", ".svg", ".pdf")
"""Suffixes of files that ``--plot`` writes."""


def writable(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse, before the work starts, a path that cannot be written when it is done.

    Raises:
        InputError: the directory does not exist or may not be written, or the suffix is not one of `suffixes`.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise InputError(option, str(path), f"a file name that ends in {', '.join(suffixes)}", "Rename it.")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(option, str(path), "a file in a directory that exists and may be written", "Make it first.")


def writable_directory(option: str, path: Path | None) -> None:
    """Refuse, before the work starts, a directory that cannot be made or written.

    Raises:
        InputError: `path` is a file, or it, or the directory above that exists, may not be written.
    """
    if path is None:
        return
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(option, str(path), "a directory that can be made or written", "Choose another one.")


def plain_table(title: str) -> Table:
    """A table without vertical lines, so that it fits 80 columns."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def sparkline(counts: Sequence[int], most: int | None = None) -> str:
    """One character per count, full height at `most` (default: the largest count); only a zero is blank."""
    top = max(max(counts, default=0) if most is None else most, 1)
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[0 if count == 0 else max(1, round(last * count / top))] for count in counts)


def bars(counts: Sequence[int], width: int) -> list[int]:
    """Sum `counts` into at most `width` neighbouring bins, so that many experts fit on one line."""
    if len(counts) <= width:
        return list(counts)
    per_bin = -(-len(counts) // width)
    return [sum(counts[start : start + per_bin]) for start in range(0, len(counts), per_bin)]
