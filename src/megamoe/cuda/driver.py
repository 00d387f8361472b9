"""The only module that talks to libcuda.

Everything above it uses the small `Driver` protocol, so that launch code, `doctor` and every error path run in tests
with a fake driver and no GPU. Handles are plain integers. Errors are `EngineError`s that name the call and CUDA's own
error name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from megamoe.errors import EngineError

__all__ = [
    "MINIMUM_CUDA",
    "TENSOR_MAP_BYTES",
    "DeviceInfo",
    "Driver",
    "LaunchConfig",
    "Libcuda",
    "PeerInfo",
    "TensorMapSpec",
    "open_driver",
]

MINIMUM_CUDA: Final = 13000
"""Smallest CUDA version of the driver, as ``cuDriverGetVersion`` counts: cubins of NVRTC 13 need driver 580."""

TENSOR_MAP_BYTES: Final = 128


@dataclass(frozen=True)
class DeviceInfo:
    """Facts about one GPU. Plans may use these, never the name."""

    ordinal: int
    name: str
    uuid: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_block: int
    """Largest dynamic shared memory of one block, after the opt-in."""
    pci: str

    @property
    def arch(self) -> str:
        """Compilation target of this GPU, whether or not there are kernels for it (``"sm_90a"``)."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@dataclass(frozen=True)
class PeerInfo:
    """Whether one GPU can read and write another's memory, and how good the link is."""

    source: int
    target: int
    access: bool
    atomics: bool
    """Native atomics over the link: true over NVLink, false over PCIe."""
    performance_rank: int


@dataclass(frozen=True)
class LaunchConfig:
    """Shape of a launch. Grid and stream change from call to call; the rest belongs to the kernel."""

    threads: int
    dynamic_shared: int = 0
    cluster: int = 1
    dependent: bool = False
    """Programmatic dependent launch: may start before the kernel before it in the stream has ended."""
    cooperative: bool = False
    """All blocks are resident at once, or the launch is refused."""


@dataclass(frozen=True)
class TensorMapSpec:
    """A tiled tensor map: `dims` innermost first; `strides` in bytes, of all dimensions but the innermost.

    `swizzle` is 0, 32, 64 or 128 bytes; `element` is "uint8", "bfloat16" or "float32".
    """

    pointer: int
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


class Driver(Protocol):
    """What the host side needs of libcuda. `device_type` is torch's name of the memory that kernels work on."""

    device_type: str

    def version(self) -> int: ...

    def device_count(self) -> int: ...

    def device(self, ordinal: int) -> DeviceInfo: ...

    def peer(self, source: int, target: int) -> PeerInfo: ...

    def enable_peer(self, source: int, target: int) -> None: ...

    def allocate(self, ordinal: int, nbytes: int) -> int: ...

    def free(self, ordinal: int, pointer: int) -> None: ...

    def store_words(self, ordinal: int, pointer: int, words: Sequence[int]) -> None: ...

    def load(self, cubin: bytes) -> int: ...

    def unload(self, library: int) -> None: ...

    def kernel(self, library: int, name: str) -> int: ...

    def parameter_sizes(self, kernel: int, ordinal: int) -> list[int]: ...

    def make_resident(self, kernel: int, ordinal: int, dynamic_shared: int) -> None: ...

    def prepare(self, config: LaunchConfig, kernel: int) -> Any: ...

    def launch(self, prepared: Any, arguments: int, grid: int, stream: int) -> None: ...

    def max_active_clusters(self, config: LaunchConfig, kernel: int, ordinal: int) -> int: ...

    def encode_tensor_map(self, spec: TensorMapSpec) -> bytes: ...

    def is_current(self, ordinal: int) -> bool: ...

    def use_device(self, ordinal: int) -> contextlib.AbstractContextManager[None]: ...


class _Prepared:
    """A launch configuration that is patched in place, and what it holds now."""

    __slots__ = ("config", "function", "grid", "stream")

    def __init__(self, config: Any, function: Any) -> None:
        self.config = config
        self.function = function
        self.grid = 1
        self.stream = 0


class Libcuda:
    """The real driver, through ``cuda.bindings.driver``. Make it with `open_driver`."""

    device_type = "cuda"

    def __init__(self, bindings: Any) -> None:
        self._d = bindings
        self._success = bindings.CUresult.CUDA_SUCCESS
        self._ok = int(self._success)
        self._contexts: dict[int, tuple[Any, int]] = {}
        self._attribute = bindings.CUdevice_attribute
        self._check("cuInit", bindings.cuInit(0))

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != self._ok:
            name = str(getattr(code, "name", code))
            raise EngineError(call, name, "CUDA_SUCCESS", _way_out(name))
        return values[0] if len(values) == 1 else values

    def version(self) -> int:
        """CUDA version of the driver: 1000 * major + 10 * minor."""
        return int(self._check("cuDriverGetVersion", self._d.cuDriverGetVersion()))

    def device_count(self) -> int:
        """Number of visible GPUs."""
        return int(self._check("cuDeviceGetCount", self._d.cuDeviceGetCount()))

    def _device_attribute(self, device: Any, name: str) -> int:
        attribute = getattr(self._attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._check("cuDeviceGetAttribute", self._d.cuDeviceGetAttribute(attribute, device)))

    def device(self, ordinal: int) -> DeviceInfo:
        """Facts about visible GPU `ordinal`."""
        d = self._d
        device = self._check("cuDeviceGet", d.cuDeviceGet(ordinal))

        def fact(name: str) -> int:
            return self._device_attribute(device, name)

        raw = bytes(self._check("cuDeviceGetUuid", d.cuDeviceGetUuid(device)).bytes)
        return DeviceInfo(
            ordinal=ordinal,
            name=self._check("cuDeviceGetName", d.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
            uuid="GPU-" + "-".join(raw[a:b].hex() for a, b in ((0, 4), (4, 6), (6, 8), (8, 10), (10, 16))),
            compute_capability=(fact("COMPUTE_CAPABILITY_MAJOR"), fact("COMPUTE_CAPABILITY_MINOR")),
            multiprocessors=fact("MULTIPROCESSOR_COUNT"),
            memory_bytes=int(self._check("cuDeviceTotalMem", d.cuDeviceTotalMem(device))),
            l2_bytes=fact("L2_CACHE_SIZE"),
            shared_bytes_per_block=fact("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            pci=f"{fact('PCI_DOMAIN_ID'):04x}:{fact('PCI_BUS_ID'):02x}:{fact('PCI_DEVICE_ID'):02x}.0",
        )

    def peer(self, source: int, target: int) -> PeerInfo:
        """Link from GPU `source` to another GPU `target`."""
        d, kind = self._d, self._d.CUdevice_P2PAttribute
        a, b = (self._check("cuDeviceGet", d.cuDeviceGet(i)) for i in (source, target))

        def fact(name: str) -> int:
            attribute = getattr(kind, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
            return int(self._check("cuDeviceGetP2PAttribute", d.cuDeviceGetP2PAttribute(attribute, a, b)))

        access = bool(self._check("cuDeviceCanAccessPeer", d.cuDeviceCanAccessPeer(a, b)))
        return PeerInfo(
            source, target, access, bool(fact("NATIVE_ATOMIC_SUPPORTED")), fact("PERFORMANCE_RANK") if access else 0
        )

    def enable_peer(self, source: int, target: int) -> None:
        """Let kernels of GPU `source` read and write the memory of GPU `target`; again does nothing."""
        with self.use_device(source):
            result = self._d.cuCtxEnablePeerAccess(self._context(target)[0], 0)
        if int(result[0]) != int(self._d.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
            self._check("cuCtxEnablePeerAccess", result)

    def allocate(self, ordinal: int, nbytes: int) -> int:
        """Address of `nbytes` of GPU `ordinal`; not by torch, whose expandable segments are not mapped for peers."""
        with self.use_device(ordinal):
            return int(self._check("cuMemAlloc", self._d.cuMemAlloc(nbytes)))

    def free(self, ordinal: int, pointer: int) -> None:
        """Free what `allocate` returned."""
        with self.use_device(ordinal):
            self._check("cuMemFree", self._d.cuMemFree(pointer))

    def store_words(self, ordinal: int, pointer: int, words: Sequence[int]) -> None:
        """Write 32-bit `words` to memory that GPU `ordinal` reaches, on a stream of its own, and wait for it."""
        d = self._d
        with self.use_device(ordinal):
            stream = self._check("cuStreamCreate", d.cuStreamCreate(d.CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                for i, word in enumerate(words):
                    self._check("cuMemsetD32Async", d.cuMemsetD32Async(pointer + 4 * i, word, 1, stream))
                self._check("cuStreamSynchronize", d.cuStreamSynchronize(stream))
            finally:
                self._check("cuStreamDestroy", d.cuStreamDestroy(stream))

    def load(self, cubin: bytes) -> int:
        """Load a cubin for every GPU it fits; the handle is for `kernel` and `unload`."""
        return int(self._check("cuLibraryLoadData", self._d.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)))

    def unload(self, library: int) -> None:
        """Unload what `load` returned; no kernel of it may be running."""
        self._check("cuLibraryUnload", self._d.cuLibraryUnload(self._d.CUlibrary(library)))

    def kernel(self, library: int, name: str) -> int:
        """Handle of the ``extern "C"`` kernel `name`."""
        found = self._d.cuLibraryGetKernel(self._d.CUlibrary(library), name.encode())
        return int(self._check("cuLibraryGetKernel", found))

    def parameter_sizes(self, kernel: int, ordinal: int) -> list[int]:
        """Bytes of each parameter of `kernel`, in order, as loaded on GPU `ordinal`."""
        sizes: list[int] = []
        invalid = int(self._d.CUresult.CUDA_ERROR_INVALID_VALUE)
        with self.use_device(ordinal):
            while True:
                found = self._d.cuKernelGetParamInfo(self._d.CUkernel(kernel), len(sizes))
                if int(found[0]) == invalid:  # past the last one
                    return sizes
                sizes.append(int(self._check("cuKernelGetParamInfo", found)[1]))

    def make_resident(self, kernel: int, ordinal: int, dynamic_shared: int) -> None:
        """Load `kernel` onto GPU `ordinal` now, allowed to use that many bytes of dynamic shared memory.

        Residency matters: a kernel that is loaded lazily at its first launch can wait for a peer that spins.
        """
        d, kind = self._d, self._d.CUfunction_attribute
        handle, device = d.CUkernel(kernel), self._check("cuDeviceGet", d.cuDeviceGet(ordinal))
        limit = kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # The limit belongs to the code, which several launch configurations may share: it only ever rises.
        if dynamic_shared > self._check("cuKernelGetAttribute", d.cuKernelGetAttribute(limit, handle, device)):
            self._check("cuKernelSetAttribute", d.cuKernelSetAttribute(limit, dynamic_shared, handle, device))
        with self.use_device(ordinal):
            self._check("cuKernelGetFunction", d.cuKernelGetFunction(handle))

    def prepare(self, config: LaunchConfig, kernel: int) -> _Prepared:
        """A launch of `kernel` to be used again and again; `launch` patches the grid and the stream."""
        d, kind = self._d, self._d.CUlaunchAttributeID
        c = d.CUlaunchConfig()
        c.gridDimX, c.gridDimY, c.gridDimZ = 1, 1, 1
        c.blockDimX, c.blockDimY, c.blockDimZ = config.threads, 1, 1
        c.sharedMemBytes = config.dynamic_shared
        attributes = []

        def add(which: Any) -> Any:
            attribute = d.CUlaunchAttribute()
            attribute.id = which
            attributes.append(attribute)
            return attribute

        value = d.CUlaunchAttributeValue
        if config.cluster > 1:
            v = value()
            v.clusterDim.x, v.clusterDim.y, v.clusterDim.z = config.cluster, 1, 1
            add(kind.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).value = v
        if config.dependent:
            v = value()
            v.programmaticStreamSerializationAllowed = 1
            add(kind.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).value = v
        if config.cooperative:
            v = value()
            v.cooperative = 1
            add(kind.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).value = v
        if attributes:
            c.attrs = attributes
        c.numAttrs = len(attributes)
        # A kernel handle is taken in place of a function: CUDA finds the function of the stream's context.
        return _Prepared(c, d.CUfunction(kernel))

    def launch(self, prepared: _Prepared, arguments: int, grid: int, stream: int) -> None:
        """Launch `grid` blocks; `arguments` is the address of an array of addresses, one per kernel parameter."""
        if prepared.grid != grid:
            prepared.grid = prepared.config.gridDimX = grid
        if prepared.stream != stream:
            prepared.stream = prepared.config.hStream = stream
        result = self._d.cuLaunchKernelEx(prepared.config, prepared.function, arguments, 0)
        if result[0] is not self._success:
            self._check("cuLaunchKernelEx", result)

    def max_active_clusters(self, config: LaunchConfig, kernel: int, ordinal: int) -> int:
        """How many clusters (blocks, without clusters) of `kernel` GPU `ordinal` holds at once."""
        d = self._d
        with self.use_device(ordinal):
            if config.cluster > 1:
                prepared = self.prepare(config, kernel)
                prepared.config.gridDimX = config.cluster
                found = d.cuOccupancyMaxActiveClusters(prepared.function, prepared.config)
                return int(self._check("cuOccupancyMaxActiveClusters", found))
            found = d.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                d.CUfunction(kernel), config.threads, config.dynamic_shared
            )
            per_sm = int(self._check("cuOccupancyMaxActiveBlocksPerMultiprocessor", found))
        return per_sm * self.device(ordinal).multiprocessors

    def encode_tensor_map(self, spec: TensorMapSpec) -> bytes:
        """The 128 bytes that a kernel takes as a ``CUtensorMap`` parameter."""
        d = self._d
        kind = getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{spec.element.upper()}")
        swizzle = "NONE" if spec.swizzle == 0 else f"{spec.swizzle}B"
        found = d.cuTensorMapEncodeTiled(
            kind,
            len(spec.dims),
            spec.pointer,
            [d.cuuint64_t(v) for v in spec.dims],
            [d.cuuint64_t(v) for v in spec.strides],
            [d.cuuint32_t(v) for v in spec.box],
            [d.cuuint32_t(1) for _ in spec.dims],
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(d.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return ctypes.string_at(int(self._check("cuTensorMapEncodeTiled", found).getPtr()), TENSOR_MAP_BYTES)

    def is_current(self, ordinal: int) -> bool:
        """Whether the primary context of GPU `ordinal` is current in this thread."""
        (code, context) = self._d.cuCtxGetCurrent()
        if code is not self._success:
            self._check("cuCtxGetCurrent", (code, context))
        return int(context) == self._context(ordinal)[1]

    def _context(self, ordinal: int) -> tuple[Any, int]:
        found = self._contexts.get(ordinal)
        if found is None:
            device = self._check("cuDeviceGet", self._d.cuDeviceGet(ordinal))
            context = self._check("cuDevicePrimaryCtxRetain", self._d.cuDevicePrimaryCtxRetain(device))
            found = self._contexts[ordinal] = (context, int(context))
        return found

    @contextlib.contextmanager
    def use_device(self, ordinal: int) -> Iterator[None]:
        """Make the primary context of GPU `ordinal` (the one that torch uses) current for a while."""
        self._check("cuCtxPushCurrent", self._d.cuCtxPushCurrent(self._context(ordinal)[0]))
        try:
            yield
        finally:
            self._check("cuCtxPopCurrent", self._d.cuCtxPopCurrent())


def _way_out(name: str) -> str:
    hints: Sequence[tuple[str, str]] = (
        ("NO_DEVICE", "No GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES."),
        ("NO_BINARY_FOR_GPU", "The kernel was compiled for another GPU: compile it for DeviceInfo.arch."),
        ("COOPERATIVE_LAUNCH_TOO_LARGE", "Launch fewer blocks: all of them must be resident at once."),
        ("OUT_OF_RESOURCES", "Too many threads, registers or bytes of shared memory for this GPU."),
        ("INVALID_CONTEXT", "No CUDA context is current in this thread: use torch.cuda.set_device first."),
        ("ILLEGAL_ADDRESS", "An earlier kernel broke the context: restart the process."),
        ("SYSTEM_DRIVER_MISMATCH", "The kernel module and libcuda differ: reboot or reinstall the driver."),
        ("OUT_OF_MEMORY", "Free GPU memory, or ask for less."),
    )
    return next((text for part, text in hints if part in name), "")


@functools.lru_cache(maxsize=1)
def open_driver() -> Libcuda:
    """Load and initialise libcuda; the same object every time.

    Raises:
        EngineError: no cuda-bindings, no libcuda, no GPU, or a driver older than CUDA 13; the message says which and
            what to do. Nothing is remembered of a failure.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise EngineError(
            "driver", f"no cuda-bindings ({error})", "cuda-bindings 13", "pip install 'cuda-bindings>=13,<14'"
        ) from error
    try:
        version = bindings.cuDriverGetVersion()
    except Exception as error:  # the bindings load libcuda at the first call, with exceptions of their own
        raise EngineError(
            "driver", "no libcuda", "an NVIDIA driver", "Install driver 580 or newer, or use the CPU engine."
        ) from error
    if int(version[0]) == 0 and version[1] < MINIMUM_CUDA:
        raise EngineError(
            "driver",
            f"CUDA {version[1] // 1000}.{version[1] % 1000 // 10}",
            f"CUDA {MINIMUM_CUDA // 1000} or newer (driver 580 or newer)",
            "Update the NVIDIA driver, or use the CPU engine.",
        )
    return Libcuda(bindings)
