"""Weights from one format to another, only when asked, expert by expert into memory that is allocated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from megamoe.errors import FormatError, WeightError
from megamoe.formats import fp8_block, mxfp4, ue8m0
from megamoe.spec import BLOCK, MXFP4_GROUP, MoESpec, ScaleFormat, WeightFormat
from megamoe.weights import ExpertWeights

__all__ = [
    "CONVERSIONS",
    "ProgressCallback",
    "check_conversion",
    "convert",
    "convert_matrix",
    "copy_bytes",
    "empty_weights",
    "located",
]

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of the result."""

CONVERSIONS: Final[dict[tuple[WeightFormat, WeightFormat], str]] = {
    ("bf16", "fp8_block"): "quantised, rounding",
    ("mxfp4", "fp8_block"): "exact or refused",
    ("mxfp4", "bf16"): "exact or refused",
    ("fp8_block", "bf16"): "dequantised, rounding",
}
"""Supported pairs (from, to) and what they do to values."""


def check_conversion(stored: WeightFormat, wanted: WeightFormat) -> None:
    """Raise `FormatError` if weights cannot be turned from `stored` into `wanted`."""
    if stored != wanted and (stored, wanted) not in CONVERSIONS:
        allowed = [to for source, to in CONVERSIONS if source == stored]
        raise FormatError(
            "convert_to", wanted, " or ".join([stored, *allowed]) + f" for {stored} weights", "Pick one of these."
        )


def empty_weights(
    spec: MoESpec,
    weight_format: WeightFormat,
    count: int,
    *,
    first_expert: int = 0,
    scale_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ExpertWeights:
    """Uninitialised weights of `count` experts, in the shapes of `ExpertWeights`.

    Args:
        scale_dtype: of fp8_block scales, ``torch.float32`` or ``torch.float8_e8m0fnu``; other formats have one choice.

    Raises:
        FormatError: the format cannot hold the spec's sizes.
    """
    spec.check_format(weight_format)
    h, i = spec.hidden, spec.intermediate

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(count, *shape, dtype=dtype, device=device)

    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    if weight_format == "fp8_block":
        w13, w2 = empty(fp8_block.E4M3, 2 * i, h), empty(fp8_block.E4M3, h, i)
        w13_scale = empty(scale_dtype, 2 * i // BLOCK, h // BLOCK)
        w2_scale = empty(scale_dtype, h // BLOCK, i // BLOCK)
    elif weight_format == "mxfp4":
        w13, w2 = empty(torch.uint8, 2 * i, h // 2), empty(torch.uint8, h, i // 2)
        w13_scale = empty(ue8m0.E8M0, 2 * i, h // MXFP4_GROUP)
        w2_scale = empty(ue8m0.E8M0, h, i // MXFP4_GROUP)
    else:
        w13, w2 = empty(torch.bfloat16, 2 * i, h), empty(torch.bfloat16, h, i)
    return ExpertWeights(
        format=weight_format, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale, first_expert=first_expert
    )


def convert_matrix(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    stored: WeightFormat,
    wanted: WeightFormat,
    scale_format: ScaleFormat = "float32",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One projection ``[N, K]`` of one expert in another format; the same tensors if the formats are equal.

    Args:
        weight, scale: as `ExpertWeights` holds them, without the expert dimension.
        scale_format: of fp8_block scales that this conversion makes.

    Raises:
        FormatError: no such conversion, or one that must be exact is not; the message says where.
        WeightError: NaN or Inf in weights that are quantised; the message says in which block.
    """
    check_conversion(stored, wanted)
    if stored == wanted:
        return weight, scale
    if scale is None:  # bf16 -> fp8_block
        return fp8_block.quantize_weights(weight, scale_format)
    if wanted == "fp8_block":
        return mxfp4.to_fp8_block(weight, scale, scale_format)
    if stored == "fp8_block":
        return fp8_block.dequantize_weights(weight, scale, torch.bfloat16), None
    dense = mxfp4.dequantize(weight, scale, torch.bfloat16)
    finite = dense.isfinite()
    if not bool(finite.all()):
        raise FormatError(
            "scale",
            f"a value outside bfloat16 at {[int(i) for i in (~finite).nonzero()[0]]}",
            "finite values within bfloat16's range",
            "Keep these weights as mxfp4.",
        )
    return dense, None


def convert(
    weights: ExpertWeights,
    wanted: WeightFormat,
    scale_format: ScaleFormat = "float32",
    progress: ProgressCallback | None = None,
) -> ExpertWeights:
    """`weights` in another format, on the same device, expert by expert.

    The input is not touched; to go from a file to another format without holding both, ask
    `megamoe.checkpoint(..., convert_to=...)`.

    Raises:
        FormatError, WeightError: as `convert_matrix`; the message gives the expert and tensor.
    """
    check_conversion(weights.format, wanted)
    if weights.format == wanted:
        return weights
    if weights.gate_up != "stacked":
        raise FormatError(
            "weights.gate_up",
            weights.gate_up,
            "'stacked' for a conversion",
            "Restore the order with megamoe.formats.layout.deinterleave_gate_up.",
        )
    el, hidden = weights.local_experts, weights.w2.shape[1]
    spec = MoESpec(hidden=hidden, intermediate=weights.w13.shape[1] // 2, experts=max(el, 1), topk=1)
    result = empty_weights(
        spec,
        wanted,
        el,
        first_expert=weights.first_expert,
        scale_dtype=torch.float32 if scale_format == "float32" else ue8m0.E8M0,
        device=weights.w13.device,
    )
    total = result.nbytes
    for e in range(el):
        for name in ("w13", "w2"):
            scales: torch.Tensor | None = getattr(weights, f"{name}_scale")
            scale = None if scales is None else scales[e]
            try:
                new, new_scale = convert_matrix(getattr(weights, name)[e], scale, weights.format, wanted, scale_format)
            except (FormatError, WeightError) as error:
                raise located(error, f"expert {weights.first_expert + e}, {name}") from error
            copy_bytes(getattr(result, name)[e], new)
            if new_scale is not None:
                copy_bytes(getattr(result, f"{name}_scale")[e], new_scale)
        if progress is not None:
            progress(total * (e + 1) // el, total)
    return result


def located(error: FormatError | WeightError, where: str) -> FormatError | WeightError:
    """The same error with `where` in front of its argument."""
    return type(error)(f"{where}: {error.argument}", error.given, error.allowed, error.way_out)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` for equal dtypes and shapes, with one copy kernel for all one-byte dtypes."""
    if target.dtype != source.dtype or target.shape != source.shape:
        raise AssertionError(f"{target.dtype} {target.shape} from {source.dtype} {source.shape}")
    if target.element_size() == 1:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)
