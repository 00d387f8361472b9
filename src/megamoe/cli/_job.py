"""Run one layer of a checkpoint on several ranks, in this process or as one rank of a torchrun, and have it judged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress

import megamoe
from megamoe.cli._evaluate import Evaluation, judge
from megamoe.cli._inputs import Inputs, split
from megamoe.engine import Backend, backend_for
from megamoe.hf import Router
from megamoe.spec import WeightFormat
from megamoe.weights import ExpertWeights

__all__ = ["Job", "evaluate"]


class Job:
    """One layer of a checkpoint with its router, to be run on a number of ranks.

    Args:
        directory: checkpoint.
        layer: index of a layer with experts.
        ranks: must divide the experts.
        backend: engine, as `megamoe.MegaMoE` takes it.
        samples: timed calls.
        convert_to: format to convert the experts to while reading, or None.
        display: where progress is shown.

    Raises:
        MegaMoEError: the checkpoint cannot be read, or its experts cannot be spread over `ranks`.
    """

    def __init__(
        self,
        directory: Path,
        layer: int,
        *,
        ranks: int,
        backend: Backend,
        samples: int,
        display: Progress,
        convert_to: WeightFormat | None = None,
    ) -> None:
        self.checkpoint = megamoe.checkpoint(directory, layer=layer, convert_to=convert_to)
        self.spec = self.checkpoint.spec
        self.spec.local_experts(ranks)  # refused here, before anything is read
        self.router = Router(directory, layer)
        self.title = f"{directory.name}, layer {layer}"
        self.ranks, self.samples, self.display = ranks, samples, display
        self.backend = backend_for(backend, self.checkpoint.format)

    def read(self) -> ExpertWeights:
        """All experts of the layer, with progress."""
        step = self.display.add_task(f"{self.title}: read experts", total=self.spec.experts)

        def done(count: int, total: int) -> None:
            self.display.update(step, completed=self.spec.experts * count // max(total, 1))

        return self.checkpoint.read(progress=done)


@dataclass(frozen=True)
class _Ran:
    """What the ranks returned, one entry for each rank, and the weights of the whole layer for the oracle."""

    weights: ExpertWeights
    outputs: list[torch.Tensor]
    received: list[list[int]]
    samples_ms: list[float]
    engine: str


def evaluate(job: Job, inputs: Inputs, *, distributed: bool = False) -> Evaluation | None:
    """Run `job` on `inputs` and compare with the oracle.

    Args:
        distributed: every process of a torchrun calls this and is one rank; otherwise all ranks are in this process.

    Returns:
        The evaluation; None on the ranks of a torchrun other than the first.
    """
    step = job.display.add_task(f"{job.title}: route, run, compare", total=3)
    ids, route_weights = job.router(inputs.activations)
    job.display.advance(step)
    parts = split(inputs.activations.shape[0], job.ranks)
    arguments = [(inputs.activations[part], ids[part], route_weights[part]) for part in parts]
    ran = _run_distributed(job, arguments) if distributed else _run_here(job, arguments)
    if ran is None:
        return None
    job.display.advance(step)
    evaluation = judge(
        spec=job.spec,
        weights=ran.weights,
        inputs=inputs,
        ids=ids,
        route_weights=route_weights,
        outputs=ran.outputs,
        received=ran.received,
        samples_ms=ran.samples_ms,
        engine=ran.engine,
    )
    job.display.advance(step)
    return evaluation


_Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _most_tokens(arguments: list[_Arguments]) -> int:
    return max(1, *(x.shape[0] for x, _, _ in arguments))


def _to(device: torch.device, share: _Arguments) -> _Arguments:
    x, ids, weights = (tensor.to(device) for tensor in share)
    return x, ids, weights


def _run_here(job: Job, arguments: list[_Arguments]) -> _Ran:
    bound = _most_tokens(arguments)
    layer_weights = job.read()
    with megamoe.local_group(job.spec, ranks=job.ranks, max_tokens=bound, backend=job.backend) as group:
        group.load(layer_weights)
        placed = [_to(member.device, share) for member, share in zip(group, arguments, strict=True)]
        xs, ids, weights = (list(column) for column in zip(*placed, strict=True))

        def call() -> list[torch.Tensor]:
            ys = group(xs, ids, weights)
            group.check()  # waits for the device
            return ys

        samples_ms = _time(call, job.samples)
        group.clear_stats()
        outputs = call()
        received = [member.stats.tolist() for member in group]
        return _Ran(layer_weights, [y.cpu() for y in outputs], received, samples_ms, group.engine)


def _run_distributed(job: Job, arguments: list[_Arguments]) -> _Ran | None:
    """This process is rank RANK of WORLD_SIZE. A sample is the slowest rank's time after a barrier."""
    with_gpu = torch.cuda.is_available()
    if with_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if with_gpu else "gloo")
    try:
        rank, bound = dist.get_rank(), _most_tokens(arguments)
        with megamoe.MegaMoE(job.spec, dist.group.WORLD, max_tokens=bound, backend=job.backend) as layer:
            layer.load(job.checkpoint)
            mine_in = _to(layer.device, arguments[rank])

            def call() -> torch.Tensor:
                result = layer(*mine_in)
                layer.check()
                return result

            samples_ms = _time(call, job.samples, dist.barrier)
            layer.clear_stats()
            y = call()
            mine = (y.cpu(), layer.stats.tolist(), samples_ms, layer.engine)
        gathered: list[Any] | None = [None] * job.ranks if rank == 0 else None
        dist.gather_object(mine, gathered)
        if gathered is None:
            return None
        outputs, received, times, engines = (list(column) for column in zip(*gathered, strict=True))
        return _Ran(job.read(), outputs, received, [max(ranks) for ranks in zip(*times, strict=True)], engines[0])
    finally:
        dist.destroy_process_group()


def _time(call: Callable[[], object], samples: int, ready: Callable[[], object] = lambda: None) -> list[float]:
    """Milliseconds of `samples` calls, each after `ready`, after one call that is not counted."""
    call()
    times = []
    for _ in range(samples):
        ready()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times
