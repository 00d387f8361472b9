"""BF16 experts with small matrices: where calling torch costs more than the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

__all__ = ["padding_pays", "run_apart", "run_one_token", "run_padded"]

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From gate and up ``[m, 2I]`` and route weights ``[m]`` to the second product's BF16 operand ``[m, I]``."""


def padding_pays(counts: list[int], matrix_bytes: int, most_slots: int) -> bool:
    """Whether one batched product over all experts, each padded to the largest count, beats one call for each.

    Costs in bytes read: a matrix its size, a row about a fortieth of that; a call of its own as much as 256 KiB, an
    expert of a batch 64 KiB (torch 2.13, AMD EPYC with avx512_bf16, matrices of 0.1 to 2 MiB).

    Args:
        counts: routes of each expert.
        matrix_bytes: of one expert's larger matrix.
        most_slots: bound of experts times largest count, for memory.
    """
    experts, slots = len(counts), len(counts) * max(counts)
    used = experts - counts.count(0)
    apart = used * (2**18 + matrix_bytes) + sum(counts) * matrix_bytes // 40
    together = experts * (2**16 + matrix_bytes) + slots * matrix_bytes // 40
    return slots <= most_slots and together < apart


def run_padded(
    x: torch.Tensor,
    row: torch.Tensor,
    expert: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    w13: torch.Tensor,
    w2: torch.Tensor,
    activate: Activation,
) -> torch.Tensor:
    """The down projection of every route; each expert has slots for the largest count, and free slots repeat route 0.

    Args:
        x: BF16 ``[rows, H]``.
        row, expert: int64 ``[routes]``: index into `x`, and local expert.
        weight: float32 ``[routes]``.
        counts: routes of each expert.
        w13, w2: BF16 ``[EL, 2I, H]`` and ``[EL, H, I]``.

    Returns:
        BF16 ``[routes, H]``, in the order given.
    """
    experts, depth = len(counts), max(counts)
    order = torch.argsort(expert, stable=True)
    begin = torch.tensor(list(accumulate(counts[:-1], initial=0)))
    sorted_expert, number = expert[order], torch.arange(len(expert))
    slot = torch.empty_like(order).scatter_(0, order, number + (depth * sorted_expert - begin[sorted_expert]))
    route = torch.zeros(experts * depth, dtype=torch.int64).scatter_(0, slot, number)
    rows = x.index_select(0, row.index_select(0, route)).view(experts, depth, -1)
    gate_up = torch.bmm(rows, w13.transpose(1, 2)).view(experts * depth, -1)
    h = activate(gate_up, weight.index_select(0, route)).view(experts, depth, -1)
    return torch.bmm(h, w2.transpose(1, 2)).view(experts * depth, -1).index_select(0, slot)


def _takes_groups(*widths: int) -> bool:
    """Whether torch has a grouped product for BF16 matrices with these widths: it wants rows of whole 16 bytes."""
    return hasattr(torch.nn.functional, "grouped_mm") and all(width % 8 == 0 for width in widths)


def _products(x: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Expert-major rows `x` ``[routes, K]`` times their experts' matrices ``[EL, N, K]``, one product after another."""
    parts = torch.split(x, counts)
    return torch.cat([torch.mm(part, matrices[index].T) for index, part in enumerate(parts) if len(part)])


def run_apart(
    x: torch.Tensor,
    row: torch.Tensor,
    expert: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    w13: torch.Tensor,
    w2: torch.Tensor,
    activate: Activation,
) -> torch.Tensor:
    """`run_padded` with one product for each expert: for counts too unequal to pad."""
    order = torch.argsort(expert, stable=True)
    rows = x.index_select(0, row.index_select(0, order))
    if _takes_groups(rows.shape[1], w2.shape[2]):
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        gate_up = torch.nn.functional.grouped_mm(rows, w13.transpose(1, 2), offs=ends)
        h = activate(gate_up, weight.index_select(0, order))
        down = torch.nn.functional.grouped_mm(h, w2.transpose(1, 2), offs=ends)
    else:
        h = activate(_products(rows, w13, counts), weight.index_select(0, order))
        down = _products(h, w2, counts)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return down.index_select(0, place)


def run_one_token(
    x: torch.Tensor,
    experts: list[int],
    weight: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activate: Activation,
) -> torch.Tensor:
    """The down projection of one token's routes, in the order given: nothing to sort and no rows to gather.

    Args:
        x: BF16 ``[1, H]``.
        experts: local expert of each route.
        weight: float32 ``[routes]``.
        w13, w2: as in `run_padded`.

    Returns:
        BF16 ``[routes, H]``.
    """
    w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    h = activate(torch.cat([torch.mm(x, w13[expert]) for expert in experts]), weight)
    rows = torch.split(h, 1)
    return torch.cat([torch.mm(row, w2[expert]) for row, expert in zip(rows, experts, strict=True)])
