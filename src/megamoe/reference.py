"""The oracle: the numerical contract in plain torch, and the judge of every engine.

It favours exactness over speed, but works on one expert at a time with whole matrices, so that a layer of hidden 4096,
intermediate 2048 and 64 experts takes seconds for a few hundred tokens on two cores.

What it fixes where the contract leaves room:

* the sum over one k-block of 128 is exact (e4m3 products have at most 8 significant bits, so float64 holds the sum)
  and is then rounded once to float32; a tensor core comes within about 2e-4 of it, relative Frobenius;
* ``acc = fma(partial, s_a * s_b, acc)`` is a true fused multiply-add: one rounding, never two;
* MXFP4 weights enter with their own scales per 32: the k-block's sum is over ``q_a * w``, and ``s_b`` is 1. Wherever
  the conversion to e4m3 with power-of-two block scales is exact, this gives the same bits as the converted weights;
* ``silu(g) = g / (1 + exp(-g))`` is evaluated in float64 and rounded to float32 once;
* BF16 products are summed in float64 over the whole depth and rounded to float32 once;
* a token's sum over its slots starts from +0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from megamoe.errors import InputError, WeightError
from megamoe.formats import fp8_block, mxfp4, ue8m0
from megamoe.formats.e4m3 import e4m3_to_float64
from megamoe.spec import BLOCK, MoESpec
from megamoe.weights import ExpertWeights, stacked_rows

__all__ = [
    "LIMIT",
    "Projection",
    "Stages",
    "combine",
    "expert_projections",
    "fma",
    "forward",
    "project",
    "relative_error",
    "requantize",
    "swiglu",
]

LIMIT: Final = 8e-3
"""Largest relative Frobenius error of an engine against the oracle, end to end (docs/numerics.md, section 10)."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Every value of one call. Routes are addressed ``[token, slot]``; a skipped route (id -1) holds zeros.

    Attributes:
        q: the input as the first product reads it: e4m3 ``[M, H]``, or BF16 for BF16 experts.
        s: its scales, float32 ``[M, H / 128]``; None for BF16 experts.
        gate, up: float32 ``[M, k, I]``, before clamp and activation.
        h: float32 ``[M, k, I]``: ``silu(gate) * up * route_weight``, before it is rounded.
        hq: `h` as the second product reads it: e4m3 ``[M, k, I]``, or BF16 for BF16 experts.
        hs: its scales, float32 ``[M, k, I / 128]``; None for BF16 experts.
        down: BF16 ``[M, k, H]``, the down projection of each route.
        y: BF16 ``[M, H]``, the result.
    """

    q: torch.Tensor
    s: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor
    h: torch.Tensor
    hq: torch.Tensor
    hs: torch.Tensor | None
    down: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Projection:
    """One weight matrix ``[N, K]`` of one expert, as stored.

    `values` is e4m3 with float32 `scale` ``[N / 128, K / 128]``, or BF16, or (MXFP4, already scaled) float32; the last
    two have no `scale`. BF16 is the one format whose product is not promoted k-block by k-block.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def blocked(self) -> bool:
        return self.values.dtype != torch.bfloat16

    def exact(self, columns: slice) -> torch.Tensor:
        """Float64 values of some columns; exact."""
        part = self.values[:, columns]
        return e4m3_to_float64(part) if part.dtype == fp8_block.E4M3 else part.double()


def expert_projections(weights: ExpertWeights, index: int) -> tuple[Projection, Projection]:
    """`w13` (gate rows, then up rows) and `w2` of the `index`-th expert held in `weights`."""

    def one(values: torch.Tensor, scale: torch.Tensor | None) -> Projection:
        if scale is None:
            return Projection(values[index])
        if weights.format == "mxfp4":
            # A 3-bit value times a power of two: exact in float32 unless it leaves float32's range.
            return Projection(mxfp4.dequantize(values[index], scale[index]))
        scale = scale[index]
        return Projection(values[index], ue8m0.decode(scale) if scale.dtype == ue8m0.E8M0 else scale)

    w13, w2 = one(weights.w13, weights.w13_scale), one(weights.w2, weights.w2_scale)
    if weights.gate_up != "stacked":
        w13 = Projection(stacked_rows(w13.values, weights.gate_up).reshape(w13.values.shape), w13.scale)
    return w13, w2


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32 tensors (broadcast together), rounded once to float32, as ``fmaf`` does.

    The product of two float32 is exact in float64 and the sum is rounded to 53 bits there. Rounding that again to 24
    bits differs from a single rounding only when the 53-bit value lies exactly half-way between two float32; those
    elements (and results below the smallest normal float32) are summed again with rounding to odd, after which the
    second rounding is correct (S. Boldo, G. Melquiond, "When double rounding is odd", 2005).
    """
    product = a.double() * b.double()
    c = c.double().expand((product + c).shape)
    total = product + c
    result = total.float()
    doubtful = (total.view(torch.int64) & 0x1FFFFFFF) == 0x10000000
    if bool((result.abs() < 2.0**-126).any()):
        doubtful |= (total.abs() < 2.0**-125) & (total != 0)
    if bool(doubtful.any()):
        p, q, t = product.expand_as(total)[doubtful], c[doubtful], total[doubtful]
        # Knuth's two-sum: p + q == t + error, exactly.
        back = t - p
        error = (p - (t - back)) + (q - back)
        inexact = error.isfinite() & (error != 0)
        even = (t.view(torch.int64) & 1) == 0
        toward = torch.nextafter(t, torch.copysign(torch.full_like(t, torch.inf), error))
        result[doubtful] = torch.where(inexact & even, toward, t).float()
    return result


def project(projection: Projection, x: torch.Tensor, s: torch.Tensor | None) -> torch.Tensor:
    """One projection of `m` rows, before any activation or rounding to BF16.

    Args:
        projection: the weights, ``[N, K]``.
        x: e4m3 ``[m, K]``, or BF16 for BF16 experts.
        s: float32 ``[m, K / 128]``; None for BF16 experts.

    Returns:
        float32 ``[m, N]``.
    """
    rows = x.float().double()
    n, depth = projection.values.shape
    if not projection.blocked:
        return (rows @ projection.exact(slice(0, depth)).T).float()
    assert s is not None
    acc = torch.zeros(x.shape[0], n, dtype=torch.float32, device=x.device)
    for block in range(depth // BLOCK):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = (rows[:, columns] @ projection.exact(columns).T).float()
        scale = s[:, block, None]
        if projection.scale is not None:
            scale = scale * projection.scale[:, block].repeat_interleave(BLOCK)
        acc = fma(partial, scale, acc)
    return acc


def swiglu(gate: torch.Tensor, up: torch.Tensor, route_weight: torch.Tensor, clamp: float | None) -> torch.Tensor:
    """``silu(gate) * up * route_weight`` in float32, left to right, each product rounded.

    With a clamp `c`, first ``gate = min(gate, c)`` and ``up = min(max(up, -c), c)``; both propagate NaN.

    Args:
        gate, up: float32 ``[..., I]``.
        route_weight: float32 ``[...]``.
        clamp: c, or None.
    """
    if clamp is not None:
        gate = gate.clamp(max=clamp)
        up = up.clamp(-clamp, clamp)
    wide = gate.double()
    silu = (wide / (1 + torch.exp(-wide))).float()
    return silu * up * route_weight.unsqueeze(-1)


def requantize(h: torch.Tensor, *, quantized_experts: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the second product reads of float32 `h` ``[m, I]``: ``(q, scales)``, or ``(BF16, None)`` for BF16 experts.

    The intermediate always has exact float32 scales, whatever the input's scales are.
    """
    return fp8_block.quantize_activations(h, "float32") if quantized_experts else (h.bfloat16(), None)


def combine(down: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    """Sum a token's routes in float32, in slot order, and round to BF16.

    Args:
        down: BF16 ``[M, k, H]``; the values of skipped routes are not used.
        expert_ids: ``[M, k]``; -1 marks a skipped route.

    Returns:
        BF16 ``[M, H]``.
    """
    acc = torch.zeros(down.shape[0], down.shape[2], dtype=torch.float32, device=down.device)
    for slot in range(down.shape[1]):
        acc = torch.where((expert_ids[:, slot] >= 0).unsqueeze(-1), acc + down[:, slot].float(), acc)
    return acc.bfloat16()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative Frobenius error ``|value - reference| / |reference|``.

    0 for equal tensors, also when both are zero; infinite when only `reference` is zero; NaN when either holds a NaN.
    """
    value, reference = value.double(), reference.double()
    difference, size = float((value - reference).norm()), float(reference.norm())
    if difference == 0:
        return 0.0
    return difference / size if size else difference * math.inf


def _prepare_input(
    spec: MoESpec, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *, quantized_experts: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(x, torch.Tensor):
        return fp8_block.quantize_activations(x, spec.input_scales) if quantized_experts else (x, None)
    if not quantized_experts:
        raise InputError("x", "(q, scales)", "a BF16 tensor for bf16 experts", "Pass the activations as BF16.")
    return x


def forward(
    spec: MoESpec,
    weights: ExpertWeights | Sequence[ExpertWeights],
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    return_intermediates: bool = False,
) -> torch.Tensor | Stages:
    """The layer's result for `M` tokens, exactly as the contract states it. Ranks do not exist here.

    Args:
        spec: the layer.
        weights: the experts, in one piece or one piece per rank, all of one format.
        x: BF16 ``[M, H]``, or ``(q, scales)``: e4m3 ``[M, H]`` and float32 ``[M, H / 128]``.
        expert_ids: int32 or int64 ``[M, k]``; -1 skips the route.
        expert_weights: float32 ``[M, k]``; not read where the id is -1.
        return_intermediates: return every stage, not only the result.

    Returns:
        BF16 ``[M, H]``, or `Stages`.

    Raises:
        InputError: an expert id that is out of range or whose weights are not held; quantised input for BF16 experts.
        WeightError: no weights, or pieces of different formats.
    """
    pieces = [weights] if isinstance(weights, ExpertWeights) else list(weights)
    if len({piece.format for piece in pieces}) != 1:
        formats = [piece.format for piece in pieces]
        raise WeightError("weights", formats, "one or more pieces of one format", "Load every rank from one format.")
    quantized = pieces[0].format != "bf16"
    q, s = _prepare_input(spec, x, quantized_experts=quantized)
    tokens, slots = expert_ids.shape
    hidden, intermediate = spec.hidden, spec.intermediate
    device = q.device

    gate = torch.zeros(tokens, slots, intermediate, device=device)
    up, h = torch.zeros_like(gate), torch.zeros_like(gate)
    hq = torch.zeros(gate.shape, dtype=fp8_block.E4M3 if quantized else torch.bfloat16, device=device)
    hs = torch.zeros(tokens, slots, intermediate // BLOCK, device=device) if quantized else None
    down = torch.zeros(tokens, slots, hidden, dtype=torch.bfloat16, device=device)

    for expert in sorted(set(expert_ids.flatten().tolist())):
        if expert == -1:
            continue
        piece = next((p for p in pieces if 0 <= expert - p.first_expert < p.local_experts), None)
        if piece is None or not 0 <= expert < spec.experts:
            raise InputError(
                "expert_ids", expert, f"-1 or an expert that is held, below {spec.experts}", "Pass all pieces."
            )
        token, slot = (expert_ids == expert).nonzero(as_tuple=True)
        w13, w2 = expert_projections(piece, expert - piece.first_expert)
        rows = q.view(torch.uint8)[token].view(q.dtype) if quantized else q[token]
        both = project(w13, rows, None if s is None else s[token])
        e_gate, e_up = both[:, :intermediate], both[:, intermediate:]
        e_h = swiglu(e_gate, e_up, expert_weights[token, slot], spec.clamp)
        e_hq, e_hs = requantize(e_h, quantized_experts=quantized)
        down[token, slot] = project(w2, e_hq, e_hs).bfloat16()
        if return_intermediates:
            gate[token, slot], up[token, slot], h[token, slot] = e_gate, e_up, e_h
            if hs is not None and e_hs is not None:
                hq.view(torch.uint8)[token, slot] = e_hq.view(torch.uint8)
                hs[token, slot] = e_hs
            else:
                hq[token, slot] = e_hq

    y = combine(down, expert_ids)
    if not return_intermediates:
        return y
    return Stages(q=q, s=s, gate=gate, up=up, h=h, hq=hq, hs=hs, down=down, y=y)
