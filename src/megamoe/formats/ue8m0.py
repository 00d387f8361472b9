"""UE8M0: a scale that is a power of two, stored as its exponent in one byte.

Source: OCP Microscaling Formats (MX) v1.0, section 5.4.1 (E8M0): value ``2^(byte - 127)``, byte 255 is NaN; no sign, no
zero, no infinity. torch holds it as ``torch.float8_e8m0fnu``.
"""

from __future__ import annotations

from typing import Final

import torch

from megamoe.errors import FormatError

__all__ = ["E8M0", "ceil_power_of_two", "decode", "encode"]

E8M0: Final = torch.float8_e8m0fnu

_MANTISSA: Final = 0x007FFFFF
_SMALLEST_NORMAL: Final = 0x00800000  # bits of 2^-126
_TWO_TO_MINUS_127: Final = 0x00400000  # the one UE8M0 value that is a float32 subnormal
_INFINITY: Final = 0x7F800000
_QUIET_NAN: Final = 0x7FC00000


def ceil_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Smallest normal float32 power of two that is not below `x`, taken from the bits.

    With ``b`` the bits of `x` as an int32: ``max((b + 0x7FFFFF) & 0x7F800000, 0x00800000)``, and NaN stays NaN. So

    * ``0 <= x <= 2^-126``, subnormals too, gives ``2^-126`` (its inverse is normal as well);
    * a power of two gives itself; ``2^127 < x <= Inf`` gives Inf; NaN gives NaN (which NaN is not specified).

    Args:
        x: float32, any shape, without a sign bit: negative values have no meaning as a scale and no defined result.

    Returns:
        float32, the shape of `x`.
    """
    bits = x.view(torch.int32)
    # (b + mantissa) overflows int32 for NaN only, and torch.where drops that lane.
    up = ((bits + _MANTISSA) & _INFINITY).clamp(min=_SMALLEST_NORMAL)
    return torch.where(x.isnan(), x, up.view(torch.float32))


def encode(scale: torch.Tensor) -> torch.Tensor:
    """Exact UE8M0 bytes of float32 scales; nothing is rounded.

    Args:
        scale: float32, any shape; every value a power of two in ``[2^-127, 2^127]``, or NaN.

    Returns:
        ``torch.float8_e8m0fnu``, the shape of `scale`.

    Raises:
        FormatError: names the first value that UE8M0 cannot hold and its index.
    """
    if scale.dtype != torch.float32:
        raise FormatError("scale", str(scale.dtype), "torch.float32", "Convert it with .float().")
    scale = scale.contiguous()
    bits = scale.view(torch.int32)
    byte = (bits >> 23) & 0xFF
    normal = (bits & _MANTISSA == 0) & (bits >= _SMALLEST_NORMAL) & (bits < _INFINITY)
    nan = scale.isnan()
    bad = ~(normal | (bits == _TWO_TO_MINUS_127) | nan)
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise FormatError(
            f"scale{list(index)}",
            float(scale[index]),
            "a power of two from 2^-127 to 2^127",
            "Round it up with ceil_power_of_two() before quantising, or keep float32 scales.",
        )
    return torch.where(nan, 255, byte).to(torch.uint8).view(E8M0)


def decode(scale: torch.Tensor) -> torch.Tensor:
    """Float32 values of UE8M0 bytes, exact: ``2^(byte - 127)``; byte 0 is the subnormal ``2^-127``; byte 255 is NaN.

    Args:
        scale: ``torch.float8_e8m0fnu`` or its bytes as ``torch.uint8``, any shape.

    Returns:
        float32, the shape of `scale`.

    Raises:
        FormatError: another dtype.
    """
    if scale.dtype not in (E8M0, torch.uint8):
        raise FormatError("scale", str(scale.dtype), f"{E8M0} or torch.uint8", "Float32 scales need no decoding.")
    byte = scale.contiguous().view(torch.uint8).to(torch.int32)
    bits = torch.where(byte == 0, _TWO_TO_MINUS_127, byte << 23)
    return torch.where(byte == 255, _QUIET_NAN, bits).view(torch.float32)
