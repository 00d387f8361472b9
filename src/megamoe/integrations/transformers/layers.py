"""The `MegaMoE` layers behind a model's experts modules, and the operator that ``torch.compile`` sees.

A layer belongs to the first weight of its module (or, where the host swaps parameters for local tensors during the
forward, to the module) and goes when that goes. Nothing is kept on the module itself, so that models can be copied,
pickled and saved as before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from megamoe.control import DEFAULT_DEADLINE
from megamoe.engine import Backend
from megamoe.errors import EngineError
from megamoe.integrations.transformers.modules import Parameters, changes, expert_weights, spec_of, weight_format
from megamoe.layer import MegaMoE
from megamoe.weights import ExpertWeights

__all__ = ["Settings", "hosted_experts", "owner_of", "release", "run", "settings", "swaps_parameters"]

_LEAST_TOKENS: Final = 64
"""Token capacity of the smallest layer: below it growing would only cost rebuilding."""


@dataclass
class Settings:
    """What `register` was told.

    Attributes:
        backend: engine of new layers; "auto" is the one for the device that the parameters are on.
        max_tokens: capacity where the ranks of a group hold different batches; elsewhere layers grow.
        deadline: seconds to wait for other ranks.
    """

    backend: Backend = "auto"
    max_tokens: int = 8192
    deadline: float = DEFAULT_DEADLINE


settings = Settings()


class _Key(NamedTuple):
    group: str
    topk: int
    clamp: float | None
    quantize: bool


@dataclass
class _Entry:
    layer: MegaMoE
    capacity: int
    weights: ExpertWeights
    seen: tuple[tuple[int, int], ...]


class _Book(dict[_Key, _Entry]):
    """The layers of one module; closes them when it goes."""

    def close(self) -> None:
        for entry in self.values():
            entry.layer.close()
        self.clear()

    def __del__(self) -> None:
        self.close()


_owned: dict[int, tuple[weakref.ref[object], _Book]] = {}
"""By an owner's id. torch's WeakIdKeyDictionary would do, but makes a key in Python at every look."""
_unowned: dict[tuple[int, ...], _Book] = {}


def _book(owner: object | None, parameters: Parameters) -> _Book:
    if owner is None:
        return _unowned.setdefault(tuple(pointer for pointer, _ in changes(parameters)), _Book())
    book = _book_of(owner)
    if book is None:
        key, book = id(owner), _Book()
        _owned[key] = weakref.ref(owner, lambda _: _owned.pop(key, None)), book
    return book


def _book_of(owner: object) -> _Book | None:
    reference, book = _owned.get(id(owner), (None, None))
    return book if reference is not None and reference() is owner else None


def _power_of_two(tokens: int) -> int:
    return 1 << max(0, tokens - 1).bit_length()


def _take_weights(entry: _Entry, key: _Key, parameters: Parameters, seen: tuple[tuple[int, int], ...]) -> None:
    """Load what was overwritten. An engine that reads the parameters themselves needs it only where they moved; loading
    is collective, so ranks must not do it for nothing."""
    moved = [pointer for pointer, _ in seen] != [pointer for pointer, _ in entry.seen]
    if moved or key.quantize or entry.layer.engine != "cpu":
        entry.weights = expert_weights(parameters, entry.layer.first_expert, quantize=key.quantize)
        entry.layer.load(entry.weights)
    entry.seen = seen


def _backend(parameters: Parameters, quantize: bool) -> Backend:
    """The engine for parameters where they are: layers take and give tensors on the parameters' device."""
    if settings.backend != "auto":
        return settings.backend
    if parameters.gate_up.device.type == "cpu":
        return "cpu"
    stored = weight_format(parameters)
    if stored != "fp8_block" and not (stored == "bf16" and quantize):
        raise EngineError(
            "experts",
            f"{stored} on {parameters.gate_up.device}",
            "fp8_block on a GPU",
            "Use experts_implementation='megamoe-fp8', which quantises BF16 experts, or one of the host's own.",
        )
    return "cuda"


def _entry(book: _Book, key: _Key, parameters: Parameters, most: int | None) -> _Entry:
    """The layer for `key`, holding the weights as they are now, with room for `most` tokens of each rank."""
    entry = book.get(key)
    seen = changes(parameters)
    if entry is not None and (most is None or most <= entry.capacity):
        if entry.seen != seen:
            _take_weights(entry, key, parameters, seen)
        return entry
    group: dist.ProcessGroup | None = None
    if key.group:
        group = dist.distributed_c10d._resolve_process_group(key.group)  # type: ignore[attr-defined,arg-type]
    spec = spec_of(parameters, 1 if group is None else group.size(), key.topk, key.clamp)
    capacity = settings.max_tokens if most is None else max(_LEAST_TOKENS, _power_of_two(most))
    if entry is not None:
        book.pop(key).layer.close()
    backend = _backend(parameters, key.quantize)
    layer = MegaMoE(spec, group, capacity, backend, deadline=settings.deadline)
    try:
        if entry is None or entry.seen != seen:
            weights = expert_weights(parameters, layer.first_expert, quantize=key.quantize)
        else:
            weights = entry.weights
        layer.load(weights)
    except BaseException:
        layer.close()
        raise
    entry = book[key] = _Entry(layer, capacity, weights, seen)
    return entry


def run(
    owner: object | None,
    parameters: Parameters,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    clamp: float | None,
    quantize: bool,
    group: str = "",
    most: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one rank's tokens through the layer of these parameters; collective over `group`.

    Args:
        owner: what the layer lives as long as; None to keep it until `release`.
        x: BF16 ``[M, H]``.
        expert_ids: ``[M, k]``, of the whole group's experts; -1 skips.
        expert_weights: ``[M, k]``, any float dtype.
        clamp, quantize: SwiGLU clamp; whether BF16 weights run as FP8.
        group: name of a process group, or "" for one rank.
        most: largest number of tokens of any rank, equal on all; None where that is not known.
        out: BF16 ``[M, H]`` to write to.

    Raises:
        Errors of `MegaMoE`.
    """
    key = _Key(group, int(expert_ids.shape[1]), clamp, quantize)
    entry = _entry(_book(owner, parameters), key, parameters, most)
    # The plan of a call follows its bound: a decode step after a long prompt must not run the prompt's plan.
    bound = None if most is None else min(entry.capacity, _power_of_two(max(most, 1)))
    return entry.layer._run(x, expert_ids, expert_weights.float(), out, None, bound)  # traced code does not come here


def owner_of(module: torch.nn.Module, parameters: Parameters) -> object:
    """What the layers of `module` live as long as."""
    return module if swaps_parameters(module) else parameters.gate_up


def swaps_parameters(module: torch.nn.Module) -> bool:
    """Whether the host puts other tensors in place of the module's parameters for each forward, as it does under
    expert parallelism with local tensors for its DTensors."""
    own = module.__dict__
    return bool(own.get("_is_hooked", False)) or bool(own.get("_is_expert_parallel", False))


def release(owner: object | None = None) -> None:
    """Close the layers of `owner`, or all; the next forward makes them anew."""
    if owner is not None:
        books = [book for book in (_book_of(owner),) if book is not None]
    else:
        books = [*(book for _, book in _owned.values()), *_unowned.values()]
        _unowned.clear()
    for book in books:
        book.close()


@torch.library.custom_op("megamoe::hosted_experts", mutates_args=())
def hosted_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    clamp: float | None,
    quantize: bool,
    group: str,
    most: int | None,
    owned: bool,
) -> torch.Tensor:
    """`run` as one opaque call for ``torch.compile``; everything it depends on is an argument.

    `owned` says that `gate_up` is the module's own parameter, so that the layer can live as long as that.
    """
    owner = gate_up if owned else None
    parameters = Parameters(gate_up, down, gate_up_scale, down_scale)
    return run(
        owner,
        parameters,
        x,
        expert_ids,
        expert_weights,
        clamp=clamp,
        quantize=quantize,
        group=group,
        most=most,
    )


@hosted_experts.register_fake
def _hosted_experts_fake(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    clamp: float | None,
    quantize: bool,
    group: str,
    most: int | None,
    owned: bool,
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
