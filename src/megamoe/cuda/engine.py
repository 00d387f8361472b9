"""The GPU engine: the ranks of this process, each one launch of the fused kernel a call.

One rank runs on the caller's stream. Several ranks of one process share a GPU: each has its part of the SMs and its own
stream, forked from the caller's stream and joined to it again, so that their kernels run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NoReturn

import torch

from megamoe.cuda.arena import REPORT_WORDS, TRACE_EVENTS, TRACE_ROLES, Params, allocation_report
from megamoe.cuda.driver import Driver, LaunchConfig, open_driver
from megamoe.cuda.fused import KERNEL, Buffers, Maps, fill_params, job, sizes_of, tensor_maps
from megamoe.cuda.launch import Kernel, Library, TensorMaps, aligned
from megamoe.cuda.plan import THREADS, Plan
from megamoe.cuda.relayout import KernelWeights, relayout
from megamoe.cuda.select import select_plan
from megamoe.cuda.staging import Stager
from megamoe.cuda.toolchain import compile_kernel
from megamoe.engine import Call, Placement
from megamoe.errors import ClosedError, DeadlineError, EngineError, InputError, MegaMoEError
from megamoe.spec import BLOCK, MoESpec
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from megamoe.control import Control

__all__ = ["CudaEngine"]

_PHASES: Final = {
    1: "the peers' route counts",
    2: "this rank's own counts",
    3: "the route table",
    4: "token rows",
    5: "the intermediate",
    6: "the peers' results",
}
"""`Phase` of kernels/sync.cuh, in words."""


@dataclass
class _Rank:
    """One hosted rank: memory, arguments and kernels by plan."""

    rank: int
    buffers: Buffers
    weights: KernelWeights
    report: torch.Tensor
    params: Params
    maps: Maps
    stream: torch.cuda.Stream | None
    x: torch.Tensor
    x_scales: torch.Tensor
    ids: torch.Tensor
    route_weights: torch.Tensor


class CudaEngine:
    """The fused kernel behind the engine interface.

    Args:
        spec: the layer; FP8 block weights.
        placement: the ranks of this process. Ranks in other processes are not supported by this engine yet.
        control: the group's control channel.
        max_tokens: token cap of a rank.
        sm_reserve: SMs that the kernel leaves to others.
        deadline: seconds that a wait inside the kernel may take.
        plan: use this plan for every call; None: chosen from the bound of a call.
        trace: provide memory for the time stamps of tracing plans.
        driver: for tests; by default the real one.

    Raises:
        EngineError: no usable GPU, or a placement that this engine cannot host.
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
        deadline: float = 120.0,
        plan: Plan | None = None,
        trace: bool = False,
        driver: Driver | None = None,
    ) -> None:
        if placement.local != tuple(range(placement.ranks)):
            raise EngineError(
                "group",
                f"{placement.ranks} ranks, {len(placement.local)} in this process",
                "all ranks in one process (megamoe.local_group), or one rank",
                "Use local_group, or backend='cpu' for ranks in several processes.",
            )
        self.spec = spec
        self._driver = driver if driver is not None else open_driver()
        self._ordinal = placement.devices[0] if placement.devices else torch.cuda.current_device()
        if placement.devices is not None and len(set(placement.devices)) > 1:
            raise EngineError(
                "devices", list(placement.devices), "one GPU", "Put all ranks of the local group on one GPU."
            )
        self.device = torch.device("cuda", self._ordinal)
        self._info = self._driver.device(self._ordinal)
        if self._info.arch != "sm_90a":
            raise EngineError("device", f"{self._info.name} ({self._info.arch})", "sm_90a", "Use backend='cpu'.")
        ranks = placement.ranks
        self._grid = max(1, (self._info.multiprocessors - sm_reserve) // ranks)
        self._sizes = sizes_of(spec, ranks, max_tokens)
        if trace:
            self._sizes = replace(self._sizes, trace_words=self._grid * TRACE_ROLES * TRACE_EVENTS)
        self._plan = plan
        self._deadline_ns = int(deadline * 1e9)
        self._kernels: dict[Plan, list[Kernel]] = {}
        self._plans: dict[int, Plan] = {}
        self._libraries: list[Library] = []
        self._maps = TensorMaps(self._driver)
        self._broken: str | None = None
        self._closed = False
        self._loaded = False
        with torch.cuda.device(self.device):
            self._stager = Stager(spec.hidden, spec.input_scales, self._ordinal, driver=driver)
            self._ranks = [self._make_rank(r, ranks) for r in range(ranks)]
            arenas = [r.buffers.arena.data_ptr() for r in self._ranks]
            for r in self._ranks:
                fill_params(
                    r.params,
                    spec,
                    r.rank,
                    r.buffers,
                    arenas,
                    r.weights,
                    timeout_ns=self._deadline_ns,
                    report=r.report.data_ptr(),
                )
                for target, map_spec in zip(r.maps.maps, tensor_maps(r.buffers), strict=True):
                    target.set(self._maps.tiled(map_spec))
            torch.cuda.synchronize(self.device)  # the buffers are zero before any rank starts

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of one rank's buffers."""
        return allocation_report(self._sizes)

    def _make_rank(self, rank: int, ranks: int) -> _Rank:
        sizes = self._sizes
        buffers = Buffers.allocate(sizes, self.device)
        return _Rank(
            rank=rank,
            buffers=buffers,
            weights=KernelWeights.empty(self.spec, sizes.local_experts, self.device),
            report=torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=True),
            params=aligned(Params),
            maps=aligned(Maps),
            stream=torch.cuda.Stream(self.device) if ranks > 1 else None,  # type: ignore[no-untyped-call]
            x=buffers.view("x").view(sizes.capacity, sizes.hidden),
            x_scales=buffers.view("x_scales").view(sizes.capacity, sizes.hidden // BLOCK),
            ids=buffers.view("ids").view(sizes.capacity, sizes.topk),
            route_weights=buffers.view("route_weights").view(sizes.capacity, sizes.topk),
        )

    def load(self, weights: Sequence[ExpertWeights]) -> None:
        """Lay the hosted ranks' weights out for the kernel, in the memory that earlier weights had."""
        self._usable()
        for rank, one in zip(self._ranks, weights, strict=True):
            relayout(self.spec, one, rank.weights)
        torch.cuda.synchronize(self.device)
        self._loaded = True

    def plan_for(self, bound: int) -> Plan:
        """The plan of calls with this bound."""
        if self._plan is not None:
            return self._plan
        plan = self._plans.get(bound)
        if plan is None:
            plan = self._plans[bound] = select_plan(self._sizes, bound)
        return plan

    def _kernels_for(self, plan: Plan) -> list[Kernel]:
        kernels = self._kernels.get(plan)
        if kernels is None:
            if torch.cuda.is_current_stream_capturing():
                raise EngineError(
                    "call", "a first call inside a graph capture", "a warmed-up layer", "Call warmup(bound) first."
                )
            work = job(plan, self._sizes, self._info.arch)
            # Time stamps cost a tracing plan a few spilled registers, which no other plan may have.
            compiled = compile_kernel(work.source, work.config, work.arch, policy="warn" if plan.trace else None)
            library = Library(self._driver, compiled)
            config = LaunchConfig(threads=THREADS, dynamic_shared=plan.shared(self._sizes).total)
            kernels = [Kernel(library, KERNEL, self._ordinal, config, [r.maps, r.params]) for r in self._ranks]
            self._libraries.append(library)
            self._kernels[plan] = kernels
        return kernels

    def warmup(self, bound: int) -> None:
        """Compile and load the kernel for `bound`."""
        self._usable()
        self._kernels_for(self.plan_for(bound))

    def force_plan(self, plan: Plan | None) -> None:
        """Use `plan` for all calls from now on; None: chosen from the bound again."""
        self._plan = plan

    def forward(self, calls: Sequence[Call]) -> None:
        """Stage and launch every hosted rank; nothing here waits for the GPU."""
        self._run(calls, stage=True)

    def launch_staged(self, calls: Sequence[Call]) -> None:
        """`forward` on the inputs that the last call staged: for measuring the kernel alone."""
        self._run(calls, stage=False)

    def _run(self, calls: Sequence[Call], *, stage: bool) -> None:
        self._usable()
        self._raise_reported()
        kernels = self._kernels_for(self.plan_for(calls[0].bound))
        current = torch.cuda.current_stream(self.device)
        if len(calls) == 1:
            if stage:
                self._stage(self._ranks[0], calls[0])
            self._start(self._ranks[0], kernels[0], calls[0], current)
            return
        for rank in self._ranks:
            assert rank.stream is not None
            rank.stream.wait_stream(current)
        # All ranks' inputs first: a rank's kernel waits for its peers', and whatever stands between the launches of two
        # ranks would lengthen that wait.
        for rank, call in zip(self._ranks, calls, strict=True):
            assert rank.stream is not None
            if stage:
                with torch.cuda.stream(rank.stream):
                    self._stage(rank, call)
        for rank, kernel, call in zip(self._ranks, kernels, calls, strict=True):
            assert rank.stream is not None
            self._start(rank, kernel, call, rank.stream)
        for rank in self._ranks:
            assert rank.stream is not None
            current.wait_stream(rank.stream)

    def _stage(self, rank: _Rank, call: Call) -> None:
        tokens = call.x.shape[0]
        if tokens == 0:
            return
        if call.scales is None:
            self._stager(call.x, rank.x[:tokens], rank.x_scales[:tokens])
        else:
            rank.x[:tokens].copy_(call.x.view(torch.uint8))
            rank.x_scales[:tokens].copy_(call.scales)
        rank.ids[:tokens].copy_(call.expert_ids)
        rank.route_weights[:tokens].copy_(call.expert_weights)

    def _start(self, rank: _Rank, kernel: Kernel, call: Call, stream: torch.cuda.Stream) -> None:
        params = rank.params
        with kernel.lock:
            params.out, params.out_stride = call.out.data_ptr(), call.out.stride(0) if call.out.shape[0] else 0
            if isinstance(call.num_tokens, int):
                params.tokens, params.num_tokens = call.num_tokens, 0
            else:
                params.tokens, params.num_tokens = call.x.shape[0], call.num_tokens.data_ptr()
            kernel.launch(self._grid, int(stream.cuda_stream))

    def stamps(self, index: int) -> torch.Tensor:
        """Time stamps of the `index`-th hosted rank's last call: int64 ``[CTAs, roles, events]``, see trace.cuh."""
        return self._ranks[index].buffers.view("trace").view(self._grid, TRACE_ROLES, TRACE_EVENTS).cpu()

    def refuse(self, error: MegaMoEError) -> NoReturn:
        """All ranks are in this process: the error reaches them all."""
        raise error

    def stats(self, index: int) -> torch.Tensor:
        """Routes received by each expert of the `index`-th hosted rank; waits for outstanding work."""
        return self._ranks[index].buffers.view("received").cpu()

    def clear_stats(self) -> None:
        """Set the counters to zero, in stream order."""
        for rank in self._ranks:
            rank.buffers.view("received").zero_()

    def check(self) -> None:
        """Wait for outstanding work, then raise what the kernels reported."""
        torch.cuda.synchronize(self.device)
        self._raise_reported()

    def _raise_reported(self) -> None:
        for rank in self._ranks:
            words = rank.report.tolist()
            if words[0] == 1:
                phase = _PHASES.get(words[2], str(words[2]))
                self._broken = (
                    f"rank {words[1]} waited for {phase} ({words[3]}): awaited {words[4]}, saw {words[5] & 0xFFFFFFFF}"
                )
                raise DeadlineError(
                    "call", self._broken, f"an answer within {self._deadline_ns / 1e9:g} s", "Call reset()."
                )
            if words[8] or words[9]:
                rank.report[8:10] = 0
                what = "expert_ids" if words[8] else "num_tokens"
                allowed = f"-1 to {self.spec.experts - 1}" if words[8] else "0 to the rows of x"
                raise InputError(
                    what, f"a value out of range on rank {rank.rank}", allowed, "An earlier call skipped such values."
                )

    def reset(self) -> None:
        """Zero all buffers that carry state between calls; afterwards calls work again."""
        torch.cuda.synchronize(self.device)
        for rank in self._ranks:
            rank.report.zero_()
            for name in ("counts", "done", "abort", "epoch", "barrier", "own_counts", "arrived", "halves"):
                rank.buffers.view(name).zero_()
        torch.cuda.synchronize(self.device)
        self._broken = None

    def _usable(self) -> None:
        if self._closed:
            raise ClosedError("layer", "closed", "an open layer", "Make a new one.")
        if self._broken is not None:
            raise ClosedError("layer", self._broken, "a working layer", "Call reset() on every rank.")

    def close(self) -> None:
        """Wait for outstanding work and free everything."""
        if self._closed:
            return
        self._closed = True
        torch.cuda.synchronize(self.device)
        self._kernels.clear()
        for library in self._libraries:
            library.close()
        self._libraries.clear()
        self._ranks.clear()
