"""The oracle against an independent evaluation of the contract, element by element with exact rationals."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import ExpertWeights, MoESpec, reference
from megamoe.errors import InputError, WeightError
from megamoe.formats import fp8_block, mxfp4
from moe_cases import SPEC, make_call, make_weights, part


def round_float32(value: Fraction) -> float:
    """Nearest float32 (ties to even) of an exact value in its normal or subnormal range."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value)))  # may be one off; corrected below
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return float(round(value / unit) * unit)  # round() of a Fraction ties to even


def contract_by_hand(
    spec: MoESpec, w: ExpertWeights, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The contract for FP8 experts, scalar by scalar. Shares no code with the oracle but the quantiser."""

    def product(values: torch.Tensor, scale: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> np.ndarray:
        n, depth = values.shape
        dense, row = values.double().numpy(), q.double().numpy()
        result = np.zeros(n, np.float32)
        for column in range(n):
            acc = 0.0
            for block in range(depth // 128):
                at = slice(128 * block, 128 * block + 128)
                partial = round_float32(Fraction(math.fsum(dense[column, at] * row[at])))  # products are exact
                both = np.float32(s[block].item()) * np.float32(scale[column // 128, block].item())
                acc = round_float32(Fraction(partial) * Fraction(float(both)) + Fraction(acc))
            result[column] = acc
        return result

    q, s = fp8_block.quantize_activations(x, spec.input_scales)
    out = torch.zeros(x.shape, dtype=torch.bfloat16)
    for token in range(len(x)):
        total = np.zeros(spec.hidden, np.float32)
        for slot in range(spec.topk):
            expert = int(ids[token, slot])
            if expert == -1:
                continue
            both = product(w.w13[expert], w.w13_scale[expert], q[token], s[token])
            gate, up = both[: spec.intermediate], both[spec.intermediate :]
            if spec.clamp is not None:
                gate, up = np.minimum(gate, np.float32(spec.clamp)), np.clip(up, -spec.clamp, spec.clamp)
            silu = (gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))).astype(np.float32)
            h = silu * up.astype(np.float32) * np.float32(weights[token, slot].item())
            hq, hs = fp8_block.quantize_activations(torch.from_numpy(h)[None])
            down = product(w.w2[expert], w.w2_scale[expert], hq[0], hs[0])
            total = total + torch.from_numpy(down).bfloat16().float().numpy()
        out[token] = torch.from_numpy(total).bfloat16()
    return out


@pytest.mark.parametrize("input_scales", ["float32", "ue8m0"])
def test_equals_the_contract_bit_for_bit(input_scales: str) -> None:
    spec = MoESpec(hidden=256, intermediate=128, experts=2, topk=2, clamp=0.5, input_scales=input_scales)
    w = make_weights(spec, "fp8_block")
    x, ids, weights = make_call(spec, 2)
    ids[1, 0] = -1
    assert torch.equal(reference.forward(spec, w, x, ids, weights), contract_by_hand(spec, w, x, ids, weights))


def test_stages_are_those_of_the_result() -> None:
    spec = MoESpec(hidden=256, intermediate=128, experts=8, topk=3, clamp=0.7)
    w = make_weights(spec, "fp8_block")
    x, ids, weights = make_call(spec, 5)
    ids[2, 1] = -1
    stages = reference.forward(spec, w, x, ids, weights, return_intermediates=True)
    assert torch.equal(stages.y, reference.forward(spec, w, x, ids, weights))
    assert torch.equal(stages.h, reference.swiglu(stages.gate, stages.up, weights, spec.clamp) * (ids >= 0)[..., None])
    hq, hs = reference.requantize(stages.h[0])
    assert torch.equal(stages.hq[0].view(torch.uint8), hq.view(torch.uint8))
    assert torch.equal(stages.hs[0], hs)
    _, w2 = reference.expert_projections(w, int(ids[0, 1]))
    assert torch.equal(stages.down[0, 1], reference.project(w2, hq[1:2], hs[1:2])[0].bfloat16())
    assert torch.equal(stages.y, reference.combine(stages.down, ids))
    for tensor in (stages.gate, stages.h, stages.down, stages.hs):
        assert not tensor[2, 1].any()
    # The exact product in float64, without promotion, is within float32 rounding of the first stage.
    dense = fp8_block.dequantize_activations(stages.q, stages.s).double()
    w13 = fp8_block.dequantize_weights(w.w13, w.w13_scale).double()
    both = torch.einsum("mh,mknh->mkn", dense, w13[ids.clamp(0)])
    assert reference.relative_error(stages.gate[0], both[0, :, :128]) < 1e-6


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@settings(max_examples=400, deadline=None)
@given(finite, finite, finite)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    got = reference.fma(torch.tensor([a]), torch.tensor([b]), torch.tensor([c]))
    assert got.item() == round_float32(Fraction(a) * Fraction(b) + Fraction(c))


@pytest.mark.parametrize(
    ("p", "q", "c", "expected"),
    [
        # p * q = 2^-24 (1 - 2^-44): just below half-way from 1 + 2^-23 (odd) to 1 + 2^-22 (even).
        (1 + 2.0**-22, 2.0**-24 * (1 - 2.0**-22), 1 + 2.0**-23, 1 + 2.0**-23),
        # p * q = 2^-24 (1 + 2^-46): just above half-way from 1 (even) to 1 + 2^-23 (odd).
        (8392705 * 2.0**-23, 8384513 * 2.0**-47, 1.0, 1 + 2.0**-23),
        # Exactly half-way: to even.
        (1.0, 2.0**-24, 1.0, 1.0),
        (1.0, 2.0**-24, 1 + 2.0**-23, 1 + 2.0**-22),
        # The same as the first, among subnormals.
        (2.0**-100, 2.0**-50 * (1 - 2.0**-23), 2.0**-149 * 5, 2.0**-149 * 5),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_fma_next_to_half_way(p: float, q: float, c: float, expected: float, sign: int) -> None:
    exact = sign * (Fraction(p) * Fraction(q) + Fraction(c))
    assert round_float32(exact) == sign * expected
    got = reference.fma(torch.tensor([sign * p]), torch.tensor([q]), torch.tensor([sign * c]))
    assert got.item() == sign * expected


def test_skipped_routes_never_read_their_weight() -> None:
    w = make_weights(SPEC, "fp8_block")
    x, ids, weights = make_call(SPEC, 4)
    ids[1, 0] = ids[3, :] = -1
    poisoned = weights.clone()
    poisoned[ids < 0] = torch.nan
    y = reference.forward(SPEC, w, x, ids, poisoned)
    assert torch.equal(y, reference.forward(SPEC, w, x, ids, weights))
    assert not y[3].any()
    assert y[1].any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("weight_format", ["fp8_block", "bf16"])
def test_nan_and_inf_stay_in_their_token(poison: float, weight_format: str) -> None:
    w = make_weights(SPEC, weight_format)
    x, ids, weights = make_call(SPEC, 6)
    clean = reference.forward(SPEC, w, x, ids, weights)
    x[2, 130] = poison
    y = reference.forward(SPEC, w, x, ids, weights)
    others = torch.arange(6) != 2
    assert torch.equal(y[others], clean[others])
    assert y[2].isnan().any()


def test_duplicate_experts_are_separate_routes() -> None:
    spec = MoESpec(hidden=128, intermediate=128, experts=2, topk=2)
    w = make_weights(spec, "fp8_block")
    x, _, _ = make_call(spec, 3)
    ids = torch.ones(3, 2, dtype=torch.int32)
    weights = torch.rand(3, 2)
    stages = reference.forward(spec, w, x, ids, weights, return_intermediates=True)
    assert torch.equal(stages.y, (stages.down[:, 0].float() + stages.down[:, 1].float()).bfloat16())
    assert not torch.equal(stages.down[:, 0], stages.down[:, 1])


def test_combine_sums_in_slot_order() -> None:
    down = torch.tensor([[[2.0**24], [1.0], [-(2.0**24)]], [[2.0**24], [-(2.0**24)], [1.0]]]).bfloat16()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert reference.combine(down, ids).flatten().tolist() == [0.0, 1.0]
    ids[1, 2] = -1
    assert reference.combine(down, ids).flatten().tolist() == [0.0, 0.0]


def test_no_tokens() -> None:
    for weight_format in ("fp8_block", "mxfp4", "bf16"):
        y = reference.forward(SPEC, make_weights(SPEC, weight_format), *make_call(SPEC, 0))
        assert y.shape == (0, SPEC.hidden)


def test_mxfp4_has_the_bits_of_its_exact_conversion() -> None:
    w = make_weights(SPEC, "mxfp4")
    q13, s13 = mxfp4.to_fp8_block(w.w13, w.w13_scale)
    q2, s2 = mxfp4.to_fp8_block(w.w2, w.w2_scale)
    converted = ExpertWeights(format="fp8_block", w13=q13, w2=q2, w13_scale=s13, w2_scale=s2)
    call = make_call(SPEC, 9)
    got, want = (reference.forward(SPEC, v, *call, return_intermediates=True) for v in (w, converted))
    assert torch.equal(got.gate, want.gate)
    assert torch.equal(got.down, want.down)


def test_ue8m0_weight_scales_mean_the_same_power_of_two() -> None:
    w = make_weights(SPEC, "fp8_block")
    q13, s13 = fp8_block.quantize_weights(fp8_block.dequantize_weights(w.w13, w.w13_scale), "ue8m0")
    q2, s2 = fp8_block.quantize_weights(fp8_block.dequantize_weights(w.w2, w.w2_scale), "ue8m0")
    byte = ExpertWeights(format="fp8_block", w13=q13, w2=q2, w13_scale=s13, w2_scale=s2)
    wide = ExpertWeights(format="fp8_block", w13=q13, w2=q2, w13_scale=s13.float(), w2_scale=s2.float())
    call = make_call(SPEC, 4)
    assert torch.equal(reference.forward(SPEC, byte, *call), reference.forward(SPEC, wide, *call))


def test_quantised_input_is_the_same_as_bf16() -> None:
    w = make_weights(SPEC, "fp8_block")
    x, ids, weights = make_call(SPEC, 4)
    pair = fp8_block.quantize_activations(x)
    assert torch.equal(reference.forward(SPEC, w, pair, ids, weights), reference.forward(SPEC, w, x, ids, weights))


def test_bf16_experts_round_where_the_contract_says() -> None:
    w = make_weights(SPEC, "bf16")
    x, ids, weights = make_call(SPEC, 4)
    stages = reference.forward(SPEC, w, x, ids, weights, return_intermediates=True)
    expert = int(ids[1, 2])
    gate = (w.w13[expert, : SPEC.intermediate].double() @ x[1].double()).float()
    up = (w.w13[expert, SPEC.intermediate :].double() @ x[1].double()).float()
    h = (torch.nn.functional.silu(gate.double()).float() * up * weights[1, 2]).bfloat16()
    assert torch.equal(stages.hq[1, 2], h)
    down = (w.w2[expert].double() @ h.double()).float().bfloat16()
    assert (stages.down[1, 2].float() - down.float()).abs().max() <= 2.0**-8 * down.float().abs().max()
    assert reference.relative_error(stages.down[1, 2], down) < 1e-4


def test_pieces_of_ranks_make_the_whole() -> None:
    w = make_weights(SPEC, "fp8_block")
    call = make_call(SPEC, 5)
    pieces = [part(w, first, 2) for first in range(0, 8, 2)]
    assert torch.equal(reference.forward(SPEC, pieces, *call), reference.forward(SPEC, w, *call))
    with pytest.raises(InputError, match="expert_ids"):
        reference.forward(SPEC, pieces[:1], *call)
    with pytest.raises(WeightError, match="format"):
        reference.forward(SPEC, [pieces[0], make_weights(SPEC, "bf16")], *call)


@pytest.mark.parametrize("bad", [-2, 8])
def test_ids_out_of_range(bad: int) -> None:
    x, ids, weights = make_call(SPEC, 2)
    ids[1, 1] = bad
    with pytest.raises(InputError, match=str(bad)):
        reference.forward(SPEC, make_weights(SPEC, "bf16"), x, ids, weights)


def test_relative_error() -> None:
    assert reference.relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert reference.relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.75
    assert math.isnan(reference.relative_error(torch.tensor([math.nan]), torch.ones(1)))
    assert math.isnan(reference.relative_error(torch.tensor([math.nan]), torch.zeros(1)))
    assert reference.relative_error(torch.ones(3), torch.zeros(3)) == math.inf


def test_the_oracle_shares_no_code_with_an_engine() -> None:
    told = "import sys, megamoe.reference; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.split()
    assert "megamoe.reference" in loaded
    assert [name for name in loaded if name.startswith(("megamoe.cpu", "megamoe.cuda", "megamoe.sim"))] == []
