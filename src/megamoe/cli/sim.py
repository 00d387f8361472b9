"""``megamoe sim``: run the kernels' plans in the simulator, replay a seed, weaken synchronisation calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamoe.errors import EngineError, InputError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from megamoe.sim.mutation import Outcome
    from megamoe.sim.plans import SimPlan
    from megamoe.sim.report import Report

__all__ = ["app"]

app = typer.Typer(help="Run the kernels on the CPU, under many schedules, with a race checker.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Plan = Annotated[str, typer.Argument(help="A plan's name, a part of names, or 'all'. `megamoe sim list` shows them.")]


def _chosen(name: str) -> list[SimPlan]:
    from megamoe.sim.plans import plans
    from megamoe.sim.requirements import require

    require()
    known = plans()
    found = list(known.values()) if name == "all" else [known[name]] if name in known else []
    found = found or [plan for plan in known.values() if name in plan.name]
    if not found:
        raise InputError("plan", name, ", ".join(known), "`megamoe sim list` shows all of them.")
    return found


def _table(title: str, *columns: str) -> Table:
    from megamoe.cli import _console

    table = _console.plain_table(title)
    for column in columns:
        table.add_column(column, justify="left" if column == "plan" else "right")
    return table


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "seed": report.seed,
        "checked": report.checked,
        "ok": report.ok,
        "findings": [{"kind": f.kind, "text": f.text} for f in report.findings],
        "waiting": list(report.waiting),
        "seconds": report.seconds,
        "cpu_seconds": report.cpu_seconds,
        "counters": report.counters,
    }


@app.command("list")
def list_plans(as_json: Json = False) -> None:
    """Show the plans, with the seeds that `make test` runs."""
    from megamoe.cli import _console
    from megamoe.sim.plans import plans
    from megamoe.sim.requirements import missing

    rows = [{"plan": p.name, "plain": p.plain, "checked": p.checked, "deadlines": p.expiry} for p in plans().values()]
    reason = missing()
    if as_json:
        _console.print_json({"plans": rows, "missing": reason})
        return
    table = _table("Simulated plans", "plan", "plain seeds", "checked seeds", "deadlines")
    for row in rows:
        table.add_row(*(str(v) for v in row.values()))
    _console.out().print(table)
    if reason is not None:
        _console.out().print(f"The simulator cannot run here: {reason}")


@app.command()
def run(
    plan: Plan,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each plan.")] = 20,
    first: Annotated[int, typer.Option(min=0, help="First seed; 0 is round robin.")] = 0,
    checked: Annotated[bool, typer.Option(help="With the race checker.")] = False,
    keep_going: Annotated[bool, typer.Option(help="Do not stop a plan at its first finding.")] = False,
    as_json: Json = False,
) -> None:
    """Run seeds of one or more plans; exit code 1 when one of them finds something."""
    from megamoe.cli import _console
    from megamoe.sim.plans import Runner

    chosen = _chosen(plan)
    results: list[dict[str, Any]] = []
    bad: list[tuple[str, Report]] = []
    with _console.progress(quiet=as_json) as display:
        for one in chosen:
            task = display.add_task(one.name, total=seeds)
            reports = []
            with Runner(one) as runner:
                runner.build(checked=checked)
                for seed in range(first, first + seeds):
                    reports.append(runner.run(seed, checked=checked))
                    display.advance(task)
                    if not reports[-1].ok and not keep_going:
                        break
            bad += [(one.name, r) for r in reports if not r.ok]
            results.append({"plan": one.name, "runs": [_as_json(r) for r in reports]})
    if as_json:
        _console.print_json({"checked": checked, "plans": results})
    else:
        table = _table("Checked runs" if checked else "Plain runs", "plan", "seeds", "with findings", "seconds a seed")
        for result in results:
            runs = result["runs"]
            mean = sum(r["cpu_seconds"] for r in runs) / len(runs)
            table.add_row(result["plan"], str(len(runs)), str(sum(not r["ok"] for r in runs)), f"{mean:.3f}")
        _console.out().print(table)
        for name, report in bad:
            print(f"{name}: {report}")
            print(f"  again: megamoe sim replay {name} {report.seed}{' --checked' if report.checked else ''}")
    if bad:
        raise typer.Exit(1)


@app.command()
def replay(
    plan: Annotated[str, typer.Argument(help="A plan's name.")],
    seed: Annotated[int, typer.Argument(min=0, help="The seed.")],
    checked: Annotated[bool, typer.Option(help="With the race checker.")] = False,
    dump: Annotated[
        Path | None, typer.Option(help="Write the run's files there, for a debugger, and do not run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run one seed again and print everything that it found."""
    from megamoe.cli import _console
    from megamoe.sim.plans import Runner, find
    from megamoe.sim.requirements import require

    require()
    one = find(plan)
    with Runner(one) as runner:
        if dump is not None:
            _console.writable_directory("dump", dump)
            program = runner.simulation.dump(
                dump, runner.prepared.launches, seed=seed, checked=checked, expiry=one.expiry
            )
            print(f"gdb -ex 'run < {dump}/job.txt' {program}")
            return
        report = runner.run(seed, checked=checked)
    if as_json:
        _console.print_json({"plan": one.name, **_as_json(report)})
    else:
        print(f"{one.name}: {report}")
        print("  " + ", ".join(f"{k} {v}" for k, v in report.counters.items()))
    if not report.ok:
        raise typer.Exit(1)


def _draft(path: Path, reviewed: Any, outcomes: Iterable[Outcome]) -> None:
    import json

    path.write_text(json.dumps([*reviewed.entries, *reviewed.draft(outcomes)], indent=1, ensure_ascii=False) + "\n")


def _advance(display: Progress, task: TaskID, _: Outcome) -> None:
    display.advance(task)


@app.command()
def mutate(
    plan: Annotated[str, typer.Argument(help="As for run; 'usual' for those of `make mutate`.")] = "usual",
    survivors: Annotated[Path | None, typer.Option(help="Reviewed survivors; a new one is exit code 1.")] = None,
    draft: Annotated[bool, typer.Option(help="Add new survivors to that file, to be explained.")] = False,
    as_json: Json = False,
) -> None:
    """Weaken each synchronisation call of a plan in turn; survivors are calls whose absence nothing notices."""
    from megamoe.cli import _console
    from megamoe.cuda.sources import KERNELS
    from megamoe.sim.build import HERE
    from megamoe.sim.mutation import KINDS, USUAL, Survivors, as_json_row, mutate_all
    from megamoe.sim.requirements import require

    require()
    names = list(USUAL) if plan == "usual" else [one.name for one in _chosen(plan)]
    if survivors is not None and not survivors.exists() and not draft:
        raise EngineError("survivors", str(survivors), "a file of reviewed survivors", "Write it with --draft.")
    reviewed = Survivors(survivors or Path("none"), (KERNELS, HERE))
    with _console.progress(quiet=as_json) as display:

        def begin(name: str, count: int) -> Callable[[Outcome], None]:
            return partial(_advance, display, display.add_task(name, total=count))

        outcomes = mutate_all(names, reviewed.text, begin=begin)
    new = [o for o in outcomes if not o.noticed and reviewed.reason(o) is None]
    if draft and survivors is not None:
        _draft(survivors, reviewed, outcomes)
    if as_json:
        _console.print_json({"mutants": [as_json_row(o) for o in outcomes], "unreviewed": len(new)})
    else:
        table = _table(
            "Weakened calls", "plan", "mutants", "by the race checker", "by results alone", "survivors", "new"
        )
        for name in names:
            own = [o for o in outcomes if o.plan == name]
            count = [sum(o.noticed == how for o in own) for how in ("checked", "plain", "")]
            table.add_row(name, *(str(n) for n in (len(own), *count, sum(o.plan == name for o in new))))
        _console.out().print(table)
        for o in outcomes:
            if not o.noticed:
                print(f"{o.plan}: {KINDS[o.site.kind]} at {o.site.where}: {reviewed.reason(o) or 'NEW'}")
    if survivors is not None and new and not draft:
        raise typer.Exit(1)


@app.command()
def lint(
    directory: Annotated[Path | None, typer.Argument(help="Kernel files; by default the package's own.")] = None,
    as_json: Json = False,
) -> None:
    """Check that kernel sources keep the simulator's rules; exit code 1 when they do not."""
    from megamoe.cli import _console
    from megamoe.cuda.sources import KERNELS
    from megamoe.sim.lint import lint as check

    found = check(directory or KERNELS)
    if as_json:
        _console.print_json({"breaches": [{"file": str(b.path), "line": b.line, "text": b.text} for b in found]})
    else:
        for breach in found:
            print(breach)
    if found:
        raise typer.Exit(1)
