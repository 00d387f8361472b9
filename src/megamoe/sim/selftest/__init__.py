"""Small kernels that exercise the simulator itself, each with planted bugs that it must find."""

from megamoe.sim.selftest.cases import BUGS, simulated

__all__ = ["BUGS", "simulated"]
