"""A small selection that compute-sanitizer can go through in seconds: every kind of plan, few blocks, long deadlines.

``compute-sanitizer --tool memcheck --report-api-errors no --kernel-name kns=mega python -m pytest -m sanitize``; the
same with synccheck and racecheck; initcheck without the name, because it must see who wrote what a kernel reads.
Without the tool they are ordinary tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fused_cases import PLANS, SMALL, make_input, make_weights, slice_of

from megamoe import ExpertWeights, reference
from megamoe.control import Control
from megamoe.cuda.engine import CudaEngine
from megamoe.cuda.fused import job, sizes_of
from megamoe.cuda.plan import Plan
from megamoe.cuda.toolchain import Job
from megamoe.engine import Call, Placement
from megamoe.formats.layout import interleave_gate_up

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]

END_TO_END = 8e-3
CAP = 96
TOKENS = 90
BLOCKS = 16
"""Blocks of a rank: few, so that each has several tiles and a tool has little to do."""
DEADLINES = {1: 60.0, 2: 15.0}
"""Seconds of a wait; ranks that a tool runs one after the other would wait as long."""
GUARD = 64
KINDS = (*PLANS, "rows")


def plan_of(kind: str) -> Plan:
    """The plan of a kind; a tool makes waits inside a CTA long too."""
    return replace(PLANS["mixed" if kind == "rows" else kind], pipeline_limit_ticks=60)


def jobs() -> list[Job]:
    """All that is compiled here, for a script that compiles it before a tool slows everything down."""
    made = [job(plan_of(kind), sizes_of(SMALL, 1, CAP)) for kind in PLANS]
    made.append(job(replace(plan_of("rows"), weights="rows"), sizes_of(SMALL, 1, CAP)))
    return [*made, *(job(plan_of(kind), sizes_of(SMALL, 2, CAP)) for kind in ("swap", "mixed"))]


@dataclass(frozen=True)
class Layer:
    """The weights on the CPU and on the GPU, and those with alternating rows, which are read where they are."""

    cpu: ExpertWeights
    gpu: ExpertWeights
    rows: ExpertWeights


def moved(weights: ExpertWeights) -> ExpertWeights:
    tensors = {name: getattr(weights, name).cuda() for name in ("w13", "w2", "w13_scale", "w2_scale")}
    return replace(weights, **tensors)


@pytest.fixture(scope="module")
def layer() -> Layer:
    cpu = make_weights(SMALL, "cpu")
    alternating = interleave_gate_up(cpu.w13.view(torch.uint8)).view(cpu.w13.dtype)
    return Layer(cpu, moved(cpu), moved(replace(cpu, w13=alternating, gate_up="interleaved8")))


@pytest.fixture(scope="module", autouse=True)
def launches() -> Iterator[dict[str, int]]:
    """Calls by kind of plan, said at the end: what a tool has seen."""
    counted: dict[str, int] = {}
    yield counted
    print(f"\nfused kernels: {sum(counted.values())} launches, {len(counted)} kinds of plan")


def make_engine(layer: Layer, kind: str, ranks: int = 1) -> CudaEngine:
    blocks = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    made = CudaEngine(
        SMALL,
        Placement(ranks=ranks, local=tuple(range(ranks))),
        Control(None),
        CAP,
        deadline=DEADLINES[ranks],
        plan=plan_of(kind),
        sm_reserve=blocks - BLOCKS * ranks,
    )
    weights = layer.rows if kind == "rows" else layer.gpu
    made.load([weights] if ranks == 1 else [slice_of(weights, r, ranks) for r in range(ranks)])
    return made


def given(seed: int, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    """Inputs on the CPU: an expert that most tokens go to, an expert twice, routes that are skipped."""
    x, ids, weights = make_input(SMALL, tokens, "cpu", seed)
    ids[: tokens * 3 // 4, 0] = 3
    ids[5:10, 1] = ids[5:10, 0]
    ids[10:15, 1] = -1
    weights[10:15, 1] = float("nan")
    ids[15:18] = -1
    return x, ids, weights


def poison(engine: CudaEngine, ranks: int) -> None:
    """NaN in everything that a call must write before it reads it."""
    names = ("x", "x_scales", "ids", "route_weights", "positions", "y", "routes", "targets", "pool_weights")
    for index in range(ranks):
        for name in (*names, "x_pool", "x_pool_scales", "h_pool", "h_pool_scales"):
            engine.buffers(index).view(name).view(torch.uint8).fill_(0xFF)


def call_of(inputs: tuple[torch.Tensor, ...], count: int | torch.Tensor | None = None) -> tuple[Call, torch.Tensor]:
    """A call on the GPU, its output poisoned inside a larger poisoned buffer, which is returned too."""
    x, ids, weights = (t.cuda() for t in inputs)
    around = torch.full((x.shape[0] + 2 * GUARD, x.shape[1]), 7.0).bfloat16().cuda()
    call = Call(
        x=x,
        scales=None,
        expert_ids=ids,
        expert_weights=weights,
        out=around[GUARD : GUARD + x.shape[0]],
        num_tokens=x.shape[0] if count is None else count,
        bound=CAP,
        plain=x.shape[0] != 23,  # the kernel stages all others itself
    )
    return call, around


def check(layer: Layer, inputs: tuple[torch.Tensor, ...], around: torch.Tensor, count: int) -> None:
    """The first `count` rows are the oracle's, everything else in the buffer is untouched."""
    found = around.cpu()
    rows = found[GUARD : GUARD + count]
    assert bool((found[:GUARD] == 7.0).all())
    assert bool((found[GUARD + count :] == 7.0).all())
    if count:
        want = reference.forward(SMALL, layer.cpu, *(t[:count] for t in inputs))
        assert reference.relative_error(rows, want) < END_TO_END


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plan(layer: Layer, launches: dict[str, int], kind: str) -> None:
    engine = make_engine(layer, kind)
    try:
        for seed, tokens in ((1, TOKENS), (2, 0), (3, 1), (4, 23)):
            inputs = given(seed, tokens)
            call, around = call_of(inputs)
            poison(engine, 1)
            engine.forward([call])
            engine.check()
            check(layer, inputs, around, tokens)
            launches[kind] = launches.get(kind, 0) + 1
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["swap", "mixed"])
def test_replays(layer: Layer, launches: dict[str, int], kind: str) -> None:
    """A captured call with new inputs and counts, none of its tokens too."""
    engine = make_engine(layer, kind)
    try:
        count = torch.zeros((), dtype=torch.int32).cuda()
        call, around = call_of(given(1), count)
        engine.warmup(CAP)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            engine.forward([call])
        blank = torch.full(tuple(around.shape), 7.0).bfloat16()
        for seed, tokens in ((5, TOKENS), (6, 0), (7, 31)):
            inputs = given(seed)
            for target, source in zip((call.x, call.expert_ids, call.expert_weights), inputs, strict=True):
                target.copy_(source)
            around.copy_(blank)
            count.copy_(torch.tensor(tokens, dtype=torch.int32))
            poison(engine, 1)
            graph.replay()
            engine.check()
            check(layer, inputs, around, tokens)
            launches[kind] = launches.get(kind, 0) + 1
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["swap", "mixed"])
@pytest.mark.parametrize("counts", [(50, 40), (0, 17), (0, 0)], ids=str)
def test_two_ranks(layer: Layer, launches: dict[str, int], kind: str, counts: tuple[int, int]) -> None:
    """Two kernels that wait for each other: a tool must let them run side by side."""
    engine = make_engine(layer, kind, ranks=2)
    try:
        whole = given(8, sum(counts))
        parts = [tuple(t[: counts[0]] for t in whole), tuple(t[counts[0] :] for t in whole)]
        made: list[Any] = [call_of(part) for part in parts]
        poison(engine, 2)
        engine.forward([call for call, _ in made])
        engine.check()
        for (_, around), part, n in zip(made, parts, counts, strict=True):
            check(layer, part, around, n)
        launches[kind] = launches.get(kind, 0) + 2
    finally:
        engine.close()
