"""The CPU engine's parts: decoding e4m3, the dispatch plan, the experts' arithmetic stage by stage."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megamoe.cpu.combine as combining
import megamoe.cpu.experts as cpu_experts
from megamoe import ExpertWeights, MegaMoE, MoESpec, reference
from megamoe.cpu import fused, products, rounding, small
from megamoe.cpu.routing import by_expert, pack_routes, plan_dispatch, unpack_routes
from megamoe.cpu.small import run_grouped, run_padded
from megamoe.engine import Call
from megamoe.errors import InputError
from megamoe.formats import fp8_block
from megamoe.formats.e4m3 import HALF_SCALE, e4m3_to_float64, e4m3_to_half_bits, has_nan
from megamoe.formats.fp8_block import E4M3
from megamoe.formats.layout import interleave_gate_up
from moe_cases import SPEC, make_call, make_weights

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


def test_decode_every_finite_byte() -> None:
    finite = EVERY_BYTE[(EVERY_BYTE & 0x7F) != 0x7F].view(E4M3)
    half = e4m3_to_half_bits(finite, torch.empty(254, dtype=torch.int16))
    assert torch.equal(half.double() * HALF_SCALE, finite.double())
    assert torch.equal(half.signbit(), finite.float().signbit())  # of zero too


def test_decode_every_byte_to_float64() -> None:
    got, want = e4m3_to_float64(EVERY_BYTE.view(E4M3)), EVERY_BYTE.view(E4M3).double()
    assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_is_seen(byte: int) -> None:
    values = torch.zeros(3, 5, dtype=torch.uint8)
    assert not has_nan(values.view(E4M3))
    assert not has_nan(values[:0].view(E4M3))
    values[1, 3] = byte
    assert has_nan(values.view(E4M3))


@st.composite
def routings(draw: st.DrawFn) -> tuple[MoESpec, int, torch.Tensor]:
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    experts = ranks * draw(st.integers(1, 4))
    topk = draw(st.integers(1, min(experts, 4)))
    tokens = draw(st.integers(0, 12))
    spec = MoESpec(hidden=128, intermediate=128, experts=experts, topk=topk)
    ids = draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * topk, max_size=tokens * topk))
    return spec, ranks, torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).view(tokens, topk)


@settings(max_examples=150, deadline=None)
@given(routings())
def test_dispatch_plan_covers_every_route_once(case: tuple[MoESpec, int, torch.Tensor]) -> None:
    spec, ranks, ids = case
    weights = torch.rand(ids.shape)
    plans = plan_dispatch(spec, ranks, ids, weights)
    local = spec.experts // ranks
    seen: list[int] = []
    for rank, plan in enumerate(plans):
        assert plan.tokens.unique().numel() == plan.tokens.numel()  # a row crosses once
        assert set(plan.row.tolist()) == set(range(len(plan.tokens)))  # and no row is sent for nothing
        for row, expert, weight, position in zip(plan.row, plan.expert, plan.weight, plan.position, strict=True):
            token, slot = divmod(int(position), spec.topk)
            assert int(ids[token, slot]) == rank * local + int(expert)
            assert plan.tokens[row] == token
            assert weight == weights[token, slot]
        assert plan.position.tolist() == sorted(plan.position.tolist())
        seen += plan.position.tolist()
        for got, want in zip(unpack_routes(pack_routes(plan)), (plan.row, plan.expert, plan.weight), strict=True):
            assert torch.equal(got, want)
        order, counts = by_expert(plan.expert, local)
        assert plan.expert[order].tolist() == sorted(plan.expert.tolist())
        assert counts.tolist() == [(plan.expert == e).sum() for e in range(local)]
    assert sorted(seen) == (ids.flatten() >= 0).nonzero().flatten().tolist()


@pytest.mark.parametrize("bad", [-2, 8, 2**31 - 1])
def test_dispatch_plan_names_the_bad_id(bad: int) -> None:
    ids = torch.zeros(4, 3, dtype=torch.int64)
    ids[2, 1] = bad
    with pytest.raises(InputError, match=rf"expert_ids\[2, 1\]: got {bad}"):
        plan_dispatch(SPEC, 2, ids, torch.ones(4, 3))


def test_batches_cover_routes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "_BATCH_ROUTES", 10)
    counts = [3, 0, 25, 7, 0, 1]
    batches = list(cpu_experts._batches(counts))
    pieces = [piece for batch in batches for piece in batch]
    assert [begin for _, begin, _ in pieces] == [0] + [end for _, _, end in pieces[:-1]]
    assert pieces[-1][2] == sum(counts)
    for expert, count in enumerate(counts):
        assert sum(end - begin for e, begin, end in pieces if e == expert) == count
    assert all(sum(end - begin for _, begin, end in batch) <= 10 for batch in batches)
    assert all(len([1 for e, _, _ in pieces if e == expert]) <= 1 for expert in (0, 3, 5))  # not split
    assert list(cpu_experts._batches([0, 0])) == []


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4", "bf16"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 40, 150])
def test_experts_agree_with_the_oracle(weight_format: str, tokens: int) -> None:
    spec = MoESpec(hidden=384, intermediate=256, experts=6, topk=2, clamp=1.5)
    w = make_weights(spec, weight_format)
    x, ids, weights = make_call(spec, tokens)
    with MegaMoE(spec) as layer:
        layer.load(w)
        y = layer(x, ids, weights)
    assert reference.relative_error(y, reference.forward(spec, w, x, ids, weights)) < 8e-3


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_each_product_is_within_the_stage_bounds(weight_format: str, rows: int) -> None:
    w = make_weights(SPEC, weight_format)
    x, ids, weights = make_call(SPEC, rows)
    ids[:] = 5  # every route to one expert: each product has 3 * rows rows
    stages = reference.forward(SPEC, w, x, ids, weights, return_intermediates=True)
    experts = cpu_experts.make_experts(SPEC, w)
    dense = experts.operand(x, None)
    assert torch.equal(dense, experts.unpack(experts.rows(x, None)))
    gate_up = torch.empty(rows, 2 * SPEC.intermediate)
    experts._gate_up.product(5, dense, slice(0, rows), gate_up)
    h = experts._activate(gate_up, weights[:, 0].contiguous())
    assert reference.relative_error(h, stages.h[:, 0]) < 5e-4
    own = experts._round(h)
    down = torch.empty(rows, SPEC.hidden, dtype=torch.bfloat16)
    experts._down.product(5, own, slice(0, rows), down)
    _, w2 = reference.expert_projections(w, 5)
    q, s = reference.requantize(h)
    assert reference.relative_error(down, reference.project(w2, q, s)) < 2.5e-3


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 17, 40])
def test_float32_products(monkeypatch: pytest.MonkeyPatch, onednn: bool, rows: int) -> None:
    if not onednn:
        monkeypatch.setattr(products, "_has_onednn", lambda: False)
    generator = torch.Generator().manual_seed(rows)
    x, matrix = torch.randn(rows, 256, generator=generator), torch.randn(384, 256, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(rows, 384, dtype=dtype)
        products.multiply(x, matrix, out)
        bound = 1e-6 if dtype == torch.float32 else 2.5e-3
        assert reference.relative_error(out, x.double() @ matrix.double().T) < bound


def test_one_expert_in_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    w = make_weights(SPEC, "fp8_block")
    x, ids, weights = make_call(SPEC, 30)
    ids[:, 0] = 6  # a hot expert
    with MegaMoE(SPEC) as layer:
        layer.load(w)
        monkeypatch.setattr(cpu_experts, "_BATCH_ROUTES", 7)
        y = layer(x, ids, weights)
        assert layer.stats.tolist() == [(ids == e).sum() for e in range(SPEC.experts)]
    assert reference.relative_error(y, reference.forward(SPEC, w, x, ids, weights)) < 8e-3


def test_nan_in_a_weight_reaches_only_its_experts_tokens() -> None:
    w = make_weights(SPEC, "fp8_block")
    x, ids, weights = make_call(SPEC, 20)
    w.w13.view(torch.uint8)[3, 17, 100] = 0xFF
    with MegaMoE(SPEC) as layer:
        layer.load(w)
        y = layer(x, ids, weights)
    expected = reference.forward(SPEC, w, x, ids, weights)
    hit = (ids == 3).any(1)
    assert hit.any()
    assert not hit.all()
    assert torch.equal(y.isnan().any(1), hit)
    assert reference.relative_error(y[~hit], expected[~hit]) < 8e-3


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4", "bf16"])
def test_nan_in_an_input_reaches_only_its_token(weight_format: str, poison: float) -> None:
    w = make_weights(SPEC, weight_format)
    x, ids, weights = make_call(SPEC, 9)
    ids[:, 1] = 2  # all tokens share an expert, and so a matrix product
    x[4, 7] = poison
    expected = reference.forward(SPEC, w, x, ids, weights)
    with MegaMoE(SPEC) as layer:
        layer.load(w)
        y = layer(x, ids, weights)
    others = torch.arange(9) != 4
    assert y[others].isfinite().all()
    assert reference.relative_error(y[others], expected[others]) < 8e-3
    assert torch.equal(y[4].isnan(), expected[4].isnan())


@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_bf16_experts_of_odd_widths(tokens: int) -> None:
    spec = MoESpec(hidden=91, intermediate=45, experts=6, topk=2)
    w, call = make_weights(spec, "bf16"), make_call(spec, tokens)
    call[1][:, 0] = 3  # unequal counts
    with MegaMoE(spec) as layer:
        layer.load(w)
        assert reference.relative_error(layer(*call), reference.forward(spec, w, *call)) < 8e-3


def interleaved(w: ExpertWeights) -> ExpertWeights:
    return replace(w, w13=interleave_gate_up(w.w13), gate_up="interleaved8")


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize(("fuse", "tokens"), [(False, 2), (False, 40), (True, 6)])
def test_interleaved_rows_and_fused_loops(
    monkeypatch: pytest.MonkeyPatch, scale_format: Any, fuse: bool, tokens: int
) -> None:
    if fuse:
        monkeypatch.setattr(fused, "LEAST_ELEMENTS", 0)
    spec = MoESpec(hidden=384, intermediate=256, experts=6, topk=2, clamp=1.5)
    stacked = make_weights(spec, "fp8_block")
    if scale_format == "ue8m0":
        w13, w2 = (
            fp8_block.quantize_weights(fp8_block.dequantize_weights(q, s), "ue8m0")
            for q, s in ((stacked.w13, stacked.w13_scale), (stacked.w2, stacked.w2_scale))
        )
        stacked = ExpertWeights(format="fp8_block", w13=w13[0], w13_scale=w13[1], w2=w2[0], w2_scale=w2[1])
    call = make_call(spec, tokens)
    expected = reference.forward(spec, stacked, *call)
    with MegaMoE(spec) as layer:
        for w in (stacked, interleaved(stacked)):
            layer.load(w)
            assert reference.relative_error(layer(*call), expected) < 8e-3
            assert torch.equal(reference.forward(spec, w, *call), expected)


@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize("tokens", [1, 2, 30, 75])
def test_large_bf16_experts(monkeypatch: pytest.MonkeyPatch, tokens: int, clamp: float | None) -> None:
    monkeypatch.setattr(fused, "LEAST_ELEMENTS", 0)
    spec = replace(SPEC, clamp=clamp)
    w = make_weights(spec, "bf16")
    call = make_call(spec, tokens)
    with MegaMoE(spec) as layer:
        layer.load(w)
        assert reference.relative_error(layer(*call), reference.forward(spec, w, *call)) < 8e-3


@pytest.mark.parametrize("begin", [0, 3, 20])
@pytest.mark.parametrize("rows", [24, 27, 31, 32, 41, 47])
def test_bf16_product_of_some_rows(monkeypatch: pytest.MonkeyPatch, begin: int, rows: int) -> None:
    """With more rows around, or none after them; NaN there stays there."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    w = make_weights(SPEC, "bf16")
    x = torch.randn(20 + rows, SPEC.hidden, generator=torch.Generator().manual_seed(rows)).bfloat16()
    want = x[begin : begin + rows].double() @ w.w13[2].double().T
    x[:begin] = x[begin + rows :] = torch.nan
    out = torch.full((len(x), 2 * SPEC.intermediate), 7.0, dtype=torch.bfloat16)
    cpu_experts._Bf16Projection(w.w13).product(2, x, slice(begin, begin + rows), out)
    assert reference.relative_error(out[begin : begin + rows], want) < 2.5e-3
    assert (out[:begin] == 7).all()
    assert (out[begin + rows :] == 7).all()


@pytest.mark.parametrize("weight_format", ["fp8_block", "bf16"])
def test_warmup_compiles_what_calls_need(monkeypatch: pytest.MonkeyPatch, weight_format: Any) -> None:
    monkeypatch.setattr(fused, "LEAST_ELEMENTS", 0)
    used: list[str] = []
    for name, function in (
        ("decode_e4m3", fused._decode_e4m3(128)),
        ("matvec_e4m3", fused._matvec_e4m3(128)),
        ("matvec_bf16", fused._matvec_bf16),
        ("round_e4m3", fused._round_e4m3("float32")),
        ("activate", fused._activate),
    ):
        stand_in = fused.Fused(function)
        stand_in._compiled = lambda *a, name=name, function=function: (used.append(name), function(*a))[1]
        by_kind = {"matvec_bf16": stand_in, "activate": stand_in, "round_e4m3": {"float32": stand_in}}
        monkeypatch.setattr(fused, name, by_kind.get(name, {128: stand_in}))
    spec = MoESpec(hidden=384, intermediate=256, experts=6, topk=2)
    with MegaMoE(spec) as layer:
        layer.load(make_weights(spec, weight_format))
        layer.warmup()
        assert not layer.stats.any()
    fp8 = {"decode_e4m3", "matvec_e4m3", "round_e4m3"}
    assert set(used) == ({"matvec_bf16", "activate"} if weight_format == "bf16" else fp8)


def test_fused_decoding_is_exact_for_every_byte() -> None:
    byte = EVERY_BYTE.view(torch.int8).repeat(256, 1).contiguous()
    scale = torch.tensor([[1.0, 0.3], [2.0**-20, 3e4]])
    out = torch.empty(256, 256)
    assert fused.decode_e4m3[128].call(byte, scale, out) is not None
    wide = EVERY_BYTE.view(E4M3).float().repeat(256, 1)
    expected = wide * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(0.5), expected.nan_to_num(0.5))


def decodes(function: fused.Fused, rows: int, columns: int, wider: int = 0) -> None:
    """`function` decodes a matrix of this size, `wider` columns of which it must not touch."""
    generator = torch.Generator().manual_seed(rows + columns)
    byte = torch.randint(-128, 127, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows // 128, columns // 128, generator=generator)
    room = torch.full((rows, columns + wider), 7.0)
    assert function.call(byte, scale, room[:, :columns]) is not None
    want = torch.empty(rows, columns)
    fused._decode_e4m3(128)(byte, scale, want)
    assert torch.equal(room[:, :columns].nan_to_num(0.5), want.nan_to_num(0.5))
    assert (room[:, columns:] == 7).all()


def test_each_combination_of_sizes_has_its_own_loop_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.FusedBySizes, "MOST_SIZES", 2)
    function = fused.FusedBySizes(fused._decode_e4m3(128))
    decodes(function, 256, 384)
    decodes(function, 256, 384, wider=8)  # the same shape with other strides
    decodes(function, 256, 384)
    assert len(function._by_sizes) == 2
    assert function._compiled is None
    decodes(function, 384, 256)
    assert len(function._by_sizes) == 2
    assert function._compiled is not None  # any sizes


def test_a_loop_of_fixed_sizes_that_fails_is_left_for_one_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("its library is gone")

    function = fused.FusedBySizes(fused._decode_e4m3(128))
    monkeypatch.setattr(function, "_compile", lambda _: fails)
    decodes(function, 256, 384)
    assert function._compiled is not None


def test_torchs_switch_turns_loops_of_fixed_sizes_off() -> None:
    function = fused.FusedBySizes(fused._decode_e4m3(128))
    with torch.compiler.set_stance("force_eager"):
        decodes(function, 256, 256)
    assert not function._by_sizes
    decodes(function, 256, 256)
    assert function._by_sizes


def test_a_compiler_that_takes_no_fixed_sizes_is_used_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise AttributeError("another version")

    monkeypatch.setattr(torch._inductor, "compile", refuses)
    function = fused.FusedBySizes(fused._decode_e4m3(128))
    decodes(function, 256, 384)
    assert not function._by_sizes
    assert function._compiled is not None


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_has_the_bits_of_the_format(scale_format: Any, dtype: torch.dtype) -> None:
    """BF16 rows have many exact ties between e4m3 values, where an ulp of the multiplier decides."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(120, 384, generator=generator)
    x[40:] *= torch.exp2(torch.randint(-40, 40, (80, 384), generator=generator))
    x[:, 5] = 0
    x[7, 128:256] = 0
    x[8, :128] = 1e36  # beside a value whose power-of-two scale, times the decoding's 2^8, is beyond float32
    x[8, 0] = 3.3e38
    x = x.to(dtype)
    x[3, 200] = -torch.inf
    x[5, 300] = torch.nan
    x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)[6, 0] = -1  # another NaN, all bits set
    done = fused.round_e4m3[scale_format].call(x)
    assert done is not None
    want = fp8_block.dequantize_activations(*fp8_block.quantize_activations(x, scale_format))
    for got in (done[0], rounding.round_e4m3(x, scale_format)):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


def test_without_a_compiler_plain_operations_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler\nlong story")

    broken = fused.Fused(fails)
    broken._compiled = fails
    monkeypatch.setattr(fused, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(fused, "decode_e4m3", {128: broken})
    monkeypatch.setattr(fused, "matvec_e4m3", {128: broken})
    monkeypatch.setattr(fused, "round_e4m3", {"float32": broken})
    spec = MoESpec(hidden=384, intermediate=256, experts=6, topk=2)
    w = make_weights(spec, "fp8_block")
    call = make_call(spec, 20)
    with MegaMoE(spec) as layer:
        layer.load(w)
        with pytest.warns(RuntimeWarning, match=r"torch.compile failed \(no compiler\)"):
            y = layer(*call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            layer(*call)
    assert reference.relative_error(y, reference.forward(spec, w, *call)) < 8e-3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=24))
def test_small_bf16_products(route_experts: list[int]) -> None:
    w = make_weights(SPEC, "bf16")
    routes = len(route_experts)
    x = torch.randn(4, SPEC.hidden).bfloat16()
    x[3] = torch.nan
    row = torch.arange(routes) % 4
    expert, weight = torch.tensor(route_experts), torch.rand(routes)
    experts = cpu_experts.make_experts(SPEC, w)
    counts = torch.bincount(expert, minlength=SPEC.experts).tolist()
    results, _ = cpu_experts.Experts.run(experts, experts.operand(x, None), row, expert, weight)
    want = results.in_order()
    finite = row != 3
    apart, as_usual, together = 0, small._CALL_COST, 1 << 60
    for run, call_cost in (
        (run_padded, as_usual),
        (run_grouped, apart),
        (run_grouped, as_usual),
        (run_grouped, together),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(small, "_CALL_COST", call_cost)
            got = run(x, row, expert, weight, counts, experts._gate_up, experts._down, experts._down_operand).in_order()
        assert got[~finite].isnan().all()
        assert reference.relative_error(got[finite], want[finite]) < 8e-3 or not finite.any()


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([1, 1 << 12, 1 << 17, 1 << 20]))
def test_groups_of_experts(counts: list[int], elements: int) -> None:
    """Every expert with routes is in one group, with slots for all of them, and no group costs more than calls."""
    groups = small._groups(counts, elements)
    members = [expert for first, experts, _ in groups for expert in range(first, first + experts)]
    assert members == sorted(set(members))
    assert {expert for expert, count in enumerate(counts) if count} <= set(members)
    for first, experts, depth in groups:
        most = max(counts[first : first + experts])
        assert counts[first]
        assert counts[first + experts - 1]
        assert most <= depth < most + small._STEP
        assert experts > 1 or depth == most
    free = sum(experts * depth for _, experts, depth in groups) - sum(counts)
    assert free * (elements + small._SLOT_COST) <= small._CALL_COST * (len(members) - len(groups))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=24), st.sampled_from(["fp8_block", "mxfp4"]))
def test_small_decoded_products(route_experts: list[int], weight_format: Any) -> None:
    """All matrices decoded at once, against one expert after another."""
    routes = len(route_experts)
    x, row = torch.randn(4, SPEC.hidden).bfloat16(), torch.arange(routes) % 4
    expert, weight = torch.tensor(route_experts), torch.rand(routes)
    experts = cpu_experts.make_experts(SPEC, make_weights(SPEC, weight_format))
    operand = experts.operand(x, None)
    want, stats = cpu_experts.Experts.run(experts, operand, row, expert, weight)
    got, counts = experts.run(operand, row, expert, weight)
    assert torch.equal(counts, stats)
    assert reference.relative_error(got.in_order(), want.in_order()) < 8e-3  # roundings of h may go the other way
    padded = run_padded(
        operand, row, expert, weight, counts.tolist(), experts._gate_up, experts._down, experts._down_operand
    )
    assert reference.relative_error(padded.in_order(), want.in_order()) < 8e-3


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4"])
def test_matrices_are_the_decoded_ones(weight_format: Any) -> None:
    w = make_weights(SPEC, weight_format)
    experts = cpu_experts.make_experts(SPEC, w)
    some = torch.tensor([6, 1, 1])
    for projection in (experts._gate_up, experts._down):
        want = []
        for index in range(SPEC.experts):
            want.append(torch.empty(projection.shape))
            projection._decode(index, want[-1])
        dense = torch.stack(want)
        assert torch.equal(projection.matrices(), dense)
        assert torch.equal(projection.matrices(some), dense[some])


@pytest.mark.parametrize("gathered", [0, 1 << 30])
@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4", "bf16"])
def test_one_token_by_both_ways(monkeypatch: pytest.MonkeyPatch, weight_format: Any, gathered: int) -> None:
    monkeypatch.setattr(small, "_GATHERED_BYTES", gathered)
    w = make_weights(SPEC, weight_format)
    for repeated in (False, True):
        call = make_call(SPEC, 1)
        if repeated:
            call[1][0, 2] = call[1][0, 0]
        with MegaMoE(SPEC) as layer:
            layer.load(w)
            assert reference.relative_error(layer(*call), reference.forward(SPEC, w, *call)) < 8e-3


@pytest.mark.parametrize("most", [0, 1 << 20])
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("skips", [True, False])
def test_results_are_added_in_slot_order(monkeypatch: pytest.MonkeyPatch, most: int, placed: bool, skips: bool) -> None:
    """Bit for bit, with values whose sum depends on the order, ties, and NaN and infinity in tokens of their own."""
    monkeypatch.setattr(combining, "_IN_BAGS", most)
    generator = torch.Generator().manual_seed(5)
    tokens, slots, hidden = 9, 7, 91
    shape = (tokens * slots, hidden)
    routes = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 9, shape, generator=generator))
    routes = routes.bfloat16()
    routes[3, 5], routes[2 * slots, 6] = torch.nan, torch.inf
    keep = torch.ones(len(routes), dtype=torch.bool)
    keep[[0, slots + 2]] = not skips
    want = torch.zeros(tokens, hidden)
    for slot in range(slots):
        want += torch.where(keep.view(tokens, slots, 1)[:, slot], routes.view(tokens, slots, hidden)[:, slot], 0)
    position = keep.nonzero().squeeze(1)
    results = combining.Results(routes[position])
    if placed:
        place = torch.randperm(len(routes) + 4, generator=generator)[: len(position)]
        results = combining.Results(torch.full((len(routes) + 4, hidden), 1e9, dtype=torch.bfloat16), place)
        results.down[place] = routes[position]
    out = torch.empty(tokens + 1, hidden, dtype=torch.bfloat16).fill_(3)
    call = Call(
        x=out, scales=None, expert_ids=torch.empty(tokens + 1, slots), expert_weights=out, out=out, num_tokens=tokens,
        bound=99,
    )  # fmt: skip
    combining.combine(call, position, results, ordered=True)
    assert torch.equal(out[:tokens].isnan(), want.isnan())
    assert torch.equal(out[:tokens].nan_to_num(0.5), want.bfloat16().nan_to_num(0.5))
    assert (out[tokens] == 3).all()
