"""The GPU engine as a layer: arguments of every kind, graphs, streams, shared memory, errors and the way back."""

from __future__ import annotations

import time

import pytest
import torch
from fused_cases import SMALL, make_input, make_weights

import megamoe
from megamoe import MegaMoE, MoESpec, local_group, reference
from megamoe.bench.host import call_times
from megamoe.errors import ClosedError, DeadlineError, EngineError, InputError
from megamoe.formats.fp8_block import quantize_activations

pytestmark = pytest.mark.gpu

END_TO_END = 8e-3
DEADLINE = 5.0
BOUND = 64
POISON = 7.0


@pytest.fixture(scope="module")
def weights():
    return make_weights(SMALL, "cuda")


@pytest.fixture
def layer(weights):
    with MegaMoE(SMALL, max_tokens=BOUND, deadline=DEADLINE) as layer:
        layer.load(weights)
        yield layer


@pytest.fixture(params=[1, 2, 4, 8])
def group(request, weights):
    with local_group(SMALL, ranks=request.param, max_tokens=BOUND, deadline=DEADLINE) as group:
        group.load(weights)
        yield group


def wanted(weights, given, spec=SMALL):
    return reference.forward(spec, weights, *given)


def shares(given, ranks):
    """The tokens dealt out to the ranks, as columns of a group's call."""
    size = given[0].shape[0] // ranks
    return [[t[r * size : (r + 1) * size] for r in range(ranks)] for t in given]


def test_auto_takes_the_gpu(layer, weights):
    assert layer.engine == "cuda"
    assert layer.device == torch.device("cuda", torch.cuda.current_device())
    given = make_input(SMALL, 33, "cuda")
    y = layer(*given)
    layer.check()
    assert reference.relative_error(y, wanted(weights, given)) < END_TO_END
    assert layer.stats.tolist() == [int((given[1] == e).sum()) for e in range(SMALL.experts)]
    layer.clear_stats()
    assert layer.stats.sum() == 0
    with pytest.raises(InputError, match=r"x: got device cpu.*\.to\('cuda:0'\)"):
        layer(given[0].cpu(), *given[1:])


def test_other_formats_are_refused_at_load_and_sizes_go_to_the_cpu(layer, weights):
    bf16 = megamoe.ExpertWeights(
        format="bf16",
        w13=torch.zeros(8, 512, 512, dtype=torch.bfloat16),
        w2=torch.zeros(8, 512, 256, dtype=torch.bfloat16),
    )
    with pytest.raises(EngineError, match=r"weights.format: got bf16.*convert_to='fp8_block'"):
        layer.load(bf16)
    given = make_input(SMALL, 3, "cuda")
    assert reference.relative_error(layer(*given), wanted(weights, given)) < END_TO_END
    with MegaMoE(MoESpec(hidden=96, intermediate=96, experts=4, topk=2)) as other:
        assert other.engine == "cpu"


def test_strides_types_and_places_do_not_change_a_bit(layer):
    x, ids, route_weights = make_input(SMALL, 21, "cuda")
    base = layer(x, ids, route_weights)
    h = SMALL.hidden
    wide = torch.zeros(42, 2 * h + 8, device="cuda").bfloat16()
    wide[::2, 8 : 8 + h] = x
    odd = torch.zeros(21 * h + 1, device="cuda").bfloat16()
    odd[1:] = x.flatten()
    xs = {
        "rows apart": wide[::2, 8 : 8 + h],
        "columns apart": x.T.contiguous().T,
        "odd start": odd[1:].view(21, h),
        "plain": x,
    }
    turned = ids.long().T.contiguous().T
    for name, given in xs.items():
        for given_ids in (ids, ids.long(), turned, torch.cat([ids, ids], 1)[:, : SMALL.topk]):
            for given_weights in (route_weights, route_weights.T.contiguous().T):
                assert torch.equal(layer(given, given_ids, given_weights), base), name
    q, scales = quantize_activations(x)
    apart = torch.zeros(21, 2 * h, device="cuda", dtype=torch.uint8)
    apart[:, :h] = q.view(torch.uint8)
    for given_q in (q, apart[:, :h].view(q.dtype), q.view(torch.uint8).T.contiguous().T.view(q.dtype)):
        for given_scales in (scales, scales.T.contiguous().T):
            assert torch.equal(layer((given_q, given_scales), ids, route_weights), base)
    layer.check()


@pytest.mark.parametrize("gap", [0, 8, 3])
@pytest.mark.parametrize("start", [0, 8, 1])
def test_only_the_rows_that_count_are_written(layer, gap, start):
    given = make_input(SMALL, 20, "cuda")
    base = layer(*given)
    h = SMALL.hidden
    count = torch.zeros((), dtype=torch.int32, device="cuda")
    for n in (0, 1, 13, 20):
        flat = torch.full((start + 20 * (h + gap) + 8,), POISON, device="cuda").bfloat16()
        out = flat.as_strided((20, h), (h + gap, 1), start)
        expected = flat.clone()
        expected.as_strided((20, h), (h + gap, 1), start)[:n] = base[:n]
        count.fill_(n)
        for number in (n, count):
            flat.fill_(POISON)
            assert layer(*given, out=out, num_tokens=number) is out
            assert torch.equal(flat, expected)
            new = layer(*given, num_tokens=number)
            assert torch.equal(new[:n], base[:n])
            assert bool((new[n:] == 0).all())
    layer.check()
    x = given[0].clone()
    layer(x, *given[1:], out=x)
    assert torch.equal(x, base)
    assert layer(*make_input(SMALL, 0, "cuda")).shape == (0, h)


def test_a_call_never_waits(group):
    ranks = len(group)
    columns = shares(make_input(SMALL, 8 * ranks, "cuda"), ranks)
    base = torch.cat(group(*columns))
    counts = [torch.tensor(8, dtype=torch.int32, device="cuda") for _ in range(ranks)]
    outs = [torch.empty_like(x) for x in columns[0]]
    torch.cuda.set_sync_debug_mode("error")
    try:
        ys = group(*columns)
        group(*columns, outs=outs, num_tokens=counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cat(ys), base)
    assert torch.equal(torch.cat(outs), base)
    group.check()


def test_a_call_costs_the_cpu_little(layer):
    given = make_input(SMALL, 8, "cuda")
    out = torch.empty_like(given[0])
    times = call_times(lambda: layer(*given, out=out), samples=20)
    layer.check()
    print(f"\nCPU time of a call: {min(times):.1f} us at best, {sorted(times)[10]:.1f} us median")
    assert min(times) <= 15


class Captured:
    """A layer's or a group's call in a graph, with static inputs and counts."""

    def __init__(self, group, bound, tokens):
        ranks = len(group)
        self.columns = shares(make_input(SMALL, tokens * ranks, "cuda", seed=99), ranks)
        self.columns = [[t.clone() for t in column] for column in self.columns]
        self.counts = [torch.full((), tokens, dtype=torch.int32, device="cuda") for _ in range(ranks)]
        self.outs = [torch.empty_like(x) for x in self.columns[0]]
        self.tokens = tokens
        group.warmup(bound)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            group(*self.columns, outs=self.outs, num_tokens=self.counts, bound=bound)

    def replay(self, given, counts):
        """New inputs (rows from the front of each rank's part) and counts; the outputs."""
        for column, values in zip(self.columns, given, strict=True):
            for tensor, value in zip(column, values, strict=True):
                tensor.copy_(value)
        for tensor, n in zip(self.counts, counts, strict=True):
            tensor.fill_(n)
        for out in self.outs:
            out.fill_(POISON)
        self.graph.replay()
        return self.outs


def test_one_graph_serves_new_inputs_and_counts(group):
    ranks, tokens = len(group), 32
    captured = Captured(group, tokens, tokens)
    other = Captured(group, BOUND, 5)  # interleaved with the first
    for i in range(30):
        for graph in (captured, other):
            n = graph.tokens
            given = shares(make_input(SMALL, n * ranks, "cuda", seed=i), ranks)
            counts = [(i * 7 + 3 * r) % (n + 1) for r in range(ranks)]
            outs = graph.replay(given, counts)
            parts = [[t[:c] for t, c in zip(column, counts, strict=True)] for column in given]
            kept = [out.clone() for out in outs]
            for got, want, c in zip(kept, group(*parts), counts, strict=True):
                assert torch.equal(got[:c], want)
                assert bool((got[c:] == POISON).all())
    group.check()


def test_many_replays(layer):
    (given,) = [make_input(SMALL, 16, "cuda")]
    out = torch.empty_like(given[0])
    base = layer(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*given, out=out)
    for _ in range(1000):
        out.fill_(POISON)
        graph.replay()
    assert torch.equal(out, base)
    layer.clear_stats()
    for _ in range(1000):
        graph.replay()
    layer.check()
    assert torch.equal(out, base)
    assert layer.stats.sum() == 1000 * given[1].numel()


def test_a_first_call_in_a_capture_is_a_clear_error(weights):
    given = make_input(SMALL, 4, "cuda")
    spec = MoESpec(hidden=512, intermediate=256, experts=8, topk=2)  # a layer that no other test has loaded
    with MegaMoE(spec, max_tokens=BOUND, deadline=DEADLINE) as layer:
        layer.load(weights)
        with pytest.raises(EngineError, match=r"inside a CUDA graph capture.*warmup\(64\)"):  # noqa: SIM117
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer(*given)
        y = layer(*given)
        layer.check()
        assert reference.relative_error(y, wanted(weights, given, spec)) < END_TO_END


def test_a_second_load_reaches_captured_graphs(layer, weights):
    other = make_weights(SMALL, "cuda", seed=5)
    given = make_input(SMALL, 9, "cuda")
    out = torch.empty_like(given[0])
    layer.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*given, out=out)
    for loaded in (other, weights):
        layer.load(loaded)
        graph.replay()
        layer.check()
        assert reference.relative_error(out, wanted(loaded, given)) < END_TO_END
        assert layer.stats.sum() == given[1].numel()


def test_weights_may_be_overwritten_by_their_owner(layer):
    mine = make_weights(SMALL, "cuda", seed=6)
    given = make_input(SMALL, 9, "cuda")
    layer.load(mine)
    base = layer(*given)
    for tensor in (mine.w13, mine.w2):
        tensor.view(torch.uint8).fill_(0x7F)
    assert torch.equal(layer(*given), base)


def test_any_stream_and_calls_in_stream_order(layer):
    given = make_input(SMALL, 12, "cuda")
    base = layer(*given)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(1000 * (i % 4))
            outs.append(layer(*given))
    torch.cuda.synchronize()
    layer.check()
    assert all(torch.equal(out, base) for out in outs)


def test_layers_of_a_model_share_their_memory():
    spec = MoESpec(hidden=1024, intermediate=512, experts=8, topk=2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    all_weights = [make_weights(spec, "cuda", seed=s) for s in range(3)]
    given = make_input(spec, 40, "cuda")
    held = torch.cuda.memory_allocated()
    layers = [MegaMoE(spec, max_tokens=512, deadline=DEADLINE) for _ in range(3)]
    memory = layers[0].memory
    shared = memory["arena"] + memory["workspace"]
    assert shared <= torch.cuda.memory_allocated() - held < shared + (1 << 20)
    for layer, mine in zip(layers, all_weights, strict=True):
        layer.load(mine)
    used = torch.cuda.memory_allocated() - held
    assert shared + 3 * memory["weights"] <= used < shared + 3 * memory["weights"] + (1 << 20)
    for layer, mine in [*zip(layers, all_weights, strict=True)] * 2:
        y = layer(*given)
        layer.check()
        assert reference.relative_error(y, wanted(mine, given, spec)) < END_TO_END
        assert layer.stats.sum() in (given[1].numel(), 2 * given[1].numel())
    layers[0].close()
    layers[0].close()
    y = layers[1](*given)
    assert reference.relative_error(y, wanted(all_weights[1], given, spec)) < END_TO_END
    with pytest.raises(ClosedError):
        layers[0](*given)
    for layer in layers:
        layer.close()
    del y, given, all_weights, mine, layer
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_too_little_memory_is_said_with_numbers():
    spec = MoESpec(hidden=7168, intermediate=3072, experts=384, topk=8)
    with pytest.raises(EngineError, match=r"(arena|workspace) of rank \d: got .* GiB; allowed: what is free"):
        local_group(spec, ranks=8, max_tokens=1 << 17)
    torch.cuda.empty_cache()


def test_values_out_of_range(group, weights):
    ranks = len(group)
    given = make_input(SMALL, 4 * ranks, "cuda")
    base = torch.cat(group(*shares(given, ranks)))
    for bad_id in (SMALL.experts, -2, 2**32, -(2**31) - 1):
        ids = given[1].long()
        ids[-1, 1] = bad_id
        got = torch.cat(group(*shares((given[0], ids, given[2]), ranks)))
        ids[-1, 1] = -1
        torch.cuda.synchronize()
        with pytest.raises(InputError, match=rf"expert_ids: got a value out of range on rank {ranks - 1}"):
            group(*shares(given, ranks))
        assert torch.equal(got, torch.cat(group(*shares((given[0], ids, given[2]), ranks))))
    columns = shares(given, ranks)
    for n in (5, -1):
        counts = [torch.full((), 4 if r else n, dtype=torch.int32, device="cuda") for r in range(ranks)]
        group(*columns, num_tokens=counts)
        with pytest.raises(InputError, match="num_tokens: got a value out of range on rank 0"):
            group.check()
    assert torch.equal(torch.cat(group(*columns)), base)
    group.check()


def test_a_rank_that_does_not_come(weights):
    with local_group(SMALL, ranks=4, max_tokens=BOUND, deadline=1.0) as group:
        group.load(weights)
        columns = shares(make_input(SMALL, 32, "cuda"), 4)
        base = torch.cat(group(*columns))
        engine = group._runtime.engine
        kept = engine.forward
        outs = [torch.zeros_like(x) for x in columns[0]]
        engine.forward = lambda calls: kept(calls, ranks=(0, 1, 3))
        start = time.perf_counter()
        group(*columns, outs=outs)
        engine.forward = kept
        with pytest.raises(DeadlineError, match=r"rank \d waited for.*reset"):
            group.check()
        assert 0.9 < time.perf_counter() - start < 5
        for rank in (0, 1, 3):
            assert bool(outs[rank].isnan().all()), rank
        with pytest.raises(ClosedError, match=r"rank \d waited for"):
            group(*columns)
        group.reset()
        for _ in range(3):
            assert torch.equal(torch.cat(group(*columns)), base)
        group.check()


def test_a_rank_that_comes_late(group):
    ranks = len(group)
    columns = shares(make_input(SMALL, 8 * ranks, "cuda"), ranks)
    base = torch.cat(group(*columns))
    engine = group._runtime.engine
    gpu = engine._workspace.places[0].gpu
    for late in range(ranks if ranks > 1 else 0):
        with torch.cuda.stream(gpu._ranks[late]):
            torch.cuda._sleep(2_000_000)  # about a millisecond
        assert torch.equal(torch.cat(group(*columns)), base)
    group.check()


def test_what_lies_in_the_buffers_does_not_matter(group):
    ranks = len(group)
    columns = shares(make_input(SMALL, 9 * ranks, "cuda"), ranks)
    base = torch.cat(group(*columns))
    written = ("x", "x_scales", "ids", "route_weights", "positions", "y")
    pools = ("routes", "targets", "pool_weights", "x_pool", "x_pool_scales", "h_pool", "h_pool_scales")
    for byte in (0xFF, 0x7F, 0x00):
        for buffers in group._runtime.engine._workspace.buffers:
            for name in (*written, *pools):
                buffers.view(name).view(torch.uint8).fill_(byte)
        assert torch.equal(torch.cat(group(*columns)), base)
    group.check()
