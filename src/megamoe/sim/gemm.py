"""The grouped GEMM in the simulator: operands in its memory, and the launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from megamoe.bench.gemm_cases import GemmCase, Operands
from megamoe.cuda.gemm import GemmPlan, GroupedGemm, Problem, job, problem_from
from megamoe.sim.driver import SimDriver, compiled
from megamoe.sim.simulation import Launch, Simulation

__all__ = ["SIMULATED_SMS", "gemm_launch"]

SIMULATED_SMS: Final = 4
"""CTAs at most: two pairs, or four single CTAs, so that each takes several tiles of a small case."""


def gemm_launch(
    sim: Simulation, plan: GemmPlan, case: GemmCase, given: Operands, multiprocessors: int = SIMULATED_SMS
) -> tuple[Launch, Problem]:
    """Copy the operands into `sim` and let the host side that launches on a GPU describe the launch.

    Returns:
        The launch, and the problem whose ``out`` holds the result after a run (NaN before).
    """
    made = problem_from(plan, case.counts, given.a, given.a_scales, given.b, given.b_scales)
    names = ("a", "row_scales", "b", "tile_scales", "tiles", "out")
    tensors = {n: sim.buffer(n, getattr(made, n), read_only=n != "out").tensor for n in names}
    problem = replace(made, **tensors)
    driver = SimDriver(sim, multiprocessors)
    GroupedGemm(plan, driver=driver, compiled=compiled(job(plan)))(problem, stream=0)
    (launch,) = driver.take()
    return launch, problem
