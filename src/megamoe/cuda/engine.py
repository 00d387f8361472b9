"""The GPU engine: the ranks of this process, each one staging kernel and one fused kernel a call.

One rank runs on the caller's stream. Several ranks of one process share a GPU: each has its part of the SMs and its own
stream, forked from the caller's stream and joined to it again, so that their kernels run side by side.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from megamoe.cuda.arena import ERROR_WORDS, TRACE_EVENTS, TRACE_ROLES, Params, allocation_report
from megamoe.cuda.call_staging import Target
from megamoe.cuda.driver import Driver, LaunchConfig, open_driver
from megamoe.cuda.fused import KERNEL, Buffers, fill_params, sizes_of
from megamoe.cuda.gpu import Gpu, TorchGpu
from megamoe.cuda.hosting import ordinal_of, refusal
from megamoe.cuda.launch import Kernel, aligned, needs_context
from megamoe.cuda.memory import acquire, host_words, release
from megamoe.cuda.plan import THREADS, Plan
from megamoe.cuda.relayout import KernelWeights, relayout, weight_shapes
from megamoe.cuda.select import select_plan
from megamoe.engine import Call, Placement
from megamoe.errors import ClosedError, DeadlineError, EngineError, InputError, MegaMoEError
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from megamoe.control import Control

__all__ = ["CudaEngine"]

_log = logging.getLogger("megamoe")

_PHASES: Final = {
    1: "the peers' route counts",
    2: "this rank's own counts",
    3: "the route table",
    4: "token rows",
    5: "the intermediate",
    6: "the peers' results",
}
"""`Phase` of kernels/sync.cuh, in words."""

_OUT_ALIGNMENT: Final = 16
"""Bytes of the fused kernel's stores: address and row stride of `out`; others get their rows through a copy."""


@dataclass
class _Rank:
    """What a layer itself has for one hosted rank."""

    rank: int
    params: Params
    target: Target
    received: torch.Tensor
    errors: torch.Tensor
    words: Any


class CudaEngine:
    """The fused kernel behind the engine interface.

    Args:
        spec: the layer; FP8 block weights.
        placement: the ranks of this process. Ranks in other processes are not supported by this engine yet.
        control: the group's control channel.
        max_tokens: token cap of a rank.
        sm_reserve: SMs that the kernel leaves to others.
        deadline: seconds that a wait inside the kernel may take; None: the control channel's.
        plan: use this plan for every call; None: chosen from the bound of a call.
        trace: provide memory for the time stamps of tracing plans.
        driver, gpu: for tests; by default the real ones.

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
        driver: Driver | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self._driver = driver if driver is not None else open_driver()
        refused = refusal(spec, placement, max_tokens, self._driver)
        if refused is not None:
            raise refused
        self.spec = spec
        self._ordinal = ordinal_of(placement) if gpu is None else 0
        self._gpu: Gpu = gpu if gpu is not None else TorchGpu(self._ordinal)
        self.device = self._gpu.device
        ranks = placement.ranks
        self._grid = max(1, (self._driver.device(self._ordinal).multiprocessors - sm_reserve) // ranks)
        sizes = sizes_of(spec, ranks, max_tokens)
        if plan is not None and plan.keep_intermediate:
            sizes = replace(sizes, keep_intermediate=True)
        if trace:
            sizes = replace(sizes, trace_words=self._grid * TRACE_ROLES * TRACE_EVENTS)
        self._sizes = sizes
        self._plan = plan
        self._deadline = control.deadline if deadline is None else deadline
        self._kernels: dict[Plan, list[Kernel]] = {}
        self._by_bound: dict[int, list[Kernel]] = {}
        self._closed = False
        self._workspace = acquire(self._driver, self._gpu, self._ordinal, sizes, spec.input_scales)
        # Also for a layer that is dropped without close(): its share must not stay for ever.
        self._release = weakref.finalize(self, release, self._workspace)
        self._release.atexit = False  # the process takes its memory with it, and CUDA may be gone by then
        try:
            self._weights: list[KernelWeights] = []
            self._ranks = [self._make_rank(r) for r in range(ranks)]
        except BaseException:
            self._release()
            raise

    def _make_rank(self, rank: int) -> _Rank:
        buffers = self._workspace.buffers[rank]
        errors = self._gpu.pinned(ERROR_WORDS)
        names = ("x", "x_scales", "ids", "route_weights")
        return _Rank(
            rank=rank,
            params=aligned(Params),
            target=Target(*(buffers.view(name).data_ptr() for name in names)),
            received=self._gpu.zeros(f"counters of rank {rank}", (self._sizes.local_experts,), torch.int64),
            errors=errors,
            words=host_words(errors),
        )

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of one rank: ``arena`` and ``workspace``, which all layers of these sizes share, and ``weights``."""
        shapes = weight_shapes(self.spec, self._sizes.local_experts)
        weights = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        return {**allocation_report(self._sizes), "weights": weights}

    def load(self, weights: Sequence[ExpertWeights]) -> None:
        """Lay the hosted ranks' weights out for the kernel, in the memory that earlier weights had.

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
        if not self._weights:
            self._weights = self._allocate_weights()
            self._fill()
        self._gpu.synchronize()  # calls on any stream may still read the earlier weights
        for one, target in zip(weights, self._weights, strict=True):
            relayout(self.spec, one, target)
        for rank in self._ranks:
            rank.received.zero_()
        self._gpu.synchronize()

    def _allocate_weights(self) -> list[KernelWeights]:
        names = ("w13", "w13_scales", "w2", "w2_scales")
        shapes = weight_shapes(self.spec, self._sizes.local_experts)
        _log.info("GPU engine: weights, %.1f MiB a rank", self.memory["weights"] / 2**20)
        made = []
        for r in range(self._sizes.ranks):
            parts = {
                name: self._gpu.zeros(f"{name} of rank {r}", shape, dtype)
                for name, (shape, dtype) in zip(names, shapes, strict=True)
            }
            made.append(KernelWeights(**parts))
        return made

    def _fill(self) -> None:
        workspace = self._workspace
        arenas = [buffers.arena.data_ptr() for buffers in workspace.buffers]
        for rank, weights in zip(self._ranks, self._weights, strict=True):
            fill_params(
                rank.params,
                self.spec,
                rank.rank,
                workspace.buffers[rank.rank],
                arenas,
                weights,
                timeout_ns=int(self._deadline * 1e9),
                report=workspace.reports[rank.rank].data_ptr(),
                errors=rank.errors.data_ptr(),
                received=rank.received.data_ptr(),
            )

    def plan_for(self, bound: int) -> Plan:
        """The plan of calls with this bound."""
        if self._plan is not None:
            return self._plan
        plan = select_plan(self._sizes, bound)
        # Far beyond the deadline of any wait for a peer, as it is for the default deadline of 300 s.
        return replace(plan, pipeline_limit_ticks=max(2, round(self._deadline)))

    def _kernels_for(self, bound: int) -> list[Kernel]:
        kernels = self._by_bound.get(bound)
        if kernels is not None:
            return kernels
        plan = self.plan_for(bound)
        kernels = self._kernels.get(plan)
        if kernels is None:
            workspace = self._workspace
            if self._gpu.capturing():
                raise EngineError(
                    "call",
                    f"the first call with bound {bound} inside a CUDA graph capture",
                    "a warmed-up layer: its kernel cannot be loaded in a capture",
                    f"Call warmup({bound}) before the capture.",
                )
            config = LaunchConfig(
                threads=THREADS, dynamic_shared=plan.shared(self._sizes).total, dependent=workspace.dependent
            )
            library = workspace.library(plan)
            pairs = zip(workspace.maps, self._ranks, strict=True)
            kernels = [Kernel(library, KERNEL, self._ordinal, config, [maps, rank.params]) for maps, rank in pairs]
            self._kernels[plan] = kernels
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

    def forward(self, calls: Sequence[Call]) -> None:
        """Stage and launch every hosted rank; nothing here waits for the GPU."""
        self._run(calls)

    def launch_staged(self, calls: Sequence[Call]) -> None:
        """`forward` on the inputs that the last call staged: for measuring the kernel alone."""
        self._run(calls, stage=False)

    def _run(self, calls: Sequence[Call], *, stage: bool = True, launched: Collection[int] | None = None) -> None:
        """One call; with `launched`, only these ranks' kernels start (how tests make peers wait in vain)."""
        self._usable()
        self._raise_reported()
        with self._workspace.lock:
            kernels = self._by_bound.get(calls[0].bound) or self._kernels_for(calls[0].bound)
            stream = self._gpu.stream()
            if needs_context(stream) and not self._driver.is_current(self._ordinal):
                with self._driver.use_device(self._ordinal):
                    self._enqueue(calls, kernels, stream, stage, launched)
            else:
                self._enqueue(calls, kernels, stream, stage, launched)

    def _enqueue(
        self,
        calls: Sequence[Call],
        kernels: Sequence[Kernel],
        stream: int,
        stage: bool,
        launched: Collection[int] | None,
    ) -> None:
        workspace = self._workspace
        if stream != workspace.last_stream:
            if not self._gpu.capturing():
                workspace.last_stream = stream
            workspace.gpu.follow()
        if len(calls) == 1:
            call, rank = calls[0], self._ranks[0]
            if stage:
                self._stage(rank, call, stream)
            out = _aligned(call.out)
            self._start(rank, kernels[0], call, out, stream)
            if out is not call.out:
                call.out.copy_(out)
            return
        # All ranks' inputs are staged before the first kernel: it waits for its peers', and whatever stood between the
        # launches of two ranks would lengthen that wait.
        if stage:
            for rank, call in zip(self._ranks, calls, strict=True):
                self._stage(rank, call, stream)
        outs = [_aligned(call.out) for call in calls]
        streams = workspace.gpu.fork(len(calls))
        for rank, kernel, call, out, own in zip(self._ranks, kernels, calls, outs, streams, strict=True):
            if launched is None or rank.rank in launched:
                self._start(rank, kernel, call, out, own)
        workspace.gpu.join()
        for call, out in zip(calls, outs, strict=True):
            if out is not call.out:
                call.out.copy_(out)

    def _stage(self, rank: _Rank, call: Call, stream: int) -> None:
        count = call.num_tokens
        self._workspace.stager(
            call.x,
            call.scales,
            call.expert_ids,
            call.expert_weights,
            0 if isinstance(count, int) else count.data_ptr(),
            rank.target,
            stream,
        )

    def _start(self, rank: _Rank, kernel: Kernel, call: Call, out: torch.Tensor, stream: int) -> None:
        params, count = rank.params, call.num_tokens
        if isinstance(count, int):
            params.tokens, params.num_tokens = count, 0
        else:
            params.tokens, params.num_tokens = call.x.shape[0], count.data_ptr()
        params.out, params.out_stride = out.data_ptr(), out.stride(0)
        kernel.launch_here(self._grid, stream)

    def buffers(self, index: int) -> Buffers:
        """Memory of the `index`-th hosted rank, as its last call left it: for inspection."""
        return self._workspace.buffers[index]

    def stamps(self, index: int) -> torch.Tensor:
        """Time stamps of the `index`-th hosted rank's last call: int64 ``[CTAs, roles, events]``, see trace.cuh."""
        return self._workspace.buffers[index].view("trace").view(self._grid, TRACE_ROLES, TRACE_EVENTS).cpu()

    def refuse(self, error: MegaMoEError) -> NoReturn:
        """All ranks are in this process: the error reaches them all."""
        raise error

    def stats(self, index: int) -> torch.Tensor:
        """Routes received by each expert of the `index`-th hosted rank; waits for outstanding work."""
        self._gpu.synchronize()
        return self._ranks[index].received.clone().cpu()

    def clear_stats(self) -> None:
        """Set the counters to zero; waits for outstanding work."""
        self._gpu.synchronize()
        for rank in self._ranks:
            rank.received.zero_()

    def check(self) -> None:
        """Wait for outstanding work, then raise what the kernels reported.

        Raises:
            DeadlineError: a wait inside a kernel expired; `reset` first.
            InputError: a call had an id or a token count out of range; the layer stays usable.
        """
        self._gpu.synchronize()
        self._raise_reported()

    def _raise_reported(self) -> None:
        workspace = self._workspace
        expired = workspace.expired() if workspace.broken is None else None
        if expired is not None:
            phase = _PHASES.get(expired.phase, str(expired.phase))
            workspace.broken = (
                f"rank {expired.rank} waited for {phase} ({expired.index}): "
                f"awaited {expired.awaited}, saw {expired.seen}"
            )
            raise DeadlineError(
                "call", workspace.broken, f"an answer within {self._deadline:g} s", "Call reset() on the layer."
            )
        for rank in self._ranks:
            bad_id, bad_count = rank.words[0], rank.words[1]
            if bad_id or bad_count:
                rank.words[0] = rank.words[1] = 0
                what = "expert_ids" if bad_id else "num_tokens"
                allowed = f"-1 to {self.spec.experts - 1}" if bad_id else "0 to the rows of x"
                raise InputError(
                    what,
                    f"a value out of range on rank {rank.rank} in an earlier call",
                    allowed,
                    "That call skipped such routes, and took a count over the rows of x as all of them.",
                )

    def reset(self) -> None:
        """Bring the workspace back to its beginning, for all layers that share it; afterwards calls work again."""
        if self._closed:
            self._usable()
        self._workspace.reset()
        for rank in self._ranks:
            rank.errors.zero_()

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
        self._gpu.synchronize()
        self._kernels.clear()
        self._by_bound.clear()
        self._ranks.clear()
        self._weights.clear()
        del self._workspace
        self._release()


def _aligned(out: torch.Tensor) -> torch.Tensor:
    """`out`, or a copy that the kernel can store to; rows past the count keep what they hold in either."""
    if out.data_ptr() % _OUT_ALIGNMENT == 0 and (out.stride(0) * 2 % _OUT_ALIGNMENT == 0 or out.shape[0] <= 1):
        return out
    return out.clone(memory_format=torch.contiguous_format)
