"""The fused kernel against the oracle, and against itself: plans, ranks, batch sizes."""

from __future__ import annotations

import pytest
import torch
from fused_cases import PLANS, SMALL, call_engine, make_engine, make_input, make_weights, split

from megamoe import MoESpec, reference

pytestmark = pytest.mark.gpu

END_TO_END = 8e-3


@pytest.fixture(scope="module")
def small():
    return make_weights(SMALL, "cuda")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("tokens", [1, 7, 40, 200])
def test_one_rank_agrees_with_the_oracle(small, name, tokens):
    x, ids, weights = make_input(SMALL, tokens, "cuda")
    engine = make_engine(SMALL, small, plan=PLANS[name])
    (y,) = call_engine(engine, [(x, ids, weights)])
    engine.close()
    want = reference.forward(SMALL, small, x, ids, weights)
    assert reference.relative_error(y, want) < END_TO_END


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bits_do_not_depend_on_plan_ranks_or_batch(small, ranks):
    inputs = make_input(SMALL, 8 * 25, "cuda")
    engine = make_engine(SMALL, small, plan=PLANS["mixed"])
    (base,) = call_engine(engine, [inputs])
    engine.close()
    counts = [25 * 8 // ranks] * ranks
    for name, plan in PLANS.items():
        engine = make_engine(SMALL, small, ranks=ranks, plan=plan)
        for _ in range(3):
            got = torch.cat(call_engine(engine, split(inputs, counts)))
            assert torch.equal(got, base), name
        engine.close()


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (5, 0, 0, 0), (0, 1, 100, 17), (130, 130, 0, 1)])
@pytest.mark.parametrize("name", ["swap", "mixed", "dispatch", "mixed-lag", "swap-waves"])
def test_uneven_ranks(small, counts, name):
    inputs = make_input(SMALL, sum(counts), "cuda")
    engine = make_engine(SMALL, small, ranks=4, plan=PLANS[name])
    got = torch.cat(call_engine(engine, split(inputs, counts)))
    engine.close()
    if sum(counts):
        want = reference.forward(SMALL, small, *inputs)
        assert reference.relative_error(got, want) < END_TO_END


@pytest.mark.parametrize("ranks", [1, 2])
def test_carried_tokens_have_the_bits_of_others(small, ranks):
    """Experts with 130, 141, 270 and 259 tokens: one or two full tiles that carry 2 to 14 more."""
    x, ids, weights = make_input(SMALL, 400, "cuda")
    ids[:, 0] = torch.tensor([0] * 130 + [1] * 141 + [2] * 129, device="cuda")
    ids[:, 1] = torch.tensor([2] * 141 + [3] * 259, device="cuda")
    results = []
    for name in ("mixed", "mixed-carrying"):
        engine = make_engine(SMALL, small, ranks=ranks, plan=PLANS[name], max_tokens=400)
        results.append(torch.cat(call_engine(engine, split((x, ids, weights), [400 // ranks] * ranks))))
        engine.close()
    assert torch.equal(*results)
    assert reference.relative_error(results[0], reference.forward(SMALL, small, x, ids, weights)) < END_TO_END


@pytest.mark.parametrize("name", ["swap", "wide", "mixed"])
def test_skipped_duplicate_and_hot_routes(small, name):
    x, ids, weights = make_input(SMALL, 150, "cuda")
    ids[:50] = 3
    ids[50:60, 1] = ids[50:60, 0]
    ids[60:80, 0] = -1
    weights[60:80, 0] = float("nan")
    ids[80:90] = -1
    engine = make_engine(SMALL, small, ranks=2, plan=PLANS[name])
    got = torch.cat(call_engine(engine, split((x, ids, weights), (70, 80))))
    received = torch.cat([engine.stats(0), engine.stats(1)])
    engine.close()
    want = reference.forward(SMALL, small, x, ids, weights)
    assert reference.relative_error(got, want) < END_TO_END
    assert torch.equal(got[80:90], torch.zeros_like(got[80:90]))
    assert received.tolist() == [int((ids == e).sum()) for e in range(SMALL.experts)]


@pytest.mark.parametrize("tokens", range(41))
def test_every_small_token_count(small, tokens):
    inputs = make_input(SMALL, tokens, "cuda")
    for name in ("swap", "mixed"):
        engine = make_engine(SMALL, small, plan=PLANS[name])
        (y,) = call_engine(engine, [inputs])
        engine.close()
        if tokens:
            assert reference.relative_error(y, reference.forward(SMALL, small, *inputs)) < END_TO_END


@pytest.mark.parametrize("name", ["swap", "mixed"])
def test_larger_layer(name):
    spec = MoESpec(hidden=4096, intermediate=2048, experts=32, topk=6, clamp=10.0)
    full = make_weights(spec, "cuda")
    inputs = make_input(spec, 300, "cuda")
    engine = make_engine(spec, full, plan=PLANS[name], max_tokens=1024)
    (y,) = call_engine(engine, [inputs])
    engine.close()
    assert reference.relative_error(y, reference.forward(spec, full, *inputs)) < END_TO_END
