"""The experts functions that Transformers calls: ``fn(module, hidden_states, top_k_index, top_k_weights)``."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from megamoe.errors import InputError
from megamoe.integrations.transformers import layers
from megamoe.integrations.transformers.modules import check_activation, read

__all__ = ["NAMES", "QUANTIZED", "STORED", "experts_forward", "forward", "quantized_experts_forward"]

STORED: Final = "megamoe"
"""Name under which experts run in the format they are stored in."""

QUANTIZED: Final = "megamoe-fp8"
"""Name under which BF16 experts are quantised to FP8 (128 x 128 blocks) first."""

NAMES: Final = (STORED, QUANTIZED)

_NO_GRAD: Final = "Call the model under torch.inference_mode() or torch.no_grad()."


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _check(module: nn.Module) -> bool:
    """All that `read` and `check_activation` refuse, run for real while a trace is made: traced code cannot raise this
    package's errors."""
    return check_activation(module, read(module)[1])


def forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    quantize: bool,
    group: dist.ProcessGroup | None = None,
    most: int | None = None,
) -> torch.Tensor:
    """Run `module`'s experts on this rank's tokens.

    Args:
        module: the experts module; its parameters are this rank's experts.
        hidden_states: BF16 ``[T, H]``.
        top_k_index: ``[T, k]``: with `group` ids of all its experts, else of the module's own; -1 skips a route, and so
            does the number of the module's experts without `group` (an expert on another rank).
        top_k_weights: ``[T, k]``.
        quantize: run BF16 experts as FP8.
        group: the ranks that share the experts.
        most: largest number of tokens of any rank, where all ranks know it.

    Returns:
        BF16 ``[T, H]``.

    Raises:
        SpecError: the module has a layout or activation that the engines do not compute.
        WeightError, FormatError: weights of another dtype or size.
        InputError: inputs that a layer refuses (a float32 model, a tensor that requires grad).
    """
    compiling = torch.compiler.is_compiling()
    if compiling:
        _check(module)
    parameters, clamp = read(module)
    if not compiling:
        check_activation(module, clamp)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or parameters.gate_up.requires_grad):
        if compiling:
            raise RuntimeError(f"megamoe has no backward pass. {_NO_GRAD}")
        raise InputError(
            "hidden_states or the experts' weights",
            "tensors that require grad",
            "inference only: there is no backward pass",
            _NO_GRAD,
        )
    name = ""
    if group is None:
        most = hidden_states.shape[0]
        elsewhere = parameters.gate_up.shape[0]
        top_k_index = top_k_index.masked_fill(top_k_index == elsewhere, -1)
    else:
        name = group.group_name
    if compiling:
        result: torch.Tensor = torch.ops.megamoe.hosted_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            *parameters,
            clamp,
            quantize,
            name,
            most,
            not layers.swaps_parameters(module),
        )
        return result
    return layers.run(
        layers.owner_of(module, parameters),
        parameters,
        hidden_states,
        top_k_index,
        top_k_weights,
        clamp=clamp,
        quantize=quantize,
        group=name,
        most=most,
    )


def experts_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`forward` in the stored format; ``experts_implementation="megamoe"``."""
    return forward(self, hidden_states, top_k_index, top_k_weights, quantize=False, group=process_group)


def quantized_experts_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """`forward` with BF16 experts quantised; ``experts_implementation="megamoe-fp8"``."""
    return forward(self, hidden_states, top_k_index, top_k_weights, quantize=True, group=process_group)
