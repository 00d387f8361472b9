"""Every error that megamoe raises on purpose.

Each one says four things: which argument, what was given, what is allowed, and the way out. The constructor
takes them apart, so that a caller that handles errors can read the fields instead of the sentence.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ClosedError",
    "CompileError",
    "DeadlineError",
    "EngineError",
    "FormatError",
    "InputError",
    "MegaMoEError",
    "PeerError",
    "SpecError",
    "WeightError",
    "stated",
]


class MegaMoEError(Exception):
    """Base class of all errors of this package.

    Args:
        argument: name of the argument (or file, field, phase) that is wrong.
        given: what was given, as text or as a value whose ``repr`` is short.
        allowed: what would have been accepted.
        way_out: what the caller can do now.
    """

    def __init__(self, argument: str, given: object, allowed: str, way_out: str = "") -> None:
        self.argument = argument
        self.given = given if isinstance(given, str) else repr(given)
        self.allowed = allowed
        self.way_out = way_out
        text = f"{argument}: got {self.given}; allowed: {allowed}"
        super().__init__(f"{text}. {way_out}" if way_out else text)

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the constructor with the one formatted sentence: errors cross process
        # boundaries (torch.multiprocessing, test runners), so they must survive pickling.
        return (type(self), (self.argument, self.given, self.allowed, self.way_out))


class SpecError(MegaMoEError, ValueError):
    """A `MoESpec` that cannot exist, or that this group of ranks cannot hold."""


class FormatError(MegaMoEError, ValueError):
    """A weight format that cannot hold this layer; the message names one that can."""


class WeightError(MegaMoEError, ValueError):
    """Weight tensors of a wrong dtype, device, shape, stride or scale kind."""


class CheckpointError(MegaMoEError, ValueError):
    """A checkpoint on disk that cannot be read as an expert layer."""


class InputError(MegaMoEError, ValueError):
    """Arguments of a call that the layer refuses; the layer stays usable."""


class PeerError(MegaMoEError, RuntimeError):
    """Another rank refused, failed or disagrees; the message names it and repeats its reason."""


class DeadlineError(MegaMoEError, RuntimeError):
    """A wait for another rank or for the device passed its deadline."""


class ClosedError(MegaMoEError, RuntimeError):
    """The layer or group was closed, or waits for `reset()`."""


class EngineError(MegaMoEError, RuntimeError):
    """The requested engine cannot run on this machine."""


class CompileError(MegaMoEError, RuntimeError):
    """A kernel did not compile, or its compiler report breaks the policy (spills, C75xx)."""


def stated(what: str, error: Exception) -> MegaMoEError:
    """`error` itself if it is one of this package's, else an `EngineError` chained to it: something to tell the other
    ranks, which wait whatever went wrong here.

    Args:
        what: the step that failed.
        error: what it raised.
    """
    if isinstance(error, MegaMoEError):
        return error
    reason = (str(error).splitlines() or ["no message"])[0]
    result = EngineError(
        what,
        f"{type(error).__name__}: {reason}",
        "a step that succeeds on every rank",
        "The chained error, on the rank that failed, shows where; less memory is needed with smaller batches.",
    )
    result.__cause__ = error
    return result
