"""Loops that torch has no single operation for, fused by ``torch.compile`` where a C++ compiler is installed.

Decoding e4m3 takes five passes over a matrix with torch's operations and one when fused, and rounding activations to
e4m3 a dozen; a matrix-vector product that reads e4m3 or BF16 weights once and sums in float32 does not exist otherwise.
Every caller has a way without them: `Fused.call` returns None where they are not available (no compiler, or one that
fails), and warns once.

torch's own switches (``torch.compiler.set_stance``, ``TORCH_COMPILE_DISABLE``) turn compilation off here as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from megamoe.formats.fp8_block import E4M3_MAX, SMALLEST_AMAX
from megamoe.spec import BLOCK, ScaleFormat
from megamoe.weights import INTERLEAVED_ROWS

__all__ = [
    "LEAST_ELEMENTS",
    "Fused",
    "FusedBySizes",
    "activate",
    "decode_e4m3",
    "matvec_bf16",
    "matvec_e4m3",
    "round_e4m3",
]

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
    return (value.view(torch.int32) | (bits & -(1 << 31))).view(torch.float32)


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


def _round_e4m3(scale_format: ScaleFormat) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        groups = x.float().view(x.shape[0], -1, BLOCK)
        amax = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX)
        # Two tensors: with a Python number torch multiplies by a rounded reciprocal instead.
        limit = torch.full_like(amax, E4M3_MAX)
        s, r = amax / limit, limit / amax
        if scale_format == "ue8m0":
            power = ((s.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
            s = torch.where(s.isnan(), s, power)
            r = torch.ones_like(s) / s
        q = (groups * r).clamp(-E4M3_MAX, E4M3_MAX)
        bits = q.view(torch.int32)
        # Nearest even at the third bit of the mantissa. Below 2^-6 e4m3's step is 2^-9 throughout, which is float32's
        # around 1.5 * 2^14. A NaN may become any value here: its group's scale is NaN, and so every product with it.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).view(torch.float32)
        subnormal = (q + 1.5 * 2.0**14) - 1.5 * 2.0**14
        return (torch.where(q.abs() < 2.0**-6, subnormal, normal) * s).view(x.shape)

    return rounded


def _activate(gate_up: torch.Tensor, weight: torch.Tensor, clamp: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    gate, up = torch.minimum(gate, clamp), torch.clamp(up, -clamp, clamp)
    return (torch.nn.functional.silu(gate) * up * weight.unsqueeze(1)).to(gate_up.dtype)


def _matvec_bf16(weights: torch.Tensor, expert: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (weights[expert].float() * x.float().unsqueeze(1)).sum(-1)


_FAILURES: Final = (RuntimeError, OSError, ImportError)
"""What a missing or broken compiler raises."""


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
        except _FAILURES as error:
            self._failed = True
            warnings.warn(
                f"megamoe's CPU engine goes on with plain torch operations, which are slower for FP8 experts: "
                f"torch.compile failed ({str(error).splitlines()[0]}). Install a C++ compiler to make it faster.",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


Sizes = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
"""Shape, strides and type of each argument."""


@cache
def _switches() -> tuple[Any, Any]:
    """The modules with torch's own switches, imported (a second of work) only where something is compiled."""
    from torch._dynamo import config, eval_frame

    return config, eval_frame


def _compiles_by_default() -> bool:
    """Whether torch's own switches leave compilation on; False where this version does not say."""
    config, eval_frame = _switches()
    stance = getattr(getattr(eval_frame, "_stance", None), "stance", None)
    return stance == "default" and not getattr(config, "disable", True)


class FusedBySizes(Fused):
    """One function without a result, compiled for each combination of sizes that it meets.

    For what is called hundreds of times with the same few: a call does without Dynamo, which looks up its guards anew
    each time (some 50 us on an AMD EPYC), and the loops have constant bounds. More than `MOST_SIZES` combinations, and
    versions of torch that cannot do it, are left to `Fused`.
    """

    MOST_SIZES: Final = 8

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self._by_sizes: dict[Sizes, Callable[..., Any]] = {}
        self._only_any_sizes = False

    def call(self, *arguments: torch.Tensor) -> tuple[Any] | None:
        """`Fused.call`."""
        if self._failed or self._only_any_sizes or not _compiles_by_default():
            return super().call(*arguments)
        sizes = tuple((a.shape, a.stride(), a.dtype) for a in arguments)
        compiled = self._by_sizes.get(sizes)
        if compiled is None:
            compiled = self._compile(arguments) if len(self._by_sizes) < self.MOST_SIZES else None
            if compiled is None:
                return super().call(*arguments)
            self._by_sizes[sizes] = compiled
        try:
            with torch.inference_mode():
                return (compiled(*arguments),)
        except _FAILURES:
            self._only_any_sizes = True
            return super().call(*arguments)

    def _compile(self, arguments: tuple[torch.Tensor, ...]) -> Callable[..., Any] | None:
        """None where it cannot be done this way: `Fused` then tries its own, and says so if that fails too."""
        try:
            import torch._inductor
            from torch.fx.experimental.proxy_tensor import make_fx

            with torch.inference_mode():
                # Traced on empty copies: tracing runs the function, which writes to its arguments.
                traced = make_fx(self._function)(*map(torch.empty_like, arguments))
                compiled: Callable[..., Any] = torch._inductor.compile(
                    traced, list(arguments), options={"compile_threads": 1}
                )
                return compiled
        except Exception:  # whatever another version raises; nothing is lost but speed
            self._only_any_sizes = True
            return None


# The rows that share a scale are part of the function: as a variable they cost the inner loop a division.
decode_e4m3 = {rows: FusedBySizes(_decode_e4m3(rows)) for rows in (BLOCK, INTERLEAVED_ROWS)}
"""By rows that share a scale: ``(int8 [N, K], float32 [N/rows, K/128], float32 out [N, K])``, write scaled weights."""

matvec_e4m3 = {rows: Fused(_matvec_e4m3(rows)) for rows in (BLOCK, INTERLEAVED_ROWS)}
"""By rows that share a scale: ``(int8 [EL, N, K], float32 [EL, N/rows, K/128], int64 [A], float32 [A, K])`` to float32
``[A, N]``, row i of `x` times the matrix of the i-th expert of `A`."""

activate = Fused(_activate)
"""``([m, 2I], float32 [m], float32 [])``: ``silu(gate) * up * weight``, clamped first (infinity: not), computed in
float32 and returned in the type of the first argument."""

matvec_bf16 = Fused(_matvec_bf16)
"""``(BF16 [EL, N, K], int64 [A], BF16 [A, K])`` to float32 ``[A, N]``."""

round_e4m3: dict[ScaleFormat, Fused] = {
    "float32": Fused(_round_e4m3("float32")),
    "ue8m0": Fused(_round_e4m3("ue8m0")),
}
"""By format of the scales: BF16 or float32 ``[M, K]`` quantised by `fp8_block.quantize_activations` and multiplied out,
float32 ``[M, K]``."""
