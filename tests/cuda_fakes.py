"""A driver without a GPU: it checks what it is given, remembers what was launched, and can run a kernel in Python."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megamoe.cuda.driver import DeviceInfo, LaunchConfig, PeerInfo, TensorMapSpec
from megamoe.errors import EngineError
from megamoe.formats.fp8_block import quantize_activations

GIB = 2**30


def device_info(ordinal: int = 0, capability: tuple[int, int] = (9, 0), name: str = "Fake H200") -> DeviceInfo:
    return DeviceInfo(ordinal, name, f"GPU-{ordinal}", capability, 132, 141 * GIB, 60 << 20, 227 << 10, "0000:00:00.0")


@dataclass
class Launch:
    """One launch as the driver saw it; `parameters` are copies of the kernel's parameters."""

    kernel: str
    config: LaunchConfig
    grid: int
    stream: int
    device: int | None
    parameters: list[bytes]


@dataclass
class FakeDriver:
    """A `megamoe.cuda.driver.Driver`. `sizes` maps a kernel's name to its parameters' sizes."""

    sizes: dict[str, list[int]]
    run: Callable[[Launch], None] | None = None
    devices: list[DeviceInfo] = field(default_factory=lambda: [device_info()])
    cuda: int = 13000
    peers: dict[tuple[int, int], PeerInfo] = field(default_factory=dict)
    device_type: str = "cpu"
    current: int | None = 0
    launches: list[Launch] = field(default_factory=list)
    loaded: dict[int, bytes] = field(default_factory=dict)
    kernels: dict[int, str] = field(default_factory=dict)
    resident: list[tuple[str, int, int]] = field(default_factory=list)
    encoded: list[TensorMapSpec] = field(default_factory=list)
    enabled: list[tuple[int, int]] = field(default_factory=list)

    def version(self) -> int:
        return self.cuda

    def device_count(self) -> int:
        return len(self.devices)

    def device(self, ordinal: int) -> DeviceInfo:
        if not 0 <= ordinal < len(self.devices):
            raise EngineError("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE", "CUDA_SUCCESS")
        return self.devices[ordinal]

    def peer(self, source: int, target: int) -> PeerInfo:
        return self.peers.get((source, target), PeerInfo(source, target, True, True, 1))

    def enable_peer(self, source: int, target: int) -> None:
        self.enabled.append((source, target))

    def allocate(self, ordinal: int, nbytes: int) -> int:
        raise NotImplementedError

    def free(self, ordinal: int, pointer: int) -> None:
        raise NotImplementedError

    def store_words(self, ordinal: int, pointer: int, words: Sequence[int]) -> None:
        raise NotImplementedError

    def load(self, cubin: bytes) -> int:
        handle = 1000 + len(self.loaded)
        self.loaded[handle] = cubin
        return handle

    def unload(self, library: int) -> None:
        del self.loaded[library]

    def kernel(self, library: int, name: str) -> int:
        if name.encode() + b"\0" not in self.loaded[library]:
            raise EngineError("cuLibraryGetKernel", "CUDA_ERROR_NOT_FOUND", "CUDA_SUCCESS")
        handle = 2000 + len(self.kernels)
        self.kernels[handle] = name
        return handle

    def parameter_sizes(self, kernel: int, ordinal: int) -> list[int]:
        return self.sizes[self.kernels[kernel]]

    def make_resident(self, kernel: int, ordinal: int, dynamic_shared: int) -> None:
        self.resident.append((self.kernels[kernel], ordinal, dynamic_shared))

    def prepare(self, config: LaunchConfig, kernel: int) -> tuple[LaunchConfig, str]:
        return config, self.kernels[kernel]

    def launch(self, prepared: tuple[LaunchConfig, str], arguments: int, grid: int, stream: int) -> None:
        config, name = prepared
        sizes = self.sizes[name]
        table = (ctypes.c_void_p * len(sizes)).from_address(arguments)
        copies = [ctypes.string_at(address, size) for address, size in zip(table, sizes, strict=True)]
        self.launches.append(Launch(name, config, grid, stream, self.current, copies))
        if self.run is not None:
            self.run(self.launches[-1])

    def max_active_clusters(self, config: LaunchConfig, kernel: int, ordinal: int) -> int:
        return self.devices[ordinal].multiprocessors // config.cluster

    def encode_tensor_map(self, spec: TensorMapSpec) -> bytes:
        self.encoded.append(spec)
        return len(self.encoded).to_bytes(128, "little")

    def is_current(self, ordinal: int) -> bool:
        return self.current == ordinal

    @contextlib.contextmanager
    def use_device(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        try:
            yield
        finally:
            self.current = before


def memory(address: int, nbytes: int) -> torch.Tensor:
    """Bytes at `address` as a tensor that shares them."""
    return torch.frombuffer((ctypes.c_ubyte * max(nbytes, 1)).from_address(address), dtype=torch.uint8)[:nbytes]


def run_staging(scale_format: str, hidden: int) -> Callable[[Launch], None]:
    """What the kernel ``stage`` does, by the codec, with the addresses, strides and counts that it is given."""

    def run(launch: Launch) -> None:
        u64 = [int.from_bytes(launch.parameters[0][i : i + 8], "little", signed=True) for i in range(0, 64, 8)]
        x, q, s, count, x_stride, q_stride, s_stride, rows = u64
        rows &= 0xFFFFFFFF
        written = rows
        if count:
            written = min(max(int(memory(count, 4).view(torch.int32)), 0), rows)
        for row in range(written):
            source = memory(x + row * x_stride, 2 * hidden).view(torch.bfloat16).view(1, hidden)
            got_q, got_s = quantize_activations(source, scale_format)
            memory(q + row * q_stride, hidden).copy_(got_q.view(torch.uint8)[0])
            memory(s + row * s_stride, 4 * (hidden // 128)).copy_(got_s.view(torch.uint8)[0])

    return run
