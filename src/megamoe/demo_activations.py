"""Real activations: what a text makes a model feed into the experts of one layer.

The layers before it run in Transformers, with FP8 weights multiplied out to BF16 (what Transformers itself does on a
device without FP8). Only the tensors of the layers that run are read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megamoe.errors import CheckpointError, InputError
from megamoe.formats.fp8_block import dequantize_weights
from megamoe.hf import quiet_transformers, read_tensors, require_transformers, truncated_config
from megamoe.spec import BLOCK

__all__ = ["LayerInput", "byte_tokens", "layer_input"]


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """What one layer's experts see, and what Transformers makes of it.

    Attributes:
        activations: BF16 ``[T, H]``, input of the MoE block.
        expert_ids: int64 ``[T, k]``, chosen by the model's router.
        expert_weights: float32 ``[T, k]``, final route weights.
        experts_output: BF16 ``[T, H]``, sum over the routed experts as Transformers computes it in BF16.
    """

    activations: torch.Tensor
    expert_ids: torch.Tensor
    expert_weights: torch.Tensor
    experts_output: torch.Tensor

    def save(self, path: str | Path) -> None:
        """Write the four tensors under their names to a safetensors file."""
        from safetensors.torch import save_file

        save_file({f.name: getattr(self, f.name).contiguous() for f in fields(self)}, str(path))


def _licence() -> Path:
    """The licence as it was installed, or beside the sources of a checkout."""
    try:
        listed = [Path(str(f.locate())) for f in distribution("megamoe").files or [] if f.name == "LICENSE"]
    except PackageNotFoundError:
        listed = []
    for file in (*listed, Path(__file__).parents[2] / "LICENSE"):
        if file.is_file():
            return file
    raise InputError("path", "None", "a text file", "The package's licence is not installed; name a text.")


def byte_tokens(tokens: int, path: str | Path | None = None) -> torch.Tensor:
    """The first bytes of a text as token ids, int64 ``[tokens]``.

    Args:
        tokens: number of bytes.
        path: text file; default is this package's licence, which is the same text everywhere.

    Raises:
        InputError: the text cannot be found or is too short.
    """
    file = Path(path) if path is not None else _licence()
    try:
        text = file.read_bytes()
    except OSError as error:
        raise InputError("path", str(file), "a readable text file", str(error)) from error
    if not 1 <= tokens <= len(text):
        raise InputError("tokens", tokens, f"1 to {len(text)}, the bytes of {file.name}", "Use a longer text.")
    return torch.tensor(list(text[:tokens]), dtype=torch.int64)


def _dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """BF16 weights of e4m3 `values` ``[N, K]`` with a scale per 128 x 128 block, the last ones possibly ragged."""
    rows, columns = values.shape
    padded = F.pad(values.view(torch.uint8), (0, -columns % BLOCK, 0, -rows % BLOCK)).view(values.dtype)
    return dequantize_weights(padded, scales, torch.bfloat16)[:rows, :columns]


def _load_up_to(directory: Path, layer: int) -> Any:
    """The model in `directory`, cut off after `layer`."""
    config = truncated_config(directory, layer)

    def wanted(name: str) -> bool:
        parts = name.split(".")
        return "layers" not in parts or int(parts[parts.index("layers") + 1]) <= layer

    stored = read_tensors(directory, wanted)
    tensors = {
        name: _dequantise(tensor, stored[f"{name}_scale_inv"]) if f"{name}_scale_inv" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    model_class = require_transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.bfloat16).eval()


def layer_input(checkpoint: str | Path, layer: int, tokens: torch.Tensor) -> LayerInput:
    """Run the layers before `layer` and record what enters and leaves its routed experts.

    Args:
        checkpoint: directory of a model that Transformers knows, BF16 or FP8 with 128 x 128 blocks.
        layer: index of a layer with experts.
        tokens: int64 ``[T]`` token ids, one sequence.

    Raises:
        CheckpointError: the layer has no router and experts, or a tensor is missing.
        EngineError: Transformers is not installed.
        InputError: `layer` is out of range.
    """
    with quiet_transformers():
        model = _load_up_to(Path(checkpoint), layer)
    block = model.base_model.layers[layer].mlp
    if not hasattr(block, "gate") or not hasattr(block, "experts"):
        raise CheckpointError("layer", layer, "a layer with routed experts", "This one is dense; choose a later layer.")
    seen: list[Any] = []
    handle = block.experts.register_forward_hook(lambda _module, arguments, output: seen.append((arguments, output)))
    try:
        with torch.inference_mode():
            model.base_model(input_ids=tokens.unsqueeze(0), use_cache=False)
    finally:
        handle.remove()
    (hidden, ids, weights), output = seen[-1]
    return LayerInput(
        activations=hidden.reshape(-1, hidden.shape[-1]).bfloat16().clone(),
        expert_ids=ids.to(torch.int64).clone(),
        expert_weights=weights.float().clone(),
        experts_output=output.reshape(-1, hidden.shape[-1]).bfloat16().clone(),
    )
