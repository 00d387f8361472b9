"""Topic ``layer``: the whole operator, BF16 rows in and BF16 rows out, all ranks in this process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

import megamoe
from megamoe import reference
from megamoe.bench import mega
from megamoe.bench.models import model
from megamoe.bench.request import Request, Tick
from megamoe.bench.results import Row, timing
from megamoe.bench.routing import routing
from megamoe.bench.timing import alternate
from megamoe.engine import Placement, backend_for, why_no_gpu
from megamoe.spec import BLOCK, MXFP4_GROUP, MoESpec, WeightFormat
from megamoe.weights import ExpertWeights

if TYPE_CHECKING:
    from megamoe.group import LocalGroup

__all__ = ["PROTOCOL", "cells", "random_weights", "run"]

PROTOCOL: Final = (
    "CPU: wall clock around one call of all ranks in one process, after one call that is not counted; "
    f"BF16 in, BF16 out, outputs allocated by the call. {mega.PROTOCOL}"
)


def random_weights(spec: MoESpec, weight_format: WeightFormat) -> ExpertWeights:
    """Random weights of a whole layer: Gaussian values (any nibbles for MXFP4), every scale different."""
    generator = torch.Generator().manual_seed(0)
    w13, w13_scale = _projection(generator, spec.experts, 2 * spec.intermediate, spec.hidden, weight_format)
    w2, w2_scale = _projection(generator, spec.experts, spec.hidden, spec.intermediate, weight_format)
    return ExpertWeights(format=weight_format, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)


def _projection(
    generator: torch.Generator, experts: int, rows: int, depth: int, weight_format: WeightFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if weight_format == "mxfp4":
        packed = torch.randint(256, (experts, rows, depth // 2), dtype=torch.uint8, generator=generator)
        # 2^-6 to 2^-3 over the square root of the depth: E2M1 values reach 6.
        exponents = torch.randint(4, (experts, rows, depth // MXFP4_GROUP), generator=generator)
        byte = (exponents + 121 - round(math.log2(depth) / 2)).to(torch.uint8)
        return packed, byte.view(torch.float8_e8m0fnu)
    dtype = torch.bfloat16 if weight_format == "bf16" else torch.float8_e4m3fn
    values = torch.empty(experts, rows, depth, dtype=dtype)
    factor = depth**-0.5 if weight_format == "bf16" else 1.0
    for expert in range(experts):  # one at a time: float32 of a whole layer would take gigabytes
        values[expert] = (torch.randn(rows, depth, generator=generator) * factor).to(dtype)
    if weight_format == "bf16":
        return values, None
    spread = torch.rand(experts, rows // BLOCK, depth // BLOCK, generator=generator) + 0.5
    return values, spread * depth**-0.5


def run(request: Request, tick: Tick) -> list[Row]:
    """Measure every combination in `request`; where the GPU engine runs, by `megamoe.bench.mega`.

    Returns:
        One row for each, in the order models, routings, tokens.

    Raises:
        MegaMoEError: a name is unknown, or a layer cannot be spread over the ranks; before anything is measured.
    """
    specs = {name: model(name).scaled(request.experts) for name in request.models}
    for spec in specs.values():
        spec.check_format(request.format)
        spec.local_experts(request.ranks)
        for kind in request.routings:
            routing(kind, tokens=1, ranks=request.ranks, experts=spec.experts, topk=spec.topk)
    backend = backend_for(request.backend, request.format)
    bound = max(*request.tokens, 1)
    placement = Placement(ranks=request.ranks, local=tuple(range(request.ranks)), devices=request.devices)
    hosted = all(why_no_gpu(spec, placement, bound) is None for spec in specs.values())
    if request.format == "fp8_block" and (backend == "cuda" or (backend == "auto" and hosted)):
        return mega.run(request, tick)
    total = len(specs) * len(request.routings) * len(request.tokens)
    rows: list[Row] = []
    for name, spec in specs.items():
        tick(f"{name}: weights", len(rows) / total)
        weights = random_weights(spec, request.format)
        with megamoe.local_group(
            spec, ranks=request.ranks, devices=request.devices, max_tokens=bound, backend=backend
        ) as group:
            group.load(weights)
            for kind in request.routings:
                for tokens in request.tokens:
                    tick(f"{name}, {kind}, {tokens} tokens", len(rows) / total)
                    rows.append({"model": name, **_measure(request, spec, weights, group, kind, tokens)})
    tick("done", 1.0)
    return rows


def _measure(request: Request, spec: MoESpec, experts: ExpertWeights, group: LocalGroup, kind: str, tokens: int) -> Row:
    ranks = request.ranks
    numpy_ids, numpy_weights = routing(kind, tokens=tokens, ranks=ranks, experts=spec.experts, topk=spec.topk)
    ids, weights = torch.from_numpy(numpy_ids), torch.from_numpy(numpy_weights)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(ranks, tokens, spec.hidden, generator=generator).bfloat16()
    placed = [
        [part.to(member.device) for member, part in zip(group, whole, strict=True)] for whole in (x, ids, weights)
    ]

    def call() -> list[torch.Tensor]:
        ys = group(*placed)
        group.check()  # waits for the device
        return ys

    times = alternate({"megamoe": call}, samples=request.samples, seconds=request.seconds)["megamoe"]
    routes = ranks * tokens * spec.topk
    row: Row = {
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
        "ranks": ranks,
        "experts_per_rank": spec.local_experts(ranks),
        "topk": spec.topk,
        "tokens": tokens,
        "routing": kind,
        "protocol": "wall",
        "engine": "megamoe",
        "format": request.format,
        "variant": group.engine,
        "e2e_us": timing(times),
        "tflops": round(routes * 6 * spec.hidden * spec.intermediate / min(times) / 1e6, 6),
    }
    if request.check:
        oracle = reference.forward(spec, experts, x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1))
        assert isinstance(oracle, torch.Tensor)
        row["error"] = reference.relative_error(torch.cat([y.cpu() for y in call()]), oracle)
    return row


def cells(row: Row) -> dict[str, str]:
    """A row for people. R x EL: ranks, experts of a rank; M: tokens on each rank; times are medians."""
    call, kernel = row["e2e_us"], row.get("kernel_us")
    text = {
        "model": row["model"],
        "R x EL": f"{row['ranks']} x {row['experts_per_rank']}",
        "routing": row["routing"],
        "M": str(row["tokens"]),
    }
    if "protocol" not in row:
        text |= {"ms": f"{call['median'] / 1e3:.2f}", "min": f"{call['min'] / 1e3:.2f}"}
    else:
        text |= {
            "engine": row["engine"],
            "protocol": row["protocol"],
            "call us": f"{call['median']:.1f}",
            "kernel": "" if kernel is None else f"{kernel['median']:.1f}",
            "floor": f"{row['floor_us']:.0f}" if "floor_us" in row else "",
        }
    rate = f"{row['ranks'] * row['tokens'] / call['median'] * 1e6:,.0f}"
    return {**text, "tokens/s": rate, "error": f"{row['error']:.1e}" if "error" in row else ""}
