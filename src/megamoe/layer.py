"""`MegaMoE`: one rank of a routed-expert layer, as the user sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from megamoe import ops
from megamoe.control import DEFAULT_DEADLINE, Control
from megamoe.engine import Backend, Placement
from megamoe.errors import InputError
from megamoe.inputs import Activations, positive_number
from megamoe.runtime import Runtime, WeightSource
from megamoe.spec import MoESpec, WeightFormat

__all__ = ["MegaMoE"]


def _refuse_alone(rank: int, ranks: int, what: str, *_: object) -> NoReturn:
    raise InputError(
        what,
        f"rank {rank} of a local group of {ranks} alone",
        "all ranks of a local group together",
        f"Call group.{what}(...) on the group." if what != "call" else "Call group(xs, ids, weights).",
    )


class MegaMoE:
    """The routed experts of one layer, on this rank of an expert-parallel group. Inference only.

    Rank r of R owns the experts ``[r * E/R, (r + 1) * E/R)``. Constructing, `load`, `warmup`, calls and `reset` are
    collective: all ranks of the group make them in the same order. When one rank refuses, all ranks raise: that rank
    its own error and the others `PeerError` with its reason, and the layer stays usable; on the GPU engine with ranks
    in several processes after the `reset` that the errors name. A context manager.

    Args:
        spec: the layer.
        group: a ``torch.distributed`` process group (``torch.distributed.group.WORLD`` for all processes), or None for
            one rank that owns every expert.
        max_tokens: the most tokens that a rank passes in one call; equal on all ranks.
        backend: ``"cpu"``, ``"cuda"``, or ``"auto"``: the GPU engine where it can host this rank, else the CPU
            engine (the reason is logged at INFO). Tensors must be on the engine's `device`.
        deadline: seconds that this rank waits for another one before it raises `DeadlineError`.
        sm_reserve: SMs of its GPU that the layer's kernel leaves to other streams; the CPU engine has no use for it.

    Raises:
        SpecError: the group's ranks do not divide the experts.
        InputError: `max_tokens`, `deadline` or `group` is not what it should be.
        EngineError: the backend cannot run here.
        PeerError: another rank failed or was given other arguments; the message names it.
        DeadlineError: another rank did not come.
    """

    def __init__(
        self,
        spec: MoESpec,
        group: dist.ProcessGroup | None = None,
        max_tokens: int = 8192,
        backend: Backend = "auto",
        *,
        deadline: float = DEFAULT_DEADLINE,
        sm_reserve: int = 0,
    ) -> None:
        refusal: InputError | None = None
        try:
            positive_number("deadline", deadline, integer=False, way_out="Pass seconds.")
        except InputError as error:  # raised by Runtime, which tells the other ranks first
            refusal, deadline = error, DEFAULT_DEADLINE
        control = Control(group, deadline)
        placement = Placement(ranks=control.size, local=(control.rank,))
        bounds = "Pass the most tokens of a call."
        runtime = Runtime(spec, placement, control, max_tokens, backend, bounds, refusal=refusal, sm_reserve=sm_reserve)
        self._attach(runtime, 0)

    @classmethod
    def _member(cls, runtime: Runtime, index: int) -> MegaMoE:
        """The `index`-th rank of a local group."""
        layer = cls.__new__(cls)
        layer._attach(runtime, index)
        return layer

    def _attach(self, runtime: Runtime, index: int) -> None:
        self._runtime = runtime
        self._index = index
        self._in_group = len(runtime.placement.local) > 1
        # A member of a local group refuses calls; for others nothing is to be found out at every call.
        refuse = functools.partial(_refuse_alone, self.rank, self.ranks, "call")
        self._run: Callable[..., torch.Tensor] = refuse if self._in_group else runtime.call_one
        self._handle = ops.register(self)

    @property
    def spec(self) -> MoESpec:
        """The layer's spec."""
        return self._runtime.spec

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._runtime.placement.local[self._index]

    @property
    def ranks(self) -> int:
        """Number of ranks R of the group."""
        return self._runtime.placement.ranks

    @property
    def max_tokens(self) -> int:
        """The most tokens that a rank passes in one call."""
        return self._runtime.max_tokens

    @property
    def first_expert(self) -> int:
        """Global id of this rank's first expert."""
        return self._runtime.first_expert(self._index)

    @property
    def local_experts(self) -> int:
        """Experts that this rank owns (EL = E/R)."""
        return self._runtime.local_experts

    @property
    def weight_format(self) -> WeightFormat | None:
        """Format of the loaded weights, None before `load`."""
        return self._runtime.weight_format

    @property
    def engine(self) -> str:
        """Name of the engine that runs the layer: ``"cpu"`` or ``"cuda"``."""
        return self._runtime.engine.name

    @property
    def device(self) -> torch.device:
        """Where arguments must be and results are."""
        return self._runtime.engine.devices[self._index]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of this rank by what they are for; on the GPU engine ``arena``, ``workspace`` and ``weights``.

        Arena and workspace are shared by all layers of the same sizes in the process, so that a model has them once.
        """
        return dict(self._runtime.engine.memory)

    @property
    def copied(self) -> tuple[str, ...]:
        """Fields of the loaded `ExpertWeights` of which the engine has a copy.

        What is written to these tensors in place is used after another `load` of them; what is written to the others,
        by the next call and by the next replay of a captured one.
        """
        return tuple(self._runtime.engine.copied)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._runtime.closed

    @property
    def stats(self) -> torch.Tensor:
        """Routes that each of this rank's experts received since `load` or `clear_stats`: int64 ``[EL]``, a copy.

        Skipped routes (id -1) and rows past `num_tokens` are not counted.
        """
        return self._runtime.engine.stats(self._index)

    def clear_stats(self) -> None:
        """Set the counters of `stats` to zero."""
        self._alone("clear_stats")
        self._runtime.engine.clear_stats()

    def _alone(self, what: str) -> None:
        if self._in_group:
            _refuse_alone(self.rank, self.ranks, what)

    def load(self, source: WeightSource) -> None:
        """Load this rank's experts; replaces earlier weights. Collective.

        The CPU engine keeps the given tensors and copies none, so overwriting them in place changes the layer. The GPU
        engine lays them out anew in its own memory; a second `load` writes to the same memory, so that captured graphs
        use the new weights. Values of `ExpertWeights` with ``gate_up="interleaved8"`` on the rank's GPU are not copied
        but read where they are: overwriting them in place, between calls, changes the layer and its captured graphs
        (scales need another `load` of the same tensors). Other tensors can take their place until a call is captured.

        Args:
            source: ``megamoe.checkpoint(path, layer=n)``, of which only this rank's experts are read; or
                `ExpertWeights` of this rank's experts (``first_expert`` set) or of the whole layer.

        Raises:
            WeightError, FormatError, CheckpointError: the weights do not fit the spec or are damaged.
            EngineError: a format that the engine does not take (the GPU engine takes FP8 blocks), too little memory, or
                other tensors than those that captured graphs read in place.
            PeerError: another rank failed, or has another weight format.
        """
        self._alone("load")
        self._runtime.load([source])

    def warmup(self, bound: int | None = None) -> None:
        """Do now what the first call with `bound` (default `max_tokens`) would do. Collective.

        Raises:
            InputError: nothing is loaded, or `bound` exceeds `max_tokens`.
            PeerError: another rank failed or has another bound.
        """
        self._alone("warmup")
        self._runtime.warmup(bound)

    def __call__(
        self,
        x: Activations,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        num_tokens: int | torch.Tensor | None = None,
        bound: int | None = None,
    ) -> torch.Tensor:
        """Run the experts on this rank's tokens. Collective; ranks may pass different numbers of tokens, or none.

        Args:
            x: BF16 ``[M, H]``, or ``(q, scales)``: e4m3 ``[M, H]`` and float32 ``[M, H / 128]``. Any strides.
            expert_ids: int32 or int64 ``[M, k]``, global ids; -1 skips the route. Any strides.
            expert_weights: float32 ``[M, k]``, final; not read where the id is -1. Any strides.
            out: BF16 ``[M, H]`` to write to; its rows must be contiguous and not overlap. May be `x`.
            num_tokens: tokens that count, a number or an int32 tensor of one element; the rows of `out` after them
                are not written (zero in a new `out`). Default M.
            bound: the largest token count of any rank, equal on all of them, at most `max_tokens` (the default).

        Returns:
            BF16 ``[M, H]``: `out`, or a new tensor.

        Raises:
            InputError: an argument that the layer refuses; the layer stays usable. Or, on the GPU engine, a value out
                of range in an earlier call; with ranks in several processes this call was made then, and the message
                says not to repeat it.
            PeerError: another rank refused or failed; the message names it and says why.
            DeadlineError: another rank did not come in time; `reset` first.
            ClosedError: after `close`, or before a `reset` that an earlier error asked for.
        """
        if torch.compiler.is_compiling():
            return ops.traced_call(self._handle, x, expert_ids, expert_weights, out, num_tokens, bound)
        return self._run(x, expert_ids, expert_weights, out, num_tokens, bound)

    def annotate(self, label: str | None) -> None:
        """Put a range named `label` around the host side of every call; of a local group, for all ranks.

        NVTX, for Nsight Systems, or without a GPU one of torch's profiler. None, the default: no ranges, no cost.
        """
        self._runtime.label = label

    def check(self) -> None:
        """Wait for outstanding work and raise what went wrong in it (on the CPU engine calls raise by themselves)."""
        self._alone("check")
        self._runtime.check()

    def reset(self) -> None:
        """Bring the ranks back in step after an error that says so. Collective.

        Raises:
            DeadlineError, PeerError: another rank is gone; close the layer.
        """
        self._alone("reset")
        self._runtime.reset()

    def close(self) -> None:
        """Release everything; safe to call twice. Not collective, but ranks that still call then fail."""
        if self._in_group and not self._runtime.closed:
            self._alone("close")
        ops.unregister(self._handle)
        self._runtime.close()

    def __enter__(self) -> MegaMoE:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.weight_format or "no weights"
        return f"MegaMoE({self.spec}, rank {self.rank} of {self.ranks}, {state})"
