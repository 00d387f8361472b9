"""The fused kernel when waits expire: a rank that never starts, or deadlines that pass at any moment.

The call must end without a race, with NaN for every token of a rank that failed, and the first expired wait in its
host-visible report; one expired wait must end all others. In the simulator a deadline passes when nothing else can go
on, or by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from megamoe.sim.fused import simulated as fused
from megamoe.sim.plans import Prepared, SimPlan
from megamoe.sim.simulation import Simulation

__all__ = ["simulated"]

CASES = ("fused/swap", "fused/mixed", "fused/lag")
PRESENT = 1
"""The rank that runs where the other one is absent: not 0, which memory holds anyhow."""


def _tensor(sim: Simulation, label: str) -> torch.Tensor:
    return next(b.tensor for b in sim.arena.buffers if b.label == label)


def _absent(plan: SimPlan, sim: Simulation) -> Prepared:
    prepared = plan.prepare(sim)
    present = [launch for launch in prepared.launches if len(launch.arguments) > PRESENT]
    assert len(present) == 1 < len(prepared.launches), "a plan of two ranks"

    def check() -> str | None:
        if not bool(_tensor(sim, f"out0_{PRESENT}").isnan().all()):
            return "tokens of a call that failed have values"
        # Expired, rank, phase, index, awaited, seen: see sync.cuh.
        expired, rank, phase, _, awaited, seen = _tensor(sim, f"report{PRESENT}").tolist()[:6]
        right = expired == 1 and rank == PRESENT and phase > 0 and awaited != seen
        return None if right else f"the report says {_tensor(sim, f'report{PRESENT}').tolist()}"

    return Prepared(present, check, most_expiries=1)


def _expiring(plan: SimPlan, sim: Simulation) -> Prepared:
    prepared = plan.prepare(sim)
    ranks = len(prepared.launches)

    def check() -> str | None:
        for rank in range(ranks):
            nan = _tensor(sim, f"out0_{rank}").isnan()
            if bool(nan.any()) and not bool(nan.all()):
                return f"rank {rank}: some tokens have values, others NaN"
        return None

    return Prepared(prepared.launches, check)


def simulated() -> Iterator[SimPlan]:
    """One rank alone, and all ranks with deadlines by chance, of plans with two ranks."""
    known = {plan.name: plan for plan in fused()}
    for name in CASES:
        case = name.removeprefix("fused/")
        yield SimPlan(f"absent-peer/{case}", functools.partial(_absent, known[name]), expiry="deadlock")
        yield SimPlan(f"expiring/{case}", functools.partial(_expiring, known[name]), expiry="random")
