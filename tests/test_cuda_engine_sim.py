"""The GPU engine from a call's tensors to its output, with the real kernels in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine_sim import World, world
from megamoe import MoESpec, reference
from megamoe.cuda import memory
from megamoe.cuda.hosted import HostedRank
from megamoe.cuda.plan import Plan
from megamoe.errors import ClosedError, DeadlineError, EngineError, InputError, PeerError
from megamoe.formats import fp8_block
from megamoe.sim.requirements import missing
from moe_cases import make_call, make_weights, part

pytestmark = pytest.mark.skipif(bool(missing()), reason="the simulator needs g++, AVX2 and FSGSBASE")

SPEC = MoESpec(hidden=256, intermediate=128, experts=4, topk=2, clamp=10.0)
PLAN = Plan(wide=False, stages=2)
BOUND = 8e-3


@pytest.fixture
def sim() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.fixture(scope="module")
def weights():
    return make_weights(SPEC, "fp8_block")


def wanted(weights, call, spec=SPEC):
    return reference.forward(spec, weights, *call)


@pytest.mark.parametrize("plain", [True, False])
def test_a_call_is_one_kernel_or_a_staging_launch_more(sim, weights, plain):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    given = make_call(SPEC, 11)
    call = sim.call(*given, plain=plain)
    sim.driver.names.clear()
    engine.forward([call])
    assert sim.driver.names == (["mega"] if plain else ["stage_call", "mega"])
    assert reference.relative_error(call.out, wanted(weights, given)) < BOUND
    assert engine.stats(0).tolist() == [int((given[1] == e).sum()) for e in range(SPEC.experts)]
    engine.clear_stats()
    assert engine.stats(0).sum() == 0


def test_small_pools_and_a_plan_without_passes(sim, weights):
    """Refused where the bound allows more rows than there are; below it, and with passes, calls are right."""
    plan = replace(PLAN, direct_tokens=0)
    engine = sim.engine(SPEC, plan=plan, max_tokens=120, pool_rows=300)
    engine.load([weights])
    with pytest.raises(EngineError, match=r"plan.passes: got False.*bound 120: \d+ rows, of which the pools hold 296"):
        engine.warmup(120)
    small, large = make_call(SPEC, 9), make_call(SPEC, 110)
    few = sim.call(*small, bound=16)
    engine.forward([few])
    engine.force_plan(replace(plan, passes=True))
    many = sim.call(*large, bound=120)
    engine.forward([many])
    for call, given in ((few, small), (many, large)):
        assert reference.relative_error(call.out, wanted(weights, given)) < BOUND


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_any_strides_give_the_same_bits(sim, weights, id_type):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    x, ids, route_weights = make_call(SPEC, 5)
    base = sim.call(x, ids.int(), route_weights)
    engine.forward([base])
    h = SPEC.hidden
    # Rows that torch has to copy first are in tests/gpu: their memory is not the simulator's.
    variants = [
        (sim.place(x, (h + 8, 1)), sim.place(ids.to(id_type), (5, 2)), sim.place(route_weights, (1, 7))),
        (sim.place(x, (2 * h, 1), 16), sim.place(ids.to(id_type), (1, 5)), sim.place(route_weights, (3, 1), 1)),
    ]
    for tensors in variants:
        call = sim.call(*tensors)
        engine.forward([call])
        assert torch.equal(call.out, base.out)


@pytest.mark.parametrize("direct", [0, 1024])
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_the_kernel_stages_as_the_staging_kernel_does(sim, weights, id_type, direct):
    engine = sim.engine(SPEC, plan=Plan(wide=False, stages=2, direct_tokens=direct))
    engine.load([weights])
    x, ids, route_weights = make_call(SPEC, 13)
    apart = sim.call(x, ids.int(), route_weights, plain=False)
    engine.forward([apart])
    count = sim.place(torch.tensor([9], dtype=torch.int32))
    for tokens in (None, count):
        call = sim.call(x, ids.to(id_type), route_weights, num_tokens=tokens)
        sim.driver.names.clear()
        engine.forward([call])
        engine.check()
        assert sim.driver.names == ["mega"]
        rows = 13 if tokens is None else 9
        assert torch.equal(call.out[:rows], apart.out[:rows])
        assert bool((call.out[rows:] == 7).all())
    # Rows that its loads do not take as they lie go through the staging kernel (torch copies them: see tests/gpu).
    assert not HostedRank.stages_itself(sim.call(sim.place(x, offset=4), ids.to(id_type), route_weights, plain=True))


def test_ids_that_32_bits_do_not_hold(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    x, ids, route_weights = make_call(SPEC, 5)
    ids = ids.long()
    ids[2, 0] = (1 << 32) + 1  # 1 in its lower half
    engine.forward([sim.call(x, ids, route_weights)])
    with pytest.raises(InputError, match="expert_ids"):
        engine.check()


def test_quantised_input_with_strides(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    x, ids, route_weights = make_call(SPEC, 6)
    base = sim.call(x, ids, route_weights)
    engine.forward([base])
    q, scales = fp8_block.quantize_activations(x)
    rows = sim.place(q.view(torch.uint8), (SPEC.hidden + 8, 1)).view(torch.float8_e4m3fn)
    call = sim.call(rows, ids, route_weights, scales=sim.place(scales, (1, 6)))
    sim.driver.names.clear()
    engine.forward([call])
    assert sim.driver.names == ["copy_call", "mega"]
    assert torch.equal(call.out, base.out)


def test_a_count_on_the_device(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    given = make_call(SPEC, 9)
    count = sim.place(torch.zeros(1, dtype=torch.int32))
    want = wanted(weights, given)
    for n in (0, 4, 9):
        count.fill_(n)
        call = sim.call(*given, num_tokens=count)
        engine.forward([call])
        engine.check()
        assert bool((call.out[n:] == 7).all())
        if n:
            assert reference.relative_error(call.out[:n], want[:n]) < BOUND
    assert engine.stats(0).sum() == 13 * SPEC.topk


def test_values_out_of_range_are_raised_by_the_next_call(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    x, ids, route_weights = make_call(SPEC, 7)
    count = sim.place(torch.tensor([3], dtype=torch.int32))
    good = sim.call(x, ids, route_weights)
    for bad_id in (SPEC.experts, -2, 2**32 + 1, -(2**40)):
        bad = ids.clone()
        bad[2, 1] = bad_id
        call = sim.call(x, bad, route_weights)
        engine.forward([call])
        skipped = ids.clone()
        skipped[2, 1] = -1
        assert reference.relative_error(call.out, wanted(weights, (x, skipped, route_weights))) < BOUND
        with pytest.raises(InputError, match=r"expert_ids: got a value out of range on rank 0.*-1 to 3"):
            engine.forward([good])
        engine.forward([good])
    for n in (8, -1):
        count.fill_(n)
        engine.forward([sim.call(x, ids, route_weights, num_tokens=count)])
        with pytest.raises(InputError, match="num_tokens"):
            engine.check()
        engine.check()


def test_a_bad_value_does_not_keep_a_rank_from_a_call_that_other_processes_make(sim, weights, monkeypatch):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    monkeypatch.setattr(engine, "_alone", False)  # as if other processes waited for this rank
    x, ids, route_weights = make_call(SPEC, 7)
    bad = ids.clone()
    bad[2, 1] = SPEC.experts
    engine.forward([sim.call(x, bad, route_weights)])
    said = r"expert_ids: got a value out of range on rank 0.*This call was made.*do not repeat it"
    with pytest.raises(InputError, match=said):  # of the first call; the second one's is not lost
        engine.forward([sim.call(x, bad, route_weights)])
    call = sim.call(x, ids, route_weights)
    with pytest.raises(InputError, match=said):
        engine.forward([call])
    assert reference.relative_error(call.out, wanted(weights, (x, ids, route_weights))) < BOUND
    engine.forward([sim.call(x, ids, route_weights)])
    engine.check()


def test_other_processes_learn_of_a_call_that_fails_before_its_launch(sim, weights, monkeypatch):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    monkeypatch.setattr(engine, "_alone", False)
    told = []
    monkeypatch.setattr(engine._workspace, "raise_abort", lambda *words: told.append(words))
    monkeypatch.setattr(engine, "_enqueue_one", lambda *_: torch.empty(1, device="no such device"))
    call = sim.call(*make_call(SPEC, 7))
    with pytest.raises(EngineError, match=r"got RuntimeError.*The other ranks were told: call reset"):
        engine.forward([call])
    assert told == [(0, 0)]
    with pytest.raises(ClosedError, match="rank 0 refused a call"):
        engine.forward([call])


def test_what_is_raised_is_what_failed_even_where_nobody_can_be_told(sim, weights, monkeypatch):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    monkeypatch.setattr(engine, "_alone", False)
    monkeypatch.setattr(engine._workspace, "raise_abort", lambda *_: torch.empty(1, device="no such device"))
    with pytest.raises(InputError, match=r"x: got 7.*Use less. The other ranks could not be told"):
        engine.refuse(InputError("x", 7, "less", "Use less."))


def test_two_layers_share_a_workspace_and_nothing_else(sim, weights):
    other_weights = make_weights(SPEC, "fp8_block", seed=1)
    one, two = sim.engine(SPEC, plan=PLAN), sim.engine(SPEC, plan=PLAN)
    one.load([weights])
    two.load([other_weights])
    assert sum(what.startswith("arena") for what in sim.gpu.allocated) == 1
    given = make_call(SPEC, 6)
    for engine, mine in ((one, weights), (two, other_weights), (two, other_weights), (one, weights)):
        call = sim.call(*given)
        engine.forward([call])
        assert reference.relative_error(call.out, wanted(mine, given)) < BOUND
    bad = given[1].clone()
    bad[0, 0] = 99
    one.forward([sim.call(given[0], bad, given[2])])
    two.check()  # not its error
    with pytest.raises(InputError):
        one.check()
    assert one.stats(0).sum() == 3 * given[1].numel() - 1
    assert two.stats(0).sum() == 2 * given[1].numel()
    one.close()
    one.close()
    call = sim.call(*given)
    two.forward([call])
    assert reference.relative_error(call.out, wanted(other_weights, given)) < BOUND
    two.close()
    for engine in (one, two):
        with pytest.raises(ClosedError):
            engine.forward([call])
    sim.engine(SPEC, plan=PLAN)
    assert sum(what.startswith("arena") for what in sim.gpu.allocated) == 2
    sim.engine(SPEC, max_tokens=17)
    assert sum(what.startswith("arena") for what in sim.gpu.allocated) == 3


def test_a_layer_that_is_dropped_gives_its_share_back(sim):
    before = len(memory._live)
    sim.engine(SPEC)
    assert len(memory._live) == before + 1
    sim.engines.clear()
    assert len(memory._live) == before


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_gpu_and_agree_with_one(sim, weights, ranks):
    given = make_call(SPEC, 8)
    alone = sim.engine(SPEC, plan=PLAN)
    alone.load([weights])
    base = sim.call(*given)
    alone.forward([base])
    local = SPEC.experts // ranks
    engine = sim.engine(SPEC, ranks, plan=PLAN)
    engine.load([part(weights, r * local, local) for r in range(ranks)])
    share = 8 // ranks
    parts = [[t[r * share : (r + 1) * share].contiguous() for t in given] for r in range(ranks)]
    calls = [sim.call(*parts[r], rank=r) for r in range(ranks)]
    engine.forward(calls)
    assert torch.equal(torch.cat([c.out for c in calls]), base.out)
    assert (sim.gpu.forks, sim.gpu.joins) == (1, 1)


def two_gpus(sim, weights):
    """One rank on each of two GPUs, loaded, and its calls, like those of one rank with all tokens."""
    given = make_call(SPEC, 8)
    alone = sim.engine(SPEC, plan=PLAN)
    alone.load([weights])
    base = sim.call(*given)
    alone.forward([base])
    local = SPEC.experts // 2
    engine = sim.engine(SPEC, 2, devices=(0, 1), plan=PLAN)
    engine.load([part(weights, r * local, local) for r in range(2)])
    calls = [sim.call(*(sim.place(t[r * 4 : r * 4 + 4].contiguous(), rank=r) for t in given), rank=r) for r in range(2)]
    return engine, calls, base.out


def test_a_rank_on_each_gpu_agrees_with_one(sim, weights):
    engine, calls, want = two_gpus(sim, weights)
    assert [place.ordinal for place in engine._workspace.places] == [0, 1]
    for _ in range(2):
        engine.forward(calls)
        engine.check()
        assert torch.equal(torch.cat([c.out for c in calls]), want)
    assert sim.gpu.forks == 0  # each on its GPU's own stream


def test_a_refusal_ends_the_peers_calls_until_reset(sim, weights):
    engine, calls, want = two_gpus(sim, weights)
    engine._workspace.raise_abort(1, 1)  # what the host of a process does that refuses a call
    sim.driver.waiting_for = 1
    engine.forward_some(calls, [0])
    assert calls[0].out.isnan().all()
    with pytest.raises(PeerError, match=r"rank 1 refused a call.*reset\(\)"):
        engine.check()
    with pytest.raises(ClosedError, match="rank 1 refused"):
        engine.forward(calls)
    engine.reset()
    sim.driver.waiting_for = 2
    engine.forward(calls)
    engine.check()
    assert torch.equal(torch.cat([c.out for c in calls]), want)


def test_a_second_load_keeps_the_addresses(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    addresses = [w.w13.data_ptr() for w in engine._weights.parts]
    other = make_weights(SPEC, "fp8_block", seed=2)
    engine.load([other])
    assert [w.w13.data_ptr() for w in engine._weights.parts] == addresses
    given = make_call(SPEC, 4)
    call = sim.call(*given)
    engine.forward([call])
    assert reference.relative_error(call.out, wanted(other, given)) < BOUND


def test_refused_weights_leave_the_earlier_ones(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    for kind in ("bf16", "mxfp4"):
        with pytest.raises(EngineError, match=rf"weights.format: got {kind}.*convert_to='fp8_block'"):
            engine.load([make_weights(SPEC, kind)])
    given = make_call(SPEC, 4)
    call = sim.call(*given)
    engine.forward([call])
    assert reference.relative_error(call.out, wanted(weights, given)) < BOUND


def test_the_first_call_in_a_capture_is_refused(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    given = make_call(SPEC, 4)
    sim.gpu.in_capture = True
    with pytest.raises(EngineError, match=r"warmup\(16\)"):
        engine.forward([sim.call(*given)])
    sim.gpu.in_capture = False
    engine.warmup(16)
    sim.gpu.in_capture = True
    synchronized = sim.gpu.synchronized
    call = sim.call(*given)
    engine.forward([call])
    assert reference.relative_error(call.out, wanted(weights, given)) < BOUND
    assert sim.gpu.synchronized == synchronized


def test_calls_follow_each_other_across_streams(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    call = sim.call(*make_call(SPEC, 2))
    engine.forward([call])
    before = sim.gpu.followed
    engine.forward([call])
    assert sim.gpu.followed == before
    sim.gpu.current += 1
    engine.forward([call])
    assert sim.gpu.followed == before + 1


def test_out_with_rows_apart(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    engine.load([weights])
    given = make_call(SPEC, 3)
    out = sim.place(torch.full((3, SPEC.hidden), 7.0).bfloat16(), (SPEC.hidden + 8, 1), 8)
    call = sim.call(*given, out=out)
    engine.forward([call])
    assert reference.relative_error(out, wanted(weights, given)) < BOUND
    around = out.as_strided((3, 8), (SPEC.hidden + 8, 1), out.storage_offset() - 8)
    assert bool((around == 0).all())


def test_an_expired_wait_is_an_error_until_reset(sim, weights):
    engine = sim.engine(SPEC, plan=PLAN)
    other = sim.engine(SPEC, plan=PLAN)
    for one in (engine, other):
        one.load([weights])
    given = make_call(SPEC, 3)
    call = sim.call(*given)
    words = engine._workspace.reports[0]
    words[:6] = torch.tensor([1, 0, 4, 2, 9, 5], dtype=torch.int32)  # as the kernel records it
    with pytest.raises(DeadlineError, match=r"rank 0 waited for token rows \(2\): awaited 9, saw 5.*reset"):
        engine.forward([call])
    for one in (engine, other):
        with pytest.raises(ClosedError, match="token rows"):
            one.forward([call])
    engine.reset()
    for one in (engine, other):
        call.out.fill_(7)
        one.forward([call])
        assert reference.relative_error(call.out, wanted(weights, given)) < BOUND


def test_memory_is_known_before_it_is_taken(sim, weights, caplog):
    with caplog.at_level("INFO", "megamoe"):
        engine = sim.engine(SPEC)
    assert "arena" in caplog.text
    engine.load([weights])
    buffers, loaded = engine._workspace.buffers[0], engine._weights.parts[0]
    assert engine.memory == {
        "arena": buffers.arena.numel(),
        "workspace": buffers.workspace.numel(),
        "weights": loaded.nbytes,
    }
