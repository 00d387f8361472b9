"""A picture of a recorded call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megamoe.cuda.trace import EVENTS, GROUPS, Recording

__all__ = ["draw"]

_BINS: Final = 600
"""Pieces of time of an occupancy."""
_LANES: Final = 12
_LANES_EACH: Final = 4
"""CTAs that are drawn one by one: of one rank, and of each of several."""

_DRAWN_ROLES: Final = (3, 0, 4, 1)
"""Of such a CTA: dispatch, loader, math 0, store 0."""

_COLOURS: Final = {  # of each event of `megamoe.cuda.trace.EVENTS`
    2: "#c7c7c7",
    3: "#9e9e9e",
    4: "#7a7a7a",
    5: "#f2d7d5",
    6: "#8e44ad",
    7: "#17a589",
    8: "#1f77b4",
    9: "#2ca02c",
    10: "#ff7f0e",
    11: "#b7950b",
    12: "#e74c3c",
    13: "#e377c2",
}


def _occupancy(found: npt.NDArray[Any], roles: tuple[int, ...], ctas: int, end: int) -> dict[int, npt.NDArray[Any]]:
    """For each event the part of a group's warps that are in it, over `_BINS` bins of time."""
    own = found[np.isin(found["role"], roles)]
    width = max(end, 1) / _BINS
    result = {}
    for event in np.unique(own["event"]):
        chosen = own[own["event"] == event]
        # The integral of the number of open intervals, at each bin's edge: sum of what each has covered until then.
        edges = np.arange(_BINS + 1) * width
        covered = np.zeros(_BINS + 1)
        for key, sign in (("begin", 1.0), ("end", -1.0)):
            at = np.sort(chosen[key])
            before = np.searchsorted(at, edges)
            sums = np.concatenate(([0.0], np.cumsum(at.astype(np.float64))))
            covered += sign * (edges * before - sums[before])
        result[int(event)] = np.diff(covered) / width / (ctas * len(roles))
    return result


def draw(recording: Recording, path: Path, rank: int | None = None) -> None:
    """Write a picture: of each rank, how many of every group of roles are in which phase, and some CTAs one by one.

    Args:
        recording: the stamps.
        path: .png, .svg or .pdf.
        rank: only this rank; None: all, over one time axis.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    every = recording.intervals()
    end = int(every["end"].max())
    ranks = range(len(recording.stamps)) if rank is None else (rank,)
    scale, unit = (1e3, "us") if recording.unit == "ns" else (1.0, recording.unit)
    alone = len(ranks) == 1  # then there is room for more CTAs
    figure = Figure(figsize=(13, 9 if alone else 1 + 4.5 * len(ranks)), layout="constrained")
    heights = [*[1] * len(GROUPS), 4 if alone else 2.5] * len(ranks)
    axes = iter(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    centres = (np.arange(_BINS) + 0.5) * end / _BINS / scale
    for shown_rank in ranks:
        found, ctas = every[every["rank"] == shown_rank], len(recording.stamps[shown_rank])
        for number, (group, roles) in enumerate(GROUPS.items()):
            one = next(axes)
            parts = _occupancy(found, roles, ctas, end)
            if parts:  # a rank without routes has idle roles
                one.stackplot(
                    centres,
                    [np.clip(p, 0, 1) for p in parts.values()],
                    colors=[_COLOURS.get(event, "black") for event in parts],
                )
            one.set(ylim=(0, 1), ylabel=group, yticks=[0, 1])
            if number == 0:
                where = f", GPU {recording.clocks[shown_rank]}" if recording.clocks else ""
                one.set_title(f"rank {shown_rank}{where}", loc="left", fontsize=9)
        lanes = next(axes)
        chosen = np.unique(np.linspace(0, ctas - 1, min(_LANES if alone else _LANES_EACH, ctas)).round().astype(int))
        for lane, cta in enumerate(chosen):
            for row, role in enumerate(_DRAWN_ROLES):
                own = found[(found["cta"] == cta) & (found["role"] == role)]
                bars = [(b / scale, (e - b) / scale) for b, e in zip(own["begin"], own["end"], strict=True)]
                colours = [_COLOURS.get(int(event), "black") for event in own["event"]]
                lanes.broken_barh(bars, (lane + row * 0.22, 0.2), facecolors=colours, linewidth=0)
        lanes.set(yticks=np.arange(len(chosen)) + 0.44, yticklabels=[str(cta) for cta in chosen], ylabel="CTA")
        lanes.invert_yaxis()
    lanes.set(xlabel=unit, xlim=(0, end / scale))
    drawn = every[np.isin(every["rank"], list(ranks))]
    shown = sorted(int(event) for event in np.unique(drawn["event"]))
    handles = [Patch(color=_COLOURS.get(event, "black"), label=EVENTS.get(event, str(event))) for event in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    about = recording.about
    words = [str(about[k]) for k in ("model", "device") if k in about]
    words += [f"{k} {about[k]}" for k in ("tokens", "ranks", "experts_per_rank", "routing", "plan") if k in about]
    if len(set(recording.clocks)) > 1:
        words.append(f"clocks aligned to +-{recording.alignment().uncertainty / scale:.2f} {unit}")
    figure.suptitle(", ".join(words), fontsize=8, wrap=True)
    figure.savefig(path, dpi=120)
