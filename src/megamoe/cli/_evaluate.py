"""One evaluation of a layer: run it on R ranks, compare with the oracle, say what was found.

`run`, `demo` and the torchrun case share it; they differ in where the input comes from and how the result is shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megamoe import reference
from megamoe.cli._inputs import Inputs, split
from megamoe.reference import LIMIT
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = [
    "LIMIT",
    "Evaluation",
    "RankShare",
    "judge",
]


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one rank did. `routes` counts the routes received by each of its experts."""

    rank: int
    tokens: int
    routes: list[int]
    error: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A comparison with the oracle. Times in milliseconds; errors are relative Frobenius."""

    spec: MoESpec
    format: str
    engine: str
    source: str
    shares: list[RankShare]
    samples_ms: list[float]
    error: float
    limit: float
    transformers_error: float | None
    token_errors: list[float]
    routes_lost: int
    output: torch.Tensor

    @property
    def agrees(self) -> bool:
        """The error is within the limit (false for NaN), and each expert received exactly the routes meant for it."""
        return self.error <= self.limit and self.routes_lost == 0

    @property
    def tokens(self) -> int:
        """Tokens of all ranks."""
        return sum(share.tokens for share in self.shares)

    @property
    def median_ms(self) -> float:
        """Median time of a call."""
        return statistics.median(self.samples_ms)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks over the median time."""
        return self.tokens / self.median_ms * 1e3

    def document(self) -> dict[str, Any]:
        """The evaluation as JSON types."""
        return {
            "agrees": self.agrees,
            "error": _number(self.error),
            "limit": self.limit,
            "routes_lost": self.routes_lost,
            "transformers_error": None if self.transformers_error is None else _number(self.transformers_error),
            "engine": self.engine,
            "format": self.format,
            "spec": asdict(self.spec),
            "input": self.source,
            "tokens": self.tokens,
            "time_ms": {"median": self.median_ms, "samples": self.samples_ms},
            "tokens_per_second": self.tokens_per_second,
            "ranks": [{**asdict(share), "error": _number(share.error)} for share in self.shares],
        }


def judge(
    *,
    spec: MoESpec,
    weights: ExpertWeights,
    inputs: Inputs,
    ids: torch.Tensor,
    route_weights: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    received: Sequence[Sequence[int]],
    samples_ms: list[float],
    engine: str,
) -> Evaluation:
    """Compare what the ranks returned with the oracle's result for all tokens at once.

    Args:
        weights: every expert of the layer.
        ids, route_weights: ``[T, k]`` over all ranks.
        outputs: BF16 ``[M_r, H]`` of each rank, in order.
        received: routes received by each local expert of each rank.
    """
    oracle = reference.forward(spec, weights, inputs.activations, ids, route_weights)
    assert isinstance(oracle, torch.Tensor)
    whole = torch.cat(list(outputs))
    parts = split(inputs.activations.shape[0], len(outputs))
    norms = oracle.float().norm(dim=1).clamp(min=1e-30)
    other = inputs.transformers_output
    meant = torch.bincount(ids[ids >= 0], minlength=spec.experts).tolist()
    got = [count for counts in received for count in counts]
    return Evaluation(
        spec=spec,
        format=weights.format,
        engine=engine,
        source=inputs.source,
        shares=[
            RankShare(
                rank=rank,
                tokens=part.stop - part.start,
                routes=list(received[rank]),
                error=reference.relative_error(outputs[rank], oracle[part]),
            )
            for rank, part in enumerate(parts)
        ],
        samples_ms=samples_ms,
        error=reference.relative_error(whole, oracle),
        limit=LIMIT,
        transformers_error=None if other is None else reference.relative_error(whole, other),
        token_errors=((whole.float() - oracle.float()).norm(dim=1) / norms).tolist(),
        routes_lost=sum(abs(a - b) for a, b in zip(meant, got, strict=True)),
        output=whole,
    )
