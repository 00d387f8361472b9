"""Errors of the fused kernel stage by stage, from what a call left in its ranks' memory.

The plan must keep the intermediate (`Plan.keep_intermediate`, `Sizes.keep_intermediate`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

import torch

import megamoe
from megamoe import reference
from megamoe.bench import mega
from megamoe.bench.environment import device_slug, facts
from megamoe.bench.models import model
from megamoe.bench.results import Row, result_path, write
from megamoe.control import Control
from megamoe.cuda.engine import CudaEngine
from megamoe.cuda.fused import Buffers
from megamoe.cuda.plan import Plan
from megamoe.demo_activations import byte_tokens, layer_input
from megamoe.demo_checkpoint import make_checkpoint
from megamoe.engine import Placement
from megamoe.formats import fp8_block
from megamoe.inputs import check_call
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["FIRST_GEMM", "SECOND_GEMM", "Staged", "measure", "rows_of", "stage_errors"]

FIRST_GEMM = 5e-4
"""Bound of the first GEMM and SwiGLU before requantisation, relative Frobenius."""

SECOND_GEMM = 2.5e-3
"""Bound of the second GEMM from the kernel's own intermediate: BF16 rounding."""


class Staged(Protocol):
    """One rank's quantised input of the call."""

    @property
    def q(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    @property
    def ids(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor: ...


def stage_errors(
    spec: MoESpec, full: ExpertWeights, buffers: Sequence[Buffers], inputs: Sequence[Staged]
) -> tuple[float, float]:
    """Relative errors of both GEMMs over all routes of a call of a plan that keeps the intermediate."""
    results = [b.view("y").view(-1, spec.hidden) for b in buffers]
    got: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    want: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for owner, own in enumerate(buffers):
        rows = own.sizes.pool_rows
        routes = own.view("routes").view(-1, 4)
        h = own.view("h_float").view(-1, spec.intermediate)
        hq = own.view("h_pool").view(rows, spec.intermediate).view(torch.float8_e4m3fn)
        hs = own.view("h_pool_scales").view(-1, rows).T
        base = 0
        for e in range(own.sizes.local_experts):
            expert = owner * own.sizes.local_experts + e
            count = sum(int((given.ids == expert).sum()) for given in inputs)
            part = slice(base, base + count)
            base += -(-count // 8) * 8
            if count == 0:
                continue
            at = [(s & 0x7FFFFFFF, r) for s, r in zip(routes[part, 0].tolist(), routes[part, 1].tolist(), strict=True)]
            q = torch.stack([inputs[s].q.view(torch.uint8)[r // spec.topk] for s, r in at]).view(torch.float8_e4m3fn)
            scales = torch.stack([inputs[s].scales[r // spec.topk] for s, r in at])
            weight = torch.stack([inputs[s].weights.flatten()[r] for s, r in at])
            w13, w2 = reference.expert_projections(full, expert)
            both = reference.project(w13, q, scales)
            gate, up = both[:, : spec.intermediate], both[:, spec.intermediate :]
            want[0].append(reference.swiglu(gate, up, weight, spec.clamp))
            got[0].append(h[part])
            want[1].append(reference.project(w2, hq[part], hs[part].contiguous()))
            got[1].append(torch.stack([results[s][r] for s, r in at]))
    first, second = (reference.relative_error(torch.cat(g), torch.cat(w)) for g, w in zip(got, want, strict=True))
    return first, second


@dataclass(frozen=True)
class _Given:
    q: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


PLANS: Final = {
    "swap": Plan(wide=False, stages=3, keep_intermediate=True),
    "mixed": Plan(stages=3, keep_intermediate=True),
}
"""Plans that `measure` takes; three stages fit the widest layer too."""


def rows_of(
    name: str, routing: str, spec: MoESpec, weights: ExpertWeights, given: tuple[torch.Tensor, ...], plan: Plan
) -> list[Row]:
    """Errors of one call on one rank: both GEMMs and the whole layer, one row each.

    Args:
        name, routing: how the rows are identified.
        spec: the layer.
        weights: all experts, on the GPU.
        given: BF16 rows ``[M, H]``, ids and route weights ``[M, k]``, on the GPU.
        plan: one that keeps the intermediate.
    """
    x, ids, route_weights = given
    tokens = x.shape[0]
    engine = CudaEngine(spec, Placement(ranks=1, local=(0,)), Control(None), tokens, deadline=10.0, plan=plan)
    try:
        engine.load([weights])
        call = check_call(spec, "fp8_block", tokens, x.device, x, ids, route_weights)
        engine.forward([call])
        engine.check()
        staged = _Given(*fp8_block.quantize_activations(x, spec.input_scales), ids, route_weights)
        first, second = stage_errors(spec, weights, [engine.buffers(0)], [staged])
    finally:
        engine.close()
    want = reference.forward(spec, weights, x, ids, route_weights)
    assert isinstance(want, torch.Tensor)
    shared: Row = {
        "model": name,
        "ranks": 1,
        "experts_per_rank": spec.experts,
        "tokens": tokens,
        "routing": routing,
        "engine": "megamoe",
        "plan": mega.plan_name(plan),
    }
    errors = {"gate-up": first, "down": second, "layer": reference.relative_error(call.out, want)}
    return [{**shared, "phase": phase, "error": float(f"{error:.5g}")} for phase, error in errors.items()]


def measure(tokens: int = 1024) -> Iterator[Row]:
    """Random data in the sizes of Flash and Pro, and the activations of a real text in the demo's DeepSeek-V3 model."""
    device = torch.device("cuda", torch.cuda.current_device())
    for name in ("flash", "pro"):
        spec = replace(model(name).spec, experts=mega.EXPERTS_PER_RANK[name])
        weights = mega.random_weights(spec, spec.experts, device)
        for kind, plan in PLANS.items():
            count = tokens if kind == "mixed" else min(tokens, 128)
            calls, _ = mega.random_calls(spec, "random", count, [device])
            given = (calls[0].x, calls[0].expert_ids, calls[0].expert_weights)
            yield from rows_of(name, "random", spec, weights, given, plan)
    with TemporaryDirectory() as directory:
        made = make_checkpoint("deepseek-v3", Path(directory))
        activations = layer_input(made, 1, byte_tokens(256, Path(__file__)))
        checkpoint = megamoe.checkpoint(made, layer=1)
        weights = checkpoint.read()
        weights = replace(
            weights,
            w13=weights.w13.to(device),
            w2=weights.w2.to(device),
            w13_scale=None if weights.w13_scale is None else weights.w13_scale.to(device),
            w2_scale=None if weights.w2_scale is None else weights.w2_scale.to(device),
        )
    given = (
        activations.activations.to(device),
        activations.expert_ids.to(device),
        activations.expert_weights.to(device),
    )
    for plan in PLANS.values():
        yield from rows_of("demo-deepseek-v3", "text", checkpoint.spec, weights, given, plan)


def main() -> None:
    """Measure and write, for ``python -m megamoe.bench.stages``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of result files")
    parser.add_argument("--commit", help="of the source, where there is no git")
    chosen = parser.parse_args()
    about = facts("layer", device="cuda:0", gpus=1, protocol=mega.PROTOCOL)
    if chosen.commit:
        about["commit"] = chosen.commit
    path = result_path(chosen.out, "layer", device_slug("cuda:0"))
    for row in measure():
        print(row["model"], row["plan"], row["tokens"], row["phase"], row["error"], flush=True)
        write(path, about, [row])


if __name__ == "__main__":
    main()
