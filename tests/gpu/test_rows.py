"""Row-major weights with interleaved gate and up, read where their owner has them: bits, graphs, memory, DeepGEMM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_cases import DEADLINE, PLANS, SMALL, call_engine, make_engine, make_input, make_weights, split

import megamoe.integrations.deep_gemm as deep_gemm
from megamoe import ExpertWeights, MegaMoE, MoESpec, local_group
from megamoe.errors import EngineError
from megamoe.formats.layout import interleave_gate_up

pytestmark = pytest.mark.gpu

BOUND = 64
ODD = MoESpec(hidden=640, intermediate=384, experts=8, topk=3)  # w2: the last tile has 128 rows
NARROW = MoESpec(hidden=256, intermediate=256, experts=8, topk=2)  # two k-blocks in both products
LARGE = MoESpec(hidden=4096, intermediate=2048, experts=32, topk=6, clamp=10.0)
VALUES = ("w13", "w2")
FIELDS = (*VALUES, "w13_scale", "w2_scale")


def interleaved(weights: ExpertWeights) -> ExpertWeights:
    w13 = interleave_gate_up(weights.w13.view(torch.uint8)).view(weights.w13.dtype)
    own = {name: getattr(weights, name).clone() for name in FIELDS[1:]}
    return replace(weights, w13=w13, **own, gate_up="interleaved8")


def overwrite(old: ExpertWeights, new: ExpertWeights, names: tuple[str, ...] = FIELDS) -> None:
    for name in names:
        getattr(old, name).view(torch.uint8).copy_(getattr(new, name).view(torch.uint8))


@pytest.fixture(scope="module")
def small():
    return [make_weights(SMALL, "cuda", seed=seed) for seed in range(2)]


@pytest.fixture
def layer():
    with MegaMoE(SMALL, max_tokens=BOUND, deadline=DEADLINE) as layer:
        yield layer


def tiles(weights, given):
    """What a layer that copied these weights gives."""
    with MegaMoE(SMALL, max_tokens=BOUND, deadline=DEADLINE) as layer:
        layer.load(weights)
        y = layer(*given)
        layer.check()
        return y


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("spec", [SMALL, ODD, NARROW], ids=["small", "odd", "narrow"])
def test_rows_and_tiles_give_the_same_bits(spec, name, ranks):
    full = make_weights(spec, "cuda")
    engines = [make_engine(spec, one, ranks=ranks, plan=PLANS[name]) for one in (full, interleaved(full))]
    assert [engine._weights.layouts for engine in engines] == [("tiles",) * ranks, ("rows",) * ranks]
    for tokens in (2, 26, 150):
        parts = split(make_input(spec, tokens, "cuda", seed=tokens), [tokens // ranks] * ranks)
        want, got = (call_engine(engine, parts) for engine in engines)
        assert torch.equal(torch.cat(got), torch.cat(want))
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("tokens", [1, 40, 900])
def test_a_models_layer(tokens):
    full = make_weights(LARGE, "cuda")
    given = make_input(LARGE, tokens, "cuda")
    outs = []
    for weights in (full, interleaved(full)):
        with MegaMoE(LARGE, max_tokens=1024, deadline=DEADLINE) as layer:
            layer.load(weights)
            outs.append(layer(*given, bound=tokens))
            layer.check()
    assert torch.equal(outs[0], outs[1])


def test_nothing_is_copied_but_scales(small):
    mine = interleaved(small[0])
    with MegaMoE(SMALL, max_tokens=BOUND, deadline=DEADLINE) as layer:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        layer.load(mine)
        assert torch.cuda.memory_allocated() - before < 1 << 16 < mine.w13.numel()
        assert layer.memory["weights"] < 1 << 16
        assert layer.copied == ("w13_scale", "w2_scale")


def test_a_group_reads_slices_of_the_whole_layer(small):
    mine = interleaved(small[0])
    given = make_input(SMALL, 20, "cuda")
    with local_group(SMALL, ranks=2, max_tokens=BOUND, deadline=DEADLINE) as group:
        group.load(mine)
        assert group[0].copied == ("w13_scale", "w2_scale")
        columns = [[t[:10], t[10:]] for t in given]
        got = torch.cat(group(*columns))
        group.check()
        assert torch.equal(got, tiles(small[0], given))
        overwrite(mine, interleaved(small[1]))
        group.load(mine)
        assert torch.equal(torch.cat(group(*columns)), tiles(small[1], given))


def test_overwritten_between_replays(layer, small):
    mine = interleaved(small[0])
    layer.load(mine)
    layer.warmup()
    given = make_input(SMALL, 33, "cuda")
    out = torch.empty_like(given[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*given, out=out)
    # The scales of both are the same, so that values alone make the difference: no load in between.
    models = [replace(one, w13_scale=small[0].w13_scale, w2_scale=small[0].w2_scale) for one in small]
    wanted = [tiles(one, given) for one in models]
    assert not torch.equal(wanted[0], wanted[1])
    sources = [interleaved(one) for one in models]
    for i in range(50):
        overwrite(mine, sources[i % 2], VALUES)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted[i % 2]), i
        assert torch.equal(layer(*given), wanted[i % 2]), i
    for i in (1, 0):
        overwrite(mine, interleaved(small[i]))
        layer.load(mine)  # scales, into memory that the graph knows
        graph.replay()
        assert torch.equal(out, tiles(small[i], given))
    layer.check()


def test_other_tensors_until_a_call_is_captured(layer, small):
    mine = [interleaved(one) for one in small]
    given = make_input(SMALL, 9, "cuda")
    wanted = [tiles(one, given) for one in small]
    for i in (0, 1, 0):
        layer.load(mine[i])
        assert torch.equal(layer(*given), wanted[i])
    out = torch.empty_like(given[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*given, out=out)
    for other in (mine[1], small[1]):
        with pytest.raises(EngineError, match=r"weights: got other tensors.*captured graphs"):
            layer.load(other)
        graph.replay()
        layer.check()
        assert torch.equal(out, wanted[0])
        assert torch.equal(layer(*given), wanted[0])


def test_weights_that_were_copied_stay_a_copy(layer, small, caplog):
    given = make_input(SMALL, 9, "cuda")
    layer.load(small[0])
    layer.warmup()
    out = torch.empty_like(given[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*given, out=out)
    layer.load(interleaved(small[1]))
    assert "are copied" in caplog.text
    assert layer.copied == ("w13", "w2", "w13_scale", "w2_scale")
    graph.replay()
    layer.check()
    assert torch.equal(out, tiles(small[1], given))


def test_deep_gemm_reads_its_callers_weights(small):
    mine = interleaved(small[0])
    l1, l2 = (mine.w13, mine.w13_scale), (mine.w2, mine.w2_scale)
    given = make_input(SMALL, 12, "cuda")
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, SMALL.experts, BOUND, SMALL.topk, 512, 256)
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    deep_gemm.mega_moe_pre_dispatch_sm90(*given, *views, 12)
    y = torch.empty_like(given[0])
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer, activation_clamp=SMALL.clamp)
    assert torch.equal(y, tiles(small[0], given))
    (held,) = buffer._layers.values()
    assert held.layer.copied == ("w13_scale", "w2_scale")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer, activation_clamp=SMALL.clamp)
    half = replace(small[1], w13_scale=small[0].w13_scale, w2_scale=small[0].w2_scale)
    overwrite(mine, interleaved(half), VALUES)
    graph.replay()  # values are read where they are
    assert torch.equal(y, tiles(half, given))
    overwrite(mine, interleaved(small[1]))
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer, activation_clamp=SMALL.clamp)  # renews the copy of the scales
    assert torch.equal(y, tiles(small[1], given))
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, tiles(small[1], given))
    held.layer.check()
    buffer.destroy()
