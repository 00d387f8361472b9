"""megamoe: the routed experts of a Mixture-of-Experts layer, expert-parallel, as one fused operator."""

from megamoe.errors import MegaMoEError
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__version__ = "0.1.0"

__all__ = ["ExpertWeights", "MegaMoEError", "MoESpec", "__version__"]
