"""DeepGEMM's names and Transformers' experts on the GPU engine, one rank, against the oracle."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megamoe.integrations.deep_gemm as deep_gemm
from megamoe import ExpertWeights, MoESpec, reference
from megamoe.errors import EngineError
from megamoe.formats import fp8_block
from moe_cases import make_call, make_weights

DEVICE = "cuda"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SPEC = MoESpec(hidden=512, intermediate=256, experts=8, topk=3, clamp=1.5)


def moved(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].to(DEVICE), pair[1].to(DEVICE)


def transformed(weights: ExpertWeights) -> tuple[Any, Any]:
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    l1, l2 = moved((weights.w13, weights.w13_scale)), moved((weights.w2, weights.w2_scale))
    return deep_gemm.transform_weights_for_mega_moe_sm90(l1, l2)


def stage(buffer: deep_gemm.SymmBuffer, call: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, ids, weights = (t.to(DEVICE) for t in call)
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    deep_gemm.mega_moe_pre_dispatch_sm90(x, ids.int(), weights, *views, len(x))
    return torch.full_like(x, torch.nan)


@pytest.fixture
def buffer() -> Any:
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, 8, 256, 3, 512, 256, use_fp8_dispatch=True)
    assert buffer.x.device.type == DEVICE
    yield buffer
    buffer.destroy()


@pytest.mark.parametrize("tokens", [0, 1, 7, 200])
def test_deep_gemm_agrees_with_the_oracle(buffer: deep_gemm.SymmBuffer, tokens: int) -> None:
    weights = make_weights(SPEC, "fp8_block")
    l1, l2 = transformed(weights)
    call = make_call(SPEC, tokens)
    if tokens:
        call[1][0, 1] = -1
    y = stage(buffer, call)
    q, s = fp8_block.quantize_activations(call[0])
    assert torch.equal(buffer.x[:tokens].view(torch.uint8).cpu(), q.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:tokens].cpu(), s)
    assert (buffer.topk_idx[tokens:] == -1).all()
    stats = torch.ones(SPEC.experts, dtype=torch.int32, device=DEVICE)
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer, stats, activation_clamp=SPEC.clamp)
    assert reference.relative_error(y.cpu(), reference.forward(SPEC, weights, *call)) < 8e-3
    assert stats.cpu().tolist() == [1 + int((call[1] == e).sum()) for e in range(SPEC.experts)]


def test_deep_gemm_sees_overwritten_weights(buffer: deep_gemm.SymmBuffer) -> None:
    l1, l2 = transformed(make_weights(SPEC, "fp8_block", seed=1))
    call = make_call(SPEC, 9)
    deep_gemm.fp8_mega_moe(stage(buffer, call), l1, l2, buffer, activation_clamp=SPEC.clamp)
    new = make_weights(SPEC, "fp8_block")
    for old_pair, new_pair in zip((l1, l2), transformed(new), strict=True):
        for old, other in zip(old_pair, new_pair, strict=True):
            old.view(torch.uint8).copy_(other.view(torch.uint8))
    y = stage(buffer, call)
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer, activation_clamp=SPEC.clamp)
    assert reference.relative_error(y.cpu(), reference.forward(SPEC, new, *call)) < 8e-3


@pytest.fixture(scope="module")
def hosted() -> Any:
    pytest.importorskip("transformers")
    import megamoe.integrations.transformers as hosted

    assert hosted.register()
    yield hosted
    hosted.release()


LOGITS = {1: 1.2e-2, 2: 3e-2}
"""Bound on logits by the number of layers with experts. A layer is held to its own bound on equal inputs. Behind
another one, inputs that differ by d fall to another e4m3 value, a step of about 6 % away, in about d / 6 % of all
cases, so that outputs differ by about sqrt(6 % d): 1.6 % for the 4.4e-3 of one layer."""


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-moe", "glm4-moe", "minimax-m2"])
def test_logits_of_fp8_experts(hosted: Any, family: str, scale_format: str) -> None:
    from hosted_models import Teacher, experts_of, make_model, quantize_experts, register_oracle

    register_oracle()
    model = make_model(family, hidden=512)
    quantize_experts(model, "fp8", scale_format)
    model.to(DEVICE)  # for the oracle too: the rest of the model rounds otherwise on a CPU, by 3 %
    teacher = Teacher()
    layers = list(experts_of(model))
    seen: list[tuple[Any, tuple[torch.Tensor, ...], torch.Tensor]] = []
    hooks = [layer.register_forward_hook(lambda *call: seen.append(call)) for layer in layers]
    want = teacher.logits(model, "oracle")
    for hook in hooks:
        hook.remove()
    assert reference.relative_error(teacher.logits(model, "megamoe"), want) < LOGITS[len(layers)]
    assert len(seen) == len(layers)
    for layer, inputs, output in seen:
        with torch.no_grad():
            assert reference.relative_error(layer(*inputs), output) < reference.LIMIT


def experts(family: str = "qwen3-moe", *, quantised: bool) -> Any:
    from hosted_models import experts_of, make_model, quantize_experts

    model = make_model(family, hidden=512)
    if quantised:
        quantize_experts(model)
    return next(experts_of(model)).requires_grad_(False)


@pytest.mark.parametrize("tokens", [0, 1, 5, 64, 300])
def test_experts_quantised_when_asked(hosted: Any, tokens: int) -> None:
    from hosted_models import oracle_experts

    call = make_call(MoESpec(hidden=512, intermediate=128, experts=8, topk=3), tokens)
    module = experts(quantised=False).to(DEVICE)
    module.config._experts_implementation = "megamoe-fp8"
    got = module(*(t.to(DEVICE) for t in call)).cpu()
    assert reference.relative_error(got, oracle_experts(experts(quantised=True), *call)) < 8e-3
    with torch.no_grad():
        module.down_proj.mul_(0.0)
    assert not module(*(t.to(DEVICE) for t in call)).any()


def test_bf16_experts_on_a_gpu_are_refused(hosted: Any) -> None:
    module = experts(quantised=False).to(DEVICE)
    module.config._experts_implementation = "megamoe"
    call = make_call(MoESpec(hidden=512, intermediate=128, experts=8, topk=3), 4)
    with pytest.raises(EngineError, match=r"bf16 on cuda.*megamoe-fp8"):
        module(*(t.to(DEVICE) for t in call))


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v4"])  # the second one clamps
def test_skipped_routes_and_compiled_experts(hosted: Any, family: str) -> None:
    from hosted_models import oracle_experts

    call = make_call(MoESpec(hidden=512, intermediate=128, experts=8, topk=3), 21)
    x, ids, weights = call
    ids[0] = -1
    ids[1, 1] = -1
    weights[ids == -1] = torch.nan
    want = oracle_experts(experts(family, quantised=True), *call)
    module = experts(family, quantised=True).to(DEVICE)
    module.config._experts_implementation = "megamoe"
    got = module(*(t.to(DEVICE) for t in call))
    assert reference.relative_error(got.cpu(), want) < 8e-3
    assert not got[0].any()
    torch._dynamo.reset()
    module.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(module(*(t.to(DEVICE) for t in call)), got)
    ids[2] = 8  # with the experts shared out over ranks: an expert on another one
    module = experts(family, quantised=True).to(DEVICE)
    module.config._experts_implementation = "megamoe"
    module._is_expert_parallel = True
    want = oracle_experts(experts(family, quantised=True), x, ids.masked_fill(ids == 8, -1), weights)
    got = module(*(t.to(DEVICE) for t in call))
    assert reference.relative_error(got.cpu(), want) < 8e-3
    assert not got[2].any()


def test_from_pretrained(hosted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = EXAMPLES / "transformers_experts.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--new-tokens", "3"])
    seen = runpy.run_path(str(example), run_name="__main__")
    assert "megamoe-fp8: logits differ by" in capsys.readouterr().out
    assert 0 < seen["difference"] < 5e-2


def run_script(*runner: str) -> list[float]:
    """Relative errors that the ranks of the script with DeepGEMM's names say."""
    words = [sys.executable, *runner, "-m", "megamoe.integrations.deep_gemm", str(EXAMPLES / "deep_gemm_moe.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [float(one) for one in re.findall(r"relative error (\S+)", done.stdout)]


def test_a_script_with_only_deep_gemms_names() -> None:
    (error,) = run_script()
    assert error < 8e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_same_script_on_two_gpus() -> None:
    errors = run_script("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(errors) == 2
    assert max(errors) < 8e-3
