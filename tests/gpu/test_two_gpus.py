"""Ranks of one process over two GPUs: the bits of one GPU, graphs of both, errors and the way back."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from fused_cases import SMALL, make_input, make_weights

from megamoe import MegaMoE, MoESpec, local_group, reference
from megamoe.errors import ClosedError, DeadlineError, InputError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

DEADLINE = 5.0
BOUND = 256
DEVICES = [0, 1]
LARGE = MoESpec(hidden=4096, intermediate=2048, experts=16, topk=6, clamp=10.0)


@pytest.fixture(scope="module")
def weights():
    return make_weights(SMALL, "cuda:0")


@pytest.fixture(params=[2, 4, 8])
def group(request, weights):
    with local_group(SMALL, ranks=request.param, devices=DEVICES, max_tokens=BOUND, deadline=DEADLINE) as group:
        group.load(weights)
        yield group


def dealt(group, given, counts):
    """The tokens dealt out to the ranks, each on its GPU, as columns of a group's call."""
    ends = list(itertools.accumulate(counts))
    return [
        [t[e - n : e].to(group[r].device) for r, (e, n) in enumerate(zip(ends, counts, strict=True))] for t in given
    ]


def joined(outs):
    return torch.cat([out.to("cuda:0") for out in outs])


def alone(spec, weights, given):
    with MegaMoE(spec, max_tokens=given[0].shape[0], deadline=DEADLINE) as layer:
        layer.load(weights)
        y = layer(*given)
        layer.check()
        return y


def shares(kind, ranks, tokens):
    """Token counts of the ranks that add up to `tokens`."""
    if kind == "even":
        return [tokens // ranks] * ranks
    if kind == "one rank has all":
        return [0] * (ranks - 1) + [tokens]
    return [tokens - ranks * (ranks - 1) // 2, *range(1, ranks)]


@pytest.mark.parametrize("kind", ["even", "one rank has all", "uneven"])
@pytest.mark.parametrize("routing", ["random", "hot", "skipped"])
def test_the_bits_of_one_gpu(group, weights, kind, routing):
    x, ids, route_weights = make_input(SMALL, 240, "cuda:0")
    if routing == "hot":
        ids[:, 0] = SMALL.experts - 1
        ids[:, 1] = torch.arange(240, device="cuda:0") % (SMALL.experts - 1)
    if routing == "skipped":
        ids[::3] = -1
        ids[1::3, 1] = -1
        route_weights[ids < 0] = float("nan")
    given = (x, ids, route_weights)
    want = alone(SMALL, weights, given)
    columns = dealt(group, given, shares(kind, len(group), 240))
    for _ in range(3):
        got = joined(group(*columns))
        group.check()
        assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [2, 64, 1024, 4096])
def test_a_layer_of_real_size(tokens):
    weights = make_weights(LARGE, "cuda:0")
    given = make_input(LARGE, tokens, "cuda:0")
    want = alone(LARGE, weights, given)
    with local_group(LARGE, ranks=2, devices=DEVICES, max_tokens=tokens, deadline=DEADLINE) as group:
        group.load(weights)
        assert [member.device.index for member in group] == DEVICES
        columns = dealt(group, given, [tokens // 2] * 2)
        for bound in (tokens, tokens // 2):
            got = joined(group(*columns, bound=bound))
            group.check()
            assert torch.equal(got, want)
        # All rows and all results cross the link.
        ids = given[1].clone()
        half = LARGE.experts // 2
        ids[: tokens // 2] = ids[: tokens // 2] % half + half
        ids[tokens // 2 :] %= half
        remote = (given[0], ids, given[2])
        got = joined(group(*dealt(group, remote, [tokens // 2] * 2)))
        group.check()
        few = 32
        assert reference.relative_error(got[:few], reference.forward(LARGE, weights, *(t[:few] for t in remote))) < 8e-3


def test_one_graph_over_both_gpus(group, weights):
    ranks = len(group)
    columns = dealt(group, make_input(SMALL, 16 * ranks, "cuda:0"), [16] * ranks)
    outs = [torch.zeros_like(x) for x in columns[0]]
    group.warmup()
    group(*columns, outs=outs)
    group.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group(*columns, outs=outs)
    for seed in range(2, 40):
        given = make_input(SMALL, 16 * ranks, "cuda:0", seed=seed)
        for column, new in zip(columns, dealt(group, given, [16] * ranks), strict=True):
            for t, n in zip(column, new, strict=True):
                t.copy_(n)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        graph.replay()
        group.check()
        assert torch.equal(joined(outs), alone(SMALL, weights, given)), seed


def test_a_graph_of_each_gpu_with_counts_on_the_device(weights):
    with local_group(SMALL, ranks=2, devices=DEVICES, max_tokens=BOUND, deadline=DEADLINE) as group:
        group.load(weights)
        given = make_input(SMALL, 64, "cuda:0")
        columns = dealt(group, given, [32, 32])
        outs = [torch.zeros_like(x) for x in columns[0]]
        counts = [torch.full((), 32, dtype=torch.int32, device=f"cuda:{d}") for d in DEVICES]
        want = joined(group(*columns))
        engine, calls = group._runtime.engine, []
        kept = engine.forward
        engine.forward = calls.extend
        group(*columns, outs=outs, num_tokens=counts)
        engine.forward = kept
        graphs = []
        for r in range(2):
            with torch.cuda.device(r):
                graph = torch.cuda.CUDAGraph()
                # torch's own stream for captures belongs to the GPU of the first one
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(r)):
                    engine.forward_some(calls, [r])
                graphs.append(graph)
        for n in (32, 0, 7, 31):
            for out, count in zip(outs, counts, strict=True):
                out.fill_(7.0)
                count.fill_(n)
            for r in (n % 2, 1 - n % 2):
                with torch.cuda.device(r):
                    graphs[r].replay()
            group.check()
            for r in range(2):
                assert torch.equal(outs[r][:n].to("cuda:0"), want[32 * r : 32 * r + n])
                assert bool((outs[r][n:] == 7.0).all())


def test_a_gpu_that_comes_late(group, weights):
    ranks = len(group)
    given = make_input(SMALL, 8 * ranks, "cuda:0")
    columns, want = dealt(group, given, [8] * ranks), alone(SMALL, weights, given)
    for late in (0, 1, 0, 1):
        with torch.cuda.device(late):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
        assert torch.equal(joined(group(*columns)), want)
    group.check()


def test_a_gpu_that_does_not_come(weights):
    with local_group(SMALL, ranks=2, devices=DEVICES, max_tokens=BOUND, deadline=1.0) as group:
        group.load(weights)
        given = make_input(SMALL, 64, "cuda:0")
        columns = dealt(group, given, [32, 32])
        base = joined(group(*columns))
        engine = group._runtime.engine
        kept = engine.forward
        for missing in range(2):
            outs = [torch.zeros_like(x) for x in columns[0]]
            engine.forward = lambda calls, missing=missing: kept(calls, ranks=(1 - missing,))
            start = time.perf_counter()
            group(*columns, outs=outs)
            engine.forward = kept
            with pytest.raises(DeadlineError, match=rf"rank {1 - missing} waited for the peers' route counts.*reset"):
                group.check()
            assert 0.9 < time.perf_counter() - start < 5
            assert bool(outs[1 - missing].isnan().all())
            with pytest.raises(ClosedError, match=r"rank \d waited for"):
                group(*columns)
            group.reset()
            for _ in range(3):
                assert torch.equal(joined(group(*columns)), base)
            group.check()


def test_tensors_of_the_wrong_gpu_are_refused(weights):
    with local_group(SMALL, ranks=2, devices=DEVICES, max_tokens=BOUND, deadline=DEADLINE) as group:
        group.load(weights)
        given = make_input(SMALL, 8, "cuda:0")
        with pytest.raises(InputError, match=r"rank 1's x: got device cuda:0.*cuda:1"):
            group(*([t[:4], t[4:]] for t in given))
        columns = dealt(group, given, [4, 4])
        assert torch.equal(joined(group(*columns)), alone(SMALL, weights, given))


def test_expandable_segments(weights):
    """Memory of torch's expandable segments is not mapped for peers; the arenas are not made of it."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        test_tensors_of_the_wrong_gpu_are_refused(weights)
        test_a_layer_of_real_size(64)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
