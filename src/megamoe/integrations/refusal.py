"""Refusals of a door, made on all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from megamoe.engine import Call
from megamoe.errors import MegaMoEError
from megamoe.layer import MegaMoE
from megamoe.spec import WeightFormat

__all__ = ["refuse"]


def refuse(layer: MegaMoE, error: MegaMoEError) -> NoReturn:
    """Raise `error` here and `PeerError` with its text on the ranks that enter the same call of `layer`.

    A door that found its arguments wrong and simply raised would leave the other ranks waiting for this one.
    """

    def prepare(_: WeightFormat) -> Sequence[Call]:
        raise error

    layer._runtime.call(prepare)
    raise error
