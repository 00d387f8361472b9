"""Mutation testing without touching a source: one synchronisation call is weakened in the simulator, seeds must notice.

A *site* is a kind of weakening at one place of the source, named by its line and the lines it is inlined into, so that
a wait inside a helper counts once for each of its callers. A mutant that no seed notices survives; survivors are
reviewed and kept, with the reason, in ``tests/mutation_survivors.json``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from megamoe.sim.plans import Runner, SimPlan, find
from megamoe.sim.report import resolve_sites
from megamoe.sim.simulation import Mutation

__all__ = ["KINDS", "USUAL", "Outcome", "Site", "Survivors", "as_json_row", "mutate", "mutate_all", "sites"]

KINDS: Final = {
    "A": "drop mbarrier arrive",
    "E": "expect_tx 16 bytes short",
    "N": "mbarrier count one higher",
    "n": "mbarrier count one lower",
    "w": "drop mbarrier wait",
    "I": "drop fence_mbarrier_init",
    "B": "drop named barrier or __syncthreads",
    "C": "drop cluster wait",
    "W": "drop syncwarp",
    "P": "drop proxy fence",
    "G": "drop memory fence",
    "g": "memory fence sys -> gpu",
    "K": "drop bulk_wait",
    "k": "bulk_wait -> bulk_wait_read",
    "a": "drop cp_async_wait",
    "F": "drop wgmma_fence",
    "M": "drop wgmma_wait",
    "m": "wgmma_wait one group short",
    "D": "drop flag store",
    "R": "release -> relaxed",
    "S": "store sys -> gpu",
    "Q": "acquire -> relaxed",
    "s": "load sys -> gpu",
}
"""What a mutation does, by the letter that the runtime knows it by."""

USUAL: Final = (
    "selftest/handshake",
    "selftest/gemm",
    "selftest/gemm-pair",
    "selftest/moe",
    "gemm/wide",
    "gemm/narrow",
    "fused/swap",
    "fused/queue",
    "fused/mixed",
    "fused/carried",
    "fused/passes",
    "fused/alternating",
    "fused/alone-stretches",
    "fused/calls",
    "fused/calls-empty",
    "absent-peer/swap",
)
"""Plans that `make mutate` weakens, in this order: later ones only try what the earlier ones did not notice."""

ATTEMPTS: Final = ((False, range(1, 2)), (True, range(1, 3)), (False, range(2, 7)))
"""Seeds that have the chance to notice a mutant, with or without the race checker: the cheap ones first."""

STEP_LIMIT: Final = 300_000
"""Steps without a change that make a livelock of a mutant."""


@dataclass(frozen=True, order=True)
class Site:
    """One place to weaken: `where` is the line, then the lines it is inlined into."""

    where: str
    kind: str


@dataclass(frozen=True)
class Outcome:
    """What happened to one mutant of one plan.

    Attributes:
        plan: the plan that ran it.
        site: what was weakened.
        noticed: "checked", "plain", or "" for a survivor.
        how: kind and first words of the first finding.
    """

    plan: str
    site: Site
    noticed: str
    how: str = ""


def _collect(runner: Runner, *, checked: bool) -> dict[Site, set[int]]:
    """Call sites of every place, from one recorded run. Libraries keep their number for the runner's life."""
    report = runner.run(1, checked=checked, record_sites=True)
    if not report.ok:
        raise AssertionError(f"{runner.plan.name} is not clean, so its mutants say nothing: {report}")
    named = resolve_sites({site for _, site, _ in report.sites}, runner.simulation.libraries())
    found: dict[Site, set[int]] = {}
    for kind, site, _ in report.sites:
        found.setdefault(Site(named[site], kind), set()).add(site)
    return found


def sites(plan: SimPlan) -> list[Site]:
    """Every place of `plan` that can be weakened, in source order."""
    with Runner(plan) as runner:
        return sorted(_collect(runner, checked=True))


def _try(runner: Runner, mutation: Mutation, *, checked: bool, seeds: range) -> str:
    """The first finding, or "" when every seed is clean."""
    for seed in seeds:
        report = runner.run(seed, checked=checked, mutation=mutation, step_limit=STEP_LIMIT)
        if not report.ok:
            first = report.findings[0]
            return f"{first.kind}: {first.text[:120]}"
    return ""


def _share(plan: SimPlan, wanted: list[Site], done: Callable[[Outcome], None]) -> list[Outcome]:
    outcomes = []
    with Runner(plan) as runner:
        known = {checked: _collect(runner, checked=checked) for checked in (True, False)}
        for site in wanted:
            outcome = Outcome(plan.name, site, "")
            for checked, seeds in ATTEMPTS:
                places = known[checked].get(site)
                if not places:
                    continue
                how = _try(runner, Mutation(site.kind, tuple(sorted(places))), checked=checked, seeds=seeds)
                if how:
                    outcome = Outcome(plan.name, site, "checked" if checked else "plain", how)
                    break
            outcomes.append(outcome)
            done(outcome)
    return outcomes


def mutate(
    name: str,
    *,
    only: Callable[[Site], bool] = lambda site: True,
    done: Callable[[Outcome], None] = lambda outcome: None,
    workers: int | None = None,
) -> list[Outcome]:
    """Weaken every place of one plan in turn.

    Args:
        name: of the plan.
        only: which sites.
        done: called after each mutant, from several threads.
        workers: simulations at once; by default one for each processor.

    Raises:
        InputError: no such plan.
    """
    plan = find(name)
    wanted = [site for site in sites(plan) if only(site)]
    count = max(1, min(workers or os.cpu_count() or 1, len(wanted)))
    with ThreadPoolExecutor(count) as pool:
        shares = pool.map(lambda i: _share(plan, wanted[i::count], done), range(count))
    return sorted((o for share in shares for o in share), key=lambda o: o.site)


def mutate_all(
    names: Iterable[str],
    text: Callable[[str], str],
    *,
    begin: Callable[[str, int], Callable[[Outcome], None]] = lambda name, count: lambda outcome: None,
    workers: int | None = None,
) -> list[Outcome]:
    """Weaken the places of several plans; a place that one plan notices is not tried again in the next.

    Args:
        names: plans.
        text: what makes two places the same (`Survivors.text`).
        begin: called with each plan's name and number of mutants; what it returns is called after each mutant.
        workers: simulations at once.

    Returns:
        Outcomes of all plans. Of a place that a later plan noticed, only that outcome is kept.
    """
    noticed: set[tuple[str, str]] = set()
    outcomes: list[Outcome] = []

    def key(site: Site) -> tuple[str, str]:
        return text(site.where), site.kind

    for name in names:
        wanted = [site for site in sites(find(name)) if key(site) not in noticed]
        done = begin(name, len(wanted))
        chosen = set(wanted)
        made = mutate(name, only=chosen.__contains__, done=done, workers=workers) if chosen else []
        noticed |= {key(o.site) for o in made if o.noticed}
        outcomes = [o for o in outcomes if o.noticed or key(o.site) not in noticed] + made
    return [o for o in outcomes if o.noticed or key(o.site) not in noticed]


class Survivors:
    """The reviewed survivors: a JSON list of objects with ``where``, ``kind``, ``plans`` and ``why``.

    Line numbers change with every edit, so a survivor is matched by what its line says, not by its number: ``where``
    holds the text of the lines of the chain, each with its file, and " #2" behind the second line of a file that reads
    the same, and so on.
    """

    def __init__(self, path: Path, directories: Iterable[Path]) -> None:
        self.path = path
        self._lines: dict[str, list[str]] = {}
        for directory in directories:
            for file in directory.rglob("*.cu*"):
                self._lines[file.name] = file.read_text().splitlines()
        self.entries: list[dict[str, str]] = json.loads(path.read_text()) if path.exists() else []

    def text(self, where: str) -> str:
        """`where` with line numbers replaced by the lines' words."""
        parts = []
        for part in where.split(" < "):
            name, _, number = part.rpartition(":")
            lines = self._lines.get(name, [])
            index = int(number) - 1 if number.isdigit() else -1
            if not 0 <= index < len(lines):
                parts.append(part)
                continue
            words = " ".join(lines[index].split())
            same = sum(" ".join(line.split()) == words for line in lines[: index + 1])
            parts.append(f"{name}: {words}" + (f" #{same}" if same > 1 else ""))
        return " < ".join(parts)

    def reason(self, outcome: Outcome) -> str | None:
        """Why this survivor is accepted, or None when nobody has looked at it."""
        where = self.text(outcome.site.where)
        for entry in self.entries:
            if entry["kind"] == KINDS[outcome.site.kind] and entry["where"] == where:
                return entry["why"] or None
        return None

    def unreviewed(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Survivors without a reason."""
        return (o for o in outcomes if not o.noticed and self.reason(o) is None)

    def stale(self) -> list[dict[str, str]]:
        """Entries that quote a line which is not there any more."""

        def quotes_a_line(part: str) -> bool:
            name, _, words = part.partition(": ")
            number = re.search(r" #(\d+)$", words)
            words = words[: number.start()] if number else words
            same = sum(" ".join(line.split()) == words for line in self._lines.get(name, []))
            return same >= (int(number[1]) if number else 1)

        return [e for e in self.entries if not all(map(quotes_a_line, re.split(r" < (?=\w+\.cuh?: )", e["where"])))]

    def draft(self, outcomes: Iterable[Outcome]) -> list[dict[str, str]]:
        """Entries for survivors that have none yet, with an empty reason to fill in."""
        made: dict[tuple[str, str], dict[str, str]] = {}
        for o in self.unreviewed(outcomes):
            where, kind = self.text(o.site.where), KINDS[o.site.kind]
            entry = made.setdefault((where, kind), {"where": where, "kind": kind, "plans": o.plan, "why": ""})
            if o.plan not in entry["plans"].split(", "):
                entry["plans"] += f", {o.plan}"
        return list(made.values())


def as_json_row(outcome: Outcome) -> dict[str, object]:
    """For ``--json``."""
    return {**asdict(outcome), "what": KINDS[outcome.site.kind]}
