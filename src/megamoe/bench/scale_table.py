"""What ``megamoe bench scale`` recorded, as tables: for the documentation beside public figures, and for the terminal.

``python -m megamoe.bench.scale_table benchmarks/results/scale-h200-x8.json`` prints the documentation's. Only what is
in the file is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from megamoe.bench.layer_table import time_table
from megamoe.bench.results import Row, load

__all__ = ["PUBLIC", "check_lines", "tables"]

_ALL: Final = tuple(1 << n for n in range(3, 14))

PUBLIC: Final[dict[str, dict[str, dict[int, int]]]] = {
    "public two-launch kernel, its authors' times": {
        "flash": dict(zip(_ALL, (225, 246, 253, 266, 265, 293, 413, 637, 959, 1739, 3269), strict=True)),
        "pro": dict(zip(_ALL, (637, 778, 823, 858, 872, 882, 1005, 1393, 2406, 4217, 7939), strict=True)),
    },
    "DeepEP and grouped GEMM, unfused, there": {
        "flash": {8: 348, 8192: 4318},
        "pro": {8: 802, 8192: 9208},
    },
}
"""Microseconds on eight H200, EP8, random routing, by model and tokens of a rank: published with the merged SM90
MegaMoE of DeepGEMM (pull request 383), kernel time."""

_PUBLIC_RANKS: Final = 8


def _of(rows: list[Row], phase: str) -> list[Row]:
    return [row for row in rows if row.get("phase") == phase]


def _groups(rows: list[Row]) -> dict[int, list[Row]]:
    """Rows by number of ranks, ascending."""
    return {ranks: [row for row in rows if row["ranks"] == ranks] for ranks in sorted({row["ranks"] for row in rows})}


def _where(ranks: int, gpus: int) -> str:
    on = "the CPU" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{ranks} rank{'s' if ranks > 1 else ''} on {on}"


def tables(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and Markdown of every layer's times, then of the checks, for each number of ranks in the file.

    The public figures stand beside rows of ranks that have a GPU each: ranks that share one share its speed too. A
    rank has as many experts as in their group of eight.
    """
    gpus = document["gpus"]
    for ranks, rows in _groups(document["rows"]).items():
        timed = _of(rows, "table")
        for name in dict.fromkeys(row["model"] for row in timed):
            own = [row for row in timed if row["model"] == name]
            lines = [time_table(own)]
            tokens = sorted({row["tokens"] for row in own})
            for what, by_model in PUBLIC.items() if ranks == gpus > 1 else ():
                figures = by_model.get(name, {})
                if any(m in figures for m in tokens):
                    cells = " | ".join(str(figures.get(m, "")) for m in tokens)
                    lines.append(f"| {what}, {_PUBLIC_RANKS} GPUs | {cells} |")
            kind, each, whole = own[0]["routing"], own[0]["experts_per_rank"], own[0]["experts"]
            yield (
                f"{name}, {each} experts a rank ({whole}), {_where(ranks, gpus)}, {kind} routing",
                "\n".join(lines),
            )
        checks = check_lines(rows)
        if checks:
            found = [f"| {what} | {layer} | {text} |" for what, layer, text, _ in checks]
            yield f"Checks, {_where(ranks, gpus)}", "\n".join(["| check | layer | found |", "|---|---|---|", *found])


def check_lines(rows: list[Row]) -> list[tuple[str, str, str, bool]]:
    """What the checks found, for people: check, layer, finding, whether it is as it must be."""
    lines = []

    def layer(row: Row) -> str:
        return f"{row['model']}, {row['ranks']} x {row['experts_per_rank']} experts"

    calls = _of(rows, "correctness")
    if calls:
        right, worst = sum(row["ok"] for row in calls), max(row["error"] for row in calls)
        text = f"{right} of {len(calls)} right, error at most {worst:.1e}, {_differing(calls)}"
        lines.append(("against the oracle and one rank", layer(calls[0]), text, right == len(calls)))
    for row in _of(rows, "replays"):
        text = f"{row['calls']:,} replays, {_differing([row])}"
        lines.append((f"graph, {row['tokens']} tokens", layer(row), text, row["ok"]))
    for row in _of(rows, "soak"):
        late = f", {row['late_starts']:,} with a late rank" if row["late_starts"] else ""
        judged = f"error at most {row['error']:.1e} against one rank" if "error" in row else _differing([row])
        text = f"{row['calls']:,} calls{late}, {judged}"
        lines.append((f"soak, up to {row['bound']} tokens", layer(row), text, row["ok"]))
    return lines


def _differing(rows: list[Row]) -> str:
    return f"values that are not one rank's: {sum(row['differing'] for row in rows):,}"


def main() -> None:
    """Print the tables of a result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    for title, table in tables(load(parser.parse_args().file)):
        print(f"**{title}**\n\n{table}\n")


if __name__ == "__main__":
    main()
