"""Loops that torch has no single operation for, fused by ``torch.compile`` where a C++ compiler is installed.

Decoding e4m3 takes five passes over a matrix with torch's operations and one when fused; a matrix-vector product that
reads e4m3 or BF16 weights once and sums in float32 does not exist otherwise. Every caller has a way without them:
`Fused.call` returns None where they are not available (no compiler, or one that fails), and warns once.

torch's own switches (``torch.compiler.set_stance``, ``TORCH_COMPILE_DISABLE``) turn compilation off here as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from megamoe.spec import BLOCK
from megamoe.weights import INTERLEAVED_ROWS

__all__ = ["LEAST_ELEMENTS", "Fused", "decode_e4m3", "matvec_bf16", "matvec_e4m3"]

LEAST_ELEMENTS: Final = 1 << 20
"""Elements of a matrix from which compiling (seconds, once a process; less with torch's cache on disk) pays."""


def _e4m3(byte: torch.Tensor) -> torch.Tensor:
    """Float32 values of int8 e4m3 bytes; exact, with NaN, and without a subnormal float32 on the way.

    A normal ``eeee mmm`` becomes the float32 bits with the exponent moved by 127 - 7 = 120; a subnormal is
    ``mmm * 2^-9``.
    """
    bits = byte.to(torch.int32)
    magnitude = bits & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).view(torch.float32)
    value = torch.where(magnitude < 8, magnitude.float() * 2.0**-9, normal)
    value = torch.where(magnitude == 0x7F, torch.nan, value)
    return torch.where(bits < 0, -value, value)


def _decode_e4m3(rows: int) -> Callable[..., None]:
    def decode(byte: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        groups, columns = scale.shape
        blocks = _e4m3(byte).view(groups, rows, columns, BLOCK)
        out.copy_((blocks * scale.view(groups, 1, columns, 1)).view(out.shape))

    return decode


def _matvec_e4m3(rows: int) -> Callable[..., torch.Tensor]:
    def matvec(byte: torch.Tensor, scale: torch.Tensor, expert: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        groups, columns = scale.shape[1:]
        count = expert.shape[0]
        blocks = _e4m3(byte.view(-1, groups, rows, columns, BLOCK)[expert])
        weights = blocks * scale[expert].view(count, groups, 1, columns, 1)
        return (weights * x.view(count, 1, 1, columns, BLOCK)).sum((-1, -2)).view(count, groups * rows)

    return matvec


def _matvec_bf16(weights: torch.Tensor, expert: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (weights[expert].float() * x.float().unsqueeze(1)).sum(-1)


class Fused:
    """One function, compiled at its first call; any sizes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._failed = False

    def call(self, *arguments: torch.Tensor) -> tuple[Any] | None:
        """The function's result in a tuple, or None where it cannot be compiled."""
        if self._failed:
            return None
        if self._compiled is None:
            # One compile thread: a pool of processes for three small loops would outlive the call.
            self._compiled = torch.compile(self._function, fullgraph=True, dynamic=True, options={"compile_threads": 1})
        try:
            # One mode whatever the caller's is: each would be compiled anew.
            with torch.inference_mode():
                return (self._compiled(*arguments),)
        except (RuntimeError, OSError, ImportError) as error:
            self._failed = True
            warnings.warn(
                f"megamoe's CPU engine goes on with plain torch operations, which are slower for FP8 experts: "
                f"torch.compile failed ({str(error).splitlines()[0]}). Install a C++ compiler to make it faster.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


# The rows that share a scale are part of the function: as a variable they cost the inner loop a division.
decode_e4m3 = {rows: Fused(_decode_e4m3(rows)) for rows in (BLOCK, INTERLEAVED_ROWS)}
"""By rows that share a scale: ``(int8 [N, K], float32 [N/rows, K/128], float32 out [N, K])``, write scaled weights."""

matvec_e4m3 = {rows: Fused(_matvec_e4m3(rows)) for rows in (BLOCK, INTERLEAVED_ROWS)}
"""By rows that share a scale: ``(int8 [EL, N, K], float32 [EL, N/rows, K/128], int64 [A], float32 [A, K])`` to float32
``[A, N]``, row i of `x` times the matrix of the i-th expert of `A`."""

matvec_bf16 = Fused(_matvec_bf16)
"""``(BF16 [EL, N, K], int64 [A], BF16 [A, K])`` to float32 ``[A, N]``."""
