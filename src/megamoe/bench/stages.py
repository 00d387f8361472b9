"""Errors of the fused kernel stage by stage, from what a call left in its ranks' memory.

The plan must keep the intermediate (`Plan.keep_intermediate`, `Sizes.keep_intermediate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megamoe import reference
from megamoe.cuda.fused import Buffers
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["FIRST_GEMM", "SECOND_GEMM", "Staged", "stage_errors"]

FIRST_GEMM = 5e-4
"""Bound of the first GEMM and SwiGLU before requantisation, relative Frobenius."""

SECOND_GEMM = 2.5e-3
"""Bound of the second GEMM from the kernel's own intermediate: BF16 rounding."""


class Staged(Protocol):
    """One rank's quantised input of the call."""

    @property
    def q(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def ids(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor: ...


def stage_errors(
    spec: MoESpec, full: ExpertWeights, buffers: Sequence[Buffers], inputs: Sequence[Staged]
) -> tuple[float, float]:
    """Relative errors of both GEMMs over all routes of a call of a plan that keeps the intermediate."""
    results = [b.view("y").view(-1, spec.hidden) for b in buffers]
    got: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    want: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for owner, own in enumerate(buffers):
        rows = own.sizes.pool_rows
        routes = own.view("routes").view(-1, 4)
        h = own.view("h_float").view(rows, spec.intermediate)
        hq = own.view("h_pool").view(rows, spec.intermediate).view(torch.float8_e4m3fn)
        hs = own.view("h_pool_scales").view(-1, rows).T
        base = 0
        for e in range(own.sizes.local_experts):
            expert = owner * own.sizes.local_experts + e
            count = sum(int((given.ids == expert).sum()) for given in inputs)
            part = slice(base, base + count)
            base += -(-count // 8) * 8
            if count == 0:
                continue
            at = [(s & 0x7FFFFFFF, r) for s, r in zip(routes[part, 0].tolist(), routes[part, 1].tolist(), strict=True)]
            q = torch.stack([inputs[s].q.view(torch.uint8)[r // spec.topk] for s, r in at]).view(torch.float8_e4m3fn)
            scales = torch.stack([inputs[s].scales[r // spec.topk] for s, r in at])
            weight = torch.stack([inputs[s].weights.flatten()[r] for s, r in at])
            w13, w2 = reference.expert_projections(full, expert)
            both = reference.project(w13, q, scales)
            gate, up = both[:, : spec.intermediate], both[:, spec.intermediate :]
            want[0].append(reference.swiglu(gate, up, weight, spec.clamp))
            got[0].append(h[part])
            want[1].append(reference.project(w2, hq[part], hs[part].contiguous()))
            got[1].append(torch.stack([results[s][r] for s, r in at]))
    first, second = (reference.relative_error(torch.cat(g), torch.cat(w)) for g, w in zip(got, want, strict=True))
    return first, second
