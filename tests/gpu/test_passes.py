"""Calls that need more rows than the pools have: several passes, the same bits."""

from __future__ import annotations

import pytest
import torch
from fused_cases import DEADLINE, SMALL, call_engine, make_engine, make_input, make_weights, plan

from megamoe import local_group, reference

pytestmark = pytest.mark.gpu

POOL_ROWS = 512
PLANS = {
    "swap": plan(wide=False, stages=4, direct_tokens=0, passes=True),
    "mixed": plan(direct_tokens=0, urgent_tokens=40, pulled_rows=3, passes=True),
    "lag": plan(wave_experts=2, lag=1, staging_buffers=2, pulled_rows=2, direct_tokens=0, passes=True),
    "alternating": plan(link_bytes=1, direct_tokens=0, passes=True),
}


@pytest.fixture(scope="module")
def weights():
    return make_weights(SMALL, "cuda")


def skewed(tokens: int, seed: int, experts: int) -> tuple[torch.Tensor, ...]:
    """Input whose routes all go to the first experts; one token in five has a route less."""
    x, _, route_weights = make_input(SMALL, tokens, "cuda", seed)
    g = torch.Generator(device="cuda").manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=g, device="cuda").argsort(dim=1)[:, : SMALL.topk].int()
    ids[::5, 0] = -1
    return x, ids.contiguous(), route_weights


def test_small_pools_keep_the_bits(weights):
    """Hot, skewed and random routing, then calls that fit: as many passes as it takes, all the bits of one."""
    inputs = [skewed(256, 1, 2), make_input(SMALL, 256, "cuda", 2), skewed(250, 3, 4), make_input(SMALL, 9, "cuda", 4)]
    whole = make_engine(SMALL, weights)
    try:
        wanted = [call_engine(whole, [given])[0] for given in inputs]
    finally:
        whole.close()
    for given, want in zip(inputs, wanted, strict=True):
        assert reference.relative_error(want, reference.forward(SMALL, weights, *given)) < 8e-3
    for name, chosen in PLANS.items():
        for ranks in (1, 2, 4):
            engine = make_engine(SMALL, weights, ranks=ranks, plan=chosen, pool_rows=POOL_ROWS)
            try:
                for _ in range(3):
                    for given, want in zip(inputs, wanted, strict=True):
                        size = -(-given[0].shape[0] // ranks)
                        parts = [tuple(t[r * size : (r + 1) * size].contiguous() for t in given) for r in range(ranks)]
                        assert torch.equal(torch.cat(call_engine(engine, parts, bound=256)), want), (name, ranks)
            finally:
                engine.close()


@pytest.mark.parametrize("devices", [None, [0, 1]])
def test_skew_beyond_the_pools(weights, devices):
    """Two ranks of which one gets nearly everything, more than an even load: by the plans that are chosen."""
    if devices is not None and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    most = 4096
    whole = make_engine(SMALL, weights, max_tokens=2 * most)
    with local_group(SMALL, ranks=2, max_tokens=most, devices=devices, deadline=DEADLINE) as group:
        group.load(weights)
        try:
            for call, (tokens, experts) in enumerate([(most, 4), (most, 8), (3000, 2), (17, 4), (most - 1, 3)]):
                parts = [skewed(tokens, 10 * call + r, experts) for r in range(2)]
                want = call_engine(whole, [tuple(torch.cat(t) for t in zip(*parts, strict=True))])[0]
                there = [[part[i].to(layer.device) for part, layer in zip(parts, group, strict=True)] for i in range(3)]
                for _ in range(2):
                    got = group(*there)
                    group.check()
                    assert torch.equal(torch.cat([y.to("cuda:0") for y in got]), want), (call, tokens, experts)
        finally:
            whole.close()
