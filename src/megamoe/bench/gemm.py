"""The grouped GEMM by itself: both projections of a model at one rank's load, no communication.

Two protocols. *Paced*: the L2 is flushed, the GPU sleeps for about 10 ms, one launch is timed with events. *Sustained*:
bursts of about 25 ms, back to back. All engines of a run alternate in both (A B B A ...), because the GPU is limited by
its power: figures of two runs or protocols cannot be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from megamoe.bench.models import model
from megamoe.bench.request import Request, Tick
from megamoe.bench.results import Row, timing
from megamoe.cuda.driver import open_driver
from megamoe.cuda.gemm import PLANS, TILE_ROWS, GemmPlan, GroupedGemm, problem_from
from megamoe.errors import InputError
from megamoe.formats.fp8_block import E4M3
from megamoe.formats.layout import deinterleave_gate_up
from megamoe.reference import Projection, project, relative_error
from megamoe.spec import BLOCK

__all__ = ["LOADS", "PHASES", "PROTOCOL", "Launch", "Peer", "Workload", "benchmark", "cells", "run", "workload"]

PROTOCOL: Final = (
    "CUDA events around launches; paced: one launch after an L2 flush (4 GiB memset) and about 10 ms of GPU sleep; "
    "sustained: the mean of a burst of about 25 ms, bursts back to back; engines alternate A B B A in both; every "
    "sample is kept"
)

PHASES: Final = ("gate-up", "down")

LOADS: Final = {"flash": 32, "pro": 48}
"""Experts on a rank of eight; with 8192 tokens a rank and top-6 they share 49152 routes, evenly here."""

_FLUSH_BYTES: Final = 1 << 32
_SLEEP_CYCLES: Final = 16_000_000
_BURST_SECONDS: Final = 0.025

Launch = Callable[[], None]


@dataclass(frozen=True)
class Workload:
    """Random operands of one projection at one rank's load, quantised per 128, on one GPU.

    Attributes:
        model, phase: keys of its rows.
        rows: rows of each group, all multiples of 128.
        a, a_scales: e4m3 ``[M, K]``, float32 ``[M, K/128]``.
        b, b_scales: e4m3 ``[G, N, K]``, float32 ``[G, N/128, K/128]``.
        out: BF16 ``[M, N]``, shared by all engines.
    """

    model: str
    phase: str
    rows: tuple[int, ...]
    a: torch.Tensor
    a_scales: torch.Tensor
    b: torch.Tensor
    b_scales: torch.Tensor
    out: torch.Tensor

    @property
    def flop(self) -> float:
        """Floating-point operations of the rows that exist."""
        return 2.0 * sum(self.rows) * self.b.shape[1] * self.b.shape[2]


Peer = Callable[[Workload], Launch]
"""Another engine: given the operands, a function that launches it once, into ``workload.out``."""


def _quantise(values: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    scales = values.abs().amax(dim=dims, keepdim=True) / 448
    return (values / scales).to(E4M3), scales.squeeze(dims)


def workload(
    name: str, phase: str, *, tokens: int = 8192, device: str | torch.device = "cuda", seed: int = 0
) -> Workload:
    """Gaussian activations and weights of one projection of model `name`, routes spread evenly over the experts.

    Raises:
        InputError: unknown model or phase, or rows that are not whole tiles.
    """
    if name not in LOADS or phase not in PHASES:
        raise InputError("workload", f"{name} {phase}", f"{', '.join(LOADS)}; {', '.join(PHASES)}", "Pick one of them.")
    spec, groups = model(name).spec, LOADS[name]
    hidden, intermediate = spec.hidden, spec.intermediate
    n, k = (2 * intermediate, hidden) if phase == "gate-up" else (hidden, intermediate)
    each, rest = divmod(tokens * spec.topk, groups * TILE_ROWS)
    if rest or not each:
        raise InputError("tokens", tokens, "whole tiles of 128 rows for each expert", "Use 8192.")
    rows = (each * TILE_ROWS,) * groups
    m, where = sum(rows), torch.device(device)
    generator = torch.Generator(where).manual_seed(seed)
    a, a_scales = torch.empty(m, k, dtype=E4M3, device=where), torch.empty(m, k // BLOCK, device=where)
    b = torch.empty(groups, n, k, dtype=E4M3, device=where)
    b_scales = torch.empty(groups, n // BLOCK, k // BLOCK, device=where)
    for group in range(groups):
        part = slice(group * rows[0], (group + 1) * rows[0])
        x = torch.randn(rows[0], k // BLOCK, BLOCK, device=where, generator=generator)
        q, a_scales[part] = _quantise(x, (2,))
        a[part] = q.view(rows[0], k)
        w = torch.randn(n // BLOCK, BLOCK, k // BLOCK, BLOCK, device=where, generator=generator) * 0.05
        q, b_scales[group] = _quantise(w, (1, 3))
        b[group] = q.view(n, k)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=where)
    return Workload(name, phase, rows, a, a_scales, b, b_scales, out)


def oracle_error(load: Workload, groups: Sequence[int], interleaved: bool = False) -> float:
    """Largest relative error of ``load.out`` against the oracle over `groups`."""
    errors = []
    for group in groups:
        part = slice(group * load.rows[0], (group + 1) * load.rows[0])
        weights, got = load.b[group], load.out[part].float()
        if interleaved:
            weights = deinterleave_gate_up(weights.unsqueeze(0))[0]
            got = deinterleave_gate_up(got.t().contiguous().unsqueeze(0))[0].t()
        wanted = project(Projection(weights, load.b_scales[group]), load.a[part], load.a_scales[part])
        errors.append(relative_error(got, wanted))
    return max(errors)


def _bound(plan: GemmPlan, load: Workload) -> Launch:
    """A launch of `plan` on the operands of `load`."""
    gemm = GroupedGemm(plan, load.a.device.index or 0)  # the driver counts visible GPUs as torch does
    made = problem_from(plan, load.rows, load.a, load.a_scales, load.b, load.b_scales)
    problem = replace(made, out=load.out)
    return lambda: gemm(problem)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _paced(engines: Mapping[str, Launch], samples: int, flush: torch.Tensor) -> dict[str, list[float]]:
    """Microseconds of each launch."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(samples):
        for name in list(engines)[:: 1 if index % 2 == 0 else -1]:
            start, end = _event(), _event()
            flush.zero_()
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            engines[name]()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
    return times


def _sustained(engines: Mapping[str, Launch], rounds: int, paced: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Microseconds of a launch, averaged over each burst; the first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(rounds + 1):
        for name in list(engines)[:: 1 if index % 2 == 0 else -1]:
            launches = max(2, int(_BURST_SECONDS * 1e6 / min(paced[name])))
            start, end = _event(), _event()
            engines[name]()
            start.record()
            for _ in range(launches):
                engines[name]()
            end.record()
            end.synchronize()
            if index:
                times[name].append(start.elapsed_time(end) * 1e3 / launches)
    return times


def benchmark(
    *,
    models: Sequence[str] = tuple(LOADS),
    plans: Mapping[str, GemmPlan] | None = None,
    peers: Mapping[str, Peer] | None = None,
    samples: int = 30,
    rounds: int = 6,
    device: str | torch.device = "cuda",
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Rows of every model, phase, protocol and engine.

    Args:
        models: of `LOADS`.
        plans: plans with BF16 output, by any name; by default all of `PLANS`.
        peers: other engines by ``"engine:plan"``, the keys of their rows.
        samples: paced launches of each engine.
        rounds: sustained bursts of each engine; 0 leaves that protocol out.
        device: the GPU.
        on_step: called with a line for a progress display.

    Yields:
        Rows for `megamoe.bench.results`. ``error`` is against the oracle, over the first and the last group;
        ``equal_bits`` says whether the whole output equals that of the first plan of the same row order.
    """
    plans = plans if plans is not None else {n: p for n, p in PLANS.items() if not p.float32}
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    for name in models:
        for phase in PHASES:
            load = workload(name, phase, device=device)
            engines: dict[str, Launch] = {plan.name: _bound(plan, load) for plan in plans.values()}
            engines |= {f"peer:{key}": make(load) for key, make in (peers or {}).items()}
            interleaved = {plan.name: plan.interleaved for plan in plans.values()}
            facts: dict[str, dict[str, Any]] = {}
            first: dict[bool, torch.Tensor] = {}
            for key, launch in engines.items():
                load.out.fill_(float("nan"))
                launch()
                torch.cuda.synchronize(device)
                order = interleaved.get(key, False)
                kept = first.setdefault(order, load.out.clone())
                facts[key] = {
                    "error": oracle_error(load, (0, len(load.rows) - 1), order),
                    "equal_bits": bool(torch.equal(kept.view(torch.int16), load.out.view(torch.int16))),
                }
                on_step(f"{name} {phase} {key}: {facts[key]}")
            first.clear()
            paced = _paced(engines, samples, flush)
            measured = {"paced": paced} | ({"sustained": _sustained(engines, rounds, paced)} if rounds else {})
            for protocol, times in measured.items():
                for key in engines:
                    row: Row = {
                        "model": name,
                        "experts_per_rank": LOADS[name],
                        "tokens": 8192,
                        "routing": "balanced",
                        "phase": phase,
                        "protocol": protocol,
                        "engine": "megamoe",
                        "plan": key,
                        "kernel_us": timing(times[key]),
                        **facts[key],
                    }
                    if key.startswith("peer:"):
                        row["engine"], _, row["plan"] = key.removeprefix("peer:").partition(":")
                    row["tflops"] = round(load.flop / row["kernel_us"]["median"] / 1e6, 1)
                    yield row
            del load, engines
            torch.cuda.empty_cache()


def run(request: Request, tick: Tick) -> list[Row]:
    """Rows of the models of `request` that have a load here, all BF16 plans; always 8192 tokens a rank."""
    open_driver()  # refuses a machine without a GPU before torch does
    models = [name for name in request.models if name in LOADS]
    if not models:
        raise InputError("model", ",".join(request.models), ", ".join(LOADS), "Pick one of the listed models.")
    rows: list[Row] = []
    steps = len(models) * len(PHASES) * sum(not plan.float32 for plan in PLANS.values())
    done = 0

    def step(line: str) -> None:
        nonlocal done
        done += 1
        tick(line.split(":")[0], done / steps)

    rows.extend(benchmark(models=models, samples=request.samples, on_step=step))
    return rows


def cells(row: Row) -> dict[str, str]:
    """A row for people."""
    time = row["kernel_us"]
    return {
        "model": row["model"],
        "phase": row["phase"],
        "protocol": row["protocol"],
        "plan": row["plan"],
        "us": f"{time['median']:.0f}",
        "min": f"{time['min']:.0f}",
        "TFLOP/s": f"{row['tflops']:.0f}",
        "error": f"{row['error']:.1e}",
    }
