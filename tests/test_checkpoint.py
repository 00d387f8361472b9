"""Reading expert layers: every format and naming gives back the very bytes, and damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megamoe
from megamoe.errors import CheckpointError, FormatError, MegaMoEError, WeightError
from megamoe.formats import fp8_block, mxfp4, ue8m0
from megamoe.formats.progress import reading_bar
from megamoe.formats.testing import NAME_STYLES, checkpoint_tensors, random_weights, write_checkpoint

SPEC = megamoe.MoESpec(hidden=256, intermediate=128, experts=4, topk=2)
weights_of = lru_cache(random_weights)  # read only: many tests start from the same bytes
FORMATS = [("fp8_block", "float32"), ("fp8_block", "ue8m0"), ("mxfp4", "float32"), ("bf16", "float32")]


def assert_same(a: megamoe.ExpertWeights, b: megamoe.ExpertWeights, experts: slice = slice(None)) -> None:
    assert a.format == b.format
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype
            assert torch.equal(x.view(torch.uint8), y[experts].view(torch.uint8))


@pytest.mark.parametrize("style", list(NAME_STYLES))
@pytest.mark.parametrize(("weight_format", "scale_format"), FORMATS)
@pytest.mark.parametrize("shards", [1, 3])
def test_bytes_come_back(tmp_path: Path, style: str, weight_format: str, scale_format: str, shards: int) -> None:
    layers = {n: weights_of(SPEC, weight_format, seed=n, scale_format=scale_format) for n in (1, 2)}
    write_checkpoint(tmp_path, SPEC, layers, style, shards=shards)
    opened = megamoe.checkpoint(tmp_path, layer=2)
    assert opened.spec == SPEC
    assert opened.layer == 2
    assert opened.format == opened.stored_format == weight_format
    assert opened.moe_layers == (1, 2)
    assert opened.scale_format == (scale_format if weight_format == "fp8_block" else None)
    assert_same(opened.read(), layers[2])
    part = opened.read(1, 2)
    assert part.first_expert == 1
    part.check(SPEC, 2)
    assert_same(part, layers[2], slice(1, 3))
    assert opened.read(4, 0).local_experts == 0
    assert_same(megamoe.checkpoint(str(tmp_path), 1).read(), layers[1])


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], file: str = "model.safetensors") -> None:
    tensors = load_file(path / file)  # mapped: written elsewhere first, then moved over
    change(tensors)
    save_file(tensors, path / "edited")
    (path / "edited").replace(path / file)


def configure(path: Path, **entries: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | entries))


GATE1 = "model.layers.0.mlp.experts.1.gate_proj.weight"


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, SPEC, {0: weights_of(SPEC, "fp8_block")})
    return tmp_path


@pytest.fixture
def fp4(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, SPEC, {0: weights_of(SPEC, "mxfp4")})
    return tmp_path


@pytest.fixture
def bf16(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, SPEC, {0: weights_of(SPEC, "bf16")})
    return tmp_path


# ---- scale kinds


def test_bf16_scales_are_read_as_float32(fp8: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        for name in t:
            if name.endswith("_inv"):
                t[name] = t[name].bfloat16()

    before = megamoe.checkpoint(fp8, 0).read()
    edit(fp8, change)
    got = megamoe.checkpoint(fp8, 0).read()
    assert got.w13_scale is not None
    assert before.w13_scale is not None
    assert torch.equal(got.w13_scale, before.w13_scale.bfloat16().float())


def test_uint8_exponents_need_the_config_to_say_so(tmp_path: Path) -> None:
    weights = weights_of(SPEC, "fp8_block", scale_format="ue8m0")
    write_checkpoint(tmp_path, SPEC, {0: weights})

    def change(t: dict[str, torch.Tensor]) -> None:
        for name in t:
            if name.endswith("_inv"):
                t[name] = t[name].view(torch.uint8)

    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"scale_fmt") as raised:
        megamoe.checkpoint(tmp_path, 0).read()
    assert "U8" in raised.value.given
    configure(tmp_path, quantization_config={"scale_fmt": "ue8m0"})
    opened = megamoe.checkpoint(tmp_path, 0)
    assert opened.spec.input_scales == "ue8m0"
    assert_same(opened.read(), weights)


def test_mxfp4_dtypes(fp4: Path) -> None:
    want = megamoe.checkpoint(fp4, 0).read()

    def floats(t: dict[str, torch.Tensor]) -> None:
        for name in t:
            t[name] = ue8m0.decode(t[name]) if name.endswith("_inv") else t[name].view(torch.uint8)

    def torch_types(t: dict[str, torch.Tensor]) -> None:
        for name in t:
            if name.endswith("_inv"):
                t[name] = ue8m0.encode(t[name]).view(torch.uint8)
            else:
                t[name] = t[name].view(torch.float4_e2m1fn_x2)

    for change in (floats, torch_types):
        edit(fp4, change)
        assert_same(megamoe.checkpoint(fp4, 0).read(), want)


def test_float32_mxfp4_scale_must_be_a_power_of_two(fp4: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        scale = ue8m0.decode(t[f"{GATE1}_scale_inv"])
        scale[3, 2] = 0.3
        t[f"{GATE1}_scale_inv"] = scale

    edit(fp4, change)
    with pytest.raises(CheckpointError, match=r"experts\.1\.gate_proj.*\[3, 2\].*power of two"):
        megamoe.checkpoint(fp4, 0).read()


# ---- damage is named


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, -0.5])
def test_bad_scale_named_with_file_tensor_and_block(fp8: Path, value: float) -> None:
    edit(fp8, lambda t: t[f"{GATE1}_scale_inv"].__setitem__((0, 1), value))
    opened = megamoe.checkpoint(fp8, 0)
    with pytest.raises(CheckpointError) as raised:
        opened.read()
    text = str(raised.value)
    assert f"model.safetensors: {GATE1}_scale_inv" in text
    assert "block [0, 1]" in text
    assert str(float(value)) in text
    opened.read(0, 1)  # other experts are still readable


def test_nan_e8m0_scale_named(fp4: Path) -> None:
    edit(fp4, lambda t: t[f"{GATE1}_scale_inv"].view(torch.uint8).__setitem__((5, 3), 255))
    with pytest.raises(CheckpointError, match=r"experts\.1\.gate_proj\.weight_scale_inv.*nan in block \[5, 3\]"):
        megamoe.checkpoint(fp4, 0).read()


def test_bad_scale_in_a_fused_tensor_names_the_expert(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, {0: weights_of(SPEC, "fp8_block")}, "fused")
    edit(tmp_path, lambda t: t["model.layers.0.mlp.experts.down_proj_scale_inv"].__setitem__((2, 1, 0), torch.nan))
    opened = megamoe.checkpoint(tmp_path, 0)
    opened.read(0, 2)
    with pytest.raises(CheckpointError, match=r"down_proj_scale_inv\[2\].*block \[1, 0\]"):
        opened.read(2, 1)


@pytest.mark.parametrize("name", [GATE1, f"{GATE1}_scale_inv"])
def test_missing_tensor(fp8: Path, name: str) -> None:
    edit(fp8, lambda t: t.pop(name))
    kind = "scale" if name.endswith("inv") else "weight"
    with pytest.raises(CheckpointError, match=f"no gate {kind} of expert 1"):
        megamoe.checkpoint(fp8, 0)


def test_all_scales_missing(fp8: Path) -> None:
    edit(fp8, lambda t: [t.pop(name) for name in list(t) if name.endswith("_inv")])
    with pytest.raises(CheckpointError, match="fp8_block weights without scales"):
        megamoe.checkpoint(fp8, 0)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (GATE1, torch.zeros(128, 128).to(torch.float8_e4m3fn), r"shape \[128, 128\]; allowed: \[128, 256\]"),
        (GATE1, torch.zeros(128, 256, dtype=torch.bfloat16), r"dtype BF16; allowed: F8_E4M3"),
        (f"{GATE1}_scale_inv", torch.ones(1, 3), r"shape \[1, 3\]; allowed: \[1, 2\]"),
        (f"{GATE1}_scale_inv", torch.ones(1, 2, dtype=torch.float64), r"dtype F64; allowed: F8_E8M0 or F32"),
        (f"{GATE1}_scale_inv", torch.ones(1, 2).to(torch.float8_e8m0fnu), r"dtype F8_E8M0; allowed: scale values"),
    ],
)
def test_wrong_shape_or_dtype(fp8: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    edit(fp8, lambda t: t.__setitem__(name, tensor))
    with pytest.raises(CheckpointError, match=message) as raised:
        megamoe.checkpoint(fp8, 0).read()
    assert raised.value.argument == f"model.safetensors: {name}"


def test_float16_experts_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, {0: weights_of(SPEC, "bf16")})
    edit(tmp_path, lambda t: t.update({k: v.half() for k, v in t.items()}))
    with pytest.raises(CheckpointError, match=r"dtype F16.*BF16 \(bf16\)"):
        megamoe.checkpoint(tmp_path, 0)


def test_bf16_with_scales_refused(bf16: Path) -> None:
    scales = checkpoint_tensors(weights_of(SPEC, "fp8_block"), 0)
    edit(bf16, lambda t: t.update({k: v for k, v in scales.items() if k.endswith("_inv")}))
    with pytest.raises(CheckpointError, match="BF16 weights with scales"):
        megamoe.checkpoint(bf16, 0)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.1.gate_proj.bias",
        "model.layers.0.mlp.experts.gate_up_proj_bias",
        "model.layers.0.mlp.experts.1.gate_proj.input_scale",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
    ],
)
def test_tensors_that_are_not_understood_are_refused(fp8: Path, name: str) -> None:
    edit(fp8, lambda t: t.__setitem__(name, torch.zeros(2)))
    with pytest.raises(CheckpointError, match="of another kind") as raised:
        megamoe.checkpoint(fp8, 0)
    assert name in str(raised.value)


def test_transposed_fused_experts_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, {0: weights_of(SPEC, "bf16")}, "fused")
    down = "model.layers.0.mlp.experts.down_proj"
    edit(tmp_path, lambda t: t.__setitem__(down, t[down].transpose(1, 2).contiguous()))
    with pytest.raises(CheckpointError, match="transposed"):
        megamoe.checkpoint(tmp_path, 0).read()


def test_other_stacks_of_layers(fp8: Path) -> None:
    extra = checkpoint_tensors(weights_of(SPEC, "fp8_block", seed=9), 0)
    want = megamoe.checkpoint(fp8, 0).read()
    edit(fp8, lambda t: t.update({k.replace("model.", "mtp."): v for k, v in extra.items()}))
    assert_same(megamoe.checkpoint(fp8, 0).read(), want)
    edit(fp8, lambda t: t.update({k.replace("model.", "audio."): v for k, v in extra.items()}))
    with pytest.raises(CheckpointError, match=r"\['audio\.', 'model\.'\]"):
        megamoe.checkpoint(fp8, 0)


# ---- files


def test_only_the_files_of_the_own_experts_are_opened(tmp_path: Path) -> None:
    """Rank 1 of 2 reads with rank 0's files gone or damaged; one file per expert."""
    weights = weights_of(SPEC, "fp8_block")
    write_checkpoint(tmp_path, SPEC, {0: weights}, shards=4)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(b"not a safetensors file")
    assert_same(megamoe.checkpoint(tmp_path, 0).read(2, 2), weights, slice(2, 4))
    opened = megamoe.checkpoint(tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00004\.safetensors: got no such file"):
        opened.read(0, 1)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004\.safetensors"):
        opened.read(1, 1)


def test_truncated_file_named(fp8: Path) -> None:
    data = (fp8 / "model.safetensors").read_bytes()
    (fp8 / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        megamoe.checkpoint(fp8, 0)


def test_index_that_points_to_the_wrong_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, {0: weights_of(SPEC, "fp8_block")}, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][GATE1] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"model-00002-of-00002\.safetensors: {GATE1}: got not in that file"):
        megamoe.checkpoint(tmp_path, 0).read()


def test_several_files_without_an_index(tmp_path: Path) -> None:
    weights = weights_of(SPEC, "bf16")
    write_checkpoint(tmp_path, SPEC, {0: weights}, shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same(megamoe.checkpoint(tmp_path, 0).read(), weights)


@pytest.mark.parametrize("text", ["{", "[1]", '{"weight_map": 3}'])
def test_damaged_index(fp8: Path, text: str) -> None:
    (fp8 / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        megamoe.checkpoint(fp8, 0)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="downloaded first"):
        megamoe.checkpoint("org/model", 0)
    with pytest.raises(CheckpointError, match="without safetensors"):
        megamoe.checkpoint(tmp_path, 0)
    save_file({GATE1: torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json: got No such file"):
        megamoe.checkpoint(tmp_path, 0)


def test_can_travel_to_other_processes_and_is_short_to_print(fp8: Path) -> None:
    import pickle

    opened = megamoe.checkpoint(fp8, 0)
    assert_same(pickle.loads(pickle.dumps(opened)).read(), opened.read())
    assert len(repr(opened)) < 400


# ---- configuration


def test_layer_without_experts(fp8: Path) -> None:
    with pytest.raises(CheckpointError, match="layer: got 3; allowed: a layer with routed experts: 0"):
        megamoe.checkpoint(fp8, 3)


def test_moe_layers_leave_out_the_prediction_layer(tmp_path: Path) -> None:
    """DeepSeek-V3 stores its multi-token-prediction module as one more layer."""
    layers = {n: weights_of(SPEC, "fp8_block", seed=n) for n in (3, 4, 5, 6)}
    write_checkpoint(tmp_path, SPEC, layers, config={"num_hidden_layers": 6})
    assert megamoe.checkpoint(tmp_path, 6).moe_layers == (3, 4, 5)
    with pytest.raises(CheckpointError, match="allowed: a layer with routed experts: 3-6"):
        megamoe.checkpoint(tmp_path, 0)


def test_spec_from_each_family_of_configs(fp8: Path) -> None:
    """Qwen3-MoE's names, a nested text_config (DeepSeek-V4.1, multimodal models) and the clamp."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
    for config in (
        sizes | {"num_experts": 4, "intermediate_size": 999},
        sizes | {"num_local_experts": 4},
        {"hidden_size": 1, "text_config": sizes | {"n_routed_experts": 4}},
    ):
        (fp8 / "config.json").write_text(json.dumps(config))
        assert megamoe.checkpoint(fp8, 0).spec == SPEC
    (fp8 / "config.json").write_text(json.dumps(sizes | {"num_experts": 4, "swiglu_limit": 7.5}))
    assert megamoe.checkpoint(fp8, 0).spec.clamp == 7.5
    (fp8 / "config.json").write_text(json.dumps(sizes | {"num_experts": 4, "model_type": "deepseek_v4"}))
    assert megamoe.checkpoint(fp8, 0).spec.clamp == 10.0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"swiglu_alpha": 1.702}, "swiglu_alpha"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: got missing"),
        ({"hidden_size": "256"}, "hidden_size"),
        ({"n_routed_experts": 5}, "no gate weight of expert 4"),
        ({"n_routed_experts": 3}, "surplus"),
        ({"moe_intermediate_size": 256}, r"shape \[256, 128\]|shape \[128, 256\]"),
        ({"num_experts_per_tok": 9}, "topk"),
        ({"quantization_config": {"weight_block_size": [32, 32]}}, r"weight_block_size.*\[32, 32\]"),
        ({"quantization_config": {"weight_block_size": 128}}, r"weight_block_size: got 128; allowed: \[128, 128\]"),
        ({"quantization_config": {"activation_scheme": "static"}}, "activation_scheme"),
    ],
)
def test_configs_refused(fp8: Path, entries: dict[str, object], message: str) -> None:
    configure(fp8, **entries)
    with pytest.raises(MegaMoEError, match=message):
        megamoe.checkpoint(fp8, 0).read()


def test_sizes_that_fp8_blocks_cannot_take(tmp_path: Path) -> None:
    spec = megamoe.MoESpec(hidden=256, intermediate=96, experts=2, topk=1)
    write_checkpoint(tmp_path, spec, {0: weights_of(spec, "bf16")})
    assert megamoe.checkpoint(tmp_path, 0).read().w2.shape == (2, 256, 96)
    with pytest.raises(FormatError, match=r"intermediate: got 96.*bf16"):
        megamoe.checkpoint(tmp_path, 0, convert_to="fp8_block")


@pytest.mark.parametrize("bad", [(-1, 1), (0, 5), (3, 2), (5, 0), (0, -1)])
def test_range_of_experts(fp8: Path, bad: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match="first_expert, count"):
        megamoe.checkpoint(fp8, 0).read(*bad)


# ---- conversions while reading


@pytest.mark.parametrize("style", ["hf", "fused"])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_bf16_is_quantised_only_when_asked(tmp_path: Path, style: str, scale_format: str) -> None:
    weights = weights_of(SPEC, "bf16")
    write_checkpoint(tmp_path, SPEC, {0: weights}, style)
    opened = megamoe.checkpoint(tmp_path, 0, convert_to="fp8_block", scale_format=scale_format)
    assert (opened.stored_format, opened.format, opened.scale_format) == ("bf16", "fp8_block", scale_format)
    got = opened.read(1, 3)
    for name in ("w13", "w2"):
        q, s = fp8_block.quantize_weights(getattr(weights, name)[1:], scale_format)
        assert torch.equal(getattr(got, name).view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(getattr(got, f"{name}_scale").float(), s.float())


@pytest.mark.parametrize("style", ["deepseek_v4", "fused"])
@pytest.mark.parametrize("target", ["fp8_block", "bf16"])
def test_mxfp4_is_converted_exactly(tmp_path: Path, style: str, target: str) -> None:
    weights = weights_of(SPEC, "mxfp4")
    write_checkpoint(tmp_path, SPEC, {0: weights}, style)
    got = megamoe.checkpoint(tmp_path, 0, convert_to=target).read()
    for name in ("w13", "w2"):
        want = mxfp4.dequantize(getattr(weights, name), getattr(weights, f"{name}_scale"))
        value = getattr(got, name)
        if target == "fp8_block":
            value = fp8_block.dequantize_weights(value, getattr(got, f"{name}_scale"))
        assert torch.equal(value.float(), want)


def test_inexact_mxfp4_is_refused_by_tensor_row_and_group(fp4: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        t[GATE1][7, 64:80] = 0x11
        t[f"{GATE1}_scale_inv"].view(torch.uint8)[7, 4] = 60

    edit(fp4, change)
    opened = megamoe.checkpoint(fp4, 0, convert_to="fp8_block")
    with pytest.raises(FormatError, match=r"experts\.1\.gate_proj.*1 groups.*\[row, group\] = \[7, 4\]"):
        opened.read()
    opened.read(2, 2)


def test_nan_weights_are_refused_when_quantised(bf16: Path) -> None:
    edit(bf16, lambda t: t[GATE1].__setitem__((100, 200), torch.nan))
    with pytest.raises(WeightError, match=r"experts\.1\.gate_proj.*block \[0, 1\]"):
        megamoe.checkpoint(bf16, 0, convert_to="fp8_block").read()


def test_conversions_that_do_not_exist(fp8: Path) -> None:
    with pytest.raises(FormatError, match="convert_to: got mxfp4; allowed: fp8_block or bf16"):
        megamoe.checkpoint(fp8, 0, convert_to="mxfp4")
    got = megamoe.checkpoint(fp8, 0, convert_to="bf16").read()
    stored = megamoe.checkpoint(fp8, 0).read()
    assert stored.w2_scale is not None
    assert torch.equal(got.w2, fp8_block.dequantize_weights(stored.w2, stored.w2_scale, torch.bfloat16))


# ---- progress


def test_progress_reaches_the_total(fp8: Path) -> None:
    calls: list[tuple[int, int]] = []
    weights = megamoe.checkpoint(fp8, 0).read(0, 3, progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (weights.nbytes, weights.nbytes)
    assert len(calls) == 3


def test_bar_shows_bytes(fp8: Path) -> None:
    import io

    from rich.console import Console

    out = io.StringIO()
    with reading_bar("Layer 0", Console(file=out, force_terminal=True, width=120)) as progress:
        megamoe.checkpoint(fp8, 0).read(progress=progress)
    assert "Layer 0" in out.getvalue()
    assert "KiB" in out.getvalue()
