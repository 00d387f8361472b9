"""Converting layers in memory: expert by expert the same as converting each matrix, and refusals that say where."""

from __future__ import annotations

import pytest
import torch

from megamoe import ExpertWeights, MoESpec
from megamoe.errors import FormatError, WeightError
from megamoe.formats import convert as module
from megamoe.formats import fp8_block, mxfp4
from megamoe.formats.convert import convert, empty_weights
from megamoe.formats.testing import random_weights

SPEC = MoESpec(hidden=256, intermediate=128, experts=4, topk=2)


def dense(weights: ExpertWeights, name: str) -> torch.Tensor:
    value, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
    if weights.format == "bf16":
        return value.float()
    return (fp8_block.dequantize_weights if weights.format == "fp8_block" else mxfp4.dequantize)(value, scale)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize(("source", "target"), list(module.CONVERSIONS))
def test_convert(source: str, target: str, scale_format: str) -> None:
    weights = random_weights(SPEC, source, first_expert=1, count=3)
    calls: list[tuple[int, int]] = []
    got = convert(weights, target, scale_format, progress=lambda done, total: calls.append((done, total)))
    got.check(SPEC, 3)
    assert got.format == target
    assert got.first_expert == 1
    assert calls[-1] == (got.nbytes, got.nbytes)
    for name in ("w13", "w2"):
        before, after = dense(weights, name), dense(got, name)
        if source == "mxfp4":
            assert torch.equal(after, before)
        elif target == "bf16":
            assert torch.equal(after, before.bfloat16().float())
        else:
            q, s = fp8_block.quantize_weights(before.bfloat16(), scale_format)
            assert torch.equal(after, fp8_block.dequantize_weights(q, s))


def test_same_format_is_the_same_object() -> None:
    weights = random_weights(SPEC, "bf16")
    assert convert(weights, "bf16") is weights


@pytest.mark.parametrize(("source", "target"), [("fp8_block", "mxfp4"), ("bf16", "mxfp4"), ("bf16", "int4")])
def test_unknown_conversion(source: str, target: str) -> None:
    with pytest.raises(FormatError, match=f"convert_to: got {target}; allowed: {source}"):
        convert(random_weights(SPEC, source), target)  # type: ignore[arg-type]


def test_inexact_conversion_names_expert_row_and_group() -> None:
    weights = random_weights(SPEC, "mxfp4", first_expert=2, count=2)
    assert weights.w2_scale is not None
    weights.w2[1, 9, 16:32] = 0x11
    weights.w2_scale.view(torch.uint8)[1, 9, 1] = 40
    with pytest.raises(FormatError, match=r"expert 3, w2: scale: .*1 groups.*\[row, group\] = \[9, 1\]"):
        convert(weights, "fp8_block")


def test_damaged_weights_name_expert_and_block() -> None:
    weights = random_weights(SPEC, "bf16")
    weights.w13[2, 200, 3] = torch.inf
    with pytest.raises(WeightError, match=r"expert 2, w13: .*block \[1, 0\]"):
        convert(weights, "fp8_block")


def test_mxfp4_outside_bfloat16_is_refused() -> None:
    weights = random_weights(SPEC, "mxfp4")
    assert weights.w13_scale is not None
    weights.w13[0, 5, 0] = 0x77
    weights.w13_scale.view(torch.uint8)[0, 5, 0] = 254
    with pytest.raises(FormatError, match=r"expert 0, w13: .*bfloat16 at \[5, 0\]"):
        convert(weights, "bf16")


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4", "bf16"])
def test_empty_weights_have_the_contract_shapes(weight_format: str) -> None:
    weights = empty_weights(SPEC, weight_format, 3, first_expert=1)
    weights.check(SPEC, 3)
    empty_weights(SPEC, weight_format, 0).check(SPEC, 0)


def test_random_weights_do_not_depend_on_the_split() -> None:
    whole, part = random_weights(SPEC, "fp8_block"), random_weights(SPEC, "fp8_block", first_expert=2, count=1)
    assert torch.equal(whole.w13[2:3].view(torch.uint8), part.w13.view(torch.uint8))
    assert not torch.equal(whole.w13[1:2].view(torch.uint8), part.w13.view(torch.uint8))
