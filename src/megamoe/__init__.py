"""megamoe: the routed experts of a Mixture-of-Experts layer, expert-parallel, as one fused operator.

Names are imported when they are first used (PEP 562): ``megamoe --help`` and tools that only look at a specification
must not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamoe.errors import MegaMoEError
    from megamoe.formats.checkpoint import Checkpoint, checkpoint
    from megamoe.group import LocalGroup, local_group
    from megamoe.layer import MegaMoE
    from megamoe.spec import MoESpec
    from megamoe.weights import ExpertWeights

__version__ = "0.1.0"

# Public name -> module that defines it. A new name needs one line here, one above and one in `__all__`.
_HOME = {
    "Checkpoint": "megamoe.formats.checkpoint",
    "ExpertWeights": "megamoe.weights",
    "LocalGroup": "megamoe.group",
    "MegaMoE": "megamoe.layer",
    "MegaMoEError": "megamoe.errors",
    "MoESpec": "megamoe.spec",
    "checkpoint": "megamoe.formats.checkpoint",
    "local_group": "megamoe.group",
}

__all__ = [
    "Checkpoint",
    "ExpertWeights",
    "LocalGroup",
    "MegaMoE",
    "MegaMoEError",
    "MoESpec",
    "__version__",
    "checkpoint",
    "local_group",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'megamoe' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
