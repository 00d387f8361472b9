"""``megamoe doctor``: what will run here, and why not the rest."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from megamoe.cli import _console

__all__ = ["command"]


def command(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Say what this machine has, what will run on it, and why not the rest. Paste its output into a bug report."""
    from megamoe.cuda.doctor import examine

    report = examine()
    if as_json:
        _console.print_json(report)
        return
    from rich.table import Table

    out = _console.out()
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in _facts(report):
        table.add_row(name, text)
    out.print(table, markup=False)
    out.print()
    verdicts = Table(show_header=False, box=None, pad_edge=False)
    for entry in report["runs"] + report["integrations"]:
        reason = entry["why_not"]
        verdicts.add_row("yes" if reason is None else "no", entry["what"], reason or "")
    out.print(verdicts, markup=False)


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    driver, nvrtc, torch = report["driver"], report["nvrtc"], report["torch"]
    rows = [
        ("megamoe", f"{report['megamoe']}, Python {report['python']}, {report['platform']}"),
        ("driver", driver["problem"] or f"{driver['release'] or 'release unknown'}, CUDA {driver['cuda']}"),
    ]
    for g in report["gpus"]:
        sizes = f"{g['multiprocessors']} SMs, {g['memory_bytes'] / 2**30:.0f} GiB, L2 {g['l2_bytes'] / 2**20:.0f} MiB"
        rows.append((f"GPU {g['ordinal']}", f"{g['name']} ({g['arch']}), {sizes}, {g['pci']}"))
    for p in report["peers"]:
        link = "no direct access"
        if p["access"]:
            link = "direct, native atomics (NVLink)" if p["atomics"] else "direct, no native atomics (PCIe)"
        rows.append((f"GPU {p['source']} -> {p['target']}", link))
    tested = ", ".join(nvrtc["tested"])
    rows += [
        ("NVRTC", nvrtc["problem"] or f"{nvrtc['version']} (tested: {tested}) {nvrtc.get('note', '')}".strip()),
        (
            "kernel cache",
            f"{report['cache']['directory']}{'' if report['cache']['writable'] else ' (not writable)'}",
        ),
        ("torch", f"{torch['version']}{'' if torch['problem'] is None else ': ' + torch['problem']}"),
    ]
    rows += [(name, found or "not installed") for name, found in report["hosts"].items()]
    rows.append(("simulator", report["simulator"]["problem"] or report["simulator"]["compiler"]))
    return rows
