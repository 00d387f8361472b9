"""The simulator: the project's kernel sources run on a CPU under seeded schedules, with a race checker.

`Simulation` holds global memory and runs `Launch`es of `Kernel`s; `Report` says what was wrong. See docs/simulator.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamoe.sim.build import Kernel
    from megamoe.sim.memory import Buffer, encode_tensor_map
    from megamoe.sim.report import Finding, Report
    from megamoe.sim.requirements import missing
    from megamoe.sim.simulation import Launch, Simulation

_HOME = {
    "Buffer": "megamoe.sim.memory",
    "Finding": "megamoe.sim.report",
    "Kernel": "megamoe.sim.build",
    "Launch": "megamoe.sim.simulation",
    "Report": "megamoe.sim.report",
    "Simulation": "megamoe.sim.simulation",
    "encode_tensor_map": "megamoe.sim.memory",
    "missing": "megamoe.sim.requirements",
}

__all__ = ["Buffer", "Finding", "Kernel", "Launch", "Report", "Simulation", "encode_tensor_map", "missing"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'megamoe.sim' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
