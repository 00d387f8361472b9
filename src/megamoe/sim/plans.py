"""The registry of simulated plans: what `make test` runs under many schedules, and `megamoe sim` by name.

A module that has plans defines ``simulated()``, which yields `SimPlan`s, and is listed in `MODULES`. A plan builds its
inputs in a `Simulation`, says what to launch, and compares the outcome with the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Final

from megamoe.errors import InputError
from megamoe.sim.build import Kernel, build_all
from megamoe.sim.report import Finding, Report
from megamoe.sim.simulation import Expiry, Launch, Mutation, Simulation

__all__ = ["MODULES", "Prepared", "Runner", "SimPlan", "find", "plans"]

MODULES: Final = (
    "megamoe.sim.selftest",
    "megamoe.sim.gemm",
    "megamoe.sim.fused",
    "megamoe.sim.fused_stream",
    "megamoe.sim.absent",
)
"""Modules with plans; each has a function ``simulated() -> Iterable[SimPlan]``."""


@dataclass(frozen=True)
class Prepared:
    """Inputs that lie in a simulation, ready to run.

    Attributes:
        launches: what runs at once.
        check: called after a run without findings; a sentence about what is wrong with the outcome, or None.
        again: further launches of the same call, each after the one before it has ended.
        most_expiries: deadlines that may pass in a run; one expired wait should end all others.
        between: called before the launches of `again` with the same index, to put the next call's inputs in place.
    """

    launches: Sequence[Launch]
    check: Callable[[], str | None]
    again: Sequence[Sequence[Launch]] = ()
    between: Sequence[Callable[[], None]] = ()
    most_expiries: int | None = None


@dataclass(frozen=True)
class SimPlan:
    """One kernel configuration with inputs, small enough for many runs.

    Attributes:
        name: unique, such as ``"gemm/wide"``.
        prepare: puts the inputs into a simulation.
        plain, checked: seeds that `make test` runs without and with the race checker.
        expiry: when deadlines of waits pass.
        nbytes: global memory of all ranks.
    """

    name: str
    prepare: Callable[[Simulation], Prepared]
    plain: int = 20
    checked: int = 3
    expiry: Expiry = "never"
    nbytes: int = field(default=256 << 20)


@functools.lru_cache(maxsize=1)
def plans() -> dict[str, SimPlan]:
    """All plans by name, in the order of `MODULES`."""
    found: dict[str, SimPlan] = {}
    for module in MODULES:
        for plan in import_module(module).simulated():
            if plan.name in found:
                raise ValueError(f"two simulated plans are called {plan.name}")
            found[plan.name] = plan
    return found


def find(name: str) -> SimPlan:
    """The plan of that name.

    Raises:
        InputError: there is none; the message lists those whose names come closest.
    """
    known = plans()
    if name not in known:
        near = [n for n in known if name in n] or list(known)
        raise InputError("plan", name, ", ".join(near[:8]), "`megamoe sim list` shows all of them.")
    return known[name]


class Runner:
    """One plan in its own simulation; each run starts from the same memory.

    Example:
        >>> with Runner(find("selftest/handshake")) as runner:
        ...     report = runner.run(seed=7, checked=True)
    """

    def __init__(self, plan: SimPlan) -> None:
        self.plan = plan
        self.simulation = Simulation(plan.nbytes)
        try:
            self.prepared = plan.prepare(self.simulation)
        except BaseException:
            self.simulation.close()
            raise
        self.simulation.arena.save()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and give the memory back."""
        self.simulation.close()

    def kernels(self) -> list[Kernel]:
        """All kernels of the plan."""
        stages = (self.prepared.launches, *self.prepared.again)
        return list(dict.fromkeys(launch.kernel for stage in stages for launch in stage))

    def build(self, *, checked: bool) -> None:
        """Build what `run` needs, so that its time is the run's alone."""
        build_all([(k, checked) for k in self.kernels()])

    def run(
        self,
        seed: int,
        *,
        checked: bool = False,
        mutation: Mutation | None = None,
        record_sites: bool = False,
        record_arrivals: bool = False,
        step_limit: int | None = None,
    ) -> Report:
        """One seed. A wrong outcome is a finding of kind ``"result"``; calls behind one with findings are left out."""
        self.simulation.arena.restore()
        reports: list[Report] = []
        for stage in self._stages():
            report = self.simulation.run(
                stage,
                seed=seed,
                checked=checked,
                expiry=self.plan.expiry,
                mutation=mutation,
                record_sites=record_sites,
                record_arrivals=record_arrivals,
                step_limit=step_limit,
            )
            reports.append(report)
            if not report.ok:
                break
        report = _merge(reports)
        if report.ok and (wrong := self._wrong(report)) is not None:
            report = replace(report, findings=(Finding("result", wrong),))
        return report

    def _wrong(self, report: Report) -> str | None:
        most, passed = self.prepared.most_expiries, report.counters.get("expiries", 0)
        if most is not None and passed > most:
            return f"{passed} deadlines had to pass to end all waits, {most} should have been enough"
        return self.prepared.check()

    def _stages(self) -> Iterator[Sequence[Launch]]:
        yield self.prepared.launches
        for index, stage in enumerate(self.prepared.again):
            if index < len(self.prepared.between):
                self.prepared.between[index]()
            yield stage


def _merge(reports: Sequence[Report]) -> Report:
    first = reports[0]
    if len(reports) == 1:
        return first
    return Report(
        seed=first.seed,
        checked=first.checked,
        findings=tuple(f for r in reports for f in r.findings),
        waiting=tuple(w for r in reports for w in r.waiting),
        seconds=sum(r.seconds for r in reports),
        cpu_seconds=sum(r.cpu_seconds for r in reports),
        counters={k: sum(r.counters.get(k, 0) for r in reports) for k in first.counters},
        sites=tuple(s for r in reports for s in r.sites),
        arrivals=tuple(a for r in reports for a in r.arrivals),
    )
