"""Conformance cases over every BF16 value, and of the integer and float intrinsics."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch

from megamoe.bench.conformance import Case

__all__ = ["intrinsics"]

_SOURCE = "conformance/intrinsics.cu"
_PART = 16384


def _words(seed: int, *shape: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32)
    return torch.from_numpy(raw.view(np.int32))


def _floats(seed: int, *shape: int) -> torch.Tensor:
    """Random bits, and every few values one of the special ones."""
    values = _words(seed, *shape).view(torch.float32).clone().flatten()
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 448.0, 464.0, 1e-45, 2.5])
    places = torch.arange(0, values.numel(), 7)
    values[places] = special[torch.arange(places.numel()) % special.numel()]
    return values.view(shape)


def _bf16_values(part: int) -> torch.Tensor:
    """A quarter of all BF16 values, as float32."""
    return (torch.arange(part * _PART, (part + 1) * _PART, dtype=torch.int32) << 16).view(torch.float32)


def intrinsics() -> Iterator[Case]:
    """All cases of this module."""
    yield Case(
        name="integers",
        source=_SOURCE,
        entry="integers",
        inputs=lambda: {"in": _words(21, 16 * 128, 3)},
        outputs={"out": ((15, 16 * 128), torch.int32)},
        grid=16,
    )
    yield Case(
        name="floats",
        source=_SOURCE,
        entry="floats",
        inputs=lambda: {"in": _floats(31, 16 * 128, 3)},
        outputs={"out": ((9, 16 * 128), torch.float32), "integers": ((3, 16 * 128), torch.int32)},
        grid=16,
    )
    for part in range(4):
        yield Case(
            name=f"conversions-every-bf16-{part}",
            source="conformance/conversions.cu",
            entry="conversions",
            inputs=functools.partial(lambda p: {"x": _bf16_values(p)}, part),
            outputs={
                "bf16": ((_PART,), torch.int32),
                "e4m3": ((_PART,), torch.int16),
                "ex2": ((_PART,), torch.float32),
                "rcp": ((_PART,), torch.float32),
            },
            grid=_PART // 128,
            ignored=("ex2", "rcp"),
        )
