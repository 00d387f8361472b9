"""Ranks as processes, through torch.distributed with gloo: results, refusals, disagreement, lateness, death.

Starting processes is what costs time, so each group of processes plays all its scenes in one life; the tests then look
at what every rank saw.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megamoe import ExpertWeights, MegaMoE, MoESpec, local_group, reference
from megamoe.control import Control
from megamoe.errors import (
    ClosedError,
    DeadlineError,
    EngineError,
    InputError,
    MegaMoEError,
    PeerError,
    SpecError,
    WeightError,
)
from moe_cases import SPEC, make_call, make_weights, part

RANKS = 4
TOKENS = {"uneven": (5, 0, 20, 1), "nobody": (0, 0, 0, 0), "one rank only": (0, 0, 0, 7), "even": (4, 4, 4, 4)}
Scene = Callable[[int], Any]


def calls_of(scene: str, ranks: int = RANKS) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    calls = [make_call(SPEC, tokens, seed=rank) for rank, tokens in enumerate(TOKENS[scene][:ranks])]
    if scene == "uneven":
        calls[0][1][0] = -1
        calls[0][2][0] = torch.nan  # not read behind -1
        calls[0][1][2, 1] = -1
        calls[2][1][:, 0] = 7  # a hot expert
    return calls


def caught(action: Callable[[], Any]) -> Any:
    """The action's result, or its error."""
    try:
        return action()
    except MegaMoEError as error:
        return error


def play_four(rank: int, _: Path) -> dict[str, Any]:
    """All scenes of the group of four, on one rank."""
    seen: dict[str, Any] = {}
    world = dist.group.WORLD
    layer = MegaMoE(SPEC, world, max_tokens=32, deadline=30)
    for weight_format in ("fp8_block", "mxfp4", "bf16"):
        layer.load(part(make_weights(SPEC, weight_format), 2 * rank, 2))
        for scene in TOKENS:
            seen[f"{weight_format} {scene}"] = layer(*calls_of(scene)[rank])
        seen[f"{weight_format} stats"] = layer.stats
    seen["facts"] = (layer.rank, layer.ranks, layer.first_expert, layer.local_experts)

    layer.load(make_weights(SPEC, "fp8_block"))  # the whole layer: each rank takes its part
    call = calls_of("even")[rank]
    good = layer(*call)

    def refused(name: str, action: Callable[[], Any]) -> None:
        """One rank or all refuse; afterwards the layer works as before."""
        start = time.monotonic()
        seen[name] = caught(action)
        seen[f"{name} seconds"] = time.monotonic() - start
        seen[f"{name} after"] = torch.equal(layer(*call), good)

    x, ids, weights = call
    refused("bad id", lambda: layer(x, ids + (99 if rank == 1 else 0), weights))
    refused("bad dtype", lambda: layer(x.half() if rank == 2 else x, ids, weights))
    refused("two bad", lambda: layer(x if rank in (1, 2) else x[:1], ids, weights))
    refused("too many tokens", lambda: layer(*(make_call(SPEC, 33) if rank == 3 else call)))
    refused("bound", lambda: layer(*call, bound=16 if rank == 3 else 32))
    refused("load", lambda: layer.load(part(make_weights(SPEC, "fp8_block"), 2, 2)))  # right on rank 1 only
    refused("format", lambda: layer.load(make_weights(SPEC, "bf16" if rank == 2 else "fp8_block")))
    refused("phase", lambda: layer.warmup() if rank == 0 else layer(*call))
    refused("warmup", lambda: layer.warmup(bound=16 if rank == 1 else 8))
    refused("warmup type", lambda: layer.warmup(bound=torch.tensor(8) if rank == 1 else 8))  # type: ignore[arg-type]
    refused("reader", lambda: layer.load(_Unreadable() if rank == 2 else make_weights(SPEC, "fp8_block")))

    other = MoESpec(hidden=256, intermediate=128, experts=8, topk=2) if rank == 3 else SPEC
    seen["spec"] = caught(lambda: MegaMoE(other, world, deadline=30))
    seen["max_tokens"] = caught(lambda: MegaMoE(SPEC, world, max_tokens=8 if rank == 0 else 64, deadline=30))
    seen["constructor"] = caught(lambda: MegaMoE(SPEC, world, max_tokens=-1 if rank == 1 else 64, deadline=30))
    seen["deadline"] = caught(lambda: MegaMoE(SPEC, world, deadline=0 if rank == 2 else 30))
    odd = MoESpec(hidden=256, intermediate=128, experts=6, topk=2)
    seen["experts"] = caught(lambda: MegaMoE(odd, world, deadline=30))

    # Two layers on two disjoint groups at once, each with its own traffic.
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with MegaMoE(SPEC, pairs[rank // 2], deadline=30) as half:
        half.load(make_weights(SPEC, "fp8_block"))
        seen["pair"] = (half.rank, half.ranks, half(*call))

    # A step fails on one rank (as if out of memory): the others hear of it before they wait for what it makes.
    for name, step in (("rows", "rows"), ("compute", "run")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                patch.setattr(layer._runtime.engine._experts[0], step, _out_of_memory)
            seen[name] = caught(lambda: layer(*call))
        seen[f"{name} after"] = torch.equal(layer(*call), good)

    # A late rank: the others give up; all agree on a new start.
    hasty = MegaMoE(SPEC, world, deadline=1.5)
    hasty.load(make_weights(SPEC, "fp8_block"))
    if rank == 1:
        time.sleep(3)
    seen["late"] = caught(lambda: hasty(*call))
    seen["late again"] = caught(lambda: hasty(*call))
    if rank in (0, 2):  # two ranks try alone, one of them twice
        seen["reset alone"] = [caught(hasty.reset) for _ in range(1 + (rank == 2))]
    dist.barrier()
    hasty.reset()
    seen["late after"] = torch.equal(hasty(*call), good)
    hasty.close()

    # A rank that is gone: the others fail at once, not at the deadline.
    dist.barrier()
    if rank == 3:
        return seen
    start = time.monotonic()
    seen["gone"] = caught(lambda: layer(*call))
    seen["gone seconds"] = time.monotonic() - start
    layer.close()
    seen["closed"] = caught(lambda: layer(*call))
    return seen


def _out_of_memory(*_: Any) -> Any:
    raise RuntimeError("not enough memory\nand a stack trace")


class _Unreadable:
    """A checkpoint of somebody else's making whose reader fails with an error that is not this package's."""

    spec = SPEC

    def read(self, first_expert: int = 0, count: int | None = None) -> ExpertWeights:
        raise KeyError("experts.3")


def _process(rank: int, ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    try:
        seen = play_four(rank, directory)
    except BaseException as error:
        seen = {"failed": error}
    torch.save(seen, directory / f"{rank}.pt")
    os._exit(0)  # rank 3 leaves like this in the middle of the others' last scene


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks saw."""
    directory = tmp_path_factory.mktemp("four")
    processes = mp.spawn(_process, args=(RANKS, directory), nprocs=RANKS, join=False)
    assert processes is not None
    deadline = time.monotonic() + 240
    while not processes.join(timeout=5):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            pytest.fail("the ranks hang")
    seen = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    for one in seen:
        if "failed" in one:
            raise one["failed"]
    return seen


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4", "bf16"])
@pytest.mark.parametrize("scene", TOKENS)
def test_results_agree_with_the_oracle(four: list[dict[str, Any]], weight_format: str, scene: str) -> None:
    w = make_weights(SPEC, weight_format)
    for rank, call in enumerate(calls_of(scene)):
        y = four[rank][f"{weight_format} {scene}"]
        assert y.shape == call[0].shape
        assert reference.relative_error(y, reference.forward(SPEC, w, *call)) < 8e-3


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4", "bf16"])
def test_processes_compute_what_a_local_group_does(four: list[dict[str, Any]], weight_format: str) -> None:
    with local_group(SPEC, ranks=RANKS) as group:
        group.load(make_weights(SPEC, weight_format))
        for scene in TOKENS:
            ys = group(*(list(column) for column in zip(*calls_of(scene), strict=True)))
            for seen, y in zip(four, ys, strict=True):
                assert reference.relative_error(seen[f"{weight_format} {scene}"], y) < 8e-3
        assert torch.equal(group.stats, torch.cat([seen[f"{weight_format} stats"] for seen in four]))
    assert [seen["facts"] for seen in four] == [(rank, 4, 2 * rank, 2) for rank in range(4)]


@pytest.mark.parametrize(
    ("scene", "guilty", "error", "message"),
    [
        ("bad id", {1}, InputError, r"rank 1: expert_ids\[0, 0\]"),
        ("bad dtype", {2}, InputError, "rank 2: x: got dtype float16"),
        ("two bad", {0, 3}, InputError, "rank 0: expert_ids: got shape.*rank 3: expert_ids"),
        ("too many tokens", {3}, InputError, "rank 3: x: got 33 tokens"),
        ("load", {0, 2, 3}, WeightError, r"rank 0: weights: got experts \[2, 4\)"),
        ("reader", {2}, EngineError, "rank 2: load: got KeyError: 'experts.3'"),
        ("warmup type", {1}, InputError, r"rank 1: bound: got tensor\(8\)"),
    ],
)
def test_a_refusal_reaches_all_ranks_at_once(
    four: list[dict[str, Any]], scene: str, guilty: set[int], error: type[Exception], message: str
) -> None:
    for rank, seen in enumerate(four):
        if rank in guilty:
            assert type(seen[scene]) is error
        else:
            assert type(seen[scene]) is PeerError
            with pytest.raises(PeerError, match=message):
                raise seen[scene]
        assert seen[f"{scene} seconds"] < 10
        assert seen[f"{scene} after"]


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        ("bound", "bound: got rank 3 has 16"),
        ("format", "weight format: got rank 2 has 'bf16'"),
        ("phase", "phase: got rank 0 has 'warmup'"),
        ("warmup", "bound: got rank 1 has 16"),
        ("spec", "topk: got rank 3 has 2"),
        ("max_tokens", "max_tokens: got rank 0 has 8"),
    ],
)
def test_disagreement_is_one_message_on_all_ranks(four: list[dict[str, Any]], scene: str, message: str) -> None:
    assert {type(seen[scene]) for seen in four} == {PeerError}
    assert len({str(seen[scene]) for seen in four}) == 1
    with pytest.raises(PeerError, match=message):
        raise four[0][scene]
    assert all(seen.get(f"{scene} after", True) for seen in four)


def test_constructor_refusals_reach_all_ranks(four: list[dict[str, Any]]) -> None:
    assert [type(seen["constructor"]) for seen in four] == [PeerError, InputError, PeerError, PeerError]
    assert "rank 1: max_tokens: got -1" in str(four[0]["constructor"])
    assert [type(seen["deadline"]) for seen in four] == [PeerError, PeerError, InputError, PeerError]
    assert "rank 2: deadline: got 0" in str(four[0]["deadline"])
    assert all(type(seen["experts"]) is SpecError for seen in four)


def test_disjoint_groups_do_not_meet(four: list[dict[str, Any]]) -> None:
    w = make_weights(SPEC, "fp8_block")
    for rank, (seen, call) in enumerate(zip(four, calls_of("even"), strict=True)):
        assert seen["pair"][:2] == (rank % 2, 2)
        assert reference.relative_error(seen["pair"][2], reference.forward(SPEC, w, *call)) < 8e-3


@pytest.mark.parametrize("step", ["rows", "compute"])
def test_a_failure_on_one_rank_reaches_all_ranks(four: list[dict[str, Any]], step: str) -> None:
    for rank, seen in enumerate(four):
        assert "not enough memory" in str(seen[step])
        assert "stack trace" not in str(seen[step])
        assert rank == 2 or (type(seen[step]) is PeerError and "rank 2" in str(seen[step]))
        assert seen[f"{step} after"]


def test_a_late_rank_is_a_deadline_and_reset_recovers(four: list[dict[str, Any]]) -> None:
    errors = [seen["late"] for seen in four]
    assert all(isinstance(error, (DeadlineError, PeerError)) for error in errors)
    assert any(isinstance(error, DeadlineError) and "within 1.5 s" in str(error) for error in errors)
    assert all("call on rank" in str(error) and "reset()" in str(error) for error in errors)
    for seen in (four[0], four[2]):
        assert all(type(error) is DeadlineError and "reset on rank" in str(error) for error in seen["reset alone"])
    for seen in four:
        assert type(seen["late again"]) is ClosedError
        assert "reset()" in str(seen["late again"])
        assert seen["late after"]


def test_a_dead_rank_is_noticed_before_the_deadline(four: list[dict[str, Any]]) -> None:
    for seen in four[:3]:
        assert type(seen["gone"]) is PeerError
        assert "call on rank" in str(seen["gone"])
        assert seen["gone seconds"] < 15
        assert type(seen["closed"]) is ClosedError


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(InputError, match="group"):
        MegaMoE(SPEC, group=object())  # type: ignore[arg-type]


def test_an_interrupted_exchange_needs_a_reset() -> None:
    class Interrupted:
        def allgather(self, *_: Any) -> Any:
            raise KeyboardInterrupt

    control = Control(None)
    control.size, control._group = 2, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        control.agree("call")
    with pytest.raises(ClosedError, match=r"error in 'call'.*reset\(\)"):
        control.agree("call")


def _alone(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    start = time.monotonic()
    result = caught(lambda: MegaMoE(SPEC, dist.group.WORLD, deadline=1.5)) if rank == 1 else None
    torch.save((result, time.monotonic() - start), directory / f"{rank}.pt")
    while not (directory / "1.pt").exists():
        time.sleep(0.1)
    os._exit(0)


def test_a_constructor_waits_no_longer_than_its_deadline(tmp_path: Path) -> None:
    """Rank 0 is there but never makes its layer; the process group itself would wait for half an hour."""
    processes = mp.spawn(_alone, args=(tmp_path,), nprocs=2, join=False)
    assert processes is not None
    deadline = time.monotonic() + 90
    while not processes.join(timeout=2):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            pytest.fail("the constructor hangs")
    error, seconds = torch.load(tmp_path / "1.pt", weights_only=False)
    assert type(error) is DeadlineError
    assert "construct on rank 1" in str(error)
    assert seconds < 20
