"""Which plan runs a call: a pure function of the layer's sizes, the bound of the call and facts about the device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from megamoe.cuda.arena import Sizes
from megamoe.cuda.plan import CARRIED_TOKENS, SHARED_LIMIT, Plan
from megamoe.spec import BLOCK

__all__ = ["MAX_SWAP_TOKENS_PER_EXPERT", "call_plan", "select_plan"]

MAX_SWAP_TOKENS_PER_EXPERT = 48
"""Up to this many tokens an expert (mean of a full call) the time is the read of the weights: swapped tiles."""

CARRYING_TOKENS_PER_EXPERT = ((112, 144), (240, 288))
"""Tokens an expert (mean of a full call) at which wide tiles carry a few more: many experts then have a little more
than one or two full tiles, and a small one more would read all weights again. Beside more tiles, that weighs less than
the time that carrying takes."""

CARRYING_TOPK = (2, 8)
"""Top-k of plans that carry: their role warps have 40 registers, and the slots of a token want some, as passes do. With
one slot ptxas keeps other things."""

CARRYING_WIDTH = 3 * BLOCK
"""Least H and I of plans that carry: loops of two k-blocks are unrolled, which takes more registers than there are."""


def _fit(plan: Plan, sizes: Sizes, **changes: tuple[int, ...]) -> Plan:
    """`plan` with the first combination of values that fits into shared memory, later fields given up first."""
    names = list(changes)
    for values in product(*changes.values()):
        candidate = replace(plan, **dict(zip(names, values, strict=True)))  # type: ignore[arg-type]
        if candidate.shared(sizes).total <= SHARED_LIMIT and candidate.pulled_rows * sizes.topk <= 32:
            return candidate
    return plan


def call_plan(sizes: Sizes, bound: int, deadline: float) -> Plan:
    """`select_plan` for an engine whose waits have this deadline, in seconds."""
    # Far beyond the deadline of any wait for a peer, as it is for the default deadline of 300 s.
    return replace(select_plan(sizes, bound), pipeline_limit_ticks=max(2, round(deadline)))


def select_plan(sizes: Sizes, bound: int) -> Plan:
    """The plan for calls of at most `bound` tokens a rank. Every rank makes the same choice."""
    most = bound * sizes.topk * sizes.ranks
    routes, passes = most / sizes.experts, sizes.rows_for(most) > sizes.pool_rows
    if routes <= MAX_SWAP_TOKENS_PER_EXPERT:
        plan = Plan(wide=False, swap=True, passes=passes)
        return _fit(plan, sizes, stages=(4, 3, 2), pulled_rows=(4, 2, 1), staging_buffers=(1,))
    if sizes.hidden < 256 or sizes.intermediate < 256:
        return _fit(
            Plan(wide=False, passes=passes), sizes, stages=(3, 2), staging_buffers=(2, 1), pulled_rows=(4, 3, 2, 1)
        )
    if (
        any(low <= routes <= high for low, high in CARRYING_TOKENS_PER_EXPERT)
        and CARRYING_TOPK[0] <= sizes.topk <= CARRYING_TOPK[1]
        and min(sizes.hidden, sizes.intermediate) >= CARRYING_WIDTH
        and not passes
    ):
        carrying = Plan(
            stages=3, staging_buffers=2, carried_tokens=CARRIED_TOKENS, role_registers=40, math_registers=232
        )
        carrying = _fit(carrying, sizes, pulled_rows=(4, 3, 2, 1))
        if carrying.shared(sizes).total <= SHARED_LIMIT:
            return carrying
    return _fit(Plan(passes=passes), sizes, stages=(3, 2), staging_buffers=(2, 1), pulled_rows=(4, 3, 2, 1))
