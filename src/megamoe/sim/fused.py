"""The fused kernel in the simulator: ranks with their memory, calls in a row with different routing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from megamoe import reference
from megamoe.cuda.arena import (
    ARENA,
    ERROR_WORDS,
    REPORT_WORDS,
    TRACE_EVENTS,
    TRACE_ROLES,
    WORKSPACE,
    Field,
    Params,
    Sizes,
    offsets,
)
from megamoe.cuda.fused import KERNEL, Buffers, Maps, fill_params, job, sizes_of, tensor_maps, weight_maps
from megamoe.cuda.launch import aligned
from megamoe.cuda.plan import THREADS, Plan
from megamoe.cuda.relayout import KernelWeights, relayout
from megamoe.formats import fp8_block
from megamoe.formats.layout import interleave_gate_up
from megamoe.sim.build import Kernel
from megamoe.sim.memory import encode_tensor_map
from megamoe.sim.plans import Prepared, SimPlan
from megamoe.sim.simulation import Launch, Simulation
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["CASES", "FusedCase", "Ranks", "simulated"]

SPEC: Final = MoESpec(hidden=512, intermediate=256, experts=8, topk=2, clamp=10.0)


@dataclass(frozen=True)
class FusedCase:
    """A layer and its calls.

    Attributes:
        plan: the kernel's configuration.
        tokens: tokens of each rank, for each call.
        grid: CTAs of a rank.
        hot: every route of the first call goes to this expert.
        raw: the kernel stages BF16 rows itself, and takes ids of this type.
        spec: the layer.
        pool_limit: rows of the pools, where they shall be fewer than the calls can need.
    """

    plan: Plan
    tokens: tuple[tuple[int, ...], ...]
    grid: int = 3
    hot: int | None = None
    raw: torch.dtype | None = None
    spec: MoESpec = SPEC
    pool_limit: int | None = None


_SMALL: Final = replace(SPEC, hidden=256, intermediate=128, experts=4)

# An expert with 284 tokens: two wide tiles, which carry 16 and 12 more.
_CARRIED: Final = FusedCase(
    Plan(stages=2, carried_tokens=16, direct_tokens=0),
    ((84, 61), (9, 30)),
    hot=2,
    spec=replace(_SMALL, intermediate=256),
)

# Small calls bring their rows while they list routes. direct_tokens=0 leaves that to the math warps, where an expert
# is among those of the first tiles (here nearly all of them are), and urgent_tokens=0 to the dispatch warps.
CASES: Final = {
    "wide": FusedCase(Plan(swap=False, stages=2), ((70, 33), (9, 140)), spec=replace(_SMALL, intermediate=256)),
    "swap": FusedCase(Plan(wide=False, stages=3, pulled_rows=2), ((40, 40), (17, 0))),
    "mixed": FusedCase(
        Plan(stages=2, pulled_rows=2, direct_tokens=0, urgent_tokens=20),
        ((150, 20), (0, 90)),
        hot=5,
        spec=replace(SPEC, experts=6),
    ),
    # One CTA, so that other tiles follow those that carry; several, so that one reads what another one has made.
    "carried": replace(_CARRIED, grid=1),
    "carried-shared": _CARRIED,
    # Both GEMMs alternate, as a rank finds from the routing: where most results leave it.
    "alternating": FusedCase(
        Plan(stages=2, link_bytes=400, staging_buffers=2, direct_tokens=0),
        ((12, 40), (3, 90)),
        grid=2,
        spec=replace(_SMALL, experts=12, intermediate=256),
    ),
    "waves": FusedCase(
        Plan(wide=False, stages=2, wave_experts=1, pulled_rows=3, direct_tokens=0),
        ((40, 31), (40, 8)),
        spec=replace(SPEC, topk=3),
    ),
    "lag": FusedCase(
        Plan(stages=2, wave_experts=2, lag=1, staging_buffers=2, direct_tokens=0), ((80, 20), (20, 80)), grid=4
    ),
    "alone-urgent": FusedCase(Plan(wide=False, stages=2, direct_tokens=0), ((21,), (3,)), spec=_SMALL),
    "alone": FusedCase(Plan(wide=False, stages=2), ((21,), (3,)), spec=_SMALL),
    "alone-raw": FusedCase(Plan(wide=False, stages=2), ((21,), (3,)), raw=torch.int64, spec=_SMALL),
    "alone-wide": FusedCase(Plan(stages=2), ((21,), (3,)), raw=torch.int64, spec=replace(_SMALL, intermediate=256)),
    # Few tokens an expert, some more tiles than CTAs: tiles are cut between CTAs. The second call has fewer tiles.
    "alone-stretches": FusedCase(Plan(wide=False, stages=2), ((3,), (1,), (4,)), grid=6, raw=torch.int32),
    # More routes than threads: the other way through the routing.
    "alone-many": FusedCase(Plan(wide=False, stages=2), ((200,), (2,)), raw=torch.int32, spec=_SMALL),
    # Some 50 tokens an expert: half tiles, of which two follow one another in a CTA, between swapped ones.
    "half": FusedCase(Plan(wide=False, stages=2), ((60, 45), (9, 50)), grid=2, spec=replace(_SMALL, intermediate=256)),
    # Tiles of one or two k-blocks under a deep ring, and one CTA for all of them: the queue of tiles goes round often.
    "queue": FusedCase(
        Plan(wide=False, stages=4, direct_tokens=0), ((24, 30), (40, 0)), grid=1, spec=replace(_SMALL, experts=16)
    ),
    # Row-major weights. Three blocks of 128 rows in w2: the second tile has one of them, the next expert's rows follow.
    "rows": FusedCase(
        Plan(stages=2, weights="rows", direct_tokens=0, urgent_tokens=0),
        ((70, 33), (9, 140)),
        spec=replace(_SMALL, hidden=384, intermediate=256),
    ),
    "rows-swap": FusedCase(
        Plan(wide=False, stages=3, pulled_rows=2, weights="rows"), ((21, 40), (17, 0)), spec=replace(_SMALL, hidden=384)
    ),
    # BF16 rows, quantised in the kernel: more groups than half warps in the first call, fewer in the second.
    "raw": FusedCase(
        Plan(wide=False, stages=2),
        ((150, 20), (4, 0)),
        raw=torch.int64,
        spec=replace(_SMALL, intermediate=256, input_scales="ue8m0"),
    ),
    "raw-mixed": FusedCase(
        Plan(stages=2, pulled_rows=2, direct_tokens=0, urgent_tokens=0),
        ((90, 31), (9, 40)),
        raw=torch.int32,
        spec=replace(_SMALL, intermediate=256),
    ),
    # Pools with room for one or two tiles: large calls take several passes, which share a hot expert's tiles. Banks of
    # counters come round.
    "passes": FusedCase(
        Plan(wide=False, stages=2, pulled_rows=2, direct_tokens=0, urgent_tokens=40, passes=True),
        ((150, 70), (9, 40), (130, 90)),
        spec=_SMALL,
        pool_limit=272,
    ),
    # Second GEMMs take most of the time: some are still under way when other CTAs have nothing left to do in the pass.
    "passes-long": FusedCase(
        Plan(wide=False, stages=2, direct_tokens=0, urgent_tokens=0, passes=True),
        ((150, 60),),
        grid=5,
        spec=replace(_SMALL, intermediate=1024, experts=2),
        pool_limit=272,
    ),
    "passes-hot": FusedCase(
        Plan(stages=2, pulled_rows=2, direct_tokens=0, urgent_tokens=20, staging_buffers=2, passes=True),
        ((90, 75), (50, 8)),
        hot=2,
        spec=replace(_SMALL, intermediate=256),
        pool_limit=272,
    ),
    "passes-alternating": FusedCase(
        Plan(wide=False, stages=2, wave_experts=1, lag=1, direct_tokens=0, urgent_tokens=0, passes=True),
        ((160, 70), (150, 90)),
        grid=2,
        spec=replace(_SMALL, topk=3),
        pool_limit=272,
    ),
    # More local experts than a warp has lanes.
    "experts": FusedCase(Plan(wide=False, stages=2), ((13,), (5,)), grid=2, spec=replace(_SMALL, experts=72)),
    "nothing": FusedCase(Plan(wide=False, stages=2), ((0, 0), (0, 1)), spec=_SMALL),
    "four-ranks": FusedCase(
        Plan(wide=False, stages=2, wave_experts=1, direct_tokens=0, urgent_tokens=2),
        ((5, 0, 9, 1), (2, 8, 0, 0)),
        grid=2,
        spec=_SMALL,
    ),
}


def _weights(spec: MoESpec) -> ExpertWeights:
    g = torch.Generator().manual_seed(0)
    e, h, i = spec.experts, spec.hidden, spec.intermediate
    w13, s13 = fp8_block.quantize_weights(torch.randn(e, 2 * i, h, generator=g) / h**0.5)
    w2, s2 = fp8_block.quantize_weights(torch.randn(e, h, i, generator=g) / i**0.5)
    return ExpertWeights(format="fp8_block", w13=w13, w2=w2, w13_scale=s13, w2_scale=s2)


def _part(weights: ExpertWeights, rank: int, local: int) -> ExpertWeights:
    part = slice(rank * local, (rank + 1) * local)
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    return ExpertWeights(
        format="fp8_block",
        w13=weights.w13[part],
        w2=weights.w2[part],
        w13_scale=weights.w13_scale[part],
        w2_scale=weights.w2_scale[part],
        first_expert=rank * local,
    )


def _kernel_weights(case: FusedCase, part: ExpertWeights) -> KernelWeights:
    made = KernelWeights.empty(case.spec, part.local_experts, "cpu")
    if case.plan.weights == "rows":
        w13 = interleave_gate_up(part.w13.view(torch.uint8))
        made = replace(made, w13=w13, w2=part.w2.view(torch.uint8), layout="rows")
    relayout(case.spec, part, made)
    return made


def field_bounds(fields: tuple[Field, ...], sizes: Sizes) -> list[tuple[str, int, int]]:
    """(name, offset, bytes) of each field, so that an access past one is found though another one follows."""
    starts = offsets(fields, sizes)
    return [(f.name, at, f.itemsize * f.count(sizes)) for f, at in zip(fields, starts, strict=True)]


@dataclass(frozen=True)
class _Input:
    x: torch.Tensor
    q: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    wanted: torch.Tensor


def _input(case: FusedCase, full: ExpertWeights, tokens: int, seed: int, hot: int | None) -> _Input:
    spec = case.spec
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, spec.hidden, generator=g).bfloat16()
    q, scales = fp8_block.quantize_activations(x, spec.input_scales)
    ids = torch.rand(tokens, spec.experts, generator=g).argsort(dim=1)[:, : spec.topk].int()
    if hot is not None:
        ids[:, :] = hot
    if tokens > 4:
        ids[3, 0] = -1
        ids[4] = -1
    weights = torch.rand(tokens, spec.topk, generator=g) + 0.1
    wanted = reference.forward(spec, full, (q, scales), ids, weights)
    assert isinstance(wanted, torch.Tensor)
    return _Input(x, q, scales, ids, weights, wanted)


class Ranks:
    """The ranks of one case in a simulation."""

    def __init__(self, case: FusedCase, sim: Simulation) -> None:
        spec, ranks = case.spec, len(case.tokens[0])
        self.case = case
        self.full = _weights(spec)
        capacity = max(1, *(n for call in case.tokens for n in call))
        self.sizes = replace(
            sizes_of(spec, ranks, capacity, case.pool_limit),
            keep_intermediate=case.plan.keep_intermediate,
            trace_words=case.grid * TRACE_ROLES * TRACE_EVENTS if case.plan.trace else 0,
        )
        self.buffers = []
        self.params: list[Params] = []
        self.maps: list[Maps] = []
        work = job(case.plan, self.sizes)
        self.kernel = Kernel.of(work.source, KERNEL, work.config)
        for r in range(ranks):
            plain = Buffers.allocate(self.sizes, "cpu")
            self.buffers.append(
                Buffers(
                    self.sizes,
                    sim.buffer(
                        f"arena{r}", plain.arena, rank=r, peers=True, fields=field_bounds(ARENA, self.sizes)
                    ).tensor,
                    sim.buffer(
                        f"workspace{r}", plain.workspace, rank=r, fields=field_bounds(WORKSPACE, self.sizes)
                    ).tensor,
                )
            )
        arenas = [b.arena.data_ptr() for b in self.buffers]
        for r in range(ranks):
            made = _kernel_weights(case, _part(self.full, r, self.sizes.local_experts))
            names = ("w13", "w13_scales", "w2", "w2_scales")
            placed = KernelWeights(
                *(sim.buffer(f"{n}_{r}", getattr(made, n), rank=r, read_only=True).tensor for n in names),
                layout=made.layout,
            )
            report = sim.buffer(f"report{r}", torch.zeros(REPORT_WORDS, dtype=torch.int32), rank=r)
            errors = sim.buffer(f"errors{r}", torch.zeros(ERROR_WORDS, dtype=torch.int32), rank=r)
            received = sim.buffer(f"received{r}", torch.zeros(self.sizes.local_experts, dtype=torch.int64), rank=r)
            params = aligned(Params)
            fill_params(
                params,
                spec,
                r,
                self.buffers[r],
                arenas,
                placed,
                timeout_ns=10**9,
                report=report.tensor.data_ptr(),
                errors=errors.tensor.data_ptr(),
                received=received.tensor.data_ptr(),
            )
            self.params.append(params)
            maps = aligned(Maps)
            for target, map_spec in zip(maps.pools, tensor_maps(self.buffers[r]), strict=True):
                target.set(encode_tensor_map(map_spec))
            for target, map_spec in zip(maps.weights, weight_maps(placed), strict=False):
                target.set(encode_tensor_map(map_spec))
            self.maps.append(maps)

    def stage(self, sim: Simulation, call: int) -> tuple[list[_Input], list[torch.Tensor], list[Launch]]:
        """Inputs of one call, where its outputs will be, and its launches."""
        case, spec = self.case, self.case.spec
        inputs, outs, launches = [], [], []
        shared = case.plan.shared(self.sizes).total
        for r, tokens in enumerate(case.tokens[call]):
            given = _input(case, self.full, tokens, 100 * call + r, case.hot if call == 0 else None)
            out = sim.buffer(
                f"out{call}_{r}", torch.full((max(1, tokens), spec.hidden), float("nan")).bfloat16(), rank=r
            )
            params = Params.from_buffer_copy(self.params[r])
            params.out, params.out_stride, params.tokens = out.tensor.data_ptr(), spec.hidden, tokens
            if case.raw is not None and tokens:
                rows = {"x": given.x, "ids": given.ids.to(case.raw), "weights": given.weights}
                for name, value in rows.items():
                    setattr(params, name, sim.buffer(f"{name}{call}_{r}", value, rank=r, read_only=True).address)
                params.wide_ids = int(case.raw == torch.int64)
            arguments = [None] * r + [[self.maps[r], params]]
            launches.append(Launch(self.kernel, case.grid, THREADS, arguments, shared=shared))
            inputs.append(given)
            outs.append(out.tensor[:tokens])
        return inputs, outs, launches

    def write(self, inputs: Sequence[_Input]) -> None:
        """Put the staged inputs of a call into the arenas, unless the kernel does."""
        if self.case.raw is not None:
            return
        for buffers, given in zip(self.buffers, inputs, strict=True):
            n = given.q.shape[0]
            for name, value in (
                ("x", given.q.view(torch.uint8)),
                ("x_scales", given.scales),
                ("ids", given.ids),
                ("route_weights", given.weights),
            ):
                buffers.view(name)[: n * value.shape[1]] = value.flatten()


def _prepare(case: FusedCase, sim: Simulation) -> Prepared:
    ranks = Ranks(case, sim)
    staged = [ranks.stage(sim, call) for call in range(len(case.tokens))]
    ranks.write(staged[0][0])

    def check() -> str | None:
        for call, (inputs, outs, _) in enumerate(staged):
            for r, (given, out) in enumerate(zip(inputs, outs, strict=True)):
                if given.q.shape[0]:
                    error = reference.relative_error(out, given.wanted)
                    if not error < reference.LIMIT:
                        return f"call {call}, rank {r}: relative error {error:.2e}, allowed {reference.LIMIT:.0e}"
        return None

    later = staged[1:]
    between = [functools.partial(ranks.write, inputs) for inputs, _, _ in later]
    return Prepared(staged[0][2], check, again=[launches for _, _, launches in later], between=between)


def simulated() -> Iterator[SimPlan]:
    """Every case of `CASES`."""
    for name, case in CASES.items():
        yield SimPlan(f"fused/{name}", functools.partial(_prepare, case))
