"""A rank that is seconds late for its first call, as one is that compiles a kernel which its peer had in its cache."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # in the child processes too
sys.path.insert(0, str(Path(__file__).parent))

from fused_cases import SMALL, make_input, make_weights

from megamoe import MegaMoE
from rank_processes import play_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS, TOKENS, LATE = 2, 64, 4.0


def _late(rank: int) -> dict[str, object]:
    torch.cuda.set_device(rank)
    weights, whole = make_weights(SMALL, "cuda"), make_input(SMALL, TOKENS, "cuda")
    with MegaMoE(SMALL, max_tokens=TOKENS, backend="cuda") as alone:
        alone.load(weights)
        want = alone(*whole)
        alone.check()
    size = TOKENS // RANKS
    part = slice(rank * size, (rank + 1) * size)
    layer = MegaMoE(SMALL, dist.group.WORLD, 256, "cuda", deadline=30.0)
    layer.load(weights)
    dist.barrier()
    start = time.perf_counter()
    if rank == 1:
        time.sleep(LATE)
    y = layer(*(t[part].contiguous() for t in whole))  # not warmed up
    layer.check()
    seconds = time.perf_counter() - start
    layer.close()
    return {"equal": torch.equal(y, want[part]), "seconds": seconds}


def test_the_others_wait_for_its_first_call(tmp_path):
    seen = play_ranks(_late, RANKS, tmp_path)
    assert [one["equal"] for one in seen] == [True, True]
    assert all(LATE <= float(one["seconds"]) < 30.0 for one in seen)
