"""The GPU engine: time of the fused kernel and of a whole call, all ranks in this process, on one GPU or several.

*Paced*: the L2 is flushed, the GPU sleeps for about 10 ms, one call runs. *Paced, clean*: what the flush has written is
written back before the call, too; otherwise the call's first loads push it out of the L2, at the memory's expense.
*Sustained*: calls back to back, in bursts.
``kernel_us`` is the longest kernel of a call's ranks with inputs already staged, from the profiler (Kineto), so that
launch overheads are not in it. ``e2e_us`` is a call from BF16 rows to BF16 rows, a CUDA graph's replay between events.
Several ranks are released together by a call without tokens, which ends everywhere when all ranks have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from megamoe.bench.check import oracle_error
from megamoe.bench.models import model
from megamoe.bench.request import Request, Tick
from megamoe.bench.results import Row, layer_keys, timing
from megamoe.bench.routing import routing
from megamoe.control import Control
from megamoe.cuda.engine import CudaEngine
from megamoe.cuda.fused import KERNEL
from megamoe.cuda.plan import Plan
from megamoe.engine import Call, Placement
from megamoe.inputs import check_call
from megamoe.spec import BLOCK, MoESpec
from megamoe.weights import ExpertWeights

__all__ = [
    "DEADLINE",
    "EXPERTS_PER_RANK",
    "PROTOCOL",
    "Pace",
    "benchmark",
    "floor_us",
    "plan_name",
    "random_calls",
    "random_weights",
    "run",
]

PROTOCOL: Final = (
    "GPU: kernel_us the longest kernel of a call's ranks (profiler, inputs staged), e2e_us a graph's replay between "
    "events, the slowest GPU's, BF16 in, BF16 out; paced: one call after an L2 flush and 10 ms of sleep, several ranks "
    "released by a call without tokens; paced-clean: the same, and the L2 has no line of the flush left to write back; "
    "sustained: bursts back to back"
)

MAX_TOKENS: Final = 8192
"""Token cap of measured layers; larger calls raise it."""

EXPERTS_PER_RANK: Final = {"flash": 32, "pro": 48, "mimo": 48, "v3": 32, "qwen3": 64}
"""Experts of a rank in a group of eight (two for qwen3)."""

STREAM_TBPS: Final = 4.58
"""Read-only stream from HBM on an H200, TB/s: the weights of hit experts at this rate are the floor of small calls."""

FLUSH_BYTES: Final = 1 << 28
SLEEP_CYCLES: Final = 16_000_000
"""What precedes a paced call: bytes written to flush the L2, and about 10 ms of sleep."""

DEADLINE: Final = 10.0
"""Seconds that a wait for a peer may take in a measured layer."""

_BURST: Final = 20
_CHECKED_TOKENS: Final = 64
"""Tokens that are compared with the oracle, dealt to all ranks, unless asked otherwise."""


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


def plan_name(plan: Plan) -> str:
    """Short name of a plan, as in results: tiles, carried tokens, stages, staging buffers, rows in flight, waves."""
    tiles = "+".join(name for name, on in (("wide", plan.wide), ("swap", plan.swap)) if on)
    carried = f"-c{plan.carried_tokens}" if plan.carried_tokens else ""
    waves = "" if plan.wave_experts is None else f"-w{plan.wave_experts}"
    lag = f"-l{plan.lag}" if plan.lag else ""
    return f"{tiles}{carried}-s{plan.stages}-b{plan.staging_buffers}-p{plan.pulled_rows}{waves}{lag}"


def _kernel_times(profile: Any, ranks: Sequence[int], skipped: int) -> list[float]:
    """Longest kernel of each call; `ranks` on each GPU, `skipped` calls before each one that counts."""
    by_device: dict[int, list[Any]] = {}
    for event in profile.events():
        if event.name == KERNEL and event.device_time > 0:
            by_device.setdefault(event.device_index, []).append(event)
    longest = []
    for (_, events), own in zip(sorted(by_device.items()), ranks, strict=True):
        times = [e.device_time for e in sorted(events, key=lambda e: e.time_range.start)]
        calls = [max(times[i : i + own]) for i in range(0, len(times), own)]
        longest.append(calls[skipped :: skipped + 1])
    return [max(times) for times in zip(*longest, strict=True)]


def random_calls(
    spec: MoESpec, kind: str, tokens: int, devices: Sequence[torch.device]
) -> tuple[list[Call], np.ndarray[Any, Any]]:
    """One rank's call for each of `devices`, random rows and the fixed `routing`; and the ids of all ranks."""
    ids, weights = routing(kind, tokens=tokens, ranks=len(devices), experts=spec.experts, topk=spec.topk)
    calls = []
    for r, device in enumerate(devices):
        g = torch.Generator(device).manual_seed(tokens * len(devices) + r)
        x = torch.randn(tokens, spec.hidden, generator=g, device=device).bfloat16()
        given = (torch.from_numpy(ids[r]).to(device), torch.from_numpy(weights[r]).to(device))
        calls.append(check_call(spec, "fp8_block", tokens, device, x, *given))
    return calls, ids


class Pace:
    """Runs something once in the state that a protocol asks for; `together` releases several ranks at once."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = sorted(set(devices), key=lambda d: d.index)
        self._flush = [torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=d) for d in self.devices]
        self._read = [torch.ones_like(flush) for flush in self._flush]

    def run(self, protocol: str, action: Callable[[], None], together: Callable[[], None] | None) -> None:
        if protocol == "sustained":
            action()
            return
        for device, flush, read in zip(self.devices, self._flush, self._read, strict=True):
            flush.zero_()
            if protocol == "paced-clean":
                read.sum()
            with torch.cuda.device(device):
                torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        if together is not None:
            together()
        action()

    def time(
        self, protocol: str, graphs: Sequence[torch.cuda.CUDAGraph], samples: int, together: Callable[[], None] | None
    ) -> list[float]:
        """Microseconds of `samples` replays of each GPU's graph between events, the slowest GPU's; sustained ones are
        means over a burst."""
        burst = _BURST if protocol == "sustained" else 1
        taken: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        for _ in range(samples):
            pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

            def between(pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = pairs) -> None:
                for device in self.devices:
                    with torch.cuda.device(device):
                        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                        start.record()
                        pairs.append((start, end))
                for _ in range(burst):
                    for device, graph in zip(self.devices, graphs, strict=True):
                        with torch.cuda.device(device):
                            graph.replay()
                for device, (_, end) in zip(self.devices, pairs, strict=True):
                    with torch.cuda.device(device):
                        end.record()

            self.run(protocol, between, together)
            taken.append(pairs)
        for device in self.devices:
            torch.cuda.synchronize(device)
        return [max(start.elapsed_time(end) for start, end in pairs) * 1e3 / burst for pairs in taken]


def _released(engine: CudaEngine, calls: Sequence[Call]) -> Callable[[], None] | None:
    """A call without tokens, for several ranks."""
    if len(calls) == 1:
        return None
    empty = [replace(call, num_tokens=0) for call in calls]
    return lambda: engine.launch_staged(empty)


def _measure_kernel(engine: CudaEngine, calls: list[Call], pace: Pace, protocol: str, samples: int) -> Row:
    together = None if protocol == "sustained" else _released(engine, calls)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(samples):
            pace.run(protocol, lambda: engine.launch_staged(calls), together)
        for device in pace.devices:
            torch.cuda.synchronize(device)
    engine.check()
    ranks = [engine.devices.count(device) for device in pace.devices]
    return timing(_kernel_times(profile, ranks, 0 if together is None else 1))


def _measure_call(engine: CudaEngine, calls: list[Call], pace: Pace, protocol: str, samples: int) -> Row:
    graphs = []
    for device in pace.devices:
        here = [r for r, own in enumerate(engine.devices) if own == device]
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            # A stream of this GPU: torch's own for captures belongs to the GPU of the first one.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
                engine.forward_some(calls, here)
            graphs.append(graph)
    for device, graph in zip(pace.devices, graphs, strict=True):
        with torch.cuda.device(device):
            graph.replay()
    times = pace.time(protocol, graphs, samples, _released(engine, calls))
    engine.check()
    return timing(times)


def _error(spec: MoESpec, weights: Sequence[ExpertWeights], calls: Sequence[Call], tokens: int) -> float:
    """Relative error of every rank's first tokens against the oracle."""
    few, home = max(1, tokens // len(calls)), calls[0].x.device

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(call, name)[:few].to(home) for call in calls])

    columns = (joined(name) for name in ("x", "expert_ids", "expert_weights", "out"))
    return oracle_error(spec, weights, *columns)


def benchmark(
    name: str,
    tokens: Sequence[int],
    *,
    ranks: int = 1,
    devices: Sequence[int] | None = None,
    kind: str = "random",
    plans: dict[str, Plan | None] | None = None,
    max_tokens: int = MAX_TOKENS,
    samples: Callable[[int], int] = lambda m: 30 if m >= 512 else 100,
    experts_per_rank: int | None = None,
    protocols: Sequence[str] = ("paced",),
    bound: int | None = None,
    e2e: bool = False,
    check: bool = False,
    checked_tokens: int = _CHECKED_TOKENS,
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Rows of every token count, plan and protocol.

    Args:
        name: a model of `megamoe.bench.models`.
        tokens: tokens on each rank.
        ranks: ranks of the group.
        devices: the GPUs over which they are dealt in blocks; None for the current one.
        kind: routing.
        plans: by name; None chooses from the bound. Default: only that.
        max_tokens: token cap of the layer.
        samples: how many for a token count.
        experts_per_rank: by default `EXPERTS_PER_RANK`.
        protocols: ``"paced"``, ``"paced-clean"``, ``"sustained"``.
        bound: of all calls, as a captured graph has one; None: each call's own number of tokens.
        e2e: also measure whole calls.
        check: also compare with the oracle.
        checked_tokens: how many tokens, dealt to all ranks; the oracle takes most of its time for each expert they hit.
        on_step: called with a line for a progress display.
    """
    local = experts_per_rank or EXPERTS_PER_RANK[name]
    spec = replace(model(name).spec, experts=local * ranks)
    placement = Placement(ranks=ranks, local=tuple(range(ranks)), devices=None if devices is None else tuple(devices))
    engine = CudaEngine(spec, placement, Control(None), max_tokens, deadline=DEADLINE)
    try:
        weights = [
            replace(random_weights(spec, local, device, seed=r), first_expert=r * local)
            for r, device in enumerate(engine.devices)
        ]
        engine.load(weights)
        if not check:
            weights.clear()
        pace = Pace(engine.devices)
        for m in tokens:
            calls, ids = random_calls(spec, kind, m, engine.devices)
            most = m if bound is None else bound
            calls = [replace(call, bound=most) for call in calls]
            floor = floor_us(spec, ids, local)
            for label, plan in (plans or {"auto": None}).items():
                engine.force_plan(plan)
                engine.warmup(most)
                engine.forward(calls)  # stages the inputs
                engine.check()
                error = _error(spec, weights, calls, checked_tokens) if check and m else None
                for protocol in protocols:
                    times = _measure_kernel(engine, calls, pace, protocol, samples(m))
                    routes = ranks * m * spec.topk
                    row = {
                        **layer_keys(name, spec, ranks),
                        "tokens": m,
                        "routing": kind,
                        "bound": most,
                        "protocol": protocol,
                        "engine": "megamoe",
                        "format": "fp8_block",
                        "plan": f"auto:{plan_name(engine.plan_for(most))}" if plan is None else label,
                        "variant": "cuda",
                        "kernel_us": times,
                        "floor_us": round(floor, 2),
                        "tflops": round(routes * 6 * spec.hidden * spec.intermediate / times["median"] / 1e6, 3),
                        "tbps": round(STREAM_TBPS * floor / times["median"], 3),
                    }
                    if e2e:
                        row["e2e_us"] = _measure_call(engine, calls, pace, protocol, samples(m))
                    if error is not None:
                        row["error"] = error
                    whole = f", call {row['e2e_us']['median']}" if e2e else ""
                    on_step(f"{name} M={m} {label} {protocol}: {times['median']} us{whole}, weights' floor {floor:.0f}")
                    yield row
    finally:
        engine.close()


def run(request: Request, tick: Tick) -> list[Row]:
    """Measure every combination in `request`, both protocols. Raises EngineError when the GPU engine cannot host it."""
    total = len(request.models) * len(request.routings) * len(request.tokens) * 2
    rows: list[Row] = []
    for name in request.models:
        spec = model(name).scaled(request.experts)
        for kind in request.routings:
            tick(f"{name}, {kind}: weights", len(rows) / total)
            for row in benchmark(
                name,
                [m for m in request.tokens if m],
                ranks=request.ranks,
                devices=request.devices,
                kind=kind,
                max_tokens=max(MAX_TOKENS, *request.tokens),
                samples=lambda m: request.samples if m < 512 else min(request.samples, 30),
                experts_per_rank=spec.local_experts(request.ranks),
                protocols=("paced", "sustained"),
                e2e=True,
                check=request.check,
            ):
                rows.append(row)
                tick(f"{name}, {kind}, {row['tokens']} tokens, {row['protocol']}", len(rows) / total)
    if request.peers and request.ranks == request.gpus > 1:
        from megamoe.bench import nccl

        tick("unfused peers", 1.0)
        cells = [
            (name, model(name).scaled(request.experts).local_experts(request.ranks), kind, m)
            for name in request.models
            for kind in request.routings
            for m in request.tokens
            if m
        ]
        rows += nccl.run(cells, request.ranks, min(request.samples, 20))
    tick("done", 1.0)
    return rows
