"""The tiny checkpoints have the form of the real ones, and the activations are what the model really feeds on."""

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megamoe import demo_activations
from megamoe.demo_activations import byte_tokens, layer_input
from megamoe.demo_checkpoint import FAMILIES, make_checkpoint
from megamoe.errors import CheckpointError, EngineError, InputError
from megamoe.hf import Router, read_tensors

pytest.importorskip("transformers")

LAYER = 1
TOKENS = 96


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(family, root / family) for family in FAMILIES}


def test_deepseek_checkpoint_is_stored_as_deepseek_stores_it(checkpoints):
    directory = checkpoints["deepseek-v3"]
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = read_tensors(directory, lambda _: True)
    assert tensors.keys() == weight_map.keys()
    experts = config["n_routed_experts"]
    for expert in range(experts):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.{LAYER}.mlp.experts.{expert}.{projection}.weight"
            assert tensors[name].dtype == torch.float8_e4m3fn
            assert tensors[f"{name}_scale_inv"].dtype == torch.float32
            assert tensors[f"{name}_scale_inv"].shape == (2, 2)
    # A ragged weight has a scale for its last, partial block of rows.
    ragged = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert tensors[ragged].shape[0] % 128
    assert tensors[f"{ragged}_scale_inv"].shape[0] == tensors[ragged].shape[0] // 128 + 1
    for name in ("model.embed_tokens.weight", f"model.layers.{LAYER}.mlp.gate.weight", "lm_head.weight"):
        assert tensors[name].dtype == torch.bfloat16
    shards = {weight_map[name] for name in tensors if f"layers.{LAYER}.mlp.experts" in name}
    assert len(shards) > 1, "a layer's experts should lie in several files"


def test_qwen_checkpoint_is_bf16_with_one_tensor_per_projection(checkpoints):
    directory = checkpoints["qwen3-moe"]
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    assert "quantization_config" not in config
    tensors = read_tensors(directory, lambda name: ".experts." in name)
    assert len(tensors) == config["num_hidden_layers"] * config["num_experts"] * 3
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_same_seed_same_bytes(checkpoints, tmp_path):
    again = make_checkpoint("deepseek-v3", tmp_path / "again")
    first = checkpoints["deepseek-v3"]
    files = sorted(f.name for f in first.iterdir())
    assert files == sorted(f.name for f in again.iterdir())
    for name in files:
        if name.endswith(".safetensors"):
            assert (first / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_activations_are_causal_and_reproducible(checkpoints, family):
    tokens = byte_tokens(TOKENS)
    full = layer_input(checkpoints[family], LAYER, tokens)
    assert full.activations.dtype == torch.bfloat16
    assert full.activations.isfinite().all()
    # Rows leave an RMS norm whose weights are around one, apart from a few channels that are eight times larger.
    assert 0.5 < full.activations.float().std() < 5
    assert full.experts_output.float().std() > 0.1
    changed = tokens.clone()
    changed[TOKENS // 2] = (changed[TOKENS // 2] + 1) % 256
    other = layer_input(checkpoints[family], LAYER, changed)
    half = TOKENS // 2
    assert torch.equal(full.activations[:half], other.activations[:half])
    # The layers before were really run: attention carries the changed byte to every later row.
    moved = (full.activations[half:] != other.activations[half:]).any(dim=1)
    assert moved.all()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_router_alone_chooses_what_the_whole_model_chose(checkpoints, family):
    seen = layer_input(checkpoints[family], LAYER, byte_tokens(TOKENS))
    ids, weights = Router(checkpoints[family], LAYER)(seen.activations)
    assert torch.equal(ids, seen.expert_ids)
    assert torch.equal(weights, seen.expert_weights)
    used = torch.bincount(ids.flatten(), minlength=16)
    assert int((used > 0).sum()) >= 12, "a degenerate router would leave most experts idle"


def test_router_reads_only_its_own_tensors(checkpoints, tmp_path):
    """A directory that holds nothing but the router's tensors is enough."""
    from safetensors.torch import save_file

    source = checkpoints["deepseek-v3"]
    prefix = f"model.layers.{LAYER}.mlp.gate."
    tensors = read_tensors(source, lambda name: name.startswith(prefix))
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for alone, whole in zip(Router(tmp_path, LAYER)(x), Router(source, LAYER)(x), strict=True):
        assert torch.equal(alone, whole)


def test_dense_layer_missing_layer_and_missing_tensor_are_named(checkpoints, tmp_path):
    directory = checkpoints["deepseek-v3"]
    with pytest.raises(CheckpointError, match="dense"):
        Router(directory, 0)
    with pytest.raises(CheckpointError, match="dense"):
        layer_input(directory, 0, byte_tokens(8))
    with pytest.raises(InputError, match="0 to 2"):
        Router(directory, 3)
    with pytest.raises(CheckpointError, match="without safetensors files"):
        read_tensors(tmp_path, lambda _: True)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if ".gate." not in n}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight"):
        Router(tmp_path, LAYER)


@pytest.mark.parametrize("model_type", ["clip", "vit"])
def test_a_model_without_a_language_model_is_named(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(CheckpointError, match=f"{model_type}.*language model"):
        Router(tmp_path, LAYER)


def test_the_default_text_is_found_without_an_installation(monkeypatch):
    def nowhere(_: str) -> None:
        raise PackageNotFoundError("megamoe")

    monkeypatch.setattr(demo_activations, "distribution", nowhere)
    assert len(byte_tokens(200)) == 200


def test_making_a_checkpoint_never_deletes_other_files(tmp_path):
    precious = tmp_path / "notes.txt"
    precious.write_text("keep")
    with pytest.raises(InputError, match="directory"):
        make_checkpoint("qwen3-moe", tmp_path)
    assert precious.read_text() == "keep"
    with pytest.raises(InputError, match="family"):
        make_checkpoint("gpt-2", tmp_path / "x")


def test_without_transformers_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EngineError, match=r"pip install 'megamoe\[transformers\]'"):
        make_checkpoint("qwen3-moe", tmp_path / "x")


def test_a_file_is_no_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("keep")
    for wrong in (file, file / "below"):
        with pytest.raises(InputError, match="directory"):
            make_checkpoint("qwen3-moe", wrong)
    assert file.read_text() == "keep"


def test_saved_activations_come_back(checkpoints, tmp_path):
    seen = layer_input(checkpoints["qwen3-moe"], LAYER, byte_tokens(16))
    seen.save(tmp_path / "activations.safetensors")
    with safe_open(tmp_path / "activations.safetensors", framework="pt") as file:
        for name in ("activations", "expert_ids", "expert_weights", "experts_output"):
            assert torch.equal(file.get_tensor(name), getattr(seen, name))


def test_byte_tokens_are_the_bytes_of_the_text(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)))
    assert byte_tokens(256, text).tolist() == list(range(256))
    with pytest.raises(InputError, match="1 to 256"):
        byte_tokens(257, text)
    assert bytes(byte_tokens(200).tolist()).decode().lstrip().startswith("Apache License")
