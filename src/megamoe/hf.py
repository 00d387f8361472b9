"""What this package takes from Transformers and from a checkpoint besides the experts: the layer's router.

Transformers is optional: it is imported when one of these functions is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megamoe.errors import CheckpointError, EngineError, InputError
from megamoe.formats.shards import Reader, weight_map

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
    files = weight_map(directory)
    with Reader(directory, files) as reader:
        return {name: reader.stored(name).view() for name in files if wanted(name)}


def truncated_config(directory: Path, layer: int) -> Any:
    """Transformers' configuration of the model in `directory`, cut off after `layer` and without quantisation.

    Raises:
        CheckpointError: Transformers cannot read the configuration, or has no language model for it.
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
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            "directory",
            f"{directory} with a {config.model_type!r} model",
            "a language model that Transformers has a causal class for",
            "Take the text model out of it, or call megamoe.MegaMoE with ids and weights of your own router.",
        )
    if not 0 <= layer < layers:
        raise InputError("layer", layer, f"0 to {layers - 1}", "Choose a layer of this model.")
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
