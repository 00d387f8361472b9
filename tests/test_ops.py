"""The functional operator: eager, faked, and inside torch.compile(fullgraph=True)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megamoe import MegaMoE, local_group, ops, reference
from megamoe.errors import ClosedError, InputError
from megamoe.formats import fp8_block
from moe_cases import SPEC, make_call, make_weights

# Inductor needs a C++ compiler and seconds; one test takes it, the rest stop at its input.
BACKEND = "aot_eager"


@pytest.fixture
def layer() -> Iterator[MegaMoE]:
    torch._dynamo.reset()
    with MegaMoE(SPEC, max_tokens=64) as layer:
        layer.load(make_weights(SPEC, "fp8_block"))
        yield layer


class Block(torch.nn.Module):
    """A residual block around the layer, with the surroundings that a compiler would fuse."""

    def __init__(self, layer: MegaMoE) -> None:
        super().__init__()
        self.moe = layer
        self.norm = torch.nn.RMSNorm(SPEC.hidden, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return x + self.moe(self.norm(x), ids, weights, **keywords)


def test_operators_pass_torchs_own_checks(layer: MegaMoE) -> None:
    x, ids, weights = make_call(SPEC, 5)
    count = torch.tensor(3, dtype=torch.int32)
    torch.library.opcheck(ops.experts, (layer._handle, x, None, ids, weights))
    torch.library.opcheck(ops.experts_out, (layer._handle, torch.zeros_like(x), x, None, ids, weights, count, None, 8))
    q, s = fp8_block.quantize_activations(x)
    # The schema check cannot compare e4m3 tensors.
    torch.library.opcheck(ops.experts, (layer._handle, q, s, ids, weights, None, 3), test_utils="test_faketensor")


def test_operators_do_what_the_layer_does(layer: MegaMoE) -> None:
    x, ids, weights = make_call(SPEC, 5)
    expected = layer(x, ids, weights)
    assert torch.equal(torch.ops.megamoe.experts(layer._handle, x, None, ids, weights), expected)
    out = torch.full_like(x, 7.0)
    torch.ops.megamoe.experts_out(layer._handle, out, x, None, ids, weights, None, 5, 5)
    assert torch.equal(out, expected)
    assert "Tensor(a1!) out" in str(torch.ops.megamoe.experts_out.default._schema)
    assert "!" not in str(torch.ops.megamoe.experts.default._schema)


def test_fake_tensors(layer: MegaMoE) -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        x, ids, weights = (mode.from_tensor(t) for t in make_call(SPEC, 5))
        y = torch.ops.megamoe.experts(layer._handle, x, None, ids, weights)
    assert (y.shape, y.dtype) == ((5, SPEC.hidden), torch.bfloat16)
    assert not layer.stats.any()


def test_compiles_as_one_graph(layer: MegaMoE) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    block = Block(layer)
    with torch.inference_mode():
        compiled = torch.compile(block, fullgraph=True, backend=count)
        assert torch.equal(compiled(*make_call(SPEC, 5)), block(*make_call(SPEC, 5)))
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("megamoe.experts" in target for target in targets) == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_compiled_is_eager_for_any_number_of_tokens(layer: MegaMoE, mode: Any) -> None:
    block = Block(layer)
    compiled = torch.compile(block, fullgraph=True, backend=BACKEND)
    with mode():
        for tokens in (5, 1, 17, 0):
            call = make_call(SPEC, tokens)
            assert torch.equal(compiled(*call), block(*call))
            x, ids, weights = call
            assert torch.equal(compiled(x, ids.int(), weights), block(*call))


def test_compiled_with_inductor(layer: MegaMoE) -> None:
    block = Block(layer)
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True)
        call = make_call(SPEC, 6)
        assert reference.relative_error(compiled(*call), block(*call)) < 8e-3


def test_compiled_out_and_num_tokens(layer: MegaMoE) -> None:
    def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, count: Any) -> torch.Tensor:
        layer(x, ids, weights, out=out, num_tokens=count, bound=16)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, backend=BACKEND)
    x, ids, weights = make_call(SPEC, 6)
    for count in (4, torch.tensor(4, dtype=torch.int32)):
        ours, theirs = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
        with torch.no_grad():
            assert torch.equal(compiled(x, ids, weights, ours, count), step(x, ids, weights, theirs, count))
        assert torch.equal(ours, theirs)
        assert (ours[4:] == 7.0).all()
        assert not (ours[:4] == 7.0).all()


def test_compiled_quantised_input(layer: MegaMoE) -> None:
    x, ids, weights = make_call(SPEC, 6)
    compiled = torch.compile(
        lambda q, s, ids, weights: layer((q, s), ids, weights) * 2, fullgraph=True, backend=BACKEND
    )
    with torch.no_grad():
        assert torch.equal(compiled(*fp8_block.quantize_activations(x), ids, weights), layer(x, ids, weights) * 2)


def test_two_layers_in_one_graph(layer: MegaMoE) -> None:
    with MegaMoE(SPEC) as second:
        second.load(make_weights(SPEC, "bf16", seed=3))

        def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return second(layer(x, ids, weights), ids, weights)

        call = make_call(SPEC, 4)
        compiled = torch.compile(step, fullgraph=True, backend=BACKEND)
        assert torch.equal(compiled(*call), step(*call))


def test_errors_come_out_of_compiled_code(layer: MegaMoE) -> None:
    block = Block(layer)
    x, ids, weights = make_call(SPEC, 4)
    compiled = torch.compile(block, fullgraph=True, backend=BACKEND)
    with torch.no_grad():
        good = compiled(x, ids, weights)
        with pytest.raises(InputError, match=r"expert_ids\[0, 0\]"):
            compiled(x, ids + 8, weights)
        assert torch.equal(compiled(x, ids, weights), good)
        layer.close()
        with pytest.raises(ClosedError, match="handle"):
            compiled(x, ids, weights)


def test_gradients_are_refused(layer: MegaMoE) -> None:
    x, ids, weights = make_call(SPEC, 4)
    wants = x.clone().requires_grad_()
    with pytest.raises(InputError, match="no backward"):
        torch.ops.megamoe.experts(layer._handle, wants, None, ids, weights)
    compiled = torch.compile(Block(layer), fullgraph=True, backend=BACKEND)
    with pytest.raises(Exception, match="no backward"):
        compiled(wants, ids, weights)
    with pytest.raises(Exception, match="no backward"):
        compiled(wants, ids, weights, out=torch.empty_like(x))


def test_handles_do_not_keep_layers_alive() -> None:
    layer = MegaMoE(SPEC)
    handle = layer._handle
    assert ops._layer(handle) is layer
    del layer
    with pytest.raises(ClosedError, match=str(handle)):
        ops._layer(handle)


def test_a_member_of_a_local_group_has_no_operator_of_its_own() -> None:
    with local_group(SPEC, ranks=2) as group:
        group.load(make_weights(SPEC, "fp8_block"))
        x, ids, weights = make_call(SPEC, 2)
        with pytest.raises(InputError, match="local group"):
            torch.ops.megamoe.experts(group[0]._handle, x, None, ids, weights)
