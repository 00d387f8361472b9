"""CPU time of a layer's call on a GPU: what the host spends from one call to the next, checks and launch included.

Calls follow each other without a wait, few enough that the queue of launches never fills up, so a sample is the host's
time and nothing of the GPU's. What comes first, a clock that rises and code that Python specialises, is not measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from megamoe.bench import results
from megamoe.bench.environment import device_slug, facts
from megamoe.bench.mega import random_weights
from megamoe.bench.models import model
from megamoe.layer import MegaMoE

__all__ = ["PROTOCOL", "call_times", "main", "measure"]

PROTOCOL: Final = (
    "cpu_us: mean of 50 calls one after the other (BF16 in, BF16 out, one launch each), the GPU idle before"
)

_CALLS: Final = 50
_WARM: Final = 0.5
"""Seconds of calls before the first sample."""
_EXPERTS: Final = 8
"""Experts of the measured layer: the host's work does not depend on them."""


def call_times(call: Callable[[], object], samples: int = 100) -> list[float]:
    """Microseconds of CPU that one `call` takes, `samples` means over a series each. `call` only launches."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < samples:
        warm = time.perf_counter() - began > _WARM
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        taken = (time.perf_counter() - start) / _CALLS * 1e6
        if warm:
            times.append(taken)
    torch.cuda.synchronize()
    return times


def measure(name: str, tokens: int) -> results.Row:
    """One rank's layer of model `name`, called with `tokens` tokens and an output buffer."""
    spec = replace(model(name).spec, experts=_EXPERTS)
    device = torch.device("cuda", torch.cuda.current_device())
    with MegaMoE(spec, max_tokens=max(tokens, 1)) as layer:
        layer.load(random_weights(spec, _EXPERTS, device))
        x = torch.randn(tokens, spec.hidden, device=device).bfloat16()
        ids = torch.stack([torch.randperm(_EXPERTS, device=device)[: spec.topk] for _ in range(tokens)]).int()
        weights = torch.rand(tokens, spec.topk, device=device)
        out = torch.empty_like(x)
        times = call_times(lambda: layer(x, ids, weights, out=out))
        layer.check()
    keys = {**results.layer_keys(name, spec, 1), "tokens": tokens, "engine": "megamoe", "phase": "call"}
    return {**keys, "cpu_us": results.timing(times)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: measure, print one line a model, merge into the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of result files")
    parser.add_argument("--models", nargs="+", default=["flash", "pro"])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--commit", help="of the source, where there is no git")
    chosen = parser.parse_args(arguments)
    known = facts("host", device="cuda:0", gpus=1, protocol=PROTOCOL)
    if chosen.commit:
        known["commit"] = chosen.commit
    rows = []
    for name in chosen.models:
        rows.append(measure(name, chosen.tokens))
        us = rows[-1]["cpu_us"]
        print(f"{name} M={chosen.tokens}: {us['median']} us of CPU a call ({us['min']} to {us['max']})", flush=True)
    path = results.result_path(chosen.out, "host", device_slug("cuda:0"))
    results.write(path, known, rows)
    print("wrote", path, flush=True)


if __name__ == "__main__":
    main()
