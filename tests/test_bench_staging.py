"""The recorded staging figures: what the documentation shows of them, and the limits they are held to."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from megamoe.bench import results
from megamoe.bench.staging import main, staging_bytes, table

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "staging-h200.json"


def median(rows: list[results.Row], **keys: object) -> float:
    (row,) = (r for r in rows if all(r.get(k) == v for k, v in keys.items()))
    return float(row["kernel_us"]["median"])


def automatic(rows: list[results.Row], fmt: str, hidden: int, tokens: int, protocol: str) -> float:
    mine = [r for r in rows if r.get("plan", "").startswith("auto:") and "variant" not in r and r["format"] == fmt]
    return median(mine, hidden=hidden, tokens=tokens, protocol=protocol)


@pytest.mark.parametrize("hidden", [2048, 4096, 6144, 7168])
@pytest.mark.parametrize("fmt", ["float32", "ue8m0"])
def test_the_record_keeps_its_limits(hidden: int, fmt: str) -> None:
    rows = results.load(RECORD)["rows"]
    for protocol in ("sustained", "paced"):
        copy = median(rows, engine="copy", hidden=hidden, tokens=8192, protocol=protocol)
        assert copy / automatic(rows, fmt, hidden, 8192, protocol) >= 0.85
    for tokens in (1, 8, 16, 32, 64, 128):
        assert automatic(rows, fmt, hidden, tokens, "sustained") <= 3.0
    (launch,) = (r for r in rows if r.get("phase") == "launch")
    assert launch["cpu_us"]["median"] <= 15.0


def test_speeds_follow_from_times_and_bytes() -> None:
    for row in results.load(RECORD)["rows"]:
        if "kernel_us" in row:
            moved = staging_bytes(row["tokens"], row["hidden"])
            speeds = [moved / us * 1e-6 for us in row["kernel_us"]["samples"]]
            assert row["tbps"] == pytest.approx(statistics.median(speeds), rel=2e-3, abs=1e-4)


def test_the_documented_table_is_the_recorded_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = table(results.load(RECORD))
    assert text in (ROOT / "docs" / "gpu.md").read_text()
    main(["--table", str(RECORD)])
    assert capsys.readouterr().out == text
