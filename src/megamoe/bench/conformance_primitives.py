"""Conformance cases of the copies, collectives, conversions and flags of ``ptx.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch

from megamoe.bench.conformance import Case, MapOf

__all__ = ["primitives"]

_COPIES = "conformance/copies.cu"
_REGISTERS = "conformance/registers.cu"
_SHARED = 16384


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


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


def _moderate(seed: int, *shape: int) -> torch.Tensor:
    """Both signs, 2^-20 to 2^20: where the approximations are compared by a relative difference."""
    g = np.random.default_rng(seed)
    values = g.standard_normal(shape) * 2.0 ** g.integers(-20, 6, shape)
    return torch.from_numpy(values.astype(np.float32))


def _every_bf16() -> torch.Tensor:
    """Every BF16 value, in pairs."""
    return (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32).view(-1, 2)


def _copies() -> Iterator[Case]:
    image = functools.partial(_bytes, 11, 60 * 512)
    yield Case(
        name="tma-boxes",
        source=_COPIES,
        entry="boxes",
        inputs=lambda: {"image": image(), "halves": _bytes(12, 24 * 96 * 2)},
        outputs={"out": ((16, 8192), torch.uint8)},
        shared=_SHARED,
        maps=(
            MapOf("image", "uint8", (512, 60), (512,), (128, 64)),
            MapOf("image", "uint8", (512, 60), (512,), (64, 32), swizzle=0),
            MapOf("image", "uint8", (256, 20, 3), (256, 20 * 256), (128, 16, 1)),
            MapOf("halves", "bfloat16", (96, 24), (192,), (64, 8)),
        ),
    )
    yield Case(
        name="tma-and-bulk-stores",
        source=_COPIES,
        entry="stores",
        inputs=dict,
        outputs={
            "floats": ((40, 48), torch.float32),
            "plain": ((40, 64), torch.uint8),
            "bulk": ((2048,), torch.uint8),
        },
        shared=_SHARED,
        maps=(
            MapOf("floats", "float32", (48, 40), (192,), (32, 16)),
            MapOf("plain", "uint8", (64, 40), (64,), (32, 16), swizzle=0),
        ),
    )
    yield Case(
        name="bulk-loads-and-cp-async",
        source=_COPIES,
        entry="bulk_loads",
        inputs=lambda: {"image": image()},
        outputs={"bulk": ((8192,), torch.uint8), "async": ((4096,), torch.uint8)},
        shared=_SHARED,
    )
    yield Case(
        name="multicast-pair",
        source=_COPIES,
        entry="pair",
        inputs=lambda: {"image": image()},
        outputs={"out": ((2, 3, 4096), torch.uint8)},
        grid=2,
        cluster=2,
        shared=_SHARED,
        maps=(
            MapOf("image", "uint8", (512, 60), (512,), (128, 16)),
            MapOf("image", "uint8", (256, 20, 3), (256, 20 * 256), (128, 16, 1)),
        ),
    )


def _conversions(
    name: str, values: functools.partial[torch.Tensor], count: int, *, bound: float, ignored: tuple[str, ...]
) -> Case:
    return Case(
        name=name,
        source=_REGISTERS,
        entry="conversions",
        inputs=lambda: {"in": values()},
        outputs={
            "e4m3": ((count,), torch.int16),
            "bf16": ((count,), torch.int32),
            "ex2": ((count,), torch.float32),
            "rcp": ((count,), torch.float32),
        },
        grid=count // 512,
        bound=bound,
        ignored=ignored,
    )


def _registers() -> Iterator[Case]:
    def words(name: str, shape: tuple[int, ...], out: tuple[int, ...], grid: int, threads: int) -> Case:
        return Case(
            name=name,
            source=_REGISTERS,
            entry=name,
            inputs=lambda: {"in": _words(21, *shape)},
            outputs={"out": (out, torch.int32)},
            grid=grid,
            threads=threads,
            shared=4096,
        )

    yield words("matrices", (4, 32), (640,), 1, 32)
    yield words("collectives", (32,), (12, 32), 1, 32)
    yield words("integers", (16 * 128, 3), (15, 16 * 128), 16, 128)
    yield Case(
        name="floats",
        source=_REGISTERS,
        entry="floats",
        inputs=lambda: {"in": _floats(31, 16 * 128, 3)},
        outputs={"out": ((9, 16 * 128), torch.float32), "integers": ((3, 16 * 128), torch.int32)},
        grid=16,
    )
    yield Case(
        name="flags",
        source=_REGISTERS,
        entry="flags",
        inputs=dict,
        outputs={"words": ((16,), torch.int32), "wide": ((8,), torch.int64), "old": ((8,), torch.int64)},
        threads=64,
        shared=4096,
    )
    approximate = ("ex2", "rcp")
    yield _conversions(
        "conversions-of-every-bf16", functools.partial(_every_bf16), 32768, bound=0.0, ignored=approximate
    )
    yield _conversions(
        "conversions-of-any-bits", functools.partial(_floats, 32, 8192, 2), 8192, bound=0.0, ignored=approximate
    )
    yield _conversions(
        "approximations", functools.partial(_moderate, 33, 8192, 2), 8192, bound=2e-7, ignored=("e4m3", "bf16")
    )


def primitives() -> Iterator[Case]:
    """All cases of this module."""
    yield from _copies()
    yield from _registers()
