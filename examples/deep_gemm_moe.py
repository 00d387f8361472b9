"""A script written against DeepGEMM's MegaMoE calls for SM90; it names megamoe nowhere.

    python -m megamoe.integrations.deep_gemm examples/deep_gemm_moe.py
    torchrun --nproc-per-node 2 -m megamoe.integrations.deep_gemm examples/deep_gemm_moe.py

It quantises random experts and tokens, runs the fused call, and compares with the same arithmetic in float32, expert by
expert. Without a GPU it runs on CPU tensors through gloo.
"""

import os

import deep_gemm
import torch
import torch.distributed as dist
from deep_gemm.utils import per_block_cast_to_fp8, per_token_cast_to_fp8

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, CAPACITY, CLAMP = 512, 256, 16, 4, 256, 10.0

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29571")
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
dist.init_process_group("gloo", rank=rank, world_size=ranks)
group = dist.group.WORLD

buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(group, EXPERTS, CAPACITY, TOPK, HIDDEN, INTERMEDIATE)
device = buffer.x.device


def blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 experts and their scales."""
    values, scales = zip(*(per_block_cast_to_fp8(w, use_ue8m0=False) for w in weights), strict=True)
    return torch.stack(values), torch.stack(scales)


def dense(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 values of one quantised matrix or of rows."""
    rows = values.shape[0] // scales.shape[0]
    return values.float() * scales.repeat_interleave(rows, 0).repeat_interleave(128, 1)


# Every rank draws all experts and keeps its own, so that the comparison below needs no communication.
generator = torch.Generator().manual_seed(0)
l1 = blocks(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) * 2 * HIDDEN**-0.5)
l2 = blocks(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) * INTERMEDIATE**-0.5)
local = EXPERTS // ranks
mine = slice(rank * local, (rank + 1) * local)
l1_weights, l2_weights = deep_gemm.transform_weights_for_mega_moe_sm90(
    (l1[0][mine].to(device), l1[1][mine].to(device)), (l2[0][mine].to(device), l2[1][mine].to(device))
)

tokens = 24 + 8 * rank  # ranks may differ
generator.manual_seed(1 + rank)
x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
scores = torch.rand(tokens, EXPERTS, generator=generator).softmax(1)
weights, ids = scores.topk(TOPK, dim=1)
ids[0, 0] = -1  # a skipped route

q, s = per_token_cast_to_fp8(x, use_ue8m0=False, gran_k=128)
buffer.x[:tokens].copy_(q)
buffer.x_sf[:tokens].copy_(s)
buffer.topk_idx[:tokens].copy_(ids)
buffer.topk_weights[:tokens].copy_(weights)

y = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
received = torch.zeros(local, dtype=torch.int32, device=device)
deep_gemm.fp8_mega_moe(
    y,
    l1_weights,
    l2_weights,
    buffer,
    cumulative_local_expert_recv_stats=received,
    recipe=(128, 128, 128),
    activation="swiglu",
    activation_clamp=CLAMP,
    fast_math=True,
)

want = torch.zeros(tokens, HIDDEN)
for expert in range(EXPERTS):
    token, slot = (ids == expert).nonzero(as_tuple=True)
    if len(token) == 0:
        continue
    gate, up = (dense(q[token], s[token]) @ dense(l1[0][expert], l1[1][expert]).T).chunk(2, dim=1)
    h = torch.nn.functional.silu(gate.clamp(max=CLAMP)) * up.clamp(-CLAMP, CLAMP) * weights[token, slot, None]
    h = dense(*per_token_cast_to_fp8(h, use_ue8m0=False, gran_k=128))
    want.index_add_(0, token, h @ dense(l2[0][expert], l2[1][expert]).T)
error = float((y.cpu().float() - want).norm() / want.norm())
print(f"rank {rank} of {ranks}: {tokens} tokens, routes received {received.tolist()}, relative error {error:.1e}")
assert error < 8e-3, error

buffer.destroy()
dist.destroy_process_group()
