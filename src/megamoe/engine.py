"""What an engine is, and which one runs here.

An engine hosts the ranks of one group that live in this process: one rank when ranks are processes, all of them in a
`megamoe.local_group`. It receives calls that are already checked (`megamoe.inputs`) and owns everything between them
and the output: dispatch, both products, combine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol, get_args

from megamoe.errors import EngineError, MegaMoEError
from megamoe.spec import MoESpec, WeightFormat

if TYPE_CHECKING:  # commands import this file for `Backend`, and their help must not wait for torch
    import torch

    from megamoe.control import Control
    from megamoe.weights import ExpertWeights

__all__ = ["Backend", "Call", "Engine", "Peer", "Placement", "backend_for", "create_engine", "who_am_i", "why_no_gpu"]

Backend = Literal["auto", "cpu", "cuda"]

_log = logging.getLogger("megamoe")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What the other processes of a group must know of one: numbers that stand for its host and its GPU (0: none)."""

    host: int
    gpu: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which ranks of a group of `ranks` live in this process.

    Attributes:
        ranks: size R of the group.
        local: the ranks hosted here, ascending: all of them, or one.
        devices: CUDA devices over which the hosted ranks are dealt in blocks, or None for the current one.
        peers: the process of each rank, where ranks are processes.
    """

    ranks: int
    local: tuple[int, ...]
    devices: tuple[int, ...] | None = None
    peers: tuple[Peer, ...] | None = None


@dataclass(kw_only=True, slots=True)  # not frozen: that makes one cost a call a microsecond more
class Call:
    """One rank's share of a call, checked by `megamoe.inputs.check_call`; nobody changes it.

    Attributes:
        x: BF16 ``[M, H]``, or e4m3 ``[M, H]`` when `scales` is given.
        scales: float32 ``[M, H / 128]``, or None.
        expert_ids: int32 or int64 ``[M, k]``.
        expert_weights: float32 ``[M, k]``.
        out: BF16 ``[M, H]``; rows from `num_tokens` on are not written.
        num_tokens: tokens that count: a number, or an int32 tensor of one element on the engine's device.
        bound: largest token count of the call, equal on all ranks.
        plain: `x` is BF16, and `x`, `expert_ids`, `expert_weights` and `out` are known to be contiguous.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    expert_ids: torch.Tensor
    expert_weights: torch.Tensor
    out: torch.Tensor
    num_tokens: int | torch.Tensor
    bound: int
    plain: bool = False


class Engine(Protocol):
    """The interface that `MegaMoE` and `LocalGroup` drive. Lists have one entry per hosted rank, in `Placement` order.

    `connect`, `load`, `warmup`, `forward`, `refuse` and `reset` are collective: every rank of the group enters them.
    """

    name: str

    @property
    def devices(self) -> Sequence[torch.device]:
        """Where the arguments of each hosted rank must be and its results are."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of one rank by what they are for, known before anything is allocated."""

    @property
    def copied(self) -> Sequence[str]:
        """Fields of `ExpertWeights` of which the engine has a copy: writing to those tensors needs another `load`."""

    def connect(self) -> None:
        """Reach the other ranks' memory, once, when all ranks are known to go on."""

    def load(self, weights: Sequence[ExpertWeights]) -> None:
        """Take the hosted ranks' weights; replaces earlier ones. They were checked against the spec."""

    def warmup(self, bound: int) -> None:
        """Do now whatever a first call with `bound` would do (compile, allocate)."""

    def forward(self, calls: Sequence[Call]) -> None:
        """Run one call per hosted rank and write its `out`.

        Raises:
            InputError: a value that only the engine looks at (an expert id out of range).
            PeerError: another rank refused the call or failed in it.
            DeadlineError: another rank did not answer in time.
        """

    def refuse(self, error: MegaMoEError) -> NoReturn:
        """Tell the other ranks that this rank refuses the call that they enter, then raise `error`."""

    def stats(self, index: int) -> torch.Tensor:
        """Routes received so far by each expert of the `index`-th hosted rank: int64 ``[EL]``, on the CPU."""

    def clear_stats(self) -> None:
        """Set the counters of `stats` to zero."""

    def check(self) -> None:
        """Wait for outstanding work and raise what went wrong on the device."""

    def reset(self) -> None:
        """Recover from an error that left the ranks out of step."""

    def close(self) -> None:
        """Release everything. Safe to call twice."""


def create_engine(
    spec: MoESpec,
    placement: Placement,
    control: Control,
    max_tokens: int,
    backend: Backend = "auto",
    *,
    sm_reserve: int = 0,
) -> Engine:
    """The engine for `backend`; ``"auto"`` takes the GPU engine where it can host these ranks, else the CPU engine.

    Which engine it is depends on the machine, the sizes and the placement, never on the weights, which come later: the
    GPU engine refuses weights that are not FP8 blocks when they are loaded. Why ``"auto"`` took the CPU engine is
    logged (logger ``megamoe``: INFO, or WARNING where a GPU stays idle because of where the ranks are) and what
    `why_no_gpu` returns.

    Raises:
        EngineError: an unknown backend, or one that cannot run here.
    """
    if backend not in get_args(Backend):
        raise EngineError("backend", backend, "'auto', 'cpu' or 'cuda'", "Use 'auto' unless you need a certain engine.")
    reason = None if backend == "cpu" else why_no_gpu(spec, placement, max_tokens)
    if backend != "cpu" and reason is None:
        from megamoe.cuda.engine import CudaEngine

        return CudaEngine(spec, placement, control, max_tokens, sm_reserve=sm_reserve)
    if backend == "cuda":
        raise EngineError(
            "backend",
            backend,
            f"'auto' or 'cpu' here: the GPU engine cannot run this layer ({reason})",
            "Pass backend='cpu'; the CPU engine takes the same arguments and CPU tensors.",
        )
    if placement.devices is not None:
        raise EngineError(
            "devices",
            list(placement.devices),
            "None on the CPU engine" + ("" if reason is None else f"; and the GPU engine cannot run ({reason})"),
            "Drop devices=; the ranks share the CPU.",
        )
    if reason is not None:
        level = logging.WARNING if reason.argument == "group" else logging.INFO
        _log.log(level, "backend='auto' takes the CPU engine: %s", reason)
    from megamoe.cpu.engine import CpuEngine

    return CpuEngine(spec, placement, control, max_tokens)


def backend_for(backend: Backend, weight_format: WeightFormat) -> Backend:
    """`backend` for a caller who knows the weights' format first: ``"auto"`` becomes ``"cpu"`` for those that the GPU
    engine does not take."""
    return "cpu" if backend == "auto" and weight_format != "fp8_block" else backend


def why_no_gpu(spec: MoESpec, placement: Placement, max_tokens: int) -> EngineError | None:
    """Why the GPU engine cannot host these ranks here, None if it can."""
    from megamoe.cuda.hosting import why_not

    return why_not(spec, placement, max_tokens)


def who_am_i(backend: Backend) -> tuple[int, int]:
    """Numbers that tell the other processes of a group where this one is: its host, and its GPU (0 without one)."""
    import torch

    from megamoe.cuda.driver import open_driver
    from megamoe.cuda.peers import identity

    driver = None
    if backend != "cpu" and torch.version.cuda is not None and torch.cuda.is_available():
        try:
            driver = open_driver()
        except EngineError:  # create_engine says why
            driver = None
    peer = identity(driver, 0 if driver is None else torch.cuda.current_device())
    return peer.host, peer.gpu
