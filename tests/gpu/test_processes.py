"""Ranks that are processes with a GPU each: the bits of one GPU, and every way in which a peer can fail a call."""

from __future__ import annotations

import os
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
from megamoe.errors import MegaMoEError
from rank_processes import play_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS = 2
TOKENS = 64


def _layer(max_tokens: int = 256, deadline: float = 5.0) -> MegaMoE:
    return MegaMoE(SMALL, dist.group.WORLD, max_tokens, "cuda", deadline=deadline)


def _given(rank: int, seed: int = 1, tokens: int = TOKENS) -> list[torch.Tensor]:
    whole = make_input(SMALL, tokens, "cuda", seed)
    size = tokens // RANKS
    return [t[rank * size : (rank + 1) * size].contiguous() for t in whole]


def _alone(rank: int, seed: int = 1, tokens: int = TOKENS) -> torch.Tensor:
    """What one rank on this GPU computes of this rank's tokens."""
    with MegaMoE(SMALL, max_tokens=tokens, backend="cuda") as layer:
        layer.load(make_weights(SMALL, "cuda"))
        y = layer(*_given(rank, seed, tokens))
        layer.check()
    return y


def _raised(action) -> str:
    try:
        action()
    except MegaMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _life(rank: int) -> dict[str, object]:
    torch.cuda.set_device(rank)
    seen: dict[str, object] = {}
    weights, given, want = make_weights(SMALL, "cuda"), _given(rank), _alone(rank)
    layer = _layer(deadline=2.0)
    layer.load(weights)
    layer.warmup()
    y = layer(*given)
    layer.check()
    seen["equal"] = torch.equal(y, want)

    # A second layer of the same sizes shares the arena; it works while the first lives and after it is gone.
    other = _layer(deadline=2.0)
    other.load(weights)
    other.warmup()
    seen["shared"] = layer._runtime.engine._workspace is other._runtime.engine._workspace
    seen["both"] = all(torch.equal(one(*given), want) for _ in range(10) for one in (layer, other))
    layer.check()
    other.close()

    # A graph, replayed with new inputs and late ranks.
    outs, bad = torch.empty_like(y), 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*given, out=outs)
    for seed in range(2, 30):
        for t, new in zip(given, _given(rank, seed), strict=True):
            t.copy_(new)
        if seed % RANKS == rank:
            torch.cuda._sleep(1_000_000 * (seed % 5))
        graph.replay()
        layer.check()
        bad += not torch.equal(outs, _alone(rank, seed))
    seen["graph"] = bad
    given = _given(rank)

    # Rank 1 refuses a call that rank 0 makes.
    if rank == 1:
        seen["refuses"] = _raised(lambda: layer(given[0].float(), *given[1:]))
    else:
        y = layer(*given)
        seen["refuses"] = _raised(layer.check)
        seen["refused nan"] = bool(y.isnan().all())
    seen["until reset"] = _raised(lambda: layer(*given))
    layer.reset()
    seen["after reset"] = all(torch.equal(layer(*given), want) for _ in range(5))
    layer.check()

    # Rank 1 comes after the deadline.
    dist.barrier()
    if rank == 0:
        y = layer(*given)
        seen["late"] = _raised(layer.check)
        seen["late nan"] = bool(y.isnan().all())
    dist.barrier()
    if rank == 1:
        y = layer(*given)
        seen["late"] = _raised(layer.check)
        seen["late nan"] = bool(y.isnan().all())
    layer.reset()
    seen["after late"] = all(torch.equal(layer(*given), want) for _ in range(5))

    # Errors of one rank alone do not stop the group.
    ids = given[1].clone()
    if rank == 0:
        ids[0, 0] = 999
    layer(given[0], ids, given[2])
    seen["id"] = _raised(layer.check)
    seen["after id"] = torch.equal(layer(*given), want)
    # Without a check the next call raises it, but the rank makes that call: the others wait for it.
    layer(given[0], ids, given[2])
    torch.cuda.synchronize()
    seen["id next"] = _raised(lambda: layer(*given))
    seen["after id next"] = all(torch.equal(layer(*given), want) for _ in range(3))
    seen["too many"] = _raised(lambda: layer(*_given(rank, 1, 1024)))  # on all ranks
    layer.reset()
    seen["after too many"] = torch.equal(layer(*given), want)
    layer.check()
    layer.close()
    layer.close()

    # Both processes on one GPU.
    torch.cuda.set_device(0)
    seen["one gpu"] = _raised(_layer)
    torch.cuda.set_device(rank)
    again = _layer()
    again.load(weights)
    seen["again"] = torch.equal(again(*given), want)
    again.check()
    again.close()
    return seen


def test_a_life(tmp_path):
    zero, one = play_ranks(_life, RANKS, tmp_path)
    for seen in (zero, one):
        for what in (
            "equal",
            "shared",
            "both",
            "after reset",
            "late nan",
            "after late",
            "after id",
            "after id next",
            "after too many",
        ):
            assert seen[what] is True, what
        assert seen["graph"] == 0
        assert seen["again"] is True
        assert "on one GPU" in str(seen["one gpu"])
        assert "call reset() on every rank" in str(seen["too many"])
    assert zero["refuses"] == (
        "PeerError: call: got rank 1 refused a call that this rank made; allowed: calls that all ranks make. "
        "See its error. Call reset() on the layer, on every rank."
    )
    assert zero["refused nan"] is True
    assert str(one["refuses"]).startswith("InputError: x: got")
    assert str(one["refuses"]).endswith("The other ranks were told: call reset() on every rank.")
    assert str(zero["until reset"]).startswith("ClosedError: layer: got rank 1 refused a call")
    assert str(one["until reset"]).startswith("ClosedError: layer: got rank 1 refused a call")
    assert str(zero["late"]).startswith("DeadlineError: call: got rank 0 waited for the peers' route counts")
    assert str(one["late"]).startswith("PeerError: call: got rank 0 waited in vain for the peers' route counts")
    assert str(zero["id"]).startswith("InputError: expert_ids: got a value out of range on rank 0")
    assert str(zero["id next"]).startswith("InputError: expert_ids: got a value out of range on rank 0")
    assert one["id"] == one["id next"] == "nothing"


def _killed(rank: int) -> dict[str, object]:
    torch.cuda.set_device(rank)
    layer = _layer(deadline=2.0)
    layer.load(make_weights(SMALL, "cuda"))
    layer.warmup()
    given = _given(rank)
    layer(*given)
    layer.check()
    dist.barrier()
    if rank == 1:
        torch.save({}, Path(os.environ["MEGAMOE_TEST_DIRECTORY"]) / "1.pt")
        os._exit(0)
    time.sleep(0.5)
    start = time.perf_counter()
    y = layer(*given)
    seen: dict[str, object] = {"call": _raised(layer.check), "seconds": time.perf_counter() - start}
    seen["nan"] = bool(y.isnan().all())
    seen["reset"] = _raised(layer.reset)
    seen["then"] = _raised(lambda: layer(*given))
    layer.close()
    torch.save(seen, Path(os.environ["MEGAMOE_TEST_DIRECTORY"]) / "0.pt")
    os._exit(0)


def test_a_killed_peer(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMOE_TEST_DIRECTORY", str(tmp_path))
    zero, _ = play_ranks(_killed, RANKS, tmp_path)
    assert str(zero["call"]).startswith("DeadlineError: call: got rank 0 waited for the peers' route counts")
    assert 1.9 < float(zero["seconds"]) < 10
    assert zero["nan"] is True
    assert str(zero["reset"]).startswith(("DeadlineError", "PeerError"))
    assert str(zero["then"]).startswith("ClosedError")


def _permuted(rank: int) -> dict[str, object]:
    # Before CUDA starts: what rank 1 calls device 0 is what rank 0 calls device 1, and torch's memory can grow.
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1" if rank == 0 else "1,0"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    torch.cuda.set_device(0)
    want = _alone(rank)
    layer = _layer()
    layer.load(make_weights(SMALL, "cuda"))
    layer.warmup()
    y = layer(*_given(rank))
    layer.check()
    return {"equal": torch.equal(y, want)}


def test_permuted_devices_and_expandable_segments(tmp_path):
    assert [seen["equal"] for seen in play_ranks(_permuted, RANKS, tmp_path)] == [True, True]
