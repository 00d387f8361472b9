"""``megamoe demo``: real-format checkpoints, real activations, several ranks, checked against the oracle."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from megamoe.engine import Backend

__all__ = ["command"]

_LAYER: Final = 1
"""The first layer with experts of both models that has another layer before it."""


def command(
    ranks: Annotated[int, typer.Option(help="Ranks in this process.")] = 4,
    tokens: Annotated[int, typer.Option(help="Bytes of text, one token each, over all ranks.")] = 509,
    text: Annotated[Path | None, typer.Option(help="Text file. Default: this package's licence.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Leave checkpoints and activations in this directory.")] = None,
    backend: Annotated[Backend, typer.Option(help="Engine.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the FP8 model's run.")] = None,
) -> None:
    """Make two tiny checkpoints in real formats, run one layer of each on several ranks, check it.

    A DeepSeek-V3 checkpoint (FP8, 128 x 128 blocks) and a Qwen3-MoE one (BF16) are made with Transformers; nothing is
    downloaded. The bytes of a text run through the layers before, and what they produce enters the experts. Exit code 1
    if a result does not agree with the oracle.
    """
    from megamoe.cli import _console, _show
    from megamoe.cli._inputs import load_inputs
    from megamoe.cli._job import Job, evaluate
    from megamoe.demo_activations import byte_tokens, layer_input
    from megamoe.demo_checkpoint import FAMILIES, make_checkpoint

    _console.writable("plot", plot, _console.PICTURES)
    _console.writable_directory("keep", keep)
    evaluations = {}
    with _console.progress(quiet=as_json) as display, tempfile.TemporaryDirectory(prefix="megamoe-demo-") as scratch:
        root = keep or Path(scratch)
        for family in FAMILIES:
            step = display.add_task(f"{family}: checkpoint and activations", total=2)
            directory = make_checkpoint(family, root / family)
            display.advance(step)
            rows = root / f"{family}-layer-{_LAYER}.safetensors"
            layer_input(directory, _LAYER, byte_tokens(tokens, text)).save(rows)
            display.advance(step)
            job = Job(directory, _LAYER, ranks=ranks, backend=backend, samples=5, display=display)
            evaluation = evaluate(job, load_inputs(rows, job.spec.hidden))
            assert evaluation is not None  # None only on other ranks of a torchrun
            evaluations[family] = evaluation
    if plot is not None:
        title = f"Tiny DeepSeek-V3 FP8 layer, {ranks} ranks"
        _show.figure(evaluations["deepseek-v3"], title).savefig(plot, dpi=110)
    agrees = all(evaluation.agrees for evaluation in evaluations.values())
    if as_json:
        runs = {family: evaluation.document() for family, evaluation in evaluations.items()}
        _console.print_json({"agrees": agrees, "runs": runs})
    else:
        out = _console.out()
        for family, evaluation in evaluations.items():
            out.print(_show.table(evaluation, f"{family}, layer {_LAYER}"), "")
        out.print(_show.summary(evaluations))
        if keep is not None:
            out.print(
                f"Again, or with other ranks: megamoe run --checkpoint {keep / 'deepseek-v3'} --layer {_LAYER} "
                f"--ranks 2 --input {keep / f'deepseek-v3-layer-{_LAYER}.safetensors'}",
                soft_wrap=True,
            )
    if not agrees:
        raise typer.Exit(1)
