"""Thousands of calls with random counts, places and delays: no wait expires, no bit differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_cases import SMALL, make_input, make_weights

from megamoe import MegaMoE, local_group
from megamoe.bench.scale_checks import soak
from megamoe.cuda.arena import MAX_RANKS

pytestmark = pytest.mark.gpu

POOL = 512
BOUNDS = (16, 64)  # swapped tiles, and wide ones too
GPUS = torch.cuda.device_count()
SETS = [(4, [0], 10_000)] + [(n, list(range(n)), 2_000) for n in sorted({2, min(GPUS, MAX_RANKS)}) if n > 1]


@pytest.mark.parametrize(("ranks", "devices", "calls"), SETS, ids=lambda v: f"{len(v)}gpus" if type(v) is list else "")
def test_soak(ranks, devices, calls):
    if len(devices) > max(1, GPUS):
        pytest.skip(f"needs {len(devices)} GPUs")
    spec = replace(SMALL, experts=max(SMALL.experts, 4 * len(devices)))
    weights = make_weights(spec, "cuda:0")
    pool = make_input(spec, POOL, "cuda:0")
    with MegaMoE(spec, max_tokens=POOL) as layer:
        layer.load(weights)
        want = layer(*pool)
        layer.check()
    with local_group(spec, ranks=ranks, devices=devices, max_tokens=max(BOUNDS), deadline=5.0) as group:
        group.load(weights)
        found = soak(group, pool, want, BOUNDS, calls, seed=ranks)
    assert found["ok"], found
    assert found["differing"] == 0
    assert found["late_starts"] > calls // 5
