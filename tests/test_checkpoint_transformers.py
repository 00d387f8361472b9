"""Checkpoints written by Transformers itself, and its own reading of FP8 and FP4 blocks as a second opinion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megamoe
from megamoe.formats import fp8_block, mxfp4

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
}


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_key_value_heads=1, head_dim=128, mlp_only_layers=[1]
    )
    return transformers.Qwen3MoeForCausalLM(config).bfloat16()


def deepseek_v3() -> Any:
    config = transformers.DeepseekV3Config(
        **SMALL,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=2,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
    )
    return transformers.DeepseekV3ForCausalLM(config).bfloat16()


def deepseek_v4() -> Any:
    sizes = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
    config = transformers.DeepseekV4Config(
        **sizes,
        n_routed_experts=4,
        head_dim=64,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=32,
        num_hash_layers=1,
    )
    return transformers.DeepseekV4ForCausalLM(config).bfloat16()


@pytest.mark.parametrize("original_names", [True, False])
@pytest.mark.parametrize(("make", "moe_layers"), [(qwen3_moe, (0, 2)), (deepseek_v3, (1, 2)), (deepseek_v4, (0, 1, 2))])
def test_saved_bf16_models(tmp_path: Path, make: Any, moe_layers: tuple[int, ...], original_names: bool) -> None:
    """Per-expert names and sharded files as published, and the fused names of the modules."""
    model = make()
    model.save_pretrained(tmp_path, save_original_format=original_names, max_shard_size="400KB")
    opened = megamoe.checkpoint(tmp_path, layer=2)
    assert opened.moe_layers == moe_layers
    assert opened.format == "bf16"
    clamp = 10.0 if make is deepseek_v4 else None
    assert opened.spec == megamoe.MoESpec(hidden=256, intermediate=128, experts=4, topk=2, clamp=clamp)
    weights = opened.read(1, 3)
    experts = model.model.layers[2].mlp.experts
    assert torch.equal(weights.w13, experts.gate_up_proj[1:4])
    assert torch.equal(weights.w2, experts.down_proj[1:4])
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("model.layers.2.mlp.experts.gate_up_proj" in names) is not original_names


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_blocks_mean_the_same_to_transformers(scale_format: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    q, s = fp8_block.quantize_weights(torch.randn(256, 384), scale_format)
    other = Fp8Dequantize(None)._dequantize_one(q, s, output_dtype=torch.float32)
    assert torch.equal(fp8_block.dequantize_weights(q, s), other)


def test_packed_fp4_means_the_same_to_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    packed, scale = mxfp4.quantize(torch.randn(128, 256))
    other = Fp8Dequantize(None)._dequantize_one(packed.view(torch.int8), scale, output_dtype=torch.float32)
    assert torch.equal(mxfp4.dequantize(packed, scale), other)
