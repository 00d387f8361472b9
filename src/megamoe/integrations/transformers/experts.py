"""The experts functions that Transformers calls: ``fn(module, hidden_states, top_k_index, top_k_weights)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megamoe.errors import InputError
from megamoe.integrations.transformers import layers
from megamoe.integrations.transformers.modules import check, checked, clamp_of, parameters_of, plain_activation, problem

__all__ = ["NAMES", "QUANTIZED", "STORED", "experts_forward", "forward", "quantized_experts_forward"]

STORED: Final = "megamoe"
"""Name under which experts run in the format they are stored in."""

QUANTIZED: Final = "megamoe-fp8"
"""Name under which BF16 experts are quantised to FP8 (128 x 128 blocks) first."""

NAMES: Final = (STORED, QUANTIZED)

_F = TypeVar("_F", bound=Callable[..., bool])

_SILU: Final = ("SiLU", "SiLUActivation")
"""Names of torch's and Transformers' class."""

_NO_GRAD: Final = "Call the model under torch.inference_mode() or torch.no_grad()."


# A trace holds the results of these two. The first has only constants for arguments, so that one graph serves all
# modules of a class; the second would tie the graph to its module, and is reached only where it may refuse.
_assume_constant: Callable[[_F], _F] = torch._dynamo.assume_constant_result
_plain_activation = _assume_constant(plain_activation)
_check = _assume_constant(check)


def _check_traced(module: Any) -> None:
    """`check` as traced code does it: attributes are guarded, and nothing but a builtin exception is raised."""
    silu = type(getattr(module, "act_fn", None)).__name__ in _SILU
    if problem(module) is not None or not silu or not _plain_activation(type(module), clamp_of(module)):
        _check(module)


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
            does the number of its own experts where the host has shared them out (an expert on another rank).
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
        _check_traced(module)
        parameters, clamp = parameters_of(module), clamp_of(module)
    else:
        parameters, clamp = checked(module)
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
        # 5.17 does not say of a module that its experts are shared out over ranks, only that the model is sharded.
        own = module.__dict__
        if own.get("_is_expert_parallel", own.get("_is_hooked", False)):
            top_k_index = top_k_index.masked_fill(top_k_index == parameters.gate_up.shape[0], -1)
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
