"""Plans and the memory of the fused kernel: legality, budgets, the generated header."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.bench.models import MODELS as BENCHMARKED
from megamoe.cuda.arena import ARENA, WORKSPACE, Sizes, device_header, offsets, total_bytes
from megamoe.cuda.fused import sizes_of
from megamoe.cuda.plan import FACT_WORDS, REGISTERS_PER_SM, SHARED_LIMIT, Plan
from megamoe.cuda.select import select_plan
from megamoe.cuda.shipped import CARRYING
from megamoe.cuda.sources import KERNELS
from megamoe.errors import EngineError

# Hidden and intermediate sizes of public models that FP8 blocks can hold.
MODELS = (
    (7168, 2048),
    (4096, 2048),
    (7168, 3072),
    (5120, 2304),
    (4096, 1536),
    (2048, 768),
    (2048, 512),
    (4096, 1024),
    (3584, 3072),
    (5120, 1536),
    (4096, 1408),
    (6144, 2048),
    (3072, 1536),
    (6144, 3072),
)

sizes = st.builds(
    lambda model, el, topk, ranks, capacity: Sizes(
        hidden=model[0], intermediate=model[1], topk=topk, ranks=ranks, local_experts=el, capacity=capacity
    ),
    st.sampled_from(MODELS),
    st.integers(1, 896),
    st.integers(1, 16),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 16384),
)


@given(sizes, st.integers(1, 16384))
@settings(max_examples=300, deadline=None)
def test_every_public_shape_gets_a_legal_plan(s, bound):
    plan = select_plan(s, min(bound, s.capacity))
    config = plan.config(s)
    assert config["kSharedBytes"] <= SHARED_LIMIT
    assert 128 * plan.role_registers + 256 * plan.math_registers <= REGISTERS_PER_SM


@pytest.mark.parametrize("name", sorted(CARRYING))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_compiled_plans_have_one_that_carries(name, ranks):
    spec = BENCHMARKED[name].spec
    s = sizes_of(replace(spec, experts=spec.experts // 8 * ranks), ranks, 8192)
    assert select_plan(s, CARRYING[name]).carried_tokens == 16
    assert [select_plan(s, bound).carried_tokens for bound in (1, 64, 8192)] == [0, 0, 0]


def test_the_facts_have_the_room_that_the_kernel_takes():
    listed = (KERNELS / "layout.cuh").read_text().partition("enum Fact : u32 {")[2].partition("kFactCount")[0]
    facts = re.findall(r"\bk\w+", re.sub(r"//.*", "", listed))
    assert "kEpoch" in facts
    assert len(facts) == FACT_WORDS


@given(sizes, st.integers(1, 16384))
@settings(max_examples=100, deadline=None)
def test_row_major_weights_need_no_other_plan(s, bound):
    plan = select_plan(s, min(bound, s.capacity))
    rows = replace(plan, weights="rows")
    assert rows.shared(s) == plan.shared(s)
    differ = {k for k, v in rows.config(s).items() if plan.config(s)[k] != v}
    assert differ == {"kRowMajorWeights"}


@given(sizes)
@settings(max_examples=100, deadline=None)
def test_shared_memory_regions_follow_each_other(s):
    plan = select_plan(s, s.capacity)
    layout = plan.shared(s)
    starts = [
        layout.staging,
        layout.pulled_rows,
        layout.row_scales,
        layout.tile_scales,
        layout.amax,
        layout.tables,
        layout.barriers,
    ]
    assert starts == sorted(starts)
    assert layout.pulled_rows - layout.staging >= 2 * plan.staging_buffers * (64 * 256 + 7 * 16)
    assert layout.row_scales - layout.pulled_rows >= plan.pulled_rows * s.hidden
    assert layout.barriers - layout.tables >= s.local_experts * 12 + FACT_WORDS * 4
    assert layout.barriers % 8 == 0
    assert layout.staging % 1024 == 0


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (Plan(wide=False, swap=False), "kind of tile"),
        (Plan(stages=1), "2 to 8 stages"),
        (Plan(stages=8), "at most 232448"),
        (Plan(role_registers=64, math_registers=232), "at most 65536"),
        (Plan(wave_experts=0), "at least 1"),
        (Plan(lag=-1), "0 or more"),
        (Plan(link_bytes=-1), "plan.link_bytes: got -1; allowed: 0 or more"),
        (Plan(urgent_tokens=2063), "plan.urgent_tokens: got 2063; allowed: 0 to 2062"),
        (Plan(carried_tokens=8), "plan.carried_tokens: got 8; allowed: 0, or 16 with wide and swap"),
        (Plan(carried_tokens=16, swap=False), "0, or 16 with wide and swap"),
        (Plan(weights="columns"), "plan.weights: got columns; allowed: 'tiles' or 'rows'"),
    ],
)
def test_illegal_plans_say_what_does_not_fit(plan, what):
    s = Sizes(hidden=4096, intermediate=2048, topk=6, ranks=8, local_experts=32, capacity=8192)
    with pytest.raises(EngineError, match=what):
        plan.config(s)


@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 2880), (4096, 1400), (64, 128)])
def test_sizes_that_fp8_blocks_cannot_hold_name_the_way_out(hidden, intermediate):
    s = Sizes(hidden=hidden, intermediate=intermediate, topk=4, ranks=1, local_experts=8, capacity=64)
    with pytest.raises(EngineError, match="BF16"):
        Plan().config(s)


def test_the_device_header_is_the_one_that_arena_py_describes():
    assert (KERNELS / "arena_gen.cuh").read_text() == device_header(), "run tools/generate_arena.py"


@given(sizes)
@settings(max_examples=100, deadline=None)
def test_fields_do_not_overlap(s):
    for fields in (ARENA, WORKSPACE):
        at = offsets(fields, s)
        ends = [a + f.itemsize * f.count(s) for a, f in zip(at, fields, strict=True)]
        assert all(end <= start for end, start in zip(ends, at[1:], strict=False))
        assert ends[-1] <= total_bytes(fields, s)
        assert all(a % 1024 == 0 for a in at)


def test_arena_of_the_largest_common_layer_stays_below_512_mib():
    s = Sizes(hidden=4096, intermediate=2048, topk=6, ranks=8, local_experts=32, capacity=8192)
    assert total_bytes(ARENA, s) <= 512 * 2**20
    said = " ".join((Path(__file__).parents[1] / "docs" / "tuning.md").read_text().split())
    mib = [round(total_bytes(fields, s) / 2**20) for fields in (ARENA, WORKSPACE)]
    assert "its arena takes {} MiB and its workspace, shared by all layers of a shape, {} MiB".format(*mib) in said


@given(sizes, st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_pools_hold_any_routing(s, seed):
    # All routes on one expert, or one route on each: whatever the counts, rows and tiles stay inside the tables.
    small = replace(s, capacity=min(s.capacity, 512))
    counts = [0] * small.local_experts
    counts[seed % small.local_experts] = small.pool_routes
    spread = [small.pool_routes // small.local_experts + (e < small.pool_routes % small.local_experts)
              for e in range(small.local_experts)]  # fmt: skip
    for routes in (counts, spread):
        rows = sum(-(-n // 8) * 8 for n in routes)
        assert rows + 128 <= small.table_rows
        assert sum(-(-n // 64) for n in routes) <= small.pool_tiles


@given(sizes, st.integers(1, 8192))
@settings(max_examples=200, deadline=None)
def test_the_chosen_plan_has_passes_where_a_call_can_need_more_rows_than_a_pool_has(s, bound):
    bound = min(bound, s.capacity)
    plan, most = select_plan(s, bound), s.rows_for(s.ranks * bound * s.topk)
    assert plan.passes == (most > s.pool_rows)
    even = -(-s.capacity * s.topk // (1 if s.ranks <= 2 else 2))
    assert min(s.table_rows, s.rows_for(even)) <= s.pool_rows <= s.table_rows
    assert s.pool_rows >= min(s.table_rows, s.rows_for(plan.direct_tokens * s.topk))
    if plan.passes:  # even if all tiles had the largest size, so many passes have room for all of them
        assert -(-s.pool_tiles // s.max_passes) * (plan.tile_tokens) <= s.pool_rows - 128


def test_arena_and_pools_of_a_common_layer_stay_below_700_mib():
    s = Sizes(hidden=4096, intermediate=2048, topk=6, ranks=8, local_experts=32, capacity=8192)
    assert total_bytes(ARENA, s) + total_bytes(WORKSPACE, s) <= 700 * 2**20


def test_pools_whose_scales_need_wider_indices_are_refused() -> None:
    sizes = Sizes(hidden=7168, intermediate=3072, topk=16, ranks=8, local_experts=48, capacity=10_000_000)
    plan = Plan(wide=True, swap=True, stages=2)
    with pytest.raises(EngineError, match=r"max_tokens: got 10000000.*32-bit"):
        plan.check(sizes)
    plan.check(replace(sizes, capacity=9_000_000))


def test_what_a_reset_clears_is_what_is_carried_from_call_to_call() -> None:
    """Counters by bank, words that peers tag, the epoch and the abort word; `passes` was once forgotten."""
    for field in (*ARENA, *WORKSPACE):
        carried = field.doc.startswith(("[bank]", "written by", "raised by", "calls completed"))
        assert field.state == carried, field.name
