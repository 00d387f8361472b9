"""The conformance cases without a GPU: they run, in the checked simulator too, and the comparison can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamoe.bench.conformance import Case, MapOf, Recorded, Simulator, compare, digest, record, rows
from megamoe.bench.conformance_cases import CASES
from megamoe.sim.requirements import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

_BY_NAME = {case.name: case for case in CASES}


def test_names_are_unique() -> None:
    assert len(_BY_NAME) == len(CASES)


@pytest.mark.parametrize("name", [n for n in _BY_NAME if not n.startswith("wgmma")])
def test_two_schedules_agree(name: str) -> None:
    case = _BY_NAME[name]
    first, second = Simulator(seed=1, checked=True).run(case), Simulator(seed=2).run(case)
    assert digest(first) == digest(second)


def test_products_are_exact_sums_of_integers() -> None:
    case = _BY_NAME["wgmma-n24-integers"]
    x, y = (t.double() for t in case.inputs().values())
    out = Simulator(checked=True).run(case)["out"].double()
    for source in range(2):
        assert torch.equal(out[0, source], x @ y.T)
        assert torch.equal(out[1, source], y @ x.T)


def test_recorded_outputs_are_the_engines(tmp_path: Path) -> None:
    cases = [_BY_NAME["wgmma-n8-integers"], _BY_NAME["promotion-and-quantisation-any-bits"]]
    record(tmp_path, Simulator(), cases)
    made = rows(cases, Recorded(tmp_path), Simulator(seed=3))
    assert [row["ok"] for row in made] == [True, True]
    assert all(row["sha256"] == row["sha256_simulator"] for row in made)


def _case(bound: float) -> Case:
    return Case("c", "", "", dict, {"f": ((4,), torch.float32), "b": ((4,), torch.uint8)}, bound=bound)


def test_comparison_tells_exact_from_bounded() -> None:
    nan = float("nan")
    given = {"f": torch.tensor([1.0, 2.0, nan, 0.0]), "b": torch.arange(4, dtype=torch.uint8)}
    near = {**given, "f": torch.tensor([1.0, 2.0000002, -nan, 0.0])}
    assert compare(_case(0.0), given, {n: t.clone() for n, t in given.items()})["ok"]
    assert not compare(_case(0.0), given, near)["ok"]
    assert compare(_case(1e-6), given, near)["ok"]
    assert not compare(_case(1e-6), given, {**given, "f": torch.tensor([1.0, nan, 2.0, 0.0])})["ok"]
    assert not compare(_case(1e-6), given, {**given, "b": torch.ones(4, dtype=torch.uint8)})["ok"]


def test_a_nan_reaches_its_row_and_column_only() -> None:
    case = _BY_NAME["wgmma-n8-nan"]
    x, y = (t.float() for t in case.inputs().values())
    touched = x.isnan().any(1)[:, None] | y.isnan().any(1)[None, :]
    out = Simulator().run(case)["out"]
    assert 0 < int(touched.sum()) < touched.numel()
    for source in range(2):
        assert torch.equal(out[0, source].isnan(), touched)
        assert torch.equal(out[1, source].isnan(), touched.T)


_STORE = """
#include "config.cuh"
#include "ptx.cuh"
struct Arguments {
  unsigned char* out;
};
extern "C" __global__ void __launch_bounds__(32)
    store(const __grid_constant__ CUtensorMap out, const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const ptx::Smem base = ptx::shared_address(smem);
  for (unsigned i = threadIdx.x; i < 128; i += 32) ptx::st_shared_u32(base + i * 4, i);
  ptx::fence_proxy_async_shared();
  ptx::syncwarp();
  if (threadIdx.x == 0) {
    ptx::tma_store_2d(&out, base, config::kX, config::kY);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}
"""


@pytest.mark.parametrize(
    ("x", "y", "finding"),
    [(16, 8, None), (48, 30, None), (8, 0, "not a multiple of 16"), (-16, 0, "negative"), (0, -1, "negative")],
)
def test_stores_that_fault_on_hardware_are_findings(tmp_path: Path, x: int, y: int, finding: str | None) -> None:
    (tmp_path / "store.cu").write_text(_STORE)
    case = Case(
        name="store",
        source=str(tmp_path / "store.cu"),
        entry="store",
        inputs=dict,
        outputs={"out": ((40, 64), torch.uint8)},
        config={"kX": x, "kY": y},
        threads=32,
        shared=1024,
        maps=(MapOf("out", "uint8", (64, 40), (64,), (32, 16), swizzle=0),),
    )
    if finding is None:
        out = Simulator().run(case)["out"]
        inside = out[y : y + 16, x : x + 32]
        box = torch.arange(128, dtype=torch.int32).view(torch.uint8).view(16, 32)
        assert torch.equal(inside, box[: inside.shape[0], : inside.shape[1]])
        assert int((out != 0xA5).sum()) <= inside.numel()
    else:
        with pytest.raises(AssertionError, match=finding):
            Simulator().run(case)
