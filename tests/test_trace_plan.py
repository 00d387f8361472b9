"""Plans that record time stamps: what the compiler builds of them has no spill, whatever the stamps' registers cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamoe.bench.models import MODELS
from megamoe.bench.timeline_ranks import tracing_candidates, tracing_plan
from megamoe.cuda.fused import job, sizes_of
from megamoe.cuda.select import select_plan
from megamoe.cuda.toolchain import compile_kernel


@pytest.mark.parametrize(("name", "ranks"), [("flash", 2), ("pro", 1)])
@pytest.mark.parametrize("bound", [64, 1024, 8192])
def test_a_traced_plan_compiles_without_a_loss(name: str, ranks: int, bound: int) -> None:
    spec = MODELS[name].spec
    sizes = sizes_of(replace(spec, experts=spec.experts // 8 * ranks), ranks, 8192)
    base = select_plan(sizes, bound)
    plan = tracing_plan(base, sizes)
    assert plan in tracing_candidates(base)
    assert plan.carried_tokens == 0
    kept = ("peek", "role_registers", "math_registers", "carried_tokens")
    assert replace(plan, trace=False, **{name: getattr(base, name) for name in kept}) == base
    wanted = job(plan, sizes)
    assert wanted.config["kTrace"]
    assert compile_kernel(wanted.source, wanted.config, wanted.arch, policy="strict").report.clean
