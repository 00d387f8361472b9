"""The fused kernel in the simulator, several calls in each rank's stream: a rank may be a call ahead of its peers.

Between two calls of a rank stands the kernel that stages its next inputs, or the fused kernel stages them. No rank
waits for another one but through the kernel's own protocol, so a rank that has finished a call overwrites what the call
read while its peers are still in it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from megamoe import reference
from megamoe.cuda.plan import Plan
from megamoe.sim.build import Kernel
from megamoe.sim.fused import SPEC, FusedCase, Ranks
from megamoe.sim.plans import Prepared, SimPlan
from megamoe.sim.simulation import Launch, Simulation

__all__ = ["CASES", "simulated"]

_STAGE: Final = Kernel.of(Path(__file__).with_name("stage_inputs.cu"), "stage_inputs")
_THREADS: Final = 64
_SMALL: Final = replace(SPEC, hidden=256, intermediate=128, experts=4)
_SWAP: Final = Plan(wide=False, stages=2)

CASES: Final = {
    "calls": FusedCase(_SWAP, ((9, 4), (2, 11), (6, 6)), grid=2, spec=_SMALL),
    "calls-dispatch": FusedCase(
        replace(_SWAP, direct_tokens=0, urgent_tokens=0), ((9, 4), (2, 11), (6, 6)), grid=2, spec=_SMALL
    ),
    "calls-raw": FusedCase(_SWAP, ((9, 4), (2, 11), (6, 6)), grid=2, raw=torch.int32, spec=_SMALL),
    # More CTAs than tiles: the others may end the call before the last CTA has read the counts.
    "calls-one": FusedCase(_SWAP, ((1, 0), (1, 0), (0, 1), (1, 0)), grid=6, spec=_SMALL),
    "calls-empty": FusedCase(_SWAP, ((0, 0), (0, 1), (0, 0), (3, 0)), grid=2, spec=_SMALL),
}
"""Tokens of each rank for every call. An empty call is the fastest to be overtaken in."""


class _Arguments(ctypes.Structure):
    _fields_ = (("source", ctypes.c_uint64 * 4), ("to", ctypes.c_uint64 * 4), ("words", ctypes.c_uint32 * 4))


def _staging(ranks: Ranks, sim: Simulation, call: int, inputs: Sequence[Any]) -> Launch:
    arguments = []
    for r, given in enumerate(inputs):
        made = _Arguments()
        tensors = {"x": given.q.view(torch.uint8), "x_scales": given.scales, "ids": given.ids}
        tensors["route_weights"] = given.weights
        for n, (name, value) in enumerate(tensors.items()):
            words = value.contiguous().flatten().view(torch.uint8)
            placed = sim.buffer(f"{name}{call}_{r}", torch.cat([words, words.new_zeros(4)]), rank=r, read_only=True)
            made.source[n], made.words[n] = placed.address, words.numel() // 4
            made.to[n] = ranks.buffers[r].view(name).data_ptr()
        arguments.append([made])
    return Launch(_STAGE, 1, _THREADS, arguments, in_order=True)


def _prepare(case: FusedCase, sim: Simulation) -> Prepared:
    ranks = Ranks(case, sim)
    staged = [ranks.stage(sim, call) for call in range(len(case.tokens))]
    launches: list[Launch] = []
    for call, (inputs, _, kernels) in enumerate(staged):
        if case.raw is None:
            launches.append(_staging(ranks, sim, call, inputs))
        launches += [replace(kernel, in_order=True) for kernel in kernels]

    def check() -> str | None:
        for call, (inputs, outs, _) in enumerate(staged):
            for r, (given, out) in enumerate(zip(inputs, outs, strict=True)):
                if given.q.shape[0]:
                    error = reference.relative_error(out, given.wanted)
                    if not error < reference.LIMIT:
                        return f"call {call}, rank {r}: relative error {error:.2e}, allowed {reference.LIMIT:.0e}"
        return None

    return Prepared(launches, check)


def simulated() -> Iterator[SimPlan]:
    """Every case of `CASES`."""
    for name, case in CASES.items():
        yield SimPlan(f"fused/{name}", functools.partial(_prepare, case), plain=40)
