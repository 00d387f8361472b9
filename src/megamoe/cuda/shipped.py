"""Every kernel configuration that the package launches, so that tests compile each one and check its report.

Whoever adds a kernel or a plan adds it to `shipped`: nobody sees the spills of a configuration that is not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from megamoe.cuda import gemm, staging
from megamoe.cuda.toolchain import ARCHITECTURES, Job
from megamoe.spec import ScaleFormat

__all__ = ["Shipped", "shipped"]


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


def shipped() -> tuple[Shipped, ...]:
    """All configurations, in a fixed order."""
    return (*_staging(), *_gemm())
