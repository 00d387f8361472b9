"""What one of Transformers' experts modules is: its activation, its weights, and whether an engine can run it.

Attributes are looked at by `problem`, which ``torch.compile`` can trace, guarding what it saw. What a class computes
under the usual names is found out by calling its activation on a few numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from megamoe.errors import InputError, SpecError, WeightError
from megamoe.formats import fp8_block
from megamoe.spec import BLOCK, MoESpec, ScaleFormat, WeightFormat
from megamoe.weights import ExpertWeights

__all__ = [
    "Parameters",
    "changes",
    "check",
    "checked",
    "clamp_of",
    "expert_weights",
    "input_scales",
    "parameters_of",
    "plain_activation",
    "problem",
    "spec_of",
    "weight_format",
]

_OTHER: Final = "Choose another experts_implementation for this model ('grouped_mm' or 'eager')."

_LAYOUT: Final = (
    ("has_gate", True, "experts with gate and up projections"),
    ("has_bias", False, "experts without biases"),
    ("is_transposed", False, "weights [E, 2I, H] and [E, H, I]"),
    ("is_concatenated", True, "gate rows before up rows"),
    ("has_post_expert_norm", False, "experts without a norm of their own"),
)
"""Attributes that `use_experts_implementation` sets, what they must be, and that in words."""


class Parameters(NamedTuple):
    """The weights of an experts module on this rank, as its parameters hold them.

    Attributes:
        gate_up: ``[EL, 2I, H]``: BF16, e4m3, or packed E2M1 ``[EL, 2I, H / 2]``.
        down: ``[EL, H, I]``, likewise.
        gate_up_scale, down_scale: block scales, None for BF16.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None


class Problem(NamedTuple):
    """Why an experts module cannot be run: attribute, what it is, what it should be."""

    attribute: str
    given: object
    allowed: str


def problem(module: nn.Module) -> Problem | None:
    """What in the module's attributes the engines do not compute, if anything; traceable, raises nothing."""
    for name, needed, meaning in _LAYOUT:
        # Not every version sets every attribute; one that is absent means the plain case.
        if getattr(module, name, needed) != needed:
            return Problem(name, getattr(module, name), f"{needed} ({meaning})")
    for name in ("gate_up_proj", "down_proj"):
        if not isinstance(getattr(module, name, None), torch.Tensor):
            return Problem(name, "no tensor", "the experts' fused weights")
    if getattr(module, "gate_up_proj_scale_inv", None) is not None:
        scheme = getattr(module, "activation_scheme", "dynamic")
        if scheme != "dynamic":
            return Problem("activation_scheme", scheme, "'dynamic'")
        block: Any = getattr(module, "block_size", None)
        if module.gate_up_proj.dtype == fp8_block.E4M3 and (block is None or list(block) != [BLOCK, BLOCK]):
            return Problem("block_size", block, f"[{BLOCK}, {BLOCK}]")
    for name in ("swiglu_alpha", "gate_softcap", "up_softcap"):
        value = getattr(module, name, None)
        if value is not None and not (name == "swiglu_alpha" and value == 1.0):
            return Problem(name, value, "None (plain SwiGLU)")
    return None


def clamp_of(module: nn.Module) -> float | None:
    """SwiGLU clamp. Classes that clamp keep the limit beside the weights; the configuration alone does not say that
    they use it."""
    clamp: Any = getattr(module, "swiglu_limit", None)
    if clamp is None:
        clamp = getattr(module, "limit", None)
    return None if clamp is None else float(clamp)


def parameters_of(module: Any) -> Parameters:
    """The module's weights and scales."""
    return Parameters(
        module.gate_up_proj,
        module.down_proj,
        getattr(module, "gate_up_proj_scale_inv", None),
        getattr(module, "down_proj_scale_inv", None),
    )


def check(module: nn.Module) -> bool:
    """Refuse a module that the engines cannot run, by its attributes and by what its activation computes.

    Returns:
        True, so that a trace can hold the result.

    Raises:
        SpecError: names the attribute, what it is and what it should be.
    """
    found = problem(module) or _activation_problem(type(module), module, clamp_of(module))
    if found is None:
        return True
    raise SpecError(f"{type(module).__name__}.{found.attribute}", found.given, found.allowed, _OTHER)


class Known(NamedTuple):
    """What was found out about a module: the attributes it was found from, and its clamp."""

    attributes: tuple[object, ...]
    clamp: float | None


_WATCHED: Final = (
    *(name for name, _, _ in _LAYOUT),
    *("act_fn", "limit", "swiglu_limit", "swiglu_alpha", "gate_softcap", "up_softcap"),
    *("activation_scheme", "block_size"),
)

_known: dict[int, tuple[weakref.ref[nn.Module], Known]] = {}
"""By a module's id. torch's WeakIdKeyDictionary would do, but makes a key in Python at every look."""


def checked(module: nn.Module) -> tuple[Parameters, float | None]:
    """Weights and clamp of a module that passed `check`; checks only what was not checked before.

    This runs at every call of every layer, so it looks into the module's dictionaries: each attribute that a module
    does not have would cost an exception inside `getattr`.

    Raises:
        SpecError: as `check`.
    """
    own, parameters = module.__dict__, module._parameters
    elsewhere = parameters.get("gate_up_proj") is None or parameters.get("down_proj") is None
    attributes = (*map(own.get, _WATCHED), module._modules.get("act_fn"), elsewhere)
    key = id(module)
    reference, known = _known.get(key, (None, None))
    if reference is None or known is None or reference() is not module or known.attributes != attributes:
        check(module)
        known = Known(attributes, clamp_of(module))
        _known[key] = weakref.ref(module, lambda _: _known.pop(key, None)), known
    if elsewhere:
        return parameters_of(module), known.clamp
    found = Parameters(
        parameters["gate_up_proj"],  # type: ignore[arg-type]
        parameters["down_proj"],  # type: ignore[arg-type]
        parameters.get("gate_up_proj_scale_inv"),
        parameters.get("down_proj_scale_inv"),
    )
    return found, known.clamp


def plain_activation(kind: type[nn.Module], clamp: float | None) -> bool:
    """Whether modules of a class with ``act_fn = SiLU()`` compute SwiGLU with this clamp, told without a module."""
    bare = SimpleNamespace(
        act_fn=nn.SiLU(), limit=clamp, swiglu_limit=clamp, swiglu_alpha=None, gate_softcap=None, up_softcap=None
    )
    return _activation_problem(kind, bare, clamp) is None


def _activation_problem(kind: Any, instance: object, clamp: float | None) -> Problem | None:
    """Compare ``_apply_gate`` with clamped SwiGLU on numbers on both sides of the clamp."""
    most = 4.0 if clamp is None else 2.5 * clamp
    gate, up = torch.meshgrid(torch.linspace(-most, most, 33), torch.linspace(-most, most, 16), indexing="ij")
    limited = (gate, up) if clamp is None else (gate.clamp(max=clamp), up.clamp(-clamp, clamp))
    want = nn.functional.silu(limited[0]) * limited[1]
    allowed = "silu(gate) * up" + ("" if clamp is None else f", gate and up clamped at {clamp:g}")
    try:
        with torch.inference_mode(), torch.device("cpu"):
            got = kind._apply_gate(instance, torch.cat((gate, up), dim=1))
    except Exception as error:
        return Problem("_apply_gate", str(error), allowed)
    if got.shape == want.shape and torch.allclose(got.float(), want, rtol=1e-4, atol=1e-4):
        return None
    return Problem("_apply_gate", "another activation", allowed)


def weight_format(parameters: Parameters) -> WeightFormat:
    """Format of the parameters as they are.

    Raises:
        WeightError: a dtype that no format has.
    """
    dtype = parameters.gate_up.dtype
    if dtype == torch.bfloat16:
        return "bf16"
    if dtype == fp8_block.E4M3:
        return "fp8_block"
    if dtype in (torch.int8, torch.uint8) and parameters.gate_up_scale is not None:
        return "mxfp4"
    raise WeightError(
        "gate_up_proj",
        str(dtype),
        "torch.bfloat16, or e4m3 with 128x128 scales, or packed E2M1 with UE8M0 scales",
        "Load the model with dtype=torch.bfloat16.",
    )


def input_scales(parameters: Parameters) -> ScaleFormat:
    """Scales of the quantised input: powers of two where the FP8 weights have them (``scale_fmt="ue8m0"``)."""
    scale = parameters.gate_up_scale
    fp8 = parameters.gate_up.dtype == fp8_block.E4M3
    return "ue8m0" if fp8 and scale is not None and scale.dtype == torch.float8_e8m0fnu else "float32"


def spec_of(parameters: Parameters, ranks: int, topk: int, clamp: float | None) -> MoESpec:
    """The layer of which these are one rank's experts.

    Raises:
        InputError: `topk` exceeds the experts (ids of the wrong shape).
    """
    local, hidden, intermediate = parameters.down.shape
    if weight_format(parameters) == "mxfp4":
        intermediate *= 2
    if topk > ranks * local:
        raise InputError("top_k_index", f"{topk} columns", f"at most {ranks * local}, the experts", "Pass [T, k].")
    return MoESpec(
        hidden=hidden,
        intermediate=intermediate,
        experts=ranks * local,
        topk=topk,
        clamp=clamp,
        input_scales=input_scales(parameters),
    )


def expert_weights(parameters: Parameters, first_expert: int, *, quantize: bool) -> ExpertWeights:
    """The parameters as `ExpertWeights`: views of them, or (BF16 and `quantize`) FP8 copies.

    Raises:
        FormatError: sizes that FP8 cannot hold.
        WeightError: an unknown dtype; NaN or Inf in weights that are quantised.
    """
    stored = weight_format(parameters)
    w13, w2 = parameters.gate_up.detach(), parameters.down.detach()
    s13, s2 = (None if s is None else s.detach() for s in parameters[2:])
    if stored == "bf16" and quantize:
        (w13, s13), (w2, s2) = fp8_block.quantize_weights(w13), fp8_block.quantize_weights(w2)
        stored = "fp8_block"
    if stored == "mxfp4":
        w13, w2 = w13.view(torch.uint8), w2.view(torch.uint8)
    return ExpertWeights(format=stored, w13=w13, w2=w2, w13_scale=s13, w2_scale=s2, first_expert=first_expert)


def changes(parameters: Sequence[torch.Tensor | None]) -> tuple[tuple[int, int], ...]:
    """Address and version of every tensor: differs after it was replaced, or written to in place where torch counts.

    Writes through ``.data`` and under inference mode are not counted.
    """
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in parameters if t is not None)
