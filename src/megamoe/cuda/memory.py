"""Workspaces: the memory of one group's ranks on one GPU, shared by all layers of the same sizes.

A layer's own are its weights, its counters and its output. Arena, pools, counters of the protocol, streams and loaded
kernels serve one call after the other, so that sixty layers of a model need them once. Calls of layers that share a
workspace run one after another in stream order; replays of captured graphs on several streams are the caller's to
order.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass
from typing import Any, Final

import torch

from megamoe.cuda.arena import ARENA, REPORT_WORDS, WORKSPACE, Sizes, allocation_report, total_bytes
from megamoe.cuda.call_staging import CallStager
from megamoe.cuda.driver import Driver
from megamoe.cuda.fused import Buffers, Maps, job, tensor_maps
from megamoe.cuda.gpu import Gpu
from megamoe.cuda.launch import Library, TensorMaps, aligned
from megamoe.cuda.plan import Plan
from megamoe.cuda.toolchain import compile_kernel
from megamoe.spec import ScaleFormat

__all__ = ["Expired", "Workspace", "acquire", "host_words", "release"]

_log = logging.getLogger("megamoe")

_STATE: Final = ("counts", "done", "abort", "epoch", "barrier", "own_counts", "arrived", "halves")
"""Fields that carry state from call to call; all others are written before they are read."""


def host_words(tensor: torch.Tensor) -> Any:
    """The int32 words of a host tensor as a ctypes array: reading one costs a tenth of a tensor's `tolist`."""
    return (ctypes.c_int32 * tensor.numel()).from_address(tensor.data_ptr())


@dataclass(frozen=True)
class Expired:
    """An expired wait: who waited in which phase for what."""

    rank: int
    phase: int
    index: int
    awaited: int
    seen: int


class Workspace:
    """Memory, streams and kernels of all ranks of one group on one GPU.

    Attributes:
        gpu: where it is.
        buffers: arena and local workspace of each rank.
        maps: the kernel's tensor maps, by rank.
        stager: brings a call's inputs into an arena.
        lock: held while a call is being launched.
        broken: why calls are refused until `reset`; None while all is well.
        users: layers that share it.
        last_stream: handle of the stream of the last call.
    """

    def __init__(self, driver: Driver, gpu: Gpu, ordinal: int, sizes: Sizes, input_scales: ScaleFormat) -> None:
        wanted = allocation_report(sizes)
        _log.info(
            "GPU engine: %d rank(s) on %s, each %s", sizes.ranks, gpu.device,
            ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in wanted.items()),
        )  # fmt: skip
        self.gpu = gpu
        self.driver = driver
        self.ordinal = ordinal
        self.sizes = sizes
        self.lock = threading.Lock()
        self.broken: str | None = None
        self.users = 0
        self.last_stream: int | None = None
        self._libraries: dict[Plan, Library] = {}
        self.buffers = [
            Buffers(
                sizes,
                gpu.zeros(f"arena of rank {r}", (total_bytes(ARENA, sizes),), torch.uint8),
                gpu.zeros(f"workspace of rank {r}", (total_bytes(WORKSPACE, sizes),), torch.uint8),
            )
            for r in range(sizes.ranks)
        ]
        self.reports = [gpu.pinned(REPORT_WORDS) for _ in range(sizes.ranks)]
        self._words = [host_words(report) for report in self.reports]
        encoder = TensorMaps(driver)
        self.maps = [aligned(Maps) for _ in range(sizes.ranks)]
        for maps, buffers in zip(self.maps, self.buffers, strict=True):
            for target, spec in zip(maps.maps, tensor_maps(buffers), strict=True):
                target.set(encoder.tiled(spec))
        # Kernels of several ranks start from several streams, where a programmatic edge gains nothing.
        self.dependent = sizes.ranks == 1
        self.stager = CallStager(sizes.hidden, input_scales, ordinal, driver=driver, dependent=self.dependent)
        gpu.synchronize()  # the buffers are zero before any rank starts

    def loaded(self, plan: Plan) -> bool:
        """Whether `library` would return at once."""
        return plan in self._libraries

    def library(self, plan: Plan) -> Library:
        """The kernel of `plan`, compiled and loaded at the first request."""
        found = self._libraries.get(plan)
        if found is None:
            work = job(plan, self.sizes, self.driver.device(self.ordinal).arch)
            # Time stamps cost a tracing plan a few spilled registers, which no other plan may have.
            compiled = compile_kernel(work.source, work.config, work.arch, policy="warn" if plan.trace else None)
            found = self._libraries[plan] = Library(self.driver, compiled)
        return found

    def expired(self) -> Expired | None:
        """The wait that expired in a call, if one did. Reads host memory only."""
        for words in self._words:
            if words[0] == 1:
                return Expired(words[1], words[2], words[3], words[4], words[5] & 0xFFFFFFFF)
        return None

    def reset(self) -> None:
        """Bring the protocol back to its beginning; waits for the GPU."""
        self.gpu.synchronize()
        for report, buffers in zip(self.reports, self.buffers, strict=True):
            report.zero_()
            for name in _STATE:
                buffers.view(name).zero_()
        self.gpu.synchronize()
        self.broken = None

    def close(self) -> None:
        """Unload the kernels; nothing may be running."""
        for library in self._libraries.values():
            library.close()
        self._libraries.clear()
        self.stager.close()


_live: dict[tuple[Any, ...], Workspace] = {}
_live_lock = threading.Lock()


def acquire(driver: Driver, gpu: Gpu, ordinal: int, sizes: Sizes, input_scales: ScaleFormat) -> Workspace:
    """The workspace of these sizes on this GPU, made at the first request; give it back with `release`.

    Raises:
        EngineError: too little memory; the message has the numbers.
    """
    key = (id(driver), ordinal, sizes, input_scales)
    with _live_lock:
        found = _live.get(key)
        if found is None:
            found = _live[key] = Workspace(driver, gpu, ordinal, sizes, input_scales)
        found.users += 1
        return found


def release(workspace: Workspace) -> None:
    """Give back what `acquire` returned; the last user's release waits for the GPU and frees the memory."""
    with _live_lock:
        workspace.users -= 1
        if workspace.users:
            return
        for key in [key for key, known in _live.items() if known is workspace]:
            del _live[key]
    if workspace.gpu.capturing():
        return  # a layer that was dropped, not closed: waiting here would break the capture; the kernels stay loaded
    workspace.gpu.synchronize()
    workspace.close()
