"""The results of routes, and their sum for each token."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch

from megamoe.engine import Call

__all__ = ["Results", "combine"]

_IN_BAGS: Final = 1 << 20
"""Largest number of results' elements that are added by one operation, which needs all of them in float32. More go a
slot at a time, where the gathered rows stay in a cache."""


class Results(NamedTuple):
    """The down projections of routes.

    Attributes:
        down: BF16 ``[P, H]``; P is at least the number of routes.
        place: int64 ``[routes]``: which row of `down` is each route's; None where they are in the order given.
    """

    down: torch.Tensor
    place: torch.Tensor | None = None

    def in_order(self) -> torch.Tensor:
        """The routes' results in the order given."""
        return self.down if self.place is None else self.down.index_select(0, self.place)


@lru_cache(maxsize=8)
def _bags(tokens: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All routes, and the first one of each token; nobody writes to them."""
    with torch.inference_mode():
        routes = torch.arange(tokens * slots)
        return routes, routes[::slots].contiguous()


def combine(call: Call, position: torch.Tensor, results: Results, *, ordered: bool = False) -> None:
    """Sum each token's results in slot order in float32 and write them, rounded to BF16.

    Args:
        position: int64 ``[routes]``: ``token * k + slot`` of each result.
        results: the results.
        ordered: `position` ascends.
    """
    slots, hidden = call.expert_ids.shape[1], results.down.shape[1]
    tokens = call.num_tokens if isinstance(call.num_tokens, int) else int(call.num_tokens)
    out = call.out if tokens == len(call.out) else call.out[:tokens]
    routes, first = _bags(tokens, slots)
    if ordered and len(position) == tokens * slots:
        down, place = results.down, routes if results.place is None else results.place
    else:
        # A skipped route adds +0 to a sum that starts from +0: no bit changes.
        down, place = torch.zeros(tokens * slots, hidden, dtype=torch.bfloat16), routes
        down.index_copy_(0, position, results.in_order())
    if 0 < down.numel() <= _IN_BAGS:
        # A bag's float32 rows are added one after another, starting from +0. torch.sum would not do: its order depends
        # on the sizes. Nor would bags of BF16 rows, which round halves up.
        out.copy_(torch.embedding_bag(down.float(), place, first)[0])
        return
    total = torch.zeros(tokens, hidden)
    for part in place.view(tokens, slots).unbind(1):
        total += down.index_select(0, part)
    out.copy_(total)
