"""Time stamps of the fused kernel: their meaning, tables, Perfetto files, pictures, the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megamoe.bench.timeline import draw
from megamoe.cli.app import main
from megamoe.cuda.arena import TRACE_EVENTS, TRACE_ROLES
from megamoe.cuda.sources import KERNELS
from megamoe.cuda.trace import EVENTS, GROUPS, ROLES, Recording, chrome_events, phase_times, write_chrome
from megamoe.errors import InputError
from megamoe.sim.requirements import missing

needs_simulator = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ORIGIN = 1_796_000_000_000_000_000 % (1 << 56)
"""A globaltimer of today: its upper bits are shifted out, and the top bit of the word is set."""


def _stamps(rows: dict[tuple[int, int], list[tuple[int, int]]], ctas: int) -> np.ndarray:
    words = np.zeros((ctas, TRACE_ROLES, TRACE_EVENTS), np.uint64)
    for (cta, role), events in rows.items():
        words[cta, role, 0] = len(events)
        for i, (time, event) in enumerate(events):
            words[cta, role, i + 1] = (ORIGIN + time) << 8 | event
    return words.view(np.int64)


def _recording() -> Recording:
    routing = [(0, 1), (10, 2), (30, 3), (40, 4)]
    one = {
        (0, 4): [*routing, (100, 8), (120, 10), (200, 12), (210, 13)],
        (0, 5): [(0, 1), (110, 8), (120, 10), (200, 12), (210, 13)],
        (0, 0): [(50, 5), (90, 7)],
        (0, 3): [(60, 6)],
        (1, 4): [(5, 1), (10, 2), (30, 3), (45, 4), (205, 12)],
        (1, 0): [(45, 5)],
    }
    return Recording((_stamps(one, 2),), {"model": "none", "tokens": 3})


def test_events_and_roles_are_those_of_the_kernel() -> None:
    text = (KERNELS / "trace.cuh").read_text()
    events = re.search(r"enum class Event : u32 \{(.*?)\};", text, re.S)
    assert events is not None
    names = re.findall(r"^\s*k(\w+)", events[1], re.M)
    assert len(names) == len(EVENTS)
    assert sorted(EVENTS) == list(range(1, len(names) + 1))
    assert names[7:9] == ["First", "Second"]
    assert (EVENTS[8], EVENTS[9]) == ("first GEMM", "second GEMM")
    roles = re.search(r"enum TraceRole : u32 \{(.*?)\}", text)
    assert roles is not None
    assert [r.lower() for r in re.findall(r"kTrace([A-Z]\w+)", roles[1])][:-1] == [r.replace(" ", "") for r in ROLES]
    assert sorted(role for group in GROUPS.values() for role in group) == list(range(TRACE_ROLES))


def test_an_interval_ends_at_its_stamp_and_begins_at_the_one_before() -> None:
    found = [tuple(row) for row in _recording().intervals().tolist()]
    assert (0, 0, 4, 8, 40, 100) in found
    assert (0, 0, 4, 2, 0, 10) in found
    assert (0, 0, 0, 5, 40, 50) in found  # a role's first one begins when its CTA has listed the routes
    assert (0, 1, 0, 5, 45, 45) in found
    assert all(event != 1 for _, _, _, event, _, _ in found)
    assert len(found) == 7 + 4 + 2 + 1 + 4 + 1


def test_the_table_adds_up() -> None:
    rows = phase_times(_recording())
    assert {row.group for row in rows} == set(GROUPS)
    for group in GROUPS:
        assert sum(row.share for row in rows if row.group == group) == pytest.approx(1)
    first = next(row for row in rows if (row.group, row.phase) == ("math", "first GEMM"))
    assert (first.count, first.longest) == (2, 110)
    assert first.mean == (60 + 110) / 4  # two CTAs, two math warpgroups
    assert first.share == pytest.approx(first.mean / 210)


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    recording = _recording()
    recording.save(tmp_path / "r.npz")
    again = Recording.load(tmp_path / "r.npz")
    assert again.about == recording.about
    assert again.unit == "ns"
    assert np.array_equal(again.stamps[0], recording.stamps[0])
    (tmp_path / "bad.npz").write_text("nothing")
    with pytest.raises(InputError, match="load"):
        Recording.load(tmp_path / "bad.npz")


def test_stamps_of_another_shape_are_refused() -> None:
    with pytest.raises(InputError, match="stamps"):
        Recording((np.zeros((2, TRACE_ROLES, 7), np.int64),), {})
    with pytest.raises(InputError, match="without a stamp"):
        Recording((np.zeros((2, TRACE_ROLES, TRACE_EVENTS), np.int64),), {})


def test_perfetto_events(tmp_path: Path) -> None:
    events = list(chrome_events(_recording()))
    complete = [e for e in events if e["ph"] == "X"]
    assert {"ph": "X", "name": "first GEMM", "cat": "math 0", "pid": 0, "tid": 4, "ts": 0.04, "dur": 0.06} in complete
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in complete} == set(named)
    assert named[TRACE_ROLES] == "CTA 001 loader"
    write_chrome(_recording(), tmp_path / "t.json", ctas=[1])
    document = json.loads((tmp_path / "t.json").read_text())
    assert {e["tid"] // TRACE_ROLES for e in document["traceEvents"] if e["ph"] == "X"} == {1}


def test_a_full_row_is_said_to_be_cut_off() -> None:
    full = _stamps({(0, 4): [(i, 8) for i in range(TRACE_EVENTS - 1)]}, 1)
    assert Recording((full,), {}).truncated
    assert not _recording().truncated


def test_the_picture(tmp_path: Path) -> None:
    draw(_recording(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *words])
    return int(ended.value.code or 0)


@needs_simulator
def test_the_command_traces_a_simulated_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamps, perfetto = tmp_path / "s.npz", tmp_path / "t.json"
    assert _run("--simulate", "swap", "--save", str(stamps), "--perfetto", str(perfetto), "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["unit"] == "steps"
    spent = {(row["group"], row["phase"]): row["count"] for row in first["phases"]}
    # Every posted tile is fed once, multiplied by both warpgroups and stored by both store warps.
    tiles = spent["loader", "feed tile"]
    assert tiles > 0
    assert spent["math", "first GEMM"] + spent["math", "second GEMM"] == 2 * tiles
    assert spent["store", "store rows"] == spent["math", "epilogue"] == 2 * tiles
    assert len([e for e in json.loads(perfetto.read_text())["traceEvents"] if e["name"] == "feed tile"]) >= tiles
    assert _run("--load", str(stamps), "--json") == 0
    assert json.loads(capsys.readouterr().out) == first
    assert _run("--load", str(stamps), "--rank", "1") == 0
    assert "feed tile" in capsys.readouterr().out


def test_refused_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _recording().save(tmp_path / "s.npz")
    assert _run("--load", str(tmp_path / "s.npz"), "--rank", "1") == 2
    assert "0 to 0" in capsys.readouterr().err
    assert _run("--load", str(tmp_path / "none.npz")) == 2
    assert _run("--load", "a.npz", "--simulate", "swap") == 2
    assert _run("--plot", str(tmp_path / "p.txt")) == 2
