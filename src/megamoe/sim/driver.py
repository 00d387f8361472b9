"""The simulator behind the `Driver` protocol: host code that launches kernels runs unchanged, on memory of an arena.

Launches are collected; `SimDriver.run` runs all of them at once, each on its rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megamoe.cuda.driver import DeviceInfo, LaunchConfig, PeerInfo, TensorMapSpec
from megamoe.cuda.report import Report as CompilerReport
from megamoe.cuda.toolchain import Compiled, Job
from megamoe.errors import EngineError
from megamoe.sim.build import Kernel
from megamoe.sim.memory import encode_tensor_map
from megamoe.sim.report import Report
from megamoe.sim.simulation import Launch, Simulation

__all__ = ["SimDriver", "compiled"]

_SHARED_BYTES = 232448


def compiled(job: Job) -> Compiled:
    """Stands for a cubin of `job`; only `SimDriver.load` understands it."""
    payload = json.dumps({"source": job.source, "config": dict(job.config)}).encode()
    return Compiled(job.source, job.arch, payload, CompilerReport(), "simulator", "")


@dataclass
class _Loaded:
    kernel: Kernel
    ordinal: int = 0


@dataclass(frozen=True)
class _Pending:
    kernel: Kernel
    config: LaunchConfig
    grid: int
    rank: int
    arguments: list[bytes]


class SimDriver:
    """Simulated GPUs, one per rank unless `rank_of` says otherwise.

    Args:
        simulation: memory and worker.
        multiprocessors: SMs that each GPU claims to have.
        devices: number of GPUs.
        rank_of: rank of a launch from (GPU, stream handle); by default the GPU.
    """

    device_type = "cpu"

    def __init__(
        self,
        simulation: Simulation,
        multiprocessors: int = 4,
        devices: int = 1,
        rank_of: Callable[[int, int], int] = lambda ordinal, stream: ordinal,
    ) -> None:
        self.simulation = simulation
        self._multiprocessors = multiprocessors
        self._devices = devices
        self._rank_of = rank_of
        self._libraries: list[dict[str, Any]] = []
        self._kernels: list[_Loaded] = []
        self._pending: list[_Pending] = []

    def version(self) -> int:
        """As CUDA 13.0."""
        return 13000

    def device_count(self) -> int:
        """GPUs."""
        return self._devices

    def device(self, ordinal: int) -> DeviceInfo:
        """A Hopper GPU of few SMs."""
        name = f"simulated GPU {ordinal}"
        return DeviceInfo(ordinal, name, name, (9, 0), self._multiprocessors, 1 << 30, 1 << 20, _SHARED_BYTES, "")

    def peer(self, source: int, target: int) -> PeerInfo:
        """Every GPU reaches every other one."""
        return PeerInfo(source, target, True, True, 0)

    def enable_peer(self, source: int, target: int) -> None:
        """Every simulated GPU reaches every other one's memory."""

    def allocate(self, ordinal: int, nbytes: int) -> int:
        raise EngineError("allocate", nbytes, "buffers of the simulation", "Use Simulation.buffer.")

    def free(self, ordinal: int, pointer: int) -> None:
        raise EngineError("free", pointer, "buffers of the simulation", "The simulation frees them.")

    def store_words(self, ordinal: int, pointer: int, words: Sequence[int]) -> None:
        """Write to memory of the arena; no kernel runs meanwhile."""
        (ctypes.c_uint32 * len(words)).from_address(pointer)[:] = list(words)

    def load(self, cubin: bytes) -> int:
        """A library made by `compiled`."""
        self._libraries.append(json.loads(cubin))
        return len(self._libraries) - 1

    def unload(self, library: int) -> None:
        """Nothing to give back."""

    def kernel(self, library: int, name: str) -> int:
        """Handle of the kernel `name`."""
        known = self._libraries[library]
        self._kernels.append(_Loaded(Kernel.of(known["source"], name, known["config"])))
        return len(self._kernels) - 1

    def parameter_sizes(self, kernel: int, ordinal: int = 0) -> list[int]:
        """Sizes in bytes of its parameters."""
        return self.simulation.parameter_sizes(self._kernels[kernel].kernel)

    def make_resident(self, kernel: int, ordinal: int, dynamic_shared: int) -> None:
        """Remembers the GPU of the kernel."""
        if dynamic_shared > _SHARED_BYTES:
            raise EngineError("shared memory", dynamic_shared, f"{_SHARED_BYTES} bytes", "Pick a smaller plan.")
        self._kernels[kernel].ordinal = ordinal

    def prepare(self, config: LaunchConfig, kernel: int) -> tuple[LaunchConfig, int]:
        """Nothing to prepare."""
        return config, kernel

    def launch(self, prepared: Any, arguments: int, grid: int, stream: int) -> None:
        """Copy the arguments; the kernel runs in `run`."""
        config, kernel = prepared
        loaded = self._kernels[kernel]
        sizes = self.parameter_sizes(kernel)
        table = (ctypes.c_void_p * len(sizes)).from_address(arguments)
        copies = [ctypes.string_at(table[i] or 0, size) for i, size in enumerate(sizes)]
        rank = self._rank_of(loaded.ordinal, stream)
        self._pending.append(_Pending(loaded.kernel, config, grid, rank, copies))

    def max_active_clusters(self, config: LaunchConfig, kernel: int, ordinal: int) -> int:
        """As many as the GPU has room for, one CTA an SM."""
        return self._multiprocessors // config.cluster

    def encode_tensor_map(self, spec: TensorMapSpec) -> bytes:
        """The simulator's tensor map."""
        return encode_tensor_map(spec)

    def is_current(self, ordinal: int) -> bool:
        """Contexts do not matter here."""
        return True

    def use_device(self, ordinal: int) -> contextlib.AbstractContextManager[None]:
        """Contexts do not matter here."""
        return contextlib.nullcontext()

    def take(self) -> list[Launch]:
        """The launches collected so far, which are then forgotten."""
        launches = []
        for p in self._pending:
            arguments = [None] * p.rank + [p.arguments]
            config = p.config
            launches.append(
                Launch(
                    p.kernel, p.grid, config.threads, arguments, cluster=config.cluster, shared=config.dynamic_shared
                )
            )
        self._pending.clear()
        return launches

    def run(self, **how: Any) -> Report:
        """Run what was launched since the last call, all at once; arguments of `Simulation.run`."""
        return self.simulation.run(self.take(), **how)
