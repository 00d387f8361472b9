"""What a group of ranks must do right before its speed counts: the oracle's values and one rank's bits, in every call.

All of it goes through `megamoe.local_group`, on the CPU engine as on GPUs; only graphs and launch skew need GPUs. One
rank's bits are asked of the GPU engine; the CPU engine's depend on how tokens are batched (docs/numerics.md), so there
the error counts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from megamoe.bench import mega
from megamoe.bench.check import held, oracle_error
from megamoe.engine import Backend
from megamoe.errors import InputError
from megamoe.group import LocalGroup, local_group
from megamoe.layer import MegaMoE
from megamoe.reference import LIMIT, relative_error
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["CASES", "SHARES", "Subject", "correctness", "delay", "pool_of", "replays", "shares", "soak", "subject"]

Columns = list[list[torch.Tensor]]
"""Rows, ids, route weights: each a list with one tensor a rank, on its device."""

SHARES: Final = ("even", "uneven", "zero-token ranks", "one rank")
"""How the tokens of a call lie on the ranks: M on each; more from rank to rank; none on every other; all on
the last."""

CASES: Final = (
    ("random", "even"),
    ("zipf", "even"),
    ("hot", "even"),
    ("all-remote", "even"),
    ("random", "uneven"),
    ("zipf", "uneven"),
    ("hot", "uneven"),
    ("random", "zero-token ranks"),
    ("hot", "zero-token ranks"),
    ("random", "one rank"),
)
"""Routing and shares of the calls that `correctness` makes."""

_ORACLE_TOKENS: Final = 32
"""Tokens of a call that are compared with the oracle, dealt to the ranks that have any."""

_VARIANTS: Final = 4
"""Inputs that replays alternate: a result left over from the replay before is then a wrong one."""

_LATE: Final = 0.3
_LATE_CYCLES: Final = 200_000
"""Share of a soak's calls in which one rank starts late, and by how many cycles at most: about 100 us."""


def shares(kind: str, ranks: int, tokens: int) -> list[int]:
    """Token counts of the ranks, at most `tokens` each; `kind` is one of `SHARES`.

    Raises:
        InputError: an unknown kind.
    """
    if kind not in SHARES:
        raise InputError("shares", kind, ", ".join(SHARES), "Pick one of the listed names.")
    if kind == "even":
        return [tokens] * ranks
    if kind == "uneven":
        return [tokens * (r + 1) // ranks - (r % 2 if tokens >= ranks else 0) for r in range(ranks)]
    if kind == "one rank":
        return [0] * (ranks - 1) + [tokens]
    return [0 if r % 2 else tokens for r in range(ranks)]


@dataclass
class Subject:
    """A loaded group, the same layer on one rank, and the weights for the oracle.

    Attributes:
        spec: the layer.
        pieces: each rank's weights, on its device.
        group: the group.
        alone: the layer on one rank, on the device of rank 0.
    """

    spec: MoESpec
    pieces: list[ExpertWeights]
    group: LocalGroup
    alone: MegaMoE

    @property
    def devices(self) -> list[torch.device]:
        """Device of each rank."""
        return [member.device for member in self.group]

    def wanted(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What one rank makes of these tokens, which lie on rank 0's device."""
        y = self.alone(x, ids, weights, bound=self.alone.max_tokens)
        self.alone.check()
        return y


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def subject(
    spec: MoESpec, ranks: int, devices: Sequence[int] | None, max_tokens: int, pool: int, backend: Backend
) -> Iterator[Subject]:
    """A `Subject` with random FP8 weights, made where they are used.

    Args:
        spec: the layer.
        ranks: ranks of the group.
        devices: GPUs over which they are dealt in blocks; None on the CPU.
        max_tokens: token cap of a rank of the group.
        pool: token cap of the one-rank layer.
        backend: ``"cuda"`` or ``"cpu"``.
    """
    with local_group(
        spec, ranks=ranks, devices=devices, max_tokens=max_tokens, backend=backend, deadline=mega.DEADLINE
    ) as group:
        local = spec.local_experts(ranks)
        pieces = [
            replace(mega.random_weights(spec, local, member.device, seed=r), first_expert=r * local)
            for r, member in enumerate(group)
        ]
        group.load(pieces)
        home = group[0].device
        with _on(home), MegaMoE(spec, max_tokens=pool, backend=backend, deadline=mega.DEADLINE) as alone:
            alone.load(held(pieces, range(spec.experts), home))
            yield Subject(spec, pieces, group, alone)


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Values whose bits differ: an int64 scalar on their device."""
    return (a.view(torch.int16) != b.view(torch.int16)).sum()


def _joined(tensors: Sequence[torch.Tensor], home: torch.device) -> torch.Tensor:
    return torch.cat([t.to(home) for t in tensors])


def _exact(group: LocalGroup) -> bool:
    return group.engine == "cuda"


def correctness(on: Subject, kind: str, share: str, bound: int) -> dict[str, Any]:
    """One call of the group against the oracle and against one rank.

    Returns:
        Figures of a row: ``error`` (relative Frobenius, of a few tokens of every rank), ``differing`` (values of all
        tokens whose bits are not the one-rank layer's), ``counts``, ``ok``.
    """
    home, ranks = on.devices[0], len(on.group)
    counts = shares(share, ranks, bound)
    calls, _ = mega.random_calls(on.spec, kind, bound, on.devices)
    columns = [
        [getattr(call, name)[:n] for call, n in zip(calls, counts, strict=True)]
        for name in ("x", "expert_ids", "expert_weights")
    ]
    outs = [torch.full_like(x, float("nan")) for x in columns[0]]
    on.group(*columns, outs=outs, bound=bound)
    on.group.check()
    given = [_joined(column, home) for column in columns]
    got = _joined(outs, home)
    differing = int(_differing(got, on.wanted(*given)))
    few = max(1, _ORACLE_TOKENS // max(1, sum(n > 0 for n in counts)))
    some = [_joined([t[:few] for t in column], home) for column in (*columns, outs)]
    error = oracle_error(on.spec, on.pieces, some[0], some[1], some[2], some[3])
    right = error <= LIMIT and (differing == 0 or not _exact(on.group))
    return {"error": error, "differing": differing, "counts": counts, "ok": right}


def pool_of(spec: MoESpec, tokens: int, device: torch.device, seed: int = 1) -> list[torch.Tensor]:
    """Random rows, distinct random ids and route weights of `tokens` tokens on `device`."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, spec.hidden, generator=g, device=device).bfloat16()
    keys = torch.rand(tokens, spec.experts, generator=g, device=device)
    weights = torch.rand(tokens, spec.topk, generator=g, device=device) + 0.1
    return [x, keys.argsort(dim=1)[:, : spec.topk].int().contiguous(), weights]


def _everywhere(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> dict[torch.device, Any]:
    return {device: [t.to(device) for t in tensors] for device in dict.fromkeys(devices)}


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def replays(
    group: LocalGroup, given: Sequence[torch.Tensor], wanted: torch.Tensor, bound: int, calls: int
) -> dict[str, Any]:
    """Replays of one CUDA graph over all GPUs, with changing inputs and poisoned outputs.

    Args:
        group: a loaded group on GPUs.
        given: rows, ids and weights of a pool of more than `bound` tokens.
        wanted: their results.
        bound: tokens of each rank in a call.
        calls: replays.

    Returns:
        Figures of a row: ``calls``, ``differing`` (values of all replays whose bits are not `wanted`'s), ``ok``.
    """
    devices = [member.device for member in group]
    home, room = devices[0], wanted.shape[0] - bound
    pools = _everywhere([*given, wanted], devices)

    def part(variant: int, index: int) -> list[torch.Tensor]:
        starts = [(variant * 37 + r * bound) % (room + 1) for r in range(len(devices))]
        return [pools[d][index][s : s + bound] for d, s in zip(devices, starts, strict=True)]

    variants = [[part(variant, index) for index in range(4)] for variant in range(_VARIANTS)]
    columns: Columns = [[t.clone() for t in column] for column in variants[0][:3]]
    outs = [torch.zeros_like(x) for x in columns[0]]
    group.warmup(bound)
    group(*columns, outs=outs, bound=bound)
    group.check()
    bad = {device: torch.zeros((), dtype=torch.int64, device=device) for device in pools}
    with torch.cuda.device(home):
        graph = torch.cuda.CUDAGraph()
        # A stream of this GPU: torch's own for captures belongs to the GPU of the first one.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(home)):  # type: ignore[no-untyped-call]
            group(*columns, outs=outs, bound=bound)
        for number in range(calls):
            *inputs, results = variants[number % _VARIANTS]
            for column, new in zip(columns, inputs, strict=True):
                for tensor, values in zip(column, new, strict=True):
                    tensor.copy_(values)
            for out in outs:
                out.fill_(float("nan"))
            _synchronize(devices)
            graph.replay()
            torch.cuda.synchronize(home)  # the graph's end, which is the end of all GPUs' parts
            for device, out, expected in zip(devices, outs, results, strict=True):
                bad[device] += _differing(out, expected)
    group.check()
    differing = sum(int(count) for count in bad.values())
    return {"calls": calls, "differing": differing, "ok": differing == 0}


def delay(group: LocalGroup, rank: int, cycles: int) -> None:
    """Let a rank of a group on GPUs start its next call late: its GPU sleeps, or its stream where ranks share one."""
    engine: Any = group._runtime.engine
    place = engine._workspace.place_of[rank]
    streams = place.gpu._ranks
    mine = streams[place.hosted.index(rank)] if len(place.hosted) > 1 and streams else None
    with torch.cuda.device(place.ordinal), torch.cuda.stream(mine):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def soak(
    group: LocalGroup,
    given: Sequence[torch.Tensor],
    wanted: torch.Tensor,
    bounds: Sequence[int],
    calls: int,
    *,
    seed: int = 0,
    on_call: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Calls with random counts and places in a pool, on GPUs with ranks that come late.

    Args:
        group: a loaded group.
        given: rows, ids and weights of a pool of more tokens than any bound.
        wanted: their results.
        bounds: a call's bound is one of these.
        calls: how many.
        seed: of everything random.
        on_call: called with the number of calls made, now and then.

    Returns:
        Figures of a row: ``calls``, ``tokens_in_all``, ``late_starts``, ``differing`` (values of all calls whose bits
        are not `wanted`'s), ``ok``; on the CPU ``error``, the worst call's relative one against `wanted`.
    """
    dice, ranks = random.Random(seed), len(group)
    devices = [member.device for member in group]
    pools = _everywhere([*given, wanted], devices)
    bad = {device: torch.zeros((), dtype=torch.int64, device=device) for device in pools}
    for bound in bounds:
        group.warmup(bound)
    total = late = 0
    worst = 0.0
    for number in range(calls):
        bound = dice.choice(bounds)
        counts = [dice.choice((0, 1, bound, dice.randrange(bound + 1))) for _ in range(ranks)]
        starts = [dice.randrange(wanted.shape[0] - n + 1) for n in counts]
        columns = [[pools[d][i][s : s + n] for d, s, n in zip(devices, starts, counts, strict=True)] for i in range(4)]
        if dice.random() < _LATE and devices[0].type == "cuda":
            delay(group, dice.randrange(ranks), dice.randrange(_LATE_CYCLES))
            late += 1
        outs = group(*columns[:3], bound=bound)
        for device, out, expected in zip(devices, outs, columns[3], strict=True):
            bad[device] += _differing(out, expected)
        if not _exact(group):
            worst = max(worst, relative_error(torch.cat(outs), torch.cat(columns[3])))
        total += sum(counts)
        if number % 100 == 99:
            if number % 500 == 499:
                group.check()
            on_call(number + 1)
    group.check()
    differing = sum(int(count) for count in bad.values())
    figures = {"calls": calls, "tokens_in_all": total, "late_starts": late, "differing": differing}
    if _exact(group):
        return {**figures, "ok": differing == 0}
    return {**figures, "error": worst, "ok": worst <= LIMIT}
