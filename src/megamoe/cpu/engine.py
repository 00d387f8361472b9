"""The CPU engine: dispatch, experts and combine for the ranks hosted in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from megamoe.control import Control
from megamoe.cpu.combine import Results, combine
from megamoe.cpu.exchange import make_exchange
from megamoe.cpu.experts import Experts, make_experts
from megamoe.cpu.routing import Outgoing, pack_routes, plan_dispatch, unpack_routes
from megamoe.engine import Call, Placement
from megamoe.errors import InputError, MegaMoEError, stated
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["CpuEngine"]


class CpuEngine:
    """An `megamoe.engine.Engine` on the CPU, one process or several.

    A call goes: header (does every rank go on, and how many rows and routes come from each) -> rows and routes to the
    owners, each row once per owner -> both products -> header -> BF16 results back -> sum in slot order in float32.
    """

    name = "cpu"

    def __init__(self, spec: MoESpec, placement: Placement, control: Control, max_tokens: int) -> None:
        self.devices = (torch.device("cpu"),) * len(placement.local)
        self._spec = spec
        self._placement = placement
        self._control = control
        self._exchange = make_exchange(placement, control)
        self._weight_bytes = 0
        self._experts: list[Experts] = []
        self._stats = [torch.zeros(spec.local_experts(placement.ranks), dtype=torch.int64) for _ in placement.local]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of one rank's weights, which are the given tensors themselves; nothing else is kept between calls."""
        return {"weights": self._weight_bytes}

    @property
    def copied(self) -> tuple[str, ...]:
        """Nothing: the given tensors are read in every call."""
        return ()

    def load(self, weights: Sequence[ExpertWeights]) -> None:
        self._experts = [make_experts(self._spec, one) for one in weights]
        self._weight_bytes = max(one.nbytes for one in weights)
        self.clear_stats()

    @torch.inference_mode()
    def warmup(self, bound: int) -> None:
        """Compile the fused loops; the bound does not matter."""
        for experts in self._experts:
            experts.warmup()

    def refuse(self, error: MegaMoEError) -> NoReturn:
        self._control.agree("call", error=error)
        raise error

    def stats(self, index: int) -> torch.Tensor:
        return self._stats[index].clone()

    def clear_stats(self) -> None:
        for counter in self._stats:
            counter.zero_()

    def check(self) -> None:
        """Nothing is outstanding after a call."""

    def connect(self) -> None:
        """The connections of `control` are all that this engine needs."""

    def reset(self) -> None:
        self._control.reset()

    def close(self) -> None:
        self._experts = []

    def forward(self, calls: Sequence[Call]) -> None:
        if torch.is_inference_mode_enabled():  # entering it again costs a call some microseconds
            self._forward(calls)
        else:
            with torch.inference_mode():
                self._forward(calls)

    def _forward(self, calls: Sequence[Call]) -> None:
        # Whatever can fail on one rank alone is done before its peers are told that it goes on.
        rows: list[torch.Tensor] = []
        try:
            plans = [self._plan(call, rank) for call, rank in zip(calls, self._placement.local, strict=True)]
            if self._placement.ranks > 1:
                rows = [one.rows(call.x, call.scales) for one, call in zip(self._experts, calls, strict=True)]
        except Exception as error:
            self.refuse(stated("call", error))
        if self._placement.ranks == 1:
            self._one_rank(calls[0], plans[0][0])
            return
        incoming = self._announce(calls, plans)
        received = self._dispatch(rows, plans, incoming)
        results = self._compute(received)
        returned = self._exchange(
            "combine",
            [[part.view(torch.uint8) for part in parts] for parts in results],
            [[len(part.position) for part in plan] for plan in plans],
        )
        for call, plan, parts in zip(calls, plans, returned, strict=True):
            down = torch.cat([part.view(torch.bfloat16) for part in parts])
            combine(call, torch.cat([part.position for part in plan]), Results(down))

    def _plan(self, call: Call, rank: int) -> list[Outgoing]:
        tokens = len(call.x)
        if isinstance(call.num_tokens, torch.Tensor):
            tokens = int(call.num_tokens)
            if not 0 <= tokens <= len(call.x):
                raise InputError(
                    "num_tokens", tokens, f"0 to {len(call.x)}, the rows of x", "Correct the value in the tensor."
                )
        else:
            tokens = call.num_tokens
        ids, weights = call.expert_ids, call.expert_weights
        if tokens != len(ids):
            ids, weights = ids[:tokens], weights[:tokens]
        try:
            return plan_dispatch(self._spec, self._placement.ranks, ids, weights)
        except InputError as error:
            if len(self._placement.local) == 1:
                raise
            raise InputError(f"rank {rank}'s {error.argument}", error.given, error.allowed, error.way_out) from None

    def _one_rank(self, call: Call, plan: Outgoing) -> None:
        experts = self._experts[0]
        x, scales = call.x, call.scales
        if len(plan.tokens) != len(x):
            x, scales = _take(x, plan.tokens), None if scales is None else scales[plan.tokens]
        results, counts = experts.run(experts.operand(x, scales), plan.row, plan.expert, plan.weight)
        self._stats[0] += counts
        combine(call, plan.position, results, ordered=True)

    def _announce(self, calls: Sequence[Call], plans: list[list[Outgoing]]) -> list[list[list[int]]]:
        """Rows and routes that each hosted rank gets from each rank: ``[local][source] == [rows, routes]``."""
        if len(self._placement.local) == self._placement.ranks:
            return [
                [[len(plan[rank].tokens), len(plan[rank].row)] for plan in plans]
                for rank in range(len(self._placement.local))
            ]
        numbers = [n for part in plans[0] for n in (len(part.tokens), len(part.row))]
        everyone = self._control.agree("call", {"bound": calls[0].bound}, numbers=numbers)
        rank = self._placement.local[0]
        return [[sent[2 * rank : 2 * rank + 2] for sent in everyone]]

    def _dispatch(
        self, rows: list[torch.Tensor], plans: list[list[Outgoing]], incoming: list[list[list[int]]]
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Rows and packed routes that each hosted rank gets from each rank."""
        got_rows = self._exchange(
            "dispatch",
            [[mine[part.tokens] for part in plan] for mine, plan in zip(rows, plans, strict=True)],
            [[counts[0] for counts in sources] for sources in incoming],
        )
        got_routes = self._exchange(
            "dispatch",
            [[pack_routes(part) for part in plan] for plan in plans],
            [[counts[1] for counts in sources] for sources in incoming],
        )
        return [list(zip(a, b, strict=True)) for a, b in zip(got_rows, got_routes, strict=True)]

    def _compute(self, received: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[list[torch.Tensor]]:
        """Results of the routes that each hosted rank got, split by source."""
        failure: MegaMoEError | None = None
        results: list[list[torch.Tensor]] = []
        try:
            for index, (experts, sources) in enumerate(zip(self._experts, received, strict=True)):
                first_row = 0
                row, expert, weight = [], [], []
                for rows, packed in sources:
                    r, e, w = unpack_routes(packed)
                    row.append(r + first_row)
                    expert.append(e)
                    weight.append(w)
                    first_row += len(rows)
                got, counts = experts.run(
                    experts.unpack(torch.cat([rows for rows, _ in sources])),
                    torch.cat(row),
                    torch.cat(expert),
                    torch.cat(weight),
                )
                self._stats[index] += counts
                results.append(list(torch.split(got.in_order(), [len(packed) for _, packed in sources])))
        except Exception as error:  # most likely out of memory; the peers wait for this rank's results
            failure = stated("compute", error)
        self._control.agree("compute", error=failure)
        return results


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a BF16 or e4m3 matrix (torch cannot index e4m3)."""
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8)[index].view(torch.float8_e4m3fn)
    return x[index]
