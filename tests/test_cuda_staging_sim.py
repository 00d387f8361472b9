"""The staging kernel itself, on the simulator: the codec's bits in every plan, under several schedules, no race."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megamoe.cuda import staging
from megamoe.cuda.staging import PLANS, Stager, StagingPlan
from megamoe.cuda.toolchain import Job
from megamoe.formats.fp8_block import quantize_activations
from megamoe.sim.driver import SimDriver, compiled
from megamoe.sim.requirements import missing
from megamoe.sim.simulation import Simulation

pytestmark = pytest.mark.skipif(bool(missing()), reason="the simulator needs g++, AVX2 and FSGSBASE")

H = 384  # three groups a row, so that a warp's groups cross rows


@pytest.fixture(autouse=True)
def _no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "raw_stream", lambda stream, ordinal: 0)
        patch.setattr(staging, "compile_kernel", lambda source, config, arch: compiled(Job(source, config, arch)))
        yield


def rows_with_everything(rows: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, H // 128, 128, generator=g)
    x = (x * torch.exp2(torch.randint(-40, 40, (rows, H // 128, 1), generator=g))).view(rows, H).bfloat16()
    nan, inf = float("nan"), float("inf")
    for i in range(0, rows, 2):
        x[i, (37 * i) % H] = (nan, inf, -inf, -nan)[i // 2 % 4]
    x[1], x[3, :128] = 0.0, -0.0
    return x


@pytest.mark.parametrize("count", [None, 5, 0, -1, 99], ids=str)
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_the_kernel_has_the_codecs_bits(plan: StagingPlan, scale_format: str, count: int | None) -> None:
    rows = 11
    given = rows_with_everything(rows)
    want_q, want_s = quantize_activations(given, scale_format)  # type: ignore[arg-type]
    written = rows if count is None else min(max(count, 0), rows)
    with Simulation() as sim:
        driver = SimDriver(sim)
        stager = Stager(H, scale_format, driver=driver, plans=(plan,))  # type: ignore[arg-type]
        x = sim.buffer("x", torch.zeros(rows, H + 8).bfloat16(), read_only=True).tensor
        q = sim.buffer("q", torch.zeros(rows, H + 16, dtype=torch.uint8)).tensor
        s = sim.buffer("s", torch.zeros(rows, H // 128 + 1)).tensor
        n = sim.buffer("n", torch.tensor([count or 0], dtype=torch.int32), read_only=True).tensor
        x[:, 8:] = given
        for seed in range(3):
            q.fill_(0xA5)
            s.fill_(-1.0)
            stager(x[:, 8:], q[:, :H], s[:, :-1], num_tokens=None if count is None else n, plan=plan)
            report = driver.run(seed=seed, checked=True)
            assert not report.findings, report
            assert torch.equal(q[:written, :H], want_q.view(torch.uint8)[:written])
            assert bool((q[written:] == 0xA5).all())
            assert bool((q[:, H:] == 0xA5).all())
            nan = want_s[:written].isnan()
            assert torch.equal(s[:written, :-1].isnan(), nan)
            assert torch.equal(s[:written, :-1][~nan], want_s[:written][~nan])
            assert bool((s[written:] == -1).all())
            assert bool((s[:, -1] == -1).all())
