"""Global memory of the simulated ranks: one arena, mapped at the same address here and in the worker.

Tensors in it can be passed to host code as they are: ``data_ptr()`` is the address that a kernel sees.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from megamoe.cuda.driver import TENSOR_MAP_BYTES, TensorMapSpec
from megamoe.errors import EngineError

__all__ = ["Arena", "Buffer", "encode_tensor_map"]

_FIRST_ADDRESS: Final = 0x2000_0000_0000
_NEXT_ADDRESS: Final = itertools.count()
_SPACE: Final = 1 << 36
_ALIGNMENT: Final = 1024
_CANARY: Final = 0xCA
_RED_ZONE: Final = 256
_SCRATCH: Final = 1 << 20
"""Bytes at the start, for kernel arguments; no buffer, so a kernel that reaches it is out of bounds."""

_PROT_READ_WRITE: Final = 3
_MAP_SHARED: Final = 1
_MAP_FIXED_NOREPLACE: Final = 0x100000

_MAP_MAGIC: Final = 0x70614D726F736E65
_ELEMENT_BYTES: Final = {"uint8": 1, "bfloat16": 2, "float32": 4}


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


@dataclass(frozen=True)
class Buffer:
    """A named piece of one rank's global memory.

    Attributes:
        label: its name in reports.
        tensor: the memory as a torch tensor (a view: write to it before a run, read it after).
        rank: owner.
        peers: whether other ranks may touch it; if not, their accesses are reported.
        read_only: whether kernels may only read it.
        fields: pieces (name, offset, bytes) that kernels may touch, each checked by itself; none: all of it.
    """

    label: str
    tensor: torch.Tensor
    rank: int
    peers: bool
    read_only: bool
    fields: tuple[tuple[str, int, int], ...] = ()

    @property
    def address(self) -> int:
        """Its address, in kernels as well as here."""
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tensor.numel() * self.tensor.element_size()


class Arena:
    """All global memory of one simulation.

    Args:
        nbytes: room for all buffers together; only what is touched is real memory.

    Raises:
        EngineError: the system gives no shared memory.
    """

    def __init__(self, nbytes: int = 256 << 20) -> None:
        self.nbytes = nbytes
        self.base = _FIRST_ADDRESS + next(_NEXT_ADDRESS) % 256 * _SPACE
        self._file = os.memfd_create("megamoe-sim")
        os.ftruncate(self._file, nbytes)
        self._libc = _libc()
        flags = _MAP_SHARED | _MAP_FIXED_NOREPLACE
        got = self._libc.mmap(self.base, nbytes, _PROT_READ_WRITE, flags, self._file, 0)
        if got != self.base:
            os.close(self._file)
            raise EngineError("simulator", f"no memory at {self.base:#x}", f"{nbytes} bytes there", "")
        self._bytes = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.base), dtype=torch.uint8)
        self._used = _SCRATCH
        self._gaps: list[tuple[int, int]] = []
        self.buffers: list[Buffer] = []
        self._saved: torch.Tensor | None = None

    @property
    def path(self) -> str:
        """The arena as a file that the worker can open."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def dump(self, path: Path) -> int:
        """Write the memory in use, arguments included, to a file; its size in bytes."""
        size = -(-(self._used + _RED_ZONE) // 4096) * 4096
        path.write_bytes(ctypes.string_at(self.base, size))
        return size

    def close(self) -> None:
        """Unmap it; the tensors in it must not be used afterwards."""
        if self._file >= 0:
            self._libc.munmap(self.base, self.nbytes)
            os.close(self._file)
            self._file = -1

    def buffer(
        self,
        label: str,
        value: torch.Tensor | Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        rank: int = 0,
        peers: bool = False,
        read_only: bool = False,
        fields: Sequence[tuple[str, int, int]] = (),
        poison: int = 0xFF,
    ) -> Buffer:
        """A new buffer: a copy of a tensor, or of a shape and `dtype` and filled with the byte `poison`.

        Raises:
            EngineError: the arena is full.
        """
        if isinstance(value, torch.Tensor):
            shape, kind = tuple(value.shape), value.dtype
        else:
            shape, kind = tuple(value), dtype if dtype is not None else torch.uint8
        size = math.prod(shape) * kind.itemsize
        start = -(-(self._used + _RED_ZONE) // _ALIGNMENT) * _ALIGNMENT
        end = start + size
        if end + _RED_ZONE > self.nbytes:
            raise EngineError("simulator", f"{label}: {size} bytes", f"{self.nbytes} bytes in all", "Make it larger.")
        self._bytes[self._used : start] = _CANARY
        self._bytes[end : end + _RED_ZONE] = _CANARY
        self._gaps.append((self._used, start))
        self._used = end
        view = self._bytes[start : max(end, start + 1)]
        if isinstance(value, torch.Tensor):
            tensor = view[:size].view(kind).view(shape)
            tensor.copy_(value)
        else:
            view.fill_(poison)
            tensor = view[:size].view(kind).view(shape)
        buffer = Buffer(label.replace(" ", "_"), tensor, rank, peers, read_only, tuple(fields))
        self.buffers.append(buffer)
        self._saved = None
        return buffer

    def scratch(self, arguments: Sequence[bytes]) -> list[int]:
        """Write kernel arguments, each 64-byte aligned, over the last call's; their addresses."""
        addresses = []
        place = 0
        for data in arguments:
            if place + len(data) > _SCRATCH:
                raise EngineError("simulator", "too many kernel arguments", f"{_SCRATCH} bytes", "")
            ctypes.memmove(self.base + place, data, len(data))
            addresses.append(self.base + place)
            place += -(-max(len(data), 1) // 64) * 64
        return addresses

    def save(self) -> None:
        """Remember the contents of all buffers for `restore`."""
        self._saved = self._bytes[_SCRATCH : self._used + _RED_ZONE].clone()

    def restore(self) -> None:
        """Put back what `save` remembered."""
        if self._saved is None:
            self.save()
        else:
            self._bytes[_SCRATCH : self._used + _RED_ZONE].copy_(self._saved)

    def damage(self) -> list[str]:
        """Where something wrote outside the buffers since they were made, as sentences."""
        found = []
        gaps = [*self._gaps, (self._used, self._used + _RED_ZONE)] if self.buffers else []
        for i, (start, end) in enumerate(gaps):
            bad = (self._bytes[start:end] != _CANARY).nonzero()
            if bad.numel():
                near = self.buffers[i - 1].label if i else "the arguments"
                found.append(f"memory {int(bad[0])} bytes past {near} was written")
                self._bytes[start:end] = _CANARY
        return found


def encode_tensor_map(spec: TensorMapSpec) -> bytes:
    """The simulator's `CUtensorMap` of `spec`, with the checks of ``cuTensorMapEncodeTiled``.

    Raises:
        EngineError: what the driver would refuse, or a rank, element or swizzle that the simulator does not have.
    """
    rank = len(spec.dims)
    size = _ELEMENT_BYTES.get(spec.element, 0)
    inner = spec.box[0] * size
    wrong = None
    if rank not in (2, 3) or len(spec.box) != rank or len(spec.strides) != rank - 1:
        wrong = f"rank {rank} with {len(spec.box)} box sizes and {len(spec.strides)} strides"
    elif not size:
        wrong = f"element {spec.element!r}"
    elif spec.swizzle not in (0, 128) or (spec.swizzle and inner > spec.swizzle):
        wrong = f"swizzle {spec.swizzle} with rows of {inner} bytes"
    elif spec.pointer % 16 or any(s % 16 or not 0 < s < 1 << 40 for s in spec.strides):
        wrong = f"pointer {spec.pointer:#x}, strides {spec.strides}: not multiples of 16"
    elif any(not 0 < d <= 1 << 32 for d in spec.dims) or any(not 0 < b <= 256 for b in spec.box) or inner % 16:
        wrong = f"dims {spec.dims}, box {spec.box}"
    if wrong:
        raise EngineError("cuTensorMapEncodeTiled", wrong, "a map that the driver accepts", "Check the plan.")
    pad = 3 - rank
    packed = struct.pack(
        "<QQ3Q2Q3I3I",
        _MAP_MAGIC,
        spec.pointer,
        *spec.dims,
        *(1,) * pad,
        *spec.strides,
        *(0,) * pad,
        *spec.box,
        *(1,) * pad,
        size,
        spec.swizzle,
        rank,
    )
    return packed.ljust(TENSOR_MAP_BYTES, b"\0")
