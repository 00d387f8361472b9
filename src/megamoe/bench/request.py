"""What ``megamoe bench`` was asked to measure, and the list of topics that can be.

To add a topic: write ``bench/NAME.py`` with ``PROTOCOL``, one sentence that says how a sample is taken, and
``run(request, tick) -> list[Row]``, and add one line to `TOPICS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from megamoe.spec import WeightFormat

if TYPE_CHECKING:
    from megamoe.engine import Backend

__all__ = ["TOPICS", "Request", "Tick"]

TOPICS: Final[dict[str, str]] = {
    "layer": "megamoe.bench.layer",
    "gemm": "megamoe.bench.gemm",
    "conformance": "megamoe.bench.conformance",
}
"""Topic -> module."""

Tick = Callable[[str, float], None]
"""Progress: what is being done, and the fraction of the whole that is behind."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One benchmark run; every combination of models, routings and tokens is measured.

    Attributes:
        models: names in `megamoe.bench.models.MODELS`.
        tokens: tokens on each rank (M).
        ranks: number of ranks.
        experts: routed experts over all ranks, or None for the model's own number.
        routings: names in `megamoe.bench.routing.ROUTINGS`.
        format: how the experts' weights are held.
        backend: engine, as `megamoe.MegaMoE` takes it.
        samples: samples of each measurement.
        seconds: time after which a measurement stops early, but not below three samples.
        check: compare each measured output with the oracle.
        peers: also measure the unfused peers, where every rank has a GPU.
        devices: GPUs over which the ranks are dealt in blocks, or None for the current one.
    """

    models: tuple[str, ...]
    tokens: tuple[int, ...]
    ranks: int
    experts: int | None
    routings: tuple[str, ...]
    format: WeightFormat
    backend: Backend
    samples: int
    seconds: float
    check: bool
    devices: tuple[int, ...] | None = None
    peers: bool = False

    @property
    def gpus(self) -> int:
        """GPUs that take part where the GPU engine runs."""
        return 1 if self.devices is None else len(self.devices)
