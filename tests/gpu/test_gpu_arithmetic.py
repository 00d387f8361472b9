"""kernels/math.cuh on a GPU against the oracle: exact where the contract says so, within a bound for silu."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from megamoe.cuda.driver import LaunchConfig, open_driver
from megamoe.cuda.launch import Kernel, Library, aligned, raw_stream
from megamoe.cuda.toolchain import compile_kernel
from megamoe.formats.fp8_block import quantize_activations
from megamoe.reference import fma, swiglu

pytestmark = pytest.mark.gpu

_POINTERS = ("gate", "up", "weight", "h", "silu", "fused", "first", "q", "s")


class _Arguments(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint64) for name in _POINTERS), ("clamp", ctypes.c_float))


def _run(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, clamp: float | None) -> dict[str, torch.Tensor]:
    groups, arguments = gate.shape[0], aligned(_Arguments)
    tensors = {"gate": gate.cuda(), "up": up.cuda(), "weight": weight.cuda()}
    for name in ("h", "silu", "fused", "first"):
        tensors[name] = torch.full_like(tensors["gate"], 12345.0)
    tensors["q"] = torch.full(gate.shape, 0x55, dtype=torch.uint8, device="cuda")
    tensors["s"] = torch.full((groups,), 12345.0, device="cuda")
    for name, tensor in tensors.items():
        setattr(arguments, name, tensor.data_ptr())
    arguments.clamp = clamp or 0.0
    library = Library(open_driver(), compile_kernel("conformance/arithmetic.cu"))
    kernel = Kernel(library, "arithmetic", 0, LaunchConfig(threads=128, dynamic_shared=1024), [arguments])
    kernel.launch(groups, raw_stream(None, 0))
    torch.cuda.synchronize()
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _any_bits(seed: int, *shape: int) -> torch.Tensor:
    """Every exponent, both signs, NaN and Inf."""
    raw = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32)
    return torch.from_numpy(raw.view(np.float32))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN like any other."""
    nan = a.isnan() & b.isnan()
    return bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


def test_promotion_is_a_fused_multiply_add() -> None:
    a, b, c = (_any_bits(seed, 4096, 128) for seed in (1, 2, 3))
    # Half of them with a sum near cancellation, where an unfused product would show.
    c[::2] = (-(a * b) * (1 + torch.randn(4096, 128, generator=torch.manual_seed(0)) * 1e-6))[::2]
    got = _run(a, b, c, None)
    assert _same(got["fused"], fma(a, b, c))
    assert _same(got["first"], a * b)


def test_silu_over_all_floats() -> None:
    x = torch.cat([_any_bits(4, 512, 128), torch.linspace(-100, 100, 2048 * 128).view(2048, 128)])
    x[0, :6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), -3.4e38])
    got = _run(x, torch.ones_like(x), torch.ones_like(x), None)["silu"]
    wide = x.double()
    want = wide / (1 + torch.exp(-wide))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.float().isinf())
    ok = want.isfinite() & want.float().isfinite()
    error = (got.double() - want).abs()[ok]
    assert bool((error <= want.abs()[ok] * 2.0**-17 + 1.2e-36).all())
    assert got[0, :3].tolist() == [0.0, 0.0, float("inf")]


@pytest.mark.parametrize("clamp", [None, 10.0])
def test_swiglu_and_requantisation(clamp: float | None) -> None:
    generator = torch.Generator().manual_seed(7)
    gate, up = (torch.randn(4096, 128, generator=generator) * 4 for _ in range(2))
    weight = torch.rand(4096, 128, generator=generator)
    gate[1, 5] = up[2, 9] = weight[3, 0] = float("nan")
    gate[4, 4] = up[5, 5] = float("inf")
    up[6, 6] = float("-inf")
    gate[7] = 0.0
    got = _run(gate, up, weight, clamp)
    want = swiglu(gate.flatten(), up.flatten(), torch.ones(()), clamp).view_as(gate) * weight
    assert torch.equal(got["h"].isnan(), want.isnan())
    finite = want.isfinite()
    assert torch.equal(got["h"][~finite & ~want.isnan()], want[~finite & ~want.isnan()])
    assert bool(((got["h"] - want).abs()[finite] <= want.abs()[finite] * 2.0**-16 + 1e-30).all())
    # From the kernel's own h, bit for bit: NaN and Inf groups and an all-zero group included.
    q, s = quantize_activations(got["h"], "float32")
    assert _same(got["s"], s.flatten())
    assert torch.equal(got["q"], q.view(torch.uint8))
