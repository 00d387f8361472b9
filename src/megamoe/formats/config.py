"""From a Hugging Face ``config.json`` to a `MoESpec`, refusing activations that the engines do not compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megamoe.errors import CheckpointError
from megamoe.spec import BLOCK, MoESpec

__all__ = ["check_fp8_config", "hidden_layers", "scales_are_ue8m0", "spec_from_config"]

_TEXT_CONFIGS: Final = ("text_config", "language_config", "llm_config")
_HIDDEN: Final = ("hidden_size",)
_INTERMEDIATE: Final = ("moe_intermediate_size", "intermediate_size")
_EXPERTS: Final = ("n_routed_experts", "num_experts", "num_local_experts")
_TOPK: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_ACTIVATION: Final = ("hidden_act", "hidden_activation")
_SILU: Final = ("silu", "swish")
# Clamp of model types whose configuration may leave it to the model's code.
_DEFAULT_CLAMP: Final = {"deepseek_v4": 10.0}


def spec_from_config(config: Mapping[str, Any]) -> MoESpec:
    """The routed-expert layer that `config` describes.

    Sizes come from ``hidden_size``, ``moe_intermediate_size`` (else ``intermediate_size``), ``n_routed_experts`` (else
    ``num_experts``, ``num_local_experts``) and ``num_experts_per_tok``, at the top or in ``text_config``; the clamp
    from ``swiglu_limit``; power-of-two input scales from ``quantization_config.scale_fmt == "ue8m0"``.

    Raises:
        CheckpointError: a size is missing, or the experts use another activation than (clamped) SwiGLU.
        SpecError: a size is out of range.
    """
    text = _text_config(config)
    activation = _first(text, _ACTIVATION)
    if activation is not None and activation not in _SILU:
        raise CheckpointError(
            "config.json: hidden_act", activation, "'silu' (SwiGLU experts)", "This model's experts cannot be run."
        )
    alpha = text.get("swiglu_alpha")
    if alpha is not None and alpha != 1.0:
        raise CheckpointError(
            "config.json: swiglu_alpha", alpha, "none or 1.0 (plain SwiGLU)", "This model's experts cannot be run."
        )
    return MoESpec(
        hidden=_size(text, _HIDDEN),
        intermediate=_size(text, _INTERMEDIATE),
        experts=_size(text, _EXPERTS),
        topk=_size(text, _TOPK),
        clamp=text.get("swiglu_limit", _DEFAULT_CLAMP.get(str(text.get("model_type")))),
        input_scales="ue8m0" if scales_are_ue8m0(config) else "float32",
    )


def hidden_layers(config: Mapping[str, Any]) -> int | None:
    """``num_hidden_layers``, if the configuration states it."""
    value = _text_config(config).get("num_hidden_layers")
    return value if isinstance(value, int) else None


def scales_are_ue8m0(config: Mapping[str, Any]) -> bool:
    """Whether the configuration declares UE8M0 scales."""
    return _quantization(config).get("scale_fmt") == "ue8m0"


def check_fp8_config(config: Mapping[str, Any]) -> None:
    """Refuse FP8 experts that are not quantised in 128 x 128 blocks or want static activation scales.

    Raises:
        CheckpointError: names the field.
    """
    quantization = _quantization(config)
    block = quantization.get("weight_block_size")
    if block is not None and block != [BLOCK, BLOCK]:
        raise CheckpointError(
            "config.json: quantization_config.weight_block_size",
            block,
            f"[{BLOCK}, {BLOCK}]",
            "Use an edition with 128x128 blocks, or a BF16 edition.",
        )
    scheme = quantization.get("activation_scheme")
    if scheme not in (None, "dynamic"):
        raise CheckpointError(
            "config.json: quantization_config.activation_scheme",
            scheme,
            "'dynamic'",
            "Activations are quantised per token and 128 columns; static scales would be ignored.",
        )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in _TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, Mapping) and _first(inner, _EXPERTS) is not None:
            return inner
    return config


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for holder in (config, _text_config(config)):
        value = holder.get("quantization_config")
        if isinstance(value, Mapping):
            return value
    return {}


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _first(config, names)
    if not isinstance(value, int):
        raise CheckpointError(
            f"config.json: {names[0]}",
            "missing" if value is None else repr(value),
            f"an integer under {' or '.join(names)}",
            "Pass the directory of a Mixture-of-Experts model.",
        )
    return value
