"""Result files: one JSON document per topic and device, merged row by row.

``benchmarks/results/<topic>-<device>[-x<gpus>].json`` has the fields of `megamoe.bench.environment.facts` and ``rows``.
A row holds *keys* that say what was measured (`KEYS`; those that do not apply are left out), *figures*, and the commit
and date of its own measurement. A time is written by `timing` with every sample, so that anybody can recompute the
summary.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from megamoe.errors import InputError
from megamoe.spec import MoESpec

__all__ = ["KEYS", "Row", "key", "layer_keys", "load", "merge", "result_path", "timing", "write"]

Row = dict[str, Any]

KEYS: Final = (
    "model",
    "hidden",
    "intermediate",
    "ranks",
    "experts_per_rank",
    "topk",
    "tokens",
    "routing",
    "shares",
    "phase",
    "bound",
    "protocol",
    "engine",
    "format",
    "plan",
    "variant",
)
"""Fields that identify a row. A newer row replaces the one with equal values of all of them."""


def timing(samples: Sequence[float]) -> dict[str, Any]:
    """Summary of `samples` (one unit, microseconds where the field's name ends in ``_us``) with every sample.

    Raises:
        InputError: no samples.
    """
    if not samples:
        raise InputError("samples", "none", "at least one", "Measure before reporting.")
    values = [round(float(s), 3) for s in samples]
    return {"median": round(median(values), 3), "min": min(values), "max": max(values), "samples": values}


def key(row: Row) -> tuple[Any, ...]:
    """What `row` measured; equal for two measurements of the same thing."""
    return tuple(row.get(name) for name in KEYS)


def layer_keys(name: str, spec: MoESpec, ranks: int) -> Row:
    """The keys that say which layer was measured, on how many ranks."""
    return {
        "model": name,
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "ranks": ranks,
        "experts_per_rank": spec.local_experts(ranks),
        "topk": spec.topk,
    }


def result_path(directory: Path, topic: str, device: str, gpus: int = 0) -> Path:
    """File of a topic and device slug; `gpus` above 1 is part of the name."""
    return directory / (f"{topic}-{device}" + (f"-x{gpus}" if gpus > 1 else "") + ".json")


def load(path: Path) -> dict[str, Any]:
    """The document at `path`.

    Raises:
        InputError: there is none, or it is not a result file.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError("path", str(path), "a result file", f"Run the benchmark that writes it ({error}).") from error
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise InputError("path", str(path), "a JSON object with rows", "Run the benchmark that writes it.")
    return document


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Rows of `old` whose keys `new` does not have, in their places, with the rows of `new` replacing or following."""
    rows = {key(row): row for row in old}
    rows.update({key(row): row for row in new})
    return list(rows.values())


def write(
    path: Path, facts: dict[str, Any], rows: Iterable[Row], *, cell: Sequence[str] | None = None
) -> dict[str, Any]:
    """Merge `rows` into the file at `path` and return the document written.

    With `cell`, the names of some keys, older rows that have the values of a new one in all of these go, too: those of
    a plan that is not chosen any more, say.

    A row without a commit and a date gets those of `facts`. The file is replaced in one step: a reader or a crash never
    sees half of it.
    """
    stamped = [{**row, **{name: row.get(name, facts[name]) for name in ("commit", "date")}} for row in rows]
    old = load(path)["rows"] if path.exists() else []
    if cell is not None:
        cells = {tuple(row.get(name) for name in cell) for row in stamped}
        old = [row for row in old if tuple(row.get(name) for name in cell) not in cells]
    document = {**facts, "rows": merge(old, stamped)}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(_dump(document))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return document


def _dump(document: dict[str, Any]) -> str:
    """JSON with one line per row, so that a diff shows which rows changed."""
    head = {name: value for name, value in document.items() if name != "rows"}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    rows = ",\n".join("    " + json.dumps(row) for row in document["rows"])
    return "{\n" + "\n".join(lines) + '\n  "rows": [\n' + rows + "\n  ]\n}\n"
