"""What the GPU engine needs of torch: device memory, pinned memory, streams, whether a graph is being captured.

Tests put memory of the simulator behind the same few methods.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megamoe.cuda.driver import Driver
from megamoe.cuda.launch import current_stream_getter
from megamoe.errors import EngineError

__all__ = ["Gpu", "TorchGpu"]

_GIB = 2**30


class Gpu(Protocol):
    """One GPU as the engine uses it; streams are handles (integers)."""

    device: torch.device

    def zeros(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory. Raises EngineError when there is too little; `what` names it."""

    def peer_zeros(self, what: str, nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Zeroed bytes that GPUs with peer access reach, and what frees them. Raises EngineError as `zeros` does."""

    def pinned(self, words: int) -> torch.Tensor:
        """Zeroed int32 memory of the host that kernels can write."""

    def stream(self) -> int:
        """The caller's current stream."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def follow(self) -> None:
        """Make the current stream wait for the stream of the last call, and remember it as that; not in a capture."""

    def fork(self, ranks: int, root: Gpu | None = None) -> list[int]:
        """One stream for each rank, which waits for the current stream, or for that of `root`."""

    def join(self, root: Gpu | None = None) -> None:
        """Make the current stream, or that of `root`, wait for the streams of the last `fork`."""

    def synchronize(self) -> None:
        """Wait for everything on the GPU."""


class _Bytes:
    """Device memory as torch takes it over without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None
        }  # fmt: skip


class TorchGpu:
    """`Gpu` by torch.cuda."""

    def __init__(self, ordinal: int, driver: Driver) -> None:
        self._driver = driver
        self.device = torch.device("cuda", ordinal)
        self._ordinal = ordinal
        self._ranks: list[torch.cuda.Stream] = []
        self._forked = 0
        self._last: torch.cuda.Stream | None = None
        self.stream: Callable[[], int] = functools.partial(current_stream_getter(), ordinal)

    def zeros(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise self._too_little(what, math.prod(shape) * dtype.itemsize) from error

    def peer_zeros(self, what: str, nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        try:
            pointer = self._driver.allocate(self._ordinal, nbytes)
        except EngineError as error:
            raise self._too_little(what, nbytes) from error
        tensor = torch.as_tensor(_Bytes(pointer, nbytes), device=self.device)
        tensor.zero_()
        return tensor, functools.partial(self._driver.free, self._ordinal, pointer)

    def _too_little(self, what: str, nbytes: int) -> EngineError:
        free, total = torch.cuda.mem_get_info(self.device)
        return EngineError(
            what,
            f"{nbytes / _GIB:.2f} GiB",
            f"what is free on {self.device}: {free / _GIB:.2f} of {total / _GIB:.1f} GiB",
            "Free memory, use a smaller max_tokens, or spread the experts over more GPUs.",
        )

    def pinned(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def capturing(self) -> bool:
        if torch.cuda.current_device() == self._ordinal:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def follow(self) -> None:
        if self.capturing():
            return  # an event from outside a capture cannot be waited for in it
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last.cuda_stream != current.cuda_stream:
            current.wait_stream(self._last)
        self._last = current

    def fork(self, ranks: int, root: Gpu | None = None) -> list[int]:
        while len(self._ranks) < ranks:
            self._ranks.append(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device if root is None else root.device)
        self._forked = ranks
        for stream in self._ranks[:ranks]:
            stream.wait_stream(current)
        return [int(stream.cuda_stream) for stream in self._ranks[:ranks]]

    def join(self, root: Gpu | None = None) -> None:
        current = torch.cuda.current_stream(self.device if root is None else root.device)
        for stream in self._ranks[: self._forked]:
            current.wait_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
