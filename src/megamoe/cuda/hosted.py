"""One rank of a layer in this process: its arguments, its maps, the launch of its kernels."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from megamoe.cuda.arena import ERROR_WORDS, Params
from megamoe.cuda.call_staging import Target
from megamoe.cuda.driver import Driver
from megamoe.cuda.fused import Maps, fill_params, weight_maps
from megamoe.cuda.launch import Kernel, aligned, packer
from megamoe.cuda.memory import Workspace, host_words
from megamoe.cuda.relayout import KernelWeights
from megamoe.engine import Call
from megamoe.spec import MoESpec

__all__ = ["HostedRank"]

_OUT_ALIGNMENT: Final = 16
"""Bytes of the fused kernel's stores: address and row stride of `out`; others get their rows through a copy."""

_X_ALIGNMENT: Final = 16
"""Bytes of its loads of rows that it stages itself."""


class HostedRank:
    """What a layer itself has for one rank of this process.

    Args:
        workspace: the memory that its layers share.
        index: which of the hosted ranks.
        rank: its number in the group.
        grid: CTAs of its kernel.

    Attributes:
        place: its GPU.
        params, maps: the kernel's arguments.
        received: routes received per local expert, int64 on the GPU.
        errors: host-visible record of bad values; `words` are its words.
    """

    def __init__(self, workspace: Workspace, index: int, rank: int, grid: int) -> None:
        self.rank = rank
        self.index = index
        self.grid = grid
        self.place = workspace.place_of[index]
        self._workspace = workspace
        self._buffers = workspace.buffers[index]
        self._hidden = workspace.sizes.hidden
        self.params = aligned(Params)
        self._write = packer(self.params, "out", "wide_ids")
        self.maps = aligned(Maps)
        ctypes.memmove(ctypes.addressof(self.maps), ctypes.addressof(workspace.maps[index]), ctypes.sizeof(Maps))
        names = ("x", "x_scales", "ids", "route_weights")
        self._target = Target(*(self._buffers.view(name).data_ptr() for name in names))
        gpu, sizes = self.place.gpu, workspace.sizes
        self.received = gpu.zeros(f"counters of rank {rank}", (sizes.local_experts,), torch.int64)
        self.errors = gpu.pinned(ERROR_WORDS)
        self.words: Any = host_words(self.errors)

    def fill(self, driver: Driver, spec: MoESpec, weights: KernelWeights, deadline: float) -> None:
        """Write the arguments that stay the same from call to call."""
        for target, map_spec in zip(self.maps.weights, weight_maps(weights), strict=False):
            target.set(driver.encode_tensor_map(map_spec))
        fill_params(
            self.params,
            spec,
            self.rank,
            self._buffers,
            self._workspace.arenas[self.index],
            weights,
            timeout_ns=int(deadline * 1e9),
            report=self._workspace.reports[self.index].data_ptr(),
            errors=self.errors.data_ptr(),
            received=self.received.data_ptr(),
        )

    @staticmethod
    def stages_itself(call: Call) -> bool:
        """Whether the fused kernel stages the call: BF16 rows, ids and weights, all contiguous."""
        return call.plain and call.x.data_ptr() % _X_ALIGNMENT == 0

    def stage(self, call: Call, stream: int) -> None:
        """Launch the staging of a call's inputs into the arena, by a kernel of its own."""
        count = call.num_tokens
        self.place.stager(
            call.x,
            call.scales,
            call.expert_ids,
            call.expert_weights,
            0 if isinstance(count, int) else count.data_ptr(),
            self._target,
            stream,
            call.plain,
        )

    def start_plain(self, kernel: Kernel, call: Call, stream: int) -> bool:
        """`start` of a plain call that the fused kernel stages itself, with as few looks at its tensors as that takes.

        Returns:
            False, and nothing was launched, where an address is not aligned.
        """
        x, out, ids, count = call.x.data_ptr(), call.out.data_ptr(), call.expert_ids, call.num_tokens
        if x % _X_ALIGNMENT or out % _OUT_ALIGNMENT:
            return False
        tokens, address = (count, 0) if isinstance(count, int) else (call.x.shape[0], count.data_ptr())
        inputs = x, ids.data_ptr(), call.expert_weights.data_ptr(), tokens, ids.dtype is torch.int64
        self._write(out, self._hidden, address, *inputs)
        kernel.launch_here(self.grid, stream)
        return True

    def start(self, kernel: Kernel, call: Call, out: torch.Tensor, stream: int, *, stage: bool) -> None:
        """Launch the fused kernel.

        Args:
            kernel: which.
            call: the call.
            out: where its rows go (`storable`).
            stream: handle of the stream.
            stage: the kernel stages the inputs (`stages_itself`); otherwise they are staged.
        """
        count = call.num_tokens
        if isinstance(count, int):
            tokens, address = count, 0
        else:
            tokens, address = call.x.shape[0], count.data_ptr()
        stride = self._hidden if out.is_contiguous() else out.stride(0)
        if stage:
            ids = call.expert_ids
            inputs = call.x.data_ptr(), ids.data_ptr(), call.expert_weights.data_ptr(), tokens, ids.dtype is torch.int64
        else:
            inputs = 0, 0, 0, tokens, False
        self._write(out.data_ptr(), stride, address, *inputs)
        kernel.launch_here(self.grid, stream)

    @staticmethod
    def storable(out: torch.Tensor) -> torch.Tensor:
        """`out`, or a copy that the kernel can store to; rows past the count keep what they hold in either."""
        # A contiguous row is whole blocks of 128 columns; strides cost more to look at.
        if out.data_ptr() % _OUT_ALIGNMENT == 0 and (
            out.is_contiguous() or out.stride(0) * 2 % _OUT_ALIGNMENT == 0 or out.shape[0] <= 1
        ):
            return out
        return out.clone(memory_format=torch.contiguous_format)
