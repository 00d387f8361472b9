"""The Qwen3-30B-A3B layer in FP8 through Transformers' experts interface on a GPU: megamoe beside the host's own.

    python benchmarks/doors_gpu.py                              # 1, 64, 1024 and 8192 tokens
    python benchmarks/doors_gpu.py --tokens 64 --samples 100

Every implementation is called as a model calls it, ``experts(hidden_states, top_k_index, top_k_weights)``, on the
host's own module. The host's FP8 implementations run on the very parameters that megamoe runs on. They take their
kernels from a hub: where those cannot be loaded, the reason is in the result file (``not_run``), and the host is left
with what it does then, which is to dequantise the experts to BF16. Nothing is downloaded unless ``--network`` is given.

The first tokens of every implementation are compared with the oracle before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megamoe import ExpertWeights, MoESpec, reference
from megamoe.bench import environment, mega, results
from megamoe.bench.models import model
from megamoe.bench.routing import routing
from megamoe.bench.timing import alternate
from megamoe.formats import fp8_block
from megamoe.spec import BLOCK

OURS = "megamoe"
HOSTS = {
    "fp8_block": ("eager", "batched_mm", "grouped_mm", "deepgemm"),
    "bf16": ("eager", "batched_mm", "grouped_mm"),
}
"""The host's implementations by what the experts are stored in. Its deepgemm_megamoe needs another architecture."""

PROTOCOLS = ("wall", "paced")
PROTOCOL = (
    "One call of the experts module, implementations alternating A B B A. wall: host's clock from the call to the end "
    "of its work on the device, back to back. paced: between events on the device, after an L2 flush and about 10 ms "
    "of sleep, behind which the host queues what it can. weights of FP8 experts equal; BF16 ones dequantised from them."
)
BOUND = 8e-3
"""Relative error that ours is held to."""

HOST_BOUND = 0.1
"""The host rounds at other places, and in BF16 does not quantise the activations; beyond this it computes something
else."""

CHECKED = 64
"""Tokens of a call that are compared with the oracle."""

LARGEST_COPY = 16 << 30
"""batched_mm in BF16 copies the weights of every route; beyond this many bytes it is left out."""

Candidate = Callable[[], torch.Tensor]


@dataclass
class Layer:
    """The layer as both sides hold it.

    Attributes:
        spec: sizes.
        weights: FP8, on the device.
        modules: the host's module, by format of its experts.
        not_run: why implementations do not run, by name and, where it depends on that, tokens.
    """

    spec: MoESpec
    weights: ExpertWeights
    modules: dict[str, Any]
    not_run: dict[str, str] = field(default_factory=dict)


def make_layer(spec: MoESpec, device: torch.device) -> Layer:
    """Random FP8 weights, the host's FP8 module with them as parameters, and its BF16 module dequantised from them."""
    from transformers import Qwen3MoeConfig
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    weights = mega.random_weights(spec, spec.experts, device)
    fp8_class = use_experts_implementation(
        experts_class=type("FP8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )

    def config() -> Any:
        return Qwen3MoeConfig(
            hidden_size=spec.hidden,
            moe_intermediate_size=spec.intermediate,
            num_experts=spec.experts,
            num_experts_per_tok=spec.topk,
        )

    with torch.device("meta"):
        fp8, bf16 = fp8_class(config(), block_size=(BLOCK, BLOCK)), Qwen3MoeExperts(config())
    for name, values, scale in (
        ("gate_up_proj", weights.w13, weights.w13_scale),
        ("down_proj", weights.w2, weights.w2_scale),
    ):
        assert scale is not None
        dense = torch.empty(values.shape, dtype=torch.bfloat16, device=device)
        for expert in range(len(values)):
            dense[expert] = fp8_block.dequantize_weights(values[expert], scale[expert]).bfloat16()
        for module, parameter, tensor in ((fp8, name, values), (fp8, f"{name}_scale_inv", scale), (bf16, name, dense)):
            setattr(module, parameter, torch.nn.Parameter(tensor, requires_grad=False))
    return Layer(spec, weights, {"fp8_block": fp8.eval(), "bf16": bf16.eval()})


def inputs(spec: MoESpec, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """BF16 activations, expert ids and route weights as a Qwen3 router gives them (int64 and BF16)."""
    ids, weights = routing("random", tokens=tokens, ranks=1, experts=spec.experts, topk=spec.topk)
    x = torch.randn(tokens, spec.hidden, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    return x.to(device), torch.from_numpy(ids[0]).long().to(device), torch.from_numpy(weights[0]).bfloat16().to(device)


def candidates(layer: Layer, tokens: int, device: torch.device) -> Iterator[tuple[str, str, Candidate]]:
    """Format of the experts, implementation and call of each."""
    call = inputs(layer.spec, tokens, device)
    for stored, names in {"fp8_block": (OURS, *HOSTS["fp8_block"]), "bf16": HOSTS["bf16"]}.items():
        module = layer.modules[stored]
        for name in names:

            def run(module: Any = module, name: str = name) -> torch.Tensor:
                module.config._experts_implementation = name
                result: torch.Tensor = module(*call)
                return result

            yield stored, name, run


def error_of(layer: Layer, tokens: int, device: torch.device, got: torch.Tensor) -> float:
    """Relative error of a call's first tokens against the oracle."""
    x, ids, weights = (t[:CHECKED] for t in inputs(layer.spec, tokens, device))
    want = reference.forward(layer.spec, layer.weights, x, ids, weights.float())
    assert isinstance(want, torch.Tensor)
    return reference.relative_error(got[:CHECKED], want)


def title(stored: str, name: str) -> str:
    """Name of an implementation in rows and reasons."""
    return OURS if name == OURS else f"transformers-{name}, {stored}"


def usable(layer: Layer, tokens: int, device: torch.device) -> tuple[dict[str, Candidate], dict[str, float]]:
    """The implementations that run, and their errors; why the others do not goes to ``layer.not_run``.

    Raises:
        RuntimeError: ours does not run, or one of them computes something else than the oracle.
    """
    calls: dict[str, Candidate] = {}
    errors: dict[str, float] = {}
    for stored, name, call in candidates(layer, tokens, device):
        full = title(stored, name)
        if full in layer.not_run:
            continue
        copied = tokens * layer.spec.topk * 2 * layer.spec.intermediate * layer.spec.hidden * 2
        if (stored, name) == ("bf16", "batched_mm") and copied > LARGEST_COPY:
            layer.not_run[f"{full}, {tokens} tokens"] = f"would copy {copied / 2**30:.0f} GiB of weights"
            continue
        try:
            errors[full] = error_of(layer, tokens, device, call())
        except Exception as error:
            if name == OURS:
                raise
            layer.not_run[full] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        bound = BOUND if name == OURS else HOST_BOUND
        if not errors[full] < bound:
            raise RuntimeError(f"{full}, {tokens} tokens: relative error {errors[full]:.1e} is not below {bound:.0e}")
        calls[full] = call
    return calls, errors


def paced(
    calls: dict[str, Candidate], samples: int, seconds: float, on_sample: Callable[[], None]
) -> dict[str, list[float]]:
    """Microseconds between events around each call, as `PROTOCOL` says."""
    flush = torch.empty(mega.FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for index in range(samples):
        if index >= 3 and time.perf_counter() - begun > seconds:
            break
        for name in list(calls)[:: 1 if index % 2 == 0 else -1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(mega.SLEEP_CYCLES)
            start.record()
            calls[name]()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3)
            on_sample()
    return times


def wall(
    calls: dict[str, Candidate], samples: int, seconds: float, on_sample: Callable[[], None], device: torch.device
) -> dict[str, list[float]]:
    """Microseconds on the host's clock until each call's work is done."""

    def finished(call: Candidate) -> Callable[[], None]:
        def run() -> None:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    ended = {name: finished(call) for name, call in calls.items()}
    return alternate(ended, samples=samples, warmup=3, seconds=seconds, on_sample=on_sample)


def measure(
    layer: Layer, tokens: int, device: torch.device, samples: int, seconds: float, progress: Progress
) -> list[results.Row]:
    """Rows of one token count: each implementation under each protocol; ours with the fastest host's ratio."""
    calls, errors = usable(layer, tokens, device)
    rows: list[results.Row] = []
    for protocol in PROTOCOLS if device.type == "cuda" else PROTOCOLS[:1]:
        bar = progress.add_task(f"{tokens} tokens, {protocol}", total=samples * len(calls))

        def tick(bar: Any = bar) -> None:
            progress.advance(bar)

        if protocol == "wall":
            times = wall(calls, samples, seconds, tick, device)
        else:
            times = paced(calls, samples, seconds, tick)
        progress.remove_task(bar)
        hosts = {name: median(taken) for name, taken in times.items() if name != OURS}
        for name, taken in times.items():
            row: results.Row = {
                "model": "qwen3",
                "hidden": layer.spec.hidden,
                "intermediate": layer.spec.intermediate,
                "ranks": 1,
                "experts_per_rank": layer.spec.experts,
                "topk": layer.spec.topk,
                "tokens": tokens,
                "routing": "random",
                "phase": "experts call",
                "protocol": protocol,
                "engine": name.partition(",")[0],
                "format": "bf16" if name.endswith("bf16") else "fp8_block",
                "e2e_us": results.timing(taken),
                "error": errors[name],
            }
            if name == OURS and hosts:
                fastest = min(hosts, key=lambda host: hosts[host])
                row |= {"fastest_host": fastest, "ratio": round(hosts[fastest] / median(taken), 3)}
            rows.append(row)
    return rows


def table(rows: list[results.Row]) -> Table:
    """One line per implementation and protocol; `ratio` is the fastest host's median over ours."""
    shown = Table()
    for name in ("tokens", "protocol", "implementation", "median us", "min us", "error", "ratio"):
        shown.add_column(name, no_wrap=True)
    for row in rows:
        shown.add_row(
            str(row["tokens"]),
            row["protocol"],
            f"{row['engine']}, {row['format']}",
            f"{row['e2e_us']['median']:.1f}",
            f"{row['e2e_us']['min']:.1f}",
            f"{row['error']:.1e}",
            f"{row['ratio']:.2f}" if "ratio" in row else "",
        )
    return shown


def main() -> None:
    """Parse arguments, measure, write the result file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 64, 1024, 8192])
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=5.0, help="stop a measurement early after this long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", type=int, help="fewer experts than the model has")
    parser.add_argument("--network", action="store_true", help="let the host download its kernels")
    parser.add_argument("--no-write", action="store_true", help="do not write the result file")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    arguments = parser.parse_args()
    if not arguments.network:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's client is imported: it tries for minutes otherwise
    import megamoe.integrations.transformers as hosted

    hosted.register()
    device = torch.device(arguments.device)
    console = Console(stderr=True)
    rows: list[results.Row] = []
    with torch.inference_mode(), Progress(console=console, transient=True) as progress:
        layer = make_layer(model("qwen3").scaled(arguments.experts), device)
        # The longest call first, as a prompt comes before its decoding: later calls then find a layer with room.
        for tokens in sorted(arguments.tokens, reverse=True):
            rows[:0] = measure(layer, tokens, device, arguments.samples, arguments.seconds, progress)
    hosted.release()
    for name, reason in layer.not_run.items():
        console.print(f"not run: {name}: {reason}", markup=False)
    if not arguments.no_write:
        slug = environment.device_slug("cpu" if device.type == "cpu" else str(device))
        path = results.result_path(arguments.results, "doors", slug)
        facts = environment.facts("doors", device=str(device), gpus=int(device.type == "cuda"), protocol=PROTOCOL) | {
            "transformers": version("transformers"),
            "not_run": layer.not_run,
        }
        results.write(path, facts, rows)
        console.print(f"written: {path}")
    if arguments.json:
        print(json.dumps(rows))
    else:
        Console().print(table(rows))


if __name__ == "__main__":
    main()
