"""Transformers' Mixture-of-Experts models on megamoe layers.

    import megamoe.integrations.transformers as megamoe_transformers

    megamoe_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="megamoe")

``"megamoe"`` runs experts in the format they are stored in (BF16, FP8 in 128 x 128 blocks, packed E2M1), on the
module's own parameters. ``"megamoe-fp8"`` quantises BF16 experts to FP8 first. With expert parallelism also pass
``ep_implementation="megamoe"`` in the `DistributedConfig`; the host's own implementations work too and then use the
layer for each rank's experts.

Inference only. See docs/integrations/transformers.md.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from megamoe.control import DEFAULT_DEADLINE
from megamoe.engine import Backend
from megamoe.errors import EngineError
from megamoe.inputs import positive_number
from megamoe.integrations.transformers import host, layers
from megamoe.integrations.transformers.experts import (
    QUANTIZED,
    STORED,
    experts_forward,
    quantized_experts_forward,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["QUANTIZED", "STORED", "register", "release"]

_warned: set[str] = set()


def register(*, backend: Backend = "auto", max_tokens: int = 8192, deadline: float = DEFAULT_DEADLINE) -> bool:
    """Make ``experts_implementation="megamoe"`` and ``"megamoe-fp8"`` known to Transformers; safe to call again.

    A door that the installed version does not have, or has with another signature, is left alone with one warning;
    ``megamoe doctor`` says the same.

    Args:
        backend: engine of the layers; ``"auto"`` is the one for the device that a model's experts are on.
        max_tokens: most tokens of a rank in one forward, where expert-parallel ranks hold different batches. Elsewhere
            layers grow with the batch.
        deadline: seconds that a rank waits for another one.

    Returns:
        Whether the experts implementations are known now.

    Raises:
        EngineError: Transformers is not installed.
        InputError: `max_tokens` or `deadline` is not a positive number.
    """
    positive_number("max_tokens", max_tokens, integer=True, way_out="Pass the most tokens of a rank in one forward.")
    positive_number("deadline", deadline, integer=False, way_out="Pass seconds.")
    version = host.installed_version()
    if version is None:
        raise EngineError(
            "transformers",
            "not installed",
            f"transformers >= {host.OLDEST}",
            "Run: pip install 'megamoe[transformers]'.",
        )
    layers.settings.backend, layers.settings.max_tokens, layers.settings.deadline = backend, max_tokens, deadline
    doors = host.examine()
    for door, reason in doors.items():
        if reason is not None and door not in _warned:
            _warned.add(door)
            warnings.warn(
                f"megamoe leaves {door} of transformers {version} alone: {reason}.", RuntimeWarning, stacklevel=2
            )
    if doors[host.EXPERTS] is None:
        moe = import_module("transformers.integrations.moe")
        fp8 = import_module("transformers.integrations.finegrained_fp8")
        for registry in (moe.ALL_EXPERTS_FUNCTIONS, fp8.ALL_FP8_EXPERTS_FUNCTIONS):
            registry.register(STORED, experts_forward)
            registry.register(QUANTIZED, quantized_experts_forward)
        if doors[host.EXPERT_PARALLEL] is None:
            from megamoe.integrations.transformers.expert_parallel import make_implementation

            module = import_module("transformers.distributed.expert_parallel")
            module.EPImplementationInterface.register(STORED, make_implementation(module.EPImplementation))
    return doors[host.EXPERTS] is None


def release(model: nn.Module | None = None) -> None:
    """Close the layers behind `model`, or behind all models, and free what they hold.

    The model stays usable: the next forward makes its layers anew. With expert parallelism call it on every rank,
    before the process groups are destroyed.
    """
    if model is None:
        layers.release()
        return
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            layers.release(module)
            layers.release(module.gate_up_proj)
