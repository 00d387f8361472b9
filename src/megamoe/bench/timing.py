"""Timing on the host: alternating samples of several candidates, first calls thrown away."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megamoe.errors import InputError

__all__ = ["alternate"]


def alternate(
    candidates: Mapping[str, Callable[[], object]],
    *,
    samples: int,
    warmup: int = 1,
    seconds: float | None = None,
    on_sample: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time each candidate `samples` times, in the order A B B A A B ..., so that drift of the machine hits all alike.

    Args:
        candidates: name -> function that returns when its work is done.
        samples: samples of each candidate.
        warmup: calls of each candidate before the first sample.
        seconds: stop early once this much time has passed, but never below three samples of each.
        on_sample: called after each sample, for a progress bar.

    Returns:
        name -> microseconds of each sample.

    Raises:
        InputError: no candidate or no sample asked for.
    """
    if not candidates or samples < 1:
        raise InputError("samples", samples, "at least 1, of at least one candidate", "Ask for a measurement.")
    for _ in range(warmup):
        for call in candidates.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    for index in range(samples):
        if seconds is not None and index >= 3 and time.perf_counter() - start > seconds:
            break
        names = list(candidates)[:: 1 if index % 2 == 0 else -1]
        for name in names:
            before = time.perf_counter()
            candidates[name]()
            times[name].append((time.perf_counter() - before) * 1e6)
            on_sample()
    return times
