"""What this package takes from Transformers and from a checkpoint besides the experts: the layer's router.

Transformers is optional: it is imported when one of these functions is called.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megamoe.errors import CheckpointError, EngineError, InputError

__all__ = ["Router", "quiet_transformers", "read_tensors", "require_transformers", "truncated_config"]


def require_transformers() -> Any:
    """The `transformers` module.

    Raises:
        EngineError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise EngineError(
            "transformers",
            "not installed",
            "transformers >= 5.17, for the models' own routers and for tiny checkpoints",
            "Run: pip install 'megamoe[transformers]'.",
        ) from error
    return transformers


@contextmanager
def quiet_transformers() -> Iterator[Any]:
    """The `transformers` module, without its progress bars and load reports, which would mix with this package's."""
    transformers = require_transformers()
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield transformers
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def read_tensors(directory: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Tensors whose name is `wanted`, from a sharded or single-file safetensors checkpoint; others are not read.

    Raises:
        CheckpointError: there is no checkpoint in `directory`, or a file of it is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    index = directory / "model.safetensors.index.json"
    files: defaultdict[str, list[str]] = defaultdict(list)
    try:
        if index.exists():
            for name, file in json.loads(index.read_text())["weight_map"].items():
                if wanted(name):
                    files[file].append(name)
        else:
            with safe_open(directory / "model.safetensors", framework="pt") as single:
                files["model.safetensors"] = [name for name in single.keys() if wanted(name)]  # noqa: SIM118
        result = {}
        for file, names in files.items():
            with safe_open(directory / file, framework="pt") as shard:
                result.update({name: shard.get_tensor(name) for name in names})
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            "directory", str(directory), "a Hugging Face safetensors checkpoint", f"{type(error).__name__}: {error}."
        ) from error
    return result


def truncated_config(directory: Path, layer: int) -> Any:
    """Transformers' configuration of the model in `directory`, cut off after `layer` and without quantisation.

    Raises:
        CheckpointError: Transformers cannot read the configuration.
        EngineError: Transformers is not installed.
        InputError: the model has no such layer.
    """
    transformers = require_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "directory", str(directory), "a config.json of a model that Transformers knows", f"It says: {error}."
        ) from error
    if not 0 <= layer < config.num_hidden_layers:
        raise InputError("layer", layer, f"0 to {config.num_hidden_layers - 1}", "Choose a layer of this model.")
    config.num_hidden_layers = layer + 1
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


class Router:
    """A model's own router: Transformers' module for that architecture with the weights of one layer.

    Only the router's tensors are read; the rest of the model is never allocated.

    Args:
        directory: checkpoint of a model that Transformers knows.
        layer: index of a layer with experts.

    Raises:
        CheckpointError: no router at that layer, or its tensors are missing.
        EngineError: Transformers is not installed.
        InputError: the model has no such layer.
    """

    def __init__(self, directory: str | Path, layer: int) -> None:
        path = Path(directory)
        config = truncated_config(path, layer)
        transformers = require_transformers()
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            model = model_class(config)
        routers = [
            (name, module)
            for name, module in model.named_modules()
            if f"layers.{layer}." in name and type(module).__name__.endswith("Router")
        ]
        if len(routers) != 1:
            raise CheckpointError(
                "layer", layer, "a layer with one router", f"It has {len(routers)}; dense layers come first in a model."
            )
        name, module = routers[0]
        expected = {key: f"{name}.{key}" for key in module.state_dict()}
        stored = read_tensors(path, set(expected.values()).__contains__)
        missing = sorted(set(expected.values()) - stored.keys())
        if missing:
            raise CheckpointError("directory", str(path), f"the tensors {missing}", "The checkpoint is incomplete.")
        module.load_state_dict({key: stored[full] for key, full in expected.items()}, assign=True)
        self.kind = type(module).__name__
        """Class name of Transformers' module."""
        self._module = module.eval()

    @torch.inference_mode()
    def __call__(self, activations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens.

        Args:
            activations: BF16 ``[T, H]``, input of the MoE block.

        Returns:
            Expert ids, int64 ``[T, k]``, and final route weights, float32 ``[T, k]``.
        """
        _, weights, ids = self._module(activations)
        return ids.to(torch.int64), weights.float()
