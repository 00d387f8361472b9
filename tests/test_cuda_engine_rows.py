"""Weights that are read where their owner has them: the GPU engine and the real kernels, in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine_sim import World, world
from megamoe import ExpertWeights, MoESpec, reference
from megamoe.cuda.plan import Plan
from megamoe.errors import EngineError
from megamoe.formats.layout import interleave_gate_up
from megamoe.sim.requirements import missing
from moe_cases import make_call, make_weights, part

pytestmark = pytest.mark.skipif(bool(missing()), reason="the simulator needs g++, AVX2 and FSGSBASE")

SPEC = MoESpec(hidden=384, intermediate=256, experts=4, topk=2, clamp=10.0)  # w2 has three blocks of 128 rows
PLANS = {"swap": Plan(wide=False, stages=2), "mixed": Plan(stages=2)}
BOUND = 8e-3
FIELDS = ("w13", "w2", "w13_scale", "w2_scale")


@pytest.fixture
def sim() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return make_weights(SPEC, "fp8_block")


@pytest.fixture(scope="module")
def others() -> ExpertWeights:
    return make_weights(SPEC, "fp8_block", seed=1)


def interleaved(weights: ExpertWeights) -> ExpertWeights:
    """The same experts, 8 rows of gate and 8 of up in turn."""
    w13 = interleave_gate_up(weights.w13.view(torch.uint8)).view(weights.w13.dtype)
    return replace(weights, w13=w13, gate_up="interleaved8")


def on_gpu(sim: World, weights: ExpertWeights, rank: int = 0, offset: int = 0) -> ExpertWeights:
    """`weights`, whose values are in memory of the simulated GPU, `offset` bytes behind an aligned address."""
    placed = {
        name: sim.place(getattr(weights, name).view(torch.uint8), offset=offset, rank=rank).view(torch.float8_e4m3fn)
        for name in ("w13", "w2")
    }
    return replace(weights, **placed)


def overwrite(old: ExpertWeights, new: ExpertWeights, names: tuple[str, ...] = FIELDS) -> None:
    for name in names:
        getattr(old, name).view(torch.uint8).copy_(getattr(new, name).view(torch.uint8))


def error(call, weights: ExpertWeights, given) -> float:
    return float(reference.relative_error(call.out, reference.forward(SPEC, weights, *given)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_rows_and_tiles_give_the_same_bits(sim, weights, name, ranks):
    given = make_call(SPEC, 30)
    given[1][5] = -1
    local, share = SPEC.experts // ranks, 30 // ranks
    parts = [[t[r * share : (r + 1) * share].contiguous() for t in given] for r in range(ranks)]
    mixed = interleaved(weights)
    outs = []
    for kind in ("tiles", "rows"):
        engine = sim.engine(SPEC, ranks, max_tokens=32, plan=PLANS[name])
        if kind == "tiles":
            engine.load([part(weights, r * local, local) for r in range(ranks)])
        else:
            cut = [part(mixed, r * local, local) for r in range(ranks)]
            engine.load([on_gpu(sim, replace(one, gate_up="interleaved8"), r) for r, one in enumerate(cut)])
        assert engine._weights.layouts == (kind,) * ranks
        calls = [sim.call(*parts[r], rank=r) for r in range(ranks)]
        engine.forward(calls)
        outs.append(torch.cat([c.out for c in calls]))
    assert torch.equal(outs[0], outs[1])
    assert reference.relative_error(outs[0], reference.forward(SPEC, weights, *given)) < BOUND


def test_nothing_is_copied_but_scales(sim, weights):
    mine = on_gpu(sim, interleaved(weights))
    engine = sim.engine(SPEC, plan=PLANS["swap"])
    before = engine.memory["weights"]
    sim.gpu.allocated.clear()
    engine.load([mine])
    held = engine._weights.parts[0]
    assert (held.w13.data_ptr(), held.w2.data_ptr()) == (mine.w13.data_ptr(), mine.w2.data_ptr())
    assert sim.gpu.allocated == ["w13_scales of rank 0", "w2_scales of rank 0"]
    assert engine.memory["weights"] == 4 * (held.w13_scales.numel() + held.w2_scales.numel())
    assert before - engine.memory["weights"] == mine.w13.numel() + mine.w2.numel()
    assert engine.copied == ("w13_scale", "w2_scale")
    other = sim.engine(SPEC, plan=PLANS["swap"])
    other.load([weights])
    assert other.copied == ("w13", "w2", "w13_scale", "w2_scale")


def test_their_owner_overwrites_them(sim, weights, others):
    mine = on_gpu(sim, interleaved(weights))
    mine = replace(mine, w13_scale=mine.w13_scale.clone(), w2_scale=mine.w2_scale.clone())
    engine = sim.engine(SPEC, plan=PLANS["swap"])
    engine.load([mine])
    given = make_call(SPEC, 6)
    call = sim.call(*given)
    engine.forward([call])
    assert error(call, weights, given) < BOUND
    new = interleaved(others)
    overwrite(mine, new, ("w13", "w2"))  # values are read where they are, scales are a copy's
    engine.forward([call])
    half = replace(others, w13_scale=weights.w13_scale, w2_scale=weights.w2_scale)
    assert error(call, half, given) < BOUND
    overwrite(mine, new)
    engine.forward([call])
    assert error(call, half, given) < BOUND
    addresses = [t.data_ptr() for t in vars(engine._weights.parts[0]).values() if isinstance(t, torch.Tensor)]
    engine.load([mine])
    engine.forward([call])
    assert error(call, others, given) < BOUND
    assert addresses == [t.data_ptr() for t in vars(engine._weights.parts[0]).values() if isinstance(t, torch.Tensor)]


def test_a_captured_call_keeps_its_weights(sim, weights, others):
    mine, new = on_gpu(sim, interleaved(weights)), on_gpu(sim, interleaved(others))
    engine = sim.engine(SPEC, plan=PLANS["swap"])
    given = make_call(SPEC, 5)
    call = sim.call(*given)
    # Not captured yet: other tensors, and back.
    for one, wanted in ((mine, weights), (new, others), (mine, weights)):
        engine.load([one])
        engine.forward([call])
        assert error(call, wanted, given) < BOUND
    sim.gpu.in_capture = True
    engine.forward([call])
    sim.gpu.in_capture = False
    held = engine._weights.parts[0]
    for one in (new, weights, replace(mine, w2=new.w2)):
        with pytest.raises(EngineError, match=r"weights: got other tensors.*captured graphs.*new layer"):
            engine.load([one])
        assert engine._weights.parts == [held]
        engine.forward([call])
        assert error(call, weights, given) < BOUND
    engine.load([mine])
    engine.forward([call])
    assert error(call, weights, given) < BOUND


def test_rows_give_way_to_tiles_which_stay(sim, weights, others, caplog):
    engine = sim.engine(SPEC, plan=PLANS["swap"])
    given = make_call(SPEC, 5)
    call = sim.call(*given)
    engine.load([on_gpu(sim, interleaved(weights))])
    engine.forward([call])
    engine.load([others])
    engine.forward([call])
    assert error(call, others, given) < BOUND
    assert engine._weights.layouts == ("tiles",)
    address = engine._weights.parts[0].w13.data_ptr()
    assert "copied" not in caplog.text
    mine = on_gpu(sim, interleaved(weights))
    engine.load([mine])
    assert "weights of rank 0 are copied" in caplog.text
    assert engine._weights.parts[0].w13.data_ptr() == address
    assert "w13" in engine.copied
    engine.forward([call])
    assert error(call, weights, given) < BOUND


def test_an_odd_address_is_refused(sim, weights):
    engine = sim.engine(SPEC, plan=PLANS["swap"])
    engine.load([weights])
    fresh = sim.engine(SPEC, plan=PLANS["swap"])
    with pytest.raises(EngineError, match=r"weights.w13: got address.*multiple of 16 bytes.*clone"):
        fresh.load([on_gpu(sim, interleaved(weights), offset=8)])
    fresh.load([on_gpu(sim, interleaved(weights), offset=16)])
    given = make_call(SPEC, 3)
    call = sim.call(*given)
    fresh.forward([call])
    assert error(call, weights, given) < BOUND


def test_a_plan_follows_the_weights(sim, weights):
    """Whatever a forced plan says."""
    given = make_call(SPEC, 3)
    outs = []
    for plan in (PLANS["swap"], replace(PLANS["swap"], weights="rows")):
        for one in (weights, on_gpu(sim, interleaved(weights))):
            engine = sim.engine(SPEC, plan=plan)
            engine.load([one])
            assert engine.plan_for(16).weights == engine._weights.layouts[0]
            call = sim.call(*given)
            engine.forward([call])
            outs.append(call.out)
    assert all(torch.equal(out, outs[0]) for out in outs)
