"""Ranks of one process over several GPUs: the bits of one GPU, graphs of all, errors and the way back.

Everything runs on two GPUs and on all that the machine has.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch
from fused_cases import SMALL, make_input, make_weights

from megamoe import MegaMoE, MoESpec, local_group, reference
from megamoe.cuda.arena import MAX_RANKS
from megamoe.errors import ClosedError, DeadlineError, InputError

GPUS = torch.cuda.device_count()
SETS = sorted({2, max(2, min(GPUS, MAX_RANKS))})

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]

DEADLINE = 5.0
BOUND = 256
LARGE = MoESpec(hidden=4096, intermediate=2048, experts=16, topk=6, clamp=10.0)


@pytest.fixture(scope="module", params=SETS, ids=lambda n: f"{n}gpus")
def devices(request):
    return list(range(request.param))


@pytest.fixture(scope="module")
def spec(devices):
    """Four experts for each GPU, so that up to four ranks fit on one."""
    return replace(SMALL, experts=4 * len(devices))


@pytest.fixture(scope="module")
def weights(spec):
    return make_weights(spec, "cuda:0")


@pytest.fixture(params=[1, 2, 4], ids=lambda n: f"{n}each")
def group(request, devices, spec, weights):
    ranks = request.param * len(devices)
    if ranks > MAX_RANKS:
        pytest.skip(f"{ranks} ranks are more than a group has")
    with local_group(spec, ranks=ranks, devices=devices, max_tokens=BOUND, deadline=DEADLINE) as group:
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
        return [tokens // ranks + (r < tokens % ranks) for r in range(ranks)]
    if kind == "one rank has all":
        return [0] * (ranks - 1) + [tokens]
    return [tokens - ranks * (ranks - 1) // 2, *range(1, ranks)]


@pytest.mark.parametrize("kind", ["even", "one rank has all", "uneven"])
@pytest.mark.parametrize("routing", ["random", "hot", "skipped"])
def test_the_bits_of_one_gpu(group, spec, weights, kind, routing):
    x, ids, route_weights = make_input(spec, 240, "cuda:0")
    if routing == "hot":
        ids[:, 0] = spec.experts - 1
        ids[:, 1] = torch.arange(240, device="cuda:0") % (spec.experts - 1)
    if routing == "skipped":
        ids[::3] = -1
        ids[1::3, 1] = -1
        route_weights[ids < 0] = float("nan")
    given = (x, ids, route_weights)
    want = alone(spec, weights, given)
    columns = dealt(group, given, shares(kind, len(group), 240))
    for _ in range(3):
        got = joined(group(*columns))
        group.check()
        assert torch.equal(got, want)


@pytest.mark.parametrize("each", [1, 32, 512, 2048])
def test_a_layer_of_real_size(devices, each):
    ranks, local = len(devices), 8
    spec, tokens = replace(LARGE, experts=local * ranks), each * ranks
    weights = make_weights(spec, "cuda:0")
    given = make_input(spec, tokens, "cuda:0")
    want = alone(spec, weights, given)
    with local_group(spec, ranks=ranks, devices=devices, max_tokens=tokens, deadline=DEADLINE) as group:
        group.load(weights)
        assert [member.device.index for member in group] == devices
        columns = dealt(group, given, [each] * ranks)
        for bound in (tokens, each):
            got = joined(group(*columns, bound=bound))
            group.check()
            assert torch.equal(got, want)
        # All rows and all results cross the links.
        owner = torch.arange(tokens, device="cuda:0")[:, None] // each
        ids = (given[1] % (spec.experts - local) + (owner + 1) * local) % spec.experts
        assert bool((ids // local != owner).all())
        remote = (given[0], ids.int(), given[2])
        got = joined(group(*dealt(group, remote, [each] * ranks)))
        group.check()
        few = 32
        assert reference.relative_error(got[:few], reference.forward(spec, weights, *(t[:few] for t in remote))) < 8e-3


def test_one_graph_over_all_gpus(group, devices, spec, weights):
    ranks = len(group)
    columns = dealt(group, make_input(spec, 16 * ranks, "cuda:0"), [16] * ranks)
    outs = [torch.zeros_like(x) for x in columns[0]]
    group.warmup()
    group(*columns, outs=outs)
    group.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group(*columns, outs=outs)
    for seed in range(2, 40):
        given = make_input(spec, 16 * ranks, "cuda:0", seed=seed)
        for column, new in zip(columns, dealt(group, given, [16] * ranks), strict=True):
            for t, n in zip(column, new, strict=True):
                t.copy_(n)
        for device in devices:
            torch.cuda.synchronize(device)
        graph.replay()
        group.check()
        assert torch.equal(joined(outs), alone(spec, weights, given)), seed


def test_a_graph_of_each_gpu_with_counts_on_the_device(devices, spec, weights):
    ranks = len(devices)
    with local_group(spec, ranks=ranks, devices=devices, max_tokens=BOUND, deadline=DEADLINE) as group:
        group.load(weights)
        given = make_input(spec, 32 * ranks, "cuda:0")
        columns = dealt(group, given, [32] * ranks)
        outs = [torch.zeros_like(x) for x in columns[0]]
        counts = [torch.full((), 32, dtype=torch.int32, device=f"cuda:{d}") for d in devices]
        want = joined(group(*columns))
        engine, calls = group._runtime.engine, []
        kept = engine.forward
        engine.forward = calls.extend
        group(*columns, outs=outs, num_tokens=counts)
        engine.forward = kept
        graphs = []
        for r, d in enumerate(devices):
            with torch.cuda.device(d):
                graph = torch.cuda.CUDAGraph()
                # torch's own stream for captures belongs to the GPU of the first one
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(d)):
                    engine.forward_some(calls, [r])
                graphs.append(graph)
        for n in (32, 0, 7, 31):
            for out, count in zip(outs, counts, strict=True):
                out.fill_(7.0)
                count.fill_(n)
            for place in range(ranks):
                r = (n + place) % ranks
                with torch.cuda.device(devices[r]):
                    graphs[r].replay()
            group.check()
            for r in range(ranks):
                assert torch.equal(outs[r][:n].to("cuda:0"), want[32 * r : 32 * r + n])
                assert bool((outs[r][n:] == 7.0).all())


def test_a_gpu_that_comes_late(group, devices, spec, weights):
    ranks = len(group)
    given = make_input(spec, 8 * ranks, "cuda:0")
    columns, want = dealt(group, given, [8] * ranks), alone(spec, weights, given)
    for late in devices * 2:
        with torch.cuda.device(late):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
        assert torch.equal(joined(group(*columns)), want)
    group.check()


def test_a_gpu_that_does_not_come(devices, spec, weights):
    ranks = len(devices)
    with local_group(spec, ranks=ranks, devices=devices, max_tokens=BOUND, deadline=1.0) as group:
        group.load(weights)
        given = make_input(spec, 32 * ranks, "cuda:0")
        columns = dealt(group, given, [32] * ranks)
        base = joined(group(*columns))
        engine = group._runtime.engine
        kept = engine.forward
        for missing in range(ranks):
            others = tuple(r for r in range(ranks) if r != missing)
            outs = [torch.zeros_like(x) for x in columns[0]]
            engine.forward = lambda calls, others=others: kept(calls, ranks=others)
            start = time.perf_counter()
            group(*columns, outs=outs)
            engine.forward = kept
            waited = rf"rank [{''.join(map(str, others))}] waited for the peers' route counts.*reset"
            with pytest.raises(DeadlineError, match=waited):
                group.check()
            assert 0.9 < time.perf_counter() - start < 5
            assert all(bool(outs[r].isnan().all()) for r in others)
            with pytest.raises(ClosedError, match=r"rank \d waited for"):
                group(*columns)
            group.reset()
            for _ in range(3):
                assert torch.equal(joined(group(*columns)), base)
            group.check()


def test_tensors_of_the_wrong_gpu_are_refused(devices, spec, weights):
    ranks = len(devices)
    with local_group(spec, ranks=ranks, devices=devices, max_tokens=BOUND, deadline=DEADLINE) as group:
        group.load(weights)
        given = make_input(spec, 4 * ranks, "cuda:0")
        with pytest.raises(InputError, match=r"rank 1's x: got device cuda:0.*cuda:1"):
            group(*([*t.split(4)] for t in given))
        columns = dealt(group, given, [4] * ranks)
        assert torch.equal(joined(group(*columns)), alone(spec, weights, given))


def test_expandable_segments(devices, spec, weights):
    """Memory of torch's expandable segments is not mapped for peers; the arenas are not made of it."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        test_tensors_of_the_wrong_gpu_are_refused(devices, spec, weights)
        test_a_layer_of_real_size(devices, 32)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
