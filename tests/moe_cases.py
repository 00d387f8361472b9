"""Small layers and calls that several test files share."""

from __future__ import annotations

import torch

from megamoe import ExpertWeights, MoESpec
from megamoe.formats import fp8_block, mxfp4
from megamoe.spec import WeightFormat

SPEC = MoESpec(hidden=256, intermediate=128, experts=8, topk=3)


def make_weights(spec: MoESpec, weight_format: WeightFormat, seed: int = 0) -> ExpertWeights:
    """All experts of a layer, Gaussian."""
    generator = torch.Generator().manual_seed(seed)
    e, h, i = spec.experts, spec.hidden, spec.intermediate
    w13 = torch.randn(e, 2 * i, h, generator=generator) * h**-0.5
    w2 = torch.randn(e, h, i, generator=generator) * i**-0.5
    if weight_format == "bf16":
        return ExpertWeights(format="bf16", w13=w13.bfloat16(), w2=w2.bfloat16())
    quantize = mxfp4.quantize if weight_format == "mxfp4" else fp8_block.quantize_weights
    q13, s13 = quantize(w13)
    q2, s2 = quantize(w2)
    return ExpertWeights(format=weight_format, w13=q13, w2=q2, w13_scale=s13, w2_scale=s2)


def part(weights: ExpertWeights, first: int, count: int) -> ExpertWeights:
    """Experts ``[first, first + count)`` of a whole layer, as one rank holds them."""
    cut = slice(first, first + count)
    return ExpertWeights(
        format=weights.format,
        w13=weights.w13[cut],
        w2=weights.w2[cut],
        w13_scale=None if weights.w13_scale is None else weights.w13_scale[cut],
        w2_scale=None if weights.w2_scale is None else weights.w2_scale[cut],
        first_expert=first,
    )


def make_call(spec: MoESpec, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """BF16 activations, int64 ids without repetition within a token, and route weights."""
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    x = torch.randn(tokens, spec.hidden, generator=generator).bfloat16()
    ids = torch.rand(tokens, spec.experts, generator=generator).argsort(1)[:, : spec.topk].contiguous()
    return x, ids, torch.rand(tokens, spec.topk, generator=generator) + 0.1
