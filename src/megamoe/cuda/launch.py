"""Launching a compiled kernel with little CPU time: everything that can be prepared once is prepared once.

A `Kernel` owns one launch configuration and one block of arguments. A call writes the arguments that changed into the
block, then `Kernel.launch`. Nothing is allocated and nothing synchronises, so a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from megamoe.cuda.driver import TENSOR_MAP_BYTES, Driver, LaunchConfig, TensorMapSpec
from megamoe.cuda.toolchain import Compiled
from megamoe.errors import EngineError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Kernel",
    "Library",
    "TensorMap",
    "TensorMaps",
    "aligned",
    "current_stream_getter",
    "needs_context",
    "packer",
    "raw_stream",
]

_MAX_GRID: Final = 2**31 - 1
_OWN_STREAMS: Final = (0, 1, 2)
"""Stream handles that mean "a default stream of the current context", not a stream that knows its context."""

S = TypeVar("S", bound=ctypes.Structure)


class TensorMap(ctypes.Structure):
    """Host image of a ``CUtensorMap`` parameter."""

    _fields_ = (("opaque", ctypes.c_ubyte * TENSOR_MAP_BYTES),)

    def set(self, encoded: bytes) -> None:
        """Take over what `TensorMaps.tiled` returned."""
        ctypes.memmove(ctypes.addressof(self), encoded, TENSOR_MAP_BYTES)


def aligned(structure: type[S], alignment: int = 64) -> S:
    """A zeroed instance of `structure` at an aligned address."""
    raw = (ctypes.c_ubyte * (ctypes.sizeof(structure) + alignment))()
    return structure.from_buffer(raw, -ctypes.addressof(raw) % alignment)


def raw_stream(stream: torch.cuda.Stream | int | None, ordinal: int) -> int:
    """Handle of `stream`; None is torch's current stream of GPU `ordinal`."""
    if isinstance(stream, int):
        return stream
    return current_stream_getter()(ordinal) if stream is None else int(stream.cuda_stream)


@functools.lru_cache(maxsize=1)
def current_stream_getter() -> Callable[[int], int]:
    """A function from a GPU's ordinal to the handle of torch's current stream there."""
    import torch

    # The public torch.cuda.current_stream makes a Stream object each time, which costs about as much as a launch.
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick if quick is not None else lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream)


def needs_context(stream: int) -> bool:
    """Whether a launch into `stream` goes to the current context's GPU: default streams do not know theirs."""
    return stream in _OWN_STREAMS


def packer(structure: ctypes.Structure, first: str | None = None, last: str | None = None) -> Callable[..., None]:
    """A function that writes the fields of `structure` from `first` to `last`, plain numbers, at once.

    Much faster than one by one. By default all fields.
    """
    names = [field[0] for field in structure._fields_]
    begin = 0 if first is None else names.index(first)
    end = len(names) if last is None else names.index(last) + 1
    # ctypes' letter of a plain type is struct's, and "@" aligns as C does, from an aligned start.
    layout = struct.Struct("@" + "".join(str(vars(field[1])["_type_"]) for field in structure._fields_[begin:end]))
    at = getattr(type(structure), names[begin]).offset
    return functools.partial(layout.pack_into, memoryview(structure).cast("B"), at)


class Library:
    """A cubin loaded by the driver. Close it only when none of its kernels can be running."""

    def __init__(self, driver: Driver, compiled: Compiled) -> None:
        self.driver = driver
        self.compiled = compiled
        self._handle: int | None = driver.load(compiled.cubin)

    def kernel(self, name: str) -> int:
        """Handle of the ``extern "C"`` kernel `name`. Raises EngineError when there is none or after `close`."""
        if self._handle is None:
            raise EngineError("library", "closed", "an open library", "Load the kernel again.")
        return self.driver.kernel(self._handle, name)

    def close(self) -> None:
        """Unload; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.driver.unload(handle)


class Kernel:
    """One kernel of a library on one GPU, ready to launch.

    Args:
        library: where it is.
        name: its ``extern "C"`` name.
        ordinal: the GPU; the kernel is loaded onto it here and now.
        config: threads, shared memory, cluster and launch attributes.
        arguments: one ctypes structure per kernel parameter, laid out as in C++; make them with `aligned`. The caller
            keeps writing into them between launches, under `lock` when several threads share the kernel.

    Raises:
        EngineError: no such kernel; a structure whose size is not the parameter's; more threads or shared memory than
            the GPU has.
    """

    def __init__(
        self, library: Library, name: str, ordinal: int, config: LaunchConfig, arguments: Sequence[ctypes.Structure]
    ) -> None:
        self.driver = library.driver
        self.name = name
        self.ordinal = ordinal
        self.config = config
        self.lock = threading.Lock()
        self._library = library  # keeps the code loaded
        self._handle = library.kernel(name)
        given = [ctypes.sizeof(a) for a in arguments]
        wanted = self.driver.parameter_sizes(self._handle, ordinal)
        if given != wanted:
            raise EngineError(
                f"arguments of {name}",
                f"structures of {given} bytes",
                f"{wanted} bytes, as the kernel declares them",
                "The host's structure and the kernel's have drifted apart.",
            )
        most = self.driver.device(ordinal).shared_bytes_per_block
        if config.dynamic_shared > most:
            raise EngineError(
                f"shared memory of {name}", f"{config.dynamic_shared} bytes", f"{most} bytes", "Pick a smaller plan."
            )
        self.driver.make_resident(self._handle, ordinal, config.dynamic_shared)
        self._arguments = tuple(arguments)
        self._table = (ctypes.c_void_p * max(1, len(arguments)))(*(ctypes.addressof(a) for a in arguments))
        self._address = ctypes.addressof(self._table)
        self._prepared = self.driver.prepare(config, self._handle)
        self.launch_here: Callable[[int, int], None] = functools.partial(
            self.driver.launch, self._prepared, self._address
        )
        """``launch_here(grid, stream)``: `launch` for a caller who launches several kernels. The grid is legal, and the
        GPU's context is current where it must be (`needs_context`)."""

    def launch(self, grid: int, stream: int) -> None:
        """Launch `grid` blocks with the arguments as they are now; they are copied before this returns.

        Args:
            grid: number of blocks, a multiple of the cluster size; 0 launches nothing.
            stream: handle of a stream of this kernel's GPU (`raw_stream`).

        Raises:
            EngineError: an impossible grid, or what the driver says.
        """
        if grid == 0:
            return
        if not 0 < grid <= _MAX_GRID or grid % self.config.cluster:
            raise EngineError(
                f"grid of {self.name}",
                grid,
                f"0 to {_MAX_GRID}, a multiple of {self.config.cluster}",
                "Check the plan.",
            )
        if needs_context(stream) and not self.driver.is_current(self.ordinal):
            with self.driver.use_device(self.ordinal):
                self.driver.launch(self._prepared, self._address, grid, stream)
        else:
            self.driver.launch(self._prepared, self._address, grid, stream)

    def max_active_clusters(self) -> int:
        """Clusters (blocks, without clusters) of this kernel that are resident on its GPU at once."""
        return self.driver.max_active_clusters(self.config, self._handle, self.ordinal)


class TensorMaps:
    """Encoded tensor maps by what they describe: encoding takes microseconds, a look-up does not.

    Args:
        driver: encodes.
        capacity: maps kept; the one used longest ago goes first, so that changing pointers cannot fill the memory.
    """

    def __init__(self, driver: Driver, capacity: int = 256) -> None:
        self._driver = driver
        self._capacity = capacity
        self._known: OrderedDict[TensorMapSpec, bytes] = OrderedDict()

    def tiled(self, spec: TensorMapSpec) -> bytes:
        """The encoded map of `spec`, for `TensorMap.set`. Raises EngineError when the driver refuses the shape."""
        encoded = self._known.get(spec)
        if encoded is None:
            encoded = self._known[spec] = self._driver.encode_tensor_map(spec)
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(spec)
        return encoded
