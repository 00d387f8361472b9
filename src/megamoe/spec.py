"""What a routed-expert layer is: sizes, activation, input quantisation. Nothing else.

`MoESpec` checks every limit that does not depend on a weight format or on the number of ranks; the two checks that
do, `local_experts` and `check_format`, live here as well, so that each limit is written down in one place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from megamoe.errors import FormatError, SpecError

__all__ = ["BLOCK", "MAX_TOPK", "MXFP4_GROUP", "MoESpec", "ScaleFormat", "WeightFormat"]

BLOCK: Final = 128
"""Columns of one activation scale, and both sides of one FP8 weight block."""

MXFP4_GROUP: Final = 32
"""Depth elements of one MXFP4 scale (OCP Microscaling Formats v1.0, section 5.2)."""

MAX_TOPK: Final = 32
"""Largest top-k: a token's slots are held in one warp."""

MAX_EXPERTS: Final = 65536
"""Largest number of routed experts: expert ids travel as 16 bits where they are packed."""

WeightFormat = Literal["fp8_block", "mxfp4", "bf16"]
"""How the experts' weights are held: e4m3 with 128x128 scales, packed E2M1 with scales per 32, or BF16."""

ScaleFormat = Literal["float32", "ue8m0"]
"""Scales of quantised activations: ``amax / 448`` as float32, or the next power of two at or above it."""

_DEPTH_MULTIPLE: Final[dict[str, int]] = {"fp8_block": BLOCK, "mxfp4": BLOCK, "bf16": 1}


def _positive_int(name: str, value: object, most: int | None = None) -> None:
    allowed = "an integer from 1" + (f" to {most}" if most is not None else "")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        raise SpecError(name, repr(value), allowed, f"Pass {name} as the model's configuration states it.")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The routed half of one Mixture-of-Experts layer.

    Args:
        hidden: model width H, columns of the layer's input and output.
        intermediate: width I of one expert's gate and up projections.
        experts: routed experts E over all ranks.
        topk: experts per token k, at most ``min(experts, 32)``.
        clamp: SwiGLU clamp c > 0 (``gate = min(gate, c)``, ``up`` held in ``[-c, c]``), or None.
        input_scales: scales used when a BF16 input is quantised for FP8 or MXFP4 experts.

    Raises:
        SpecError: a size is not a positive integer, top-k exceeds the experts, the clamp is not positive and
            finite, or `input_scales` is unknown.
    """

    hidden: int
    intermediate: int
    experts: int
    topk: int
    clamp: float | None = None
    input_scales: ScaleFormat = "float32"

    def __post_init__(self) -> None:
        _positive_int("hidden", self.hidden)
        _positive_int("intermediate", self.intermediate)
        _positive_int("experts", self.experts, MAX_EXPERTS)
        _positive_int("topk", self.topk, MAX_TOPK)
        if self.topk > self.experts:
            raise SpecError(
                "topk",
                self.topk,
                f"at most experts = {self.experts}",
                "A token cannot use more experts than there are.",
            )
        if self.clamp is not None:
            ok = isinstance(self.clamp, (int, float)) and not isinstance(self.clamp, bool)
            if not ok or not math.isfinite(self.clamp) or self.clamp <= 0:
                raise SpecError(
                    "clamp", repr(self.clamp), "None or a finite number above 0", "Pass clamp=None for no clamp."
                )
            object.__setattr__(self, "clamp", float(self.clamp))
        if self.input_scales not in get_args(ScaleFormat):
            raise SpecError(
                "input_scales",
                self.input_scales,
                " or ".join(repr(name) for name in get_args(ScaleFormat)),
                "Use 'float32' unless the model was trained with power-of-two scales.",
            )

    def local_experts(self, ranks: int) -> int:
        """Experts that each of `ranks` ranks owns (E/R; rank r owns ``[r * E/R, (r + 1) * E/R)``).

        Raises:
            SpecError: `ranks` is not positive or does not divide the experts.
        """
        _positive_int("ranks", ranks)
        if self.experts % ranks:
            divisors = [r for r in range(1, min(self.experts, 64) + 1) if self.experts % r == 0]
            raise SpecError(
                "experts",
                self.experts,
                f"a multiple of the number of ranks ({ranks})",
                f"Use a number of ranks that divides {self.experts} (such as {divisors}) or add redundant experts.",
            )
        return self.experts // ranks

    def check_format(self, weight_format: WeightFormat) -> None:
        """Refuse a weight format that cannot hold this layer.

        Raises:
            FormatError: `weight_format` is unknown, or H or I is not a multiple of what it needs; the message names
                a format that could.
        """
        if weight_format not in _DEPTH_MULTIPLE:
            raise FormatError(
                "weight_format", weight_format, ", ".join(_DEPTH_MULTIPLE), "Pick one of the listed formats."
            )
        need = _DEPTH_MULTIPLE[weight_format]
        for name, size in (("hidden", self.hidden), ("intermediate", self.intermediate)):
            if size % need:
                fits = [f for f, m in _DEPTH_MULTIPLE.items() if self.hidden % m == 0 and self.intermediate % m == 0]
                raise FormatError(
                    name,
                    size,
                    f"a multiple of {need} for {weight_format} weights",
                    f"Formats that can hold hidden={self.hidden}, intermediate={self.intermediate}: {', '.join(fits)}.",
                )
