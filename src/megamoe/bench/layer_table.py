"""Tables of the fused kernel's times from a result file, as the documentation shows them.

``python -m megamoe.bench.layer_table benchmarks/results/layer-h200.json`` prints them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["bound_table", "error_table", "tables", "time_table"]

Row = dict[str, Any]


def _group(row: Row) -> tuple[str, int, int, str]:
    return row["model"], row["experts_per_rank"], row["ranks"], row["routing"]


def _title(group: tuple[str, int, int, str]) -> str:
    name, experts, ranks, routing = group
    return f"{name}, {experts} experts a rank, {ranks} rank{'s' if ranks > 1 else ''}, {routing} routing"


def time_table(rows: list[Row]) -> str:
    """Markdown: one column for each token count; `rows` are of one layer and routing, all engines and protocols."""
    by = {(row["tokens"], row["protocol"]): row for row in rows if row["engine"] == "megamoe"}
    tokens = sorted({m for m, _ in by})

    def line(head: str, cell: Callable[[Row], str], protocol: str = "paced") -> str:
        cells = [cell(by[m, protocol]) if (m, protocol) in by else "" for m in tokens]
        return f"| {head} | " + " | ".join(cells) + " |"

    lines = [
        "| M | " + " | ".join(str(m) for m in tokens) + " |",
        "|---" * (len(tokens) + 1) + "|",
        line("kernel", lambda r: f"{r['kernel_us']['median']:.0f}"),
        line("fastest to slowest", lambda r: f"{r['kernel_us']['min']:.0f}-{r['kernel_us']['max']:.0f}"),
        line("call, BF16 to BF16", lambda r: f"{r['e2e_us']['median']:.0f}" if "e2e_us" in r else ""),
    ]
    if any(protocol == "paced-clean" for _, protocol in by):
        lines.append(
            line("kernel, flush written back", lambda r: f"{r['kernel_us']['median']:.0f}", "paced-clean"),
        )
    if any(protocol == "sustained" for _, protocol in by):
        lines += [
            line("kernel, sustained", lambda r: f"{r['kernel_us']['median']:.0f}", "sustained"),
            line("call, sustained", lambda r: f"{r['e2e_us']['median']:.0f}" if "e2e_us" in r else "", "sustained"),
        ]
    lines.append(line("weights of the hit experts at 4.58 TB/s", lambda r: f"{r['floor_us']:.0f}"))
    for peer in sorted({row["engine"] for row in rows} - {"megamoe"}):
        times = {row["tokens"]: f"{row['e2e_us']['median']:.0f}" for row in rows if row["engine"] == peer}
        lines.append(f"| call, {peer} | " + " | ".join(times.get(m, "") for m in tokens) + " |")
    return "\n".join(lines)


def bound_table(rows: list[Row]) -> str:
    """Markdown: kernel times of one layer under the bound of each call's own tokens, and under fixed bounds."""
    by = {(row["bound"], row["tokens"]): row["kernel_us"]["median"] for row in rows}
    fixed = sorted({bound for bound, m in by if bound != m})
    tokens = sorted({m for bound, m in by if bound in fixed and m < bound})
    lines = ["| M | " + " | ".join(str(m) for m in tokens) + " |", "|---" * (len(tokens) + 1) + "|"]
    lines.append("| bound M | " + " | ".join(f"{by[m, m]:.0f}" if (m, m) in by else "" for m in tokens) + " |")
    for bound in fixed:
        cells = (f"{by[bound, m]:.0f}" if (bound, m) in by else "" for m in tokens)
        lines.append(f"| bound {bound} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def error_table(rows: list[Row]) -> str:
    """Markdown: errors stage by stage, one line for each layer and plan."""
    lines = [
        "| model | data | plan | first GEMM and SwiGLU | second GEMM from the kernel's intermediate | whole layer |",
        "|---|---|---|---|---|---|",
    ]
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["model"], row["routing"], row["plan"]), {})[row["phase"]] = row["error"]
    for (name, data, plan), errors in found.items():
        cells = " | ".join(f"{errors[phase]:.1e}" for phase in ("gate-up", "down", "layer"))
        lines.append(f"| {name} | {'Gaussian' if data == 'random' else data} | {plan} | {cells} |")
    return "\n".join(lines)


def tables(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and table of every layer of a result file, then of the errors."""
    every = [row for row in document["rows"] if "e2e_us" in row or "kernel_us" in row]
    timed = [row for row in every if row["bound"] == row["tokens"]]
    for group in sorted({_group(row) for row in timed if row["engine"] == "megamoe"}):
        yield _title(group), time_table([row for row in timed if _group(row) == group])
    paced = [row for row in every if row["engine"] == "megamoe" and row["protocol"] == "paced"]
    for group in sorted({_group(row) for row in paced if row["bound"] != row["tokens"]}):
        yield f"{_title(group)}, one bound for smaller calls", bound_table([r for r in paced if _group(r) == group])
    staged = [row for row in document["rows"] if "phase" in row]
    if staged:
        yield "errors", error_table(staged)


def main() -> None:
    """Print the tables of a result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    for title, table in tables(json.loads(parser.parse_args().file.read_text())):
        print(f"{title}\n\n{table}\n")


if __name__ == "__main__":
    main()
