"""Tiny Transformers models whose experts matter, their experts as `ExpertWeights`, and the oracle as an experts
implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

from megamoe import ExpertWeights, MoESpec, reference
from megamoe.formats import fp8_block, mxfp4

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 3,
}


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 2},
        intermediate_size=256,
        moe_intermediate_size=128,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_group=2,
        topk_group=2,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
    )


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SIZES, intermediate_size=256, moe_intermediate_size=128, num_experts=8, head_dim=64)


def _glm4_moe() -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **SIZES,
        intermediate_size=256,
        moe_intermediate_size=128,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        head_dim=64,
    )


def _minimax_m2() -> Any:
    from transformers import MiniMaxM2Config

    return MiniMaxM2Config(**SIZES, intermediate_size=128, num_local_experts=8, head_dim=64)


def _deepseek_v4() -> Any:
    from transformers import DeepseekV4Config

    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    return DeepseekV4Config(
        **sizes,
        moe_intermediate_size=128,
        n_routed_experts=8,
        head_dim=64,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=32,
        num_hash_layers=1,
        swiglu_limit=1.5,
    )


def has_expert_parallel() -> bool:
    """Whether the installed Transformers has implementations of expert parallelism to choose from (5.23 on)."""
    try:
        module = import_module("transformers.distributed.expert_parallel")
    except ModuleNotFoundError:
        return False
    return hasattr(module, "EPImplementation")


FAMILIES: dict[str, Callable[[], Any]] = {
    "deepseek-v3": _deepseek_v3,
    "qwen3-moe": _qwen3_moe,
    "glm4-moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
    "deepseek-v4": _deepseek_v4,
}


def make_model(family: str, seed: int = 0, hidden: int = 128) -> Any:
    """A BF16 model with weights of the spread that keeps every layer's output near 1."""
    import transformers

    config = FAMILIES[family]()
    config.hidden_size = hidden
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.dim() >= 2 and tensor.is_floating_point():
            fan_in = 1.0 if name.endswith("embed_tokens.weight") else tensor.shape[-1]
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * fan_in**-0.5)
    for experts in experts_of(model):
        experts.down_proj.data.mul_(3.0)
    for parameter in model.parameters():  # buffers (rotary frequencies) stay float32, as from_pretrained leaves them
        parameter.data = parameter.data.bfloat16()
    config.dtype = torch.bfloat16
    return model.eval()


def experts_of(model: nn.Module) -> Iterator[Any]:
    """The experts modules of a model."""
    return (module for name, module in model.named_modules() if name.endswith(".experts"))


def prompt(tokens: int = 16) -> torch.Tensor:
    """Two sequences of token ids."""
    return torch.randint(0, SIZES["vocab_size"], (2, tokens), generator=torch.Generator().manual_seed(7))


def quantize_experts(model: Any, expert_dtype: str = "fp8", scale_format: str = "float32") -> None:
    """Put Transformers' quantised experts modules in place of the model's, with the same weights quantised."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    for name, module in list(model.named_modules()):
        if not name.endswith(".experts"):
            continue
        with torch.device("meta"):
            kind = use_experts_implementation(
                experts_class=type("FP8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
            )
            scale_fmt = "float" if scale_format == "float32" else scale_format
            stated = {"expert_dtype": expert_dtype}
            if "expert_dtype" not in inspect.signature(FP8Experts.__init__).parameters:
                module.config.expert_dtype = expert_dtype  # where versions before 5.22 look
                stated = {}
            new = kind(config=module.config, block_size=(128, 128), scale_fmt=scale_fmt, **stated)
        for projection in ("gate_up_proj", "down_proj"):
            dense = getattr(module, projection).data
            if expert_dtype == "fp4":
                values, scales = mxfp4.quantize(dense)
                values = values.view(torch.int8)
            else:
                values, scales = fp8_block.quantize_weights(dense, scale_format)  # type: ignore[arg-type]
            setattr(new, projection, nn.Parameter(values, requires_grad=False))
            setattr(new, f"{projection}_scale_inv", nn.Parameter(scales, requires_grad=False))
        model.set_submodule(name, new)


def weights_of(experts: Any) -> ExpertWeights:
    """An experts module's parameters, read without megamoe's integration."""
    w13, w2 = experts.gate_up_proj.data, experts.down_proj.data
    if w13.dtype == torch.bfloat16:
        return ExpertWeights(format="bf16", w13=w13, w2=w2)
    packed = w13.dtype == torch.int8
    return ExpertWeights(
        format="mxfp4" if packed else "fp8_block",
        w13=w13.view(torch.uint8) if packed else w13,
        w2=w2.view(torch.uint8) if packed else w2,
        w13_scale=experts.gate_up_proj_scale_inv.data,
        w2_scale=experts.down_proj_scale_inv.data,
    )


def oracle_experts(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The oracle as an experts implementation."""
    held = weights_of(self)
    ue8m0 = held.format == "fp8_block" and held.w13_scale is not None and held.w13_scale.dtype != torch.float32
    spec = MoESpec(
        hidden=x.shape[1],
        intermediate=held.w13.shape[1] // 2,
        experts=held.local_experts,
        topk=ids.shape[1],
        clamp=getattr(self, "limit", None),
        input_scales="ue8m0" if ue8m0 else "float32",
    )
    y = reference.forward(spec, held, x, ids, weights.float())
    assert isinstance(y, torch.Tensor)
    return y


def register_oracle() -> None:
    """Make it known to Transformers as ``"oracle"``."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("oracle", oracle_experts)
    ALL_FP8_EXPERTS_FUNCTIONS.register("oracle", oracle_experts)


class Teacher:
    """Logits of models with teacher-forced tokens and routes: the first model chooses its experts, the others get the
    same ones. Else a token whose scores nearly tie could choose another expert after any rounding difference."""

    def __init__(self) -> None:
        self._routes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._taught = False

    def logits(self, model: Any, implementation: str | None = None) -> torch.Tensor:
        """Logits of `prompt`, under an experts implementation where one is named."""
        if implementation is not None:
            model.set_experts_implementation(implementation)
        turn = iter(list(self._routes))

        def route(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            if not self._taught:
                self._routes.append((arguments[1], arguments[2]))
                return arguments
            return (arguments[0], *(t.to(arguments[0].device) for t in next(turn)))

        hooks = [experts.register_forward_pre_hook(route) for experts in experts_of(model)]
        try:
            with torch.no_grad():
                result: torch.Tensor = model(prompt().to(model.device)).logits
        finally:
            for hook in hooks:
                hook.remove()
        self._taught = True
        return result


def logits(model: Any, implementation: str) -> torch.Tensor:
    """Logits of `prompt` with the model's own routes."""
    return Teacher().logits(model, implementation)
