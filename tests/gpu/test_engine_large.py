"""The GPU engine on layers of real sizes and on a real text's activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fused_cases import make_input, make_weights

import megamoe
from megamoe import MegaMoE, MoESpec, local_group, reference
from megamoe.demo_activations import byte_tokens, layer_input
from megamoe.demo_checkpoint import make_checkpoint

pytestmark = pytest.mark.gpu

END_TO_END = 8e-3
FLASH = MoESpec(hidden=4096, intermediate=2048, experts=32, topk=6, clamp=10.0)


def test_a_token_alone_and_among_8192():
    """Bits of a row depend on nothing but the row: other tokens, their number, the plan of the bound, the run."""
    weights = make_weights(FLASH, "cuda")
    x, ids, route_weights = make_input(FLASH, 8192, "cuda")
    with MegaMoE(FLASH, max_tokens=8192, deadline=5.0) as layer:
        layer.load(weights)
        among = layer(x, ids, route_weights)
        assert torch.equal(layer(x, ids, route_weights), among)
        for bound in (1, 64, 1024, 8192):
            for row in (0, 1, 4095, 8191):
                part = slice(row, row + 1)
                alone = layer(x[part], ids[part], route_weights[part], bound=bound)
                assert torch.equal(alone, among[part]), (row, bound)
        for first, count in ((0, 17), (100, 64), (5000, 1000)):
            part = slice(first, first + count)
            few = layer(x[part], ids[part], route_weights[part], bound=1024)
            assert torch.equal(few, among[part]), (first, count)
        layer.check()
    part = slice(4000, 4064)
    want = reference.forward(FLASH, weights, x[part], ids[part], route_weights[part])
    assert reference.relative_error(among[part], want) < END_TO_END


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_real_texts_activations(tmp_path_factory, ranks):
    pytest.importorskip("transformers")
    directory = make_checkpoint("deepseek-v3", tmp_path_factory.mktemp("demo"))
    tokens = byte_tokens(200, Path(__file__).parents[2] / "LICENSE")
    given = layer_input(directory, 1, tokens)
    checkpoint = megamoe.checkpoint(directory, layer=1)
    call = (given.activations, given.expert_ids, given.expert_weights)
    want = reference.forward(checkpoint.spec, checkpoint.read(), *call)
    size = 200 // ranks
    columns = [[t[r * size : (r + 1) * size].cuda() for r in range(ranks)] for t in call]
    with local_group(checkpoint.spec, ranks=ranks, max_tokens=256, deadline=5.0) as group:
        assert group.engine == "cuda"
        group.load(checkpoint)
        got = torch.cat(group(*columns)).cpu()
        group.check()
    error = reference.relative_error(got, want)
    print(f"\nreal text, {ranks} rank(s): relative error {error:.2e}")
    assert error < END_TO_END


@pytest.mark.parametrize("bound", [16, 256])  # swapped tiles only, wide ones too
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 512), (512, 256), (256, 256)])
def test_few_k_blocks(hidden, intermediate, bound):
    """Layers whose depth is less than the ring of stages; (256, 256) is what ptxas 13.0.88 miscompiled."""
    spec = MoESpec(hidden=hidden, intermediate=intermediate, experts=16, topk=4)
    weights = make_weights(spec, "cuda")
    x, ids, route_weights = make_input(spec, min(bound, 200), "cuda")
    with MegaMoE(spec, max_tokens=256, deadline=5.0) as layer:
        layer.load(weights)
        for _ in range(3):
            y = layer(x, ids, route_weights, bound=bound)
            layer.check()
        assert reference.relative_error(y, reference.forward(spec, weights, x, ids, route_weights)) < END_TO_END
