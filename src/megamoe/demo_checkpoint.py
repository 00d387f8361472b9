"""Small checkpoints in the format of the real ones, made with Transformers; nothing is downloaded.

The weights are random, with the spread that trained weights have where it matters for 8-bit arithmetic: rows of
different size, experts of different size, a few large channels in the norm before the experts. Names, sharding, index
and configuration are what Transformers and `huggingface_hub` write for the real models.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from megamoe.errors import InputError
from megamoe.formats.fp8_block import quantize_weights
from megamoe.hf import quiet_transformers, read_tensors, require_transformers
from megamoe.spec import BLOCK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["FAMILIES", "make_checkpoint"]

_SHARD: Final = "2MB"
"""Small enough that a layer's experts lie in several files, as they do in the large models."""


def _deepseek_v3() -> PreTrainedConfig:
    config: PreTrainedConfig = require_transformers().DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        num_nextn_predict_layers=0,
    )
    return config


def _qwen3_moe() -> PreTrainedConfig:
    config: PreTrainedConfig = require_transformers().Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=192,
        num_hidden_layers=3,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    return config


FAMILIES: Final[dict[str, Callable[[], PreTrainedConfig]]] = {"deepseek-v3": _deepseek_v3, "qwen3-moe": _qwen3_moe}
"""deepseek-v3: e4m3 linear weights with float32 ``weight_scale_inv`` per 128 x 128 block, sigmoid router with groups
and a correction bias, layer 0 dense. qwen3-moe: BF16, softmax router, every layer has experts."""


def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for name, tensor in model.state_dict().items():  # shares storage with the parameters and buffers
        if name.endswith("e_score_correction_bias"):
            value = 0.02 * normal(*tensor.shape)
        elif name.endswith("post_attention_layernorm.weight"):
            value = torch.exp(0.3 * normal(*tensor.shape))
            value[:: tensor.numel() // 4] *= 8.0
        elif tensor.dim() == 1:
            value = torch.exp(0.1 * normal(*tensor.shape))
        elif name.endswith("embed_tokens.weight"):
            value = normal(*tensor.shape)
        else:
            row_size = torch.exp(0.4 * normal(*tensor.shape[:-1], 1))
            expert_size = torch.exp(0.4 * normal(tensor.shape[0], 1, 1)) if tensor.dim() == 3 else 1.0
            value = normal(*tensor.shape) * row_size * expert_size * tensor.shape[-1] ** -0.5
        tensor.copy_(value)


def _quantise_like_deepseek(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every linear weight but the router's, the embedding's and the head's; ragged last blocks have a scale too."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        linear = tensor.dim() == 2 and "_proj" in name
        if not linear:
            result[name] = tensor.float() if name.endswith("e_score_correction_bias") else tensor
            continue
        rows, columns = tensor.shape
        padded = F.pad(tensor, (0, -columns % BLOCK, 0, -rows % BLOCK))
        values, scales = quantize_weights(padded)
        result[name] = values[:rows, :columns].clone()  # the writer refuses views of a larger tensor
        result[f"{name}_scale_inv"] = scales
    return result


def make_checkpoint(family: str, directory: str | Path, *, seed: int = 0) -> Path:
    """Write a tiny checkpoint, about 10 MB: sharded safetensors, index and config.json.

    Args:
        family: one of `FAMILIES`.
        directory: made if it does not exist; an older checkpoint in it is replaced.
        seed: of the weights.

    Returns:
        The directory.

    Raises:
        EngineError: Transformers is not installed.
        InputError: unknown family, or `directory` holds files that are not a checkpoint.
    """
    if family not in FAMILIES:
        raise InputError("family", family, ", ".join(FAMILIES), "Pick one of the listed families.")
    target = Path(directory)
    allowed = "an empty or new directory, or one with an older checkpoint"
    try:
        foreign = target.exists() and any(target.iterdir()) and not (target / "config.json").exists()
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("directory", str(target), allowed, f"{error}.") from error
    if foreign:
        raise InputError("directory", str(target), allowed, "Choose another one.")
    # Made beside its place and moved there when complete: a killed run leaves no half checkpoint behind.
    with quiet_transformers() as transformers, tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        config = FAMILIES[family]()
        model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(torch.bfloat16)
        _randomise(model, seed)
        if family == "deepseek-v3":
            _save_fp8(model, made)
        else:
            model.save_pretrained(made, max_shard_size=_SHARD)
            _publish_qwen3_config(made / "config.json")
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    return target


def _publish_qwen3_config(path: Path) -> None:
    """Name the number of experts as the published models do; Transformers 5 reads both names and writes another."""
    config = json.loads(path.read_text())
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _save_fp8(model: PreTrainedModel, target: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    # Transformers keeps the experts stacked in memory and writes one tensor per projection of each expert. Those names
    # are only known to its writer, so the quantised checkpoint is made from what it wrote.
    unquantised = target / "unquantised"
    model.save_pretrained(unquantised)
    tensors = read_tensors(unquantised, lambda _name: True)
    shutil.rmtree(unquantised)
    save_torch_state_dict(_quantise_like_deepseek(tensors), target, max_shard_size=_SHARD)
    config = model.config
    config.architectures = [type(model).__name__]
    config.quantization_config = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    config.save_pretrained(target)
