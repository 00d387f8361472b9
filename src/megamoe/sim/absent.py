"""The fused kernel when waits fail: a rank that never starts or refuses, or deadlines that pass at any moment.

The call must end without a race, with NaN for every token of a rank that failed, and say why in that rank's
host-visible report: the first expired wait, or the abort word. One expired wait must end all others. In the simulator a
deadline passes when nothing else can go on, or by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from megamoe.sim.fused import CASES as FUSED
from megamoe.sim.fused import FusedCase, Ranks
from megamoe.sim.fused import simulated as fused
from megamoe.sim.plans import Prepared, SimPlan
from megamoe.sim.simulation import Launch, Simulation

__all__ = ["simulated"]

CASES = (
    "fused/swap",
    "fused/mixed",
    "fused/lag",
    "fused/raw",
    "fused/raw-mixed",
    "fused/passes",
    "fused/passes-hot",
)
_ROOM: Final = 9
"""`Phase::kRoom` of sync.cuh."""

PRESENT = 1
"""The rank that runs where the other one is absent: not 0, which memory holds anyhow."""


def _tensor(sim: Simulation, label: str) -> torch.Tensor:
    return next(b.tensor for b in sim.arena.buffers if b.label == label)


def _report(sim: Simulation, rank: int) -> list[int]:
    """Expired, rank, phase, index, awaited, seen, aborted: see sync.cuh."""
    return [int(word) for word in _tensor(sim, f"report{rank}")[:7]]


def _one_rank(plan: SimPlan, sim: Simulation) -> list[Launch]:
    prepared = plan.prepare(sim)
    present = [launch for launch in prepared.launches if len(launch.arguments) > PRESENT]
    assert len(present) == 1 < len(prepared.launches), "a plan of two ranks"
    return present


def _absent(plan: SimPlan, sim: Simulation) -> Prepared:
    present = _one_rank(plan, sim)

    def check() -> str | None:
        if not bool(_tensor(sim, f"out0_{PRESENT}").isnan().all()):
            return "tokens of a call that failed have values"
        expired, rank, phase, _, awaited, seen, aborted = _report(sim, PRESENT)
        right = expired == 1 and rank == PRESENT and phase > 0 and awaited != seen
        if right and aborted == phase << 8 | rank + 1:
            return None
        return f"the report says {_report(sim, PRESENT)}"

    return Prepared(present, check, most_expiries=1)


def _refused(plan: SimPlan, sim: Simulation) -> Prepared:
    present = _one_rank(plan, sim)
    refusing = 1 - PRESENT
    arena = next(b for b in sim.arena.buffers if b.label == f"arena{PRESENT}")
    at = next(first for name, first, _ in arena.fields if name == "abort")
    arena.tensor[at] = refusing + 1  # as the host of that rank does

    def check() -> str | None:
        if not bool(_tensor(sim, f"out0_{PRESENT}").isnan().all()):
            return "tokens of a call that failed have values"
        expired, *_, aborted = _report(sim, PRESENT)
        return None if (expired, aborted) == (0, refusing + 1) else f"the report says {_report(sim, PRESENT)}"

    return Prepared(present, check, most_expiries=0)


def _expiring(plan: SimPlan, sim: Simulation) -> Prepared:
    prepared = plan.prepare(sim)
    ranks = len(prepared.launches)

    def check() -> str | None:
        for rank in range(ranks):
            nan = _tensor(sim, f"out0_{rank}").isnan()
            if bool(nan.any()) and not bool(nan.all()):
                return f"rank {rank}: some tokens have values, others NaN"
            if bool(nan.any()) and not _report(sim, rank)[-1]:
                return f"rank {rank} failed, its report says {_report(sim, rank)}"
        return None

    return Prepared(prepared.launches, check)


def _too_many(case: FusedCase, sim: Simulation) -> Prepared:
    """More routes than the pools of a plan without passes hold, as where ranks have not the same bound."""
    ranks = Ranks(case, sim)
    inputs, _, launches = ranks.stage(sim, 0)
    ranks.write(inputs)

    def check() -> str | None:
        reports = [_report(sim, rank) for rank in range(len(launches))]
        if not all(bool(_tensor(sim, f"out0_{rank}").isnan().all()) for rank in range(len(launches))):
            return "tokens of a call that failed have values"
        found = [(expired, phase) for expired, _, phase, *_ in reports]
        if (1, _ROOM) not in found or any(report[-1] >> 8 != _ROOM for report in reports):
            return f"the reports say {reports}"
        return None

    return Prepared(launches, check, most_expiries=0)


def simulated() -> Iterator[SimPlan]:
    """One rank alone, its peer absent or refusing, and all ranks with deadlines by chance, of plans with two ranks."""
    known = {plan.name: plan for plan in fused()}
    for name in CASES:
        case = name.removeprefix("fused/")
        yield SimPlan(f"absent-peer/{case}", functools.partial(_absent, known[name]), expiry="deadlock")
        yield SimPlan(f"expiring/{case}", functools.partial(_expiring, known[name]), expiry="random")
    hot = FUSED["passes-hot"]
    without = replace(hot, plan=replace(hot.plan, passes=False))
    yield SimPlan("refusing-rows/hot", functools.partial(_too_many, without), expiry="deadlock")
    yield SimPlan("refusing-peer/mixed", functools.partial(_refused, known["fused/mixed"]), expiry="deadlock")
