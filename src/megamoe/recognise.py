"""Calls of one kind after another, recognised in one step.

Looking at every property of four tensors from Python is a good part of what a call costs the host. torch has C++ code
that compares types, dtypes, devices, sizes, strides and whether gradients are wanted at once: the guards of its
compiler. They are no public interface, so they are used only where a trial finds that they accept and refuse what they
should; elsewhere every call is looked at in full.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeGuard

import torch

from megamoe.engine import Call

__all__ = ["Usual", "same_kinds", "trusted"]

_Check = Callable[..., bool]


def _guards(*tensors: torch.Tensor) -> _Check:
    from torch._C._dynamo.guards import TensorGuards

    # A list of sizes for each tensor, which the stub of the class does not know.
    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    check: _Check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


class _Other(torch.Tensor):
    """A subclass, which may mean anything."""


@lru_cache(maxsize=1)
def trusted() -> bool:
    """Whether the guards of this torch do what `same_kinds` says: tried once, on the CPU."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            a, b = torch.zeros(3, 4, device="cpu"), torch.zeros(2, 5, dtype=torch.int32, device="cpu")
            check = _guards(a, b)
            others: tuple[tuple[Any, Any], ...] = (
                (a.double(), b),
                (a, b.long()),
                (a[:2], b),
                (torch.zeros(4, 3, device="cpu").T, b),
                (torch.zeros(3, 8, device="cpu")[:, ::2], b),
                (a.flatten(), b),
                (a.clone().requires_grad_(), b),
                (a.to("meta"), b),
                (a.to_sparse(), b),
                (a.as_subclass(_Other), b),
                (None, b),
                (a, (b, b)),
                (b, a),
            )
            return check(a.clone(), b.clone()) is True and all(check(*other) is False for other in others)
    except Exception:  # whatever a torch without them does
        return False


def same_kinds(*tensors: torch.Tensor) -> _Check | None:
    """A function that says whether its arguments are, one by one, of the kinds that `tensors` are now.

    That is: the same exact type, dtype, device, sizes and strides, and no gradient wanted where none is now. Addresses
    and values do not matter. It may refuse what is the same, as in another inference mode, but accepts nothing else.

    Returns:
        None where this torch has nothing quicker than to look.
    """
    return _guards(*tensors) if trusted() else None


class Usual:
    """The kind of plain call that a layer gets: once two in a row were alike, the next ones are recognised.

    Attributes:
        tokens: of such a call.
        bound: the bound that its `bound` argument means.
    """

    __slots__ = ("_given", "_inputs", "_out", "bound", "tokens")

    def __init__(self, call: Call, given: int | None) -> None:
        self.tokens = call.x.shape[0]
        self.bound = call.bound
        self._given = given
        self._inputs: _Check | None = None
        self._out: _Check | None = None

    @staticmethod
    def after(last: Usual | None, call: Call, given: int | None) -> Usual:
        """What is known after `call`, a plain one with the bound `given` that `last` did not recognise."""
        usual = Usual(call, given)
        # What a tensor that requires grad may do depends on the mode of the call.
        plain = not (call.x.requires_grad or call.expert_weights.requires_grad or call.out.requires_grad)
        if plain and last is not None and last.tokens == usual.tokens and last._given == given:
            usual._inputs = same_kinds(call.x, call.expert_ids, call.expert_weights)
            usual._out = same_kinds(call.out)
        return usual

    def has(self, x: object, ids: object, weights: object, out: object, given: object) -> TypeGuard[torch.Tensor]:
        """Whether these arguments (without a count of tokens) are such a call: all checks would let them pass."""
        return (
            self._inputs is not None
            and self._out is not None
            and (given is self._given or (type(given) is int and given == self._given))  # True is no number here
            and self._inputs(x, ids, weights)
            and (out is None or self._out(out))
        )
