"""Thousands of calls with random counts, places and delays: no wait expires, no bit differs."""

from __future__ import annotations

import random

import pytest
import torch
from fused_cases import SMALL, make_input, make_weights

from megamoe import MegaMoE, local_group

pytestmark = pytest.mark.gpu

POOL = 512
BOUNDS = (16, 64)  # swapped tiles, and wide ones too
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    ("ranks", "devices", "calls"), [(4, [0], 10_000), pytest.param(2, [0, 1], 2_000, marks=TWO)], ids=["one", "two"]
)
def test_soak(ranks, devices, calls):
    dice = random.Random(ranks)
    weights = make_weights(SMALL, "cuda:0")
    pool = make_input(SMALL, POOL, "cuda:0")
    with MegaMoE(SMALL, max_tokens=POOL) as layer:
        layer.load(weights)
        want = layer(*pool)
        layer.check()
    with local_group(SMALL, ranks=ranks, devices=devices, max_tokens=max(BOUNDS), deadline=5.0) as group:
        group.load(weights)
        for bound in BOUNDS:
            group.warmup(bound)
        places = group._runtime.engine._workspace.places
        pools = {place.ordinal: [t.to(place.gpu.device) for t in (*pool, want)] for place in places}
        bad = {place.ordinal: torch.zeros((), dtype=torch.int64, device=place.gpu.device) for place in places}
        ordinals = [member.device.index for member in group]
        for number in range(calls):
            bound = dice.choice(BOUNDS)
            counts = [dice.choice((0, 1, bound, dice.randrange(bound + 1))) for _ in range(ranks)]
            starts = [dice.randrange(POOL - n + 1) for n in counts]
            columns = [
                [pools[d][i][s : s + n] for d, s, n in zip(ordinals, starts, counts, strict=True)] for i in range(4)
            ]
            if dice.random() < 0.3:
                late = dice.randrange(ranks)
                place = group._runtime.engine._workspace.place_of[late]
                streams = place.gpu._ranks
                mine = streams[place.hosted.index(late)] if len(place.hosted) > 1 and streams else None
                with torch.cuda.device(place.ordinal), torch.cuda.stream(mine):
                    torch.cuda._sleep(dice.randrange(200_000))  # up to about 100 us
            outs = group(*columns[:3], bound=bound)
            for ordinal, out, expected in zip(ordinals, outs, columns[3], strict=True):
                bad[ordinal] += (out.view(torch.int16) != expected.view(torch.int16)).sum()
            if number % 500 == 499:
                group.check()
        group.check()
        assert {ordinal: int(count) for ordinal, count in bad.items()} == dict.fromkeys(bad, 0)
