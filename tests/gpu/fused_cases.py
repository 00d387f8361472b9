"""Layers, inputs and calls for the tests of the fused kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe import ExpertWeights, MoESpec
from megamoe.control import Control
from megamoe.cuda.engine import CudaEngine
from megamoe.cuda.plan import Plan
from megamoe.engine import Call, Placement

DEADLINE = 5.0
"""Seconds of a wait in tests: nothing may spin for long on a machine that others use."""

SMALL = MoESpec(hidden=512, intermediate=256, experts=8, topk=2, clamp=10.0)


def plan(**changes: object) -> Plan:
    """A plan whose stuck pipelines trap after seconds."""
    return Plan(pipeline_limit_ticks=2, **changes)  # type: ignore[arg-type]


PLANS = {
    "wide": plan(swap=False),
    "swap": plan(wide=False, stages=4),
    "mixed": plan(),
    # Small calls bring their rows while they list routes, but not here; nor do the math warps.
    "dispatch": plan(direct_tokens=0, urgent_tokens=0),
    "urgent": plan(direct_tokens=0, urgent_tokens=10),
    "mixed-waves": plan(wave_experts=3, direct_tokens=0),
    "mixed-lag": plan(wave_experts=2, lag=1, staging_buffers=2, pulled_rows=2),
    "mixed-carrying": plan(
        carried_tokens=16, role_registers=40, math_registers=232, staging_buffers=2, direct_tokens=0
    ),
    # Results that go to other ranks always seem to take too long: both GEMMs alternate.
    "mixed-alternating": plan(link_bytes=1, direct_tokens=0),
    "swap-waves": plan(wide=False, stages=2, wave_experts=1, lag=2, pulled_rows=3, direct_tokens=0),
}


def make_weights(spec: MoESpec, device: str, seed: int = 0) -> ExpertWeights:
    """FP8 block weights of all experts: e4m3 of Gaussian values, scales that keep the layer's output near 1."""
    g = torch.Generator(device=device).manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        for e in range(shape[0]):
            out[e] = (torch.randn(shape[1:], generator=g, device=device) * 16).to(torch.float8_e4m3fn)
        return out

    def scale(*shape: int, depth: int) -> torch.Tensor:
        return (0.5 + torch.rand(shape, generator=g, device=device)) / (16 * depth**0.5)

    e, h, i = spec.experts, spec.hidden, spec.intermediate
    return ExpertWeights(
        format="fp8_block",
        w13=matrix(e, 2 * i, h),
        w2=matrix(e, h, i),
        w13_scale=scale(e, 2 * i // 128, h // 128, depth=h),
        w2_scale=scale(e, h // 128, i // 128, depth=i),
    )


def slice_of(weights: ExpertWeights, rank: int, ranks: int) -> ExpertWeights:
    """The experts of one rank."""
    n = weights.local_experts // ranks
    part = slice(rank * n, (rank + 1) * n)
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    return ExpertWeights(
        format=weights.format,
        w13=weights.w13[part],
        w2=weights.w2[part],
        w13_scale=weights.w13_scale[part],
        w2_scale=weights.w2_scale[part],
        first_expert=rank * n,
        gate_up=weights.gate_up,
    )


def make_input(spec: MoESpec, tokens: int, device: str, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Activations, distinct random expert ids and weights of `tokens` tokens."""
    g = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, spec.hidden, generator=g, device=device).bfloat16()
    ids = torch.rand(tokens, spec.experts, generator=g, device=device).argsort(dim=1)[:, : spec.topk].int()
    weights = torch.rand(tokens, spec.topk, generator=g, device=device) + 0.1
    return x, ids.contiguous(), weights


def make_engine(
    spec: MoESpec,
    weights: ExpertWeights,
    *,
    ranks: int = 1,
    max_tokens: int = 256,
    plan: Plan | None = None,
    pool_rows: int | None = None,
) -> CudaEngine:
    """A loaded engine with all ranks on the current GPU."""
    placement = Placement(ranks=ranks, local=tuple(range(ranks)))
    engine = CudaEngine(spec, placement, Control(None), max_tokens, deadline=DEADLINE, plan=plan, pool_rows=pool_rows)
    engine.load([slice_of(weights, r, ranks) for r in range(ranks)])
    return engine


def call_engine(
    engine: CudaEngine, inputs: Sequence[tuple[torch.Tensor, ...]], *, bound: int | None = None
) -> list[torch.Tensor]:
    """One call, poisoned outputs, waited for and checked. The kernel stages even numbers of tokens itself."""
    calls = []
    for x, ids, weights in inputs:
        out = torch.full_like(x, float("nan"))
        calls.append(
            Call(
                x=x,
                scales=None,
                expert_ids=ids,
                expert_weights=weights,
                out=out,
                num_tokens=x.shape[0],
                bound=bound or max(1, max(i[0].shape[0] for i in inputs)),
                plain=x.shape[0] % 2 == 0 and all(t.is_contiguous() for t in (x, ids, weights, out)),
            )
        )
    engine.forward(calls)
    engine.check()
    return [c.out for c in calls]


def split(inputs: tuple[torch.Tensor, ...], counts: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """Deal the tokens out to ranks."""
    parts, at = [], 0
    for n in counts:
        parts.append(tuple(t[at : at + n] for t in inputs))
        at += n
    return parts
