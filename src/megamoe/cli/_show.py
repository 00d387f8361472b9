"""An evaluation as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from megamoe.cli._console import bars, plain_table, sparkline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megamoe.cli._evaluate import Evaluation

__all__ = ["figure", "summary", "table"]

_HISTOGRAM_WIDTH = 32


def table(evaluation: Evaluation, title: str) -> RenderableType:
    """Ranks as rows, the whole layer as the last row, the verdict below."""
    spec = evaluation.spec
    shown = plain_table(title)
    for heading in ("rank", "tokens", "routes in"):
        shown.add_column(heading, justify="right")
    shown.add_column("routes of each expert")
    shown.add_column("error", justify="right")
    binned = [bars(share.routes, _HISTOGRAM_WIDTH) for share in evaluation.shares]
    top = max((max(counts, default=0) for counts in binned), default=0)
    for share, counts in zip(evaluation.shares, binned, strict=True):
        shown.add_row(
            str(share.rank), str(share.tokens), str(sum(share.routes)), sparkline(counts, top), f"{share.error:.1e}"
        )
    every = [count for share in evaluation.shares for count in share.routes]
    shown.add_section()
    shown.add_row(
        "all", str(evaluation.tokens), str(sum(every)), f"{min(every)} to {max(every)}", f"{evaluation.error:.1e}"
    )
    lines = [
        f"H {spec.hidden}, I {spec.intermediate}, {spec.experts} experts, top-{spec.topk}, {evaluation.format}; "
        f"input: {evaluation.source}",
        f"{evaluation.engine} engine, {len(evaluation.shares)} ranks: {evaluation.median_ms:.2f} ms a call "
        f"(median of {len(evaluation.samples_ms)}), {evaluation.tokens_per_second:,.0f} tokens/s",
    ]
    if evaluation.transformers_error is not None:
        lines.append(
            f"difference from Transformers' BF16 arithmetic on the same rows: {evaluation.transformers_error:.1e}"
        )
    verdict = Text(
        f"agrees with the oracle: error {evaluation.error:.2e}, limit {evaluation.limit:.1e}"
        if evaluation.agrees
        else f"DOES NOT AGREE with the oracle: error {evaluation.error:.2e}, limit {evaluation.limit:.1e}, "
        f"{evaluation.routes_lost} routes lost or counted twice",
        style="bold green" if evaluation.agrees else "bold red",
    )
    return Group(shown, *lines, verdict)


def summary(evaluations: Mapping[str, Evaluation]) -> RenderableType:
    """One row for each evaluation: the errors, and whether they are within the limit."""
    shown = plain_table("Agreement with the oracle (relative Frobenius error)")
    shown.add_column("model")
    shown.add_column("experts")
    for heading in ("ranks", "tokens", "routes", "error", "limit"):
        shown.add_column(heading, justify="right")
    shown.add_column("agrees")
    for name, evaluation in evaluations.items():
        shown.add_row(
            name,
            f"{evaluation.spec.experts} {evaluation.format}",
            str(len(evaluation.shares)),
            str(evaluation.tokens),
            str(sum(sum(share.routes) for share in evaluation.shares)),
            f"{evaluation.error:.1e}",
            f"{evaluation.limit:.1e}",
            "[bold green]yes[/]" if evaluation.agrees else "[bold red]NO[/]",
        )
    return shown


def figure(evaluation: Evaluation, title: str) -> Figure:
    """Error of each token against the limit, and routes of each expert coloured by rank."""
    from matplotlib.figure import Figure

    result = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = result.subplots(1, 2)
    start = 0
    for share in evaluation.shares:
        errors = evaluation.token_errors[start : start + share.tokens]
        left.plot(range(start, start + share.tokens), errors, ".", markersize=3, color=f"C{share.rank}")
        start += share.tokens
    left.axhline(evaluation.limit, color="black", linewidth=1, linestyle="--")
    left.annotate("limit, all tokens", (0, evaluation.limit), xytext=(2, 3), textcoords="offset points", fontsize=8)
    left.set(xlabel="token", ylabel="relative error against the oracle", ylim=(0, None))
    equal = sum(error == 0 for error in evaluation.token_errors)
    left.set_title(f"all tokens: {evaluation.error:.1e}; {equal} of {evaluation.tokens} equal to the bit", fontsize=9)
    first = 0
    for share in evaluation.shares:
        count = len(share.routes)
        right.bar(
            range(first, first + count), share.routes, width=0.9, color=f"C{share.rank}", label=f"rank {share.rank}"
        )
        first += count
    right.set(xlabel="expert", ylabel="routes")
    right.set_title(f"{sum(sum(s.routes) for s in evaluation.shares)} routes", fontsize=9)
    if len(evaluation.shares) <= 8:
        right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    result.suptitle(title, fontsize=10)
    return result
