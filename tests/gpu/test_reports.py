"""What other kernels were reported to get wrong: stale state in replays, shapes, formats of scales, stray writes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fused_cases import SMALL, make_input, make_weights

from megamoe import MegaMoE, MoESpec, local_group, reference
from megamoe.cuda.fused import job, sizes_of
from megamoe.cuda.gpu import TorchGpu
from megamoe.cuda.select import select_plan
from megamoe.cuda.toolchain import Job
from megamoe.formats import ue8m0
from megamoe.formats.fp8_block import quantize_activations

pytestmark = pytest.mark.gpu

END_TO_END = 8e-3
DEADLINE = 5.0
POISON = 7.0

SHAPES = {
    "deepseek-v3": (7168, 2048, 16, 8),
    "deepseek-v4-pro": (7168, 3072, 16, 6),
    "deepseek-v4.1-flash": (5120, 2304, 16, 6),
    "qwen3-235b": (4096, 1536, 16, 8),
    "qwen3-30b": (2048, 768, 16, 8),
    "qwen3-next": (2048, 512, 16, 10),
    "kimi-k3": (3584, 3072, 16, 16),
    "glm-4.5-air": (4096, 1408, 16, 8),
    "glm-5": (6144, 2048, 16, 8),
    "minimax-m2": (3072, 1536, 16, 8),
    "widest": (8192, 1024, 16, 4),
    "most experts": (256, 256, 896, 16),
}
"""Hidden, intermediate, experts of a rank (fewer than the model has, but where many are the point) and top-k."""
CAP = 320
BOUNDS = ((16, 16), (CAP, 300))
"""Bounds and token counts: swapped tiles, and wide ones where an expert gets enough."""


def spec_of(name: str) -> MoESpec:
    hidden, intermediate, experts, topk = SHAPES[name]
    return MoESpec(hidden=hidden, intermediate=intermediate, experts=experts, topk=topk)


def jobs() -> list[Job]:
    """All kernels of `test_shapes_of_public_models`, for a script that compiles them in parallel before."""
    found = []
    for name in SHAPES:
        sizes = sizes_of(spec_of(name), 1, CAP)
        for bound, _ in BOUNDS:
            found.append(job(replace(select_plan(sizes, bound), pipeline_limit_ticks=round(DEADLINE)), sizes))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_public_models(name: str) -> None:
    spec = spec_of(name)
    weights = make_weights(spec, "cuda")
    inputs = make_input(spec, CAP, "cuda")
    with MegaMoE(spec, max_tokens=CAP, deadline=DEADLINE) as layer:
        layer.load(weights)
        assert layer.engine == "cuda"
        for bound, tokens in BOUNDS:
            given = [t[:tokens] for t in inputs]
            y = layer(*given, bound=bound)
            layer.check()
            few = [t[:16] for t in given]
            assert reference.relative_error(y[:16], reference.forward(spec, weights, *few)) < END_TO_END


def test_a_thousand_replays_with_other_inputs_and_counts_each() -> None:
    """Whatever one replay leaves behind (tags, counters, rows) must not reach the next."""
    dice = random.Random(6)
    tokens, pool = 32, 512
    inputs = make_input(SMALL, pool, "cuda")
    weights = make_weights(SMALL, "cuda")
    with MegaMoE(SMALL, max_tokens=pool, deadline=DEADLINE) as layer:
        layer.load(weights)
        want = layer(*inputs)
        layer.check()
    with local_group(SMALL, ranks=2, max_tokens=64, deadline=DEADLINE) as group:
        group.load(weights)
        columns = [[t[:tokens].clone() for _ in range(2)] for t in inputs]
        counts = [torch.full((), tokens, dtype=torch.int32, device="cuda") for _ in range(2)]
        outs = [torch.empty_like(x) for x in columns[0]]
        group.warmup(tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            group(*columns, outs=outs, num_tokens=counts, bound=tokens)
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            starts = [dice.randrange(pool - tokens + 1) for _ in range(2)]
            sizes = [dice.choice((0, 1, tokens, dice.randrange(tokens + 1))) for _ in range(2)]
            for column, source in zip(columns, inputs, strict=True):
                for t, s in zip(column, starts, strict=True):
                    t.copy_(source[s : s + tokens])
            for count, n in zip(counts, sizes, strict=True):
                count.fill_(n)
            for out in outs:
                out.fill_(POISON)
            graph.replay()
            for out, s, n in zip(outs, starts, sizes, strict=True):
                bad += (out[:n].view(torch.int16) != want[s : s + n].view(torch.int16)).sum()
                bad += (out[n:] != POISON).sum()
        group.check()
        assert int(bad) == 0


def test_one_byte_scales_of_weights_give_the_bits_of_floats() -> None:
    full = make_weights(SMALL, "cuda")
    assert full.w13_scale is not None
    assert full.w2_scale is not None
    bytes_ = {name: ue8m0.encode(ue8m0.ceil_power_of_two(getattr(full, name))) for name in ("w13_scale", "w2_scale")}
    floats = {name: ue8m0.decode(scale) for name, scale in bytes_.items()}
    assert all(scale.dtype == torch.float8_e8m0fnu for scale in bytes_.values())
    given = make_input(SMALL, 40, "cuda")
    with MegaMoE(SMALL, max_tokens=64, deadline=DEADLINE) as layer:
        outs = []
        for scales in (bytes_, floats):
            layer.load(replace(full, **scales))
            outs.append(layer(*given))
            layer.check()
    assert torch.equal(outs[0], outs[1])
    want = reference.forward(SMALL, replace(full, **bytes_), *given)
    assert reference.relative_error(outs[0], want) < END_TO_END


@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_a_layer_quantises_its_input_as_told(scales: str) -> None:
    """BF16 rows give the bits of the quantised rows that the contract makes of them."""
    spec = replace(SMALL, input_scales=scales)
    weights = make_weights(spec, "cuda")
    x, ids, route_weights = make_input(spec, 40, "cuda")
    x[3] = 0.0
    x[4] *= 2.0**-100
    with MegaMoE(spec, max_tokens=64, deadline=DEADLINE) as layer:
        layer.load(weights)
        y = layer(x, ids, route_weights)
        staged = layer(quantize_activations(x, scales), ids, route_weights)
        layer.check()
    assert torch.equal(y, staged)
    assert reference.relative_error(y, reference.forward(spec, weights, x, ids, route_weights)) < END_TO_END


def test_nothing_is_written_around_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas, workspaces, weights and counters between guard bytes, under routings that fill them."""
    guard, byte, cap = 1 << 16, 0xA5, 77  # a cap that no other layer has: nothing is shared
    kept: list[tuple[str, torch.Tensor, int]] = []

    def guarded(self: TorchGpu, what: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        whole = torch.full((size + 2 * guard,), byte, dtype=torch.uint8, device=self.device)
        inner = whole[guard : guard + size]
        inner.zero_()
        kept.append((what, whole, size))
        return inner.view(dtype).view(tuple(shape))

    monkeypatch.setattr(TorchGpu, "zeros", guarded)
    with local_group(SMALL, ranks=2, max_tokens=cap, deadline=DEADLINE) as group:
        group.load(make_weights(SMALL, "cuda"))
        assert {"arena", "workspace"} <= {what.split()[0] for what, _, _ in kept}
        for hot in (None, 0, SMALL.experts - 1):
            for counts in ((cap, cap), (cap, 0), (0, 1), (0, 0)):
                columns = [list(column) for column in zip(*(make_input(SMALL, n, "cuda") for n in counts), strict=True)]
                for ids in columns[1]:
                    if hot is not None:
                        ids.fill_(hot)
                for bound in (16, cap) if max(counts) <= 16 else (cap,):
                    group(*columns, bound=bound)
        group.check()
        for what, whole, size in kept:
            assert bool((whole[:guard] == byte).all()), f"written before {what}"
            assert bool((whole[guard + size :] == byte).all()), f"written after {what}"
