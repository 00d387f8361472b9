"""The conformance cases: every primitive of ``ptx.cuh`` in a kernel of few CTAs under ``kernels/conformance/``.

Products, arithmetic, accesses and barriers are listed here, the other primitives in `conformance_primitives`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import torch

from megamoe.bench.conformance import Case
from megamoe.bench.conformance_primitives import primitives
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
            stored = pair.view(torch.uint8)
            stored[0, 10, 3] = stored[0, 200, 127] = stored[1, 77, 64] = 0x7F
            stored[0, 64, 0] = stored[1, 255, 31] = 0xFF
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


def _accesses() -> Iterator[Case]:
    raw = np.random.default_rng(12).integers(0, 256, 512).astype(np.uint8)
    yield Case(
        name="memory",
        source="conformance/memory.cu",
        entry="memory_accesses",
        inputs=lambda: {"bytes": torch.from_numpy(raw)},
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


CASES: Final[tuple[Case, ...]] = (*_products(), *_arithmetic(), *_accesses(), *primitives())
"""All cases, names unique."""
