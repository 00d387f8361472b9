"""``megamoe bench scale``: a group of ranks on all GPUs of a machine, right and timed, in one run of a few minutes.

In this order: calls against the oracle and one rank (`scale_checks.correctness`), the table of times
(`mega.benchmark`), replays of a graph, a soak. Each finished row is written at once, so that a run that is cut short
keeps what it did and can be resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megamoe.bench import results
from megamoe.bench.models import model
from megamoe.bench.request import Tick
from megamoe.bench.results import Row, layer_keys
from megamoe.errors import InputError
from megamoe.spec import MoESpec

if TYPE_CHECKING:
    from megamoe.cuda.toolchain import Job
    from megamoe.engine import Backend

__all__ = ["MODELS", "PROTOCOL", "TOKENS", "Budget", "Record", "Scale", "kernels", "run"]

MODELS: Final = ("flash", "pro", "mimo")
TOKENS: Final = tuple(1 << n for n in range(3, 14))
"""Models and token counts of the table by default: 8 to 8192 tokens on each rank."""

PROTOCOL: Final = (
    "correctness: calls of the whole group, a few tokens of every rank against the oracle, all tokens against the bits "
    "of one rank; replays: one CUDA graph over all GPUs, inputs changing, outputs poisoned; soak: random counts, one "
    "rank late in 3 of 10 calls; table: "
)

_REPLAYS: Final = 1_000
_SOAK: Final = {"cuda": 2_000, "cpu": 40}
_RANKS_ON_CPU: Final = 4

_SAMPLES: Final = ((512, 30), (0, 100))
"""Samples of a measurement at the most: 30 from 512 tokens on, 100 below."""

_LEAST_SAMPLES: Final = 5
_CHECKED_TOKENS: Final = 16
"""Tokens of a timed cell that are compared with the oracle; correctness has compared more of them before."""

_RESERVE: Final = 60.0
"""Seconds kept for what comes after the table."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What to run; `planned` makes a checked one.

    Attributes:
        backend: ``"cuda"``, or ``"cpu"``, where a tiny layer stands in and nothing is timed.
        devices: the GPUs, over which the ranks are dealt in blocks; empty on the CPU.
        ranks: ranks of the group.
        models: of the table.
        tokens: of the table, on each rank.
        budget: seconds that the whole run should take.
    """

    backend: Backend
    devices: tuple[int, ...]
    ranks: int
    models: tuple[str, ...]
    tokens: tuple[int, ...]
    budget: float

    @staticmethod
    def planned(
        *,
        backend: Backend = "auto",
        devices: Sequence[int] | None = None,
        ranks: int | None = None,
        models: Sequence[str] = MODELS,
        tokens: Sequence[int] = TOKENS,
        budget: float = 540.0,
    ) -> Scale:
        """Fill in what this machine has.

        Args:
            backend: ``"auto"`` is ``"cuda"`` where torch sees a GPU.
            devices: by default all GPUs.
            ranks: by default one for each GPU; a multiple of their number.
            models, tokens: of the table.
            budget: seconds.

        Raises:
            InputError: names the argument that does not fit the others or this machine.
        """
        import torch

        present = torch.cuda.device_count()
        if backend == "auto":
            backend = "cuda" if present else "cpu"
        if ranks is not None and ranks < 1:
            raise InputError("ranks", ranks, "a number from 1", "Leave it out for one on each GPU.")
        if not budget > 0:
            raise InputError("budget", budget, "seconds above 0", "The default is 540.")
        for name in models:
            model(name)
        if not tokens or min(tokens) < 1:
            raise InputError("tokens", tuple(tokens), "numbers from 1", "For example: --tokens 8,64,512.")
        if backend == "cpu":
            if devices is not None:
                raise InputError("devices", tuple(devices), "none on the CPU engine", "Leave it out.")
            here = Scale(
                backend="cpu", devices=(), ranks=ranks or _RANKS_ON_CPU, models=(), tokens=(), budget=float(budget)
            )
        else:
            gpus = tuple(range(present)) if devices is None else tuple(devices)
            if not gpus or len(set(gpus)) < len(gpus) or not set(gpus) <= set(range(present)):
                allowed = f"different GPUs of the {present} that torch sees"
                raise InputError("devices", gpus, allowed, "megamoe doctor shows them; --backend cpu needs none.")
            here = Scale(
                backend="cuda",
                devices=gpus,
                ranks=ranks or len(gpus),
                models=tuple(models),
                tokens=tuple(sorted(set(tokens))),
                budget=float(budget),
            )
        here._check()
        return here

    def _check(self) -> None:
        from megamoe.cuda.arena import MAX_RANKS

        if self.devices and self.ranks % len(self.devices):
            n = len(self.devices)
            raise InputError(
                "ranks",
                self.ranks,
                f"a multiple of the {n} GPUs {', '.join(map(str, self.devices))}, such as {n} or {2 * n}",
                "Each GPU hosts equally many ranks: change --ranks, or name other GPUs by --devices.",
            )
        if self.backend == "cuda" and self.ranks > MAX_RANKS:
            raise InputError("ranks", self.ranks, f"at most {MAX_RANKS}", "Use fewer ranks on each GPU.")

    @property
    def gpus(self) -> int:
        """GPUs that take part."""
        return len(self.devices)

    @property
    def checked(self) -> tuple[str, MoESpec, tuple[int, int]]:
        """Name and layer that correctness, replays and soak run, and the bounds of their calls: one for which narrow
        tiles are chosen, one for wide ones."""
        if self.backend == "cpu":
            tiny = MoESpec(hidden=256, intermediate=128, experts=2 * self.ranks, topk=2, clamp=10.0)
            return "tiny", tiny, (3, 16)
        return "flash", self.layer("flash"), (16, 512)

    def layer(self, name: str) -> MoESpec:
        """A model's layer with as many experts on each rank as in a group of eight."""
        from megamoe.bench.mega import EXPERTS_PER_RANK

        return replace(model(name).spec, experts=EXPERTS_PER_RANK[name] * self.ranks)


class Budget:
    """Shares what is left of a run's time among the measurements to come: fewer samples, never fewer measurements.

    Args:
        seconds: for the whole run.
        clock: seconds since some moment.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._per_sample, self._per_cell = 0.03, 3.0

    @property
    def left(self) -> float:
        """Seconds, negative when it is used up."""
        return self._end - self._clock()

    def samples(self, most: int, cells: int) -> int:
        """Samples for each of the two measurements of a cell.

        Args:
            most: as many as there is any use for.
            cells: cells that are still to come, this one included.
        """
        share = (self.left - _RESERVE) / max(1, cells) - self._per_cell
        return max(_LEAST_SAMPLES, min(most, int(share / 2 / self._per_sample)))

    def learn(self, samples: int, measuring: float, other: float) -> None:
        """A cell took `measuring` seconds for `samples` samples in all, and `other` seconds for the rest."""
        self._per_sample = measuring / max(1, samples)
        self._per_cell = (self._per_cell + other) / 2


class Record:
    """Rows of a run, in memory and in its result file.

    Args:
        path: the file, or None for none.
        facts: top level of the file.
        resume: take over the file's rows of this run and commit instead of measuring them again.
    """

    def __init__(self, path: Path | None, facts: dict[str, Any], *, resume: Scale | None = None) -> None:
        self._path, self._facts = path, facts
        self.rows: list[Row] = []
        if resume is not None and path is not None and path.exists():
            steps = _steps(resume)
            self.rows = [
                row
                for row in results.load(path)["rows"]
                if row.get("commit") == facts["commit"] and row["ok"] and any(_is(row, step) for step in steps)
            ]
        self.resumed = len(self.rows)

    def has(self, step: Row) -> bool:
        """Whether there is a row with these fields."""
        return any(_is(row, step) for row in self.rows)

    def add(self, row: Row) -> None:
        """Keep a row, on disk before the next one is measured."""
        self.rows.append(row)
        if self._path is not None:
            results.write(self._path, self._facts, [row])


def _is(row: Row, step: Row) -> bool:
    return all(row.get(name) == value for name, value in step.items())


def kernels(scale: Scale) -> list[Job]:
    """Every fused kernel that a run on GPUs launches, in order, once each."""
    from megamoe.bench import mega
    from megamoe.cuda.fused import job, sizes_of
    from megamoe.cuda.select import call_plan

    _, spec, bounds = scale.checked
    most = max(mega.MAX_TOKENS, *scale.tokens)
    wanted = [(spec, scale.ranks, max(bounds), bounds), (spec, 1, _pool(scale), (_pool(scale),))]
    wanted += [(scale.layer(name), scale.ranks, most, scale.tokens) for name in scale.models]
    found: list[Job] = []
    for layer, ranks, cap, tokens in wanted:
        sizes = sizes_of(layer, ranks, cap)
        for m in tokens:
            one = job(call_plan(sizes, m, mega.DEADLINE), sizes)
            if one not in found:
                found.append(one)
    return found


def _compile(jobs: Sequence[Job], tick: Callable[[int], None]) -> None:
    """Compile in parallel; `tick` hears how many are in the cache."""
    from megamoe.cuda.cache import Cache, default_directory
    from megamoe.cuda.parallel import compile_all
    from megamoe.cuda.toolchain import is_cached

    cache = Cache(default_directory())
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(compile_all, jobs)
        while wait([work], timeout=0.5).not_done:
            tick(sum(is_cached(job, cache) for job in jobs))
        work.result()


def _pool(scale: Scale) -> int:
    """Tokens of the one-rank layer: all of a call, and as many as one rank has, so that replays can start elsewhere."""
    return (scale.ranks + 1) * max(scale.checked[2])


def _keys(scale: Scale) -> Row:
    name, spec, _ = scale.checked
    layer = layer_keys(name, spec, scale.ranks)
    return {**layer, "engine": "megamoe", "format": "fp8_block", "variant": scale.backend}


def _steps(scale: Scale) -> list[Row]:
    """Keys of every row of a run, in order."""
    from megamoe.bench.scale_checks import CASES

    bounds = scale.checked[2]
    steps: list[Row] = [
        {"phase": "correctness", "routing": kind, "shares": share, "bound": bound, "tokens": bound}
        for bound in bounds
        for kind, share in CASES
        if scale.ranks > 1 or (kind, share) in (("random", "even"), ("zipf", "even"), ("hot", "even"))
    ]
    steps += [{"phase": "table", "model": name, "tokens": m} for name in scale.models for m in scale.tokens]
    if scale.backend == "cuda":
        steps += [{"phase": "replays", "routing": "random", "shares": "even", "bound": b, "tokens": b} for b in bounds]
    steps.append({"phase": "soak", "routing": "random", "shares": "random", "bound": max(bounds)})
    return [{**(_keys(scale) if step["phase"] != "table" else {"ranks": scale.ranks}), **step} for step in steps]


def run(
    scale: Scale,
    record: Record,
    tick: Tick = lambda *_: None,
    *,
    clock: Callable[[], float] = time.monotonic,
    replays: int = _REPLAYS,
    soak: int | None = None,
) -> None:
    """Run what `record` does not have yet, and add it there row by row.

    Args:
        scale: what to run.
        record: where rows go.
        tick: progress.
        clock: for tests.
        replays: of each graph.
        soak: calls of the soak; by default 2,000, on the CPU 40.

    Raises:
        EngineError: the GPU engine cannot host the ranks, or there is too little memory.
        DeadlineError, CompileError: as the engine raises them; what was done before is kept.
    """
    budget = Budget(scale.budget, clock)
    steps = _steps(scale)
    missing = [step for step in steps if not record.has(step)]

    def at(what: str) -> None:
        tick(what, len(record.rows) / len(steps))

    if missing and scale.backend == "cuda":
        jobs = kernels(scale)
        _compile(jobs, lambda ready: at(f"kernels: {ready} of {len(jobs)} compiled"))
    calls = (replays, _SOAK[scale.backend] if soak is None else soak)
    for phases, part in ((("correctness",), _correctness), (("table",), _table), (("replays", "soak"), _endurance)):
        wanted = [step for step in missing if step["phase"] in phases]
        if not wanted:
            continue
        for row in part(scale, wanted, budget, calls, at):
            record.add(row)
            at(f"{row['phase']}: {row['model']}, {row.get('tokens', row['bound'])} tokens")
        if scale.backend == "cuda":
            import torch

            torch.cuda.empty_cache()  # for the arenas, which are not torch's memory
    tick("done", 1.0)


_Part = Callable[[str], None]


def _correctness(scale: Scale, wanted: list[Row], budget: Budget, calls: tuple[int, int], at: _Part) -> Iterator[Row]:
    from megamoe.bench import scale_checks

    _, spec, bounds = scale.checked
    at("correctness: weights")
    with scale_checks.subject(
        spec, scale.ranks, scale.devices or None, max(bounds), _pool(scale), scale.backend
    ) as subject:
        for keys in wanted:
            yield {**keys, **scale_checks.correctness(subject, keys["routing"], keys["shares"], keys["bound"])}


def _most(tokens: int) -> int:
    return next(samples for least, samples in _SAMPLES if tokens >= least)


def _table(scale: Scale, wanted: list[Row], budget: Budget, calls: tuple[int, int], at: _Part) -> Iterator[Row]:
    import torch

    from megamoe.bench import mega
    from megamoe.reference import LIMIT

    left = len(wanted)
    began: list[tuple[float, int]] = []

    def samples(tokens: int) -> int:
        number = began[0][1] if began else budget.samples(_most(tokens), left)
        began.append((budget.left, number))
        return number

    for name in scale.models:
        tokens = [step["tokens"] for step in wanted if step["model"] == name]
        if not tokens:
            continue
        at(f"table: {name}, weights")
        torch.cuda.empty_cache()  # what the layer before had is not this one's
        start = budget.left
        for row in mega.benchmark(
            name,
            tokens,
            ranks=scale.ranks,
            devices=scale.devices,
            max_tokens=max(mega.MAX_TOKENS, *tokens),
            samples=samples,
            e2e=True,
            check=True,
            checked_tokens=_CHECKED_TOKENS,
        ):
            taken = sum(number for _, number in began)
            budget.learn(taken, began[0][0] - budget.left, start - began[0][0])
            began.clear()
            start, left = budget.left, left - 1
            yield {
                **row,
                "phase": "table",
                "ok": row["error"] <= LIMIT,
                "experts": f"{row['experts_per_rank'] * scale.ranks} of {model(name).spec.experts}",
                "gpu_gib": _used_gib(scale),
            }


def _used_gib(scale: Scale) -> float:
    """GiB in use on the fullest GPU: ranks there, their share of the measurement, and what torch keeps."""
    import torch

    both = [torch.cuda.mem_get_info(device) for device in scale.devices]
    return round(max(total - free for free, total in both) / 2**30, 2)


def _endurance(scale: Scale, wanted: list[Row], budget: Budget, calls: tuple[int, int], at: _Part) -> Iterator[Row]:
    from megamoe.bench import scale_checks

    _, spec, bounds = scale.checked
    at("replays and soak: weights")
    with scale_checks.subject(
        spec, scale.ranks, scale.devices or None, max(bounds), _pool(scale), scale.backend
    ) as subject:
        group = subject.group
        given = scale_checks.pool_of(spec, _pool(scale), subject.devices[0])
        expected = subject.wanted(*given)
        for keys in wanted:
            start = budget.left
            if keys["phase"] == "replays":
                at(f"replays: {calls[0]} of {keys['bound']} tokens")
                figures = scale_checks.replays(group, given, expected, keys["bound"], calls[0])
            else:
                figures = scale_checks.soak(
                    group, given, expected, bounds, calls[1], on_call=lambda n: at(f"soak: {n} of {calls[1]} calls")
                )
            yield {**keys, **figures, "seconds": round(start - budget.left, 3)}
