"""Who computes what: the source rank's list of rows and routes for each owner, and the owner's order by expert."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch

from megamoe.errors import InputError
from megamoe.spec import MoESpec

__all__ = ["ROUTE_BYTES", "Outgoing", "by_expert", "count_routes", "pack_routes", "plan_dispatch", "unpack_routes"]

ROUTE_BYTES = 12
"""Bytes of a route on the wire: row, local expert (int32 each) and weight (float32)."""


_FEW_IDS: Final = 128
"""Ids up to which Python is quicker at looking at them than torch."""


class Outgoing(NamedTuple):
    """What one source rank sends to one owner, in (token, slot) order.

    Attributes:
        tokens: int64 ``[rows]``: the distinct tokens that some expert of the owner wants; each row travels once.
        row: int64 ``[routes]``: index into `tokens` of each route.
        expert: int64 ``[routes]``: expert of each route, counted from the owner's first.
        weight: float32 ``[routes]``.
        position: int64 ``[routes]``: ``token * k + slot``, where the route's result belongs.
    """

    tokens: torch.Tensor
    row: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor
    position: torch.Tensor


@lru_cache(maxsize=8)
def _every_route(tokens: int, topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`tokens`, `row` and `position` of an `Outgoing` with all routes; nobody writes to them."""
    with torch.inference_mode():
        position = torch.arange(tokens * topk)
        return torch.arange(tokens), position // topk, position


def _extremes(ids: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest id; 0 and 0 where there is none."""
    if ids.numel() > _FEW_IDS:
        low, high = torch.aminmax(ids)
        return int(low), int(high)
    numbers: list[int] = ids.tolist()
    return (min(numbers), max(numbers)) if numbers else (0, 0)


def plan_dispatch(spec: MoESpec, ranks: int, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> list[Outgoing]:
    """Split one rank's routes by owner.

    Args:
        expert_ids: int32 or int64 ``[M, k]``; -1 marks a route that is skipped.
        expert_weights: float32 ``[M, k]``.

    Returns:
        One `Outgoing` per rank.

    Raises:
        InputError: an id outside ``[-1, E)``; says where the first one is.
    """
    flat = expert_ids.reshape(-1)
    low, high = _extremes(flat)
    if low < -1 or high >= spec.experts:
        bad = (flat < -1) | (flat >= spec.experts)
        index = int(bad.nonzero()[0])
        raise InputError(
            f"expert_ids[{index // spec.topk}, {index % spec.topk}]",
            int(flat[index]),
            f"-1 (skip), or 0 to {spec.experts - 1}",
            "Pass global expert ids.",
        )
    if ranks == 1 and low >= 0:  # one owner and nothing to skip, the common case on one machine
        tokens, row, position = _every_route(len(expert_ids), spec.topk)
        return [Outgoing(tokens, row, flat.long(), expert_weights.reshape(-1), position)]
    position = (flat >= 0).nonzero().squeeze(1)
    expert = flat[position].long()
    weight = expert_weights.reshape(-1)[position]
    local_experts = spec.experts // ranks
    plans = []
    for rank in range(ranks):
        mine = (expert.div(local_experts, rounding_mode="floor") == rank).nonzero().squeeze(1)
        where = position[mine]
        # Positions ascend, so equal tokens are neighbours.
        tokens, row = torch.unique_consecutive(where // spec.topk, return_inverse=True)
        plans.append(Outgoing(tokens, row, expert[mine] - rank * local_experts, weight[mine], where))
    return plans


def pack_routes(plan: Outgoing) -> torch.Tensor:
    """Bytes of a plan's routes: uint8 ``[routes, ROUTE_BYTES]``."""
    fields = torch.stack((plan.row.int(), plan.expert.int(), plan.weight.contiguous().view(torch.int32)), dim=1)
    return fields.view(torch.uint8)


def unpack_routes(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, local expert (int64) and weight (float32) of `pack_routes` bytes."""
    fields = packed.view(torch.int32)
    return fields[:, 0].long(), fields[:, 1].long(), fields[:, 2].contiguous().view(torch.float32)


def by_expert(expert: torch.Tensor, local_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert-major order of routes (stable) and `count_routes`."""
    return torch.argsort(expert, stable=True), count_routes(expert, local_experts)


def count_routes(expert: torch.Tensor, local_experts: int) -> torch.Tensor:
    """The number of routes of every expert, int64 ``[EL]``."""
    # numpy takes a quarter of the time of torch.bincount for a few hundred routes.
    return torch.from_numpy(np.bincount(expert.numpy(), minlength=local_experts))
