"""The ranks of one group that live in this process: their engine, their agreement, their life from load to close.

`MegaMoE` is one such rank as the user sees it, `LocalGroup` all of them; both are thin over this class.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Protocol, TypeAlias, cast

import torch

import megamoe
from megamoe.control import Control
from megamoe.engine import Backend, Call, Engine, Peer, Placement, create_engine, who_am_i
from megamoe.errors import ClosedError, InputError, MegaMoEError, SpecError, WeightError, stated
from megamoe.inputs import Activations, check_call, positive_number
from megamoe.recognise import Usual, trusted
from megamoe.spec import MoESpec, WeightFormat
from megamoe.weights import ExpertWeights

__all__ = ["CheckpointLike", "Runtime", "WeightSource"]


class CheckpointLike(Protocol):
    """What `Runtime.load` needs of a checkpoint; `megamoe.checkpoint` returns one."""

    @property
    def spec(self) -> MoESpec: ...

    def read(self, first_expert: int = ..., count: int | None = ...) -> ExpertWeights:
        """The experts ``[first_expert, first_expert + count)``."""


WeightSource: TypeAlias = "CheckpointLike | ExpertWeights"


def _slice(weights: ExpertWeights, first: int, count: int) -> ExpertWeights:
    """Experts ``[first, first + count)`` of a whole layer, as views."""

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[first : first + count]

    return ExpertWeights(
        format=weights.format,
        w13=weights.w13[first : first + count],
        w2=weights.w2[first : first + count],
        w13_scale=part(weights.w13_scale),
        w2_scale=part(weights.w2_scale),
        first_expert=first,
        gate_up=weights.gate_up,
    )


def _check_scales(weights: ExpertWeights) -> None:
    for name in ("w13_scale", "w2_scale"):
        scale: torch.Tensor | None = getattr(weights, name)
        if scale is None:
            continue
        bad = (scale.view(torch.uint8) == 255) if scale.dtype == torch.float8_e8m0fnu else ~scale.isfinite()
        if bool(bad.any()):
            index = [int(i) for i in bad.nonzero()[0]]
            raise WeightError(
                f"{name}{index}",
                "NaN" if scale.dtype == torch.float8_e8m0fnu else float(scale[tuple(index)]),
                "finite scales",
                f"Expert {weights.first_expert + index[0]} is damaged: read or quantise it again.",
            )


def _annotated(label: str) -> contextlib.AbstractContextManager[None]:
    """A range around a call's host side: NVTX where there is a GPU, else one of torch's profiler."""
    if torch.cuda.is_available():
        return cast("contextlib.AbstractContextManager[None]", torch.cuda.nvtx.range(label))
    return cast("contextlib.AbstractContextManager[None]", torch.profiler.record_function(label))


class Runtime:
    """Engine and agreement for the ranks of `placement`.

    Args and errors: those of `megamoe.MegaMoE` and `megamoe.local_group`; `bounds` is the way out of a bad
    `max_tokens`, `refusal` an error of this rank that the others have not heard of yet.
    """

    def __init__(
        self,
        spec: MoESpec,
        placement: Placement,
        control: Control,
        max_tokens: int,
        backend: Backend,
        bounds: str,
        *,
        refusal: MegaMoEError | None = None,
        sm_reserve: int = 0,
    ) -> None:
        self.spec = spec
        self.placement = placement
        self.max_tokens = max_tokens
        self.weight_format: WeightFormat | None = None
        self.label: str | None = None
        self._control = control
        self._usual: Usual | None = None
        trusted()  # tried now: a call may lie in the capture of a graph
        self._busy = threading.Lock()
        self._engine: Engine | None = None
        failure, facts = refusal, {}
        try:
            if failure is None:
                facts = self._facts(bounds, sm_reserve)
        except Exception as error:
            failure = stated("constructor", error)
        alone = len(placement.local) == placement.ranks
        engine: Engine | None = None
        try:
            numbers = () if alone or failure is not None else who_am_i(backend)
            peers = control.agree("construct", facts, error=failure, numbers=numbers)
            if not alone:
                placement = replace(placement, peers=tuple(Peer(host=host, gpu=gpu) for host, gpu in peers))
            try:
                engine = create_engine(spec, placement, control, max_tokens, backend, sm_reserve=sm_reserve)
            except Exception as error:
                failure = stated("constructor", error)
            control.agree("construct", {"engine": None if engine is None else engine.name}, error=failure)
            assert engine is not None  # else there was a failure
            engine.connect()
        except BaseException:
            if engine is not None:
                engine.close()
            control.close()
            raise
        self._engine = engine

    def _facts(self, bounds: str, sm_reserve: int) -> dict[str, object]:
        """What must be equal on all ranks; raises what is wrong with it on this one."""
        spec = self.spec
        if not isinstance(spec, MoESpec):
            raise SpecError("spec", type(spec).__name__, "a megamoe.MoESpec", "Pass MoESpec(hidden=..., ...).")
        positive_number("max_tokens", self.max_tokens, integer=True, way_out=bounds)
        if type(sm_reserve) is not int or sm_reserve < 0:
            raise InputError("sm_reserve", sm_reserve, "a number of SMs, 0 or more", "Leave it out for all SMs.")
        self.local_experts = spec.local_experts(self.placement.ranks)
        return {**asdict(spec), "max_tokens": self.max_tokens, "megamoe version": megamoe.__version__}

    @property
    def closed(self) -> bool:
        return self._engine is None

    @property
    def engine(self) -> Engine:
        """The engine; raises `ClosedError` after `close`."""
        if self._engine is None:
            raise ClosedError("layer", "a closed layer", "a layer before close()", "Make a new layer.")
        return self._engine

    def loaded_format(self) -> WeightFormat:
        """Format of the loaded weights; raises `ClosedError` or `InputError` where there are none."""
        _ = self.engine
        if self.weight_format is None:
            raise InputError("layer", "a layer without weights", "a loaded layer", "Call load() first.")
        return self.weight_format

    def _enter(self) -> Engine:
        """The engine, held until `_busy` is released."""
        engine = self.engine
        if not self._busy.acquire(blocking=False):
            raise InputError(
                "layer",
                "a call while another one is running",
                "one call at a time on one layer",
                "Wait for the other thread, or make a second layer.",
            )
        return engine

    @contextmanager
    def _exclusive(self) -> Iterator[Engine]:
        engine = self._enter()
        try:
            yield engine
        finally:
            self._busy.release()

    def first_expert(self, index: int) -> int:
        """Global id of the first expert of the `index`-th hosted rank."""
        return self.placement.local[index] * self.local_experts

    def _obtain(self, source: WeightSource, index: int) -> ExpertWeights:
        first, count = self.first_expert(index), self.local_experts
        if not isinstance(source, ExpertWeights):
            if not (hasattr(source, "read") and hasattr(source, "spec")):
                raise WeightError(
                    "source",
                    type(source).__name__,
                    "a megamoe.checkpoint or ExpertWeights",
                    "Use megamoe.checkpoint(path, layer=...).",
                )
            for name in ("hidden", "intermediate", "experts"):
                given, wanted = getattr(source.spec, name), getattr(self.spec, name)
                if given != wanted:
                    raise WeightError(
                        f"checkpoint {name}", given, f"the layer's {name} = {wanted}", "Make the layer with its .spec."
                    )
            weights = source.read(first, count)
        elif source.local_experts == self.spec.experts and source.first_expert == 0:
            weights = _slice(source, first, count)
        else:
            weights = source
        if weights.first_expert != first or weights.local_experts != count:
            given = f"experts [{weights.first_expert}, {weights.first_expert + weights.local_experts})"
            raise WeightError(
                "weights",
                given,
                f"experts [{first}, {first + count}) of rank {self.placement.local[index]}, or all {self.spec.experts}",
                "Set first_expert, or pass the whole layer.",
            )
        weights.check(self.spec, count)
        device = self.engine.devices[index]
        if device.type == "cpu" and weights.w13.device.type != "cpu":
            raise WeightError("weights", f"device {weights.w13.device}", "cpu", "Move them with .cpu().")
        _check_scales(weights)
        return weights

    def load(self, sources: Sequence[WeightSource]) -> None:
        """Load one source per hosted rank; collective."""
        with self._exclusive() as engine:
            failure: MegaMoEError | None = None
            weights: list[ExpertWeights] = []
            facts: dict[str, object] = {}
            try:
                weights = [self._obtain(source, index) for index, source in enumerate(sources)]
                formats = sorted({w.format for w in weights})
                if len(formats) != 1:
                    raise WeightError(
                        "weights", formats, "one format on all ranks", "Load every rank from one checkpoint."
                    )
                facts = {"weight format": formats[0]}
            except Exception as error:
                failure = stated("load", error)
            self._control.agree("load", facts, error=failure)
            engine.load(weights)
            self.weight_format = weights[0].format

    def warmup(self, bound: int | None) -> None:
        """Do what the first call with `bound` would do; collective."""
        with self._exclusive() as engine:
            failure: MegaMoEError | None = None
            bound = self.max_tokens if bound is None else bound
            try:
                self.loaded_format()
                positive_number("bound", bound, integer=True, way_out="Leave it out for max_tokens.")
                if bound > self.max_tokens:
                    raise InputError("bound", bound, f"at most max_tokens = {self.max_tokens}", "Use a smaller bound.")
            except MegaMoEError as error:
                failure = error
            self._control.agree("warmup", {"bound": bound}, error=failure)
            try:
                engine.warmup(bound)
            except Exception as error:
                failure = stated("warmup", error)
            # Compiling takes long: a rank that called at once would spend its deadline on waiting for the others.
            self._control.agree("warmup", error=failure)

    def _forward(self, engine: Engine, calls: Sequence[Call]) -> None:
        if self.label is None:
            engine.forward(calls)
        else:
            with _annotated(self.label):
                engine.forward(calls)

    def call_one(
        self,
        x: Activations,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        out: torch.Tensor | None,
        num_tokens: int | torch.Tensor | None,
        bound: int | None,
    ) -> torch.Tensor:
        """`call` for a single hosted rank, in few Python frames: each costs a call some tenths of a microsecond."""
        engine = self._engine
        if engine is None or not self._busy.acquire(False):
            engine = self._enter()
        try:
            usual = self._usual
            try:
                if usual is not None and num_tokens is None and usual.has(x, expert_ids, expert_weights, out, bound):
                    if out is None:
                        out = x.new_empty(x.shape)
                    call = Call(
                        x=x, scales=None, expert_ids=expert_ids, expert_weights=expert_weights, out=out,
                        num_tokens=usual.tokens, bound=usual.bound, plain=True,
                    )  # fmt: skip
                else:
                    call = check_call(
                        self.spec, self.weight_format or self.loaded_format(), self.max_tokens, engine.devices[0],
                        x, expert_ids, expert_weights, out, num_tokens, bound,
                    )  # fmt: skip
                    if call.plain and num_tokens is None:
                        self._usual = Usual.after(usual, call, bound)
            except Exception as error:
                engine.refuse(stated("call", error))
            if self.label is None:
                engine.forward((call,))
            else:
                self._forward(engine, (call,))
            return call.out
        finally:
            self._busy.release()

    def call(self, prepare: Callable[[WeightFormat], Sequence[Call]]) -> list[torch.Tensor]:
        """Run one call; `prepare` checks the arguments and may raise, which refuses the call on all ranks."""
        engine = self._enter()  # not `_exclusive`: a generator costs every call a microsecond
        try:
            try:
                calls = prepare(self.loaded_format())
            except Exception as error:
                engine.refuse(stated("call", error))
            self._forward(engine, calls)
            return [call.out for call in calls]
        finally:
            self._busy.release()

    def check(self) -> None:
        with self._exclusive() as engine:
            engine.check()

    def reset(self) -> None:
        with self._exclusive() as engine:
            engine.reset()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            self._control.close()
