"""The grouped GEMM in the simulator: operands in its memory, and the launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from megamoe.bench.gemm_cases import GemmCase, Operands
from megamoe.cuda.gemm import (
    SOURCE,
    THREADS,
    GemmParams,
    GemmPlan,
    Problem,
    fill_params,
    grid_size,
    problem_from,
    tensor_maps,
)
from megamoe.sim.build import Kernel
from megamoe.sim.memory import encode_tensor_map
from megamoe.sim.simulation import Argument, Launch, Simulation

__all__ = ["SIMULATED_SMS", "gemm_kernel", "gemm_launch"]

SIMULATED_SMS: Final = 4
"""CTAs at most: two pairs, or four single CTAs, so that each takes several tiles of a small case."""


def gemm_kernel(plan: GemmPlan) -> Kernel:
    """The kernel of `plan`, for `megamoe.sim.build.library`."""
    return Kernel.of(SOURCE, "grouped_gemm", plan.config())


def gemm_launch(
    sim: Simulation, plan: GemmPlan, case: GemmCase, given: Operands, multiprocessors: int = SIMULATED_SMS
) -> tuple[Launch, Problem]:
    """Copy the operands into `sim` and describe the launch.

    Returns:
        The launch, and the problem whose ``out`` holds the result after a run (NaN before).
    """
    made = problem_from(plan, case.counts, given.a, given.a_scales, given.b, given.b_scales)
    names = ("a", "row_scales", "b", "tile_scales", "tiles", "out")
    tensors = {n: sim.buffer(n, getattr(made, n), read_only=n != "out").tensor for n in names}
    problem = replace(made, **tensors)
    arguments: list[Argument] = [
        *(encode_tensor_map(spec) for spec in tensor_maps(plan, problem)),
        fill_params(GemmParams(), problem),
    ]
    grid = grid_size(plan, problem, multiprocessors)
    return Launch(gemm_kernel(plan), grid, THREADS, [arguments], plan.cluster, plan.shared_bytes), problem
