"""Weakened synchronisation calls are noticed, in self-test kernels and in our own; survivors are reviewed."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megamoe.cuda.sources import KERNELS
from megamoe.sim.build import HERE, Kernel
from megamoe.sim.mutation import KINDS, USUAL, Outcome, Site, Survivors, mutate
from megamoe.sim.plans import Runner, find, plans
from megamoe.sim.requirements import missing
from megamoe.sim.simulation import Launch

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SURVIVORS = Path(__file__).parent / "mutation_survivors.json"

CLASSES = {
    "missing empty wait": ("gemm/wide", "w", "loader.cuh"),
    "wrong count, too high": ("gemm/wide", "N", "tile.cuh"),
    "wrong count, too low": ("gemm/wide", "n", "tile.cuh"),
    "missing proxy fence": ("gemm/wide", "P", "store.cuh"),
    "accumulator read early": ("gemm/wide", "M", "mainloop.cuh"),
    "one group too early": ("gemm/narrow", "m", "mainloop.cuh"),
    "missing release": ("fused/swap", "R", "scatter.cuh"),
    "gpu instead of sys scope": ("fused/swap", "S", "scatter.cuh"),
    "relaxed instead of acquire": ("fused/swap", "Q", "combine.cuh"),
}
"""A bug of each class, planted into the project's kernels: plan, kind of mutation, file."""


@pytest.mark.parametrize("what", CLASSES)
def test_a_bug_of_each_class_in_the_projects_kernels_is_found(what: str) -> None:
    plan, kind, file = CLASSES[what]
    outcomes = mutate(plan, only=lambda site: site.kind == kind and file in site.where, workers=1)
    assert outcomes, f"{what}: no such call in {file} any more"
    noticed = [o for o in outcomes if o.noticed]
    assert noticed, f"{what}: nothing noticed {[o.site for o in outcomes]}"


@contextlib.contextmanager
def planted(directory: Path, plan: str, file: str, right: str, wrong: str) -> Iterator[Runner]:
    """`plan` with one line of the project's kernels changed."""
    shutil.copytree(KERNELS, directory / "kernels")
    changed = directory / "kernels" / file
    assert right in changed.read_text()
    changed.write_text(changed.read_text().replace(right, wrong))

    def moved(launches: Iterable[Launch]) -> list[Launch]:
        return [
            replace(x, kernel=Kernel(str(directory / "kernels" / x.kernel.source), x.kernel.entry, x.kernel.config))
            if (directory / "kernels" / x.kernel.source).exists()
            else x
            for x in launches
        ]

    with Runner(find(plan)) as runner:
        prepared = runner.prepared
        runner.prepared = replace(
            prepared, launches=moved(prepared.launches), again=[moved(stage) for stage in prepared.again]
        )
        yield runner


def test_counters_of_an_earlier_call_are_found_out(tmp_path: Path) -> None:
    """Flag reuse: one bank of counters for all calls instead of two."""
    with planted(tmp_path, "fused/swap", "sync.cuh", "return epoch % kBanks;", "return 0;") as runner:
        assert not all(runner.run(seed, checked=True).ok for seed in range(3))


def test_a_rank_that_is_done_before_its_ctas_have_read_the_counts_is_found_out(tmp_path: Path) -> None:
    """A peer then starts its next call and overwrites them; seldom, so in many schedules."""
    right = "wait_count(p, Phase::kList, 0, barrier_word(p, epoch, kListed), gridDim.x)"
    with planted(tmp_path, "fused/calls-empty", "scatter.cuh", right, "true") as runner:
        assert not all(runner.run(seed).ok for seed in range(1, 151))


def test_every_weakened_call_of_the_handshake_is_noticed() -> None:
    outcomes = mutate("selftest/handshake")
    assert len(outcomes) >= 7
    assert [o for o in outcomes if not o.noticed] == []
    assert {KINDS[o.site.kind] for o in outcomes} >= {"release -> relaxed", "store sys -> gpu", "acquire -> relaxed"}


def test_mutation_covers_every_kernel_file() -> None:
    assert set(USUAL) <= set(plans())


def test_survivors_are_known_by_their_text_not_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("x\n  ptx::syncwarp();  // why\ncall(y);\n")
    known = tmp_path / "survivors.json"
    site = Site("a.cuh:2 < a.cuh:3", "W")
    outcome = Outcome("plan", site, "")
    drafted = Survivors(known, [tmp_path]).draft([outcome, Outcome("other", site, ""), Outcome("p", site, "checked")])
    assert drafted == [
        {
            "where": "a.cuh: ptx::syncwarp(); // why < a.cuh: call(y);",
            "kind": "drop syncwarp",
            "plans": "plan, other",
            "why": "",
        }
    ]
    known.write_text(json.dumps(drafted))
    assert list(Survivors(known, [tmp_path]).unreviewed([outcome])) == [outcome]  # nobody has said why
    drafted[0]["why"] = "a barrier follows"
    known.write_text(json.dumps(drafted))
    (tmp_path / "a.cuh").write_text("\n\nx\n  ptx::syncwarp();  // why\ncall(y);\n")
    moved = Outcome("plan", Site("a.cuh:4 < a.cuh:5", "W"), "")
    assert list(Survivors(known, [tmp_path]).unreviewed([moved])) == []
    (tmp_path / "a.cuh").write_text("ptx::syncwarp();  // why\n  ptx::syncwarp();  // why\ncall(y);\n")
    second = Outcome("plan", Site("a.cuh:2 < a.cuh:3", "W"), "")
    assert list(Survivors(known, [tmp_path]).unreviewed([second])) == [second]  # another call that reads the same
    other = Outcome("plan", Site("a.cuh:4 < a.cuh:5", "B"), "")
    assert list(Survivors(known, [tmp_path]).unreviewed([other])) == [other]


def test_an_entry_that_quotes_a_line_which_is_gone_is_stale(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("for (u32 i = 0; i < n; ++i) ptx::syncwarp();\ncall(y);\ncall(y);\n")
    where = "a.cuh: for (u32 i = 0; i < n; ++i) ptx::syncwarp(); < a.cuh: call(y); #2"
    entry = {"where": where, "kind": "drop syncwarp", "plans": "p", "why": "w"}
    known = tmp_path / "survivors.json"
    known.write_text(json.dumps([entry]))
    assert Survivors(known, [tmp_path]).stale() == []
    for changed in (where.replace("< n", "< m"), where.replace("#2", "#3"), where.replace("call(y)", "call(x)")):
        known.write_text(json.dumps([entry, {**entry, "where": changed}]))
        assert [e["where"] for e in Survivors(known, [tmp_path]).stale()] == [changed]


def test_no_reviewed_survivor_quotes_a_line_that_is_gone() -> None:
    assert Survivors(SURVIVORS, (KERNELS, HERE)).stale() == []


def test_the_survivors_file_is_reviewed() -> None:
    entries = json.loads(SURVIVORS.read_text())
    assert all(set(e) == {"where", "kind", "plans", "why"} for e in entries)
    assert all(e["why"] for e in entries)
    assert {e["kind"] for e in entries} <= set(KINDS.values())
