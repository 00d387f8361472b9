"""Time stamps of the fused kernel: what they mean, where the time goes, and Chrome's trace format for Perfetto.

The kernel's side is ``kernels/trace.cuh``: a row of words for each CTA and role, the first word the number of stamps,
each stamp ``nanoseconds << 8 | event``. An event marks the end of what its role did since its event before.

Ranks on several GPUs stamp with several clocks. They are aligned by two exchanges of the call itself: every CTA has the
counts of all ranks after every CTA of every rank has counted its routes, and sees all results after they were stored
(`megamoe.cuda.clocks`). What stays uncertain is said with every picture and table: about the time of a message over the
link, and more the later one rank comes than the others.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megamoe.cuda.arena import TRACE_EVENTS, TRACE_ROLES
from megamoe.cuda.clocks import Alignment, Exchange, align
from megamoe.errors import InputError

__all__ = ["EVENTS", "GROUPS", "ROLES", "PhaseTime", "Recording", "chrome_events", "phase_times", "write_chrome"]

EVENTS: Final = {
    1: "start",
    2: "count routes",
    3: "wait for counts, lay out",
    4: "list routes",
    5: "wait",
    6: "pull rows",
    7: "feed tile",
    8: "first GEMM",
    9: "second GEMM",
    10: "epilogue",
    11: "store rows",
    12: "wait for ranks",
    13: "combine",
    14: "wait for experts",
}
"""``Event`` of trace.cuh, as what the role did until then. GEMM and store phases include waits for data."""

ROLES: Final = ("loader", "store 0", "store 1", "dispatch", "math 0", "math 1")
"""``TraceRole`` of trace.cuh."""

GROUPS: Final = {"dispatch": (3,), "loader": (0,), "math": (4, 5), "store": (1, 2)}
"""Roles that do the same work."""

_START, _COUNTED, _LAID_OUT, _LISTED, _STORED, _PEERS = 1, 2, 3, 4, 11, 12
_MATH: Final = 4
_INTERVAL: Final = np.dtype(
    [("rank", "i4"), ("cta", "i4"), ("role", "i4"), ("event", "i4"), ("begin", "i8"), ("end", "i8")]
)


@dataclass(frozen=True)
class Recording:
    """The stamps of one call.

    Attributes:
        stamps: of each rank, int64 ``[CTAs, roles, words]`` as `CudaEngine.stamps` gives them.
        about: what was run, in words and numbers; JSON values.
        unit: what a stamp counts, ``"ns"`` or, from the simulator, ``"steps"``.
        clocks: of each rank, the GPU whose clock its stamps are of; empty: all of one.
    """

    stamps: tuple[npt.NDArray[np.int64], ...]
    about: dict[str, Any]
    unit: str = "ns"
    clocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.clocks and len(self.clocks) != len(self.stamps):
            raise InputError("clocks", list(self.clocks), f"one for each of {len(self.stamps)} ranks", "Name them all.")
        for rank, one in enumerate(self.stamps):
            if one.ndim != 3 or one.shape[1:] != (TRACE_ROLES, TRACE_EVENTS) or one.dtype != np.int64:
                raise InputError(
                    "stamps",
                    f"{one.dtype} {list(one.shape)} for rank {rank}",
                    f"int64 [CTAs, {TRACE_ROLES}, {TRACE_EVENTS}]",
                    "Record them with a tracing plan.",
                )
            if not one[:, _MATH, 0].all():
                raise InputError(
                    "stamps", f"rank {rank} has CTAs without a stamp", "stamps of every CTA", "Call first."
                )

    @property
    def truncated(self) -> bool:
        """Whether a role had more events than a row holds."""
        return any(int(one[:, :, 0].max()) >= TRACE_EVENTS - 1 for one in self.stamps)

    def save(self, path: Path) -> None:
        """Write everything to an ``.npz`` file."""
        arrays: dict[str, Any] = {f"rank{r}": one for r, one in enumerate(self.stamps)}
        facts = {"unit": self.unit, "clocks": self.clocks, **self.about}
        about = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
        with path.open("wb") as file:
            np.savez_compressed(file, about=about, **arrays)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote.

        Raises:
            InputError: no such file, or it is not a recording.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(file["about"].tobytes())
                stamps = tuple(file[f"rank{r}"] for r in range(len(file.files) - 1))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InputError("load", str(path), "a file that megamoe trace --save wrote", f"{error}.") from error
        unit, clocks = about.pop("unit"), tuple(about.pop("clocks", ()))
        return cls(stamps, about, unit, clocks)

    def alignment(self) -> Alignment:
        """What is taken from each rank's stamps, and how sure that is, in `unit`; zeros where all have one clock.

        Raises:
            InputError: stamps that are not of one call.
        """
        if len(set(self.clocks)) < 2:
            return Alignment((0,) * len(self.stamps), 0)
        moments = [_moments(one) for one in self.stamps]

        def stamped(event: int, which: int) -> list[int | None]:
            return [m[event][which] if event in m else None for m in moments]

        first, last = 0, 1
        pairs = ((_COUNTED, _LAID_OUT), (_STORED, _PEERS))
        exchanges = [Exchange(stamped(sent, last), stamped(seen, first)) for sent, seen in pairs]
        return align(self.clocks, exchanges, tick=max(_tick(one) for one in self.stamps))

    def intervals(self) -> npt.NDArray[Any]:
        """What every role did when, sorted by rank, CTA, role and time.

        Returns:
            Structured array: rank, cta, role, event, begin, end; times from the first start of any CTA, in `unit`, as
            `alignment` brings them together.
        """
        parts = []
        for rank, (one, offset) in enumerate(zip(self.stamps, self.alignment().offsets, strict=True)):
            for part in _rank_intervals(rank, one):
                part["begin"] -= offset
                part["end"] -= offset
                parts.append(part)
        found = np.concatenate(parts) if parts else np.empty(0, _INTERVAL)
        if len(found):
            first = found["begin"].min()
            found["begin"] -= first
            found["end"] -= first
        return found


def _decoded(stamps: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Times and events of all stamps of a rank."""
    rows = stamps.reshape(-1, TRACE_EVENTS).view(np.uint64)
    words = rows[:, 1:][np.arange(1, TRACE_EVENTS) <= rows[:, :1].astype(np.int64)]
    return (words >> np.uint64(8)).astype(np.int64), (words & np.uint64(0xFF)).astype(np.int64)


def _moments(stamps: npt.NDArray[np.int64]) -> dict[int, tuple[int, int]]:
    """First and last stamp of every event of a rank."""
    times, events = _decoded(stamps)
    chosen = {int(event): times[events == event] for event in np.unique(events)}
    return {event: (int(own.min()), int(own.max())) for event, own in chosen.items()}


def _tick(stamps: npt.NDArray[np.int64]) -> int:
    """Smallest step of a rank's clock: the smallest difference of stamps that are not equal."""
    steps = np.diff(np.unique(_decoded(stamps)[0]))
    return int(steps.min()) if len(steps) else 0


def _rank_intervals(rank: int, stamps: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    words = stamps.view(np.uint64)
    for cta in range(len(stamps)):
        listed = None
        for role in (
            *range(_MATH, TRACE_ROLES),
            *range(_MATH),
        ):  # math rows have the routing, in which the others begin
            count = int(stamps[cta, role, 0])
            if count == 0:
                continue
            row = words[cta, role, 1 : count + 1]
            times, events = (row >> np.uint64(8)).astype(np.int64), (row & np.uint64(0xFF)).astype(np.int32)
            if listed is None:
                at = np.flatnonzero(events == _LISTED)
                listed = times[at[0]] if len(at) else times[0]
            part = np.empty(count, _INTERVAL)
            part["rank"], part["cta"], part["role"], part["event"] = rank, cta, role, events
            part["end"] = times
            part["begin"][1:] = times[:-1]
            part["begin"][0] = times[0] if role >= _MATH else min(listed, times[0])
            yield part[part["event"] != _START]


@dataclass(frozen=True)
class PhaseTime:
    """Time in one phase of one group of roles.

    Attributes:
        group: of `GROUPS`.
        phase: of `EVENTS`.
        count: how often, over all CTAs.
        mean: time of a CTA in it (of one of its roles, where there are two), in the recording's unit.
        longest: the longest single one.
        share: `mean` as a part of the call, from the first start to the last end.
    """

    group: str
    phase: str
    count: int
    mean: float
    longest: int
    share: float


def phase_times(recording: Recording, rank: int | None = None) -> list[PhaseTime]:
    """Where the time goes: a row for each group of roles and phase, and the rest of the call as ``"idle"``.

    Args:
        recording: the stamps.
        rank: of one rank; None: means over all.
    """
    found = recording.intervals()
    if rank is not None:
        found = found[found["rank"] == rank]
    if not len(found):
        return []
    ctas = len(np.unique(found[["rank", "cta"]]))
    call = float(found["end"].max() - found["begin"].min())
    rows = []
    for group, roles in GROUPS.items():
        own = found[np.isin(found["role"], roles)]
        spent = own["end"] - own["begin"]
        total = 0.0
        for event in np.unique(own["event"]):
            chosen = spent[own["event"] == event]
            mean = float(chosen.sum()) / (ctas * len(roles))
            total += mean
            rows.append(
                PhaseTime(group, EVENTS.get(int(event), str(event)), len(chosen), mean, int(chosen.max()), mean / call)
            )
        rows.append(PhaseTime(group, "idle", 0, call - total, 0, 1 - total / call))
    return rows


def chrome_events(recording: Recording, ctas: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
    """Events of Chrome's trace format: a process for each rank, a thread for each CTA and role, times in microseconds.

    Format: "Trace Event Format", complete events (``ph`` X) and metadata (``ph`` M), which Perfetto reads.

    Args:
        recording: the stamps. Simulated steps count as nanoseconds.
        ctas: only these; None: all.
    """
    found = recording.intervals()
    if ctas is not None:
        found = found[np.isin(found["cta"], list(ctas))]
    for rank in np.unique(found["rank"]):
        where = f" on GPU {recording.clocks[rank]}" if recording.clocks else ""
        yield {"ph": "M", "name": "process_name", "pid": int(rank), "args": {"name": f"rank {rank}{where}"}}
    for rank, cta, role in np.unique(found[["rank", "cta", "role"]]):
        thread = {"pid": int(rank), "tid": int(cta) * TRACE_ROLES + int(role)}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"CTA {cta:03d} {ROLES[role]}"}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}}
    for rank, cta, role, event, begin, end in found.tolist():
        yield {
            "ph": "X",
            "name": EVENTS.get(event, str(event)),
            "cat": ROLES[role],
            "pid": rank,
            "tid": cta * TRACE_ROLES + role,
            "ts": begin / 1e3,
            "dur": (end - begin) / 1e3,
        }


def write_chrome(recording: Recording, path: Path, ctas: Sequence[int] | None = None) -> None:
    """Write `chrome_events` as a JSON file that https://ui.perfetto.dev opens."""
    with path.open("w") as file:
        about = {**recording.about, "clock_uncertainty_ns": recording.alignment().uncertainty}
        file.write('{"displayTimeUnit":"ns","otherData":' + json.dumps(about) + ',"traceEvents":[\n')
        for n, event in enumerate(chrome_events(recording, ctas)):
            file.write((",\n" if n else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
