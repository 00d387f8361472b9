"""The same small kernels on a GPU and in the simulator, outputs compared.

Nothing that the simulator says of a layout or of a primitive is trusted before this passes. A `Case` is one kernel of
few CTAs with its inputs; `conformance_cases.CASES` lists them. The kernel takes its tensor maps first, if it has any,
then one structure of pointers: the inputs and then the outputs, in order.

The two need not be on one machine: `record` writes what an engine computes into a directory, `Recorded` reads it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from megamoe.bench.request import Request, Tick
from megamoe.bench.results import Row
from megamoe.cuda.driver import LaunchConfig, TensorMapSpec, open_driver
from megamoe.cuda.launch import Kernel, Library, TensorMap, aligned, raw_stream
from megamoe.cuda.sources import Config
from megamoe.cuda.toolchain import Job, compile_kernel

if TYPE_CHECKING:
    from megamoe.cuda.driver import Driver
    from megamoe.cuda.toolchain import Compiled

__all__ = [
    "PROTOCOL",
    "Case",
    "Engine",
    "Gpu",
    "MapOf",
    "Recorded",
    "Simulator",
    "cells",
    "compare",
    "digest",
    "job",
    "record",
    "rows",
    "run",
]

PROTOCOL: Final = (
    "each case once on the GPU and once in the simulator (one schedule), outputs poisoned before; exact cases must "
    "agree in every byte, the others within their bound (relative Frobenius)"
)


@dataclass(frozen=True)
class MapOf:
    """A tensor map over a case's tensor; the fields of `TensorMapSpec`, without the pointer."""

    tensor: str
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


@dataclass(frozen=True)
class Case:
    """One kernel with its inputs.

    Attributes:
        name: unique.
        source, entry, config: the kernel, as for `compile_kernel`.
        inputs: makes the input tensors on the CPU, in the order of the kernel's pointers.
        outputs: shapes and dtypes, in the order of the pointers after the inputs; bytes that the kernel does not write
            keep the poison and are compared as well.
        grid, threads, shared, cluster: the launch.
        maps: tensor maps, parameters before the pointers.
        bound: 0 where both engines must agree in every byte (any NaN of a float output like any other), else the
            largest relative Frobenius difference of a float output, NaN and Inf in the same places.
        ignored: outputs that are not compared.
    """

    name: str
    source: str
    entry: str
    inputs: Callable[[], Mapping[str, torch.Tensor]]
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    config: Config = field(default_factory=dict)
    grid: int = 1
    threads: int = 128
    shared: int = 0
    cluster: int = 1
    maps: Sequence[MapOf] = ()
    bound: float = 0.0
    ignored: tuple[str, ...] = ()


POISON: Final = 0xA5
"""Byte that outputs hold before a run."""


def job(case: Case) -> Job:
    """What to compile."""
    return Job(case.source, case.config)


class Engine(Protocol):
    """Runs a case; outputs come back on the CPU."""

    def run(self, case: Case) -> dict[str, torch.Tensor]: ...


def _launch(
    case: Case,
    driver: Driver,
    compiled: Compiled,
    stream: int,
    place: Callable[[str, torch.Tensor, bool], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Put the tensors where `place` says, launch, and return the outputs (not yet computed)."""
    given = dict(case.inputs())
    tensors = {name: place(name, tensor, True) for name, tensor in given.items()}
    for name, (shape, dtype) in case.outputs.items():
        poison = torch.full(shape, POISON, dtype=torch.uint8).repeat_interleave(dtype.itemsize, dim=-1).view(dtype)
        tensors[name] = place(name, poison, False)
    maps = []
    for m in case.maps:
        one = aligned(TensorMap)
        pointer = tensors[m.tensor].data_ptr()
        one.set(driver.encode_tensor_map(TensorMapSpec(pointer, m.element, m.dims, m.strides, m.box, m.swizzle)))
        maps.append(one)

    class Pointers(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_uint64) for name in tensors)

    pointers = aligned(Pointers)
    for name, tensor in tensors.items():
        setattr(pointers, name, tensor.data_ptr())
    config = LaunchConfig(threads=case.threads, dynamic_shared=case.shared, cluster=case.cluster)
    Kernel(Library(driver, compiled), case.entry, 0, config, [*maps, pointers]).launch(case.grid, stream)
    return {name: tensors[name] for name in case.outputs}


class Gpu:
    """GPU 0."""

    def run(self, case: Case) -> dict[str, torch.Tensor]:
        """Compile for the GPU, launch, wait."""
        wanted, driver = job(case), open_driver()
        compiled = compile_kernel(wanted.source, wanted.config, driver.device(0).arch)

        def place(_name: str, tensor: torch.Tensor, _read_only: bool) -> torch.Tensor:
            return tensor.cuda()

        outputs = _launch(case, driver, compiled, raw_stream(None, 0), place)
        torch.cuda.synchronize()
        return {name: tensor.cpu() for name, tensor in outputs.items()}


class Simulator:
    """The simulator, one schedule.

    Args:
        seed: of the schedule.
        checked: with the race checker.
    """

    def __init__(self, seed: int = 1, *, checked: bool = False) -> None:
        self.seed = seed
        self.checked = checked

    def run(self, case: Case) -> dict[str, torch.Tensor]:
        """Raises AssertionError with the report when the simulator finds something."""
        from megamoe.sim.driver import SimDriver, compiled
        from megamoe.sim.simulation import Simulation

        with Simulation() as simulation:

            def place(name: str, tensor: torch.Tensor, read_only: bool) -> torch.Tensor:
                return simulation.buffer(name, tensor, read_only=read_only).tensor

            driver = SimDriver(simulation)
            outputs = _launch(case, driver, compiled(job(case)), 0, place)
            report = driver.run(seed=self.seed, checked=self.checked)
            assert not report.findings, report
            return {name: tensor.clone() for name, tensor in outputs.items()}


class Recorded:
    """What `record` wrote into a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index: dict[str, dict[str, str]] = json.loads((directory / _INDEX).read_text())

    def run(self, case: Case) -> dict[str, torch.Tensor]:
        """Raises KeyError for a case that was not recorded."""
        outputs = {}
        for name, (shape, dtype) in case.outputs.items():
            raw = np.load(self._directory / f"{self._index[case.name][name]}.npy")
            outputs[name] = torch.from_numpy(raw).view(dtype).view(shape)
        return outputs


_INDEX: Final = "index.json"


def record(directory: Path, engine: Engine, cases: Sequence[Case]) -> None:
    """Run `cases` and write the outputs into `directory`, equal ones once."""
    directory.mkdir(parents=True, exist_ok=True)
    index: dict[str, dict[str, str]] = {}
    for case in cases:
        index[case.name] = {}
        for name, tensor in engine.run(case).items():
            key = digest({name: tensor})
            index[case.name][name] = key
            if not (directory / f"{key}.npy").exists():
                np.save(directory / f"{key}.npy", _bytes(tensor).numpy())
    (directory / _INDEX).write_text(json.dumps(index, indent=1))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def digest(outputs: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of all outputs' bytes, in order."""
    total = hashlib.sha256()
    for tensor in outputs.values():
        total.update(_bytes(tensor).numpy().tobytes())
    return total.hexdigest()


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative Frobenius difference of two float tensors; infinite where NaN or Inf are in different places."""
    a, b = a.double(), b.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a[a.isinf()], b[a.isinf()]):
        return float("inf")
    ok = a.isfinite()
    if not torch.equal(ok, b.isfinite()):
        return float("inf")
    distance, size = float((a[ok] - b[ok]).norm()), float(b[ok].norm())
    return distance / size if distance else 0.0


def _different_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    unequal = (_bytes(a) != _bytes(b)).view(-1, a.element_size())
    if a.is_floating_point():
        unequal &= ~(a.float().isnan() & b.float().isnan()).view(-1, 1)
    return int(unequal.sum())


def _ulp(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance of two float32 tensors in units of the last place, where both are finite."""
    ordered = [torch.where(t < 0, -(t & 0x7FFFFFFF), t) for t in (x.view(torch.int32).long() for x in (a, b))]
    ok = a.isfinite() & b.isfinite()
    return int((ordered[0] - ordered[1])[ok].abs().max()) if bool(ok.any()) else 0


def compare(case: Case, got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Figures of one case: `got` from the GPU, `wanted` from the simulator.

    Returns:
        ``ok``; ``bytes`` compared and ``different`` of them; ``error``, the largest relative difference of a float
        output, and ``ulp``, the largest difference of one element of a float32 output; both ``sha256``.
    """
    names = [name for name in case.outputs if name not in case.ignored]
    different = {n: _different_bytes(got[n], wanted[n]) for n in names}
    floats = [n for n in names if got[n].is_floating_point()]
    error = max((_difference(got[n].float(), wanted[n].float()) for n in floats), default=0.0)
    ulp = max((_ulp(got[n], wanted[n]) for n in floats if got[n].dtype == torch.float32), default=0)
    exact_only = sum(count for n, count in different.items() if case.bound == 0 or n not in floats)
    return {
        "ok": exact_only == 0 and error <= case.bound,
        "bytes": sum(_bytes(got[n]).numel() for n in names),
        "different": sum(different.values()),
        "error": error,
        "ulp": ulp,
        "bound": case.bound,
        "sha256": digest({n: got[n] for n in names}),
        "sha256_simulator": digest({n: wanted[n] for n in names}),
    }


def rows(cases: Sequence[Case], gpu: Engine, simulator: Engine, tick: Tick = lambda *_: None) -> list[Row]:
    """One row for each case."""
    made = []
    for index, case in enumerate(cases):
        tick(case.name, index / len(cases))
        figures = compare(case, gpu.run(case), simulator.run(case))
        made.append({"engine": "megamoe", "variant": case.name, **figures})
    return made


def run(request: Request, tick: Tick) -> list[Row]:
    """All cases on this machine, which needs a GPU and what the simulator needs. `request` is not used."""
    from megamoe.bench.conformance_cases import CASES

    return rows(CASES, Gpu(), Simulator(), tick)


def cells(row: Row) -> dict[str, str]:
    """A row for people."""
    return {
        "case": row["variant"],
        "ok": "yes" if row["ok"] else "NO",
        "bytes": str(row["bytes"]),
        "different": str(row["different"]),
        "error": f"{row['error']:.1e}",
        "bound": f"{row['bound']:.0e}",
    }
