"""Checks of one call's arguments, by metadata alone: nothing here reads a value or waits for a device."""

from __future__ import annotations

import math
from typing import TypeAlias, cast

import torch

from megamoe.engine import Call
from megamoe.errors import InputError
from megamoe.formats.fp8_block import E4M3
from megamoe.spec import BLOCK, MoESpec, WeightFormat

__all__ = ["Activations", "check_call", "positive_number"]

Activations: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""BF16 ``[M, H]``, or ``(q, scales)``: e4m3 ``[M, H]`` and float32 ``[M, H / 128]``."""


def positive_number(name: str, value: object, *, integer: bool, way_out: str) -> None:
    """Refuse anything but a finite number above zero (a positive integer when `integer`)."""
    kinds = (int,) if integer else (int, float)
    ok = isinstance(value, kinds) and not isinstance(value, bool)
    if not ok or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise InputError(name, repr(value), "an integer from 1" if integer else "a number above 0", way_out)


def _tensor(name: str, value: object, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InputError(name, type(value).__name__, what, "Pass a torch tensor.")
    return value


def _check(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device, hint: str
) -> torch.Tensor:
    if (
        isinstance(value, torch.Tensor)
        and value.dtype in dtypes
        and value.shape == shape
        and value.device == device
        and value.layout is torch.strided
        and not value.requires_grad
    ):
        return value  # the usual case, in a fraction of the time that the message below takes
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    what = f"{names} {list(shape)} on {device.type}"
    tensor = _tensor(name, value, what)
    if tensor.dtype not in dtypes:
        raise InputError(name, f"dtype {str(tensor.dtype).removeprefix('torch.')}", what, hint)
    if tuple(tensor.shape) != shape:
        raise InputError(name, f"shape {list(tensor.shape)}", what, "Check the layer's spec and the number of tokens.")
    if tensor.layout != torch.strided:
        raise InputError(name, f"layout {tensor.layout}", f"strided {what}", "Call .to_dense() on it.")
    if tensor.device.type != device.type or (device.index is not None and tensor.device != device):
        raise InputError(name, f"device {tensor.device}", what, f"Move it with .to('{device}').")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(
            name,
            "a tensor that requires grad",
            "inference only: there is no backward pass",
            "Call the layer under torch.inference_mode() or torch.no_grad(), or pass .detach().",
        )
    return tensor


def _check_activations(
    spec: MoESpec, weight_format: WeightFormat, x: object, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    hidden = spec.hidden
    if isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 and x.dim() == 2:
        return _check("x", x, (torch.bfloat16,), (x.shape[0], hidden), device, "Check the layer's hidden size."), None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise InputError("x", f"{len(x)} tensors", "(q, scales)", "Pass e4m3 values and their float32 scales.")
        if weight_format == "bf16":
            raise InputError("x", "(q, scales)", "bfloat16 [M, H] for bf16 experts", "Pass the unquantised input.")
        q = _tensor("x[0]", x[0], "float8_e4m3fn [M, H]")
        rows = q.shape[0] if q.dim() else 0
        q = _check("x[0]", q, (E4M3,), (rows, hidden), device, "Quantise with formats.fp8_block.quantize_activations.")
        s = _check("x[1]", x[1], (torch.float32,), (rows, hidden // BLOCK), device, "Convert the scales to float32.")
        return q, s
    value = _tensor("x", x, f"bfloat16 [M, {hidden}]")
    rows = value.shape[0] if value.dim() else 0
    if value.dtype == torch.float16:
        hint = "float16 is not supported: its range is too small for these models' activations; use .bfloat16()."
    elif value.dtype == E4M3:
        hint = "Pass quantised input as a pair: (q, scales)."
    else:
        hint = "Convert it with .bfloat16()."
    return _check("x", value, (torch.bfloat16,), (rows, hidden), device, hint), None


def _is_usual(spec: MoESpec, device: torch.device, x: object, ids: object, weights: object, out: object) -> bool:
    """Whether these are contiguous BF16 rows, ids, weights and output, if there is one, and nothing else needs a look.

    Most calls are like that, and the checks are a good part of their time: an attribute of a tensor costs about 0.1 us.
    """
    if not (type(x) is type(ids) is type(weights) is torch.Tensor):
        return False
    shape, routes, number = x.shape, ids.shape, device.index
    if not (
        len(shape) == 2
        and shape[1] == spec.hidden
        and routes == (shape[0], spec.topk)
        and weights.shape == routes
        and x.dtype is torch.bfloat16
        and (ids.dtype is torch.int32 or ids.dtype is torch.int64)
        and weights.dtype is torch.float32
        and x.is_contiguous()
        and ids.is_contiguous()
        and weights.is_contiguous()
    ):
        return False
    if number is None:  # the CPU, where tensors can also have layouts and lie on the meta device
        if not (x.layout is ids.layout is weights.layout is torch.strided):
            return False
        if not (x.device == ids.device == weights.device == device and getattr(out, "device", device) == device):
            return False
    elif not (x.get_device() == ids.get_device() == weights.get_device() == number):
        return False
    gradients = torch.is_grad_enabled()  # without them, nothing about any tensor is refused
    if gradients and (x.requires_grad or weights.requires_grad):
        return False
    return out is None or (
        type(out) is torch.Tensor
        and out.shape == shape
        and out.dtype is torch.bfloat16
        and (number is None or out.get_device() == number)
        and not (gradients and out.requires_grad)
        and out.is_contiguous()
    )


def _check_out(out: torch.Tensor) -> None:
    rows, columns = out.shape
    if out.numel() and ((out.stride(1) != 1 and columns > 1) or (rows > 1 and out.stride(0) < columns)):
        raise InputError(
            "out",
            f"strides {list(out.stride())}",
            f"rows of {columns} neighbouring elements that do not overlap",
            "Pass torch.empty(M, H), or a slice of whole rows or columns of a larger tensor.",
        )


def check_call(
    spec: MoESpec,
    weight_format: WeightFormat,
    max_tokens: int,
    device: torch.device,
    x: Activations,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    out: torch.Tensor | None = None,
    num_tokens: int | torch.Tensor | None = None,
    bound: int | None = None,
) -> Call:
    """Check one rank's arguments and put them together.

    Args: those of `megamoe.MegaMoE.__call__`, and what they are checked against.

    Raises:
        InputError: names the argument, what was given, what is allowed and the way out.
    """
    plain = _is_usual(spec, device, x, expert_ids, expert_weights, out)
    if plain:
        values, scales, ids, weights = cast("torch.Tensor", x), None, expert_ids, expert_weights
        tokens = values.shape[0]
    else:
        values, scales = _check_activations(spec, weight_format, x, device)
        tokens, slots = values.shape[0], spec.topk
        ids = _check(
            "expert_ids",
            expert_ids,
            (torch.int32, torch.int64),
            (tokens, slots),
            device,
            "Convert the ids with .int().",
        )
        weights = _check(
            "expert_weights", expert_weights, (torch.float32,), (tokens, slots), device, "Convert them with .float()."
        )
    if bound is None:
        bound = max_tokens
    else:
        positive_number("bound", bound, integer=True, way_out="Leave it out for max_tokens.")
        if bound > max_tokens:
            raise InputError(
                "bound", bound, f"at most max_tokens = {max_tokens}", "Make the layer with larger max_tokens."
            )
    if tokens > bound:
        name = "max_tokens" if bound == max_tokens else "bound"
        raise InputError(
            "x",
            f"{tokens} tokens",
            f"at most {name} = {bound} on each rank",
            f"Split the batch, or raise {name}.",
        )
    count: int | torch.Tensor
    if num_tokens is None:
        count = tokens
    elif isinstance(num_tokens, torch.Tensor):
        if num_tokens.numel() != 1:
            raise InputError("num_tokens", f"shape {list(num_tokens.shape)}", "one element", "Pass one int32 value.")
        shape = tuple(num_tokens.shape)
        count = _check("num_tokens", num_tokens, (torch.int32,), shape, device, "Convert it with .int().")
    else:
        if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or not 0 <= num_tokens <= tokens:
            raise InputError(
                "num_tokens", num_tokens, f"an integer from 0 to {tokens}, the rows of x", "Leave it out for all rows."
            )
        count = num_tokens
    if out is None:
        make = torch.empty if num_tokens is None else torch.zeros  # without a count every row is written
        out = make(tokens, spec.hidden, dtype=torch.bfloat16, device=values.device)
    elif not plain:
        _check("out", out, (torch.bfloat16,), (tokens, spec.hidden), device, "Pass a bfloat16 tensor.")
        _check_out(out)
    return Call(
        x=values,
        scales=scales,
        expert_ids=ids,
        expert_weights=weights,
        out=out,
        num_tokens=count,
        bound=bound,
        plain=plain,
    )
