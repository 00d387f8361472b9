"""The GPU engine: the ranks of this process, each one fused kernel a call, which stages its rank's inputs.

Inputs that the fused kernel does not take as they lie (quantised rows, strided tensors) are staged by a kernel of their
own before it.

A rank that has its GPU to itself runs on the caller's stream there. Ranks of one process that share a GPU have each
their part of the SMs and a stream, forked from the caller's stream and joined to it again, so that they run side
by side. Ranks of several processes have a GPU each.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn

import torch

from megamoe.cuda.arena import ARENA, TRACE_EVENTS, TRACE_ROLES, allocation_report, offset_of
from megamoe.cuda.driver import Driver, LaunchConfig, open_driver
from megamoe.cuda.faults import raise_reported, take_bad_values
from megamoe.cuda.fused import KERNEL, Buffers, sizes_of
from megamoe.cuda.gpu import Gpu, TorchGpu
from megamoe.cuda.hosted import HostedRank
from megamoe.cuda.hosting import ordinals_of, refusal
from megamoe.cuda.launch import Kernel, needs_context
from megamoe.cuda.layer_weights import LayerWeights
from megamoe.cuda.memory import ABORTED, EXPIRED, Place, Workspace, find, release, take
from megamoe.cuda.peers import Arenas, local_arenas, symmetric_arenas
from megamoe.cuda.plan import THREADS, Plan
from megamoe.cuda.select import call_plan
from megamoe.engine import Call, Placement
from megamoe.errors import ClosedError, EngineError, MegaMoEError, stated
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from megamoe.control import Control

__all__ = ["CudaEngine"]

_NOTHING: Final[contextlib.AbstractContextManager[None]] = contextlib.nullcontext()

_CALL_WAS_MADE: Final = (
    "This call was made, as the other ranks' were: do not repeat it, its result is in `out` where that was given."
)


class CudaEngine:
    """The fused kernel behind the engine interface.

    Args:
        spec: the layer; FP8 block weights.
        placement: the ranks of this process: all ranks of the group, or one.
        control: the group's control channel.
        max_tokens: token cap of a rank.
        sm_reserve: SMs of each GPU that the kernels leave to others.
        deadline: seconds that a wait inside the kernel may take; None: the control channel's.
        plan: use this plan for every call; None: chosen from the bound of a call.
        trace: provide memory for the time stamps of tracing plans.
        pool_rows: at most so many rows in a pool; None: as many as `Sizes.pool_rows` says.
        driver, gpus: for tests; by default the real ones.

    Raises:
        EngineError: no usable GPU, a placement that this engine cannot host, or too little memory.
    """

    name = "cuda"

    def __init__(
        self,
        spec: MoESpec,
        placement: Placement,
        control: Control,
        max_tokens: int,
        *,
        sm_reserve: int = 0,
        deadline: float | None = None,
        plan: Plan | None = None,
        trace: bool = False,
        pool_rows: int | None = None,
        driver: Driver | None = None,
        gpus: Callable[[int], Gpu] | None = None,
    ) -> None:
        self._driver = driver if driver is not None else open_driver()
        refused = refusal(spec, placement, max_tokens, self._driver, sm_reserve=sm_reserve)
        if refused is not None:
            raise refused
        self.spec = spec
        self._control = control
        self._local = placement.local
        self._alone = len(placement.local) == placement.ranks
        """Whether all ranks are here."""
        if gpus is None:
            self._seats = ordinals_of(placement)
            self._gpus: dict[int, Gpu] = {o: TorchGpu(o, self._driver) for o in set(self._seats)}
        else:
            self._seats = ordinals_of(placement) if placement.devices else (0,) * len(placement.local)
            self._gpus = {ordinal: gpus(ordinal) for ordinal in set(self._seats)}
        self.devices = tuple(self._gpus[ordinal].device for ordinal in self._seats)
        self._grids = [
            max(1, (self._driver.device(ordinal).multiprocessors - sm_reserve) // self._seats.count(ordinal))
            for ordinal in self._seats
        ]
        sizes = sizes_of(spec, placement.ranks, max_tokens, pool_rows)
        if plan is not None and plan.keep_intermediate:
            sizes = replace(sizes, keep_intermediate=True)
        if trace:
            sizes = replace(sizes, trace_words=max(self._grids) * TRACE_ROLES * TRACE_EVENTS)
        self._sizes = sizes
        self._plan = plan
        self._deadline = control.deadline if deadline is None else deadline
        self._kernels: dict[tuple[Plan, ...], list[Kernel]] = {}
        self._by_bound: dict[int, list[Kernel]] = {}
        self._closed = False
        self._release: weakref.finalize[..., CudaEngine] | None = None
        self._ranks: list[HostedRank] = []
        hosted = [(rank, self._gpus[ordinal]) for rank, ordinal in zip(self._local, self._seats, strict=True)]
        self._weights = LayerWeights(spec, sizes.local_experts, hosted)
        if self._alone:
            self.connect()

    def connect(self) -> None:
        """Make or share the workspace, and reach the arenas of all ranks. Collective; again does nothing.

        Raises:
            EngineError: too little memory here, or a peer that is not reached.
            PeerError: another rank has, or does not.
        """
        if self._release is not None:
            return
        key = (id(self._driver), self._seats, self._sizes, self.spec.input_scales, self._control.members)
        live = find(key)
        shared = live is not None
        if not self._alone:
            # Shared only where every rank still has the same one: a layer that was dropped may be collected late.
            tokens = self._control.agree("connect", numbers=[int(live.token, 16) if live is not None else 0])
            shared = live is not None and all(numbers == tokens[0] for numbers in tokens)
        workspace = self._workspace = take(key, self._make_workspace, anew=not shared)
        # Also for a layer that is dropped without close(): its share must not stay for ever.
        self._release = weakref.finalize(self, release, workspace)
        self._release.atexit = False  # the process takes its memory with it, and CUDA may be gone by then
        try:
            self._ranks = [
                HostedRank(workspace, index, rank, grid)
                for index, (rank, grid) in enumerate(zip(self._local, self._grids, strict=True))
            ]
        except BaseException:
            self._release()
            raise
        self._errors = [(rank.rank, rank.words) for rank in self._ranks]
        self._watched = [(workspace.words[rank.index], rank.words) for rank in self._ranks]

    def _make_workspace(self) -> Workspace:
        gpus = [self._gpus[ordinal] for ordinal in self._seats]

        def arenas(nbytes: int) -> Arenas:
            if self._alone:
                return local_arenas(self._driver, gpus, self._seats, nbytes)
            word = offset_of(ARENA, "done", self._sizes)
            return symmetric_arenas(self._control, self._driver, self._seats[0], nbytes, word)

        return Workspace(
            self._driver, self._seats, self._gpus, self._sizes, self.spec.input_scales, arenas, self._control.token
        )

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of one rank: ``arena`` and ``workspace``, which all layers of these sizes share, and ``weights``, which
        are those of a copy until weights are loaded that are read in place."""
        return {**allocation_report(self._sizes), "weights": self._weights.nbytes}

    @property
    def copied(self) -> tuple[str, ...]:
        """Fields of `ExpertWeights` of which the engine has a copy."""
        return self._weights.copied

    def load(self, weights: Sequence[ExpertWeights]) -> None:
        """Lay the hosted ranks' weights out for the kernel, in the memory that earlier weights had, or read them where
        they are (`LayerWeights`).

        Raises:
            EngineError: weights that this engine does not take, or too little memory; earlier weights stay.
        """
        self._usable()
        for one in weights:
            if one.format != "fp8_block":
                raise EngineError(
                    "weights.format",
                    one.format,
                    "fp8_block on the GPU engine",
                    "Convert them explicitly: megamoe.checkpoint(path, layer=n, convert_to='fp8_block') "
                    "(or megamoe.formats.convert.convert); or make the layer with backend='cpu'.",
                )
        self._synchronize()  # calls on any stream may still read the earlier weights
        if self._weights.reserve(weights):
            self._fill()
            self._by_bound.clear()
        self._weights.write(weights)
        for rank in self._ranks:
            rank.received.zero_()
        self._synchronize()

    def _synchronize(self) -> None:
        for gpu in self._gpus.values():
            gpu.synchronize()

    def _fill(self) -> None:
        for rank, weights in zip(self._ranks, self._weights.parts, strict=True):
            rank.fill(self._driver, self.spec, weights, self._deadline)

    def plan_for(self, bound: int) -> Plan:
        """The plan of calls with this bound, for weights as the first hosted rank has them."""
        layout = self._weights.parts[0].layout if self._weights.parts else "tiles"
        if self._plan is not None:
            return replace(self._plan, weights=layout)
        return replace(call_plan(self._sizes, bound, self._deadline), weights=layout)

    def _kernels_for(self, bound: int) -> list[Kernel]:
        kernels = self._by_bound.get(bound)
        if kernels is not None:
            return kernels
        plan = self.plan_for(bound)
        most, room = self._sizes.rows_for(bound * self._sizes.ranks * self._sizes.topk), self._sizes.pool_rows
        if most > room and not plan.passes:
            raise EngineError(
                "plan.passes", False, f"True with bound {bound}: {most} rows, of which the pools hold {room}", "Set it."
            )
        plans = tuple(replace(plan, weights=part.layout) for part in self._weights.parts) or (plan,) * len(self._ranks)
        kernels = self._kernels.get(plans)
        if kernels is None:
            workspace = self._workspace
            if self._capturing():
                raise EngineError(
                    "call",
                    f"the first call with bound {bound} inside a CUDA graph capture",
                    "a warmed-up layer: its kernel cannot be loaded in a capture",
                    f"Call warmup({bound}) before the capture.",
                )
            shared = plan.shared(self._sizes).total
            kernels = []
            for p, rank in zip(plans, self._ranks, strict=True):
                config = LaunchConfig(threads=THREADS, dynamic_shared=shared, dependent=rank.place.dependent)
                arguments = [rank.maps, rank.params]
                kernels.append(Kernel(workspace.library(p), KERNEL, rank.place.ordinal, config, arguments))
            self._kernels[plans] = kernels
        self._by_bound[bound] = kernels
        return kernels

    def warmup(self, bound: int) -> None:
        """Compile and load the kernel for `bound`."""
        self._usable()
        with self._workspace.lock:
            self._kernels_for(bound)

    def force_plan(self, plan: Plan | None) -> None:
        """Use `plan` for all calls from now on; None: chosen from the bound again."""
        self._plan = plan
        self._by_bound.clear()

    def launch_staged(self, calls: Sequence[Call]) -> None:
        """`forward` on the inputs that the last call staged: for measuring the kernel alone."""
        self.forward(calls, stage=False)

    def forward_some(self, calls: Sequence[Call], ranks: Collection[int]) -> None:
        """The part of a call that these ranks have in it: for a graph of each GPU, and for ranks that do not come."""
        self.forward(calls, ranks=ranks)

    def forward(self, calls: Sequence[Call], *, stage: bool = True, ranks: Collection[int] | None = None) -> None:
        """Stage and launch every hosted rank; nothing here waits for the GPU.

        Raises what kernels reported about earlier calls. A bad value of one is raised behind the launch where other
        processes make this call, too: they know nothing of it and wait for this rank. Whatever else fails here, they
        are told of it (`refuse`).
        """
        if self._closed or self._workspace.broken is not None:
            self._usable()
        bad_value = None
        for report, errors in self._watched:  # the usual case, in a fraction of the time of `raise_reported`
            if report[EXPIRED] or report[ABORTED] or errors[0] or errors[1]:
                if self._alone or report[EXPIRED] or report[ABORTED]:
                    self._raise_reported()
                bad_value = bad_value or take_bad_values(self._errors, self.spec, _CALL_WAS_MADE)
        try:
            with self._workspace.lock:
                kernels = self._by_bound.get(calls[0].bound) or self._kernels_for(calls[0].bound)
                if self._weights.watch and self._capturing():
                    self._weights.capture()
                if len(calls) == 1:
                    self._enqueue_one(calls[0], kernels[0], stage)
                else:
                    self._enqueue(calls, kernels, stage, self._local if ranks is None else ranks)
        except Exception as error:
            if self._alone:
                raise
            self.refuse(stated("call", error))
        if bad_value is not None:
            raise bad_value

    def _capturing(self) -> bool:
        return any(gpu.capturing() for gpu in self._gpus.values())

    def _context(self, place: Place, stream: int) -> contextlib.AbstractContextManager[None]:
        """What makes the GPU's context current, where a launch into `stream` needs it and it is not."""
        if needs_context(stream) and not self._driver.is_current(place.ordinal):
            return self._driver.use_device(place.ordinal)
        return _NOTHING

    def _caller_stream(self, place: Place) -> int:
        """Handle of the caller's stream, which waits for the last call if that was on another one."""
        stream = place.gpu.stream()
        if stream != place.last_stream:
            if not place.gpu.capturing():
                place.last_stream = stream
            place.gpu.follow()
        return stream

    def _enqueue_one(self, call: Call, kernel: Kernel, stage: bool) -> None:
        rank = self._ranks[0]
        place = rank.place
        stream = place.gpu.stream()
        if stream != place.last_stream:
            self._caller_stream(place)
        if needs_context(stream) and not self._driver.is_current(place.ordinal):
            with self._driver.use_device(place.ordinal):
                self._start_one(rank, call, kernel, stream, stage)
        elif not (stage and call.plain and rank.start_plain(kernel, call, stream)):
            self._start_one(rank, call, kernel, stream, stage)

    @staticmethod
    def _start_one(rank: HostedRank, call: Call, kernel: Kernel, stream: int, stage: bool) -> None:
        out = rank.storable(call.out)
        itself = stage and rank.stages_itself(call)
        if stage and not itself:
            rank.stage(call, stream)
        rank.start(kernel, call, out, stream, stage=itself)
        if out is not call.out:
            call.out.copy_(out)

    def _enqueue(self, calls: Sequence[Call], kernels: Sequence[Kernel], stage: bool, ranks: Collection[int]) -> None:
        chosen = [
            (r, call, kernel) for r, call, kernel in zip(self._ranks, calls, kernels, strict=True) if r.rank in ranks
        ]
        places = [p for p in self._workspace.places if any(r.place is p for r, _, _ in chosen)]
        # In a capture one GPU's stream is the root of the graph, and what runs on the other GPUs is forked from it.
        root = next((p.gpu for p in places if p.gpu.capturing()), None)
        streams: dict[int, int] = {}
        sharing, forked = [], []
        for place in places:
            if root is not None and not place.gpu.capturing():
                streams.update(zip(place.hosted, place.gpu.fork(len(place.hosted), root), strict=True))
                forked.append((place.gpu, root))
                continue
            streams.update(dict.fromkeys(place.hosted, self._caller_stream(place)))
            if len(place.hosted) > 1:
                sharing.append(place)
        # All ranks' inputs are staged before the first kernel: it waits for its peers', and whatever stood between the
        # launches of two ranks would lengthen that wait.
        themselves = [stage and rank.stages_itself(call) for rank, call, _ in chosen]
        for (rank, call, _), itself in zip(chosen, themselves, strict=True):
            if stage and not itself:
                with self._context(rank.place, streams[rank.index]):
                    rank.stage(call, streams[rank.index])
        outs = [rank.storable(call.out) for rank, call, _ in chosen]
        for place in sharing:
            streams.update(zip(place.hosted, place.gpu.fork(len(place.hosted)), strict=True))
            forked.append((place.gpu, place.gpu))
        for (rank, call, kernel), out, itself in zip(chosen, outs, themselves, strict=True):
            with self._context(rank.place, streams[rank.index]):
                rank.start(kernel, call, out, streams[rank.index], stage=itself)
        for gpu, origin in forked:
            gpu.join(origin)
        for (_, call, _), out in zip(chosen, outs, strict=True):
            if out is not call.out:
                call.out.copy_(out)

    def buffers(self, index: int) -> Buffers:
        """Memory of the `index`-th hosted rank, as its last call left it: for inspection."""
        return self._workspace.buffers[index]

    def stamps(self, index: int) -> torch.Tensor:
        """Time stamps of the `index`-th hosted rank's last call: int64 ``[CTAs, roles, events]``, see trace.cuh."""
        return (
            self._workspace.buffers[index].view("trace").view(-1, TRACE_ROLES, TRACE_EVENTS)[: self._grids[index]].cpu()
        )

    def refuse(self, error: MegaMoEError) -> NoReturn:
        """Raise `error`; peers in other processes, whose kernels wait for this rank, learn of it by the abort word."""
        if self._alone or self._capturing() or self._workspace.broken is not None:
            raise error
        rank = self._local[0]
        self._workspace.broken = f"rank {rank} refused a call ({error})"
        told = "The other ranks were told"
        try:
            self._workspace.raise_abort(0, rank)
        except Exception as failure:  # the GPU's context is gone, say: what is raised is still what came first
            told = f"The other ranks could not be told ({failure}) and give up at their deadline"
        way_out = f"{error.way_out} {told}: call reset() on every rank."
        raise type(error)(error.argument, error.given, error.allowed, way_out) from error

    def stats(self, index: int) -> torch.Tensor:
        """Routes received by each expert of the `index`-th hosted rank; waits for outstanding work."""
        self._synchronize()
        return self._ranks[index].received.clone().cpu()

    def clear_stats(self) -> None:
        """Set the counters to zero; waits for outstanding work."""
        self._synchronize()
        for rank in self._ranks:
            rank.received.zero_()

    def check(self) -> None:
        """Wait for outstanding work, then raise what the kernels reported.

        Raises:
            DeadlineError: a wait inside a kernel expired; `reset` first.
            InputError: a call had an id or a token count out of range; the layer stays usable.
        """
        self._synchronize()
        self._raise_reported()

    def _raise_reported(self) -> None:
        raise_reported(self._workspace, self._errors, self.spec, self._deadline)

    def reset(self) -> None:
        """Bring the workspace back to its beginning, for all layers that share it; afterwards calls work again."""
        if self._closed:
            self._usable()
        self._synchronize()  # every wait inside a kernel has a deadline
        if not self._alone:
            self._control.reset()  # all ranks' kernels have ended
        self._workspace.clear()
        for rank in self._ranks:
            rank.errors.zero_()
        if not self._alone:
            self._control.agree("reset")  # all ranks' arenas are cleared

    def _usable(self) -> None:
        if self._closed:
            raise ClosedError("layer", "closed", "an open layer", "Make a new one.")
        if self._workspace.broken is not None:
            raise ClosedError("layer", self._workspace.broken, "a working layer", "Call reset() on the layer.")

    def close(self) -> None:
        """Wait for outstanding work and free everything; the workspace goes with the last layer that shares it."""
        if self._closed:
            return
        self._closed = True
        self._synchronize()
        self._kernels.clear()
        self._by_bound.clear()
        self._ranks.clear()
        self._weights.clear()
        if self._release is not None:
            del self._workspace
            self._release()
