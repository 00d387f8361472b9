"""Several ranks of one layer in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from megamoe import ops
from megamoe.control import DEFAULT_DEADLINE, Control
from megamoe.engine import Backend, Call, Placement
from megamoe.errors import InputError, MegaMoEError, WeightError
from megamoe.inputs import Activations, check_call, positive_number
from megamoe.layer import MegaMoE
from megamoe.runtime import Runtime, WeightSource
from megamoe.spec import MoESpec, WeightFormat
from megamoe.weights import ExpertWeights

__all__ = ["LocalGroup", "local_group"]


class LocalGroup:
    """All ranks of one expert-parallel group, in one process; made by `local_group`.

    Lists go in and come out, one entry per rank. ``group[i]`` is rank i's `MegaMoE`, for its facts and `stats`; it
    cannot be called alone. A context manager.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._members = [MegaMoE._member(runtime, index) for index in range(runtime.placement.ranks)]

    @property
    def spec(self) -> MoESpec:
        """The layer's spec."""
        return self._runtime.spec

    @property
    def engine(self) -> str:
        """Name of the engine that runs the group: ``"cpu"`` or ``"cuda"``."""
        return self._runtime.engine.name

    @property
    def stats(self) -> torch.Tensor:
        """Routes received by every expert since `load` or `clear_stats`: int64 ``[E]``."""
        return torch.cat([member.stats for member in self._members])

    def clear_stats(self) -> None:
        """Set the counters of `stats` to zero."""
        self._runtime.engine.clear_stats()

    def load(self, source: WeightSource | Sequence[WeightSource]) -> None:
        """Load all ranks; replaces earlier weights.

        Args:
            source: a checkpoint or `ExpertWeights` of the whole layer, or one of either for each rank.

        Raises:
            WeightError, FormatError, CheckpointError: the weights do not fit the spec or are damaged.
        """
        ranks = len(self._members)
        if isinstance(source, (list, tuple)):
            if len(source) != ranks:
                raise WeightError("source", f"a list of {len(source)}", f"one for each of {ranks} ranks", "Add them.")
            sources = list(source)
        else:
            if isinstance(source, ExpertWeights) and source.local_experts != self.spec.experts:
                raise WeightError(
                    "source",
                    f"{source.local_experts} experts",
                    f"all {self.spec.experts} experts, or a list of {ranks} parts",
                    "Pass one ExpertWeights per rank.",
                )
            sources = [source] * ranks
        self._runtime.load(sources)

    def warmup(self, bound: int | None = None) -> None:
        """Do now what the first call with `bound` (default `max_tokens`) would do."""
        self._runtime.warmup(bound)

    def __call__(
        self,
        xs: Sequence[Activations],
        expert_ids: Sequence[torch.Tensor],
        expert_weights: Sequence[torch.Tensor],
        *,
        outs: Sequence[torch.Tensor] | None = None,
        num_tokens: Sequence[int | torch.Tensor] | None = None,
        bound: int | None = None,
    ) -> list[torch.Tensor]:
        """Run the experts on every rank's tokens; each list has one entry per rank, as `MegaMoE.__call__` takes it.

        Returns:
            One BF16 ``[M, H]`` per rank.

        Raises:
            InputError: an argument is refused; its name says which rank's. The group stays usable.
        """
        runtime, ranks = self._runtime, len(self._members)

        def prepare(weight_format: WeightFormat) -> list[Call]:
            nothing: list[None] = [None] * ranks
            lists: dict[str, Sequence[Any]] = {
                "xs": xs,
                "expert_ids": expert_ids,
                "expert_weights": expert_weights,
                "outs": nothing if outs is None else outs,
                "num_tokens": nothing if num_tokens is None else num_tokens,
            }
            for name, values in lists.items():
                if not isinstance(values, (list, tuple)) or len(values) != ranks:
                    given = f"{len(values)} entries" if isinstance(values, (list, tuple)) else type(values).__name__
                    raise InputError(name, given, f"a list of {ranks}, one for each rank", "Ranks may have 0 tokens.")
            calls = []
            for rank, (x, ids, weights, out, count) in enumerate(zip(*lists.values(), strict=True)):
                try:
                    calls.append(
                        check_call(
                            runtime.spec,
                            weight_format,
                            runtime.max_tokens,
                            runtime.engine.devices[rank],
                            x,
                            ids,
                            weights,
                            out=out,
                            num_tokens=count,
                            bound=bound,
                        )
                    )
                except MegaMoEError as error:
                    raise InputError(
                        f"rank {rank}'s {error.argument}", error.given, error.allowed, error.way_out
                    ) from error
            return calls

        return runtime.call(prepare)

    def annotate(self, label: str | None) -> None:
        """As `MegaMoE.annotate`."""
        self._runtime.label = label

    def check(self) -> None:
        """Wait for outstanding work and raise what went wrong in it."""
        self._runtime.check()

    def reset(self) -> None:
        """Recover from an error that says so."""
        self._runtime.reset()

    def close(self) -> None:
        """Release everything, the members too; safe to call twice."""
        for member in self._members:
            ops.unregister(member._handle)
        self._runtime.close()

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, rank: int) -> MegaMoE:
        return self._members[rank]

    def __iter__(self) -> Iterator[MegaMoE]:
        return iter(self._members)

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._runtime.closed else self._runtime.weight_format or "no weights"
        return f"LocalGroup({self.spec}, {len(self)} ranks, {state})"


def local_group(
    spec: MoESpec,
    ranks: int,
    devices: Sequence[int] | None = None,
    max_tokens: int = 8192,
    backend: Backend = "auto",
    *,
    deadline: float = DEFAULT_DEADLINE,
    sm_reserve: int = 0,
) -> LocalGroup:
    """All ranks of an expert-parallel group in this process, on one or more GPUs or on the CPU.

    Args:
        spec: the layer.
        ranks: number of ranks R; divides the experts.
        devices: the CUDA devices over which the ranks are dealt in blocks, such as ``[0]`` for all ranks on one or
            ``[0, 1]`` for half of them on each; None for the current one, or the CPU engine. Tensors of a rank must be
            on its device (``group[r].device``).
        max_tokens: the most tokens that a rank passes in one call.
        backend: as in `MegaMoE`.
        deadline: seconds that a rank's kernel waits for another one's; the CPU engine's ranks never wait.
        sm_reserve: SMs of each GPU that the layer's kernels leave to other streams.

    Raises:
        SpecError: `ranks` is not positive or does not divide the experts.
        InputError, EngineError: as in `MegaMoE`.
    """
    positive_number("ranks", ranks, integer=True, way_out="Pass the number of ranks to simulate.")
    positive_number("deadline", deadline, integer=False, way_out="Pass seconds.")
    if devices is not None and not (
        isinstance(devices, (list, tuple)) and devices and all(type(d) is int and d >= 0 for d in devices)
    ):
        raise InputError("devices", repr(devices), "a list of CUDA device numbers, such as [0]", "Or leave it out.")
    chosen = None if devices is None else tuple(devices)
    placement = Placement(ranks=ranks, local=tuple(range(ranks)), devices=chosen)
    way_out = "Pass the most tokens of a rank in one call."
    control = Control(None, deadline)
    return LocalGroup(Runtime(spec, placement, control, max_tokens, backend, way_out, sm_reserve=sm_reserve))
