"""Across the grouped GEMM's plans in the simulator: one set of bits, and depths that the registered cases leave out."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from megamoe.bench.gemm_cases import CASES, GemmCase, Operands, operands, oracle, used_rows
from megamoe.cuda.gemm import PLANS, GemmPlan
from megamoe.reference import relative_error
from megamoe.sim.gemm import gemm_launch
from megamoe.sim.requirements import missing
from megamoe.sim.simulation import Simulation

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@functools.lru_cache(maxsize=8)
def _case(name: str) -> tuple[GemmCase, Operands, torch.Tensor, torch.Tensor]:
    case = CASES[name]
    given = operands(case)
    return case, given, oracle(case, given), used_rows(case)


def _results(
    plan: GemmPlan, name: str, plain: Sequence[int] = (1,), checked: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output rows (the same under every seed, which this checks) and what the oracle says of them."""
    case, given, wanted, rows = _case(name)
    first: torch.Tensor | None = None
    with Simulation() as sim:
        launch, problem = gemm_launch(sim, plan, case, given)
        for mode, seeds in ((False, plain), (True, checked)):
            for report in sim.seeds([launch], list(seeds), checked=mode):
                assert not report.findings, report
                out = problem.out[rows].clone()
                first = out if first is None else first
                assert torch.equal(out.view(torch.uint8), first.view(torch.uint8)), (mode, report.seed)
    assert first is not None
    return first, wanted


def test_plans_agree_bit_by_bit() -> None:
    exact, _ = _results(PLANS["wide-f32"], "ragged")
    for name in ("wide", "narrow", "wide-single", "narrow-f32"):
        got, _ = _results(PLANS[name], "ragged")
        assert torch.equal(got, exact.to(got.dtype)), name


@pytest.mark.parametrize("plan", [PLANS["wide"], PLANS["narrow"]], ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["shallow", "flat"])
def test_fewer_kblocks_than_stages(plan: GemmPlan, name: str) -> None:
    got, wanted = _results(plan, name, range(5), range(1))
    assert relative_error(got, wanted) < 2e-3
