"""Rows quantised to e4m3 and multiplied out, by torch's operations; `megamoe.cpu.fused` has the same as one loop."""

from __future__ import annotations

import torch

from megamoe.formats.e4m3 import HALF_SCALE, e4m3_to_half_bits
from megamoe.formats.fp8_block import E4M3, E4M3_MAX, scale_and_multiplier
from megamoe.spec import BLOCK, ScaleFormat

__all__ = ["round_e4m3"]


def round_e4m3(x: torch.Tensor, scale_format: ScaleFormat) -> torch.Tensor:
    """``dequantize_activations(*quantize_activations(x, scale_format))`` of `megamoe.formats.fp8_block`, bit for bit.

    A group with a NaN or an infinity becomes NaN through its scale, so that no NaN has to be told apart in e4m3.

    Args:
        x: BF16 or float32 ``[M, K]``, K a multiple of 128.

    Returns:
        Float32 ``[M, K]``.
    """
    groups = x.float().view(len(x), x.shape[1] // BLOCK, BLOCK)
    s, r = scale_and_multiplier(groups.abs().amax(-1, keepdim=True), scale_format)
    q = (groups * r).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    half = e4m3_to_half_bits(q, torch.empty(q.shape, dtype=torch.int16))
    # Decoded like this, NaN has a finite value: what is infinite of the scales must be NaN. The rest is exact, in
    # two steps: a power-of-two scale may be so large that only its product with a small value is finite.
    return half.float().mul_(HALF_SCALE).mul_(s + (s - s)).view(x.shape)
