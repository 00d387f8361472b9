"""The conformance cases: every primitive of ``ptx.cuh`` in a kernel of few CTAs under ``kernels/conformance/``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import torch

from megamoe.bench.conformance import Case, MapOf
from megamoe.formats.fp8_block import E4M3, to_e4m3

__all__ = ["CASES", "WIDTHS", "any_float", "arithmetic", "product_operands"]

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

WIDTHS: Final = (*range(8, 72, 8), 96, 128, 192, 256)
"""N of the WGMMA products in use (tools/generate_wgmma.py)."""


def product_operands(kind: str) -> dict[str, torch.Tensor]:
    """e4m3 x, y ``[256, 128]``.

    "integers": multiples of 4, whose sums are exact; "nan": these with some NaN of both signs; "gaussian"; "wide": 15
    binades; "bytes": all but NaN.
    """
    generator = np.random.default_rng(5)
    shape = (2, 256, 128)
    if kind == "bytes":
        raw = generator.integers(0, 256, shape).astype(np.uint8)
        pair = torch.from_numpy(np.where(raw & 0x7F == 0x7F, 0, raw).astype(np.uint8)).view(E4M3)
    else:
        normal = generator.standard_normal(shape)
        if kind in ("integers", "nan"):
            normal = normal.round()
        elif kind == "wide":
            normal *= 2.0 ** generator.integers(-10, 5, shape)
        pair = to_e4m3(torch.from_numpy((normal * 4).astype(np.float32)))
        if kind == "nan":
            raw = pair.view(torch.uint8)
            raw[0, 10, 3] = raw[0, 200, 127] = raw[1, 77, 64] = 0x7F
            raw[0, 64, 0] = raw[1, 255, 31] = 0xFF
    return {"x": pair[0].clone(), "y": pair[1].clone()}


def any_float(seed: int, *shape: int) -> torch.Tensor:
    """float32 of random bits: every exponent, both signs, NaN and Inf."""
    raw = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32)
    return torch.from_numpy(raw.view(np.float32))


def _products() -> Iterator[Case]:
    for kind, bound in (("integers", 0.0), ("nan", 0.0), ("gaussian", 5e-4), ("wide", 5e-4)):
        for width in WIDTHS if kind != "nan" else (8, 256):
            yield Case(
                name=f"wgmma-n{width}-{kind}",
                source="conformance/wgmma_widths.cu",
                entry="wgmma_widths",
                inputs=functools.partial(product_operands, kind),
                outputs={"out": ((2, 2, 256, 256), torch.float32)},
                config={"kWidth": width},
                shared=2 * 256 * 128,
                bound=bound,
            )


def arithmetic(
    name: str, operands: Callable[[], Operands], *, activation: bool = True, clamp: float = 0.0, bound: float = 0.0
) -> Case:
    """``conformance/arithmetic.cu`` on gate, up and weight, float32 ``[groups, 128]`` each.

    With the activation only it and the promotion are compared: a last bit of it can move a rounding to e4m3.
    """
    shape = tuple(operands()[0].shape)
    values = dict.fromkeys(("h", "silu", "fused", "first"), (shape, torch.float32))
    return Case(
        name=name,
        source="conformance/arithmetic.cu",
        entry="arithmetic",
        inputs=lambda: dict(zip(("gate", "up", "weight"), operands(), strict=True)),
        outputs={**values, "q": (shape, torch.uint8), "s": ((shape[0],), torch.float32)},
        config={"kActivation": activation, "kClamp": clamp},
        grid=shape[0],
        shared=1024,
        bound=bound,
        ignored=("q", "s") if activation else (),
    )


def _any_operands() -> Operands:
    return any_float(1, 32, 128), any_float(2, 32, 128), any_float(3, 32, 128)


def _usual_operands() -> Operands:
    generator = torch.Generator().manual_seed(0)
    gate = torch.linspace(-100, 100, 64 * 128).view(64, 128)
    return gate, torch.randn(64, 128, generator=generator), torch.rand(64, 128, generator=generator)


def _arithmetic() -> Iterator[Case]:
    yield arithmetic("promotion-and-quantisation-any-bits", _any_operands, activation=False)
    yield arithmetic("activation", _usual_operands, bound=1e-6)
    yield arithmetic("activation-clamped", _usual_operands, clamp=10.0, bound=1e-6)


def _raw(seed: int, *shape: int) -> torch.Tensor:
    """Random bytes; no two neighbours alike often, so that a wrong place shows."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8))


def _words(seed: int, *shape: int) -> torch.Tensor:
    return _raw(seed, *shape[:-1], 4 * shape[-1]).view(torch.int32)


def _conversions() -> Iterator[Case]:
    def case(name: str, x: Callable[[], torch.Tensor], *, bound: float, ignored: tuple[str, ...]) -> Case:
        n = x().numel()
        return Case(
            name=name,
            source="conformance/conversions.cu",
            entry="conversions",
            inputs=lambda: {"x": x()},
            outputs={
                "bf16": ((n,), torch.int32),
                "e4m3": ((n,), torch.int16),
                "ex2": ((n,), torch.float32),
                "rcp": ((n,), torch.float32),
            },
            grid=n // 128,
            bound=bound,
            ignored=ignored,
        )

    def near_e4m3() -> torch.Tensor:
        # Every e4m3 value, the middle of every two neighbours, and the floats next to both.
        grid = torch.arange(0, 127, dtype=torch.uint8).view(E4M3).float()
        points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([448.0, 463.9, 464.0, 480.0, 1e9])])
        inf = torch.full_like(points, float("inf"))
        points = torch.cat([points, points.nextafter(inf), points.nextafter(-inf)])
        points = torch.cat([points, -points])
        return torch.cat([points, points.new_zeros(-len(points) % 128)])

    rough = ("ex2", "rcp")
    yield case("conversions-any-bits", lambda: any_float(9, 8192), bound=0.0, ignored=rough)
    yield case("conversions-e4m3-ties", near_e4m3, bound=0.0, ignored=rough)
    exact = ("bf16", "e4m3")
    yield case("approximations", lambda: torch.linspace(-20, 20, 8192), bound=1e-6, ignored=exact)
    yield case("approximations-small", lambda: torch.linspace(-1, 1, 8192), bound=1e-6, ignored=exact)
    edges = (0.0, -0.0, 1e-45, -1e-45, 1e-39, 126.0, 127.5, 128.0, 200.0, -126.5, -149.0, -200.0, 2e38, 3e38)
    special = torch.tensor([*edges, float("inf"), float("-inf"), float("nan")] + [1.0] * 111)
    yield case("approximations-edges", lambda: special, bound=1e-6, ignored=exact)


def _primitives() -> Iterator[Case]:
    yield Case(
        name="warp",
        source="conformance/warp.cu",
        entry="warp_collectives",
        inputs=lambda: {"words": _words(10, 32)},
        outputs={"out": ((32, 32), torch.int32)},
        threads=32,
    )
    yield Case(
        name="matrix",
        source="conformance/matrix.cu",
        entry="matrices",
        inputs=lambda: {"words": _words(11, 256)},
        outputs={"stored": ((3, 256), torch.int32), "loaded": ((4, 32), torch.int32)},
        threads=32,
        shared=1024,
    )
    yield Case(
        name="memory",
        source="conformance/memory.cu",
        entry="memory_accesses",
        inputs=lambda: {"bytes": _raw(12, 512)},
        outputs={
            "words": ((65,), torch.int32),
            "longs": ((65,), torch.int64),
            "out": ((256,), torch.int32),
            "out_long": ((64,), torch.int64),
            "shared": ((160,), torch.int32),
        },
        shared=1040,
    )
    yield Case(
        name="barriers",
        source="conformance/barriers.cu",
        entry="barriers",
        inputs=dict,
        outputs={"out": ((128,), torch.int32)},
        shared=1024,
    )
    yield Case(
        name="copies",
        source="conformance/copies.cu",
        entry="copies",
        inputs=lambda: {"flat": _raw(13, 70, 320), "deep": _raw(14, 3, 40, 256), "plain": _raw(15, 20, 64)},
        outputs={
            "landed": ((8, 2048), torch.int32),
            "stored": ((70, 320), torch.uint8),
            "row": ((4096,), torch.uint8),
        },
        shared=8192 + 16,
        maps=(
            MapOf("flat", "uint8", (320, 70), (320,), (128, 64)),
            MapOf("deep", "uint8", (256, 40, 3), (256, 40 * 256), (128, 32, 1)),
            MapOf("plain", "uint8", (64, 20), (64,), (32, 16), swizzle=0),
            MapOf("stored", "uint8", (320, 70), (320,), (128, 64)),
        ),
    )
    yield Case(
        name="cluster",
        source="conformance/cluster.cu",
        entry="cluster_pair",
        inputs=lambda: {"flat": _raw(16, 64, 256), "deep": _raw(17, 2, 32, 128)},
        outputs={"landed": ((2, 3 * 1024 + 4), torch.int32)},
        grid=2,
        cluster=2,
        shared=3 * 4096 + 16,
        maps=(
            MapOf("flat", "uint8", (256, 64), (256,), (128, 16)),
            MapOf("deep", "uint8", (128, 32, 2), (128, 32 * 128), (128, 8, 1)),
        ),
    )


CASES: Final[tuple[Case, ...]] = (*_products(), *_arithmetic(), *_conversions(), *_primitives())
"""All cases, names unique."""
