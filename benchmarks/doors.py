"""Whole forwards of tiny Transformers models: the registered experts beside the host's own implementations.

    python benchmarks/doors.py                                    # both families, 1 to 256 tokens
    python benchmarks/doors.py --families qwen3-moe --tokens 64 --samples 300

The models are those of `megamoe demo` in BF16 with random weights, on the CPU. Every implementation is paired with the
host's default, grouped_mm, in one process on the same tokens: in pairs, since among more the first and the last of each
round would run after themselves, in caches of their own, and the others never. FP8 experts have two baselines: the
default on the BF16 experts that they were quantised from, and the default on the quantised weights themselves,
dequantised to float32, everything else of the model being the same (the host's FP8 implementations need a GPU).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import megamoe.integrations.transformers as hosted
from megamoe import reference
from megamoe.bench import environment, results
from megamoe.bench.timing import alternate
from megamoe.demo_checkpoint import FAMILIES
from megamoe.formats import fp8_block
from megamoe.hf import quiet_transformers
from megamoe.spec import BLOCK

DEFAULT = "grouped_mm"
DEQUANTIZED = "float32 of fp8_block"
"""Format of experts that were quantised and are dequantised again."""

Candidate = tuple[str, str]
"""Name of an implementation, and the format of its experts."""

CANDIDATES: tuple[Candidate, ...] = (
    ("eager", "bf16"),
    (hosted.STORED, "bf16"),
    (hosted.QUANTIZED, "fp8_block"),
)
FIELDS = {"bf16": ("e2e_us", "default_us"), DEQUANTIZED: ("beside_float32_us", "default_float32_us")}
"""By format of the default's experts: the row's own time and the default's in that pair."""
PROTOCOL = (
    "One forward of the whole model without cache, tokens in and logits out, on the host's clock, with the switch of "
    "the implementation before it; pairs of one implementation and the host's default (default_us) alternate A B B A."
)


def make_model(family: str) -> Any:
    """A model of the demo's configuration, in BF16."""
    torch.manual_seed(0)
    with quiet_transformers() as transformers:
        config = FAMILIES[family]()
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(torch.bfloat16).eval()


def dequantized(model: Any) -> Any:
    """A copy of the model whose experts' weights were quantised to FP8 and dequantised to float32."""
    other = copy.deepcopy(model)
    for module in other.modules():
        for name in ("gate_up_proj", "down_proj"):
            values = getattr(module, name, None)
            if isinstance(values, torch.nn.Parameter):
                dense = fp8_block.dequantize_weights(*fp8_block.quantize_weights(values.detach()))
                setattr(module, name, torch.nn.Parameter(dense, requires_grad=False))
    return other


def candidates(config: Any) -> list[Candidate]:
    """Those that can run the model."""
    fp8 = config.hidden_size % BLOCK == 0 and config.moe_intermediate_size % BLOCK == 0
    return [one for one in CANDIDATES if fp8 or one[1] == "bf16"]


def engine_of(name: str) -> str:
    """An implementation as rows name it."""
    return name if name in (hosted.STORED, hosted.QUANTIZED) else f"transformers-{name}"


def measure(family: str, arguments: argparse.Namespace, progress: Progress) -> list[results.Row]:
    """Rows of one family."""
    model = make_model(family)
    config = model.config
    which = candidates(config)
    models = {"bf16": model, "fp8_block": model}
    if (hosted.QUANTIZED, "fp8_block") in which:
        models[DEQUANTIZED] = dequantized(model)
    rows: list[results.Row] = []
    for tokens in arguments.tokens:
        ids = torch.randint(0, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))

        def forward(name: str, stored: str, ids: torch.Tensor = ids) -> torch.Tensor:
            models[stored].set_experts_implementation(name)
            with torch.inference_mode():
                logits: torch.Tensor = models[stored](ids, use_cache=False).logits
            return logits

        want = forward(DEFAULT, "bf16")
        for one in which:
            name, stored = one
            error = reference.relative_error(forward(*one), want)
            bases = [base for base in ("bf16", DEQUANTIZED) if base == "bf16" or stored == "fp8_block"]
            bar = progress.add_task(f"{family}, {tokens} tokens, {name}", total=len(bases))
            load = os.getloadavg()[0]
            pairs = {}
            for base in bases:
                calls = {"ours": lambda one=one: forward(*one), "base": lambda base=base: forward(DEFAULT, base)}
                pairs[base] = alternate(
                    calls,  # type: ignore[arg-type]
                    samples=arguments.samples,
                    warmup=5,
                    seconds=arguments.seconds,
                )
                progress.advance(bar)
                progress.refresh()
            progress.remove_task(bar)
            row = {
                "model": f"tiny {family}",
                "hidden": config.hidden_size,
                "intermediate": config.moe_intermediate_size,
                "ranks": 1,
                "experts_per_rank": config.num_local_experts,
                "topk": config.num_experts_per_tok,
                "tokens": tokens,
                "phase": "model forward",
                "engine": engine_of(name),
                "format": stored,
                "threads": torch.get_num_threads(),
                "load_average": round(load, 2),
                "error": error,
            }
            for base, times in pairs.items():
                own, other = FIELDS[base]
                row |= {own: results.timing(times["ours"]), other: results.timing(times["base"])}
            rows.append(row)
    hosted.release(model)
    return rows


def lower_quartile(samples: list[float]) -> float:
    """The sample that a quarter of them are below: on a shared machine steadier than the least, less disturbed than
    the median."""
    return sorted(samples)[len(samples) // 4]


STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": median, "quartile": lower_quartile, "min": min}


def speeds(row: results.Row, base: str = "bf16") -> dict[str, float] | None:
    """Time of the host's default with experts in format `base` over this row's, by statistic; None without such."""
    own, other = FIELDS[base]
    if own not in row:
        return None
    return {name: of(row[other]["samples"]) / of(row[own]["samples"]) for name, of in STATISTICS.items()}


def table(rows: list[results.Row]) -> Table:
    """One line per candidate; speeds are the default's time over its own: of medians, lower quartiles and minima."""
    shown = Table("model", "tokens", "experts", "format", "median ms", "min ms", "speed", "beside float32", "error")

    def line(values: dict[str, float] | None) -> str:
        return "" if values is None else " ".join(f"{value:.2f}" for value in values.values())

    for row in rows:
        time = row["e2e_us"]
        shown.add_row(
            row["model"],
            str(row["tokens"]),
            row["engine"],
            row["format"],
            f"{time['median'] / 1e3:.2f}",
            f"{time['min'] / 1e3:.2f}",
            line(speeds(row)),
            line(speeds(row, DEQUANTIZED)),
            f"{row['error']:.1e}",
        )
    return shown


def main() -> None:
    """Parse arguments, measure, write the result file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop a measurement early after this long")
    parser.add_argument("--no-write", action="store_true", help="do not write the result file")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a result file and stop")
    arguments = parser.parse_args()
    if arguments.table:
        Console().print(table(results.load(arguments.table)["rows"]))
        return
    hosted.register(backend="cpu")
    console = Console(stderr=True)
    rows: list[results.Row] = []
    # Drawn between measurements only, so that no thread of the display runs during one.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        for family in arguments.families:
            rows += measure(family, arguments, progress)
    if not arguments.no_write:
        path = results.result_path(arguments.results, "doors", environment.device_slug("cpu"))
        results.write(path, environment.facts("doors", protocol=PROTOCOL), rows)
        console.print(f"written: {path}")
    if arguments.json:
        print(json.dumps(rows))
    else:
        Console().print(table(rows))


if __name__ == "__main__":
    main()
