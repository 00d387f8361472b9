"""Whether the GPU engine can host a layer here, and if not, why."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import torch

from megamoe.cuda.driver import Driver, open_driver
from megamoe.cuda.fused import sizes_of
from megamoe.cuda.peers import unreachable
from megamoe.cuda.select import select_plan
from megamoe.engine import Placement
from megamoe.errors import EngineError
from megamoe.spec import BLOCK, MoESpec

__all__ = ["HOPPER", "ordinals_of", "refusal", "why_not"]

HOPPER = "sm_90a"
"""The architecture that the fused kernel is for."""

_CPU = "backend='cpu' takes the same arguments on the CPU."


def ordinals_of(placement: Placement) -> tuple[int, ...]:
    """The GPU of each hosted rank: the given ones, dealt in blocks, or torch's current one."""
    devices, hosted = placement.devices, len(placement.local)
    if not devices:
        return (torch.cuda.current_device(),) * hosted
    return tuple(devices[i * len(devices) // hosted] for i in range(hosted))


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


def refusal(
    spec: MoESpec, placement: Placement, max_tokens: int, driver: Driver, *, sm_reserve: int = 0
) -> EngineError | None:
    """`why_not` for a machine with a working driver."""
    hosted = len(placement.local)
    if hosted < placement.ranks:
        peers = placement.peers
        if peers is None:
            return EngineError("placement", "ranks in other processes", "their peers' identities", "Use MegaMoE.")
        apart = unreachable(peers)
        if apart is not None:
            return apart
    devices = placement.devices
    if devices is not None and not (
        devices
        and len(set(devices)) == len(devices)
        and hosted % len(devices) == 0
        and all(0 <= d < driver.device_count() for d in devices)
    ):
        return EngineError(
            "devices",
            list(devices),
            f"different GPUs of 0 to {driver.device_count() - 1}, as many as divide {hosted} rank(s)",
            "Leave it out for all ranks on the current GPU.",
        )
    ordinals = ordinals_of(placement) if driver.device_type == "cuda" else placement.devices or (0,)
    for a, b in permutations(sorted(set(ordinals)), 2):
        if not driver.peer(a, b).access:
            return EngineError(
                "devices",
                f"GPUs {a} and {b}, which do not reach each other's memory",
                "GPUs of one NVLink domain",
                "megamoe doctor shows the topology.",
            )
    infos = [driver.device(ordinal) for ordinal in sorted(set(ordinals))]
    for info in infos:
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
    left = min(info.multiprocessors for info in infos) - sm_reserve
    if hosted // len(infos) > left:
        return EngineError(
            "sm_reserve",
            sm_reserve,
            f"fewer SMs than leave one to each of {hosted // len(infos)} rank(s) on a GPU of {left + sm_reserve}",
            "Reserve fewer.",
        )
    sizes = sizes_of(spec, placement.ranks, max_tokens)
    try:
        for bound in (1, max_tokens):
            select_plan(sizes, bound).check(sizes)
    except EngineError as error:
        return error
    return None
