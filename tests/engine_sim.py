"""The GPU engine's host code over the simulator: real staging and fused kernels, memory of an arena, no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megamoe.control import Control
from megamoe.cuda import call_staging, memory
from megamoe.cuda.engine import CudaEngine
from megamoe.cuda.toolchain import Job
from megamoe.engine import Call, Placement
from megamoe.sim.driver import SimDriver, compiled
from megamoe.sim.simulation import Simulation
from megamoe.spec import MoESpec

CURRENT = 7
"""Handle of the caller's stream."""

_FIRST_FORKED = 100


class SimGpu:
    """`megamoe.cuda.gpu.Gpu` over an arena of the simulator; counts what the engine asks for."""

    def __init__(self, sim: Simulation, current: int = CURRENT) -> None:
        self.sim = sim
        self.device = torch.device("cpu")
        self.current = current
        self.in_capture = False
        self.allocated: list[str] = []
        self.followed = self.synchronized = self.forks = self.joins = 0

    def zeros(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.allocated.append(what)
        last = what.split()[-1]
        rank = int(last) if last.isdigit() else 0
        label = f"{what.replace(' ', '_')}_{len(self.allocated)}"
        kept = torch.zeros(tuple(shape), dtype=dtype)
        return self.sim.buffer(label, kept, rank=rank, peers=what.startswith("arena")).tensor

    def pinned(self, words: int) -> torch.Tensor:
        return self.zeros("host words", (words,), torch.int32)

    def peer_zeros(self, what: str, nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        return self.zeros(what, (nbytes,), torch.uint8), lambda: None

    def stream(self) -> int:
        return self.current

    def capturing(self) -> bool:
        return self.in_capture

    def follow(self) -> None:
        self.followed += 1

    def fork(self, ranks: int, root: Any = None) -> list[int]:
        self.forks += 1
        return [_FIRST_FORKED + r for r in range(ranks)]

    def join(self, root: Any = None) -> None:
        self.joins += 1

    def synchronize(self) -> None:
        self.synchronized += 1


class EagerDriver(SimDriver):
    """Runs a staging kernel at its launch, the fused kernels when the last rank's is there."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim, multiprocessors=4, devices=2, rank_of=lambda _, stream: max(0, stream - _FIRST_FORKED))
        self.names: list[str] = []
        self.seed = 0
        self.waiting_for = 1

    def launch(self, prepared: Any, arguments: int, grid: int, stream: int) -> None:
        super().launch(prepared, arguments, grid, stream)
        name = self._pending[-1].kernel.entry
        self.names.append(name)
        if name != "mega" or len(self._pending) == self.waiting_for:
            self.seed += 1
            report = self.run(seed=self.seed, checked=True)
            assert report.ok, report


class World:
    """A simulated GPU and the layers on it."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.gpu = SimGpu(sim)
        # What runs on the second GPU's stream is rank 1's.
        self.gpus = {0: self.gpu, 1: SimGpu(sim, _FIRST_FORKED + 1)}
        self.driver = EagerDriver(sim)
        self.engines: list[CudaEngine] = []
        self._inputs = 0

    def engine(
        self,
        spec: MoESpec,
        ranks: int = 1,
        max_tokens: int = 16,
        devices: tuple[int, ...] | None = None,
        **how: Any,
    ) -> CudaEngine:
        self.driver.waiting_for = ranks
        placement = Placement(ranks=ranks, local=tuple(range(ranks)), devices=devices)
        made = CudaEngine(
            spec,
            placement,
            Control(None),
            max_tokens,
            driver=self.driver,
            gpus=self.gpus.__getitem__,
            deadline=2.0,
            **how,
        )
        self.engines.append(made)
        return made

    def place(
        self, tensor: torch.Tensor, strides: Sequence[int] | None = None, offset: int = 0, rank: int = 0
    ) -> torch.Tensor:
        """`tensor` in the arena as memory of `rank`, with these strides and this many elements before it."""
        self._inputs += 1
        strides = tensor.stride() if strides is None else strides
        span = offset + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True) if n)
        flat = torch.zeros(max(1, span), dtype=tensor.dtype)
        whole = self.sim.buffer(f"input{self._inputs}", flat, rank=rank).tensor
        view = whole.as_strided(tuple(tensor.shape), tuple(strides), whole.storage_offset() + offset)
        view.copy_(tensor)
        return view

    def call(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
        num_tokens: int | torch.Tensor | None = None,
        bound: int = 16,
        out: torch.Tensor | None = None,
        rank: int = 0,
        plain: bool | None = None,
    ) -> Call:
        """A call on tensors of the arena (others are placed there); `out` is poisoned with 7. `plain` as the check of a
        call's arguments finds it, unless given: then the fused kernel stages the call."""
        if plain is None:
            plain = scales is None and all(t.is_contiguous() for t in (x, ids, weights, x if out is None else out))
        owner = rank if plain else 0  # a staging kernel runs on the stream that rank 0 has
        place = [t if t is None or self._inside(t) else self.place(t, rank=owner) for t in (x, scales, ids, weights)]
        if out is None:
            out = self.place(torch.full((x.shape[0], x.shape[1]), 7.0).bfloat16(), rank=rank)
        count = x.shape[0] if num_tokens is None else num_tokens
        return Call(
            x=place[0],  # type: ignore[arg-type]
            scales=place[1],
            expert_ids=place[2],  # type: ignore[arg-type]
            expert_weights=place[3],  # type: ignore[arg-type]
            out=out,
            num_tokens=count,
            bound=bound,
            plain=plain,
        )

    def _inside(self, tensor: torch.Tensor) -> bool:
        base = self.sim.arena.base
        return base <= tensor.data_ptr() < base + self.sim.arena.nbytes


@contextmanager
def world() -> Iterator[World]:
    """A `World` whose kernels are "compiled" for the simulator."""
    with pytest.MonkeyPatch.context() as patch, Simulation() as sim:
        for module in (memory, call_staging):
            patch.setattr(
                module, "compile_kernel", lambda source, config, arch, **_: compiled(Job(source, config, arch))
            )
        made = World(sim)
        try:
            yield made
        finally:
            for engine in made.engines:
                engine.close()
