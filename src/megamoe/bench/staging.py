"""Time staging on a GPU beside a plain device copy that moves the same bytes.

Run it with ``python -m megamoe.bench.staging``. Two protocols: *sustained*, one call's share of a warm CUDA graph of
many calls; *paced*, one call alone after the L2 was flushed and the GPU slept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from megamoe.bench import results
from megamoe.bench.environment import device_slug, facts
from megamoe.bench.models import MODELS
from megamoe.cuda.staging import PLANS, Stager, StagingPlan, select_plan
from megamoe.spec import BLOCK, ScaleFormat

__all__ = ["PROTOCOL", "TOKENS", "launch_cost", "measure", "table"]

TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROTOCOL: Final = (
    "sustained: one CUDA graph of 100 calls (20 from 512 tokens) on the same tensors, replayed warm, events around a "
    "replay, divided by the calls; paced: L2 flushed by writing 512 MiB, the GPU asleep for about 10 ms, events around "
    "one call; candidates of one shape alternate A B B A; random data; tbps counts bytes read plus written"
)
_SAMPLES: Final = {True: 100, False: 30}  # small, large
_LARGE: Final = 512
_SLEEP_CYCLES: Final = 16_000_000
_FLUSH_BYTES: Final = 512 << 20

Call = Callable[[], object]


def staging_bytes(rows: int, hidden: int) -> int:
    """Bytes that staging has to read and write: BF16 in, e4m3 and one float32 per 128 columns out."""
    return rows * (2 * hidden + hidden + 4 * (hidden // BLOCK))


@dataclass(frozen=True)
class Candidate:
    """Something to time: the fields of its rows, and what one call does."""

    fields: dict[str, Any]
    call: Call


class Clock:
    """Timing with events on the current CUDA device."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def graph(self, call: Call, calls: int) -> Call:
        """A replay of `calls` calls, captured after one call to warm up."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        return graph.replay

    def once(self, call: Call) -> float:
        """Microseconds of one call on the GPU, with what the events themselves cost."""
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def pace(self) -> None:
        """Flush the L2 and let the GPU sleep."""
        self._flush.zero_()
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]


def _alternate(calls: Sequence[Call], samples: int, time_it: Callable[[Call], float]) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in calls]
    for index in range(samples):
        order = range(len(calls))
        for i in order if index % 2 == 0 else reversed(order):
            times[i].append(time_it(calls[i]))
    return times


def _rows(
    clock: Clock, candidates: Sequence[Candidate], moved: int, samples: int, calls: int, protocol: str
) -> Iterator[results.Row]:
    def paced(call: Call) -> float:
        clock.pace()
        return clock.once(call)

    if protocol == "sustained":
        replays = [clock.graph(c.call, calls) for c in candidates]
        _alternate(replays, 3, clock.once)
        times = [[t / calls for t in ts] for ts in _alternate(replays, samples, clock.once)]
    else:
        times = _alternate([c.call for c in candidates], samples, paced)
    for candidate, ts in zip(candidates, times, strict=True):
        speeds = [moved / t * 1e-6 for t in ts]
        yield {
            **candidate.fields,
            "protocol": protocol,
            "kernel_us": results.timing(ts),
            "tbps": round(median(speeds), 4),
        }


def _candidates(
    stagers: dict[tuple[ScaleFormat, bool], Stager], rows: int, hidden: int, all_plans: bool
) -> tuple[list[Candidate], int]:
    generator = torch.Generator(device="cuda").manual_seed(rows * 8191 + hidden)
    x = torch.randn(rows, hidden, generator=generator, device="cuda").bfloat16()
    q = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device="cuda")
    s = torch.empty(rows, hidden // BLOCK, dtype=torch.float32, device="cuda")
    moved = staging_bytes(rows, hidden)
    source = torch.randint(0, 256, (moved // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    name = next(m.name for m in MODELS.values() if m.spec.hidden == hidden)
    base = {"model": name, "hidden": hidden, "tokens": rows}
    found = [Candidate({**base, "engine": "copy"}, lambda: target.copy_(source))]

    def add(stager: Stager, plan: StagingPlan, label: str, extra: dict[str, Any]) -> None:
        fields = {**base, "engine": "megamoe", "format": stager.scale_format, "plan": label, **extra}
        found.append(Candidate(fields, lambda: stager(x, q, s, plan=plan)))

    chosen = select_plan(rows, hidden, next(iter(stagers.values())).device.multiprocessors)
    for (scale_format, dependent), stager in stagers.items():
        extra = {} if dependent else {"variant": "no dependent launch"}
        add(stager, chosen, f"auto:{chosen.name}", extra)
        if all_plans and dependent and scale_format == "float32":
            for plan in PLANS:
                add(stager, plan, plan.name, extra)
    return found, moved


def measure(
    hidden: Sequence[int], tokens: Sequence[int], *, seconds: float, say: Callable[[str], None] = print
) -> list[results.Row]:
    """Rows for every shape, both scale formats; shapes that do not fit into `seconds` are left out, and said so."""
    start = time.monotonic()
    clock = Clock()
    rows: list[results.Row] = []
    formats: tuple[ScaleFormat, ...] = ("float32", "ue8m0")
    for h in hidden:
        stagers: dict[tuple[ScaleFormat, bool], Stager] = {(f, True): Stager(h, f) for f in formats}
        stagers["float32", False] = Stager(h, "float32", dependent=False)
        for m in tokens:
            if time.monotonic() - start > seconds:
                say(f"out of time before H={h} M={m}")
                break
            candidates, moved = _candidates(stagers, m, h, all_plans=True)
            small = m < _LARGE
            new = list(_rows(clock, candidates, moved, _SAMPLES[small], 100 if small else 20, "sustained"))
            if m == max(tokens):
                new += _rows(clock, candidates, moved, _SAMPLES[False], 1, "paced")
            rows += new
            say(_line(h, m, new))
            del candidates
    return rows


def launch_cost(hidden: int = 4096, rows: int = 8, calls: int = 500, samples: int = 20) -> dict[str, Any]:
    """Microseconds of CPU of one staging call: the mean of `calls` calls, `samples` times."""
    stager = Stager(hidden)
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    q = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device="cuda")
    s = torch.empty(rows, hidden // BLOCK, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(calls):
            stager(x, q, s)
        times.append((time.perf_counter() - before) / calls * 1e6)
    torch.cuda.synchronize()
    return results.timing(times)


def _line(hidden: int, tokens: int, rows: Sequence[results.Row]) -> str:
    parts = []
    for protocol in ("sustained", "paced"):
        here = [r for r in rows if r["protocol"] == protocol]
        copy = next((r["kernel_us"]["median"] for r in here if r["engine"] == "copy"), None)
        for r in here:
            label = r["engine"] if r["engine"] == "copy" else f"{r['format'][0]}:{r['plan']}{'-' * ('variant' in r)}"
            us = r["kernel_us"]["median"]
            parts.append(f"{label} {us:.2f}" + (f" ({copy / us:.2f})" if copy and tokens >= _LARGE else ""))
        if here and protocol == "sustained":
            parts.append("|")
    return f"H{hidden} M{tokens}: " + " ".join(parts)


def table(document: dict[str, Any], tokens: Sequence[int] = (1, 32, 128, 512, 2048, 8192)) -> str:
    """Markdown of a result file: microseconds of the automatic plan (float32 scales / ue8m0 scales / copy)."""
    found = {
        (r["hidden"], r["tokens"], r["protocol"], r.get("format", "copy")): r["kernel_us"]["median"]
        for r in document["rows"]
        if "protocol" in r and "variant" not in r and (r["engine"] == "copy" or r["plan"].startswith("auto:"))
    }
    widths = sorted({h for h, *_ in found})
    lines = ["| M | protocol | " + " | ".join(f"H={h}" for h in widths) + " |", "|---|---|" + "---|" * len(widths)]
    for m, protocol in [*((m, "sustained") for m in tokens), (max(tokens), "paced")]:
        cells = [
            " / ".join(f"{found[h, m, protocol, kind]:.2f}" for kind in ("float32", "ue8m0", "copy")) for h in widths
        ]
        lines.append(f"| {m} | {protocol} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: measure, print one line a shape, merge into the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of result files")
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 7168, 2048, 6144])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=120.0, help="start no shape after this long")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing: print the table of a result file")
    parser.add_argument("--commit", help="of the source, where there is no git")
    chosen = parser.parse_args(arguments)
    if chosen.table is not None:
        print(table(results.load(chosen.table)), end="")
        return
    known = facts("staging", device="cuda:0", gpus=1, protocol=PROTOCOL)
    if chosen.commit:
        known["commit"] = chosen.commit
    cost = launch_cost()
    print("launch, CPU us a call:", json.dumps({k: v for k, v in cost.items() if k != "samples"}), flush=True)
    rows = measure(chosen.hidden, chosen.tokens, seconds=chosen.seconds, say=lambda text: print(text, flush=True))
    launch = {"model": "flash", "hidden": 4096, "tokens": 8, "engine": "megamoe", "phase": "launch", "cpu_us": cost}
    path = results.result_path(chosen.out, "staging", device_slug("cuda:0"))
    results.write(path, known, [launch, *rows])
    print("wrote", path, flush=True)


if __name__ == "__main__":
    main()
