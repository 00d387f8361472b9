"""``megamoe trace``: one call of the fused kernel, phase by phase, as a table, a picture and a Perfetto file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamoe.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamoe.cuda.trace import Recording

__all__ = ["command"]


def command(
    model: Annotated[str, typer.Option(help="flash, pro, mimo, v3, qwen3.")] = "flash",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens on each rank.")] = 512,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the group.")] = 1,
    devices: Annotated[
        str | None, typer.Option(help="GPUs over which the ranks are dealt, as 0,1; default: all on the current one.")
    ] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of a rank; default: one of eight ranks'.")] = None,
    routing: Annotated[str, typer.Option(help="random, balanced, zipf, hot, all-remote.")] = "random",
    simulate: Annotated[
        str | None, typer.Option(help="Trace this case in the simulator instead (swap, mixed, lag, ...).")
    ] = None,
    load: Annotated[Path | None, typer.Option(help="Stamps that --save wrote, maybe on another machine.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the raw stamps (.npz).")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for https://ui.perfetto.dev (.json).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (png, svg or pdf).")] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="The rank to show; default: rank 0's table, all ranks in one picture.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Record the phases of every CTA and role in one call of the GPU kernel, and say where the time goes."""
    from megamoe.cli import _console
    from megamoe.cuda.trace import Recording, phase_times, write_chrome

    if load is not None and simulate is not None:
        raise InputError("load", "with --simulate", "one of them", "Leave one out.")
    _console.writable("save", save, (".npz",))
    _console.writable("perfetto", perfetto, (".json",))
    _console.writable("plot", plot, _console.PICTURES)
    if load is not None:
        recording = Recording.load(load)
    elif simulate is not None:
        from megamoe.sim.trace import record as simulated

        recording = simulated(simulate)
    else:
        from megamoe.bench.timeline_ranks import record_ranks

        recording = record_ranks(
            model, tokens, ranks=ranks, devices=_ordinals(devices), routing=routing, experts_per_rank=experts
        )
    together = rank is None and len(recording.stamps) > 1
    rank = rank or 0
    if rank >= len(recording.stamps):
        raise InputError("rank", rank, f"0 to {len(recording.stamps) - 1}", "The recording has no more ranks.")
    if save is not None:
        recording.save(save)
    if perfetto is not None:
        write_chrome(recording, perfetto)
    if plot is not None:
        from megamoe.bench.timeline import draw

        draw(recording, plot, None if together else rank)
    if as_json:
        phases = [asdict(row) for row in phase_times(recording, rank)]
        document = {**recording.about, "unit": recording.unit, "rank": rank, "truncated": recording.truncated}
        clocks = {"clocks": list(recording.clocks), "clock_uncertainty": recording.alignment().uncertainty}
        _console.print_json({**document, **clocks, "phases": phases})
        return
    _console.out().print(_table(recording, rank))


def _ordinals(text: str | None) -> list[int] | None:
    """``0,1`` as numbers."""
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InputError("devices", text, "numbers of GPUs with commas between", "Write --devices 0,1.") from error


def _table(recording: Recording, rank: int) -> RenderableType:
    from megamoe.cli import _console
    from megamoe.cuda.trace import phase_times

    about, nanoseconds = recording.about, recording.unit == "ns"
    ctas, unit = len(recording.stamps[rank]), "us" if nanoseconds else recording.unit
    where = f"rank {rank} of {len(recording.stamps)}, {ctas} CTAs"
    title = f"{about.get('model')}, {about.get('tokens')} tokens a rank, {where}"
    table = _console.plain_table(title)
    table.add_column("role")
    table.add_column("phase")
    for heading in ("times", f"{unit} a CTA", "longest", "of the call"):
        table.add_column(heading, justify="right")
    scale = 1e3 if nanoseconds else 1.0
    last = None
    for row in phase_times(recording, rank):
        if last not in (None, row.group):
            table.add_section()
        table.add_row(
            row.group if row.group != last else "",
            row.phase,
            f"{row.count:,}" if row.count else "",
            f"{row.mean / scale:,.1f}",
            f"{row.longest / scale:,.1f}" if row.count else "",
            f"{row.share:.1%}",
        )
        last = row.group
    captions = []
    if recording.truncated:
        captions.append("Some roles had more events than a row holds: what came after them is missing.")
    if len(set(recording.clocks)) > 1:
        captions.append(
            f"Clocks of the GPUs agree to {recording.alignment().uncertainty / scale:,.2f} {unit} or better."
        )
    table.caption = " ".join(captions) or None
    return table
