"""Whether the GPU engine can host a layer here, and if not, why."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.cuda.driver import Driver, open_driver
from megamoe.cuda.fused import sizes_of
from megamoe.cuda.select import select_plan
from megamoe.engine import Placement
from megamoe.errors import EngineError
from megamoe.spec import BLOCK, MoESpec

__all__ = ["HOPPER", "ordinal_of", "refusal", "why_not"]

HOPPER = "sm_90a"
"""The architecture that the fused kernel is for."""

_CPU = "backend='cpu' takes the same arguments on the CPU."


def ordinal_of(placement: Placement) -> int:
    """The GPU of the placement's ranks: the given one, or torch's current one."""
    return placement.devices[0] if placement.devices else torch.cuda.current_device()


def why_not(
    spec: MoESpec, placement: Placement, max_tokens: int, open_it: Callable[[], Driver] = open_driver
) -> EngineError | None:
    """The error that the GPU engine would raise for this layer, None if it can host it. Allocates nothing.

    Args:
        spec: the layer, whose experts the ranks divide.
        placement: the ranks of this process.
        max_tokens: token cap of a rank.
        open_it: opens the driver; for tests.
    """
    if torch.version.cuda is None:
        return EngineError(
            "torch", torch.__version__, "a build for CUDA 13", f"Install torch's CUDA build for the GPU engine. {_CPU}"
        )
    try:
        driver = open_it()
    except EngineError as error:
        return error
    if not torch.cuda.is_available():
        return EngineError("torch.cuda", "not available", "a GPU that torch can use", f"See megamoe doctor. {_CPU}")
    return refusal(spec, placement, max_tokens, driver)


def refusal(spec: MoESpec, placement: Placement, max_tokens: int, driver: Driver) -> EngineError | None:
    """`why_not` for a machine with a working driver."""
    if placement.local != tuple(range(placement.ranks)):
        return EngineError(
            "group",
            f"{placement.ranks} ranks, {len(placement.local)} of them in this process",
            "all ranks in one process on the GPU engine: one rank, or megamoe.local_group",
            f"Use local_group for several ranks on one GPU. {_CPU}",
        )
    devices = placement.devices
    if devices is not None and (len(set(devices)) != 1 or not 0 <= devices[0] < driver.device_count()):
        return EngineError(
            "devices",
            list(devices),
            f"one GPU of 0 to {driver.device_count() - 1}",
            "Put all ranks of the local group on one GPU, such as devices=[0].",
        )
    info = driver.device(ordinal_of(placement) if driver.device_type == "cuda" else 0)
    if info.arch != HOPPER:
        return EngineError(
            "device", f"{info.name} ({info.arch})", f"a Hopper GPU ({HOPPER})", f"Pass another device. {_CPU}"
        )
    if spec.hidden % BLOCK or spec.intermediate % BLOCK:
        return EngineError(
            "spec",
            f"hidden={spec.hidden}, intermediate={spec.intermediate}",
            f"multiples of {BLOCK} on the GPU engine, whose experts are FP8 blocks",
            f"{_CPU}",
        )
    if placement.ranks > info.multiprocessors:
        return EngineError("ranks", placement.ranks, f"at most {info.multiprocessors}, one an SM", "Use fewer.")
    sizes = sizes_of(spec, placement.ranks, max_tokens)
    try:
        for bound in (1, max_tokens):
            select_plan(sizes, bound).check(sizes)
    except EngineError as error:
        return error
    return None
