"""Running kernels: arguments, launches on all ranks at once, seeds."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Union

import torch

from megamoe.errors import EngineError
from megamoe.sim.build import Kernel, library, worker
from megamoe.sim.memory import Arena, Buffer
from megamoe.sim.report import Finding, Report, resolve

__all__ = ["Argument", "Expiry", "Launch", "Mutation", "Simulation"]

Argument = Union[Buffer, torch.Tensor, bytes, ctypes.Structure, "ctypes._SimpleCData[Any]"]
"""A kernel parameter: a buffer or tensor of the arena (its address), a ctypes value or structure, or raw bytes."""

Expiry = Literal["never", "deadlock", "random"]
"""When deadlines of waits pass: never, once nothing else can go on, or at a random moment."""

_STATIC_TLS = 64 << 10


@dataclass(frozen=True)
class Launch:
    """One kernel on every rank at once.

    Args:
        kernel: what to run.
        grid: number of CTAs, or (x, y, z).
        block: threads of a CTA.
        arguments: for each rank, one value per kernel parameter; ``arguments[r]`` None leaves rank r out.
        cluster: CTAs of a cluster.
        shared: bytes of dynamic shared memory.
        in_order: a rank's part starts when that rank's part of the launch before it in the list has ended, as in one
            stream; the ranks do not wait for each other. Otherwise it starts at once.
    """

    kernel: Kernel
    grid: int | tuple[int, int, int]
    block: int
    arguments: Sequence[Sequence[Argument] | None]
    cluster: int = 1
    shared: int = 0
    in_order: bool = False


@dataclass(frozen=True)
class Mutation:
    """One synchronisation call weakened: its kind (see `megamoe.sim.mutation.KINDS`) and its call sites."""

    kind: str
    sites: tuple[int, ...]


def _raw(argument: Argument) -> bytes:
    if isinstance(argument, Buffer):
        return argument.address.to_bytes(8, "little")
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr().to_bytes(8, "little")
    return bytes(argument)


def _options(
    seed: int,
    checked: bool,
    expiry: Expiry,
    mutation: Mutation | None = None,
    record_sites: bool = False,
    step_limit: int | None = None,
    watchdog: int | None = None,
    record_arrivals: bool = False,
) -> list[str]:
    lines = [f"option seed {seed}", f"option checked {int(checked)}", f"option expiry {expiry}"]
    for name, limit in (("step_limit", step_limit), ("watchdog", watchdog)):
        if limit is not None:
            lines.append(f"option {name} {limit}")
    if record_sites:
        lines.append("option record_sites 1")
    if record_arrivals:
        lines.append("option record_arrivals 1")
    if mutation is not None:
        lines.append(f"option mutation {mutation.kind}")
        lines += [f"option mutated {site}" for site in mutation.sites]
    return lines


class _Recorder:
    """Collects the lines of a job instead of sending them."""

    def __init__(self) -> None:
        self.libraries: list[Path] = []
        self.lines: list[str] = []

    def send(self, line: str) -> None:
        self.lines.append(line)

    def module(self, path: Path) -> int:
        if path not in self.libraries:
            self.libraries.append(path)
            self.send(f"module {path}")
        return self.libraries.index(path)


class _Worker(_Recorder):
    """The worker process; it keeps its libraries between runs."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        tunables = f"glibc.rtld.optional_static_tls={_STATIC_TLS}"
        self.process = subprocess.Popen(
            [str(worker())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "GLIBC_TUNABLES": tunables},
        )
        self.send(f"arena {arena.path} {arena.base} {arena.nbytes} shared")

    def ask(self, line: str, timeout: float) -> dict[str, Any]:
        """Send everything up to `line`; the answer. A worker that dies or hangs gives {"died": reason}."""
        self.send(line)
        text = "\n".join(self.lines) + "\n"
        self.lines = []
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(text.encode())
            stdin.flush()
        got = b""
        while not got.endswith(b"\n"):
            ready, _, _ = select.select([stdout], [], [], timeout)
            if not ready:
                self.close()
                return {"died": f"no answer for {timeout:g} s"}
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                break
            got += piece
        if not got:
            return {"died": f"the worker ended with code {self.process.wait()}"}
        answer: dict[str, Any] = json.loads(got)
        if answer.pop("last", False):
            self.close()
        if "error" in answer:
            self.close()
            raise EngineError("simulator", answer["error"], "a job that the worker can run", "")
        return answer

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.kill()
        self.process.wait()


class Simulation:
    """Global memory of some ranks, and a worker that runs kernels on it.

    Example:
        >>> with Simulation() as sim:
        ...     x = sim.buffer("x", torch.arange(4.0))
        ...     launch = Launch(Kernel.of("some.cu", "entry"), 1, 32, [[x]])
        ...     report = sim.run([launch], seed=1, checked=True)

    Args:
        nbytes: size of all global memory together.
    """

    def __init__(self, nbytes: int = 256 << 20) -> None:
        self.arena = Arena(nbytes)
        self._worker: _Worker | None = None
        self._sizes: dict[Kernel, list[int]] = {}

    def __enter__(self) -> Simulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and give the memory back; tensors of the arena must not be used afterwards."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self.arena.close()

    def buffer(
        self, label: str, value: torch.Tensor | Sequence[int], dtype: torch.dtype | None = None, **how: Any
    ) -> Buffer:
        """A new buffer in global memory; see `Arena.buffer`."""
        return self.arena.buffer(label, value, dtype, **how)

    def parameter_sizes(self, kernel: Kernel, *, checked: bool = False) -> list[int]:
        """Sizes in bytes of the kernel's parameters, from the plain or the checked build."""
        sizes = self._sizes.get(kernel)
        if sizes is None:
            w = self._ready()
            module = w.module(library(kernel, checked=checked))
            sizes = w.ask(f"sizes {module} {kernel.entry}", 60.0)["sizes"]
            self._sizes[kernel] = sizes
        return sizes

    def _ready(self) -> _Worker:
        if self._worker is None or self._worker.process.poll() is not None:
            known = [] if self._worker is None else self._worker.libraries
            if self._worker is not None:
                self._worker.close()
            self._worker = _Worker(self.arena)
            for path in known:  # call sites keep their numbers
                self._worker.module(path)
        return self._worker

    def _describe(self, w: _Recorder, launches: Sequence[Launch], checked: bool) -> None:
        for b in self.arena.buffers:
            about = f"{int(b.peers)} {int(b.read_only)} {b.label}"
            pieces = [(f".{name}", offset, size) for name, offset, size in b.fields] or [("", 0, b.nbytes)]
            for name, offset, size in pieces:
                w.send(f"buffer {b.rank} {b.address + offset} {size} {about}{name}")
        entries = [
            (launch, rank, [_raw(a) for a in arguments])
            for launch in launches
            for rank, arguments in enumerate(launch.arguments)
            if arguments is not None
        ]
        addresses = iter(self.arena.scratch([data for _, _, raw in entries for data in raw]))
        last: dict[int, int] = {}
        for number, (launch, rank, raw) in enumerate(entries):
            after = last.get(rank, -1) if launch.in_order else -1
            last[rank] = number
            grid = launch.grid if isinstance(launch.grid, tuple) else (launch.grid, 1, 1)
            if grid[0] % launch.cluster:
                raise EngineError("grid", grid, f"a multiple of the cluster size {launch.cluster}", "Check the plan.")
            module = w.module(library(launch.kernel, checked=checked))
            sizes = self.parameter_sizes(launch.kernel, checked=checked)
            if sizes != [len(data) for data in raw]:
                raise EngineError(
                    f"arguments of {launch.kernel.entry}",
                    f"{[len(data) for data in raw]} bytes",
                    f"{sizes} bytes, as the kernel declares them",
                    "The host's structure and the kernel's have drifted apart.",
                )
            words = [
                module,
                launch.kernel.entry,
                rank,
                after,
                *grid,
                launch.block,
                1,
                1,
                launch.cluster,
                launch.shared,
                len(raw),
            ]
            w.send("launch " + " ".join(map(str, words)) + "".join(f" {next(addresses)}" for _ in raw))

    def run(
        self,
        launches: Sequence[Launch],
        *,
        seed: int = 1,
        checked: bool = False,
        expiry: Expiry = "never",
        mutation: Mutation | None = None,
        record_sites: bool = False,
        record_arrivals: bool = False,
        step_limit: int | None = None,
        watchdog: int | None = None,
        timeout: float = 300.0,
    ) -> Report:
        """Run all launches on all their ranks at once, on the memory as it is now.

        Args:
            launches: what runs concurrently.
            seed: of the schedule; 0 is round robin with copies done at once.
            checked: with the race checker and exact bounds (slower; another build of the kernel).
            expiry: when deadlines pass.
            mutation: weaken a synchronisation call.
            record_sites: list the synchronisation calls that were executed, in ``report.sites``.
            record_arrivals: count the phases of each mbarrier by who arrived, in ``report.arrivals``.
            step_limit: scheduler steps without any change before it is a livelock.
            watchdog: seconds without a scheduling point before the run ends (a plain spin never reaches one).
            timeout: seconds until the worker is given up.

        Raises:
            EngineError: arguments that do not fit the kernel; a machine without what the simulator needs.
            CompileError: the kernel does not compile.
        """
        w = self._ready()
        self._describe(w, launches, checked)
        for line in _options(seed, checked, expiry, mutation, record_sites, step_limit, watchdog, record_arrivals):
            w.send(line)
        answer = w.ask("run", timeout)
        findings = [Finding(kind, resolve(text, w.libraries)) for kind, text in answer.get("findings", [])]
        if "died" in answer:
            findings.append(Finding("crash", answer["died"]))
        findings += [Finding("bounds", text) for text in self.arena.damage()]
        counters = {k: v for k, v in answer.items() if isinstance(v, int)}
        return Report(
            seed=seed,
            checked=checked,
            findings=tuple(findings),
            waiting=tuple(resolve(text, w.libraries) for text in answer.get("waiting", [])),
            seconds=answer.get("seconds", 0.0),
            cpu_seconds=answer.get("cpu_seconds", 0.0),
            counters=counters,
            sites=tuple((kind, site, count) for kind, site, count in answer.get("sites", [])),
            arrivals=tuple((bar, who, count) for bar, who, count in answer.get("arrivals", [])),
        )

    def dump(self, directory: Path, launches: Sequence[Launch], *, seed: int, checked: bool, expiry: Expiry) -> Path:
        """Write a run as files that the worker program replays by itself, for a debugger.

        Returns:
            The worker program; it reads ``job.txt`` on stdin.
        """
        directory.mkdir(parents=True, exist_ok=True)
        recorder = _Recorder()
        self._describe(recorder, launches, checked)
        memory = directory / "arena.bin"
        size = self.arena.dump(memory)
        lines = [f"arena {memory.resolve()} {self.arena.base} {size} private", *recorder.lines]
        lines += [*_options(seed, checked, expiry, watchdog=0), "run"]
        (directory / "job.txt").write_text("\n".join(lines) + "\n")
        return worker()

    def seeds(self, launches: Sequence[Launch], seeds: Sequence[int], **how: Any) -> Iterator[Report]:
        """`run` for each seed, each time from the memory as it was at the first."""
        self.arena.save()
        for seed in seeds:
            self.arena.restore()
            yield self.run(launches, seed=seed, **how)

    def libraries(self) -> list[Path]:
        """Libraries of the kernels run so far, in the order of `Report.sites`' modules."""
        return [] if self._worker is None else list(self._worker.libraries)
