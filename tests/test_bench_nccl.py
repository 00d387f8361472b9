"""The unfused peer computes the layer: two ranks on gloo, with a grouped product of its own on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megamoe import MoESpec, reference
from megamoe.bench.nccl import UnfusedRank
from megamoe.runtime import _slice
from moe_cases import make_weights
from rank_processes import play_ranks

SPEC = MoESpec(hidden=256, intermediate=128, experts=8, topk=3, clamp=10.0)
RANKS = 2


def _product(
    self: UnfusedRank, rows: torch.Tensor, w: torch.Tensor, s: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    out, begin = rows.new_zeros((len(rows), w.shape[1])), 0
    for expert, end in enumerate(ends.tolist()):
        out[begin:end] = (rows[begin:end].float() @ w[expert].float().T).bfloat16()
        begin = end
    return out


def _play(rank: int) -> dict[str, Any]:
    UnfusedRank._product = _product  # type: ignore[method-assign]
    weights = make_weights(SPEC, "fp8_block")
    size = SPEC.experts // RANKS
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(9 + 4 * rank, SPEC.hidden, generator=g).bfloat16()
    ids = torch.rand(len(x), SPEC.experts, generator=g).argsort(1)[:, : SPEC.topk]
    route_weights = torch.rand(len(x), SPEC.topk, generator=g)
    unfused = UnfusedRank(SPEC, _slice(weights, rank * size, size), dist.group.WORLD, fp8=False)
    got = unfused(x, ids, route_weights)
    want = reference.forward(SPEC, weights, x, ids.int(), route_weights)
    return {"error": reference.relative_error(got, want)}


def test_it_computes_the_layer(tmp_path: Path) -> None:
    for seen in play_ranks(_play, RANKS, tmp_path):
        assert seen["error"] < 5e-2  # the oracle quantises rows and intermediate, this path does not
