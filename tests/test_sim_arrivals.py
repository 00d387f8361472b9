"""mbarrier arrival counts: constants, the tables in the files' comments, and who arrives in a simulated run agree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megamoe.cuda.sources import KERNELS
from megamoe.sim.arrivals import FUSED, GEMM, Pipelines, breaches, constants, observed, table, warps
from megamoe.sim.requirements import missing

needs_simulator = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def test_the_fused_kernel_states_its_counts() -> None:
    assert breaches(FUSED) == []


@pytest.mark.parametrize("cluster", [1, 2])
def test_the_grouped_gemm_states_its_counts(cluster: int) -> None:
    assert breaches(GEMM, cluster=cluster) == []


@needs_simulator
@pytest.mark.parametrize("plan", ["queue", "mixed", "lag", "waves"])  # those whose dispatch warps fetch rows
def test_the_fused_kernel_arrives_as_stated(plan: str) -> None:
    assert breaches(FUSED, observed(f"fused/{plan}")) == []


@needs_simulator
@pytest.mark.parametrize(("plan", "cluster"), [("wide", 2), ("narrow-single", 1)])
def test_the_grouped_gemm_arrives_as_stated(plan: str, cluster: int) -> None:
    assert breaches(GEMM, observed(f"gemm/{plan}"), cluster=cluster) == []


def _planted(tmp_path: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(KERNELS, tmp_path / "kernels")
    path = tmp_path / "kernels" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return tmp_path / "kernels"


@pytest.mark.parametrize(
    ("pipelines", "file", "old", "new", "barrier"),
    [
        (FUSED, "layout.cuh", "kEmptyArrivals = 4 * kMathWarpgroups", "kEmptyArrivals = 4", "empty"),
        (FUSED, "layout.cuh", "kQueueEmptyArrivals = 8 + 2", "kQueueEmptyArrivals = 8", "taken"),
        (FUSED, "layout.cuh", "kStagedArrivals = 4", "kStagedArrivals = 128", "staged"),
        (FUSED, "mega_sm90.cu", "kPulledArrivals   one", "kFreeArrivals     one", "kPulledArrivals"),
        (FUSED, "mega_sm90.cu", "warps 4 - 11 ", "warps 4 - 10 ", "empty"),
        (GEMM, "tile.cuh", "4 * kMathWarpgroups * Cluster", "4 * kMathWarpgroups", "empty"),
    ],
)
def test_a_wrong_count_is_found(
    tmp_path: Path, pipelines: Pipelines, file: str, old: str, new: str, barrier: str
) -> None:
    found = breaches(pipelines, cluster=2 if pipelines is GEMM else 1, kernels=_planted(tmp_path, file, old, new))
    assert any(barrier in line for line in found), found


def test_arrivals_of_a_run_that_differ_are_found() -> None:
    good = {
        "full": ["loader 1/1"],
        "empty": ["math 8/8"],
        "staged": ["math 4/4"],
        "free": ["store 1/1"],
        "pulled": ["dispatch 1/1"],
        "tile": ["loader 1/1"],
        "taken": ["math 8/8, store 2/2"],
    }
    assert breaches(FUSED, good) == []
    twice = breaches(FUSED, {**good, "empty": ["math 8/7", "math 8/8"]})  # one warp arrived twice, one not at all
    assert [line for line in twice if "empty" in line and "math 8/7" in line]
    assert breaches(FUSED, {**good, "new": ["math 1/1"]})
    assert breaches(FUSED, {k: v for k, v in good.items() if k != "free"})


def test_the_parsers() -> None:
    text = "//   warps 1, 2    store\n//   warp 3        dispatch  x\n//   a[i]   math warps -> loader   kAArrivals\n"
    assert warps(text) == {"store": 2, "dispatch": 1}
    assert table(text) == {"a": "kAArrivals"}
    assert constants("static constexpr u32 kAArrivals = 2 * kMathWarpgroups + 3;") == {"kAArrivals": 7}
    with pytest.raises(ValueError, match="sum of products"):
        constants("constexpr u32 kAArrivals = 8 / 2;")
