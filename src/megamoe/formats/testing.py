"""Small synthetic expert layers and checkpoint directories, in the formats that real models use.

For tests, demonstrations and bug reports; nothing in the package needs it to run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file

from megamoe.errors import FormatError
from megamoe.formats import fp8_block, mxfp4
from megamoe.formats.shards import INDEX_NAME
from megamoe.spec import MoESpec, ScaleFormat, WeightFormat
from megamoe.weights import ExpertWeights

__all__ = ["NAME_STYLES", "NameStyle", "checkpoint_tensors", "random_weights", "write_checkpoint"]

NameStyle = Literal["hf", "deepseek_v4", "mixtral", "fused"]

NAME_STYLES: Final[dict[NameStyle, str]] = {
    "hf": "model.layers.N.mlp.experts.E.gate_proj.weight, .weight_scale_inv (DeepSeek-V3, Qwen3-MoE)",
    "deepseek_v4": "layers.N.ffn.experts.E.w1.weight, .scale (DeepSeek-V4)",
    "mixtral": "model.layers.N.block_sparse_moe.experts.E.w1.weight, .weight_scale_inv (Mixtral, MiniMax-M2)",
    "fused": "model.layers.N.mlp.experts.gate_up_proj, gate_up_proj_scale_inv (Transformers 5 modules)",
}


def random_weights(
    spec: MoESpec,
    weight_format: WeightFormat,
    *,
    first_expert: int = 0,
    count: int | None = None,
    seed: int = 0,
    scale_format: ScaleFormat = "float32",
) -> ExpertWeights:
    """Gaussian weights with a standard deviation of ``1 / sqrt(depth)``, quantised to `weight_format`.

    An expert's values depend on `seed` and its number only, so that any split over ranks holds the same layer.

    Args:
        spec: sizes.
        weight_format: format of the result.
        first_expert: first expert made.
        count: number of experts; None makes the rest.
        seed: of the random generator.
        scale_format: of fp8_block scales.

    Raises:
        FormatError: the format cannot hold the sizes.
    """
    spec.check_format(weight_format)
    count = spec.experts - first_expert if count is None else count
    parts: dict[str, list[torch.Tensor]] = {"w13": [], "w2": [], "w13_scale": [], "w2_scale": []}
    for expert in range(first_expert, first_expert + count):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
        shapes = {"w13": (2 * spec.intermediate, spec.hidden), "w2": (spec.hidden, spec.intermediate)}
        for name, shape in shapes.items():
            dense = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16()
            if weight_format == "bf16":
                parts[name].append(dense)
                continue
            value, scale = (
                fp8_block.quantize_weights(dense, scale_format)
                if weight_format == "fp8_block"
                else mxfp4.quantize(dense)
            )
            parts[name].append(value)
            parts[f"{name}_scale"].append(scale)
    stacked = {name: torch.stack(tensors) if tensors else None for name, tensors in parts.items()}
    w13, w2 = stacked["w13"], stacked["w2"]
    if w13 is None or w2 is None:
        raise FormatError("count", count, "at least one expert", "Ask for one.")
    return ExpertWeights(
        format=weight_format,
        w13=w13,
        w2=w2,
        w13_scale=stacked["w13_scale"],
        w2_scale=stacked["w2_scale"],
        first_expert=first_expert,
    )


def checkpoint_tensors(weights: ExpertWeights, layer: int, style: NameStyle = "hf") -> dict[str, torch.Tensor]:
    """The tensors of one expert layer under the names of `style` (see `NAME_STYLES`), as a checkpoint stores them."""
    half = weights.w13.shape[1] // 2
    as_stored = torch.int8 if weights.format == "mxfp4" else weights.w13.dtype
    w13, w2, s13, s2 = weights.w13.view(as_stored), weights.w2.view(as_stored), weights.w13_scale, weights.w2_scale
    if style == "fused":
        base = f"model.layers.{layer}.mlp.experts"
        tensors = {f"{base}.gate_up_proj": w13, f"{base}.down_proj": w2}
        if s13 is not None and s2 is not None:
            tensors |= {f"{base}.gate_up_proj_scale_inv": s13, f"{base}.down_proj_scale_inv": s2}
        return tensors
    block = {"hf": "model.layers.{}.mlp", "deepseek_v4": "layers.{}.ffn", "mixtral": "model.layers.{}.block_sparse_moe"}
    gate, up, down = ("gate_proj", "up_proj", "down_proj") if style == "hf" else ("w1", "w3", "w2")
    suffix = "scale" if style == "deepseek_v4" else "weight_scale_inv"
    tensors = {}
    for e in range(weights.local_experts):
        base = f"{block[style].format(layer)}.experts.{weights.first_expert + e}"
        tensors[f"{base}.{gate}.weight"] = w13[e, :half]
        tensors[f"{base}.{up}.weight"] = w13[e, half:]
        tensors[f"{base}.{down}.weight"] = w2[e]
        if s13 is not None and s2 is not None:
            rows = s13.shape[1] // 2
            tensors[f"{base}.{gate}.{suffix}"] = s13[e, :rows]
            tensors[f"{base}.{up}.{suffix}"] = s13[e, rows:]
            tensors[f"{base}.{down}.{suffix}"] = s2[e]
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_checkpoint(
    path: Path,
    spec: MoESpec,
    layers: Mapping[int, ExpertWeights],
    style: NameStyle = "hf",
    *,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``config.json`` and safetensors files that `megamoe.checkpoint` reads. Only expert tensors are written.

    Args:
        path: directory, made if it does not exist.
        spec: sizes for ``config.json``.
        layers: layer number to weights of all its experts.
        style: tensor names, a key of `NAME_STYLES`.
        shards: number of files; above 1 the tensors are dealt out in order and an index is written.
        config: further or overriding entries of ``config.json``.
    """
    path.mkdir(parents=True, exist_ok=True)
    first = next(iter(layers.values()))
    entries: dict[str, Any] = {
        "hidden_size": spec.hidden,
        "moe_intermediate_size": spec.intermediate,
        "n_routed_experts": spec.experts,
        "num_experts_per_tok": spec.topk,
        "num_hidden_layers": max(layers) + 1,
        "hidden_act": "silu",
    }
    if spec.clamp is not None:
        entries["swiglu_limit"] = spec.clamp
    if first.format != "bf16":
        entries["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0" if spec.input_scales == "ue8m0" else "float",
        }
    (path / "config.json").write_text(json.dumps(entries | dict(config or {}), indent=2), encoding="utf-8")
    tensors: dict[str, torch.Tensor] = {}
    for layer, weights in layers.items():
        tensors |= checkpoint_tensors(weights, layer, style)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    where: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (path / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
