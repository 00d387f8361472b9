"""CPU time of a call: how it is taken, and what is on record."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megamoe.bench import host, results

RECORD = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "host-h200.json"


def test_a_sample_is_the_mean_of_a_series_and_the_first_ones_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    calls: list[int] = []

    def call() -> None:
        calls.append(len(waits))
        time.sleep(0.001 if len(waits) < 3 else 0.0)  # the first series are slow

    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.append(len(calls)))
    monkeypatch.setattr(host, "_WARM", 0.08)
    times = host.call_times(call, samples=4)
    series = len(waits) - 1
    assert waits == [50 * n for n in range(series + 1)]  # the GPU is waited for before each series and at the end
    assert series > 4
    assert len(times) == 4
    assert all(0 < us < 500 for us in times)


def test_the_record_has_every_sample() -> None:
    rows = results.load(RECORD)["rows"]
    assert {row["model"] for row in rows} >= {"flash", "pro"}
    for row in rows:
        cpu = row["cpu_us"]
        assert len(cpu["samples"]) == 100
        assert results.timing(cpu["samples"]) == cpu
