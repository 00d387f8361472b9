"""The grouped GEMM in the simulator: operands in its memory, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from megamoe.bench.gemm_cases import CASES, GemmCase, Operands, operands, oracle, used_rows
from megamoe.cuda.gemm import PLANS, GemmPlan, GroupedGemm, Problem, job, problem_from
from megamoe.formats.layout import interleave_gate_up
from megamoe.reference import relative_error
from megamoe.sim.driver import SimDriver, compiled
from megamoe.sim.plans import Prepared, SimPlan
from megamoe.sim.simulation import Launch, Simulation

__all__ = ["SIMULATED_SMS", "gemm_launch", "simulated"]

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


def _prepare(plan: GemmPlan, case: GemmCase, sim: Simulation) -> Prepared:
    given = operands(case)
    rows, wanted = used_rows(case), oracle(case, given)
    if plan.interleaved:
        given = replace(given, b=interleave_gate_up(given.b))
        wanted = interleave_gate_up(wanted.t().contiguous().unsqueeze(0))[0].t()
    launch, problem = gemm_launch(sim, plan, case, given)
    bound = 1e-6 if plan.float32 else 2e-3  # of float32, the order of a k-block's sum; of BF16, the rounding

    def check() -> str | None:
        error = relative_error(problem.out[rows], wanted)
        return None if error < bound else f"relative error {error:.2e}, allowed {bound:.0e}"

    return Prepared([launch], check)


def simulated() -> Iterator[SimPlan]:
    """Every GEMM plan on odd row-block counts, an empty group, padding rows and a column tail."""
    for name, plan in PLANS.items():
        case = CASES["shallow" if plan.interleaved else "tiny"]  # whole blocks of gate and of up
        yield SimPlan(f"gemm/{name}", functools.partial(_prepare, plan, case))
