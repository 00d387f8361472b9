"""Experts with small matrices: where calling torch costs more than the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch

from megamoe.cpu.combine import Results

__all__ = ["Matrices", "leaves_out", "padding_pays", "run_grouped", "run_one_token", "run_padded"]

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From gate and up ``[m, 2I]`` and route weights ``[m]`` to the second product's operand ``[m, I]``."""

_GATHERED_BYTES: Final = 3 << 18
"""Largest BF16 matrix that is copied beside others for one product, rather than multiplied by a call of its own (torch
2.13, AMD EPYC with avx512_bf16: of 4 matrices, 256 KiB each, 0.7 to 0.8 of the time; 1.0 to 1.1 at 1 MiB)."""

_STEP: Final = 4
"""Slots of an expert in a group come in multiples of this, or are fewer."""

_CALL_COST: Final = 7 << 20
"""What a call of both products costs whatever their sizes, in the elements of a matrix that a slot goes through (torch
2.13, two cores of an AMD EPYC with avx512_bf16, matrices of 0.2 and 0.25 MiB: whole forwards of tiny models took up to
5 % longer with half of it, and up to 2 % with 5 << 20)."""

_SLOT_COST: Final = 1 << 15
"""What a slot costs outside of the products, in the same unit."""

_MATRIX_COST: Final = 14
"""What reading an expert's matrices costs, in the same unit and for each element."""


class Matrices(Protocol):
    """One projection of all experts, `values` as stored, and `columns`, the same with the last dimensions swapped."""

    values: torch.Tensor
    columns: torch.Tensor

    def matrices(self, experts: torch.Tensor | None = None) -> torch.Tensor:
        """``[A, N, K]`` of the given experts (int64 ``[A]``; all: None), in the type that products take."""


@lru_cache(maxsize=8)
def _numbers(count: int) -> torch.Tensor:
    """0 to ``count - 1``; nobody writes to it."""
    with torch.inference_mode():
        return torch.arange(count)


def leaves_out(counts: list[int]) -> bool:
    """Whether a batched product is of copies of the matrices in use: where those are at most half of all."""
    return 2 * counts.count(0) >= len(counts)


def padding_pays(counts: list[int], matrix_bytes: int, most_slots: int, call_bytes: int = 1 << 18) -> bool:
    """Whether one batched product over all experts, each padded to the largest count, beats one call for each.

    Costs in bytes read: a matrix its size, a row about a fortieth of that, an expert of a batch 64 KiB (torch 2.13, AMD
    EPYC with avx512_bf16, matrices of 0.1 to 2 MiB).

    Args:
        counts: routes of each expert.
        matrix_bytes: of one expert's larger matrix.
        most_slots: bound of experts times largest count, for memory.
        call_bytes: cost of an expert's own call.
    """
    used = len(counts) - counts.count(0)
    experts = used if leaves_out(counts) else len(counts)
    slots = experts * max(counts)
    apart = used * (call_bytes + matrix_bytes) + sum(counts) * matrix_bytes // 40
    together = experts * (2**16 + matrix_bytes) + slots * matrix_bytes // 40
    return slots <= most_slots and together < apart


def run_padded(
    x: torch.Tensor,
    row: torch.Tensor,
    expert: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    w13: Matrices,
    w2: Matrices,
    activate: Activation,
) -> Results:
    """The down projection of every route; each expert has slots for the largest count.

    Experts without a route are left out where most have none. Free slots hold row 0 of `x` with weight 0.

    Args:
        x: operand of the first product, ``[rows, H]``.
        row, expert: int64 ``[routes]``: index into `x`, and local expert.
        weight: float32 ``[routes]``.
        counts: routes of each expert.
        w13, w2: the projections, ``[EL, 2I, H]`` and ``[EL, H, I]``.
    """
    used = None
    if leaves_out(counts):
        names = [index for index, count in enumerate(counts) if count]
        numbers = [0] * len(counts)
        for number, index in enumerate(names):
            numbers[index] = number
        used, expert = torch.tensor(names), torch.tensor(numbers).index_select(0, expert)
        counts = [counts[index] for index in names]
    experts, depth = len(counts), max(counts)
    ahead = [depth * index - begin for index, begin in enumerate(accumulate(counts[:-1], initial=0))]
    ascending, order = torch.sort(expert, stable=True)
    slots = torch.tensor(ahead).index_select(0, ascending).add_(_numbers(len(order)))
    slot = torch.empty_like(order).scatter_(0, order, slots)
    source = torch.zeros(experts * depth, dtype=torch.int64).scatter_(0, slot, row)
    weights = torch.zeros(experts * depth).scatter_(0, slot, weight)
    rows = x.index_select(0, source).view(experts, depth, -1)
    gate_up = torch.bmm(rows, w13.matrices(used).transpose(1, 2)).view(experts * depth, -1)
    h = activate(gate_up, weights).view(experts, depth, -1)
    down = torch.bmm(h, w2.matrices(used).transpose(1, 2)).view(experts * depth, -1)
    return Results(down.bfloat16(), slot)


class _Group(NamedTuple):
    """Neighbouring experts that share a product: `depth` slots each, at least as many as any of them has routes."""

    first: int
    experts: int
    depth: int


def _depth(count: int) -> int:
    """Slots of each expert of a group with at most `count` routes: few sizes, because the library generates code for
    each pair of experts and slots, some 0.3 ms at the first call."""
    return count if count <= _STEP else -(-count // _STEP) * _STEP


def _groups(counts: list[int], elements: int) -> list[_Group]:
    """Split the experts that have routes into groups, each grown as long as a call costs more than the free slots.

    Args:
        counts: routes of each expert.
        elements: of one expert's larger matrix.
    """
    slot, matrix = elements + _SLOT_COST, _MATRIX_COST * elements
    groups: list[_Group] = []
    first = experts = depth = 0
    for index, count in enumerate(counts):
        if not count:
            continue
        if experts:
            wider, deeper = index + 1 - first, _depth(max(depth, count))
            free = wider * deeper - experts * depth - count
            if free * slot + (wider - experts - 1) * matrix < _CALL_COST:
                experts, depth = wider, deeper
                continue
            groups.append(_Group(first, experts, depth))
        first, experts, depth = index, 1, count
    if experts:
        groups.append(_Group(first, experts, depth))
    return groups


def _multiply(x: torch.Tensor, matrices: torch.Tensor, groups: list[_Group], sizes: list[int]) -> torch.Tensor:
    """Slots `x` ``[S, K]``, group after group, times their experts' `matrices` ``[EL, K, N]``: ``[S, N]``."""
    out = torch.empty(len(x), matrices.shape[2], dtype=x.dtype)
    slots = zip(torch.split(x, sizes), torch.split(out, sizes), strict=True)
    for (first, experts, depth), (rows, result) in zip(groups, slots, strict=True):
        if experts == 1:
            torch.mm(rows, matrices[first], out=result)
        else:
            shape = experts, depth, -1
            torch.bmm(rows.view(shape), matrices[first : first + experts], out=result.view(shape))
    return out


def run_grouped(
    x: torch.Tensor,
    row: torch.Tensor,
    expert: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int],
    w13: Matrices,
    w2: Matrices,
    activate: Activation,
) -> Results:
    """`run_padded` for BF16 experts, with a product for each group of neighbours whose counts are similar.

    What is in a free slot touches no other; here it is some route.
    """
    groups = _groups(counts, w13.values.numel() // len(counts))
    sizes = [experts * depth for _, experts, depth in groups]
    # From an expert's first route in expert-major order to its first slot.
    slots, routes, ahead = 0, 0, [0] * len(counts)
    for first, experts, depth in groups:
        for index in range(first, first + experts):
            ahead[index] = slots - routes
            slots += depth
            routes += counts[index]
    # numpy takes half of torch's time for so few numbers; those of 16 bits it sorts by radix.
    narrow = np.int16 if len(counts) < 1 << 15 else np.int64
    order = expert.numpy().astype(narrow).argsort(kind="stable")
    ascending = np.array(ahead).repeat(counts)
    ascending += np.arange(routes)
    slot = np.empty_like(order)
    slot[order] = ascending
    route = order
    if slots > routes:
        route = np.zeros(slots, dtype=order.dtype)
        route[ascending] = order
    source = torch.from_numpy(route)
    h = _multiply(x.index_select(0, row.index_select(0, source)), w13.columns, groups, sizes)
    h = activate(h, weight.index_select(0, source))
    return Results(_multiply(h, w2.columns, groups, sizes), torch.from_numpy(slot))


def run_one_token(
    x: torch.Tensor,
    expert: torch.Tensor,
    weight: torch.Tensor,
    w13: Matrices,
    w2: Matrices,
    activate: Activation,
) -> Results:
    """The down projection of one token's routes: nothing to sort and no rows to gather.

    Args:
        x: operand of the first product, ``[1, H]``.
        expert: int64 ``[routes]``: local expert of each route.
        weight: float32 ``[routes]``.
        w13, w2: as in `run_padded`.
    """
    if w13.values.dtype == torch.bfloat16 and w13.values[0].nbytes > _GATHERED_BYTES:
        numbers: list[int] = expert.tolist()
        first, second = w13.values.transpose(1, 2), w2.values.transpose(1, 2)
        rows = torch.split(activate(torch.cat([torch.mm(x, first[n]) for n in numbers]), weight), 1)
        return Results(torch.cat([torch.mm(row, second[n]) for row, n in zip(rows, numbers, strict=True)]))
    stacked = w13.matrices(expert)
    gate_up = torch.nn.functional.linear(x, stacked.view(-1, stacked.shape[2])).view(len(expert), -1)
    h = activate(gate_up, weight)
    # The row on the left: with a float32 column on the right the same product takes eight times as long.
    down = torch.bmm(h.unsqueeze(1), w2.matrices(expert).transpose(1, 2)).squeeze(1)
    return Results(down.bfloat16())
