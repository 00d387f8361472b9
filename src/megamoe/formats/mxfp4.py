"""MXFP4: E2M1 values, two in a byte, with one UE8M0 scale for each 32 along the depth.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.2 (MXFP4), 5.3.3 (E2M1) and 6.3 (conversion). The element with
the even depth index is the low nibble of its byte. An element means ``E2M1[nibble] * 2^(scale byte - 127)``.

The exact way to FP8 block weights is `to_fp8_block`: E2M1 has one mantissa bit and e4m3 three, so only exponents can
fail to fit; whether they do is checked for every element and nothing is ever rounded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from megamoe.errors import FormatError, WeightError
from megamoe.formats import ue8m0
from megamoe.formats.fp8_block import E4M3
from megamoe.spec import BLOCK, MXFP4_GROUP, ScaleFormat

__all__ = ["E2M1_VALUES", "dequantize", "inexact_groups", "pack", "quantize", "to_fp8_block", "unpack"]

E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each of the 16 codes: sign, two exponent bits (bias 1), one mantissa bit."""

_E2M1_MAX_EXPONENT: Final = 2  # 6.0 = 1.5 * 2^2
_E8M0_BIAS: Final = 127

# Exponent of a nonzero code, as the e4m3 conversion needs it: value = m * 2^exponent, m in {1, 1.5}.
_CODE_EXPONENT: Final = (0, -1, 0, 0, 1, 1, 2, 2)
_E4M3_MAX_EXPONENT: Final = 8  # 448 = 1.75 * 2^8, so 1 * 2^8 and 1.5 * 2^8 fit, 2^9 does not

_SMALLEST_SCALE_EXPONENT: Final = -126  # keeps block scales normal in float32

# Shift (group exponent - block exponent) covered by the byte table. No nonzero code is exact at either end or beyond
# (4 * 2^-12 is half of e4m3's smallest bit, 0.5 * 2^10 is above 448), so clamping to the ends is safe.
_SHIFTS: Final = range(-12, 11)
_GROUPS: Final = BLOCK // MXFP4_GROUP


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0 to 15 of packed bytes: uint8 ``[..., K / 2]`` to uint8 ``[..., K]``, low nibble first.

    Args:
        packed: uint8, int8 or ``torch.float4_e2m1fn_x2``, two codes in an element.

    Raises:
        FormatError: another dtype.
    """
    byte = _bytes_of(packed)
    return torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(-2)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Packed bytes of E2M1 codes: uint8 ``[..., K]`` (values 0 to 15) to uint8 ``[..., K / 2]``.

    Raises:
        FormatError: another dtype, or an odd last dimension.
    """
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] % 2:
        raise FormatError(
            "codes", f"{codes.dtype} {list(codes.shape)}", "torch.uint8 [..., K] with even K", "Pad the depth."
        )
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dense values ``E2M1 * 2^e``.

    Exact in float32 unless a value passes float32's range (only scales above 2^125 can); a NaN scale gives NaN.

    Args:
        packed: as in `unpack`, ``[..., K / 2]``.
        scale: UE8M0 as ``torch.float8_e8m0fnu`` or uint8 ``[..., K / 32]``.
        dtype: of the result; bfloat16 is as exact as float32.

    Returns:
        `dtype` ``[..., K]``.

    Raises:
        FormatError: wrong dtypes, or shapes that do not belong together.
    """
    _check_pair(packed, scale)
    values = _value_table(packed.device)[_bytes_of(packed).int()]  # [..., K/2, 2]
    grouped = values.reshape(*scale.shape, MXFP4_GROUP) * ue8m0.decode(scale).unsqueeze(-1)
    return grouped.flatten(-2).to(dtype)


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP4 as OCP MX v1.0, section 6.3, says.

    Per 32 along the last dimension: ``e = floor(log2(max|w|)) - 2`` held in [-127, 127] (0 for a group of zeros),
    element ``w / 2^e`` rounded to nearest even and saturated at 6.

    Args:
        w: bfloat16 or float32 ``[..., K]``, K a multiple of 32, all values finite.

    Returns:
        packed uint8 ``[..., K / 2]`` and ``torch.float8_e8m0fnu`` ``[..., K / 32]``.

    Raises:
        FormatError: another dtype or a depth that is no multiple of 32.
        WeightError: NaN or Inf; the message gives the group's index.
    """
    if w.dtype not in (torch.bfloat16, torch.float32):
        raise FormatError("w", str(w.dtype), "torch.bfloat16 or torch.float32", "Convert it with .bfloat16().")
    if w.dim() == 0 or w.shape[-1] == 0 or w.shape[-1] % MXFP4_GROUP:
        raise FormatError(
            "w", f"shape {list(w.shape)}", f"[..., K], K a multiple of {MXFP4_GROUP}", "Use the bf16 format."
        )
    groups = w.float().reshape(*w.shape[:-1], w.shape[-1] // MXFP4_GROUP, MXFP4_GROUP)
    amax = groups.abs().amax(-1)
    if not bool(amax.isfinite().all()):
        where = [int(i) for i in (~amax.isfinite()).nonzero()[0]]
        raise WeightError(
            "w", f"NaN or Inf in group {where}", "finite weights", "The weights are damaged; reload them."
        )
    exponent = torch.frexp(amax).exponent.to(torch.int32) - 1 - _E2M1_MAX_EXPONENT
    exponent = torch.where(amax > 0, exponent.clamp(-_E8M0_BIAS, _E8M0_BIAS), 0)
    y = torch.ldexp(groups, -exponent.unsqueeze(-1)).abs()
    # Ties go to the even code: up at 0.75, 1.75 and 3.5, down at 0.25, 1.25, 2.5 and 5.
    code = (y > 0.25).to(torch.uint8)
    for threshold, up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (y >= threshold) if up else (y > threshold)
    code |= torch.signbit(groups).to(torch.uint8) << 3
    byte = (exponent + _E8M0_BIAS).to(torch.uint8)
    return pack(code.flatten(-2)), byte.view(ue8m0.E8M0)


def inexact_groups(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Where the conversion to e4m3 with power-of-two 128 x 128 block scales is not exact.

    Args:
        packed: as in `unpack`, ``[..., N, K / 2]``, N and K multiples of 128.
        scale: UE8M0, ``[..., N, K / 32]``.

    Returns:
        int64 ``[count, dims]``: one index into `scale` per group of 32 with an element that e4m3 cannot hold (for
        experts ``[EL, N, K/2]`` the columns are expert, row, group). Empty when `to_fp8_block` succeeds.

    Raises:
        FormatError: as in `to_fp8_block`, other than inexactness.
        WeightError: a NaN scale.
    """
    return _convert(packed, scale)[2].nonzero()


def to_fp8_block(
    packed: torch.Tensor, scale: torch.Tensor, scale_format: ScaleFormat = "float32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact conversion to e4m3 with one power-of-two scale per 128 x 128 block.

    A block's scale is the smallest that keeps its largest magnitude within 448 (so that the small values have the most
    room), and at least 2^-126; a block of zeros gets 1. Exact means equal in value, element by element, with the sign
    of zeros: the largest and the smallest set bit of a block may lie up to 17 binary places apart.

    Temporaries are about 20 times a block row's packed bytes (``128 * K``), not of the whole tensor.

    Args:
        packed: as in `unpack`, ``[..., N, K / 2]``, N and K multiples of 128.
        scale: UE8M0 as ``torch.float8_e8m0fnu`` or uint8 ``[..., N, K / 32]``.
        scale_format: how the block scales are returned.

    Returns:
        e4m3 ``[..., N, K]`` and scales ``[..., N / 128, K / 128]``, float32 or ``torch.float8_e8m0fnu``.

    Raises:
        FormatError: wrong dtypes or shapes, or an element that no common block scale can hold exactly: the message
            gives the first group's index and how many there are (`inexact_groups` lists them).
        WeightError: a NaN scale.
    """
    if scale_format not in ("float32", "ue8m0"):
        raise FormatError("scale_format", scale_format, "'float32' or 'ue8m0'", "Both mean the same powers of two.")
    q, exponent, inexact = _convert(packed, scale)
    if bool(inexact.any()):
        first = [int(i) for i in inexact.nonzero()[0]]
        names = "expert, row, group" if len(first) == 3 else "row, group" if len(first) == 2 else "index"
        raise FormatError(
            "scale",
            f"exponents in one 128x128 block too far apart for e4m3 in {int(inexact.sum())} groups of "
            f"{MXFP4_GROUP}, first at [{names}] = {first}",
            "blocks whose set bits span at most 17 binary places",
            "Keep these weights as mxfp4, or accept rounding: dequantise to bf16 and quantise that to fp8_block.",
        )
    s = (exponent + _E8M0_BIAS).to(torch.uint8).view(ue8m0.E8M0)
    return q, s if scale_format == "ue8m0" else ue8m0.decode(s)


def _convert(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E4m3 values, block exponents (int32 ``[..., N/128, K/128]``), and the inexact groups (bool, as `scale`)."""
    _check_pair(packed, scale)
    n, k = packed.shape[-2] if packed.dim() > 1 else 0, 2 * packed.shape[-1]
    if n == 0 or n % BLOCK or k % BLOCK:
        raise FormatError(
            "packed",
            f"[..., N, K] = {[*packed.shape[:-1], k]}",
            f"N and K positive multiples of {BLOCK}",
            "Keep these weights as mxfp4 or bf16.",
        )
    strips = _bytes_of(packed).reshape(-1, BLOCK, k // 2)
    exponents = scale.contiguous().view(torch.uint8).reshape(-1, BLOCK, k // MXFP4_GROUP)
    q = torch.empty(strips.shape[0], BLOCK, k, dtype=torch.uint8, device=packed.device)
    block = torch.empty(strips.shape[0], k // BLOCK, dtype=torch.int32, device=packed.device)
    inexact = torch.empty(exponents.shape, dtype=torch.bool, device=packed.device)
    for i in range(strips.shape[0]):
        q[i], block[i], inexact[i] = _convert_strip(strips[i], exponents[i])
    nan = exponents == 0xFF
    if bool(nan.any()):
        where = [int(i) for i in nan.reshape(scale.shape).nonzero()[0]]
        raise WeightError("scale", f"NaN at {where}", "finite scales", "The checkpoint is damaged.")
    return (
        q.reshape(*packed.shape[:-1], k).view(E4M3),
        block.reshape(*packed.shape[:-2], n // BLOCK, k // BLOCK),
        inexact.reshape(scale.shape),
    )


def _convert_strip(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row of blocks: ``[128, K/2]`` and ``[128, K/32]`` bytes."""
    byte_table, exact_table, exponent_table = _conversion_tables(packed.device)
    codes = unpack(packed).int().reshape(BLOCK, -1, MXFP4_GROUP)  # [128, K/32, 32]
    exponent = scale.int() - _E8M0_BIAS
    largest = exponent + exponent_table[codes].amax(-1)  # very negative for a group of zeros
    per_block = largest.reshape(BLOCK, -1, _GROUPS).amax((0, 2))  # [K/128]
    zero = per_block < -2 * _E8M0_BIAS
    block = torch.where(zero, 0, (per_block - _E4M3_MAX_EXPONENT).clamp(min=_SMALLEST_SCALE_EXPONENT))
    shift = exponent - block.repeat_interleave(_GROUPS)
    row = shift.clamp(_SHIFTS.start, _SHIFTS.stop - 1) - _SHIFTS.start
    index = row.unsqueeze(-1) * 16 + codes
    return byte_table[index].reshape(BLOCK, -1), block, ~exact_table[index].all(-1)


@lru_cache(maxsize=8)
def _value_table(device: torch.device) -> torch.Tensor:
    """Float32 ``[256, 2]``: the two values of each packed byte."""
    values = torch.tensor(E2M1_VALUES)
    return values[unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(-1)).int()].to(device)


@lru_cache(maxsize=8)
def _conversion_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each (shift, code): the e4m3 byte and whether it is exact; for each code its exponent (zeros: far below)."""
    values = torch.tensor(E2M1_VALUES)
    shift = torch.exp2(torch.tensor(list(_SHIFTS), dtype=torch.float32)).unsqueeze(-1)
    wanted = values * shift
    # In range, the cast rounds only what lies below e4m3's smallest bit; the comparison finds it.
    q = wanted.clamp(-448.0, 448.0).to(E4M3)
    exact = q.float() == wanted
    exponent = torch.tensor([-10_000 if c % 8 == 0 else _CODE_EXPONENT[c % 8] for c in range(16)], dtype=torch.int32)
    return q.view(torch.uint8).flatten().to(device), exact.flatten().to(device), exponent.to(device)


def _bytes_of(packed: torch.Tensor) -> torch.Tensor:
    allowed = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
    if packed.dtype not in allowed or packed.dim() == 0:
        raise FormatError(
            "packed",
            f"{packed.dtype} {list(packed.shape)}",
            " or ".join(str(d) for d in allowed),
            "Pack codes with megamoe.formats.mxfp4.pack().",
        )
    return packed.contiguous().view(torch.uint8)


def _check_pair(packed: torch.Tensor, scale: torch.Tensor) -> None:
    if scale.dtype not in (ue8m0.E8M0, torch.uint8):
        raise FormatError("scale", str(scale.dtype), f"{ue8m0.E8M0} or torch.uint8", "Encode with ue8m0.encode().")
    half = MXFP4_GROUP // 2
    want = (*packed.shape[:-1], packed.shape[-1] // half) if packed.dim() else ()
    if not want or packed.shape[-1] % half or tuple(scale.shape) != want:
        raise FormatError(
            "scale",
            f"shape {list(scale.shape)} beside packed {list(packed.shape)}",
            f"one scale for each {half} packed bytes of the depth: {list(want)}",
            "Check that weight and scale belong to the same tensor.",
        )
