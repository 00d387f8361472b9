"""Staging a whole call: rows, expert ids and route weights into a rank's arena, in one launch.

The rows' arithmetic is that of `megamoe.cuda.staging`, whose plans and source file these kernels share.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.cuda.driver import Driver, LaunchConfig
from megamoe.cuda.launch import Kernel, Library, aligned, packer
from megamoe.cuda.staging import MAX_SHAPES, PLANS, StagingPlan, job, select_plan
from megamoe.cuda.toolchain import compile_kernel
from megamoe.spec import BLOCK, ScaleFormat

__all__ = ["CallStager", "Target"]


class _CallArguments(ctypes.Structure):
    # Layout shared with CallArguments in kernels/staging.cu.
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("q", ctypes.c_uint64),
        ("s", ctypes.c_uint64),
        ("staged_ids", ctypes.c_uint64),
        ("staged_weights", ctypes.c_uint64),
        ("num_tokens", ctypes.c_uint64),
        ("x_stride", ctypes.c_int64),
        ("scales_stride", ctypes.c_int64),
        ("scales_column", ctypes.c_int64),
        ("ids_stride", ctypes.c_int64),
        ("ids_column", ctypes.c_int64),
        ("weights_stride", ctypes.c_int64),
        ("weights_column", ctypes.c_int64),
        ("tokens", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("row_blocks", ctypes.c_uint32),
        ("wide_ids", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Addresses in a rank's arena that a call's inputs go to, all contiguous: rows, their scales, ids, weights."""

    q: int
    s: int
    ids: int
    weights: int


class _Block:
    """A kernel and its arguments: the inputs' addresses, new in every call, and the rest, as `holds` says."""

    __slots__ = ("holds", "inputs", "kernel", "rest")

    def __init__(self, library: Library, name: str, ordinal: int, config: LaunchConfig) -> None:
        arguments = aligned(_CallArguments)
        self.kernel = Kernel(library, name, ordinal, config, [arguments])
        self.inputs = packer(arguments, last="weights")
        self.rest = packer(arguments, first="q")
        self.holds: tuple[Target, int, object] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _CallShape:
    """What follows from the metadata of a call's tensors."""

    block: _Block
    blocks: int
    rest: tuple[int, ...]
    """Arguments behind the count's address."""
    align: int
    """Bytes that the rows' address must be a multiple of."""


class CallStager:
    """Everything a call brings, in one launch: rows (quantised or copied), expert ids, route weights.

    Its kernels' arguments are written in place: one call at a time.

    Checked arguments only (`megamoe.inputs`); any strides. Rows that the kernel cannot load as they lie (columns apart,
    or not aligned) are made contiguous first, by one more kernel.

    Args and errors: those of `megamoe.cuda.staging.Stager`.
    """

    def __init__(
        self, hidden: int, scale_format: ScaleFormat, ordinal: int, *, driver: Driver, dependent: bool = True
    ) -> None:
        self.hidden = hidden
        self._multiprocessors = driver.device(ordinal).multiprocessors
        self._shapes: dict[tuple[Any, ...], _CallShape] = {}
        self._blocks: dict[tuple[StagingPlan, bool], _Block] = {}
        self._libraries: list[Library] = []
        arch = driver.device(ordinal).arch
        for plan in PLANS:
            work = job(hidden, scale_format, plan, arch)
            library = Library(driver, compile_kernel(work.source, work.config, work.arch))
            self._libraries.append(library)
            config = LaunchConfig(threads=plan.threads, dependent=dependent)
            for quantised, name in ((False, "stage_call"), (True, "copy_call")):
                self._blocks[plan, quantised] = _Block(library, name, ordinal, config)

    def __call__(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        num_tokens: int,
        target: Target,
        stream: int,
        plain: bool = False,
    ) -> None:
        """Stage one rank's call.

        Args:
            x: BF16 ``[M, H]``, or e4m3 ``[M, H]`` with `scales`.
            scales: float32 ``[M, H / 128]`` or None.
            ids: int32 or int64 ``[M, k]``; what 32 bits cannot hold becomes an id that the fused kernel reports.
            weights: float32 ``[M, k]``.
            num_tokens: address of an int32 on the GPU; rows from there on are not staged. 0: all of them.
            target: where to.
            plain: `x`, `ids` and `weights` are known to be contiguous, and `scales` is None.
            stream: handle of the stream; where it must be, the GPU's context is current (`launch.needs_context`).
        """
        key: tuple[Any, ...]
        if plain:
            key = (ids.shape, ids.dtype)  # most calls; each look at strides costs 0.2 us
        else:
            key = (ids.shape, x.stride(), ids.stride(), ids.dtype, weights.stride(), scales is None or scales.stride())
        shape = self._shapes.get(key)
        at = x.data_ptr()
        if shape is None or at % shape.align:
            if x.shape[0] == 0:
                return
            x, shape = self._shape(x, scales, ids, weights, key)
            at = x.data_ptr()
        block = shape.block
        block.inputs(at, 0 if scales is None else scales.data_ptr(), ids.data_ptr(), weights.data_ptr())
        if block.holds != (target, num_tokens, shape):
            block.rest(target.q, target.s, target.ids, target.weights, num_tokens, *shape.rest)
            block.holds = (target, num_tokens, shape)
        block.kernel.launch_here(shape.blocks, stream)

    def _shape(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        key: tuple[Any, ...],
    ) -> tuple[torch.Tensor, _CallShape]:
        tokens, slots = ids.shape
        size = x.element_size()
        align = 8 * size
        fits = x.stride(1) == 1 and (tokens == 1 or x.stride(0) * size % align == 0)
        lies = fits and x.data_ptr() % align == 0
        if not lies:
            x = x.contiguous() if not x.is_contiguous() else x.clone()
        plan = select_plan(tokens, self.hidden, self._multiprocessors)
        row_blocks = plan.blocks(tokens * (self.hidden // BLOCK))
        rest = (
            x.stride(0) * size,
            0 if scales is None else 4 * scales.stride(0),
            0 if scales is None else 4 * scales.stride(1),
            *(ids.element_size() * step for step in ids.stride()),
            *(4 * step for step in weights.stride()),
            tokens,
            slots,
            row_blocks,
            int(ids.dtype == torch.int64),
        )
        block = self._blocks[plan, scales is not None]
        shape = _CallShape(block, row_blocks - (-tokens * slots // plan.threads), rest, align)
        if lies:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = shape
        return x, shape

    def close(self) -> None:
        """Unload the kernels; none may be running."""
        for library in self._libraries:
            library.close()
        self._libraries.clear()
