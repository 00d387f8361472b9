"""Pictures of result rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megamoe.errors import InputError

__all__ = ["times_by_tokens"]


def times_by_tokens(document: dict[str, Any], path: Path) -> None:
    """Median time against tokens on a rank, one line for each combination of the other keys, min to max shaded.

    Args:
        document: a result document (`megamoe.bench.results.load`).
        path: its suffix chooses the format (png, svg, pdf).

    Raises:
        InputError: no row has a time.
    """
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in document["rows"]:
        time = row.get("e2e_us") or row.get("kernel_us")
        if time is not None and row.get("tokens"):
            names = ("model", "engine", "variant", "format", "routing")
            label = ", ".join(str(row[name]) for name in names if row.get(name)) + f", {row['ranks']} ranks"
            lines.setdefault(label, []).append((row["tokens"], time))
    if not lines:
        raise InputError("document", f"{len(document['rows'])} rows", "rows with a time", "Measure something first.")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in lines.items():
        points.sort(key=lambda point: point[0])
        tokens = [point[0] for point in points]
        axes.plot(tokens, [point[1]["median"] / 1e3 for point in points], "o-", markersize=3, label=label)
        low, high = ([point[1][edge] / 1e3 for point in points] for edge in ("min", "max"))
        axes.fill_between(tokens, low, high, alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="tokens on each rank", ylabel="milliseconds (median, min to max)")
    axes.set_title(f"{document['topic']}, {document['device']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
