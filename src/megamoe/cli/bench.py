"""``megamoe bench``: measure, print, and keep every sample in a JSON file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from megamoe.bench.request import TOPICS
from megamoe.engine import Backend
from megamoe.errors import InputError
from megamoe.spec import WeightFormat

__all__ = ["command"]

_SCALE: Final = "scale"


def _numbers(text: str, what: str = "tokens", example: str = "--tokens 1,32,512") -> tuple[int, ...]:
    try:
        values = tuple(int(word) for word in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 0:
        raise InputError(what, text, "numbers from 0, separated by commas", f"For example: {example}.")
    return values


def command(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help=f"What to measure: {', '.join(TOPICS)}, {_SCALE}.")] = "layer",
    model: Annotated[str, typer.Option(help="flash, pro, mimo, v3, qwen3; several separated by commas.")] = "qwen3",
    tokens: Annotated[str, typer.Option(help="Tokens on each rank, separated by commas.")] = "1,8,32,128",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks in this process.")] = 1,
    devices: Annotated[
        str | None, typer.Option(help="GPUs over which the ranks are dealt in blocks, separated by commas.")
    ] = None,
    peers: Annotated[
        bool, typer.Option(help="Also NCCL with torch's grouped GEMM, where every rank has a GPU (--devices).")
    ] = False,
    experts: Annotated[
        int | None, typer.Option(help="Experts over all ranks; 0 for the model's own number. Weights must fit.")
    ] = 16,
    routing: Annotated[str, typer.Option(help="random, balanced, zipf, hot, all-remote; commas.")] = "random",
    format: Annotated[WeightFormat, typer.Option(help="How the weights are held.")] = "fp8_block",
    backend: Annotated[Backend, typer.Option(help="Engine.")] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="Samples of each measurement.")] = 30,
    seconds: Annotated[float, typer.Option(help="Stop a measurement early after this time (3 samples at least).")] = 5,
    check: Annotated[bool, typer.Option(help="Compare each measured output with the oracle.")] = True,
    out: Annotated[Path | None, typer.Option(help="Merge the rows into a result file in this directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (png, svg or pdf).")] = None,
    budget: Annotated[float, typer.Option(help="scale: seconds for all of it; less means fewer samples.")] = 540,
    resume: Annotated[bool, typer.Option(help="scale: go on where a run of this commit was cut short.")] = False,
) -> None:
    """Measure one topic on this machine; every combination of models, routings and tokens.

    scale checks and times a group of ranks on all GPUs of the machine in one run (by default one rank a GPU; flash, pro
    and mimo at 8 to 8192 tokens) and writes its rows at once, into --out or the current directory.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    if topic == _SCALE:
        _scale(context.params, given)
        return
    for name in sorted(given & {"budget", "resume"}):
        raise InputError(f"--{name}", f"with {topic}", f"only {_SCALE}", "Leave it out.")
    from megamoe.bench.environment import device_slug, facts
    from megamoe.bench.request import Request
    from megamoe.bench.results import result_path, write
    from megamoe.cli import _console

    if topic not in TOPICS:
        raise InputError("topic", topic, ", ".join((*TOPICS, _SCALE)), "Pick one of the listed topics.")
    _console.writable("plot", plot, _console.PICTURES)
    _console.writable_directory("out", out)
    request = Request(
        models=tuple(model.split(",")),
        tokens=_numbers(tokens),
        ranks=ranks,
        experts=experts or None,
        routings=tuple(routing.split(",")),
        format=format,
        backend=backend,
        samples=samples,
        seconds=seconds,
        check=check,
        devices=None if devices is None else _numbers(devices, "devices", "--devices 0,1"),
        peers=peers,
    )
    module = import_module(TOPICS[topic])
    with _console.progress(quiet=as_json) as display:
        task = display.add_task(topic, total=100)
        rows = module.run(
            request, lambda what, part: display.update(task, description=what, completed=round(100 * part))
        )
    device = "cpu" if all(row.get("variant") == "cpu" for row in rows) else "cuda"
    about = facts(topic, device=device, gpus=0 if device == "cpu" else request.gpus, protocol=module.PROTOCOL)
    document: dict[str, Any] = {**about, "rows": rows}
    if out is not None:
        path = result_path(out, topic, device_slug(device), about["gpus"])
        write(path, about, rows)
    if plot is not None:
        from megamoe.bench.picture import times_by_tokens

        times_by_tokens(document, plot)
    if as_json:
        _console.print_json(document)
        return
    console = _console.out()
    console.print(_table(document, module.cells))
    if out is not None:
        console.print(f"written: {path}")


def _scale(values: dict[str, Any], given: set[str]) -> None:
    from megamoe.cli import _scale as scale

    for name in sorted(given - {"topic", *scale.OPTIONS}):
        taken = ", ".join(f"--{option.replace('as_', '')}" for option in scale.OPTIONS)
        raise InputError(f"--{name}", f"with {_SCALE}", taken, "Leave it out.")
    chosen: dict[str, Any] = {name: values[name] for name in ("backend", "ranks", "budget") if name in given}
    if "model" in given:
        chosen["models"] = values["model"].split(",")
    if "tokens" in given:
        chosen["tokens"] = _numbers(values["tokens"])
    if values["devices"] is not None:
        chosen["devices"] = _numbers(values["devices"], "devices", "--devices 0,1")
    out = Path(values["out"] or ".")  # typer keeps what was written
    scale.scale(chosen, out, resume=values["resume"], as_json=values["as_json"])


def _table(document: dict[str, Any], cells: Callable[[dict[str, Any]], dict[str, str]]) -> Any:
    """The rows, each as its topic writes it for people: heading -> text."""
    from rich.console import Group

    from megamoe.cli import _console

    table = _console.plain_table(f"{document['topic']} on {document['device']}, torch {document['torch']}")
    rows = [cells(row) for row in document["rows"]]
    for heading in rows[0] if rows else ():
        table.add_column(heading)
    for row in rows:
        table.add_row(*row.values())
    return Group(table, document["protocol"])
