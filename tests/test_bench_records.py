"""The scripts that make records on a GPU: what they write, with the measuring itself replaced."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megamoe.bench import mega, results
from megamoe.bench.models import model
from megamoe.bench.results import Row

SCRIPTS = Path(__file__).resolve().parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU by name only; torch takes a device for it and not, say, its own name."""

    def name(device: str) -> str:
        assert torch.device(device).type == "cuda"
        return "NVIDIA H200"

    monkeypatch.setattr(torch.cuda, "get_device_name", name)


def test_layer_records_replace_the_cells_that_were_measured(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def benchmark(name: str, tokens: tuple[int, ...], **options: Any) -> Iterator[Row]:
        for m in tokens:
            for protocol in options.get("protocols", ("paced",)):
                yield {
                    **results.layer_keys(name, model(name).spec, 1),
                    "tokens": m,
                    "routing": "random",
                    "bound": options.get("bound", m),
                    "protocol": protocol,
                    "engine": "megamoe",
                    "plan": "auto:new",
                    "kernel_us": results.timing([2.0 * m]),
                }

    monkeypatch.setattr(mega, "benchmark", benchmark)
    path = tmp_path / "layer-h200.json"
    old = {**next(benchmark("flash", (8,), protocols=("paced-clean",))), "plan": "auto:old", "commit": "a", "date": "b"}
    other = {**old, "tokens": 7, "bound": 7}
    results.write(path, {"topic": "layer", "commit": "a", "date": "b"}, [old, other])
    records = script("layer_records")
    monkeypatch.setattr("sys.argv", ["layer_records.py", "flash-clean", "pro-bounds", "--out", str(tmp_path)])
    records.main()
    document = json.loads(path.read_text())
    assert (document["topic"], document["device"]) == ("layer", "NVIDIA H200")
    rows = document["rows"]
    assert [(r["tokens"], r["plan"]) for r in rows if r["plan"] == "auto:old"] == [(7, "auto:old")]
    clean = [r["tokens"] for r in rows if r["model"] == "flash" and r["plan"] == "auto:new"]
    assert clean == list(records.CLEAN)
    bounds = {b: tuple(r["tokens"] for r in rows if r["model"] == "pro" and r["bound"] == b) for b in records.BOUNDS}
    assert bounds == records.BOUNDS


def test_stream_record(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = script("stream")

    def measure(samples: int) -> Iterator[Row]:
        for protocol in ("paced", "paced-clean"):
            keys = {"model": "flash", "protocol": protocol, "variant": "132 CTAs"}
            yield {**keys, "kernel_us": results.timing([1.0] * samples), "tbps": 1.0}

    monkeypatch.setattr(stream, "measure", measure)
    monkeypatch.setattr("sys.argv", ["stream.py", "--samples", "3", "--out", str(tmp_path)])
    stream.main()
    rows = results.load(tmp_path / "stream-h200.json")["rows"]
    assert [(r["protocol"], len(r["kernel_us"]["samples"])) for r in rows] == [("paced", 3), ("paced-clean", 3)]


def test_stream_reads_whole_blocks_of_what_a_token_needs() -> None:
    stream = script("stream")
    assert {name: stream.weights_of_a_token(name) for name in stream.MODELS} == {
        "flash": 150_994_944,
        "pro": 396_361_728,
    }
    assert all(stream.weights_of_a_token(name) % stream.BLOCK == 0 for name in stream.MODELS)
    assert max(stages for _, stages in stream.SHAPES) <= stream.MOST_STAGES
