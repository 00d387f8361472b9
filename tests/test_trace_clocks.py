"""Recordings of ranks on several GPUs: clocks are brought together from made-up stamps, and what follows from that."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.bench.timeline import draw
from megamoe.cli.app import main
from megamoe.cuda.arena import TRACE_EVENTS, TRACE_ROLES
from megamoe.cuda.clocks import Alignment, Exchange, align
from megamoe.cuda.trace import Recording, write_chrome
from megamoe.errors import InputError

COUNTED, LAID_OUT, LISTED, STORED, PEERS, COMBINED = 2, 3, 4, 11, 12, 13
ORIGIN = 1_796_000_000_000_000_000 % (1 << 55)


def call(
    clocks: list[int], offsets: dict[int, int], seed: int, tick: int = 1, ctas: int = 3, spread: int = 20_000
) -> Recording:
    """Stamps of one call: ranks start within `spread` ns, messages take 1 to 4 us, every clock has its offset."""
    dice = random.Random(seed)
    ranks = len(clocks)
    starts = [[dice.randrange(spread) for _ in range(ctas)] for _ in range(ranks)]
    counted = [[t + dice.randrange(1, 3_000) for t in row] for row in starts]
    known = max(max(row) for row in counted)
    laid_out = [[max(known, t) + dice.randrange(1_000, 4_000) for t in row] for row in counted]
    stored = [[t + dice.randrange(50_000, 200_000) for t in row] for row in laid_out]
    done = max(max(row) for row in stored)
    peers = [[done + dice.randrange(1_000, 4_000) for _ in row] for row in stored]
    stamps = []
    for rank, clock in enumerate(clocks):
        words = np.zeros((ctas, TRACE_ROLES, TRACE_EVENTS), np.uint64)

        def put(cta: int, role: int, events: list[tuple[int, int]], words=words, clock=clock) -> None:
            words[cta, role, 0] = len(events)
            for i, (time, event) in enumerate(events):
                read = (ORIGIN + time + offsets[clock]) // tick * tick
                words[cta, role, i + 1] = read << 8 | event

        for cta in range(ctas):
            at = {name: rows[rank][cta] for name, rows in (("s", starts), ("c", counted), ("l", laid_out))}
            math = [(at["s"], 1), (at["c"], COUNTED), (at["l"], LAID_OUT), (at["l"] + 100, LISTED)]
            end = peers[rank][cta]
            put(cta, 4, [*math, (end, PEERS), (end + 2_000, COMBINED)])
            put(cta, 1, [(stored[rank][cta], STORED)])
        stamps.append(words.view(np.int64))
    return Recording(tuple(stamps), {"model": "none", "tokens": 3}, clocks=tuple(clocks))


@settings(max_examples=60, deadline=None)
@given(
    clocks=st.lists(st.integers(0, 3), min_size=2, max_size=6).filter(lambda c: len(set(c)) > 1),
    apart=st.lists(st.integers(-(10**12), 10**12), min_size=4, max_size=4),
    seed=st.integers(0, 10**6),
    tick=st.sampled_from([1, 32, 1024]),
)
def test_true_times_come_back_within_the_uncertainty(clocks, apart, seed, tick):
    offsets = dict(enumerate(apart))
    recording = call(clocks, offsets, seed, tick)
    found = recording.alignment()
    assert found.offsets[0] == 0
    for a, clock_a in enumerate(clocks):
        for b, clock_b in enumerate(clocks):
            true = offsets[clock_a] - offsets[clock_b]
            assert abs(found.offsets[a] - found.offsets[b] - true) <= found.uncertainty + tick
    # Nobody has seen all ranks before they sent.
    spans = recording.intervals()
    for sent, seen in ((COUNTED, LAID_OUT), (STORED, PEERS)):
        assert spans["end"][spans["event"] == sent].max() <= spans["end"][spans["event"] == seen].min() + 2 * tick


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_start_together_leave_little_uncertain(seed):
    """Half of a message each way, and of what one rank counted after the other: 4 and 3 us at most here."""
    recording = call([0, 1], {0: 0, 1: 77_777}, seed, spread=500)
    assert recording.alignment().uncertainty <= 4_000 + 3_500 // 2


def test_ranks_of_one_gpu_are_not_moved():
    together = call([1, 1, 1], {1: 5_000}, 3)
    assert together.alignment() == Alignment((0, 0, 0), 0)
    plain = Recording(together.stamps, together.about)
    assert np.array_equal(plain.intervals(), together.intervals())


def test_the_middle_of_what_is_possible():
    # Clock 5 is 1000 ahead: 40 after a message of clock 2, and a message of its own arrives 60 later.
    exchange = Exchange(sent=[100, 1100], seen=[160, 1140])
    assert align([2, 5], [exchange]) == Alignment((0, 990), 50)
    tighter = Exchange(sent=[500, None], seen=[None, 1530])
    assert align([2, 5], [exchange, tighter]) == Alignment((0, 985), 45)
    # Over a third clock: what two clocks did not tell each other follows from what they told it.
    chain = [
        Exchange(sent=[0, 0, None], seen=[10, 10, None]),
        Exchange(sent=[None, 0, 0], seen=[None, 10, 10]),
    ]
    assert align([0, 1, 2], chain) == Alignment((0, 0, 0), 20)


def test_stamps_that_no_offset_explains_are_refused():
    with pytest.raises(InputError, match=r"clocks \[0, 1\] that contradict each other"):
        align([0, 1], [Exchange(sent=[100, 100], seen=[90, 90])])
    assert align([0, 1], [Exchange(sent=[100, 100], seen=[90, 90])], tick=10) == Alignment((0, 0), 0)
    with pytest.raises(InputError, match="without a message between some of them"):
        align([0, 1], [Exchange(sent=[100, None], seen=[90, 90])])
    one = call([0, 1], {0: 0, 1: 0}, 1)
    stretched = one.stamps[1].view(np.uint64).copy()
    stores = stretched[:, 1, 1]
    stretched[:, 1, 1] = stores + np.uint64(10**6 << 8)  # stored a millisecond after its peer had seen that
    with pytest.raises(InputError, match="contradict"):
        Recording((one.stamps[0], stretched.view(np.int64)), {}, clocks=(0, 1)).intervals()


def test_a_clock_for_every_rank():
    with pytest.raises(InputError, match=r"clocks: got \[0\]"):
        Recording(call([0, 1], {0: 0, 1: 0}, 1).stamps, {}, clocks=(0,))


def test_files_keep_the_clocks(tmp_path: Path):
    recording = call([0, 1], {0: 0, 1: 123_456}, 7)
    recording.save(tmp_path / "r.npz")
    again = Recording.load(tmp_path / "r.npz")
    assert (again.clocks, again.about, again.unit) == ((0, 1), recording.about, "ns")
    assert np.array_equal(again.intervals(), recording.intervals())
    write_chrome(recording, tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["otherData"]["clock_uncertainty_ns"] == recording.alignment().uncertainty > 0
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0 on GPU 0", 1: "rank 1 on GPU 1"}
    ends = [
        max(e["ts"] + e["dur"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == r) for r in (0, 1)
    ]
    assert abs(ends[0] - ends[1]) < 20  # us: both end within a few, though their clocks are 123 apart


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *words])
    return int(ended.value.code or 0)


def test_the_command_shows_both_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recording = call([0, 1], {0: 0, 1: -987_654}, 11)
    stamps, picture, one = tmp_path / "r.npz", tmp_path / "both.png", tmp_path / "one.png"
    recording.save(stamps)
    assert _run("--load", str(stamps), "--plot", str(picture), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["clocks"] == [0, 1]
    assert document["clock_uncertainty"] == recording.alignment().uncertainty
    assert _run("--load", str(stamps), "--plot", str(one), "--rank", "1") == 0
    assert "Clocks of the GPUs agree to" in capsys.readouterr().out
    pixels = [_height(path) for path in (picture, one)]
    assert pixels[0] != pixels[1]
    draw(recording, tmp_path / "again.png")
    assert _height(tmp_path / "again.png") == pixels[0]
    assert _run("--devices", "0,a") == 2
    assert "Write --devices 0,1" in capsys.readouterr().err


def _height(path: Path) -> int:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[20:24], "big")
