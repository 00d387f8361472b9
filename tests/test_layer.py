"""`MegaMoE` and `local_group` as a user meets them: results, refusals, life cycle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megamoe
from megamoe import ExpertWeights, MegaMoE, MoESpec, inputs, local_group, reference
from megamoe.errors import ClosedError, EngineError, FormatError, InputError, SpecError, WeightError
from megamoe.formats import fp8_block
from moe_cases import SPEC, make_call, make_weights, part


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return make_weights(SPEC, "fp8_block")


@pytest.fixture
def layer(weights: ExpertWeights) -> Iterator[MegaMoE]:
    with MegaMoE(SPEC, max_tokens=32) as layer:
        layer.load(weights)
        yield layer


def agrees(y: torch.Tensor, weights: ExpertWeights, call: tuple[torch.Tensor, ...], spec: MoESpec = SPEC) -> bool:
    return reference.relative_error(y, reference.forward(spec, weights, *call)) < 8e-3


def test_call_agrees_with_the_oracle(layer: MegaMoE, weights: ExpertWeights) -> None:
    call = make_call(SPEC, 17)
    y = layer(*call)
    assert y.dtype == torch.bfloat16
    assert y.shape == (17, SPEC.hidden)
    assert agrees(y, weights, call)


def test_no_tokens(layer: MegaMoE) -> None:
    assert layer(*make_call(SPEC, 0)).shape == (0, SPEC.hidden)


def test_quantised_input_gives_the_same_bits(layer: MegaMoE) -> None:
    x, ids, route_weights = make_call(SPEC, 6)
    assert torch.equal(layer(fp8_block.quantize_activations(x), ids, route_weights), layer(x, ids, route_weights))


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_strides_and_id_types(layer: MegaMoE, id_type: torch.dtype) -> None:
    x, ids, route_weights = make_call(SPEC, 10)
    expected = layer(x, ids, route_weights)
    wide = torch.zeros(20, 2 * SPEC.hidden).bfloat16()
    wide[::2, SPEC.hidden :] = x
    strided = wide[::2, SPEC.hidden :]
    columns = torch.empty(SPEC.hidden, 10, dtype=torch.bfloat16).copy_(x.T).T
    turned_ids = ids.to(id_type).T.contiguous().T
    turned_weights = torch.stack((route_weights, torch.full_like(route_weights, torch.nan)), -1)[..., 0]
    for apart in (strided, columns):
        assert not apart.is_contiguous()
        assert torch.equal(layer(apart, turned_ids, turned_weights), expected)
    q, s = fp8_block.quantize_activations(x)
    q_wide = torch.zeros(20, SPEC.hidden, dtype=torch.uint8)
    q_wide[1::2] = q.view(torch.uint8)
    strided_pair = (q_wide[1::2].view(q.dtype), s.T.contiguous().T)
    assert torch.equal(layer(strided_pair, ids, route_weights), expected)


def test_out(layer: MegaMoE) -> None:
    x, ids, route_weights = make_call(SPEC, 5)
    expected = layer(x, ids, route_weights)
    canvas = torch.full((7, SPEC.hidden + 8), 3.0).bfloat16()
    out = canvas[1:6, 4:-4]
    assert layer(x, ids, route_weights, out=out) is out
    assert torch.equal(out, expected)
    out.fill_(3.0)
    assert (canvas == 3.0).all()  # nothing around it was touched
    itself = x.clone()
    layer(itself, ids, route_weights, out=itself)
    assert torch.equal(itself, expected)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_num_tokens(layer: MegaMoE, as_tensor: bool) -> None:
    x, ids, route_weights = make_call(SPEC, 8)
    expected = layer(x, ids, route_weights)
    layer.clear_stats()
    x[5:], route_weights[5:] = torch.nan, torch.nan
    ids[5:] = 999  # padding is not looked at
    count: Any = torch.tensor(5, dtype=torch.int32) if as_tensor else 5
    out = torch.full_like(x, 7.0)
    layer(x, ids, route_weights, out=out, num_tokens=count, bound=8)
    assert reference.relative_error(out[:5], expected[:5]) < 8e-3
    assert (out[5:] == 7.0).all()
    assert layer.stats.sum() == 15
    fresh = layer(x, ids, route_weights, num_tokens=count)
    assert torch.equal(fresh[:5], out[:5])
    assert not fresh[5:].any()


def test_stats_count_routes_since_load(layer: MegaMoE, weights: ExpertWeights) -> None:
    _, ids, _ = call = make_call(SPEC, 12)
    ids[3] = -1
    ids[4, 0] = -1
    expected = torch.tensor([(ids == e).sum() for e in range(SPEC.experts)])
    layer(*call)
    layer(*call)
    assert torch.equal(layer.stats, 2 * expected)
    layer.stats.zero_()  # a copy
    assert torch.equal(layer.stats, 2 * expected)
    layer.clear_stats()
    assert not layer.stats.any()
    layer(*call)
    layer.load(weights)
    assert not layer.stats.any()


def test_second_load_replaces_the_first(layer: MegaMoE) -> None:
    call = make_call(SPEC, 6)
    for weight_format in ("bf16", "mxfp4", "fp8_block"):
        other = make_weights(SPEC, weight_format, seed=5)
        layer.load(other)
        assert layer.weight_format == weight_format
        assert agrees(layer(*call), other, call)


def test_weights_overwritten_in_place_take_effect(layer: MegaMoE) -> None:
    call = make_call(SPEC, 6)
    mine = make_weights(SPEC, "fp8_block", seed=7)
    layer.load(mine)
    mine.w13.view(torch.uint8).copy_(make_weights(SPEC, "fp8_block", seed=8).w13.view(torch.uint8))
    assert agrees(layer(*call), mine, call)


def bad_arguments() -> dict[str, tuple[dict[str, Any], str]]:
    x, ids, w = make_call(SPEC, 4)
    q, s = fp8_block.quantize_activations(x)
    bf16 = torch.bfloat16
    return {
        "float16": ({"x": x.half()}, r"x: got dtype float16.*bfloat16 \[4, 256\].*\.bfloat16\(\)"),
        "float32": ({"x": x.float()}, "x: got dtype float32"),
        "bare e4m3": ({"x": q}, r"x: got dtype float8_e4m3fn.*\(q, scales\)"),
        "list": ({"x": [q, s, s]}, r"x: got 3 tensors.*\(q, scales\)"),
        "not a tensor": ({"x": 3}, "x: got int"),
        "wide": ({"x": x[:, :128]}, r"x: got shape \[4, 128\].*\[4, 256\]"),
        "flat": ({"x": x[0]}, r"x: got shape \[256\]"),
        "number": ({"x": torch.tensor(1.0).bfloat16()}, r"x: got shape \[\]"),
        "meta": ({"x": x.to("meta")}, "x: got device meta.*cpu"),
        "sparse": ({"x": x.to_sparse()}, "x: got layout"),
        "scales shape": ({"x": (q, s[:, :1])}, r"x\[1\]: got shape \[4, 1\].*\[4, 2\]"),
        "scales dtype": ({"x": (q, s.double())}, r"x\[1\]: got dtype float64.*float32"),
        "values dtype": ({"x": (x, s)}, r"x\[0\]: got dtype bfloat16"),
        "values int": ({"x": (1, s)}, r"x\[0\]: got int"),
        "ids dtype": ({"expert_ids": ids.short()}, "expert_ids: got dtype int16.*int32 or int64"),
        "ids shape": ({"expert_ids": ids[:3]}, r"expert_ids: got shape \[3, 3\].*\[4, 3\]"),
        "ids high": ({"expert_ids": ids.index_fill(1, torch.tensor(1), 8)}, r"expert_ids\[0, 1\]: got 8.*0 to 7"),
        "ids low": ({"expert_ids": ids.index_fill(0, torch.tensor(2), -2)}, r"expert_ids\[2, 0\]: got -2"),
        "weights dtype": ({"expert_weights": w.bfloat16()}, r"expert_weights: got dtype bfloat16.*float32.*\.float"),
        "weights shape": ({"expert_weights": w[:, :2]}, r"expert_weights: got shape \[4, 2\]"),
        "grad": ({"x": x.clone().requires_grad_()}, "x: got a tensor that requires grad.*no_grad"),
        "weights grad": ({"expert_weights": w.clone().requires_grad_()}, "expert_weights: got a tensor that requires"),
        "too many": (dict(zip(("x", "expert_ids", "expert_weights"), make_call(SPEC, 33), strict=True)), "33 tok.*32"),
        "over bound": ({"bound": 3}, "x: got 4 tokens.*bound = 3"),
        "bound": ({"bound": 33}, "bound: got 33.*max_tokens = 32"),
        "bound type": ({"bound": 0}, "bound: got 0.*from 1"),
        "num_tokens": ({"num_tokens": 5}, "num_tokens: got 5.*0 to 4"),
        "num_tokens bool": ({"num_tokens": True}, "num_tokens: got True"),
        "num_tokens tensor": ({"num_tokens": torch.tensor(5, dtype=torch.int32)}, "num_tokens: got 5.*0 to 4"),
        "num_tokens dtype": ({"num_tokens": torch.tensor(2)}, "num_tokens: got dtype int64.*int32"),
        "num_tokens shape": ({"num_tokens": torch.zeros(2, dtype=torch.int32)}, r"num_tokens: got shape \[2\]"),
        "out dtype": ({"out": torch.empty(4, 256)}, "out: got dtype float32.*bfloat16"),
        "out shape": ({"out": torch.empty(5, 256, dtype=bf16)}, r"out: got shape \[5, 256\]"),
        "out columns": ({"out": torch.empty(256, 4, dtype=bf16).T}, r"out: got strides \[1, 4\]"),
        "out overlaps": ({"out": torch.empty(1, 256, dtype=bf16).expand(4, -1)}, r"out: got strides \[0, 1\]"),
    }


@pytest.mark.parametrize("case", list(bad_arguments()))
def test_refusals_say_what_and_leave_the_layer_usable(layer: MegaMoE, weights: ExpertWeights, case: str) -> None:
    change, message = bad_arguments()[case]
    call = make_call(SPEC, 4)
    arguments = dict(zip(("x", "expert_ids", "expert_weights"), call, strict=True)) | change
    with pytest.raises(InputError, match=message) as caught:
        layer(**arguments)
    assert caught.value.way_out
    assert not layer.stats.any()
    assert agrees(layer(*call), weights, call)


def test_requires_grad_is_fine_where_no_gradient_is_recorded(layer: MegaMoE) -> None:
    x, ids, route_weights = make_call(SPEC, 4)
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(layer(leaf, ids, route_weights), layer(x, ids, route_weights))


def test_quantised_input_needs_quantised_experts(layer: MegaMoE) -> None:
    x, ids, route_weights = make_call(SPEC, 4)
    layer.load(make_weights(SPEC, "bf16"))
    with pytest.raises(InputError, match="bf16 experts"):
        layer(fp8_block.quantize_activations(x), ids, route_weights)


def test_bad_weights_are_refused_and_the_old_ones_stay(layer: MegaMoE, weights: ExpertWeights) -> None:
    call = make_call(SPEC, 4)
    nan = make_weights(SPEC, "fp8_block")
    nan.w2_scale[5, 1, 0] = torch.nan
    nan_byte = make_weights(SPEC, "mxfp4")
    nan_byte.w13_scale.view(torch.uint8)[2, 0, 1] = 255
    bad: list[tuple[Any, type[Exception], str]] = [
        (nan, WeightError, r"w2_scale\[5, 1, 0\]: got nan.*Expert 5"),
        (nan_byte, WeightError, r"w13_scale\[2, 0, 1\]: got NaN"),
        (part(weights, 2, 2), WeightError, r"experts \[2, 4\).*\[0, 8\)"),
        (make_weights(MoESpec(hidden=128, intermediate=128, experts=8, topk=3), "bf16"), WeightError, "w13: got shape"),
        ("path", WeightError, "source: got str.*megamoe.checkpoint"),
        (None, WeightError, "source: got NoneType"),
    ]
    for source, error, message in bad:
        with pytest.raises(error, match=message):
            layer.load(source)
        assert agrees(layer(*call), weights, call)


class FakeCheckpoint:
    """Stands in for `megamoe.checkpoint`: records what is read."""

    def __init__(self, weights: ExpertWeights, spec: MoESpec = SPEC) -> None:
        self.weights, self.spec, self.reads = weights, spec, []

    def read(self, first_expert: int = 0, count: int | None = None) -> ExpertWeights:
        self.reads.append((first_expert, count))
        return part(self.weights, first_expert, count or self.weights.local_experts)


def test_checkpoints_are_read_rank_by_rank(weights: ExpertWeights) -> None:
    source = FakeCheckpoint(weights)
    with local_group(SPEC, ranks=4) as group:
        group.load(source)
    assert source.reads == [(0, 2), (2, 2), (4, 2), (6, 2)]
    other = FakeCheckpoint(weights, MoESpec(hidden=512, intermediate=128, experts=8, topk=3))
    with MegaMoE(SPEC) as layer, pytest.raises(WeightError, match=r"checkpoint hidden: got 512.*256"):
        layer.load(other)


def test_close(weights: ExpertWeights) -> None:
    layer = MegaMoE(SPEC)
    layer.load(weights)
    call = make_call(SPEC, 2)
    layer(*call)
    layer.close()
    layer.close()
    assert layer.closed
    assert "closed" in repr(layer)
    uses: list[Any] = [
        lambda: layer(*call),
        lambda: layer.load(weights),
        lambda: layer.stats,
        layer.check,
        layer.reset,
        layer.warmup,
        layer.clear_stats,
        lambda: layer.device,
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="closed layer"):
            use()
    with pytest.raises(ClosedError), layer:
        layer(*call)


def test_before_load() -> None:
    with MegaMoE(SPEC) as layer:
        for use in (lambda: layer(*make_call(SPEC, 2)), layer.warmup):
            with pytest.raises(InputError, match=r"without weights.*load"):
                use()
        assert layer.weight_format is None
        layer.check()
        layer.reset()


def test_warmup(layer: MegaMoE) -> None:
    layer.warmup()
    layer.warmup(bound=4)
    for bad in (33, 0, 1.5):
        with pytest.raises(InputError, match="bound"):
            layer.warmup(bound=bad)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MegaMoE(SPEC, max_tokens=0), InputError, "max_tokens: got 0"),
        (lambda: MegaMoE(SPEC, max_tokens=2.5), InputError, "max_tokens: got 2.5"),
        (lambda: MegaMoE(SPEC, deadline=0), InputError, "deadline: got 0"),
        (lambda: MegaMoE(SPEC, deadline=float("nan")), InputError, "deadline: got nan"),
        (lambda: MegaMoE("spec"), SpecError, "spec: got str"),
        (lambda: MegaMoE(SPEC, group=3), InputError, "group: got 3"),
        (lambda: MegaMoE(SPEC, backend="tpu"), EngineError, "backend: got tpu.*'auto'"),
        (lambda: MegaMoE(SPEC, backend="cuda"), EngineError, "backend: got cuda.*backend='cpu'"),
        (lambda: local_group(SPEC, ranks=3), SpecError, "multiple of the number of ranks"),
        (lambda: local_group(SPEC, ranks=0), InputError, "ranks: got 0"),
        (lambda: local_group(SPEC, ranks=16), SpecError, "experts: got 8"),
        (lambda: local_group(SPEC, ranks=2, backend="cpu", devices=[0]), EngineError, r"devices: got \[0\]"),
    ],
)
def test_constructor_refusals(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_formats_that_cannot_hold_the_layer() -> None:
    spec = MoESpec(hidden=96, intermediate=64, experts=4, topk=2)
    w = make_weights(spec, "bf16")
    call = make_call(spec, 5)
    with MegaMoE(spec) as layer:
        with pytest.raises(FormatError, match="bf16"):
            layer.load(ExpertWeights(format="fp8_block", w13=w.w13, w2=w.w2))
        layer.load(w)
        assert agrees(layer(*call), w, call, spec)


def test_concurrent_calls_are_refused(layer: MegaMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go = threading.Event(), threading.Event()
    forward = layer._runtime.engine.forward

    def slow(calls: Any) -> None:
        inside.set()
        go.wait(20)
        forward(calls)

    monkeypatch.setattr(layer._runtime.engine, "forward", slow)
    call = make_call(SPEC, 3)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(layer(*call)))
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(InputError, match="another one is running"):
            layer(*call)
    finally:
        go.set()
        thread.join()
    monkeypatch.undo()
    assert torch.equal(results[0], layer(*call))


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_local_group(weight_format: str, ranks: int) -> None:
    w = make_weights(SPEC, weight_format)
    calls = [make_call(SPEC, tokens, seed=tokens) for tokens in (5, 0, 20, 1, 0, 3, 9, 2)[:ranks]]
    calls[0][1][0] = -1
    calls[0][1][1, 2] = -1
    calls[-1][1][:, 0] = 3  # a hot expert
    xs, ids, route_weights = (list(column) for column in zip(*calls, strict=True))
    with local_group(SPEC, ranks=ranks, backend="cpu") as group:
        group.load(w)
        ys = group(xs, ids, route_weights)
        for y, call in zip(ys, calls, strict=True):
            assert agrees(y, w, call)
        received = torch.cat([i.flatten() for i in ids])
        assert torch.equal(group.stats, torch.bincount(received[received >= 0], minlength=8))
        assert [len(member.stats) for member in group] == [8 // ranks] * ranks
        group.load([part(w, rank * 8 // ranks, 8 // ranks) for rank in range(ranks)])
        assert all(torch.equal(a, b) for a, b in zip(group(xs, ids, route_weights), ys, strict=True))
        nothing = [make_call(SPEC, 0)] * ranks
        assert all(y.shape == (0, SPEC.hidden) for y in group(*(list(c) for c in zip(*nothing, strict=True))))
        outs = [torch.full_like(x, 7.0) for x in xs]
        returned = group(xs, ids, route_weights, outs=outs, num_tokens=[len(x) // 2 for x in xs])
        for out, back, y in zip(outs, returned, ys, strict=True):
            half = len(y) // 2
            assert back is out
            # Fewer rows in a product may change its order of summation.
            assert reference.relative_error(out[:half], y[:half]) < 8e-3
            assert (out[half:] == 7.0).all()


def test_rows_cross_to_a_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    w = make_weights(SPEC, "fp8_block")
    call = make_call(SPEC, 6)
    call[1][:] = torch.tensor([6, 7, 6])  # three routes of each token, all on rank 1
    with local_group(SPEC, ranks=4) as group:
        group.load(w)
        sent: list[list[int]] = []
        exchange = group._runtime.engine._exchange

        def spy(phase: str, send: Any, rows_in: Any) -> Any:
            sent.append([len(part) for part in send[0]])
            return exchange(phase, send, rows_in)

        monkeypatch.setattr(group._runtime.engine, "_exchange", spy)
        nothing = make_call(SPEC, 0)
        y, *_ = group(*(list(c) for c in zip(call, nothing, nothing, nothing, strict=True)))
    assert agrees(y, w, call)
    assert sent == [[0, 0, 0, 6], [0, 0, 0, 18], [0, 0, 0, 0]]


def test_local_group_refusals(weights: ExpertWeights) -> None:
    calls = [make_call(SPEC, 3), make_call(SPEC, 2)]
    xs, ids, route_weights = (list(column) for column in zip(*calls, strict=True))
    with local_group(SPEC, ranks=2, max_tokens=16) as group:
        with pytest.raises(WeightError, match=r"4 experts.*all 8"):
            group.load(part(weights, 0, 4))
        with pytest.raises(WeightError, match=r"list of 1.*2 ranks"):
            group.load([weights])
        with pytest.raises(WeightError, match="one format"):
            group.load([weights, make_weights(SPEC, "bf16")])
        group.load(weights)
        ys = group(xs, ids, route_weights)
        refused: list[tuple[Any, str]] = [
            ((xs[:1], ids, route_weights), "xs: got 1 entries.*list of 2"),
            ((xs, ids[0], route_weights), "expert_ids: got Tensor"),
            ((xs, ids, [route_weights[0], route_weights[1].double()]), "rank 1's expert_weights: got dtype float64"),
            ((xs, [ids[0], ids[1] + 8], route_weights), r"rank 1's expert_ids\[0, 0\]"),
        ]
        for arguments, message in refused:
            with pytest.raises(InputError, match=message):
                group(*arguments)
        with pytest.raises(InputError, match=r"rank 1 of a local group.*group"):
            group[1](*calls[1])
        for name in ("load", "warmup", "check", "reset", "close", "clear_stats"):
            with pytest.raises(InputError, match=f"group.{name}"):
                getattr(group[0], name)(*([weights] if name == "load" else []))
        group.warmup()
        group.check()
        group.reset()
        assert all(torch.equal(a, b) for a, b in zip(group(xs, ids, route_weights), ys, strict=True))
        assert (group[1].rank, group[1].ranks, group[1].first_expert, len(group)) == (1, 2, 4, 2)
    group.close()
    with pytest.raises(ClosedError):
        group(xs, ids, route_weights)
    assert group[0].closed


def test_public_names() -> None:
    for name in megamoe.__all__:
        assert getattr(megamoe, name) is not None


@pytest.mark.parametrize("gpu", [False, True])
def test_ranges_around_calls(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around every call while a label is set, ended when a call raises, absent otherwise."""
    seen: list[str] = []
    if gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda label: seen.append(f"push {label}"))
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    spec = MoESpec(hidden=64, intermediate=64, experts=4, topk=2)
    x, ids, weights = torch.zeros(3, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    with MegaMoE(spec, max_tokens=4, backend="cpu") as layer:
        layer.load(make_weights(spec, "bf16"))
        layer.annotate("experts")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            layer(x, ids, weights)
            with pytest.raises(InputError, match="expert_ids"):
                layer(x, ids + 4, weights)
        layer.annotate(None)
        layer(x, ids, weights)
    profiled = sum(event.name == "experts" for event in profile.events())
    assert (seen, profiled) == ((["push experts", "pop"] * 2, 0) if gpu else ([], 2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@settings(max_examples=150, deadline=None)
@given(choices=st.sets(st.integers(0, 11), max_size=2), with_out=st.booleans())
def test_the_quick_look_accepts_what_the_checks_accept(device: str, choices: set[int], with_out: bool) -> None:
    """`_is_usual` is the checks once more, quicker: whatever it takes they take, unchanged."""
    rows = 3
    given_x = torch.zeros(rows, SPEC.hidden, dtype=torch.bfloat16, device=device)
    given_ids = torch.zeros(rows, SPEC.topk, dtype=torch.int32, device=device)
    given_weights = torch.ones(rows, SPEC.topk, device=device)
    given_out = torch.zeros_like(given_x) if with_out else None
    changes: list[Callable[[], tuple[Any, ...]]] = [
        lambda: (given_x.float(), given_ids, given_weights, given_out),
        lambda: (given_x[:2], given_ids, given_weights, given_out),
        lambda: (given_x[:, :-1], given_ids, given_weights, given_out),
        lambda: (given_x, given_ids.long(), given_weights, given_out),
        lambda: (given_x, given_ids.short(), given_weights, given_out),
        lambda: (given_x, given_ids, given_weights.double(), given_out),
        lambda: (given_x, given_ids, given_weights.T, given_out),
        lambda: (given_x, given_ids, given_weights.clone().requires_grad_(), given_out),
        lambda: (given_x.T.contiguous().T, given_ids, given_weights, given_out),
        lambda: (given_x, given_ids, given_weights, torch.zeros(rows, SPEC.hidden, device=device)),
        lambda: (given_x, given_ids, given_weights, torch.zeros(1, 1, device="meta").bfloat16().expand(3, SPEC.hidden)),
        lambda: (given_x.to_sparse() if device == "cpu" else given_x[0], given_ids, given_weights, given_out),
    ]
    for choice in sorted(choices):  # the one that other changes cannot follow is last
        given_x, given_ids, given_weights, given_out = changes[choice]()
    cpu = torch.device("cpu")
    arguments = (SPEC, "fp8_block", 8, cpu, given_x, given_ids, given_weights)
    if not inputs._is_usual(SPEC, cpu, given_x, given_ids, given_weights, given_out):
        return
    quick = inputs.check_call(*arguments, out=given_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_is_usual", lambda *_: False)
        slow = inputs.check_call(*arguments, out=given_out)  # raises where the quick look took too much
    assert quick.plain
    assert not slow.plain
    for name in ("x", "scales", "expert_ids", "expert_weights", "num_tokens", "bound"):
        assert getattr(quick, name) is getattr(slow, name) or getattr(quick, name) == getattr(slow, name)


def test_the_quick_look_knows_the_usual_call() -> None:
    x, ids, weights = make_call(SPEC, 3)
    cpu = torch.device("cpu")
    assert inputs._is_usual(SPEC, cpu, x, ids, weights, None)
    assert inputs._is_usual(SPEC, cpu, x, ids, weights, torch.empty_like(x))
    assert not inputs._is_usual(SPEC, cpu, x, ids, weights.double(), None)
