"""A picture of one rank of a recorded call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megamoe.cuda.trace import EVENTS, GROUPS, Recording

__all__ = ["BINS", "COLOURS", "draw", "occupancy"]

BINS: Final = 600
"""Pieces of time of an occupancy."""
_LANES: Final = 12
"""CTAs that are drawn one by one."""

COLOURS: Final = {  # of each event of `megamoe.cuda.trace.EVENTS`
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


def occupancy(found: npt.NDArray[Any], roles: tuple[int, ...], ctas: int, end: int) -> dict[int, npt.NDArray[Any]]:
    """For each event the part of a group's warps that are in it, over `BINS` bins of time."""
    own = found[np.isin(found["role"], roles)]
    width = max(end, 1) / BINS
    result = {}
    for event in np.unique(own["event"]):
        chosen = own[own["event"] == event]
        # The integral of the number of open intervals, at each bin's edge: sum of what each has covered until then.
        edges = np.arange(BINS + 1) * width
        covered = np.zeros(BINS + 1)
        for key, sign in (("begin", 1.0), ("end", -1.0)):
            at = np.sort(chosen[key])
            before = np.searchsorted(at, edges)
            sums = np.concatenate(([0.0], np.cumsum(at.astype(np.float64))))
            covered += sign * (edges * before - sums[before])
        result[int(event)] = np.diff(covered) / width / (ctas * len(roles))
    return result


def draw(recording: Recording, path: Path, rank: int = 0) -> None:
    """Write a picture of one rank: for each group of roles how many are in which phase, then some CTAs one by one.

    Args:
        recording: the stamps.
        path: .png, .svg or .pdf.
        rank: which rank.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    every = recording.intervals()
    found = every[every["rank"] == rank]
    end = int(every["end"].max())
    ctas = len(recording.stamps[rank])
    scale, unit = (1e3, "us") if recording.unit == "ns" else (1.0, recording.unit)
    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(len(GROUPS) + 1, 1, sharex=True, height_ratios=[1] * len(GROUPS) + [4])
    centres = (np.arange(BINS) + 0.5) * end / BINS / scale
    for one, (group, roles) in zip(axes, GROUPS.items(), strict=False):
        parts = occupancy(found, roles, ctas, end)
        if parts:  # a rank without routes has idle roles
            heights = [np.clip(p, 0, 1) for p in parts.values()]
            one.stackplot(centres, heights, colors=[COLOURS.get(e, "black") for e in parts])
        one.set(ylim=(0, 1), ylabel=group, yticks=[0, 1])
    lanes = axes[-1]
    chosen = np.unique(np.linspace(0, ctas - 1, min(_LANES, ctas)).round().astype(int))
    drawn = (3, 0, 4, 1)  # dispatch, loader, math 0, store 0
    for lane, cta in enumerate(chosen):
        for row, role in enumerate(drawn):
            own = found[(found["cta"] == cta) & (found["role"] == role)]
            bars = [(b / scale, (e - b) / scale) for b, e in zip(own["begin"], own["end"], strict=True)]
            colours = [COLOURS.get(int(e), "black") for e in own["event"]]
            lanes.broken_barh(bars, (lane + row * 0.22, 0.2), facecolors=colours, linewidth=0)
    lanes.set(
        xlabel=unit,
        xlim=(0, end / scale),
        yticks=np.arange(len(chosen)) + 0.44,
        yticklabels=[str(c) for c in chosen],
        ylabel="CTA: dispatch, loader, math 0, store 0",
    )
    lanes.invert_yaxis()
    shown = sorted(int(e) for e in np.unique(found["event"]))
    handles = [Patch(color=COLOURS.get(e, "black"), label=EVENTS.get(e, str(e))) for e in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    about = recording.about
    words = [str(about[k]) for k in ("model", "device") if k in about]
    words += [f"{k} {about[k]}" for k in ("tokens", "ranks", "experts_per_rank", "routing", "plan") if k in about]
    figure.suptitle(f"rank {rank}: " + ", ".join(words), fontsize=8, wrap=True)
    figure.savefig(path, dpi=120)
