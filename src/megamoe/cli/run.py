"""``megamoe run``: one layer of a checkpoint on several ranks, compared with the oracle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamoe.engine import Backend
from megamoe.errors import InputError
from megamoe.spec import WeightFormat

if TYPE_CHECKING:
    from megamoe.cli._evaluate import Evaluation

__all__ = ["command"]


def command(
    checkpoint: Annotated[Path, typer.Option(help="Directory of a Hugging Face checkpoint.")],
    layer: Annotated[int, typer.Option(help="Index of a layer with experts.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks in this process (default 1). Under torchrun: its processes.")
    ] = None,
    input: Annotated[
        Path | None, typer.Option(help="safetensors file with 'activations', BF16 [T, H]. Default: random rows.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens on each rank. Default: all rows of the input, or 64 random ones.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the output, BF16 [T, H], to this safetensors file.")] = None,
    convert_to: Annotated[
        WeightFormat | None, typer.Option(help="Convert the experts while reading. Default: as they are stored.")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="Engine.")] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="Timed calls.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (png, svg or pdf).")] = None,
) -> None:
    """Run one layer of a checkpoint on several ranks and compare it with the oracle.

    The model's own router (from Transformers) chooses the experts. Exit code 1 if the result does not agree.
    """
    from megamoe.cli._console import PICTURES, progress, writable
    from megamoe.cli._inputs import load_inputs, random_inputs
    from megamoe.cli._job import Job, evaluate

    world = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ and "RANK" in os.environ else None
    if world is not None and ranks not in (None, world):
        raise InputError("ranks", ranks, f"{world}, the processes that torchrun started", "Leave --ranks out.")
    count = world if world is not None else 1 if ranks is None else ranks
    writable("save", save)
    writable("plot", plot, PICTURES)
    first = int(os.environ.get("RANK", 0)) == 0
    with progress(quiet=as_json or not first) as display:
        job = Job(
            checkpoint,
            layer,
            ranks=count,
            backend=backend,
            samples=samples,
            display=display,
            convert_to=convert_to,
        )
        hidden = job.spec.hidden
        if input is None:
            rows = random_inputs(count * (64 if tokens is None else tokens), hidden)
        else:
            rows = load_inputs(input, hidden)
            rows = rows if tokens is None else rows.first(count * tokens)
        evaluation = evaluate(job, rows, distributed=world is not None)
    if evaluation is None:  # another rank than the first: rank 0 reports and exits for all
        return
    report(evaluation, f"{checkpoint.name}, layer {layer}", save=save, as_json=as_json, plot=plot)
    if not evaluation.agrees:
        raise typer.Exit(1)


def report(evaluation: Evaluation, title: str, *, save: Path | None, as_json: bool, plot: Path | None) -> None:
    """Show `evaluation` and write what was asked for."""
    from megamoe.cli import _console, _show

    if save is not None:
        from safetensors.torch import save_file

        save_file({"output": evaluation.output}, str(save))
    if plot is not None:
        _show.figure(evaluation, title).savefig(plot, dpi=110)
    if as_json:
        _console.print_json(evaluation.document())
        return
    out = _console.out()
    out.print(_show.table(evaluation, title))
    for name, path in (("output", save), ("picture", plot)):
        if path is not None:
            out.print(f"{name}: {path}")
