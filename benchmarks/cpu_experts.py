"""The CPU engine beside Transformers' own experts implementations, on a Qwen3-30B-A3B-shaped layer.

    python benchmarks/cpu_experts.py                      # BF16 and FP8 experts, 1, 32 and 512 tokens
    python benchmarks/cpu_experts.py --formats bf16 --tokens 32 --samples 30

BF16 experts are compared with every Transformers implementation in BF16; FP8 experts with every implementation on the
same weights dequantised to float32. Samples of all candidates alternate in one process. Peak memory is taken in one
fresh process per candidate, which makes its weights in their final dtype and runs one call.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megamoe import ExpertWeights, MegaMoE, reference
from megamoe.bench import environment, results
from megamoe.bench.models import model
from megamoe.bench.routing import routing
from megamoe.bench.timing import alternate
from megamoe.formats import fp8_block

SPEC = model("qwen3").spec
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
PROTOCOL = "One call from input to output on the host's clock; candidates alternate A B B A; uniform random routing."
LARGEST_COPY = 8 << 30
"""batched_mm copies the weights of every route; beyond this many bytes it is left out."""

Candidate = Callable[[], torch.Tensor]


def make_weights(weight_format: str) -> ExpertWeights:
    """Gaussian weights of the layer, made expert by expert so that no dense float32 copy of the layer exists.

    The e4m3 values are Gaussian with the scales that quantising such weights gives: block maxima of about 4 sigma.
    """
    generator = torch.Generator().manual_seed(1)
    e, h, i = SPEC.experts, SPEC.hidden, SPEC.intermediate
    shapes = {"w13": (2 * i, h), "w2": (h, i)}
    dtype = torch.bfloat16 if weight_format == "bf16" else fp8_block.E4M3
    tensors: dict[str, torch.Tensor] = {name: torch.empty(e, *shape, dtype=dtype) for name, shape in shapes.items()}
    for name, (n, k) in shapes.items():
        for expert in range(e):
            dense = torch.randn(n, k, generator=generator)
            if weight_format == "bf16":
                tensors[name][expert] = dense.mul_(k**-0.5)
            else:
                tensors[name].view(torch.uint8)[expert] = fp8_block.to_e4m3(dense.mul_(112)).view(torch.uint8)
        if weight_format != "bf16":
            spread = torch.rand(e, n // 128, k // 128, generator=generator) * 0.4 + 0.8
            tensors[f"{name}_scale"] = spread * (k**-0.5 / 112)
    return ExpertWeights(format=weight_format, **tensors)  # type: ignore[arg-type]


def transformers_experts(weights: ExpertWeights) -> Any:
    """Transformers' experts module of Qwen3-MoE with these weights: BF16, or FP8 dequantised to float32."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=SPEC.hidden,
        moe_intermediate_size=SPEC.intermediate,
        num_experts=SPEC.experts,
        num_experts_per_tok=SPEC.topk,
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    for name, values, scale in (
        ("gate_up_proj", weights.w13, weights.w13_scale),
        ("down_proj", weights.w2, weights.w2_scale),
    ):
        if scale is not None:
            dense = torch.empty(values.shape)
            for expert in range(len(values)):
                dense[expert] = fp8_block.dequantize_weights(values[expert], scale[expert])
            values = dense
        setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    return module.eval()


def batched_copy_bytes(tokens: int, weight_format: str) -> int:
    """Bytes of the weights that batched_mm gathers for its larger product."""
    element = 2 if weight_format == "bf16" else 4
    return tokens * SPEC.topk * 2 * SPEC.intermediate * SPEC.hidden * element


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """BF16 activations, expert ids and route weights."""
    ids, weights = routing("random", tokens=tokens, ranks=1, experts=SPEC.experts, topk=SPEC.topk)
    x = torch.randn(tokens, SPEC.hidden, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    return x, torch.from_numpy(ids[0].copy()), torch.from_numpy(weights[0].copy())


def candidates(
    names: list[str], weight_format: str, layer: MegaMoE | None, module: Any, tokens: int
) -> dict[str, Candidate]:
    """One function per candidate; each takes the same BF16 activations (as float32 where its weights are float32)."""
    x, ids, route_weights = inputs(tokens)
    wide = x if weight_format == "bf16" else x.float()
    long_ids = ids.long()
    ready: dict[str, Candidate] = {}
    for name in names:
        if name == "megamoe":
            assert layer is not None
            ready[name] = lambda: layer(x, ids, route_weights)
            continue
        implementation = name.removeprefix("transformers-")

        def call(implementation: str = implementation) -> torch.Tensor:
            module.config._experts_implementation = implementation
            return module(wide, long_ids, route_weights.to(wide.dtype))

        ready[name] = call
    return ready


def names_for(tokens: int, weight_format: str) -> list[str]:
    """The candidates that can run."""
    fits = batched_copy_bytes(tokens, weight_format) <= LARGEST_COPY
    return ["megamoe"] + [f"transformers-{i}" for i in IMPLEMENTATIONS if fits or i != "batched_mm"]


def peak_memory(weight_format: str, name: str, tokens: int) -> int:
    """Peak resident bytes of a fresh process that makes the weights of one candidate and runs one call."""
    command = [sys.executable, __file__, "--child", weight_format, name, str(tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def child(weight_format: str, name: str, tokens: int) -> None:
    """The process of `peak_memory`: weights are random in their final dtype, so that making them costs no peak."""
    weights: ExpertWeights | None = None
    module = None
    e, h, i = SPEC.experts, SPEC.hidden, SPEC.intermediate
    if name == "megamoe" or weight_format == "bf16":
        weights = make_weights(weight_format)
    if name != "megamoe":
        if weights is not None:
            module = transformers_experts(weights)
        else:
            small = ExpertWeights(
                format="bf16",
                w13=torch.empty(e, 2 * i, h).normal_(0, h**-0.5),
                w2=torch.empty(e, h, i).normal_(0, i**-0.5),
            )
            module = transformers_experts(small)
    layer = None
    if name == "megamoe":
        assert weights is not None
        layer = MegaMoE(SPEC)
        layer.load(weights)
    with torch.inference_mode():
        candidates([name], weight_format, layer, module, tokens)[name]()
    print(own_peak())


def own_peak() -> int:
    """Peak resident bytes of this process.

    From /proc where there is one: ``ru_maxrss`` of a child starts at what its parent had when it was started.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(weight_format: str, arguments: argparse.Namespace, progress: Progress) -> list[results.Row]:
    """Rows of one format."""
    weights = make_weights(weight_format)
    module = transformers_experts(weights)
    rows: list[results.Row] = []
    with MegaMoE(SPEC) as layer, torch.inference_mode():
        layer.load(weights)
        for tokens in arguments.tokens:
            names = names_for(tokens, weight_format)
            calls = candidates(names, weight_format, layer, module, tokens)
            bar = progress.add_task(f"{weight_format}, {tokens} tokens", total=arguments.samples * len(calls))
            x, ids, route_weights = inputs(tokens)
            truth = reference.forward(SPEC, weights, x, ids, route_weights)
            assert isinstance(truth, torch.Tensor)
            errors = {name: reference.relative_error(call(), truth) for name, call in calls.items()}
            times = alternate(
                calls,
                samples=arguments.samples,
                warmup=2,
                seconds=arguments.seconds,
                on_sample=lambda bar=bar: progress.advance(bar),  # type: ignore[misc]
            )
            progress.remove_task(bar)
            for name in names:
                row: results.Row = {
                    "model": "qwen3",
                    "ranks": 1,
                    "experts_per_rank": SPEC.experts,
                    "tokens": tokens,
                    "routing": "random",
                    "engine": name,
                    "format": weight_format if weight_format == "bf16" or name == "megamoe" else "float32",
                    "variant": f"beside {weight_format}",
                    "threads": torch.get_num_threads(),
                    "e2e_us": results.timing(times[name]),
                    "error": errors[name],
                }
                rows.append(row)
    return rows


def table(rows: list[results.Row]) -> Table:
    """One line per candidate; `ratio` is its median over megamoe's."""
    shown = Table()
    for name in ("experts", "tokens", "engine", "median ms", "min ms", "ratio", "error", "peak MiB"):
        shown.add_column(name, no_wrap=True)
    for row in rows:
        base = next(r for r in rows if all(r[k] == row[k] for k in ("tokens", "variant")) and r["engine"] == "megamoe")
        time, peak = row["e2e_us"], row.get("peak_rss_bytes")
        shown.add_row(
            row["variant"].removeprefix("beside "),
            str(row["tokens"]),
            f"{row['engine'].removeprefix('transformers-')}, {row['format']}",
            f"{time['median'] / 1e3:.2f}",
            f"{time['min'] / 1e3:.2f}",
            f"{time['median'] / base['e2e_us']['median']:.2f}",
            f"{row['error']:.1e}",
            f"{peak / 2**20:.0f}" if peak else "-",
        )
    return shown


def main() -> None:
    """Parse arguments, measure, write the result file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_block"], choices=["bf16", "fp8_block"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 32, 512])
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop a measurement early after this long")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--no-write", action="store_true", help="do not write the result file")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    parser.add_argument("--child", nargs=3, metavar=("FORMAT", "ENGINE", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1], int(arguments.child[2]))
        return
    console = Console(stderr=True)
    rows: list[results.Row] = []
    with Progress(console=console, transient=True) as progress:
        for weight_format in arguments.formats:
            rows += measure(weight_format, arguments, progress)
        if not arguments.no_memory:
            bar = progress.add_task("peak memory", total=len(rows))
            for row in rows:
                wanted = row["variant"].removeprefix("beside ")
                row["peak_rss_bytes"] = peak_memory(wanted, row["engine"], row["tokens"])
                progress.advance(bar)
    if not arguments.no_write:
        path = results.result_path(arguments.results, "cpu-experts", environment.device_slug("cpu"))
        results.write(path, environment.facts("cpu-experts", protocol=PROTOCOL), rows)
        console.print(f"written: {path}")
    if arguments.json:
        print(json.dumps(rows))
    else:
        Console().print(table(rows))


if __name__ == "__main__":
    main()
