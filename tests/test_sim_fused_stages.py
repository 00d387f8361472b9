"""The fused kernel stage by stage against the oracle, in the simulator: each GEMM is held to its own bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe import reference
from megamoe.bench.stages import FIRST_GEMM, SECOND_GEMM, stage_errors
from megamoe.cuda.plan import Plan
from megamoe.sim.fused import FusedCase, Ranks
from megamoe.sim.requirements import missing
from megamoe.sim.simulation import Simulation

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(swap=False, stages=2),
        Plan(wide=False, stages=2, pulled_rows=2),
        Plan(stages=2, wave_experts=1),
    ],
    ids=["wide", "swap", "mixed"],
)
def test_each_stage_agrees_with_the_oracle(plan):
    case = FusedCase(replace(plan, keep_intermediate=True), ((75, 30), (1, 1)))
    with Simulation() as sim:
        ranks = Ranks(case, sim)
        inputs, outs, launches = ranks.stage(sim, 0)
        ranks.write(inputs)
        report = sim.run(launches, seed=1)
        assert report.ok, report
        first, second = stage_errors(case.spec, ranks.full, ranks.buffers, inputs)
        assert first < FIRST_GEMM
        assert second < SECOND_GEMM
        for given, out in zip(inputs, outs, strict=True):
            assert reference.relative_error(out, given.wanted) < 8e-3
