"""How bytes move between ranks: inside this process, or between processes through `Control`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megamoe.control import Control
from megamoe.engine import Placement

__all__ = ["Exchange", "make_exchange"]


class Exchange(Protocol):
    """All-to-all of rows of bytes for the hosted ranks."""

    def __call__(
        self, phase: str, send: Sequence[Sequence[torch.Tensor]], rows_in: Sequence[Sequence[int]]
    ) -> list[list[torch.Tensor]]:
        """Exchange ``send[local][rank]``, uint8 ``[rows, B]``.

        Args:
            phase: name for errors.
            send: one list per hosted rank: what goes to each rank.
            rows_in: rows that each hosted rank gets from each rank.

        Returns:
            One list per hosted rank: what came from each rank.
        """


class _WithinProcess:
    def __call__(
        self, phase: str, send: Sequence[Sequence[torch.Tensor]], rows_in: Sequence[Sequence[int]]
    ) -> list[list[torch.Tensor]]:
        ranks = range(len(send))
        return [[send[source][rank] for source in ranks] for rank in ranks]


class _BetweenProcesses:
    def __init__(self, control: Control) -> None:
        self._control = control

    def __call__(
        self, phase: str, send: Sequence[Sequence[torch.Tensor]], rows_in: Sequence[Sequence[int]]
    ) -> list[list[torch.Tensor]]:
        (mine,), (wanted,) = send, rows_in
        received = self._control.all_to_all(phase, torch.cat(list(mine)), [len(part) for part in mine], wanted)
        return [list(torch.split(received, list(wanted)))]


def make_exchange(placement: Placement, control: Control) -> Exchange:
    """The exchange for where the ranks live."""
    if len(placement.local) == placement.ranks:
        return _WithinProcess()
    return _BetweenProcesses(control)
