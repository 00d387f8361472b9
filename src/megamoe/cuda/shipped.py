"""Every kernel configuration that the package launches, so that tests compile each one and check its report.

Whoever adds a kernel or a plan adds it to `shipped`: nobody sees the spills of a configuration that is not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, get_args

from megamoe.bench.models import MODELS
from megamoe.cuda import fused, gemm, staging
from megamoe.cuda.arena import Sizes
from megamoe.cuda.select import select_plan
from megamoe.cuda.toolchain import ARCHITECTURES, Job
from megamoe.spec import ScaleFormat

__all__ = ["CARRYING", "Shipped", "shipped"]

CARRYING: Final = {"flash": 700, "pro": 1024, "mimo": 768, "v3": 512, "qwen3": 512}
"""A bound at which the plan of a model carries tokens, alone and in groups of two; larger ones have passes there."""


@dataclass(frozen=True)
class Shipped:
    """One configuration: a name unique in the list, and one compilation for each architecture it is legal on."""

    name: str
    jobs: tuple[Job, ...]


def _staging() -> Iterator[Shipped]:
    for hidden in staging.HIDDEN_SIZES:
        for scale_format in get_args(ScaleFormat):
            for plan in staging.PLANS:
                jobs = tuple(staging.job(hidden, scale_format, plan, arch) for arch in ARCHITECTURES)
                yield Shipped(f"staging-{hidden}-{scale_format}-{plan.name}", jobs)


def _gemm() -> Iterator[Shipped]:
    for plan in gemm.PLANS.values():
        yield Shipped(f"gemm-{plan.name}", (gemm.job(plan),))


def _layouts(name: str, sizes: Sizes, bound: int) -> Iterator[Shipped]:
    """The plan of these sizes, for both layouts of weights."""
    plan = select_plan(sizes, bound)
    yield Shipped(name, (fused.job(plan, sizes),))
    yield Shipped(f"{name}-rows", (fused.job(replace(plan, weights="rows"), sizes),))


def _fused() -> Iterator[Shipped]:
    """What is chosen for small and large calls of the models that benchmarks know, on one rank and eight; on two, the
    plan that carries tokens."""
    for name, entry in MODELS.items():
        for ranks, bounds in ((1, (64, CARRYING[name], 8192)), (2, (CARRYING[name],)), (8, (64, CARRYING[name], 8192))):
            local = entry.spec.experts // 8
            sizes = fused.sizes_of(replace(entry.spec, experts=local * ranks), ranks, 8192)
            for bound in bounds:
                yield from _layouts(f"fused-{name}-r{ranks}-m{bound}", sizes, bound)


def _few_k_blocks() -> Iterator[Shipped]:
    """Layers narrower than any model's, like those of `megamoe demo`: loops of constant, small trip counts unroll."""
    for hidden, intermediate in ((256, 256), (256, 384), (384, 256), (384, 384), (512, 512)):
        sizes = Sizes(hidden=hidden, intermediate=intermediate, topk=4, ranks=1, local_experts=16, capacity=512)
        for bound in (16, 256, 512):  # the last has as many tokens an expert as plans that carry
            yield from _layouts(f"fused-h{hidden}-i{intermediate}-m{bound}", sizes, bound)


def shipped() -> tuple[Shipped, ...]:
    """All configurations, in a fixed order."""
    return (*_staging(), *_gemm(), *_fused(), *_few_k_blocks())
