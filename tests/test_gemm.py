"""Host side of the grouped GEMM: tile lists and packed scales against what the kernel does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cuda_fakes import FakeDriver
from megamoe.bench import gemm as bench
from megamoe.bench.gemm_cases import CASES, operands
from megamoe.cli.app import app
from megamoe.cuda.gemm import (
    PLANS,
    GemmPlan,
    GroupedGemm,
    Problem,
    group_starts,
    pack_row_scales,
    pack_tile_scales,
    problem_from,
    tile_list,
)
from megamoe.errors import InputError
from megamoe.formats.layout import interleave_gate_up
from megamoe.reference import Projection, project

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


SIZES = {"grouped_gemm": [128, 128, 128, 48]}


def _problem(plan: GemmPlan) -> tuple[Problem, tuple[torch.Tensor, ...]]:
    case = CASES["tiny"]
    given = operands(case)
    tensors = (given.a, given.a_scales, given.b, given.b_scales)
    return problem_from(plan, case.counts, *tensors), tensors


@pytest.mark.parametrize("plan", [GemmPlan(limit_ticks=2), PLANS["narrow"], PLANS["wide-f32"]], ids=lambda p: p.name)
def test_launch_passes_what_the_kernel_reads(plan: GemmPlan) -> None:
    driver = FakeDriver(SIZES)
    problem, _ = _problem(plan)
    gemm = GroupedGemm(plan, driver=driver)
    gemm(problem, stream=0)
    gemm(problem, stream=0)  # the maps of the first call serve again
    assert len(driver.encoded) == 3
    launch = driver.launches[0]
    assert launch.config.dynamic_shared == plan.shared_bytes
    assert launch.config.cluster == plan.cluster
    assert launch.grid == min(132, problem.tiles.shape[0] * plan.cluster)
    assert launch.grid % plan.cluster == 0
    words = np.frombuffer(launch.parameters[3], np.uint64, 4).tolist()
    assert words == [problem.row_scales.data_ptr(), problem.tile_scales.data_ptr(), problem.tiles.data_ptr(), 0]
    numbers = np.frombuffer(launch.parameters[3], np.int32, 4, 32).tolist()
    assert numbers == [problem.tiles.shape[0], 5, 512, problem.tile_scales.shape[1]]
    a, b, d = driver.encoded
    assert (a.dims, a.box) == ((640, 512), (128, 128))
    assert (b.dims, b.box) == ((640, 384, 3), (128, plan.columns // plan.cluster, 1))
    assert (d.dims, d.box, d.element) == (
        (384, 512),
        (plan.piece_columns, 64),
        "float32" if plan.float32 else "bfloat16",
    )


def test_nothing_to_do_launches_nothing() -> None:
    driver, plan = FakeDriver(SIZES), GemmPlan()
    _, tensors = _problem(plan)
    GroupedGemm(plan, driver=driver)(problem_from(plan, [0, 0, 0], *tensors), stream=0)
    assert not driver.launches


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("a", lambda p: p.a.view(torch.uint8)),
        ("row_scales", lambda p: p.row_scales[:-1]),
        ("tile_scales", lambda p: p.tile_scales[:, :1]),
        ("tiles", lambda p: p.tiles.long()),
        ("out", lambda p: p.out.float()),
    ],
)
def test_wrong_operands_are_refused_before_the_launch(field: str, change: Callable[[Problem], torch.Tensor]) -> None:
    driver, plan = FakeDriver(SIZES), GemmPlan()
    problem, _ = _problem(plan)
    gemm = GroupedGemm(plan, driver=driver)
    with pytest.raises(InputError, match=field):
        gemm(replace(problem, **{field: change(problem)}), stream=0)
    assert not driver.launches
    gemm(problem, stream=0)
    assert len(driver.launches) == 1


def test_a_depth_of_part_blocks_is_refused() -> None:
    problem, _ = _problem(GemmPlan())
    narrower = replace(problem, a=problem.a[:, :600].contiguous(), b=problem.b[:, :, :600].contiguous())
    with pytest.raises(InputError, match="depth 600"):
        GroupedGemm(GemmPlan(), driver=FakeDriver(SIZES))(narrower, stream=0)


def test_bench_workload_is_judged_by_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LOADS", {"qwen3": 2})
    load = bench.workload("qwen3", "down", tokens=32, device="cpu")
    assert load.rows == (128, 128)
    assert load.flop == 2 * 256 * 2048 * 768
    for group in range(2):
        part = slice(group * 128, group * 128 + 128)
        projection = Projection(load.b[group], load.b_scales[group])
        load.out[part] = project(projection, load.a[part], load.a_scales[part]).bfloat16()
    assert bench.oracle_error(load, (0, 1)) < 2e-3
    load.out[128, 0] += load.out.abs().max() * 20
    assert bench.oracle_error(load, (0,)) < 2e-3
    assert bench.oracle_error(load, (0, 1)) > 1e-2


def test_bench_prints_a_row_of_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "model": "flash",
        "phase": "down",
        "protocol": "paced",
        "engine": "megamoe",
        "plan": "128x256-s4-c2-peek",
        "kernel_us": {"median": 594.2, "min": 590.0, "max": 600.0, "samples": [594.2]},
        "tflops": 1389.4,
        "error": 1.66e-3,
    }
    monkeypatch.setattr(bench, "run", lambda request, tick: [row])
    about = {"topic": "gemm", "device": "H200", "gpus": 1, "torch": "2.11", "protocol": "as stated"}
    monkeypatch.setattr("megamoe.bench.environment.facts", lambda *_, **__: about)
    result = CliRunner().invoke(app, ["bench", "gemm"])
    assert result.exit_code == 0, result.output
    assert "128x256-s4-c2-peek" in result.output
    assert "1389" in result.output
