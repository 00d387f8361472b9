"""One call of ranks that may be on several GPUs: record it, and draw all of them over one time axis."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from megamoe.bench.timeline import BINS, COLOURS, occupancy
from megamoe.cuda.arena import Sizes
from megamoe.cuda.fused import job, sizes_of
from megamoe.cuda.plan import Plan
from megamoe.cuda.toolchain import compile_kernel
from megamoe.cuda.trace import EVENTS, GROUPS, Recording

__all__ = ["draw_ranks", "record_ranks", "tracing_candidates", "tracing_plan"]

_CHANGES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"role_registers": 64},
    {"peek": False},
    {"role_registers": 64, "peek": False},
)
"""What a plan gives up for the registers of the stamps, least first."""

_LANES: Final = 4
"""CTAs of each rank that are drawn one by one."""

_DRAWN_ROLES: Final = (3, 0, 4, 1)
"""Of such a CTA: dispatch, loader, math 0, store 0."""


def tracing_candidates(plan: Plan) -> list[Plan]:
    """`plan` with time stamps, and its neighbours that have more registers for them."""
    return [replace(plan, trace=True, **change) for change in _CHANGES]


def tracing_plan(plan: Plan, sizes: Sizes) -> Plan:
    """The first of `tracing_candidates` that compiles without a loss; the first one where none does."""
    candidates = tracing_candidates(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loss is what is looked for
        for candidate in candidates:
            wanted = job(candidate, sizes)
            if compile_kernel(wanted.source, wanted.config, wanted.arch, policy="warn").report.clean:
                return candidate
    return candidates[0]


def record_ranks(
    name: str,
    tokens: int,
    *,
    ranks: int,
    devices: Sequence[int] | None = None,
    routing: str = "random",
    experts_per_rank: int | None = None,
) -> Recording:
    """One call after a few to warm up, its L2s flushed, its ranks released together by a call without tokens.

    Args:
        name: a model of `megamoe.bench.models`.
        tokens: tokens on each rank.
        ranks: ranks of the group.
        devices: GPUs over which they are dealt in blocks; None: all on the current one.
        routing: kind of `megamoe.bench.routing`.
        experts_per_rank: by default those of one rank in a group of eight.

    Raises:
        EngineError: no GPU that the engine runs on, or GPUs that cannot host these ranks.
    """
    import torch

    from megamoe.bench import mega
    from megamoe.bench.models import model
    from megamoe.control import Control
    from megamoe.cuda.engine import CudaEngine
    from megamoe.engine import Placement

    local = experts_per_rank or mega.EXPERTS_PER_RANK[name]
    spec = replace(model(name).spec, experts=local * ranks)
    placement = Placement(ranks=ranks, local=tuple(range(ranks)), devices=None if devices is None else tuple(devices))
    engine = CudaEngine(spec, placement, Control(None), tokens, deadline=10.0, trace=True)
    try:
        where = engine.devices
        engine.load(
            [
                replace(mega.random_weights(spec, local, device, seed=r), first_expert=r * local)
                for r, device in enumerate(where)
            ]
        )
        plan = tracing_plan(engine.plan_for(tokens), sizes_of(spec, ranks, tokens))
        engine.force_plan(plan)
        engine.warmup(tokens)
        calls, _ = mega.random_calls(spec, routing, tokens, where)
        empty = [replace(call, num_tokens=0) for call in calls]
        for _ in range(3):
            engine.forward(calls)
            engine.launch_staged(empty)
        engine.check()
        for rank, device in enumerate(where):
            with torch.cuda.device(device):
                engine.buffers(rank).view(
                    "trace"
                ).zero_()  # nothing of an earlier call stays where this one stamps less
        for device in sorted(set(where), key=str):
            with torch.cuda.device(device):
                torch.zeros(mega.FLUSH_BYTES // 4, dtype=torch.int32, device=device).add_(1)
                torch.cuda._sleep(mega.SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # all launches are queued behind it
        if ranks > 1:
            engine.launch_staged(empty)
        engine.forward(calls)  # what the kernel does first, it stages its inputs, is part of its counting
        engine.check()
        stamps = tuple(engine.stamps(r).numpy() for r in range(ranks))
    finally:
        engine.close()
    about = {
        "model": name,
        "tokens": tokens,
        "ranks": ranks,
        "experts_per_rank": local,
        "routing": routing,
        "plan": repr(plan),
        "device": torch.cuda.get_device_name(where[0]),
    }
    return Recording(stamps, about, clocks=tuple(device.index or 0 for device in where))


def draw_ranks(recording: Recording, path: Path) -> None:
    """Write a picture of all ranks: of each, how many of every group of roles are in which phase, and a few CTAs.

    Args:
        recording: the stamps.
        path: .png, .svg or .pdf.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    every = recording.intervals()
    end = int(every["end"].max())
    ranks = len(recording.stamps)
    scale, unit = (1e3, "us") if recording.unit == "ns" else (1.0, recording.unit)
    figure = Figure(figsize=(13, 1 + 4.5 * ranks), layout="constrained")
    heights = [*[1] * len(GROUPS), 2.5] * ranks
    axes = iter(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    centres = (np.arange(BINS) + 0.5) * end / BINS / scale
    for rank, stamps in enumerate(recording.stamps):
        found, ctas = every[every["rank"] == rank], len(stamps)
        for number, (group, roles) in enumerate(GROUPS.items()):
            one = next(axes)
            parts = occupancy(found, roles, ctas, end)
            if parts:  # a rank without routes has idle roles
                one.stackplot(
                    centres,
                    [np.clip(p, 0, 1) for p in parts.values()],
                    colors=[COLOURS.get(event, "black") for event in parts],
                )
            one.set(ylim=(0, 1), ylabel=group, yticks=[0, 1])
            if number == 0:
                where = f", GPU {recording.clocks[rank]}" if recording.clocks else ""
                one.set_title(f"rank {rank}{where}", loc="left", fontsize=9)
        lanes = next(axes)
        chosen = np.unique(np.linspace(0, ctas - 1, min(_LANES, ctas)).round().astype(int))
        for lane, cta in enumerate(chosen):
            for row, role in enumerate(_DRAWN_ROLES):
                own = found[(found["cta"] == cta) & (found["role"] == role)]
                bars = [(b / scale, (e - b) / scale) for b, e in zip(own["begin"], own["end"], strict=True)]
                colours = [COLOURS.get(int(event), "black") for event in own["event"]]
                lanes.broken_barh(bars, (lane + row * 0.22, 0.2), facecolors=colours, linewidth=0)
        lanes.set(yticks=np.arange(len(chosen)) + 0.44, yticklabels=[str(cta) for cta in chosen], ylabel="CTA")
        lanes.invert_yaxis()
    lanes.set(xlabel=unit, xlim=(0, end / scale))
    shown = sorted(int(event) for event in np.unique(every["event"]))
    handles = [Patch(color=COLOURS.get(event, "black"), label=EVENTS.get(event, str(event))) for event in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    about = recording.about
    words = [str(about[k]) for k in ("model", "device") if k in about]
    words += [f"{k} {about[k]}" for k in ("tokens", "ranks", "experts_per_rank", "routing", "plan") if k in about]
    if len(set(recording.clocks)) > 1:
        words.append(f"clocks aligned to +-{recording.alignment().uncertainty / scale:.2f} {unit}")
    figure.suptitle(", ".join(words), fontsize=8, wrap=True)
    figure.savefig(path, dpi=120)
