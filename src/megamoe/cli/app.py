"""The command list, and the one place where an error of this package becomes a message and an exit code.

To add a command: write ``cli/NAME.py`` with a function ``command`` (its docstring is the help text) or, for a command
with subcommands, a `typer.Typer` called ``app``; then add one line to `COMMANDS`. Import torch inside the function,
not at the top of the file: ``megamoe --help`` imports every file listed here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from megamoe import __version__
from megamoe.errors import MegaMoEError

__all__ = ["COMMANDS", "app", "main"]

COMMANDS: Final = (
    "demo",
    "run",
    "bench",
    "doctor",
    "sim",
    "trace",
)

app = typer.Typer(
    help="The routed experts of a Mixture-of-Experts layer, expert-parallel, as one fused operator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"megamoe {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command. `main` reads ``--debug`` itself: it must work for errors raised anywhere."""


for _name in COMMANDS:
    _module = import_module(f"megamoe.cli.{_name}")
    if hasattr(_module, "app"):
        app.add_typer(_module.app, name=_name)
    else:
        app.command(_name)(_module.command)


def _exit_code(error: MegaMoEError) -> int:
    """2 for something the user gave (as for a wrong option), 1 for something that failed."""
    return 2 if isinstance(error, ValueError) else 1


def _show(error: MegaMoEError, *, as_json: bool) -> None:
    if as_json:
        fields = ("argument", "given", "allowed", "way_out")
        report = {"error": type(error).__name__, **{name: getattr(error, name) for name in fields}}
        print(json.dumps(report))
        return
    rank = os.environ.get("RANK")
    where = f" on rank {rank}" if rank is not None else ""
    print(f"megamoe: {type(error).__name__}{where}: {error}", file=sys.stderr)
    print("(megamoe --debug ... shows where it was raised)", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: the words after ``megamoe``; by default those of this process.

    Raises:
        SystemExit: always. 0: done; 1: something failed or disagreed; 2: an argument, file or option is wrong.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(words, prog_name="megamoe")
    except MegaMoEError as error:
        if "--debug" in words:
            raise
        _show(error, as_json="--json" in words)
        sys.exit(_exit_code(error))
