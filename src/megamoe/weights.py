"""One rank's expert weights in checkpoint layout, checked against a layer when they are loaded.

Readers produce this, engines and the oracle consume it. It is a view of tensors that somebody else owns: nothing here
copies a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from megamoe.errors import WeightError
from megamoe.spec import BLOCK, MXFP4_GROUP, MoESpec, WeightFormat

__all__ = ["INTERLEAVED_ROWS", "ExpertWeights", "GateUpOrder", "stacked_rows"]

GateUpOrder = Literal["stacked", "interleaved8"]
"""Rows of ``w13``: all of gate, then all of up; or 8 of gate, 8 of up, and so on. Block scales: gate's first."""

INTERLEAVED_ROWS: Final = 8
"""Rows of gate (and of up) in a run of ``"interleaved8"``."""

_E8M0 = torch.float8_e8m0fnu


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Weights of the experts ``[first_expert, first_expert + EL)`` of a layer, rows of gate before rows of up.

    ============  =======================================  =======================================
    format        ``w13`` / ``w2``                         ``w13_scale`` / ``w2_scale``
    ============  =======================================  =======================================
    fp8_block     e4m3 ``[EL, 2I, H]`` / ``[EL, H, I]``    float32 or e8m0 ``[EL, 2I/128, H/128]``
                                                           / ``[EL, H/128, I/128]``
    mxfp4         uint8 ``[EL, 2I, H/2]`` /                e8m0 ``[EL, 2I, H/32]`` /
                  ``[EL, H, I/2]``, low nibble first       ``[EL, H, I/32]``
    bf16          bfloat16 ``[EL, 2I, H]`` /               None
                  ``[EL, H, I]``
    ============  =======================================  =======================================

    `gate_up` is the order of the rows of ``w13``. ``"interleaved8"`` is for fp8_block weights that somebody else has
    already brought into that order (as DeepGEMM's MegaMoE wants them): an engine reads them where they are, so that
    their owner may overwrite them between calls. The GPU engine copies those that are not on the rank's GPU.

    Raises:
        WeightError: something that is not a tensor of three dimensions; from `check`, a tensor of a wrong dtype, shape,
            stride or device.
    """

    format: WeightFormat
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    first_expert: int = 0
    gate_up: GateUpOrder = "stacked"

    def __post_init__(self) -> None:
        for name in ("w13", "w2", "w13_scale", "w2_scale"):
            value: object = getattr(self, name)
            if value is None and name.endswith("_scale"):
                continue
            if not isinstance(value, torch.Tensor) or value.dim() != 3:
                given = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise WeightError(
                    name, given, "a tensor of three dimensions, experts first", "Stack the experts' matrices."
                )

    @property
    def local_experts(self) -> int:
        """Number of experts held here (EL)."""
        return int(self.w13.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        tensors = (self.w13, self.w2, self.w13_scale, self.w2_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def check(self, spec: MoESpec, local_experts: int) -> None:
        """Check every tensor against `spec`; touches no values (NaN scales are the reader's business).

        Raises:
            FormatError: the format cannot hold the spec's sizes.
            WeightError: names the tensor, what it is and what it should be.
        """
        spec.check_format(self.format)
        if self.gate_up not in get_args(GateUpOrder):
            allowed = " or ".join(repr(order) for order in get_args(GateUpOrder))
            raise WeightError("gate_up", self.gate_up, allowed, "Use 'stacked' for weights of a checkpoint.")
        if self.gate_up != "stacked" and self.format != "fp8_block":
            raise WeightError(
                "gate_up",
                f"{self.gate_up!r} for {self.format} weights",
                "'stacked', or fp8_block weights",
                "Restore the order with megamoe.formats.layout.deinterleave_gate_up.",
            )
        el, h, i = local_experts, spec.hidden, spec.intermediate
        value: tuple[torch.dtype, ...]
        scale: tuple[torch.dtype, ...] | None
        if self.format == "fp8_block":
            value, scale = (torch.float8_e4m3fn,), (torch.float32, _E8M0)
            shapes = {"w13": (el, 2 * i, h), "w2": (el, h, i)}
            scales = {
                "w13_scale": (el, 2 * i // BLOCK, h // BLOCK),
                "w2_scale": (el, h // BLOCK, i // BLOCK),
            }
        elif self.format == "mxfp4":
            value, scale = (torch.uint8,), (_E8M0,)
            shapes = {"w13": (el, 2 * i, h // 2), "w2": (el, h, i // 2)}
            scales = {"w13_scale": (el, 2 * i, h // MXFP4_GROUP), "w2_scale": (el, h, i // MXFP4_GROUP)}
        else:
            value, scale = (torch.bfloat16,), None
            shapes, scales = {"w13": (el, 2 * i, h), "w2": (el, h, i)}, {}
        for name, shape in shapes.items():
            self._check_one(name, value, shape)
        for name in ("w13_scale", "w2_scale"):
            if scale is not None:
                self._check_one(name, scale, scales[name])
            elif getattr(self, name) is not None:
                raise WeightError(
                    name, "a tensor", f"None for {self.format} weights", "Drop it: the format has no scales."
                )

    def _check_one(self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
        tensor: torch.Tensor | None = getattr(self, name)
        names = " or ".join(str(d) for d in dtypes)
        want = f"{names} {list(shape)} for {self.format} weights"
        if tensor is None:
            raise WeightError(name, "None", want, "Pass the scales that the checkpoint stores beside the weight.")
        if tensor.dtype not in dtypes:
            raise WeightError(name, str(tensor.dtype), want, "Convert it, or name the format it is really in.")
        if tuple(tensor.shape) != shape:
            raise WeightError(name, f"shape {list(tensor.shape)}", want, "Check the layout and the expert range.")
        if not tensor.is_contiguous():
            raise WeightError(
                name, f"strides {list(tensor.stride())}", f"contiguous {want}", "Call .contiguous() on it."
            )
        if tensor.device != self.w13.device:
            raise WeightError(name, f"device {tensor.device}", f"{self.w13.device}, like w13", "Move it there.")


def stacked_rows(w13: torch.Tensor, gate_up: GateUpOrder) -> torch.Tensor:
    """One expert's `w13` ``[2I, K]`` as a view whose rows, flattened, are all of gate and then all of up.

    Returns:
        `w13` itself, or ``[2, I / 8, 8, K]`` (not contiguous) for interleaved rows.
    """
    if gate_up == "stacked":
        return w13
    return w13.view(-1, 2, INTERLEAVED_ROWS, w13.shape[1]).transpose(0, 1)
