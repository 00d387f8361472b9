"""The helpers of ``deep_gemm.utils`` that callers of MegaMoE use: quantisation and rounding up."""

from __future__ import annotations

import torch

from megamoe.errors import EngineError
from megamoe.formats import fp8_block
from megamoe.spec import BLOCK

__all__ = ["align", "ceil_div", "per_block_cast_to_fp8", "per_token_cast_to_fp8"]


def ceil_div(x: int, y: int) -> int:
    """``x / y`` rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """`x` rounded up to a multiple of `y`."""
    return ceil_div(x, y) * y


def _check(gran_k: int, packed: bool) -> None:
    if gran_k != BLOCK or packed:
        raise EngineError(
            "gran_k, use_packed_ue8m0",
            (gran_k, packed),
            f"({BLOCK}, False)",
            "Scales are unpacked, one for each 128 columns.",
        )


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to e4m3 with one float32 scale for each 128 columns, rounded as docs/numerics.md says.

    DeepGEMM takes ``amax >= 1e-4`` where this takes 1e-10; other scales are equal to the last bit or the one before.

    Args:
        x: BF16 or float32 ``[M, H]``.
        use_ue8m0: scales that are powers of two.

    Returns:
        e4m3 ``[M, H]`` and float32 ``[M, H / 128]``.

    Raises:
        EngineError: another granularity, or packed scales.
        FormatError: `x` has another dtype or shape.
    """
    _check(gran_k, use_packed_ue8m0)
    return fp8_block.quantize_activations(x, "ue8m0" if use_ue8m0 else "float32")


def per_block_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights to e4m3 with one float32 scale for each 128 x 128 block.

    Args:
        x: BF16 or float32 ``[N, K]``, multiples of 128.
        use_ue8m0: scales that are powers of two, as float32.

    Returns:
        e4m3 ``[N, K]`` and float32 ``[N / 128, K / 128]``.

    Raises:
        EngineError: another granularity.
        FormatError, WeightError: sizes that have no blocks; NaN or Inf.
    """
    _check(gran_k, False)
    q, s = fp8_block.quantize_weights(x, "ue8m0" if use_ue8m0 else "float32")
    return q, s.float()
