"""The buffer that DeepGEMM's MegaMoE calls pass around: input views for the caller, and the layers behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from megamoe.control import DEFAULT_DEADLINE
from megamoe.engine import Backend
from megamoe.errors import ClosedError, EngineError, InputError, WeightError
from megamoe.formats.fp8_block import E4M3
from megamoe.inputs import positive_number
from megamoe.layer import MegaMoE
from megamoe.spec import BLOCK, MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["InternalViewError", "SymmBuffer", "Weights"]

Weights = tuple[torch.Tensor, torch.Tensor]
"""e4m3 values and their float32 block scales."""

_VIEWS: Final = ("x", "x_sf", "topk_idx", "topk_weights")

_FIELDS: Final = ("w13", "w13_scale", "w2", "w2_scale")
"""The four weight tensors of a call, in order, as `ExpertWeights` calls them."""

_POOLS: Final = ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")

_INTERNAL: Final = frozenset(("buffer", "handle", *_POOLS, *(f"shared_{pool}" for pool in _POOLS)))


def only(name: str, given: object, allowed: object, way_out: str) -> None:
    """Refuse what DeepGEMM has and this does not.

    Raises:
        EngineError: `given` is not `allowed`.
    """
    if given != allowed:
        raise EngineError(name, given, repr(allowed), way_out)


class InternalViewError(EngineError, AttributeError):
    """A view of DeepGEMM's buffer that is internal to its kernel and does not exist here.

    An `AttributeError` too, so that ``hasattr`` answers no.
    """


class _Key(NamedTuple):
    clamp: float | None
    pointers: tuple[int, ...]
    shapes: tuple[torch.Size, ...]


@dataclass
class _Held:
    layer: MegaMoE
    versions: tuple[int, ...]


class SymmBuffer:
    """Inputs of `fp8_mega_moe` and the layers that read them; made by `get_symm_buffer_for_sm90_mega_moe`.

    One layer is made (collectively) for each set of weights and clamp that a call brings, and kept until `destroy`.

    Attributes:
        group: the process group, or None for one rank.
        num_experts, num_topk, hidden, intermediate_hidden: sizes; experts of all ranks.
        num_max_tokens_per_rank: capacity M, rounded up as DeepGEMM does.
        x: e4m3 ``[M, hidden]``; x_sf: float32 ``[M, hidden / 128]``.
        topk_idx: int64 ``[M, num_topk]``, global ids, -1 skips; topk_weights: float32 ``[M, num_topk]``.

    Raises:
        SpecError, InputError, EngineError, PeerError, DeadlineError: as `MegaMoE`.
    """

    x: torch.Tensor
    x_sf: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        use_fp8_dispatch: bool = True,
        activation: str = "swiglu",
        *,
        backend: Backend = "auto",
        deadline: float = DEFAULT_DEADLINE,
    ) -> None:
        only("use_fp8_dispatch", bool(use_fp8_dispatch), True, "Tokens travel as e4m3, a scale for each 128 columns.")
        only("activation", activation, "swiglu", "Only (clamped) SwiGLU is computed.")
        positive_number(
            "num_max_tokens_per_rank", num_max_tokens_per_rank, integer=True, way_out="Pass the most tokens of a call."
        )
        self.group = group
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_topk = num_topk
        self.hidden = hidden
        self.intermediate_hidden = intermediate_hidden
        self._backend = backend
        self._deadline = deadline
        self._layers: dict[_Key, _Held] = {}
        # Made before there are weights: it is the collective moment at which DeepGEMM allocates, so ranks that disagree
        # or a machine that cannot run it are told here, and it knows the device. A first call without clamp takes it.
        self._spare: MegaMoE | None = self._layer(None)
        device = self._spare.device
        tokens = num_max_tokens_per_rank
        self.x = torch.zeros(tokens, hidden, dtype=torch.uint8, device=device).view(E4M3)
        self.x_sf = torch.zeros(tokens, hidden // BLOCK, device=device)
        self.topk_idx = torch.zeros(tokens, num_topk, dtype=torch.int64, device=device)
        self.topk_weights = torch.zeros(tokens, num_topk, device=device)

    def _layer(self, clamp: float | None) -> MegaMoE:
        spec = MoESpec(
            hidden=self.hidden,
            intermediate=self.intermediate_hidden,
            experts=self.num_experts,
            topk=self.num_topk,
            clamp=clamp,
        )
        spec.check_format("fp8_block")
        return MegaMoE(spec, self.group, self.num_max_tokens_per_rank, self._backend, deadline=self._deadline)

    def layer(self, l1_weights: Weights, l2_weights: Weights, clamp: float | None) -> MegaMoE:
        """The layer that runs these weights as they are: gate and up rows interleaved by 8, scales gate's first.

        Tensors of which the engine has a copy, on a GPU the scales, are loaded again when they are written to in place
        (as torch counts it).

        Raises:
            WeightError: not two pairs of tensors, or tensors that do not fit the buffer's sizes.
            ClosedError: after `destroy`.
        """
        if self.destroyed:
            raise ClosedError("sym_buffer", "a destroyed buffer", "a live one", "Make a new buffer.")
        for name, pair in (("l1_weights", l1_weights), ("l2_weights", l2_weights)):
            if len(pair) != 2 or not all(isinstance(t, torch.Tensor) for t in pair):
                raise WeightError(name, type(pair).__name__, "(e4m3 values, float32 scales)", "Pass both tensors.")
        tensors = (*l1_weights, *l2_weights)
        key = _Key(clamp, tuple(t.data_ptr() for t in tensors), tuple(t.shape for t in tensors))
        versions = tuple(0 if t.is_inference() else t._version for t in tensors)
        held = self._layers.get(key)
        if held is not None:
            if held.versions != versions:
                pairs = zip(_FIELDS, held.versions, versions, strict=True)
                if {name for name, old, new in pairs if old != new} & set(held.layer.copied):
                    self._load(held.layer, l1_weights, l2_weights)
                held.versions = versions
            return held.layer
        layer: MegaMoE | None
        layer, self._spare = (self._spare, None) if clamp is None else (None, self._spare)
        layer = layer or self._layer(clamp)
        try:
            self._load(layer, l1_weights, l2_weights)
        except BaseException:
            layer.close()
            raise
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        self._layers[key] = _Held(layer, versions)
        return layer

    @staticmethod
    def _load(layer: MegaMoE, l1_weights: Weights, l2_weights: Weights) -> None:
        layer.load(
            ExpertWeights(
                format="fp8_block",
                w13=l1_weights[0],
                w2=l2_weights[0],
                w13_scale=l1_weights[1],
                w2_scale=l2_weights[1],
                first_expert=layer.first_expert,
                gate_up="interleaved8",
            )
        )

    @property
    def destroyed(self) -> bool:
        """Whether `destroy` was called."""
        return "x" not in self.__dict__

    def destroy(self) -> None:
        """Close the layers and drop the views; safe to call twice."""
        for layer in (*(held.layer for held in self._layers.values()), self._spare):
            if layer is not None:
                layer.close()
        self._layers.clear()
        self._spare = None
        for name in _VIEWS:
            self.__dict__.pop(name, None)
        self.group = None

    def __getattr__(self, name: str) -> Any:
        if name in _INTERNAL:
            raise InternalViewError(
                f"SymmBuffer.{name}",
                "a part that is internal to DeepGEMM's kernel",
                ", ".join(_VIEWS),
                "Write the inputs to these views and read the output from y.",
            )
        if name in _VIEWS:
            raise InternalViewError(f"SymmBuffer.{name}", "a destroyed buffer", "a live one", "Make a new buffer.")
        raise AttributeError(f"'SymmBuffer' has no attribute {name!r}")


def check_capacity(tokens: int, buffer: SymmBuffer) -> InputError | None:
    """Why a call with this many tokens does not fit, if it does not."""
    if tokens <= buffer.num_max_tokens_per_rank:
        return None
    return InputError(
        "y",
        f"{tokens} rows",
        f"at most num_max_tokens_per_rank = {buffer.num_max_tokens_per_rank}",
        "Split the batch, or make a larger buffer.",
    )
