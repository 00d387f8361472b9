"""The sim command: lists, runs, replays, writes files for a debugger, lints; exit codes and JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megamoe.cli import main
from megamoe.sim.requirements import missing

needs_simulator = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *words])
    code = ended.value.code
    return (code if isinstance(code, int) else 0), capsys.readouterr().out


def test_list_names_every_plan(capsys: pytest.CaptureFixture[str]) -> None:
    from megamoe.sim.plans import plans

    code, out = _run(capsys, "list", "--json")
    assert code == 0
    assert [row["plan"] for row in json.loads(out)["plans"]] == list(plans())


@needs_simulator
def test_run_reports_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _run(capsys, "run", "selftest/handshake", "--seeds", "2", "--checked", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["checked"]
    (plan,) = document["plans"]
    assert [r["seed"] for r in plan["runs"]] == [0, 1]
    assert all(r["ok"] and r["counters"]["threads"] == 256 for r in plan["runs"])


@needs_simulator
def test_an_unknown_plan_is_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _run(capsys, "run", "no-such-plan", "--json")
    assert code == 2
    assert json.loads(out)["argument"] == "plan"


@needs_simulator
def test_a_dumped_run_runs_by_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out = _run(capsys, "replay", "selftest/gemm", "3", "--checked", "--dump", str(tmp_path))
    assert code == 0
    worker = out.split()[-1]
    assert out.startswith(f"gdb -ex 'run < {tmp_path}/job.txt'")
    before = (tmp_path / "arena.bin").read_bytes()
    done = subprocess.run([worker], input=(tmp_path / "job.txt").read_bytes(), capture_output=True, check=True)
    *_, answer = done.stdout.splitlines()
    code, out = _run(capsys, "replay", "selftest/gemm", "3", "--checked", "--json")
    counters = json.loads(out)["counters"]
    assert {k: v for k, v in json.loads(answer).items() if k in counters} == counters
    assert (tmp_path / "arena.bin").read_bytes() == before


@needs_simulator
def test_mutate_fails_for_an_unexplained_survivor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "survivors.json"
    file.write_text("[]")
    code, out = _run(capsys, "mutate", "selftest/gemm", "--survivors", str(file))
    assert code == 1
    assert "drop bulk_wait at gemm.cu" in out
    code, _ = _run(capsys, "mutate", "selftest/gemm", "--survivors", str(file), "--draft")
    assert code == 0
    (entry,) = json.loads(file.read_text())
    assert entry["kind"] == "drop bulk_wait"
    entry["why"] = "a full wait follows later"
    file.write_text(json.dumps([entry]))
    code, out = _run(capsys, "mutate", "selftest/gemm", "--survivors", str(file))
    assert code == 0
    assert "a full wait follows later" in out


def test_lint_names_line_and_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.cuh").write_text('#pragma once\nvoid f() { asm("trap;"); }\n')
    code, out = _run(capsys, "lint", str(tmp_path))
    assert code == 1
    assert "bad.cuh:2: asm belongs into kernels/ptx/" in out
    assert _run(capsys, "lint")[0] == 0
