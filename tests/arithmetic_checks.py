"""What kernels/math.cuh must compute, on whatever runs it: the GPU and the simulator use the same checks."""

from __future__ import annotations

import torch

from megamoe.bench.conformance import Engine
from megamoe.bench.conformance_cases import any_float, arithmetic
from megamoe.formats.fp8_block import quantize_activations
from megamoe.reference import fma, swiglu


def _run(
    engine: Engine, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, clamp: float | None = None
) -> dict[str, torch.Tensor]:
    return engine.run(arithmetic("arithmetic", lambda: (gate, up, weight), clamp=clamp or 0.0))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN like any other."""
    return bool(((a.isnan() & b.isnan()) | (a.view(torch.int32) == b.view(torch.int32))).all())


def promotion_is_a_fused_multiply_add(engine: Engine, groups: int) -> None:
    a, b, c = (any_float(seed, groups, 128) for seed in (1, 2, 3))
    # Half of them with a sum near cancellation, where an unfused product would show.
    noise = torch.randn(groups, 128, generator=torch.Generator().manual_seed(0)) * 1e-6
    a[::2], b[::2] = (torch.randn(2, groups, 128, generator=torch.Generator().manual_seed(1)))[:, ::2]
    c[::2] = (-(a * b) * (1 + noise))[::2]
    got = _run(engine, a, b, c)
    assert same(got["fused"], fma(a, b, c))
    assert not same(got["fused"], a * b + c)
    assert same(got["first"], a * b)


def silu_over_all_floats(engine: Engine, groups: int) -> None:
    x = torch.cat([any_float(4, groups, 128), torch.linspace(-100, 100, 4 * groups * 128).view(4 * groups, 128)])
    x[0, :6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), -3.4e38])
    got = _run(engine, x, torch.ones_like(x), torch.ones_like(x))["silu"]
    wide = x.double()
    want = wide / (1 + torch.exp(-wide))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.float().isinf())
    ok = want.float().isfinite()
    assert bool(((got.double() - want).abs()[ok] <= want.abs()[ok] * 2.0**-17 + 1.2e-36).all())
    assert got[0, :3].tolist() == [0.0, 0.0, float("inf")]


def swiglu_and_requantisation(engine: Engine, groups: int, clamp: float | None) -> None:
    generator = torch.Generator().manual_seed(7)
    gate, up = (torch.randn(groups, 128, generator=generator) * 4 for _ in range(2))
    weight = torch.rand(groups, 128, generator=generator)
    gate[1, 5] = up[2, 9] = weight[3, 0] = float("nan")
    gate[4, 4] = up[5, 5] = float("inf")
    up[6, 6] = float("-inf")
    gate[7] = 0.0
    got = _run(engine, gate, up, weight, clamp)
    want = swiglu(gate.flatten(), up.flatten(), torch.ones(()), clamp).view_as(gate) * weight
    assert torch.equal(got["h"].isnan(), want.isnan())
    infinite = want.isinf()
    assert torch.equal(got["h"][infinite], want[infinite])
    finite = want.isfinite()
    assert bool(((got["h"] - want).abs()[finite] <= want.abs()[finite] * 2.0**-16 + 1e-30).all())
    # From the kernel's own h, bit for bit: groups with NaN, with Inf and all zero included.
    q, s = quantize_activations(got["h"], "float32")
    assert same(got["s"], s.flatten())
    assert torch.equal(got["q"], q.view(torch.uint8))
