"""One layer of a checkpoint over several processes, each with its own experts and its own tokens.

    python examples/make_checkpoint.py /tmp/tiny
    torchrun --nproc-per-node 4 examples/torchrun_layer.py /tmp/tiny/deepseek-v3 1

Needs Transformers for the model's router. Without a GPU the ranks talk through gloo.
"""

import sys

import torch
import torch.distributed as dist

import megamoe
from megamoe.hf import Router

directory, layer_index = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

checkpoint = megamoe.checkpoint(directory, layer=layer_index)
router = Router(directory, layer_index)

with megamoe.MegaMoE(checkpoint.spec, dist.group.WORLD, max_tokens=64) as layer:
    layer.load(checkpoint)  # reads this rank's experts only
    tokens = 16 * rank  # ranks may differ; rank 0 has none
    x = torch.randn(tokens, checkpoint.spec.hidden).bfloat16()
    ids, weights = router(x)
    y = layer(x, ids, weights)
    print(f"rank {rank} of {ranks}: {tokens} tokens in, {tuple(y.shape)} out, routes received {layer.stats.tolist()}")

dist.destroy_process_group()
