"""Checkpoint layout to the fused kernel's layouts: weights as contiguous swizzled tiles, scales beside their tile.

A weight tile is 128 rows x 128 bytes as it will lie in shared memory: 16-byte chunk c of row r at chunk
``c ^ (r % 8)``, the 128-byte swizzle of a WGMMA operand. One bulk copy of 16 KB brings a tile.
Rows of w13 alternate, 8 of gate and 8 of up, so that 256 rows give the 128 columns of a scale group of the
intermediate.

Weights whose rows alternate already are read as they are, row-major, through tensor maps: their values are not copied,
only their scales are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megamoe.cuda.plan import WeightLayout
from megamoe.errors import EngineError
from megamoe.formats import ue8m0
from megamoe.spec import BLOCK, MoESpec
from megamoe.weights import INTERLEAVED_ROWS, ExpertWeights

__all__ = ["KernelWeights", "readable_in_place", "relayout", "weight_shapes"]

CHUNK = 16
"""Bytes of a swizzle chunk."""

MAP_ALIGNMENT = 16
"""Bytes of which the address of a tensor map's memory is a multiple."""

TILE_SCALES = 4
"""Weight scales stored for a tile of 256 rows and a k-block: even and odd groups of 8 rows, of either half."""


@dataclass(frozen=True)
class KernelWeights:
    """One rank's weights as the fused kernel reads them.

    Attributes:
        w13: uint8 ``[EL, 2I/128, H/128, 128, 128]`` swizzled tiles; in layout ``"rows"`` the owner's ``[EL, 2I, H]``.
        w13_scales: float32 ``[EL, I/128, H/128, 4]``: gate, up, gate, up.
        w2: uint8 ``[EL, H/128, I/128, 128, 128]``; in layout ``"rows"`` the owner's ``[EL, H, I]``.
        w2_scales: float32 ``[EL, ceil(H/256), I/128, 4]``: first 128 rows twice, second 128 rows twice.
        layout: how w13 and w2 lie in memory.
    """

    w13: torch.Tensor
    w13_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    layout: WeightLayout = field(default="tiles", kw_only=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors but those that are somebody else's."""
        own = [self.w13_scales, self.w2_scales, *((self.w13, self.w2) if self.layout == "tiles" else ())]
        return sum(t.numel() * t.element_size() for t in own)

    @staticmethod
    def empty(spec: MoESpec, local_experts: int, device: torch.device | str) -> KernelWeights:
        """Memory for the weights of `local_experts` experts."""
        shapes = weight_shapes(spec, local_experts)
        return KernelWeights(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes))


def weight_shapes(spec: MoESpec, local_experts: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each field of `KernelWeights`, in order."""
    h, i, el = spec.hidden // BLOCK, spec.intermediate // BLOCK, local_experts
    return (
        ((el, 2 * i, h, BLOCK, BLOCK), torch.uint8),
        ((el, i, h, TILE_SCALES), torch.float32),
        ((el, h, i, BLOCK, BLOCK), torch.uint8),
        ((el, -(-h // 2), i, TILE_SCALES), torch.float32),
    )


def readable_in_place(weights: ExpertWeights, device: torch.device) -> bool:
    """Whether the kernel can read the values of `weights` where they are: rows interleaved by 8, memory of `device`.

    Raises:
        EngineError: only their address is in the way.
    """
    if weights.gate_up != "interleaved8" or weights.w13.device != device:
        return False
    for name, tensor in (("w13", weights.w13), ("w2", weights.w2)):
        if tensor.data_ptr() % MAP_ALIGNMENT:
            raise EngineError(
                f"weights.{name}",
                f"address {tensor.data_ptr():#x}",
                f"a multiple of {MAP_ALIGNMENT} bytes, since interleaved weights are read where they are",
                "Pass a copy (.clone()).",
            )
    return True


def _tiles(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """One expert's ``[N, K]`` bytes into swizzled tiles ``[N/128, K/128, 128, 128]``."""
    n, k = matrix.shape
    row = torch.arange(BLOCK, device=matrix.device)
    chunk = torch.arange(BLOCK // CHUNK, device=matrix.device)
    source = chunk[None, :] ^ (row[:, None] % 8)
    tiles = matrix.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK // CHUNK, CHUNK).permute(0, 2, 1, 3, 4)
    out.view(n // BLOCK, k // BLOCK, BLOCK, BLOCK // CHUNK, CHUNK).copy_(tiles[:, :, row[:, None], source])


def _float_scales(scale: torch.Tensor) -> torch.Tensor:
    return ue8m0.decode(scale) if scale.dtype == torch.float8_e8m0fnu else scale


def _experts(weights: ExpertWeights) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    for e in range(weights.local_experts):
        yield weights.w13[e].view(torch.uint8), weights.w2[e].view(torch.uint8)


def relayout(spec: MoESpec, weights: ExpertWeights, out: KernelWeights) -> None:
    """Write `weights` into `out`, expert by expert: one expert of extra memory on the output's device. Values that are
    read in place stay as they are.

    Args:
        spec: the layer.
        weights: fp8_block weights, checked, on any device; rows of w13 in either order.
        out: memory from `KernelWeights.empty`; its addresses stay, so captured graphs see the new weights.

    Raises:
        EngineError: another format; the message names how to convert.
    """
    if weights.format != "fp8_block":
        raise EngineError(
            "weights.format",
            weights.format,
            "fp8_block on the GPU engine",
            "Convert explicitly (megamoe.formats), or use backend='cpu'.",
        )
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    i = spec.intermediate
    for e, (w13, w2) in enumerate(_experts(weights) if out.layout == "tiles" else ()):
        mixed = w13.to(out.w13.device, non_blocking=True)
        if weights.gate_up == "stacked":
            mixed = mixed.view(2, i // INTERLEAVED_ROWS, INTERLEAVED_ROWS, -1).transpose(0, 1).reshape(2 * i, -1)
        _tiles(mixed, out.w13[e])
        _tiles(w2.to(out.w2.device, non_blocking=True), out.w2[e])
    s13 = _float_scales(weights.w13_scale).to(out.w13_scales.device)
    gate, up = s13[:, : i // BLOCK], s13[:, i // BLOCK :]
    out.w13_scales.copy_(torch.stack((gate, up, gate, up), dim=-1))
    s2 = _float_scales(weights.w2_scale).to(out.w2_scales.device)
    blocks = s2.shape[1]
    first, second = s2[:, 0::2], torch.zeros_like(s2[:, 0::2])
    second[:, : blocks // 2] = s2[:, 1::2]
    out.w2_scales.copy_(torch.stack((first, first, second, second), dim=-1))
