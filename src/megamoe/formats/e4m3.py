"""Decode e4m3 with vectorised integer operations: torch's own cast handles one element at a time.

The e4m3 byte ``s eeee mmm`` is moved to the float16 bits ``s 0eeee mmm0000000``. float16's exponent bias is 15 and
e4m3's is 7, so this is the value times 2^-8, exactly, subnormals included (the smallest, 2^-9, becomes the float16
subnormal 2^-17). Only NaN (0x7F, 0xFF) does not survive: it would read as +-480 * 2^-8, so callers must know that there
is none.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["HALF_SCALE", "e4m3_to_float64", "e4m3_to_half_bits", "has_nan"]

HALF_SCALE: Final = 2.0**8
"""What the float16 values of `e4m3_to_half_bits` must be multiplied by."""

_KEEP: Final = -0x4080  # 0xBF80 as int16: sign, the low four exponent bits and the high three mantissa bits


def has_nan(values: torch.Tensor) -> bool:
    """Whether e4m3 `values` hold a NaN."""
    if values.numel() == 0:
        return False
    # The two NaN bytes are the largest int8 and the largest uint8.
    return int(values.view(torch.int8).amax()) == 0x7F or int(values.view(torch.uint8).amax()) == 0xFF


def e4m3_to_half_bits(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Float16 values of e4m3 `values` times 2^-8.

    Args:
        values: e4m3, any shape; without NaN.
        out: int16 of the same shape, overwritten.

    Returns:
        `out` viewed as float16.
    """
    out.copy_(values.view(torch.int8))  # sign-extended: the sign stays in the top bit when shifted
    out.bitwise_left_shift_(7)
    out.bitwise_and_(_KEEP)
    return out.view(torch.float16)


def e4m3_to_float64(values: torch.Tensor) -> torch.Tensor:
    """Exact float64 values of e4m3 `values`, NaN included."""
    if has_nan(values):
        return values.float().double()
    half = e4m3_to_half_bits(values, torch.empty(values.shape, dtype=torch.int16, device=values.device))
    return half.double().mul_(HALF_SCALE)
