"""Recording one call of ranks that may be on several GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from megamoe.cuda.arena import Sizes
from megamoe.cuda.fused import job, sizes_of
from megamoe.cuda.plan import Plan
from megamoe.cuda.toolchain import compile_kernel
from megamoe.cuda.trace import Recording

__all__ = ["record_ranks", "tracing_candidates", "tracing_plan"]

_CHANGES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"role_registers": 64},
    {"peek": False},
    {"role_registers": 64, "peek": False},
)
"""What a plan gives up for the registers of the stamps, least first."""


def tracing_candidates(plan: Plan) -> list[Plan]:
    """`plan` with time stamps, and its neighbours that have more registers for them."""
    if plan.carried_tokens:  # no registers to spare: without the carried tokens there are
        plan = replace(plan, carried_tokens=0, role_registers=Plan.role_registers, math_registers=Plan.math_registers)
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
