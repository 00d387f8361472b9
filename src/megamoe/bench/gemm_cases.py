"""Small grouped GEMMs with the same operands on every machine, so that simulator, GPU and oracle can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from megamoe.cuda.gemm import group_starts
from megamoe.formats.fp8_block import E4M3, quantize_activations, quantize_weights
from megamoe.reference import Projection, project
from megamoe.spec import BLOCK

__all__ = ["CASES", "GemmCase", "Operands", "operands", "oracle", "used_rows"]


@dataclass(frozen=True)
class GemmCase:
    """Rows of each group, and the size of one weight matrix ``[n, k]``."""

    counts: tuple[int, ...]
    n: int
    k: int


CASES: Final = {
    # Odd row-block counts under CTA pairs, an empty group, padding rows, a column tail for both tile widths, a ring
    # that wraps inside a tile.
    "ragged": GemmCase((384, 128, 0, 256, 200, 77), 640, 896),
    # Fewest k-blocks, fewer than the ring has stages.
    "shallow": GemmCase((130, 1), 256, 256),
    "flat": GemmCase((200, 7), 256, 128),
    # Small enough for many simulated schedules.
    "tiny": GemmCase((300, 0, 128), 384, 640),
    "deep": GemmCase((256, 128), 512, 4096),
}


@dataclass(frozen=True)
class Operands:
    """a: e4m3 ``[M, K]``; a_scales: float32 ``[M, K/128]``; b: e4m3 ``[G, N, K]``; b_scales: ``[G, N/128, K/128]``."""

    a: torch.Tensor
    a_scales: torch.Tensor
    b: torch.Tensor
    b_scales: torch.Tensor


def _normal(bits: np.random.PCG64, *shape: int) -> torch.Tensor:
    """Standard normal values from the raw stream, whose order NumPy promises (Box-Muller)."""
    count = int(np.prod(shape))
    raw = np.asarray(bits.random_raw(2 * count), dtype=np.uint64).reshape(2, count)
    u = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    values = np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])
    return torch.from_numpy(values.astype(np.float32)).view(shape)


def operands(case: GemmCase, seed: int = 0) -> Operands:
    """Gaussian operands on the CPU. Padding rows hold NaN bytes and NaN scales: they must reach no other row."""
    bits = np.random.PCG64(seed)
    starts = group_starts(case.counts)
    a = torch.full((starts[-1], case.k), 0x7F, dtype=torch.uint8).view(E4M3)
    a_scales = torch.full((starts[-1], case.k // BLOCK), float("nan"))
    for start, rows in zip(starts, case.counts, strict=False):
        if rows:
            a[start : start + rows], a_scales[start : start + rows] = quantize_activations(_normal(bits, rows, case.k))
    b, b_scales = quantize_weights(_normal(bits, len(case.counts), case.n, case.k) * 0.05)
    return Operands(a, a_scales, b, b_scales)


def used_rows(case: GemmCase) -> torch.Tensor:
    """Pool rows that belong to a group, ascending."""
    starts = group_starts(case.counts)
    return torch.cat([torch.arange(s, s + rows) for s, rows in zip(starts, case.counts, strict=False)])


def oracle(case: GemmCase, given: Operands) -> torch.Tensor:
    """float32 ``[used rows, N]``: what the contract says, with exact sums inside each k-block."""
    starts = group_starts(case.counts)
    parts = [
        project(Projection(given.b[g], given.b_scales[g]), given.a[s : s + rows], given.a_scales[s : s + rows])
        for g, (s, rows) in enumerate(zip(starts, case.counts, strict=False))
        if rows
    ]
    return torch.cat(parts)
