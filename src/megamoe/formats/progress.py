"""A progress bar for reading and converting weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megamoe.formats.convert import ProgressCallback

__all__ = ["reading_bar"]


@contextmanager
def reading_bar(description: str = "Reading experts", console: Console | None = None) -> Iterator[ProgressCallback]:
    """A rich bar with bytes, speed and time left; yields what `Checkpoint.read` takes as `progress`.

    Args:
        description: text before the bar.
        console: rich console; by default one on stderr, so that stdout stays free for results.

    Example::

        with reading_bar() as progress:
            weights = megamoe.checkpoint(path, layer=3).read(0, 16, progress=progress)
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update
