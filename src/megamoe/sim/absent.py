"""The fused kernel when waits expire: a rank that never starts, or deadlines that pass at any moment.

The call must end without a race, with NaN for every token of a rank that failed, and the first expired wait in its
host-visible report. In the simulator a deadline passes when nothing else can go on, or by chance.
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


def _tensor(sim: Simulation, label: str) -> torch.Tensor:
    return next(b.tensor for b in sim.arena.buffers if b.label == label)


def _absent(plan: SimPlan, sim: Simulation) -> Prepared:
    prepared = plan.prepare(sim)
    present = [launch for launch in prepared.launches if launch.arguments[0] is not None]
    assert len(present) < len(prepared.launches), "a plan of several ranks"

    def check() -> str | None:
        if not bool(_tensor(sim, "out0_0").isnan().all()):
            return "tokens of a call that failed have values"
        report = _tensor(sim, "report0").tolist()
        return None if report[0] == 1 else f"the report says {report}"

    return Prepared(present, check)


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
    """Rank 0 alone, and all ranks with deadlines by chance, of plans with several ranks."""
    known = {plan.name: plan for plan in fused()}
    for name in CASES:
        case = name.removeprefix("fused/")
        yield SimPlan(f"absent-peer/{case}", functools.partial(_absent, known[name]), expiry="deadlock")
        yield SimPlan(f"expiring/{case}", functools.partial(_expiring, known[name]), expiry="random")
