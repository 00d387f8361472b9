"""Whole forwards of tiny Transformers models: the registered experts beside the host's own implementations.

    python benchmarks/doors.py                                    # both families, 1 to 256 tokens
    python benchmarks/doors.py --families qwen3-moe --tokens 64 --samples 100

The models are those of `megamoe demo` in BF16 with random weights, on the CPU. Samples of all implementations alternate
in one process on the same model and the same tokens. The host's default is grouped_mm.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
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
from megamoe.hf import quiet_transformers
from megamoe.spec import BLOCK

DEFAULT = "grouped_mm"
IMPLEMENTATIONS = (DEFAULT, "eager", hosted.STORED, hosted.QUANTIZED)
PROTOCOL = (
    "One forward of the whole model without cache, tokens in and logits out, on the host's clock; implementations "
    "alternate A B B A."
)


def make_model(family: str) -> Any:
    """A model of the demo's configuration, in BF16."""
    torch.manual_seed(0)
    with quiet_transformers() as transformers:
        config = FAMILIES[family]()
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(torch.bfloat16).eval()


def implementations(config: Any) -> list[str]:
    """Those that can run the model."""
    fp8 = config.hidden_size % BLOCK == 0 and config.moe_intermediate_size % BLOCK == 0
    return [name for name in IMPLEMENTATIONS if fp8 or name != hosted.QUANTIZED]


def measure(family: str, arguments: argparse.Namespace, progress: Progress) -> list[results.Row]:
    """Rows of one family."""
    model = make_model(family)
    config = model.config
    names = implementations(config)
    rows: list[results.Row] = []
    for tokens in arguments.tokens:
        ids = torch.randint(0, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))

        def forward(name: str, ids: torch.Tensor = ids) -> torch.Tensor:
            model.set_experts_implementation(name)
            with torch.inference_mode():
                logits: torch.Tensor = model(ids, use_cache=False).logits
            return logits

        want = forward(DEFAULT)
        errors = {name: reference.relative_error(forward(name), want) for name in names}
        bar = progress.add_task(f"{family}, {tokens} tokens", total=arguments.samples * len(names))
        load = os.getloadavg()[0]
        times = alternate(
            {name: lambda name=name: forward(name) for name in names},  # type: ignore[misc]
            samples=arguments.samples,
            warmup=5,
            seconds=arguments.seconds,
            on_sample=lambda bar=bar: progress.advance(bar),  # type: ignore[misc]
        )
        progress.remove_task(bar)
        for name in names:
            ours = name in (hosted.STORED, hosted.QUANTIZED)
            rows.append(
                {
                    "model": f"tiny {family}",
                    "hidden": config.hidden_size,
                    "intermediate": config.moe_intermediate_size,
                    "ranks": 1,
                    "experts_per_rank": config.num_local_experts,
                    "topk": config.num_experts_per_tok,
                    "tokens": tokens,
                    "phase": "model forward",
                    "engine": name if ours else f"transformers-{name}",
                    "format": "fp8_block" if name == hosted.QUANTIZED else "bf16",
                    "threads": torch.get_num_threads(),
                    "load_average": round(load, 2),
                    "e2e_us": results.timing(times[name]),
                    "error": errors[name],
                }
            )
    hosted.release(model)
    return rows


def table(rows: list[results.Row]) -> Table:
    """One line per implementation; `speed` is the default's median over its own."""
    shown = Table("model", "tokens", "experts", "median ms", "min ms", "speed", "speed of minima", "error")
    for row in rows:
        base = next(
            r
            for r in rows
            if all(r[k] == row[k] for k in ("model", "tokens")) and r["engine"] == f"transformers-{DEFAULT}"
        )
        time, other = row["e2e_us"], base["e2e_us"]
        shown.add_row(
            row["model"],
            str(row["tokens"]),
            row["engine"],
            f"{time['median'] / 1e3:.2f}",
            f"{time['min'] / 1e3:.2f}",
            f"{other['median'] / time['median']:.2f}",
            f"{other['min'] / time['min']:.2f}",
            f"{row['error']:.1e}",
        )
    return shown


def main() -> None:
    """Parse arguments, measure, write the result file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--samples", type=int, default=60)
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
    with Progress(console=console, transient=True) as progress:
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
