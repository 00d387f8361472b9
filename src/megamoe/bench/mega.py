"""The fused kernel of the GPU engine: its time with inputs already staged, ranks on one GPU.

*Paced*: the L2 is flushed, the GPU sleeps for about 10 ms, one call's kernels run. *Sustained*: calls back to back. The
time of a call is the longest kernel of its ranks, from the profiler (Kineto), so that launch overheads are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from megamoe.bench.models import model
from megamoe.bench.results import Row, timing
from megamoe.bench.routing import routing
from megamoe.control import Control
from megamoe.cuda.engine import CudaEngine
from megamoe.cuda.fused import KERNEL
from megamoe.cuda.plan import Plan
from megamoe.engine import Call, Placement
from megamoe.spec import BLOCK, MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["EXPERTS_PER_RANK", "benchmark", "floor_us", "random_weights"]

EXPERTS_PER_RANK: Final = {"flash": 32, "pro": 48, "mimo": 48, "v3": 32, "qwen3": 64}
"""Experts of a rank in a group of eight (two for qwen3)."""

STREAM_TBPS: Final = 4.58
"""Read-only stream from HBM on an H200, TB/s: the weights of hit experts at this rate are the floor of small calls."""

_FLUSH_BYTES: Final = 1 << 28
_SLEEP_CYCLES: Final = 16_000_000


def random_weights(spec: MoESpec, local_experts: int, device: torch.device, seed: int = 0) -> ExpertWeights:
    """e4m3 of Gaussian values with random block scales that keep activations near 1."""
    g = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, depth: int) -> torch.Tensor:
        out = torch.empty(local_experts, rows, depth, dtype=torch.float8_e4m3fn, device=device)
        for e in range(local_experts):
            out[e] = (torch.randn(rows, depth, generator=g, device=device) * 16).to(out.dtype)
        return out

    def scales(rows: int, depth: int) -> torch.Tensor:
        shape = (local_experts, rows // BLOCK, depth // BLOCK)
        values: torch.Tensor = (0.5 + torch.rand(shape, generator=g, device=device)) / (16 * depth**0.5)
        return values

    h, i = spec.hidden, spec.intermediate
    return ExpertWeights(
        format="fp8_block",
        w13=matrix(2 * i, h),
        w2=matrix(h, i),
        w13_scale=scales(2 * i, h),
        w2_scale=scales(h, i),
    )


def floor_us(spec: MoESpec, ids: np.ndarray[Any, Any], local_experts: int) -> float:
    """Microseconds to read the weights of the experts that are hit on the busiest rank."""
    hit = np.unique(ids[ids >= 0])
    busiest = max(np.bincount(hit // local_experts)) if len(hit) else 0
    return float(busiest) * 3 * spec.hidden * spec.intermediate / (STREAM_TBPS * 1e6)


def _kernel_times(profile: Any, ranks: int) -> list[float]:
    durations = [e.device_time for e in profile.events() if e.name == KERNEL and e.device_time > 0]
    return [max(durations[i : i + ranks]) for i in range(0, len(durations), ranks)]


def _calls(
    spec: MoESpec, kind: str, tokens: int, ranks: int, device: torch.device
) -> tuple[list[Call], np.ndarray[Any, Any]]:
    ids, weights = routing(kind, tokens=tokens, ranks=ranks, experts=spec.experts, topk=spec.topk)
    g = torch.Generator(device).manual_seed(tokens)
    calls = []
    for r in range(ranks):
        x = torch.randn(tokens, spec.hidden, generator=g, device=device).bfloat16()
        calls.append(
            Call(
                x=x,
                scales=None,
                expert_ids=torch.from_numpy(ids[r]).to(device=device, dtype=torch.int32),
                expert_weights=torch.from_numpy(weights[r]).to(device=device, dtype=torch.float32),
                out=torch.empty_like(x),
                num_tokens=tokens,
                bound=tokens,
            )
        )
    return calls, ids


def benchmark(
    name: str,
    tokens: Sequence[int],
    *,
    ranks: int = 1,
    kind: str = "random",
    plans: dict[str, Plan | None] | None = None,
    max_tokens: int = 8192,
    samples: Callable[[int], int] = lambda m: 30 if m >= 512 else 100,
    experts_per_rank: int | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Rows of every token count and plan, paced.

    Args:
        name: a model of `megamoe.bench.models`.
        tokens: tokens on each rank.
        ranks: ranks on the current GPU.
        kind: routing.
        plans: by name; None chooses from the bound. Default: only that.
        max_tokens: token cap of the layer.
        samples: how many for a token count.
        experts_per_rank: by default `EXPERTS_PER_RANK`.
        on_step: called with a line for a progress display.
    """
    local = experts_per_rank or EXPERTS_PER_RANK[name]
    spec = replace(model(name).spec, experts=local * ranks)
    device = torch.device("cuda", torch.cuda.current_device())
    weights = [replace(random_weights(spec, local, device, seed=r), first_expert=r * local) for r in range(ranks)]
    placement = Placement(ranks=ranks, local=tuple(range(ranks)))
    engine = CudaEngine(spec, placement, Control(None), max_tokens, deadline=10.0)
    engine.load(weights)
    weights.clear()
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    for m in tokens:
        calls, ids = _calls(spec, kind, m, ranks, device)
        for label, plan in (plans or {"auto": None}).items():
            engine.force_plan(plan)
            engine.warmup(m)
            engine.forward(calls)  # stages the inputs
            engine.check()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(samples(m)):
                    flush.zero_()
                    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
                    engine.launch_staged(calls)
                torch.cuda.synchronize()
            engine.check()
            floor = floor_us(spec, ids, local)
            times = timing(_kernel_times(profile, ranks))
            row = {
                "model": name,
                "ranks": ranks,
                "experts_per_rank": local,
                "tokens": m,
                "routing": kind,
                "bound": m,
                "protocol": "paced",
                "engine": "megamoe",
                "plan": label,
                "kernel_us": times,
                "floor_us": round(floor, 2),
            }
            on_step(f"{name} M={m} {label}: {times['median']} us, weights' floor {floor:.0f}")
            yield row
    engine.close()
