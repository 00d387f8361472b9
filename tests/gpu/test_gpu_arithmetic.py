"""kernels/math.cuh on a GPU against the oracle: exact where the contract says so, within a bound for silu."""

from __future__ import annotations

import pytest

import arithmetic_checks as checks
from megamoe.bench.conformance import Gpu

pytestmark = pytest.mark.gpu

GROUPS = 4096


def test_promotion_is_a_fused_multiply_add() -> None:
    checks.promotion_is_a_fused_multiply_add(Gpu(), GROUPS)


def test_silu_over_all_floats() -> None:
    checks.silu_over_all_floats(Gpu(), GROUPS)


@pytest.mark.parametrize("clamp", [None, 10.0])
def test_swiglu_and_requantisation(clamp: float | None) -> None:
    checks.swiglu_and_requantisation(Gpu(), GROUPS, clamp)
