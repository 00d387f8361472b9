"""Measured outputs against the oracle: on a few tokens, with only the experts that these hit moved to one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe import reference
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["held", "oracle_error"]


def held(pieces: Sequence[ExpertWeights], experts: Sequence[int], device: torch.device) -> ExpertWeights:
    """The weights of `experts` (global ids, each in one of `pieces`), in that order and on `device`: a copy."""

    def gather(name: str) -> torch.Tensor | None:
        out: torch.Tensor | None = None
        for place, expert in enumerate(experts):
            piece = next(p for p in pieces if 0 <= expert - p.first_expert < p.local_experts)
            tensor: torch.Tensor | None = getattr(piece, name)
            if tensor is None:
                return None
            if out is None:
                out = torch.empty((len(experts), *tensor.shape[1:]), dtype=tensor.dtype, device=device)
            out[place].copy_(tensor[expert - piece.first_expert])
        return out

    w13, w2 = gather("w13"), gather("w2")
    assert w13 is not None
    assert w2 is not None
    return ExpertWeights(
        format=pieces[0].format,
        w13=w13,
        w2=w2,
        w13_scale=gather("w13_scale"),
        w2_scale=gather("w2_scale"),
        gate_up=pieces[0].gate_up,
    )


def oracle_error(
    spec: MoESpec,
    pieces: Sequence[ExpertWeights],
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    got: torch.Tensor,
) -> float:
    """Relative Frobenius error of `got` BF16 ``[M, H]`` against `megamoe.reference.forward`, on the device of `x`.

    Args:
        spec: the layer.
        pieces: all experts, one piece for each rank, anywhere, of one format and order.
        x, expert_ids, expert_weights: the tokens that gave `got`; ids below 0 are skipped routes.
        got: their results.
    """
    hit = sorted({int(e) for e in expert_ids.flatten().tolist() if e >= 0})
    if not hit:
        return reference.relative_error(got, torch.zeros_like(got))
    place = torch.full((spec.experts,), -1, dtype=torch.int64, device=x.device)
    place[torch.tensor(hit, device=x.device)] = torch.arange(len(hit), device=x.device)
    ids = torch.where(expert_ids >= 0, place[expert_ids.long().clamp(min=0)], -1)
    wanted = reference.forward(spec, held(pieces, hit, x.device), x, ids, expert_weights)
    assert isinstance(wanted, torch.Tensor)
    return reference.relative_error(got, wanted)
