"""The functional operator under `MegaMoE`: ``torch.ops.megamoe.experts`` and ``experts_out``.

A layer is passed as an integer handle, because an operator's arguments are tensors and numbers; the handle stays valid
until the layer is closed. Under ``torch.compile`` a layer's ``__call__`` becomes one of these operators, so that the
compiler sees one opaque call with known shapes and, for ``experts_out``, a declared mutation.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, NoReturn

import torch

from megamoe.errors import ClosedError, InputError

if TYPE_CHECKING:
    from megamoe.inputs import Activations
    from megamoe.layer import MegaMoE

__all__ = ["experts", "experts_out", "register", "traced_call", "unregister"]

_layers: weakref.WeakValueDictionary[int, MegaMoE] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
_NO_GRAD = "Call the layer under torch.inference_mode() or torch.no_grad(), or pass .detach()."


def register(layer: MegaMoE) -> int:
    """A new handle for `layer`; it does not keep the layer alive."""
    handle = next(_handles)
    _layers[handle] = layer
    return handle


def unregister(handle: int) -> None:
    """Forget a handle; unknown ones are ignored."""
    _layers.pop(handle, None)


def _layer(handle: int) -> MegaMoE:
    layer = _layers.get(handle)
    if layer is None:
        raise ClosedError("handle", handle, "the handle of an open layer", "Keep the layer open while it is used.")
    return layer


def _activations(x: torch.Tensor, scales: torch.Tensor | None) -> Activations:
    return x if scales is None else (x, scales)


@torch.library.custom_op("megamoe::experts", mutates_args=())
def experts(
    handle: int,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    tokens: int | None = None,
    bound: int | None = None,
) -> torch.Tensor:
    """Run layer `handle`: BF16 ``[M, H]``. Arguments and errors as `MegaMoE.__call__`.

    `num_tokens` is that argument as a tensor, `tokens` as a number; give at most one.
    """
    count = num_tokens if num_tokens is not None else tokens
    return _layer(handle)._run(_activations(x, scales), expert_ids, expert_weights, None, count, bound)


@experts.register_fake
def _experts_fake(
    handle: int,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    tokens: int | None = None,
    bound: int | None = None,
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


@torch.library.custom_op("megamoe::experts_out", mutates_args=("out",))
def experts_out(
    handle: int,
    out: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    tokens: int | None = None,
    bound: int | None = None,
) -> None:
    """Run layer `handle` and write BF16 `out` ``[M, H]``; otherwise as `experts`."""
    count = num_tokens if num_tokens is not None else tokens
    _layer(handle)._run(_activations(x, scales), expert_ids, expert_weights, out, count, bound)


@experts_out.register_fake
def _experts_out_fake(
    handle: int,
    out: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
    tokens: int | None = None,
    bound: int | None = None,
) -> None:
    return None


def _refuse_backward(ctx: object, inputs: object = None, output: object = None) -> NoReturn:
    raise InputError(
        "x or expert_weights",
        "a tensor that requires grad",
        "inference only: there is no backward pass",
        _NO_GRAD,
    )


# torch calls setup_context only when grad mode is on and an input requires grad: the place to refuse, also in a trace.
experts.register_autograd(_refuse_backward, setup_context=_refuse_backward)


def traced_call(
    handle: int,
    x: Activations,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    out: torch.Tensor | None,
    num_tokens: int | torch.Tensor | None,
    bound: int | None,
) -> torch.Tensor:
    """`MegaMoE.__call__` as ``torch.compile`` traces it: all other checks happen when the operator runs."""
    values, scales = x if isinstance(x, (tuple, list)) else (x, None)
    count, tokens = (num_tokens, None) if isinstance(num_tokens, torch.Tensor) else (None, num_tokens)
    if out is None:
        result: torch.Tensor = torch.ops.megamoe.experts(
            handle, values, scales, expert_ids, expert_weights, count, tokens, bound
        )
        return result
    if torch.is_grad_enabled() and (values.requires_grad or expert_weights.requires_grad):
        # An operator that mutates cannot refuse in its autograd, and a trace can only raise builtin exceptions.
        raise RuntimeError(f"x or expert_weights requires grad, but there is no backward pass. {_NO_GRAD}")
    torch.ops.megamoe.experts_out(handle, out, values, scales, expert_ids, expert_weights, count, tokens, bound)
    return out
