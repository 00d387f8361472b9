"""kernels/math.cuh in the simulator against the oracle."""

from __future__ import annotations

import pytest

import arithmetic_checks as checks
from megamoe.bench.conformance import Simulator
from megamoe.sim.requirements import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

GROUPS = 12  # one CTA each, all of them resident


def test_promotion_is_a_fused_multiply_add() -> None:
    checks.promotion_is_a_fused_multiply_add(Simulator(), GROUPS)


def test_silu_over_all_floats() -> None:
    checks.silu_over_all_floats(Simulator(), GROUPS)


@pytest.mark.parametrize("clamp", [None, 10.0])
def test_swiglu_and_requantisation(clamp: float | None) -> None:
    checks.swiglu_and_requantisation(Simulator(checked=True), GROUPS, clamp)
