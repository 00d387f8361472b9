"""Which plan runs a call: a pure function of the layer's sizes, the bound of the call and facts about the device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from megamoe.cuda.arena import Sizes
from megamoe.cuda.plan import SHARED_LIMIT, Plan

__all__ = ["MAX_SWAP_TOKENS_PER_EXPERT", "select_plan"]

MAX_SWAP_TOKENS_PER_EXPERT = 48
"""Up to this many tokens an expert (mean of a full call) the time is the read of the weights: swapped tiles."""


def _fit(plan: Plan, sizes: Sizes, **changes: tuple[int, ...]) -> Plan:
    """`plan` with the first combination of values that fits into shared memory, later fields given up first."""
    names = list(changes)
    for values in product(*changes.values()):
        candidate = replace(plan, **dict(zip(names, values, strict=True)))  # type: ignore[arg-type]
        if candidate.shared(sizes).total <= SHARED_LIMIT and candidate.pulled_rows * sizes.topk <= 32:
            return candidate
    return plan


def select_plan(sizes: Sizes, bound: int) -> Plan:
    """The plan for calls of at most `bound` tokens a rank. Every rank makes the same choice."""
    routes = bound * sizes.topk * sizes.ranks / sizes.experts
    if routes <= MAX_SWAP_TOKENS_PER_EXPERT:
        plan = Plan(wide=False, swap=True)
        return _fit(plan, sizes, stages=(4, 3, 2), pulled_rows=(4, 2, 1), staging_buffers=(1,))
    plan = Plan(wide=True, swap=True)
    if sizes.hidden < 256 or sizes.intermediate < 256:
        plan = Plan(wide=False, swap=True)
    return _fit(plan, sizes, stages=(3, 2), staging_buffers=(2, 1), pulled_rows=(4, 3, 2, 1))
