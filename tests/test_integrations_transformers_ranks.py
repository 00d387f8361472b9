"""Transformers' expert parallelism on two ranks: the host's own code with the registered implementation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hosted_models import (
    Teacher,
    experts_of,
    has_expert_parallel,
    make_model,
    oracle_experts,
    prompt,
    quantize_experts,
    register_oracle,
)
from megamoe import reference
from megamoe.errors import EngineError, InputError, MegaMoEError, PeerError
from rank_processes import play_ranks

if not has_expert_parallel():
    pytest.skip("Transformers before 5.23", allow_module_level=True)

FAMILIES = ("deepseek-v3", "qwen3-moe", "glm4-moe", "minimax-m2")
BATCHES = {"uneven": (9, 4), "one rank has none": (0, 7), "nobody": (0, 0)}


def share_out(model: Any, ep_implementation: str, sharers: int) -> None:
    """Shard the experts over both ranks with Transformers' own code, as ``from_pretrained`` does (which needs
    accelerate for it). `sharers` ranks hold the same batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    experts = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    batch = init_device_mesh("cpu", (2 // sharers, sharers), mesh_dim_names=("fsdp", "tp"))["tp"]
    plan = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            plan |= {f"{name}.{one}": "grouped_gemm" for one, _ in module.named_parameters()}
            plan[name] = "ep_dispatch_experts"
    apply_expert_parallelism(model, experts, batch, plan, ep_implementation=ep_implementation)


def make(family: str, quantised: bool) -> Any:
    model = make_model(family).requires_grad_(False)
    if quantised:
        quantize_experts(model)
    return model


def call_of(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + tokens)
    x = torch.randn(tokens, 128, generator=generator).bfloat16()
    ids = torch.rand(tokens, 8, generator=generator).argsort(1)[:, :3]
    return x, ids, torch.rand(tokens, 3, generator=generator)


def caught(action: Callable[[], Any]) -> Any:
    start = time.monotonic()
    try:
        return action()
    except MegaMoEError as error:
        assert time.monotonic() - start < 20
        return error


def play_two(rank: int) -> dict[str, Any]:
    """All scenes; logits of both ranks' models against a whole model's."""
    import megamoe.integrations.transformers as hosted

    assert hosted.register(max_tokens=16, deadline=60)
    register_oracle()
    seen: dict[str, Any] = {}
    for family in FAMILIES:
        quantised = family == "deepseek-v3"
        teacher = Teacher()
        seen[f"{family} alone"] = teacher.logits(make(family, quantised), "oracle" if quantised else "eager")
        model = make(family, quantised)
        share_out(model, "megamoe", sharers=2)
        seen[family] = teacher.logits(model, "megamoe")
        assert next(experts_of(model)).gate_up_proj.to_local().shape[0] == 4
    # `model` and `teacher` are minimax-m2's now.
    seen["again"] = teacher.logits(model, "megamoe")
    with torch.no_grad():
        seen["compiled"] = torch.compile(model, backend="aot_eager", fullgraph=True)(prompt()).logits
        seen["not compiled"] = model(prompt()).logits
    seen["other"] = caught(lambda: teacher.logits(model, "grouped_mm"))
    seen["back"] = teacher.logits(model, "megamoe")
    for host in ("all_reduce", "all_to_all"):  # the host brings the tokens; off-rank ids, and top-1
        hosts = make("minimax-m2", False)
        share_out(hosts, host, sharers=2)
        seen[host] = teacher.logits(hosts, "megamoe")

    for tokens in (1, 2, 5):  # fewer tokens than ranks; slices of unequal size
        model = make("qwen3-moe", True)
        share_out(model, "megamoe", sharers=2)
        module = next(experts_of(model))
        module.config._experts_implementation = "megamoe"
        seen[f"shared {tokens}"] = module(*call_of(tokens, seed=0))
    model = make("qwen3-moe", True)
    share_out(model, "megamoe", sharers=1)
    module = next(experts_of(model))
    module.config._experts_implementation = "megamoe"
    for name, counts in BATCHES.items():
        seen[name] = module(*call_of(counts[rank], seed=rank))
    x, ids, weights = call_of(3, seed=rank)
    seen["bad id"] = caught(lambda: module(x, ids + (5 if rank == 1 else 0), weights))
    seen["too many"] = caught(lambda: module(*call_of((17, 3)[rank], seed=rank)))
    seen["usable"] = module(x, ids, weights)
    bf16 = make("qwen3-moe", False)
    share_out(bf16, "megamoe", sharers=1)
    module = next(experts_of(bf16))
    module.config._experts_implementation = "megamoe-fp8"
    seen["quantised when asked"] = module(x, ids, weights)
    hosted.release()
    return seen


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return play_ranks(play_two, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_shared_out_model(two: list[dict[str, Any]], family: str) -> None:
    """BF16 against the host's eager experts, deepseek-v3 in FP8 against the oracle on the same quantised weights."""
    for seen in two:
        assert reference.relative_error(seen[family], seen[f"{family} alone"]) < 1.2e-2
    assert torch.equal(two[0][family], two[1][family])


@pytest.mark.parametrize("implementation", ["all_reduce", "all_to_all"])
def test_the_hosts_implementations_in_front_of_ours(two: list[dict[str, Any]], implementation: str) -> None:
    for seen in two:
        assert reference.relative_error(seen[implementation], seen["minimax-m2 alone"]) < 1.2e-2


def test_a_compiled_model(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert torch.equal(seen["compiled"], seen["not compiled"])


def test_one_name_without_the_other_is_refused(two: list[dict[str, Any]]) -> None:
    for seen in two:
        assert type(seen["other"]) is EngineError
        assert "experts_implementation: got grouped_mm; allowed: 'megamoe' or" in str(seen["other"])
        assert torch.equal(seen["again"], seen["minimax-m2"])
        assert torch.equal(seen["back"], seen["minimax-m2"])


def whole(quantised: bool = True) -> Any:
    return next(experts_of(make("qwen3-moe", quantised)))


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_small_shared_batches(two: list[dict[str, Any]], tokens: int) -> None:
    want = oracle_experts(whole(), *call_of(tokens, seed=0))
    for seen in two:
        assert reference.relative_error(seen[f"shared {tokens}"], want) < 8e-3


@pytest.mark.parametrize("scene", BATCHES)
def test_batches_of_their_own(two: list[dict[str, Any]], scene: str) -> None:
    for rank, seen in enumerate(two):
        want = oracle_experts(whole(), *call_of(BATCHES[scene][rank], seed=rank))
        assert seen[scene].shape == want.shape
        assert reference.relative_error(seen[scene], want) < 8e-3


def test_refusals_reach_both_ranks(two: list[dict[str, Any]]) -> None:
    assert [type(seen["bad id"]) for seen in two] == [PeerError, InputError]
    assert [type(seen["too many"]) for seen in two] == [InputError, PeerError]
    assert "rank 0: x: got 17 tokens; allowed: at most max_tokens = 16" in str(two[1]["too many"])
    for rank, seen in enumerate(two):
        want = oracle_experts(whole(), *call_of(3, seed=rank))
        for scene in ("usable", "quantised when asked"):
            assert reference.relative_error(seen[scene], want) < 8e-3
