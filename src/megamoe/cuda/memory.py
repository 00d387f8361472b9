"""Workspaces: the memory of one group's ranks in this process, shared by all layers of the same sizes.

A layer's own are its weights, its counters and its output. Arena, pools, counters of the protocol, streams and loaded
kernels serve one call after the other, so that sixty layers of a model need them once. Calls of layers that share a
workspace run one after another in stream order; replays of captured graphs on several streams are the caller's to
order.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from megamoe.cuda.arena import ARENA, REPORT_WORDS, WORKSPACE, Sizes, allocation_report, offset_of, total_bytes
from megamoe.cuda.call_staging import CallStager
from megamoe.cuda.driver import Driver
from megamoe.cuda.fused import Buffers, Maps, job, tensor_maps
from megamoe.cuda.gpu import Gpu
from megamoe.cuda.launch import Library, TensorMaps, aligned
from megamoe.cuda.peers import Arenas
from megamoe.cuda.plan import Plan
from megamoe.cuda.toolchain import Policy, compile_kernel
from megamoe.spec import ScaleFormat

__all__ = ["ABORTED", "EXPIRED", "Expired", "Place", "Workspace", "find", "host_words", "release", "take"]

_log = logging.getLogger("megamoe")

EXPIRED: Final = 0
ABORTED: Final = 6
"""Words of a report (sync.cuh): a wait expired; the call ended through the abort word."""


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


@dataclass
class Place:
    """One GPU and the hosted ranks that share it.

    Attributes:
        ordinal: the GPU.
        gpu: the same, as torch has it.
        hosted: indices of its ranks among those of this process.
        stager: brings a call's inputs into an arena.
        dependent: whether its kernels are joined by programmatic dependent launch. Kernels of several ranks start from
            several streams, where such an edge gains nothing.
        last_stream: handle of the stream of the last call.
    """

    ordinal: int
    gpu: Gpu
    hosted: tuple[int, ...]
    stager: CallStager
    dependent: bool
    last_stream: int | None = None


class Workspace:
    """Memory, streams and kernels of the ranks of one group that this process hosts.

    Args:
        driver: loads kernels, encodes maps.
        seats: GPU of each hosted rank.
        gpus: the GPUs by ordinal.
        sizes: of the layer.
        input_scales: format of staged scales.
        arenas: makes the arenas of that many bytes.
        token: names the workspace among those of one key; equal on all ranks.

    Attributes:
        places: the GPUs.
        buffers: arena and local workspace of each hosted rank.
        arenas: addresses of all ranks' arenas, for each hosted rank.
        maps: the kernel's tensor maps, for each hosted rank.
        words: each hosted rank's report of an expired wait, host-visible.
        lock: held while a call is being launched.
        broken: why calls are refused until `reset`; None while all is well.
        users: layers that share it.
    """

    def __init__(
        self,
        driver: Driver,
        seats: Sequence[int],
        gpus: Mapping[int, Gpu],
        sizes: Sizes,
        input_scales: ScaleFormat,
        arenas: Callable[[int], Arenas],
        token: str = "",
    ) -> None:
        wanted = allocation_report(sizes)
        _log.info(
            "GPU engine: %d of %d rank(s) on %s, each %s", len(seats), sizes.ranks,
            ", ".join(str(gpus[ordinal].device) for ordinal in sorted(set(seats))),
            ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in wanted.items()),
        )  # fmt: skip
        self.driver = driver
        self.sizes = sizes
        self.token = token
        self.lock = threading.Lock()
        self.broken: str | None = None
        self.users = 0
        self._libraries: dict[Plan, Library] = {}
        made = arenas(total_bytes(ARENA, sizes))
        self.arenas = made.addresses
        self._free = made.free
        self.buffers = [
            Buffers(
                sizes,
                arena,
                gpus[ordinal].zeros(f"workspace of rank {i}", (total_bytes(WORKSPACE, sizes),), torch.uint8),
            )
            for i, (ordinal, arena) in enumerate(zip(seats, made.tensors, strict=True))
        ]
        self.reports = [gpus[ordinal].pinned(REPORT_WORDS) for ordinal in seats]
        self.words = [host_words(report) for report in self.reports]
        encoder = TensorMaps(driver)
        self.maps = [aligned(Maps) for _ in seats]
        for maps, buffers in zip(self.maps, self.buffers, strict=True):
            for target, spec in zip(maps.pools, tensor_maps(buffers), strict=True):
                target.set(encoder.tiled(spec))
        self.places = []
        for ordinal in sorted(set(seats)):
            hosted = tuple(i for i, seat in enumerate(seats) if seat == ordinal)
            dependent = len(hosted) == 1
            stager = CallStager(sizes.hidden, input_scales, ordinal, driver=driver, dependent=dependent)
            self.places.append(Place(ordinal, gpus[ordinal], hosted, stager, dependent))
        self.place_of = [next(p for p in self.places if i in p.hosted) for i in range(len(seats))]
        self.synchronize()  # the buffers are zero before any rank starts

    def synchronize(self) -> None:
        """Wait for everything on the GPUs."""
        for place in self.places:
            place.gpu.synchronize()

    def library(self, plan: Plan) -> Library:
        """The kernel of `plan`, compiled and loaded at the first request."""
        found = self._libraries.get(plan)
        if found is None:
            work = job(plan, self.sizes, self.driver.device(self.places[0].ordinal).arch)
            # What a debugging plan records costs a few spilled registers, which no other plan may have.
            policy: Policy | None = "warn" if plan.trace or plan.keep_intermediate else None
            compiled = compile_kernel(work.source, work.config, work.arch, policy=policy)
            found = self._libraries[plan] = Library(self.driver, compiled)
        return found

    def reported(self) -> bool:
        """Whether `expired` or `aborted` has something to say."""
        return any(words[EXPIRED] or words[ABORTED] for words in self.words)

    def expired(self) -> Expired | None:
        """The wait of a hosted rank that expired in a call, if one did. Reads host memory only."""
        for words in self.words:
            if words[EXPIRED] == 1:
                return Expired(words[1], words[2], words[3], words[4], words[5] & 0xFFFFFFFF)
        return None

    def aborted(self) -> tuple[int, int] | None:
        """Rank and phase of whoever ended the group's calls, if somebody did: phase 0 for a refused call."""
        for words in self.words:
            if words[ABORTED]:
                return (words[ABORTED] & 0xFF) - 1, words[ABORTED] >> 8
        return None

    def raise_abort(self, index: int, rank: int) -> None:
        """End every rank's calls from the host, because rank `rank`, the `index`-th one here, refused its own."""
        at = offset_of(ARENA, "abort", self.sizes)
        for address in self.arenas[index]:
            self.driver.store_words(self.place_of[index].ordinal, address + at, [rank + 1])

    def clear(self) -> None:
        """Bring the hosted ranks' part of the protocol back to its beginning; no rank may be in a call."""
        self.synchronize()
        for report, buffers in zip(self.reports, self.buffers, strict=True):
            report.zero_()
            for field in (*ARENA, *WORKSPACE):
                if field.state:
                    buffers.view(field.name).zero_()
        self.synchronize()
        self.broken = None

    def close(self) -> None:
        """Unload the kernels; nothing may be running."""
        for library in self._libraries.values():
            library.close()
        self._libraries.clear()
        for place in self.places:
            place.stager.close()
        self._free()


_live: dict[tuple[Any, ...], Workspace] = {}
_live_lock = threading.RLock()  # making a workspace may collect a dropped layer, which releases its own


def find(key: tuple[Any, ...]) -> Workspace | None:
    """The live workspace of `key`, if there is one; it stays the caller's to `take`."""
    with _live_lock:
        return _live.get(key)


def take(key: tuple[Any, ...], make: Callable[[], Workspace], *, anew: bool = False) -> Workspace:
    """The workspace of `key`, made at the first request, or in any case; give it back with `release`.

    Args:
        key: what layers that may share have in common.
        make: makes one.
        anew: do not share the live one; its users keep it.

    Raises:
        EngineError: too little memory; the message has the numbers.
    """
    with _live_lock:
        found = None if anew else _live.get(key)
        if found is None:
            found = _live[key] = make()
        found.users += 1
        return found


def release(workspace: Workspace) -> None:
    """Give back what `take` returned; the last user's release waits for the GPU and frees the memory."""
    with _live_lock:
        workspace.users -= 1
        if workspace.users:
            return
        for key in [key for key, known in _live.items() if known is workspace]:
            del _live[key]
    if any(place.gpu.capturing() for place in workspace.places):
        return  # a layer that was dropped, not closed: waiting here would break the capture; the kernels stay loaded
    workspace.synchronize()
    workspace.close()
