"""Transformers' models through the registered experts: logits, refusals, weights in place, compilation, life cycle."""

from __future__ import annotations

import copy
import gc
import re
import runpy
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hosted_models import (
    FAMILIES,
    Teacher,
    experts_of,
    has_expert_parallel,
    logits,
    make_model,
    oracle_experts,
    prompt,
    quantize_experts,
    register_oracle,
)
from megamoe import MegaMoE, reference
from megamoe.errors import FormatError, InputError, MegaMoEError, SpecError, WeightError

pytest.importorskip("transformers")
import megamoe.integrations.transformers as hosted
from megamoe.integrations.transformers import host, layers

EXAMPLE = Path(__file__).parent.parent / "examples" / "transformers_experts.py"


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    assert hosted.register()
    register_oracle()
    yield
    hosted.release()


def check_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Logits of a whole model: two layers of experts, each within 8e-3."""
    assert reference.relative_error(got, want) < 1.2e-2


def experts_module(family: str = "qwen3-moe", **changes: Any) -> Any:
    """One experts module of a model, with attributes changed."""
    module = next(experts_of(make_model(family)))
    module.config._experts_implementation = "megamoe"
    for name, value in changes.items():
        setattr(module, name, value)
    return module.requires_grad_(False)


def call_of(tokens: int = 10, slots: int = 3, experts: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 128, generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots]
    return x, ids, torch.rand(tokens, slots, generator=generator).bfloat16()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_agree_with_the_hosts_eager_experts(family: str) -> None:
    model, teacher = make_model(family), Teacher()
    want = teacher.logits(model, "eager")
    check_close(teacher.logits(model, "megamoe"), want)
    for experts in experts_of(model):  # the experts matter to the logits
        experts.down_proj.data.zero_()
    assert reference.relative_error(logits(model, "eager"), want) > 0.3


@pytest.mark.parametrize(
    ("family", "expert_dtype", "scale_format"),
    [
        ("deepseek-v3", "fp8", "float32"),
        ("qwen3-moe", "fp8", "float32"),
        ("glm4-moe", "fp8", "float32"),
        ("minimax-m2", "fp8", "float32"),
        ("deepseek-v3", "fp8", "ue8m0"),
        ("deepseek-v4", "fp8", "ue8m0"),
        ("deepseek-v4", "fp4", "ue8m0"),
    ],
)
def test_quantised_logits_agree_with_the_oracle(family: str, expert_dtype: str, scale_format: str) -> None:
    model, teacher = make_model(family), Teacher()
    quantize_experts(model, expert_dtype, scale_format)
    want = teacher.logits(model, "oracle")
    check_close(teacher.logits(model, "megamoe"), want)
    check_close(teacher.logits(model, "megamoe-fp8"), want)  # nothing left to quantise


def test_bf16_experts_are_quantised_when_asked() -> None:
    model, quantised = make_model("qwen3-moe"), make_model("qwen3-moe")
    quantize_experts(quantised)
    teacher = Teacher()
    want = teacher.logits(quantised, "oracle")
    check_close(teacher.logits(model, "megamoe-fp8"), want)
    assert reference.relative_error(teacher.logits(model, "megamoe"), want) > 2e-2
    assert all(module.gate_up_proj.dtype == torch.bfloat16 for module in experts_of(model))


@pytest.mark.parametrize("implementation", ["megamoe", "megamoe-fp8"])
def test_from_pretrained(tmp_path: Path, implementation: str) -> None:
    import transformers

    make_model("minimax-m2").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=implementation).eval()
    assert model.dtype == torch.bfloat16
    assert model.config._experts_implementation == implementation
    other, teacher = make_model("minimax-m2"), Teacher()
    if implementation == "megamoe-fp8":
        quantize_experts(other)
    want = teacher.logits(other, "oracle")
    check_close(teacher.logits(model), want)
    with torch.inference_mode():
        assert model.generate(prompt()[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_skipped_routes() -> None:
    """-1, and under expert parallelism the number of experts, which means "on another rank"; their weights are never
    read."""
    module = experts_module()
    x, ids, weights = call_of()
    ids[0] = -1
    ids[1, 1] = -1
    weights[ids == -1] = torch.nan
    assert reference.relative_error(module(x, ids, weights), oracle_experts(module, x, ids, weights)) < 8e-3
    assert not module(x, ids, weights)[0].any()
    ids[1, 0], ids[2] = 8, 8
    with pytest.raises(InputError, match=r"expert_ids\[1, 0\]: got 8"):
        module(x, ids, weights)
    setattr(module, "_is_expert_parallel" if hasattr(module, "_is_expert_parallel") else "_is_hooked", True)
    weights[ids == 8] = torch.nan
    want = oracle_experts(module, x, ids.masked_fill(ids == 8, -1), weights)
    assert reference.relative_error(module(x, ids, weights), want) < 8e-3
    assert not module(x, ids, weights)[[0, 2]].any()
    ids[3, 2] = 9
    with pytest.raises(InputError, match=r"expert_ids\[3, 2\]: got 9"):
        module(x, ids, weights)


def test_attributes_that_change_are_checked_again() -> None:
    module = experts_module("deepseek-v4")
    call = call_of()
    clamped = module(*call)
    module.limit = 0.5
    tighter = module(*call)
    assert reference.relative_error(tighter, oracle_experts(module, *call)) < 8e-3
    assert reference.relative_error(tighter, clamped) > 1e-2
    module.act_fn = nn.GELU()
    with pytest.raises(SpecError, match="another activation"):
        module(*call)


def test_no_tokens_and_int32_ids() -> None:
    module = experts_module()
    assert module(*call_of(0)).shape == (0, 128)
    x, ids, weights = call_of(6)
    assert torch.equal(module(x, ids.int(), weights.float()), module(x, ids, weights))


class _Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(1.01 * x)


def _other_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    up, gate = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"act_fn": nn.GELU()}, "_apply_gate: got another activation"),
        ({"act_fn": _Odd()}, "_apply_gate: got another activation"),
        ({"limit": 2.0}, r"_apply_gate: got another activation; allowed: .* clamped at 2"),
        ({"act_fn": None}, "_apply_gate: got 'NoneType'"),
        ({"is_transposed": True}, r"is_transposed: got True; allowed: False .*\[E, 2I, H\]"),
        ({"is_concatenated": False}, "is_concatenated: got False"),
        ({"has_bias": True}, "has_bias: got True"),
        ({"has_gate": False}, "has_gate: got False"),
        ({"has_post_expert_norm": True}, "has_post_expert_norm: got True"),
        ({"swiglu_alpha": 1.702}, "swiglu_alpha: got 1.702"),
        ({"gate_softcap": 30.0}, "gate_softcap: got 30.0"),
    ],
)
def test_experts_that_the_engines_do_not_compute(changes: dict[str, Any], message: str) -> None:
    module = experts_module(**changes)
    with pytest.raises(SpecError, match=message + ".*Choose another experts_implementation"):
        module(*call_of())


def test_a_class_with_an_activation_of_its_own() -> None:
    module = experts_module()
    module.__class__ = type("Swapped", (type(module),), {"_apply_gate": _other_gate})
    with pytest.raises(SpecError, match=r"Swapped\._apply_gate: got another activation"):
        module(*call_of())


def test_a_whole_model_that_is_refused() -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GptOssForCausalLM(config).bfloat16().eval()
    model.set_experts_implementation("megamoe")
    with pytest.raises(SpecError, match=r"GptOssExperts\.has_bias"), torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (lambda m: m.float(), WeightError, r"gate_up_proj: got torch.float32.*dtype=torch.bfloat16"),
        (lambda m: setattr(m, "block_size", (64, 64)), SpecError, r"block_size: got \(64, 64\)"),
        (lambda m: setattr(m, "block_size", None), SpecError, "block_size: got None"),
        (lambda m: setattr(m, "activation_scheme", "static"), SpecError, "activation_scheme: got static"),
        (lambda m: m.register_parameter("gate_up_proj", None), SpecError, "gate_up_proj: got no tensor"),
    ],
)
def test_weights_that_no_format_holds(prepare: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    model = make_model("qwen3-moe")
    if "float32" not in message:
        quantize_experts(model)
    model.set_experts_implementation("megamoe")
    module = next(experts_of(model))
    prepare(module)
    with pytest.raises(error, match=message), torch.no_grad():
        module(*call_of())


def test_sizes_that_fp8_cannot_hold() -> None:
    module = experts_module()
    module.gate_up_proj = nn.Parameter(torch.randn(8, 192, 128).bfloat16(), requires_grad=False)
    module.down_proj = nn.Parameter(torch.randn(8, 128, 96).bfloat16(), requires_grad=False)
    module.config._experts_implementation = "megamoe-fp8"
    with pytest.raises(FormatError, match="multiple"):
        module(*call_of())
    module.config._experts_implementation = "megamoe"
    assert reference.relative_error(module(*call_of()), oracle_experts(module, *call_of())) < 8e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_inputs_of_other_dtypes(dtype: torch.dtype) -> None:
    x, ids, weights = call_of()
    with pytest.raises(InputError, match="x: got dtype float"):
        experts_module()(x.to(dtype), ids, weights)


def test_gradients_are_refused_and_the_model_stays_usable() -> None:
    model = make_model("glm4-moe")
    model.set_experts_implementation("megamoe")
    with pytest.raises(InputError, match=r"inference only.*no_grad"):
        model(prompt())
    x, ids, weights = call_of()
    with pytest.raises(InputError, match="inference only"):  # only the experts would be trained
        next(experts_of(model))(x, ids, weights)
    assert logits(model, "megamoe").isfinite().all()


def overwrite(module: Any, how: str) -> None:
    """Put the other seed's weights into a module's parameters."""
    other = next(experts_of(make_model("minimax-m2", seed=5)))
    if module.gate_up_proj.dtype != torch.bfloat16:
        holder = make_model("minimax-m2", seed=5)
        quantize_experts(holder)
        other = next(experts_of(holder))
    if how == "load_state_dict":
        module.load_state_dict(other.state_dict())
        return
    for name, parameter in other.named_parameters():
        mine = getattr(module, name)
        if how == "data":
            mine.data.copy_(parameter.data)
        elif how == "copy":
            with torch.no_grad():
                mine.copy_(parameter)
        else:
            setattr(module, name, nn.Parameter(parameter.data.clone(), requires_grad=False))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "copy", "data", "replace"])
def test_overwritten_weights_are_used(how: str, quantised: bool) -> None:
    model = make_model("minimax-m2")
    if quantised:
        quantize_experts(model)
    model.set_experts_implementation("megamoe")
    module = next(experts_of(model)).requires_grad_(False)
    call = call_of()
    before = module(*call)
    pointer = module.gate_up_proj.data_ptr()
    overwrite(module, how)
    after = module(*call)
    assert reference.relative_error(after, before) > 0.5
    assert reference.relative_error(after, oracle_experts(module, *call)) < 8e-3
    assert (module.gate_up_proj.data_ptr() == pointer) is (how != "replace")


@pytest.mark.parametrize("how", ["load_state_dict", "copy", "replace"])
def test_overwritten_weights_are_quantised_again(how: str) -> None:
    module = experts_module("minimax-m2")
    module.config._experts_implementation = "megamoe-fp8"
    call = call_of()
    before = module(*call)
    overwrite(module, how)
    after = module(*call)
    assert reference.relative_error(after, before) > 0.5
    fresh = copy.deepcopy(module)
    assert torch.equal(after, fresh(*call))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[MegaMoE]]:
    """The layers made and loads done during a test."""
    seen: list[weakref.ref[MegaMoE]] = []
    original = MegaMoE.load

    def load(self: MegaMoE, source: Any) -> None:
        seen.append(weakref.ref(self))
        original(self, source)

    monkeypatch.setattr(MegaMoE, "load", load)
    return seen


def test_weights_are_taken_once(made: list[weakref.ref[MegaMoE]]) -> None:
    module = experts_module()
    for tokens in (3, 64, 1, 40):
        module(*call_of(tokens))
    assert len(made) == 1
    module(*call_of(65))  # more than the layer has room for
    module(*call_of(128))
    assert len(made) == 2
    assert made[0]() is None or made[0]().closed  # type: ignore[union-attr]
    module(*call_of(5, slots=1))  # another top-k, as an all-to-all in front of the experts makes it
    assert len(made) == 3


@pytest.mark.parametrize("engine", ["cpu", "one with a copy"])
def test_overwritten_weights_are_loaded_again_where_an_engine_has_a_copy(
    engine: str, made: list[weakref.ref[MegaMoE]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where it reads the parameters: loading is collective, and other ranks may not have written to theirs."""
    monkeypatch.setattr(MegaMoE, "engine", engine)
    module = experts_module()
    module(*call_of())
    with torch.no_grad():
        module.down_proj.mul_(2.0)
    after = module(*call_of())
    assert torch.equal(module(*call_of()), after)
    assert len(made) == (1 if engine == "cpu" else 2)
    assert reference.relative_error(after, oracle_experts(module, *call_of())) < 8e-3


def test_no_copy_of_the_weights_is_made() -> None:
    module = experts_module()
    module(*call_of())
    book = layers._book_of(module.gate_up_proj)
    assert book is not None
    (entry,) = book.values()
    assert entry.weights.w13.data_ptr() == module.gate_up_proj.data_ptr()
    assert entry.weights.w2.data_ptr() == module.down_proj.data_ptr()


def test_layers_go_with_their_module_or_when_released(made: list[weakref.ref[MegaMoE]]) -> None:
    model = make_model("qwen3-moe")
    first = logits(model, "megamoe")
    assert len(made) == 2
    hosted.release(model)
    assert all(ref() is None for ref in made)
    assert torch.equal(logits(model, "megamoe"), first)
    hosted.release()
    assert all(ref() is None for ref in made)
    assert torch.equal(logits(model, "megamoe"), first)
    assert len(made) == 6
    del model
    gc.collect()
    assert all(ref() is None for ref in made)


def test_models_are_copied_and_saved_as_before(tmp_path: Path) -> None:
    module = experts_module()
    call = call_of()
    before, names = module(*call), set(module.__dict__)
    other = copy.deepcopy(module)
    other.down_proj.data.mul_(2.0)
    assert torch.equal(other(*call), 2 * before)
    assert torch.equal(module(*call), before)
    assert set(module.__dict__) == names
    torch.save(module.state_dict(), tmp_path / "experts.pt")
    assert set(torch.load(tmp_path / "experts.pt")) == {"gate_up_proj", "down_proj"}


def test_compiled_models() -> None:
    model = make_model("qwen3-moe")
    want = logits(model, "megamoe")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(prompt()).logits, want)
        experts = next(experts_of(model))
        experts.down_proj.mul_(0.0)
        changed = compiled(prompt()).logits
    assert torch.equal(changed, logits(model, "megamoe"))
    assert not torch.equal(changed, want)


def test_one_graph_serves_many_modules() -> None:
    """Compiled layer by layer, the same code runs for every layer and must find each one's own weights."""
    torch._dynamo.reset()
    modules = [experts_module() for _ in range(10)]
    for number, module in enumerate(modules):
        module.down_proj.data.mul_(number + 1)
        module.compile(fullgraph=True, backend="aot_eager", dynamic=True)  # an error where it would compile anew
    x, ids, weights = call_of(12)
    first = modules[0](x, ids, weights).float()
    for number, module in enumerate(modules):
        assert reference.relative_error(module(x, ids, weights), first * (number + 1)) < 1e-2
    for tokens in (3, 7, 100):
        got = modules[4](*call_of(tokens))
        assert reference.relative_error(got, oracle_experts(modules[4], *call_of(tokens))) < 8e-3


def test_compiled_code_refuses_what_eager_code_refuses() -> None:
    torch._dynamo.reset()
    for changes, message in (({"act_fn": nn.GELU()}, "another activation"), ({"has_bias": True}, "has_bias: got True")):
        module = experts_module(**changes)
        module.compile(fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=message):  # the compiler wraps errors
            module(*call_of())
    trained = experts_module().requires_grad_(True)
    trained.compile(fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="no backward pass"):
        trained(*call_of())


def test_the_host_is_checked_by_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import moe

    assert host.examine()["experts_implementation"] is None
    monkeypatch.setattr(hosted, "_warned", set())
    monkeypatch.setattr(
        moe,
        "grouped_mm_experts_forward",
        lambda self, hidden_states, routing: None,  # another signature
    )
    with pytest.warns(RuntimeWarning, match=r"leaves experts_implementation .*, routing\), not \(self, hidden_states"):
        assert not hosted.register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hosted.register()  # said once


@pytest.mark.parametrize(
    ("version", "shut"), [("5.16.1", True), ("4.57.6", True), ("5.17.0.dev0", False), ("6.0", False)]
)
def test_old_hosts_are_left_alone(version: str, shut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "_warned", {"ep_implementation"})
    monkeypatch.setattr(host, "installed_version", lambda: version)
    if shut:
        with pytest.warns(
            RuntimeWarning, match=rf"leaves experts_implementation of transformers {version} alone: it is"
        ):
            assert not hosted.register()
    else:
        assert hosted.register()


@pytest.mark.skipif(not has_expert_parallel(), reason="Transformers before 5.23")
def test_expert_parallelism_is_checked_by_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.distributed import expert_parallel

    assert host.examine()["ep_implementation"] is None
    monkeypatch.setattr(hosted, "_warned", set())
    monkeypatch.setattr(expert_parallel.EPImplementation, "__call__", lambda self, x: x)
    with pytest.warns(RuntimeWarning, match="leaves ep_implementation"):
        assert hosted.register()  # the experts' door is open all the same


@pytest.mark.parametrize(("implementation", "bound"), [("megamoe", 1.2e-2), ("megamoe-fp8", 5e-2)])
def test_the_example(
    implementation: str, bound: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(EXAMPLE), "--device", "cpu", "--experts", implementation, "--new-tokens", "2"]
    monkeypatch.setattr(sys, "argv", words)
    seen = runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert f"rank 0 of 1: transformers {host.installed_version()}, {implementation}: " in capsys.readouterr().out
    assert 0 < seen["difference"] < bound
    for experts in experts_of(seen["other"]):  # the experts matter to the logits
        experts.down_proj.data.zero_()
    with torch.inference_mode():
        assert reference.relative_error(seen["other"](seen["ids"]).logits, seen["want"]) > 0.2


def test_the_example_on_two_ranks() -> None:
    pytest.importorskip("accelerate", reason="Transformers needs accelerate to shard a model while it is loaded")
    runner = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, "-m", *runner, str(EXAMPLE), "--device", "cpu", "--new-tokens", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    differences = [float(one) for one in re.findall(r"differ by (\S+) from", done.stdout)]
    assert len(differences) == 2
    assert max(differences) < 3e-2  # a token whose scores nearly tie may choose another expert


def test_the_package_asks_for_the_oldest_version() -> None:
    project = (EXAMPLE.parent.parent / "pyproject.toml").read_text()
    assert f'transformers = ["transformers>={host.OLDEST}"]' in project


def test_register_checks_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"max_tokens": 0}, {"deadline": "soon"}):
        with pytest.raises(InputError):
            hosted.register(**wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(host, "installed_version", lambda: None)
    with pytest.raises(MegaMoEError, match="pip install 'megamoe"):
        hosted.register()
