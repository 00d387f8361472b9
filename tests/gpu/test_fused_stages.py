"""The fused kernel stage by stage on a GPU: each GEMM is held to its own bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from fused_cases import PLANS, SMALL, call_engine, make_engine, make_input, make_weights, split

from megamoe import MoESpec
from megamoe.bench.stages import FIRST_GEMM, SECOND_GEMM, stage_errors
from megamoe.formats import fp8_block

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Input:
    q: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@pytest.mark.parametrize("name", ["wide", "swap", "mixed"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("spec", "tokens"),
    [(SMALL, 200), (MoESpec(hidden=4096, intermediate=2048, experts=16, topk=6, clamp=10.0), 300)],
    ids=["small", "flash"],
)
def test_each_stage_agrees_with_the_oracle(name, ranks, spec, tokens):
    full = make_weights(spec, "cuda")
    inputs = split(make_input(spec, tokens, "cuda"), [tokens // ranks] * ranks)
    engine = make_engine(spec, full, ranks=ranks, plan=replace(PLANS[name], keep_intermediate=True), max_tokens=512)
    call_engine(engine, inputs)
    staged = [Input(*fp8_block.quantize_activations(x), ids, weights) for x, ids, weights in inputs]
    first, second = stage_errors(spec, full, [engine.buffers(r) for r in range(ranks)], staged)
    engine.close()
    assert first < FIRST_GEMM
    assert second < SECOND_GEMM
