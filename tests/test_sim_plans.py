"""Every registered plan under many schedules: the oracle's numbers, no race, no hang, in plain and in checked runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megamoe.errors import InputError
from megamoe.sim.plans import Runner, find, plans
from megamoe.sim.report import Report
from megamoe.sim.requirements import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def _reports(name: str, *, checked: bool) -> Iterator[Report]:
    plan = find(name)
    with Runner(plan) as runner:
        for seed in range(plan.checked if checked else plan.plain):
            yield runner.run(seed, checked=checked)


@pytest.mark.parametrize("name", list(plans()))
def test_plain_schedules(name: str) -> None:
    for report in _reports(name, checked=False):
        assert report.ok, f"{name}: {report}"


@pytest.mark.parametrize("name", list(plans()))
def test_checked_schedules(name: str) -> None:
    for report in _reports(name, checked=True):
        assert report.ok, f"{name}: {report}"


def test_enough_seeds_of_every_plan() -> None:
    few = [name for name, plan in plans().items() if plan.plain < 20 or plan.checked < 3]
    assert not few


def test_a_seed_is_a_schedule() -> None:
    with Runner(find("selftest/handshake")) as runner:
        counts = [runner.run(seed).counters for seed in (5, 5, 6)]
    assert counts[0] == counts[1]
    assert counts[0] != counts[2]


def test_an_unknown_plan_is_refused_with_names_that_come_close() -> None:
    with pytest.raises(InputError, match="selftest/gemm-pair"):
        find("selftest/g")
