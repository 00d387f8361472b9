"""The tiles of the fused kernel: every route is in exactly one, and no tile waits for one that comes after it."""

from __future__ import annotations

from ctypes import c_uint32
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.cuda.arena import Sizes
from megamoe.cuda.plan import Plan
from megamoe.sim.build import Kernel
from megamoe.sim.requirements import missing
from megamoe.sim.simulation import Launch, Simulation

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SOURCE = Path(__file__).parent / "sim_kernels" / "tiles.cu"
EXPERTS, HIDDEN, INTERMEDIATE = 7, 768, 512
FIRST, SECOND = INTERMEDIATE // 128, HIDDEN // 256  # weight tiles of the two GEMMs
CARRIED = {144: [144], 145: [128, 17], 272: [128, 144], 288: [144, 144], 289: [128, 128, 33]}
"""Tiles of an expert's rows where a full tile may carry sixteen more."""
GRID = 1  # CTAs of the kernel that asks

PLANS = {
    "wide": Plan(swap=False, stages=2),
    "swap": Plan(wide=False, stages=2),
    "mixed": Plan(stages=2),
    "carrying": Plan(stages=2, carried_tokens=16),
    "waves": Plan(stages=2, wave_experts=3),
    "lag": Plan(stages=2, wave_experts=2, lag=1),
    "long-lag": Plan(stages=2, wave_experts=2, lag=3),
    "never": Plan(stages=2, link_bytes=0),
    "one-wave": Plan(stages=2, wave_experts=9),  # more than there are: all of them, and no other order
    "passes": Plan(stages=2, passes=True, direct_tokens=0),
    "passes-carrying": Plan(stages=2, carried_tokens=16, passes=True, direct_tokens=0),
    "passes-swap": Plan(stages=2, wide=False, passes=True, direct_tokens=0),
    "passes-lag": Plan(stages=2, wave_experts=2, lag=1, passes=True, direct_tokens=0),
}
POOL_ROWS = 520


def sizes(plan: Plan) -> Sizes:
    return Sizes(
        hidden=HIDDEN, intermediate=INTERMEDIATE, topk=2, ranks=2, local_experts=EXPERTS, capacity=4096,
        pool_limit=POOL_ROWS if plan.passes else None,
    )  # fmt: skip


def kernel(plan: Plan, entry: str) -> Kernel:
    return Kernel.of(SOURCE, entry, plan.config(sizes(plan)))


@pytest.mark.parametrize("name", ["wide", "swap", "mixed", "carrying"])
def test_an_experts_tiles_cover_its_rows(name: str) -> None:
    plan, count, tiles = PLANS[name], 1200, 20
    with Simulation() as sim:
        out = sim.buffer("out", torch.zeros(count * (tiles + 4), dtype=torch.int32))
        report = sim.run([Launch(kernel(plan, "tilings"), 1, 64, [[out, c_uint32(count)]])], seed=0)
        assert report.ok, report
        table = out.tensor.view(count, tiles + 4).tolist()
    largest = 128 if plan.wide else 64
    for rows, (number, wide, *starts, wrong) in enumerate(table):
        assert wrong == 0
        assert number == 0 if rows == 0 else number <= -(-rows // largest)  # what the pools have room for
        lengths = [b - a for a, b in pairwise(starts)][:number]
        assert sum(lengths) == rows
        assert starts[0] == 0
        for m, length in enumerate(lengths):
            assert starts[m] % 8 == 0  # where scales can be copied in bulk
            assert 0 < length <= (128 + plan.carried_tokens if m < wide else 64)
            if m < wide and plan.swap:
                assert length > 64  # else it is cheaper swapped
        if plan.carried_tokens:
            assert sum(length > 128 for length in lengths) <= 2
            if rows in CARRIED:
                assert lengths == CARRIED[rows]
        else:
            assert number == -(-rows // largest)


def check_passes(items: list[tuple[int, ...]], rows: int, tiles: int, in_pass: int) -> None:
    """Pass after pass, each with equally many tiles but the last, at the beginning of the pools and inside them."""
    room = POOL_ROWS - 128
    begins: dict[int, int] = {}
    last = 0
    for _, _, _, row, length, _, index, number, pooled, _ in items:
        assert number >= last
        last = number
        assert number == index // in_pass
        assert begins.setdefault(number, row - pooled) == row - pooled
        assert 0 <= pooled <= pooled + length <= room
    ends = [*(begins[p] for p in range(1, last + 1)), rows]
    assert begins.get(0, 0) == 0
    assert all(end - begins[p] <= room for p, end in enumerate(ends) if p in begins)
    if rows <= room:
        assert last == 0
    assert in_pass * last < max(1, tiles) <= max(1, in_pass * (last + 1))


@given(
    st.sampled_from(sorted(PLANS)),
    st.lists(st.integers(0, 300), min_size=EXPERTS, max_size=EXPERTS),
    st.integers(0, 2000),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_the_order_has_every_tile_once_and_nobody_waits_for_a_later_one(
    name: str, counts: list[int], remote: int, step: int
) -> None:
    plan, remote = PLANS[name], min(remote, sum(counts))  # some of the routes
    most = sum(-(-c // 64) for c in counts) * (FIRST + SECOND) + 1
    with Simulation() as sim:
        given_counts = sim.buffer("counts", torch.tensor(counts, dtype=torch.int32), read_only=True)
        out = sim.buffer("out", torch.zeros(most * 10, dtype=torch.int32))
        facts = sim.buffer("facts", torch.zeros(3, dtype=torch.int32))
        shared = plan.shared(sizes(plan)).total
        arguments = [given_counts, out, facts, *map(c_uint32, (remote, step, sizes(plan).pool_rows))]
        launch = Launch(kernel(plan, "sequence"), GRID, 32, [arguments], shared=shared)
        report = sim.run([launch], seed=0)
        assert report.ok, report
        every = [tuple(t) for t in out.tensor.view(-1, 10).tolist() if t[9]]
        wave, lag, in_pass = facts.tensor.tolist()
    items = [t[:7] for t in every]

    tiles: dict[int, list[tuple[int, int, int]]] = {}  # of each expert: index, row, rows
    for second, expert, column, row, rows, _, index in items:
        if not second and column == 0:
            tiles.setdefault(expert, []).append((index, row, rows))
    base, numbered = 0, 0
    for expert, count in enumerate(counts):
        own = sorted(tiles.get(expert, []))
        assert [i for i, _, _ in own] == list(range(numbered, numbered + len(own)))
        assert sum(rows for _, _, rows in own) == count
        at = base
        for _, row, rows in own:
            assert row == at
            at += rows
        base, numbered = base + -(-count // 8) * 8, numbered + len(own)
    expected = {
        (s, e, c, *tile) for e, own in tiles.items() for tile in own for s in (0, 1) for c in range((FIRST, SECOND)[s])
    }
    assert len(items) == len(expected)
    assert {(s, e, c, index, row, rows) for s, e, c, row, rows, _, index in items} == expected

    finished: dict[int, int] = {}  # token tile: place of its last first-GEMM tile
    for place, (second, *_, index) in enumerate(items):
        if second:
            assert finished[index] < place
        else:
            finished[index] = place
    for place, (second, *_, index) in enumerate(items):
        assert not second or finished[index] < place

    if plan.passes:
        check_passes(every, base, numbered, in_pass)
    else:
        assert all((pass_, pooled) == (0, row) for *_, row, _, _, _, pass_, pooled, _ in every)

    if plan.wave_experts is not None:
        assert (wave, lag) == (min(EXPERTS, plan.wave_experts), plan.lag)
    elif (
        plan.wide
        and plan.link_bytes
        and remote * HIDDEN * 2 > plan.link_bytes * numbered * SECOND * (INTERMEDIATE // 128)
    ):
        assert (wave, lag) == (min(EXPERTS, -(-2 * GRID * EXPERTS // (numbered * FIRST))), 1)
    else:
        assert (wave, lag) == (EXPERTS, 0)
