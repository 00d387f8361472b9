"""The grouped GEMM on a GPU: the oracle's numbers, and the same bits from every plan, cluster and repeat."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megamoe.bench.conformance import Case, Gpu
from megamoe.bench.conformance_cases import WIDTHS, product_operands
from megamoe.bench.gemm_cases import CASES, GemmCase, operands, oracle, used_rows
from megamoe.cuda.gemm import PLANS, GemmPlan, GroupedGemm, problem_from
from megamoe.formats.layout import interleave_gate_up
from megamoe.reference import fma, relative_error

pytestmark = pytest.mark.gpu

LIMIT_TICKS = 3  # 9 to 13 s instead of minutes: a hang must not hold the machine
BF16_ROUNDING = 2e-3
TENSOR_CORE = 5e-4  # sums inside a k-block are not exact there


@functools.lru_cache(maxsize=16)
def _gemm(plan: GemmPlan) -> GroupedGemm:
    return GroupedGemm(plan)


@functools.lru_cache(maxsize=8)
def _case(name: str) -> tuple[GemmCase, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    case = CASES[name]
    given = operands(case)
    tensors = (given.a, given.a_scales, given.b, given.b_scales)
    return case, tuple(t.cuda() for t in tensors), oracle(case, given).cuda(), used_rows(case).cuda()


def _run(plan: GemmPlan, case: GemmCase, tensors: tuple[torch.Tensor, ...], repeats: int = 1) -> torch.Tensor:
    """The whole pool's output; checks that repeats agree and that nothing outside the output is written."""
    plan = replace(plan, limit_ticks=LIMIT_TICKS)
    if plan.interleaved:
        tensors = (*tensors[:2], interleave_gate_up(tensors[2]), tensors[3])
    problem = problem_from(plan, case.counts, *tensors)
    guard, size = 4096, problem.out.numel()
    memory = torch.full((size + 2 * guard,), 7.0, dtype=problem.out.dtype, device="cuda")
    out = memory[guard : guard + size].view(problem.out.shape)
    problem = replace(problem, out=out)
    results = []
    for _ in range(repeats):
        out.fill_(float("nan"))
        _gemm(plan)(problem)
        torch.cuda.synchronize()
        results.append(out.clone())
    assert (memory[:guard] == 7).all()
    assert (memory[guard + size :] == 7).all()
    assert all(torch.equal(r.nan_to_num(nan=-1.0), results[0].nan_to_num(nan=-1.0)) for r in results)
    return results[0]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("plan", list(PLANS.values()), ids=lambda p: p.name)
def test_matches_the_oracle(name: str, plan: GemmPlan) -> None:
    case, tensors, wanted, rows = _case(name)
    if plan.interleaved and case.n % 256:
        pytest.skip("an interleaved matrix has whole blocks of gate and of up")
    got = _run(plan, case, tensors, repeats=3)[rows]
    if plan.interleaved:
        wanted = interleave_gate_up(wanted.t().contiguous().unsqueeze(0))[0].t()
    assert torch.isfinite(got).all()
    assert relative_error(got, wanted) < (TENSOR_CORE if plan.float32 else BF16_ROUNDING)


@pytest.mark.parametrize("name", list(CASES))
def test_every_plan_gives_the_same_bits(name: str) -> None:
    case, tensors, _, rows = _case(name)
    results = {p.name: _run(p, case, tensors)[rows] for p in PLANS.values() if not p.interleaved}
    exact = next(r for n, r in results.items() if n.endswith("f32"))
    for plan, result in results.items():
        want = exact if result.dtype == torch.float32 else exact.bfloat16()
        assert torch.equal(result.view(torch.uint8), want.view(torch.uint8)), plan


@pytest.mark.parametrize("plan", [PLANS["wide"], PLANS["narrow"]], ids=lambda p: p.name)
def test_a_row_does_not_depend_on_the_others(plan: GemmPlan) -> None:
    case, tensors, _, rows = _case("ragged")
    whole = _run(plan, case, tensors)
    a, scales = tensors[0].clone(), tensors[1].clone()
    scales[400] = float("nan")  # group 1
    a[130] = torch.full_like(a[130].view(torch.uint8), 0x7F).view(a.dtype)  # group 0
    poisoned = _run(plan, case, (a, scales, *tensors[2:]))
    others = rows[(rows != 400) & (rows != 130)]
    assert torch.equal(whole[others], poisoned[others])
    assert poisoned[400].isnan().all()
    assert poisoned[130].isnan().all()
    # One row alone, in another group structure: same weights, same row, same bits.
    single = GemmCase((1, 0, 0, 0, 0, 0), case.n, case.k)
    alone = _run(plan, single, (tensors[0][:128].contiguous(), tensors[1][:128].contiguous(), *tensors[2:]))
    assert torch.equal(alone[0], whole[0])


def test_no_rows_is_no_work() -> None:
    case, tensors, _, _ = _case("ragged")
    plan = PLANS["wide"]
    problem = problem_from(plan, [0] * len(case.counts), *tensors)
    _gemm(plan)(problem)
    torch.cuda.synchronize()
    assert problem.out.isnan().all()


def _products(x: torch.Tensor, y: torch.Tensor, width: int = 128) -> torch.Tensor:
    """float32 [order, source, 256, 256] of conformance/wgmma_widths.cu for e4m3 x, y [256, 128]."""
    case = Case(
        name="products",
        source="conformance/wgmma_widths.cu",
        entry="wgmma_widths",
        inputs=lambda: {"x": x, "y": y},
        outputs={"out": ((2, 2, 256, 256), torch.float32)},
        config={"kWidth": width},
        shared=2 * 256 * 128,
    )
    return Gpu().run(case)["out"]


@pytest.mark.parametrize("kind", ["gaussian", "wide", "bytes"])
def test_every_width_order_and_source_of_a_product_has_the_same_bits(kind: str) -> None:
    pair = product_operands(kind)
    want = _products(**pair)[0, 0]
    assert relative_error(want, pair["x"].double() @ pair["y"].double().T) < TENSOR_CORE
    for width in WIDTHS:
        got = _products(**pair, width=width)
        for source in range(2):
            assert torch.equal(got[0, source], want), (width, source)
            assert torch.equal(got[1, source].T, want), (width, source)


def test_bits_are_the_contracts_chain_over_the_tensor_cores_sums() -> None:
    case = GemmCase((256,), 256, 1024)
    given = operands(case)
    acc = torch.zeros(256, 256)
    for k in range(8):
        block = slice(k * 128, k * 128 + 128)
        partial = _products(given.a[:, block].contiguous(), given.b[0, :, block].contiguous())[0, 0]
        acc = fma(partial, given.a_scales[:, k, None] * given.b_scales[0, :, k].repeat_interleave(128), acc)
    tensors = tuple(t.cuda() for t in (given.a, given.a_scales, given.b, given.b_scales))
    for plan in (PLANS["wide-f32"], PLANS["narrow-f32"]):
        assert torch.equal(_run(plan, case, tensors).cpu(), acc), plan.name
