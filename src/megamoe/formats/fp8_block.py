"""FP8 with block scales: e4m3 values, one scale per 128 columns of an activation row or 128 x 128 weight block.

e4m3 is ``torch.float8_e4m3fn`` (OCP 8-bit Floating Point Specification v1.0: largest value 448, no infinity, NaN 0x7F
and 0xFF). A stored value means ``q * s``.
"""

from __future__ import annotations

from typing import Final

import torch

from megamoe.errors import FormatError, WeightError
from megamoe.formats import ue8m0
from megamoe.spec import BLOCK, ScaleFormat

__all__ = [
    "E4M3",
    "E4M3_MAX",
    "SMALLEST_AMAX",
    "dequantize_activations",
    "dequantize_weights",
    "quantize_activations",
    "quantize_weights",
    "scale_and_multiplier",
    "to_e4m3",
]

E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = 448.0
SMALLEST_AMAX: Final = 1e-10
"""Lower bound of a group's amax (as the float32 nearest to it), so that a group of zeros has a finite multiplier."""

_STRIP_ELEMENTS: Final = 1 << 18
"""Weights quantised at a time (rounded to rows of blocks): enough to be fast, little enough to stay in cache."""


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Convert float32 to e4m3: round to nearest even, saturate at +-448 (infinities too), every NaN becomes 0x7F.

    These are the semantics of ``cvt.rn.satfinite.e4m3x2.f32``; torch's own cast differs in the sign of NaN and, before
    2.10, in overflow.

    Args:
        x: float32, any shape. Not modified.

    Returns:
        ``torch.float8_e4m3fn``, contiguous, the shape of `x`.
    """
    q = x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).contiguous()
    byte = q.view(torch.uint8)
    # After the clamp only a NaN can have the byte 0xFF.
    byte.masked_fill_(byte == 0xFF, 0x7F)
    return q


def _check_scale_format(scale_format: ScaleFormat) -> None:
    if scale_format not in ("float32", "ue8m0"):
        raise FormatError("scale_format", scale_format, "'float32' or 'ue8m0'", "Use 'float32' unless told otherwise.")


def scale_and_multiplier(amax: torch.Tensor, scale_format: ScaleFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 `s` and `r` of groups or blocks with these `amax`, by the formulas of `quantize_activations`."""
    amax = amax.float().clamp(min=SMALLEST_AMAX)
    # Both operands must be tensors of one device: with a Python number torch multiplies by a rounded reciprocal
    # instead (448 / amax everywhere, amax / 448 on CUDA).
    limit = torch.full_like(amax, E4M3_MAX)
    s = amax / limit
    if scale_format == "float32":
        return s, limit / amax
    s = ue8m0.ceil_power_of_two(s)
    return s, torch.ones_like(s) / s


def quantize_activations(x: torch.Tensor, scale_format: ScaleFormat = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to e4m3 with one scale per 128 columns.

    Per group of 128 columns, every operation float32 and IEEE-rounded (no approximate division, no flush to zero)::

        amax = max(max|x|, 1e-10)                       NaN propagates
        float32:  s = amax / 448            r = 448 / amax
        ue8m0:    s = ceil_power_of_two(amax / 448)     r = 1 / s
        q    = e4m3(x * r)                              nearest even, saturating, NaN -> 0x7F

    In ``ue8m0`` the division ``amax / 448`` is rounded to float32 first and the power of two taken from its bits:
    ``(bits + 0x7FFFFF) & 0x7F800000``. No subnormal can occur: ``amax / 448`` lies in ``[2.2e-13, 7.6e35]``, so `s`
    lies in ``[2^-42, 2^120]`` and `r` is exact. When ``amax / 448`` rounds down onto a power of two, ``x * r`` may
    exceed 448 by an ulp; it rounds to 448.

    A NaN anywhere in a group makes its `s` and `r` NaN (which NaN is not specified) and all its 128 bytes 0x7F. Without
    a NaN, an infinity gives ``s = Inf`` and ``r = 0`` in both scale formats: infinite elements become 0x7F (Inf * 0)
    and finite ones a zero with their sign (0x00 or 0x80). A zero keeps its sign.

    Args:
        x: bfloat16 or float32 ``[M, H]``, H a multiple of 128; any strides.
        scale_format: ``"float32"`` or ``"ue8m0"``.

    Returns:
        ``q`` e4m3 ``[M, H]`` and ``s`` float32 ``[M, H / 128]``, both contiguous.

    Raises:
        FormatError: `x` has another dtype or shape, or `scale_format` is unknown.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise FormatError("x", str(x.dtype), "torch.bfloat16 or torch.float32", "Convert it with .bfloat16().")
    if x.dim() != 2 or x.shape[1] == 0 or x.shape[1] % BLOCK:
        raise FormatError(
            "x",
            f"shape {list(x.shape)}",
            f"[M, H] with H a positive multiple of {BLOCK}",
            "Use the bf16 format for other widths.",
        )
    _check_scale_format(scale_format)
    rows, columns = x.shape
    groups = x.reshape(rows, columns // BLOCK, BLOCK)
    s, r = scale_and_multiplier(groups.abs().amax(-1), scale_format)
    q = to_e4m3(groups.float() * r.unsqueeze(-1))
    return q.view(rows, columns), s


def dequantize_activations(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Float32 ``[M, H]`` of e4m3 `q` ``[M, H]`` and float32 scales `s` ``[M, H / 128]``: ``q * s``, one rounding."""
    groups = q.float().reshape(q.shape[0], s.shape[1], BLOCK)
    return (groups * s.unsqueeze(-1)).flatten(1)


def _check_blocks(w: torch.Tensor) -> None:
    if w.dim() < 2 or w.shape[-1] == 0 or w.shape[-2] == 0 or w.shape[-1] % BLOCK or w.shape[-2] % BLOCK:
        raise FormatError(
            "w",
            f"shape {list(w.shape)}",
            f"[..., N, K] with N and K positive multiples of {BLOCK}",
            "Keep such weights in the bf16 format.",
        )


def _blocks(w: torch.Tensor) -> torch.Tensor:
    """View ``[..., N, K]`` as ``[..., N/128, 128, K/128, 128]``."""
    return w.reshape(*w.shape[:-2], w.shape[-2] // BLOCK, BLOCK, w.shape[-1] // BLOCK, BLOCK)


def _per_block(s: torch.Tensor) -> torch.Tensor:
    """View ``[..., N/128, K/128]`` as ``[..., N/128, 1, K/128, 1]``."""
    return s.unsqueeze(-1).unsqueeze(-3)


def quantize_weights(w: torch.Tensor, scale_format: ScaleFormat = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to e4m3 with one scale per 128 x 128 block, by the formulas of `quantize_activations`.

    Goes by rows of blocks: temporaries are a few megabytes, not a multiple of the weights.

    Args:
        w: bfloat16 or float32 ``[..., N, K]``, N and K multiples of 128, all values finite.
        scale_format: ``"float32"``, or ``"ue8m0"`` for power-of-two scales stored in one byte.

    Returns:
        ``q`` e4m3 ``[..., N, K]`` and ``s`` ``[..., N / 128, K / 128]``, float32 or ``torch.float8_e8m0fnu``.

    Raises:
        FormatError: a dtype or shape that the format cannot hold, or an unknown `scale_format`.
        WeightError: a block holds a NaN or an infinity; the message gives the block's index.
    """
    if w.dtype not in (torch.bfloat16, torch.float32):
        raise FormatError("w", str(w.dtype), "torch.bfloat16 or torch.float32", "Convert it with .bfloat16().")
    _check_blocks(w)
    _check_scale_format(scale_format)
    n, k = w.shape[-2:]
    strips = w.reshape(-1, k)
    q = torch.empty(strips.shape, dtype=E4M3, device=w.device)
    s = torch.empty(strips.shape[0] // BLOCK, k // BLOCK, dtype=torch.float32, device=w.device)
    step = max(1, _STRIP_ELEMENTS // (BLOCK * k)) * BLOCK
    for row in range(0, strips.shape[0], step):
        blocks = _blocks(strips[row : row + step].float())
        part, r = scale_and_multiplier(blocks.abs().amax((-3, -1)), scale_format)
        s[row // BLOCK : row // BLOCK + part.shape[0]] = part
        byte = to_e4m3(blocks * _per_block(r)).view(-1, k).view(torch.uint8)
        q[row : row + step].view(torch.uint8).copy_(byte)
    s = s.view(*w.shape[:-2], n // BLOCK, k // BLOCK)
    bad = ~s.isfinite()
    if bool(bad.any()):
        block = [int(i) for i in bad.nonzero()[0]]
        raise WeightError(
            "w", f"NaN or Inf in block {block}", "finite weights", "The weights are damaged; reload them."
        )
    return q.view(w.shape), s if scale_format == "float32" else ue8m0.encode(s)


def dequantize_weights(q: torch.Tensor, s: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dense weights ``q * s``: the float32 product, then rounded to `dtype`.

    Args:
        q: e4m3 ``[..., N, K]``.
        s: float32 or ``torch.float8_e8m0fnu`` ``[..., N / 128, K / 128]``.
        dtype: of the result.

    Returns:
        `dtype` ``[..., N, K]``, contiguous.

    Raises:
        FormatError: N or K is not a multiple of 128.
    """
    scale = ue8m0.decode(s) if s.dtype == ue8m0.E8M0 else s.float()
    _check_blocks(q)
    blocks = _blocks(q.float())
    return (blocks * _per_block(scale)).to(dtype).reshape(q.shape)
