"""A Transformers model with its experts on megamoe.

    python examples/transformers_experts.py                 # a tiny Qwen3-MoE, made on the spot; downloads nothing
    python examples/transformers_experts.py --checkpoint path/to/model --experts megamoe-fp8
    torchrun --nproc-per-node 2 examples/transformers_experts.py       # expert parallelism; needs accelerate

Prints how far the logits are from those of the host's own experts, and a few tokens. On several ranks Transformers
shards the model, and the layer of each rank holds its share of the experts. Without a GPU the ranks talk through gloo.
"""

import argparse
import dataclasses
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import megamoe.integrations.transformers as megamoe_transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--checkpoint", type=Path, help="a model's directory (default: a tiny one)")
parser.add_argument("--experts", choices=["megamoe", "megamoe-fp8"], help="default: megamoe-fp8 on a GPU")
parser.add_argument("--device", help="default: the rank's GPU, else cpu")
parser.add_argument("--new-tokens", type=int, default=8)
arguments = parser.parse_args()

scratch = tempfile.TemporaryDirectory()
path = arguments.checkpoint or scratch.name
if arguments.checkpoint is None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        num_experts=16,
        num_experts_per_tok=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.05,
    )
    # Before there is a process group: with one, Transformers saves on the first rank only.
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(path)

ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
device = torch.device(arguments.device or "cpu")
if arguments.device is None and torch.cuda.is_available():
    device = torch.device("cuda", rank % torch.cuda.device_count())
if device.type == "cuda":
    torch.cuda.set_device(device)
experts = arguments.experts or ("megamoe" if device.type == "cpu" else "megamoe-fp8")  # a GPU runs FP8 experts
options: dict[str, Any] = {"experts_implementation": experts}
if ranks > 1:
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    if "ep_implementation" in {field.name for field in dataclasses.fields(DistributedConfig)}:
        shared = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation="megamoe")
    else:  # before 5.23: the host brings the tokens, each rank runs its own experts
        shared = DistributedConfig(tp_size=ranks, enable_expert_parallel=True)
    options["distributed_config"] = shared

megamoe_transformers.register()

model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
if ranks == 1:
    model.to(device)
other = AutoModelForCausalLM.from_pretrained(path).eval().to(device)  # the host's own experts, on this rank alone

generator = torch.Generator().manual_seed(0)
ids = torch.randint(model.config.vocab_size, (2, 12), generator=generator).to(model.device)
with torch.inference_mode():
    got, want = model(ids).logits.float(), other(ids).logits.float()
    tokens = model.generate(ids[:1], max_new_tokens=arguments.new_tokens, do_sample=False)[0, ids.shape[1] :]
difference = float((got - want).norm() / want.norm())
print(
    f"rank {rank} of {ranks}: transformers {version('transformers')}, {model.config._experts_implementation}: "
    f"logits differ by {difference:.1e} from {other.config._experts_implementation}; tokens {tokens.tolist()}"
)

megamoe_transformers.release(model)  # on every rank, before the process group goes
if ranks > 1:
    dist.destroy_process_group()
