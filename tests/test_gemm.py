"""Host side of the grouped GEMM: tile lists and packed scales against what the kernel does with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.cuda.gemm import (
    PLANS,
    GemmPlan,
    group_starts,
    pack_row_scales,
    pack_tile_scales,
    problem_from,
    tile_list,
)
from megamoe.errors import InputError
from megamoe.formats.layout import interleave_gate_up

plans = st.sampled_from(list(PLANS.values()))


@given(st.lists(st.integers(0, 700), max_size=7), st.integers(1, 20), plans)
@settings(max_examples=100, deadline=None)
def test_tiles_cover_every_row_and_column_once(counts: list[int], blocks: int, plan: GemmPlan) -> None:
    n = blocks * 128
    starts = group_starts(counts)
    covered = np.zeros((starts[-1] // 128, -(-n // plan.columns)), dtype=int)
    for x, y in tile_list(counts, n, plan).tolist():
        row, existing, column, group = x & 0xFFFFFF, x >> 24, y & 0xFFF, y >> 12
        assert 1 <= existing <= plan.cluster
        covered[row : row + existing, column] += 1
        # No tile reaches into another group.
        assert starts[group] <= row * 128
        assert (row + existing) * 128 <= starts[group + 1]
    assert (covered == 1).all()


def test_row_blocks_come_first_in_the_order() -> None:
    entries = tile_list([300, 0, 128], 512, GemmPlan())
    assert [(x & 0xFFFFFF, x >> 24, y & 0xFFF, y >> 12) for x, y in entries.tolist()] == [
        (0, 2, 0, 0),
        (2, 1, 0, 0),
        (0, 2, 1, 0),
        (2, 1, 1, 0),
        (3, 1, 0, 2),
        (3, 1, 1, 2),
    ]


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("plan", [GemmPlan(), GemmPlan(columns=192, buffers=3)], ids=lambda p: p.name)
def test_tile_scales_are_those_of_each_column(blocks: int, plan: GemmPlan) -> None:
    scales = torch.arange(2 * blocks * 3, dtype=torch.float32).view(2, blocks, 3) + 1
    packed = pack_tile_scales(scales, plan)
    per_scale = 128 if plan.columns == 256 else 64  # TileConfig::scale_index
    for column in range(blocks * 128):
        tile, inside = divmod(column, plan.columns)
        assert torch.equal(packed[:, tile, :, inside // per_scale], scales[:, column // 128])


def test_interleaved_tile_scales_follow_the_interleaved_rows() -> None:
    plan, half = GemmPlan(interleaved=True), 3 * 128
    scales = torch.arange(2 * 6 * 2, dtype=torch.float32).view(2, 6, 2) + 1
    block_of_row = torch.arange(2 * half).div(128, rounding_mode="floor")
    rows = interleave_gate_up(block_of_row.to(torch.uint8).view(1, -1, 1))[0, :, 0].long()
    packed = pack_tile_scales(scales, plan)
    for column, block in enumerate(rows.tolist()):
        tile, inside = divmod(column, plan.columns)
        assert torch.equal(packed[:, tile, :, inside // 8 % 2], scales[:, block])  # TileConfig::scale_index


def test_row_scales_are_transposed_and_padded() -> None:
    scales = torch.rand(130, 5)
    packed = pack_row_scales(scales)
    assert packed.shape == (5, 256)
    assert torch.equal(packed[:, :130].t(), scales)
    assert not packed[:, 130:].any()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("plan.columns", {"columns": 224}),
        ("plan.cluster", {"cluster": 3}),
        ("plan.buffers", {"buffers": 3}),
        ("plan.stages", {"stages": 5}),
        ("plan.interleaved", {"columns": 192, "buffers": 3, "interleaved": True}),
    ],
)
def test_impossible_plans_are_refused(field: str, fields: dict[str, int]) -> None:
    with pytest.raises(InputError) as error:
        GemmPlan(**fields)  # type: ignore[arg-type]
    assert error.value.argument == field


def test_groups_that_the_pool_cannot_hold_are_refused() -> None:
    a, b = torch.zeros(128, 256).to(torch.float8_e4m3fn), torch.zeros(2, 256, 256).to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match="counts"):
        problem_from(GemmPlan(), [1, 1], a, torch.ones(128, 2), b, torch.ones(2, 2, 2))
