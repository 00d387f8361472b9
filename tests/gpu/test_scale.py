"""``megamoe bench scale`` on this machine's GPUs, with few samples and calls: all of its parts, and no fault found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.bench import scale, scale_checks
from megamoe.bench.results import load

pytestmark = pytest.mark.gpu

FACTS = {"topic": "scale", "device": "GPU", "gpus": 1, "commit": "abc", "date": "2026-11-30T00:00:00+00:00"}


@pytest.mark.parametrize("each", [1, 2])
def test_every_part_runs_and_finds_no_fault(each, tmp_path):
    gpus = torch.cuda.device_count()
    plan = scale.Scale.planned(
        ranks=each * min(gpus, 4), devices=range(min(gpus, 4)), models=["qwen3"], tokens=[8, 512]
    )
    plan = replace(plan, budget=1.0)  # the fewest samples
    record = scale.Record(tmp_path / "scale.json", FACTS)
    scale.run(plan, record, replays=40, soak=100)
    rows = load(tmp_path / "scale.json")["rows"]
    assert [row["ok"] for row in rows] == [True] * len(rows)
    phases = [row["phase"] for row in rows]
    cases = len(scale_checks.CASES) if plan.ranks > 1 else 3
    assert phases == ["correctness"] * 2 * cases + ["table"] * 2 + ["replays"] * 2 + ["soak"]
    timed = [row for row in rows if row["phase"] == "table"]
    assert all(len(row["kernel_us"]["samples"]) == len(row["e2e_us"]["samples"]) == 5 for row in timed)
    assert all(min(row["kernel_us"]["min"], row["e2e_us"]["min"], row["gpu_gib"]) > 0 for row in timed)


def test_replays_find_a_wrong_result():
    """The comparison is with what is asked for, not with what the graph gave before."""
    plan = scale.Scale.planned(devices=[0], ranks=2)
    _, spec, (bound, _) = plan.checked
    with scale_checks.subject(spec, 2, [0], bound, 4 * bound, "cuda") as on:
        given = scale_checks.pool_of(spec, 4 * bound, on.devices[0])
        wanted = on.wanted(*given)
        assert scale_checks.replays(on.group, given, wanted, bound, 8)["ok"]
        wanted[bound - 1, 0] += 1
        found = scale_checks.replays(on.group, given, wanted, bound, 8)
        assert not found["ok"]
        assert found["differing"] > 0
