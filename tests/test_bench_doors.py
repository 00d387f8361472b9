"""The benchmark of Transformers' experts interface on a GPU: the parts that run on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

from megamoe import MoESpec
from megamoe.bench import results

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "doors_gpu.py"
SPEC = MoESpec(hidden=256, intermediate=128, experts=8, topk=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def doors() -> Iterator[Any]:
    import megamoe.integrations.transformers as hosted

    assert hosted.register()
    spec = importlib.util.spec_from_file_location("doors_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doors_gpu"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["doors_gpu"]
    hosted.release()


@torch.inference_mode()
def test_rows_of_a_small_layer(doors: Any, tmp_path: Path) -> None:
    layer = doors.make_layer(SPEC, CPU)
    with Progress(disable=True) as progress:
        rows = [row for tokens in (5, 70) for row in doors.measure(layer, tokens, CPU, 2, 60.0, progress)]
    assert len({results.key(row) for row in rows}) == len(rows)
    ours = [row for row in rows if row["engine"] == "megamoe"]
    assert [row["tokens"] for row in ours] == [5, 70]
    for row in ours:
        assert row["error"] < 8e-3
        hosts = {
            f"{r['engine']}, {r['format']}": r["e2e_us"]["median"]
            for r in rows
            if r["tokens"] == row["tokens"] and r["engine"] != "megamoe"
        }
        assert {"transformers-eager, bf16", "transformers-grouped_mm, bf16"} <= set(hosts)
        assert row["fastest_host"] == min(hosts, key=lambda name: hosts[name])
        # Three decimals are kept.
        assert row["ratio"] == pytest.approx(min(hosts.values()) / row["e2e_us"]["median"], abs=6e-4, rel=0)
    # Every implementation has a row or a reason.
    seen = {f"{r['engine']}, {r['format']}" for r in rows if r["engine"] != "megamoe"} | set(layer.not_run)
    assert {f"transformers-{n}, {stored}" for stored, names in doors.HOSTS.items() for n in names} <= seen
    assert all(layer.not_run.values())
    assert doors.table(rows).row_count == len(rows)
    assert len(results.write(tmp_path / "doors.json", {"commit": "c", "date": "d"}, rows)["rows"]) == len(rows)


@torch.inference_mode()
def test_nothing_wrong_is_timed(doors: Any) -> None:
    layer = doors.make_layer(SPEC, CPU)
    layer.modules["bf16"].down_proj.mul_(1.2)
    with pytest.raises(RuntimeError, match=r"transformers-.*bf16, 5 tokens: relative error"):
        doors.usable(layer, 5, CPU)


@torch.inference_mode()
def test_copies_that_are_too_large_are_left_out(doors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "LARGEST_COPY", 1 << 20)
    layer = doors.make_layer(SPEC, CPU)
    calls, _ = doors.usable(layer, 5, CPU)
    assert "transformers-batched_mm, bf16" not in calls
    assert "would copy" in layer.not_run["transformers-batched_mm, bf16, 5 tokens"]
    assert "transformers-batched_mm, bf16" in doors.usable(layer, 1, CPU)[0]
