"""Every planted bug of the self-test kernels is found in a few seeds; what is harmless there is not reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from megamoe.sim.build import build_all
from megamoe.sim.plans import Prepared, Runner, SimPlan
from megamoe.sim.report import Report
from megamoe.sim.requirements import missing
from megamoe.sim.selftest import BUGS
from megamoe.sim.selftest.cases import gemm, handshake, moe

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

pair = functools.partial(gemm, columns=128, cluster=2, shape=(512, 256, 512))


@dataclass(frozen=True)
class Planted:
    """A bug, and what the race checker says of it; `plain`: whether results, deadlocks or poison alone show it."""

    kernel: str
    build: Callable[..., Prepared]
    name: str
    says: str
    plain: bool = False

    @property
    def number(self) -> int:
        return BUGS[self.kernel.split("-")[0]].index(self.name)


PLANTED = (
    Planted("handshake", handshake, "relaxed flag", "RACE"),
    Planted("handshake", handshake, "gpu scope instead of sys", "RACE"),
    Planted("handshake", handshake, "one buffer instead of two", "RACE", plain=True),
    Planted("handshake", handshake, "no barrier before the flag", "RACE", plain=True),
    Planted("handshake", handshake, "fence with gpu scope", "RACE"),
    Planted("handshake", handshake, "relaxed load without a fence", "RACE"),
    Planted("gemm", gemm, "no wait on the empty barrier", "more arrivals than its count", plain=True),
    Planted("gemm", gemm, "empty count too low", "OVERWRITTEN"),
    Planted("gemm", gemm, "empty count too high", "waits for mbarrier empty", plain=True),
    Planted("gemm", gemm, "accumulators read before wgmma_wait", "still in flight", plain=True),
    Planted("gemm", gemm, "stage released before wgmma_wait", "OVERWRITTEN while in use"),
    Planted("gemm", gemm, "no proxy fence before the TMA store", "MISSING PROXY FENCE"),
    Planted("gemm", gemm, "no barrier before the TMA store", "RACE", plain=True),
    Planted("gemm", gemm, "expect_tx 16 bytes short", "waits for mbarrier", plain=True),
    Planted("gemm", gemm, "wrong first parity", "waits for mbarrier empty[0]", plain=True),
    Planted("gemm", gemm, "read wait instead of full wait before the flag", "RACE with a copy"),
    Planted("gemm", gemm, "relaxed flag between CTAs", "RACE"),
    Planted("gemm", gemm, "no syncwarp before the release of a stage", "OVERWRITTEN"),
    Planted("gemm", gemm, "no syncwarp after the acquire of a flag", "RACE", plain=True),
    Planted("gemm-pair", pair, "stage released to the own CTA only", "waits for mbarrier empty", plain=True),
    Planted("moe", moe, "no proxy fence on the intermediate", "MISSING PROXY FENCE"),
    Planted("moe", moe, "read wait before the peer's flag", "RACE of copies"),
    Planted("moe", moe, "gpu scope to the peer", "RACE"),
)

HARMLESS = (
    Planted("handshake", handshake, "none: fence and relaxed flag", ""),
    Planted("gemm", gemm, "none: staging reused without a read wait", ""),
    Planted("gemm-pair", pair, "none: no final cluster barrier", ""),
)


def _reports(planted: Planted, seeds: range, *, checked: bool) -> list[Report]:
    prepare: Any = functools.partial(planted.build, bug=planted.number)
    with Runner(SimPlan(planted.kernel, prepare)) as runner:
        return [runner.run(seed, checked=checked) for seed in seeds]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    kernels = set()
    for build in (handshake, gemm, pair, moe):
        with Runner(SimPlan("build", build)) as runner:
            kernels |= {(k, checked) for k in runner.kernels() for checked in (False, True)}
    build_all(kernels)


def _id(planted: Planted) -> str:
    return f"{planted.kernel}: {planted.name}"


def test_every_bug_is_in_one_of_the_lists() -> None:
    named = {(p.kernel.split("-")[0], p.name) for p in (*PLANTED, *HARMLESS)}
    assert named == {(kernel, name) for kernel, names in BUGS.items() for name in names if name != "none"}


@pytest.mark.parametrize("planted", PLANTED, ids=_id)
def test_the_race_checker_finds_it_in_every_seed(planted: Planted) -> None:
    for report in _reports(planted, range(1, 3), checked=True):
        assert report.has(planted.says), report


@pytest.mark.parametrize("planted", [p for p in PLANTED if p.plain], ids=_id)
def test_a_plain_run_finds_it_within_twenty_seeds(planted: Planted) -> None:
    prepare: Any = functools.partial(planted.build, bug=planted.number)
    with Runner(SimPlan(planted.kernel, prepare)) as runner:
        assert not all(runner.run(seed).ok for seed in range(1, 21))


@pytest.mark.parametrize("planted", HARMLESS, ids=_id)
def test_what_is_harmless_is_not_reported(planted: Planted) -> None:
    for checked, seeds in ((False, range(10)), (True, range(2))):
        for report in _reports(planted, seeds, checked=checked):
            assert report.ok, report
