"""Time stamps of a simulated call: the scheduler's steps instead of nanoseconds."""

from __future__ import annotations

from dataclasses import replace

from megamoe.cuda.arena import TRACE_EVENTS, TRACE_ROLES
from megamoe.cuda.trace import Recording
from megamoe.errors import EngineError, InputError
from megamoe.sim.fused import CASES, Ranks
from megamoe.sim.simulation import Simulation

__all__ = ["record"]


def record(name: str, seed: int = 1) -> Recording:
    """The first call of a case of `megamoe.sim.fused`, with a tracing plan.

    Raises:
        InputError: no such case.
        EngineError: the simulator cannot run here, or the run found something.
    """
    if name not in CASES:
        raise InputError("simulate", name, ", ".join(CASES), "Pick one of the listed names.")
    case = replace(CASES[name], plan=replace(CASES[name].plan, trace=True))
    with Simulation() as sim:
        ranks = Ranks(case, sim)
        inputs, _, launches = ranks.stage(sim, 0)
        ranks.write(inputs)
        report = sim.run(launches, seed=seed)
        if not report.ok:
            raise EngineError("simulate", str(report), "a run without findings", "megamoe sim replay shows more.")
        shape = (case.grid, TRACE_ROLES, TRACE_EVENTS)
        stamps = tuple(b.view("trace").view(shape).numpy().copy() for b in ranks.buffers)
    about = {
        "model": f"simulated {name}",
        "tokens": list(case.tokens[0]),
        "ranks": len(stamps),
        "plan": repr(case.plan),
    }
    return Recording(stamps, about, unit="steps")
