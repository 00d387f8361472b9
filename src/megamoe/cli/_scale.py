"""``megamoe bench scale`` for people and machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamoe.bench.scale import Scale

__all__ = ["OPTIONS", "scale"]

OPTIONS = ("model", "tokens", "ranks", "devices", "backend", "budget", "resume", "out", "as_json")
"""Options of ``megamoe bench`` that this topic takes."""


def scale(given: dict[str, Any], out: Path, *, resume: bool, as_json: bool) -> None:
    """Run it, write it, print it; exit code 1 when a check failed.

    Args:
        given: arguments of `Scale.planned`.
        out: directory of the result file.
        resume: go on with the file of a run that was cut short.
        as_json: print the document instead of tables.

    Raises:
        MegaMoEError: as `Scale.planned` and `megamoe.bench.scale.run`.
    """
    # Ranks that share a GPU run at the same time only if their streams have a hardware queue each, of which there are
    # eight unless this, read when CUDA starts, says otherwise.
    if "ranks" in given:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    from megamoe.bench import mega
    from megamoe.bench import scale as topic
    from megamoe.bench.environment import device_slug, facts
    from megamoe.bench.results import result_path
    from megamoe.cli import _console

    _console.writable_directory("out", out)
    plan = topic.Scale.planned(**given)
    about = facts("scale", device=plan.backend, gpus=plan.gpus, protocol=topic.PROTOCOL + mega.PROTOCOL)
    path = result_path(out, "scale", device_slug(plan.backend), plan.gpus)
    record = topic.Record(path, about, resume=plan if resume else None)
    with _console.progress(quiet=as_json) as display:
        task = display.add_task("scale", total=100)
        topic.run(plan, record, lambda what, part: display.update(task, description=what, completed=round(100 * part)))
    if as_json:
        _console.print_json({**about, "rows": record.rows})
    else:
        _console.out().print(_shown(plan, about, record.rows))
        again = f", {record.resumed} rows of it from before" if record.resumed else ""
        _console.out().print(f"written: {path}{again}")
    if not all(row["ok"] for row in record.rows):
        raise typer.Exit(1)


def _shown(plan: Scale, about: dict[str, Any], rows: list[dict[str, Any]]) -> RenderableType:
    """Times of all models by tokens, then the checks."""
    from rich.console import Group

    from megamoe.bench.scale_table import check_lines
    from megamoe.cli import _console

    where = f"{plan.ranks} ranks on {plan.gpus or 'no'} GPU{'s' if plan.gpus != 1 else ''}"
    parts: list[RenderableType] = [f"{about['device']}, {where}"]
    timed = {(row["model"], row["tokens"]): row for row in rows if row["phase"] == "table"}
    if timed:
        table = _console.plain_table("Kernel, call in us")
        models = list(dict.fromkeys(name for name, _ in timed))
        table.add_column("M", justify="right")
        for name in models:
            one = next(row for (model, _), row in timed.items() if model == name)
            table.add_column(f"{name} {one['ranks']} x {one['experts_per_rank']}", justify="right")
        for tokens in sorted({m for _, m in timed}):
            cells = []
            for name in models:
                row = timed.get((name, tokens))
                text = "" if row is None else f"{row['kernel_us']['median']:,.0f}, {row['e2e_us']['median']:,.0f}"
                cells.append(text if row is None or row["ok"] else f"{text} WRONG")
            table.add_row(str(tokens), *cells)
        parts.append(table)
    checks = _console.plain_table("Checks")
    for heading in ("check", "layer", "found", ""):
        checks.add_column(heading)
    for what, layer, found, right in check_lines(rows):
        checks.add_row(what, layer, found, "ok" if right else "WRONG")
    return Group(*parts, checks)
