"""One rank of the fused kernel: its memory, its arguments, its launches.

Nothing here knows where peer memory comes from (`memory.py`) or who calls (`engine.py`); the same functions fill the
arguments for the simulator, where addresses are the CPU's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from megamoe.cuda.arena import ARENA, MAX_RANKS, WORKSPACE, Field, Params, Sizes, offsets, total_bytes
from megamoe.cuda.driver import TensorMapSpec
from megamoe.cuda.launch import TensorMap
from megamoe.cuda.plan import Plan
from megamoe.cuda.relayout import KernelWeights
from megamoe.cuda.toolchain import Job
from megamoe.spec import BLOCK, MoESpec

__all__ = ["KERNEL", "SOURCE", "Buffers", "Maps", "fill_params", "job", "sizes_of", "tensor_maps", "weight_maps"]

SOURCE: Final = "mega_sm90.cu"
KERNEL: Final = "mega"

BOXES: Final = (128, 64, 32, 16, 8)
"""Rows of the pools' tensor maps: a tile's rows in as few copies as they have binary digits."""

_DTYPES: Final = {
    "u8": torch.uint8,
    "u32": torch.int32,  # torch's unsigned types lack operations; the bits are the same
    "int": torch.int32,
    "u64": torch.int64,
    "float": torch.float32,
    "uint4": torch.int32,
    "__nv_bfloat16": torch.bfloat16,
}


class Maps(ctypes.Structure):
    """The kernel's first parameter, see `tensor_maps` and `weight_maps`."""

    _fields_ = (("pools", TensorMap * (2 * len(BOXES))), ("weights", TensorMap * 2))


def sizes_of(spec: MoESpec, ranks: int, max_tokens: int, pool_limit: int | None = None) -> Sizes:
    """What the memory of this layer follows from. Raises SpecError when `ranks` does not divide the experts."""
    return Sizes(
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        topk=spec.topk,
        ranks=ranks,
        local_experts=spec.local_experts(ranks),
        capacity=max(1, max_tokens),
        pool_limit=pool_limit,
    )


def job(plan: Plan, sizes: Sizes, arch: str = "sm_90a") -> Job:
    """What to compile for this plan and layer. Raises EngineError when the plan is not legal."""
    return Job(SOURCE, plan.config(sizes), arch)


@dataclass(frozen=True)
class Buffers:
    """Arena and workspace of one rank: uint8 tensors, zero before the first call."""

    sizes: Sizes
    arena: torch.Tensor
    workspace: torch.Tensor

    @staticmethod
    def allocate(sizes: Sizes, device: torch.device | str) -> Buffers:
        """Both buffers on `device`, zeroed."""
        return Buffers(
            sizes,
            torch.zeros(total_bytes(ARENA, sizes), dtype=torch.uint8, device=device),
            torch.zeros(total_bytes(WORKSPACE, sizes), dtype=torch.uint8, device=device),
        )

    def view(self, name: str) -> torch.Tensor:
        """The field `name` as a flat tensor of its element type (a uint4 counts as four int32)."""
        for buffer, fields in ((self.arena, ARENA), (self.workspace, WORKSPACE)):
            for field, at in zip(fields, offsets(fields, self.sizes), strict=True):
                if field.name == name:
                    return _view(buffer, field, at, self.sizes)
        raise KeyError(name)


def _view(buffer: torch.Tensor, field: Field, at: int, sizes: Sizes) -> torch.Tensor:
    return buffer[at : at + field.itemsize * field.count(sizes)].view(_DTYPES[field.ctype])


def fill_params(
    params: Params,
    spec: MoESpec,
    rank: int,
    own: Buffers,
    arenas: Sequence[int],
    weights: KernelWeights,
    *,
    timeout_ns: int,
    report: int,
    errors: int,
    received: int,
) -> None:
    """Write everything that stays the same from call to call.

    Args:
        params: where to write.
        spec: the layer.
        rank: this rank.
        own: its buffers.
        arenas: address of every rank's arena as this rank sees it.
        weights: its experts.
        timeout_ns: deadline of one wait, nanoseconds.
        report: address of the host-visible record of an expired wait (`REPORT_WORDS`).
        errors: address of the host-visible record of bad values (`ERROR_WORDS`).
        received: address of the routes received per local expert (u64 each).
    """
    sizes = own.sizes
    params.arena = (ctypes.c_uint64 * MAX_RANKS)(*arenas)
    params.arena_at = type(params.arena_at)(*offsets(ARENA, sizes))
    params.workspace = own.workspace.data_ptr()
    params.workspace_at = type(params.workspace_at)(*offsets(WORKSPACE, sizes))
    params.w13, params.w13_scales = weights.w13.data_ptr(), weights.w13_scales.data_ptr()
    params.w2, params.w2_scales = weights.w2.data_ptr(), weights.w2_scales.data_ptr()
    params.report, params.errors, params.received, params.timeout_ns = report, errors, received, timeout_ns
    params.capacity, params.pool_rows, params.pool_tiles = sizes.capacity, sizes.pool_rows, sizes.pool_tiles
    params.power_scales = int(spec.input_scales == "ue8m0")
    params.rank = rank
    params.clamp = math.inf if spec.clamp is None else spec.clamp


def tensor_maps(own: Buffers) -> tuple[TensorMapSpec, ...]:
    """Maps of the input pool, in boxes of `BOXES` rows, then those of the intermediate pool."""
    sizes = own.sizes
    pools = ((own.view("x_pool").data_ptr(), sizes.hidden), (own.view("h_pool").data_ptr(), sizes.intermediate))
    return tuple(
        TensorMapSpec(pointer, "uint8", (width, sizes.pool_rows), (width,), (BLOCK, rows))
        for pointer, width in pools
        for rows in BOXES
    )


def weight_maps(weights: KernelWeights) -> tuple[TensorMapSpec, ...]:
    """Maps of w13 and w2 where they are row-major, in boxes of 128 rows; none where they are tiles."""
    if weights.layout == "tiles":
        return ()
    return tuple(
        TensorMapSpec(w.data_ptr(), "uint8", (w.shape[2], w.shape[0] * w.shape[1]), (w.shape[2],), (BLOCK, BLOCK))
        for w in (weights.w13, weights.w2)
    )
