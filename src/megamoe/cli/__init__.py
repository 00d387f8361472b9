"""The ``megamoe`` command: one file per command, listed in `megamoe.cli.app`."""

from megamoe.cli.app import main

__all__ = ["main"]
