"""The GPU engine's benchmark as far as it goes without a GPU: names, floors, and who measures what."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megamoe.bench import layer, mega
from megamoe.bench.layer_table import bound_table, tables
from megamoe.bench.models import model
from megamoe.bench.request import Request
from megamoe.cuda.fused import sizes_of
from megamoe.cuda.plan import Plan
from megamoe.cuda.select import select_plan
from megamoe.errors import EngineError


def request(**changes: object) -> Request:
    given: dict[str, object] = {
        "models": ("qwen3",),
        "tokens": (1,),
        "ranks": 1,
        "experts": 8,
        "routings": ("random",),
        "format": "fp8_block",
        "backend": "auto",
        "samples": 3,
        "seconds": 1.0,
        "check": False,
    }
    return Request(**{**given, **changes})  # type: ignore[arg-type]


def test_the_floor_is_the_read_of_hit_experts_on_the_busiest_rank() -> None:
    spec = model("flash").spec
    per_expert = 3 * 4096 * 2048 / 4.58e6
    assert mega.floor_us(spec, np.arange(32).reshape(1, 8, 4), 32) == pytest.approx(32 * per_expert)
    assert mega.floor_us(spec, np.array([[[0, 1, 40, 40]]]), 32) == pytest.approx(2 * per_expert)
    assert mega.floor_us(spec, np.array([[[-1, -1]]]), 32) == 0


def test_plan_names_tell_the_selected_plans_apart() -> None:
    sizes = sizes_of(model("flash").scaled(32), 1, 8192)
    chosen = {select_plan(sizes, bound) for bound in (1, 64, 256, 1024, 8192)}
    assert len({mega.plan_name(plan) for plan in chosen}) == len(chosen)
    assert mega.plan_name(Plan(wide=False, stages=4, pulled_rows=2)) == "swap-s4-b1-p2"
    assert mega.plan_name(Plan(carried_tokens=16)) == "wide+swap-c16-s3-b1-p1"
    assert mega.plan_name(Plan(wave_experts=3, lag=1)) == "wide+swap-s3-b1-p1-w3-l1"


@pytest.mark.parametrize(
    ("changes", "reason", "by_gpu"),
    [
        ({}, None, True),
        ({}, EngineError("device", "none", "a GPU"), False),
        ({"backend": "cuda"}, EngineError("device", "none", "a GPU"), True),  # whose error is the answer
        ({"backend": "cpu"}, None, False),
        ({"format": "bf16"}, None, False),
    ],
)
def test_the_gpu_engine_is_measured_where_it_would_be_chosen(
    changes: dict[str, object], reason: EngineError | None, by_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "why_no_gpu", lambda *_: reason)
    monkeypatch.setattr(mega, "run", lambda *_: [{"by": "gpu"}])
    rows = layer.run(request(**changes), lambda *_: None)
    assert (rows == [{"by": "gpu"}]) is by_gpu
    if not by_gpu:
        assert [row["variant"] for row in rows] == ["cpu"]


def test_a_bound_has_a_line_and_smaller_calls_are_its_columns() -> None:
    times = {(8, 8): 10.0, (64, 64): 20.4, (64, 8): 11.0, (512, 8): 12.6, (512, 64): 21.0, (512, 512): 30.0}
    rows = [{"bound": b, "tokens": m, "kernel_us": {"median": t}} for (b, m), t in times.items()]
    assert bound_table(rows).splitlines() == [
        "| M | 8 | 64 |",
        "|---|---|---|",
        "| bound M | 10 | 20 |",
        "| bound 64 | 11 | 20 |",
        "| bound 512 | 13 | 21 |",
    ]


def test_the_documentation_shows_the_record() -> None:
    """Every table of the record is in the documentation as the command prints it."""
    root = Path(__file__).parents[1]
    text = (root / "docs" / "tuning.md").read_text()
    for name in ("layer-h200.json", "layer-h200-x2.json"):
        shown = dict(tables(json.loads((root / "benchmarks" / "results" / name).read_text())))
        assert {title.split(",")[0] for title in shown} >= {"flash", "pro"}
        for title, table in shown.items():
            assert table in text, title
