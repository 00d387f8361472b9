"""What kernels and peers reported about earlier calls, as exceptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from megamoe.cuda.memory import Workspace
from megamoe.errors import DeadlineError, InputError, PeerError
from megamoe.spec import MoESpec

__all__ = ["raise_reported", "take_bad_values"]

_PHASES: Final = {
    1: "the peers' route counts",
    2: "this rank's own counts",
    3: "the route table",
    4: "token rows",
    5: "the intermediate",
    6: "the peers' results",
    7: "the first GEMMs of the pass before",
    8: "the results of the pass before",
    9: "room in its pools; the bound must be equal on all ranks",
    10: "the sums of another CTA",
    11: "this rank's own results",
}
"""`Phase` of kernels/sync.cuh, in words."""

_RESET: Final = "Call reset() on the layer, on every rank."


def raise_reported(workspace: Workspace, errors: Sequence[tuple[int, Any]], spec: MoESpec, deadline: float) -> None:
    """Raise the first thing that a kernel of this process or a peer has reported since the last look; no GPU is asked.

    Args:
        workspace: of the layer.
        errors: rank and host-visible error words of each hosted rank; what is raised is cleared.
        spec: the layer.
        deadline: seconds of one wait, for the message.

    Raises:
        DeadlineError: a wait inside a kernel of this process expired.
        PeerError: another rank's wait expired, or it refused a call.
        InputError: a call had an id or a token count out of range; the layer stays usable.
    """
    if workspace.broken is None and workspace.reported():
        expired, aborted = workspace.expired(), workspace.aborted()
        if expired is not None:
            phase = _PHASES.get(expired.phase, str(expired.phase))
            workspace.broken = (
                f"rank {expired.rank} waited for {phase} ({expired.index}): "
                f"awaited {expired.awaited}, saw {expired.seen}"
            )
            raise DeadlineError("call", workspace.broken, f"an answer within {deadline:g} s", _RESET)
        if aborted is not None:
            rank, phase_number = aborted
            if phase_number == 0:
                workspace.broken = f"rank {rank} refused a call that this rank made"
                raise PeerError("call", workspace.broken, "calls that all ranks make", f"See its error. {_RESET}")
            workspace.broken = f"rank {rank} waited in vain for {_PHASES.get(phase_number, str(phase_number))}"
            raise PeerError("call", workspace.broken, "an answer within its deadline", f"See its error. {_RESET}")
    if error := take_bad_values(errors, spec):
        raise error


def take_bad_values(errors: Sequence[tuple[int, Any]], spec: MoESpec, way_out: str = "") -> InputError | None:
    """The first bad value that a kernel has reported and that was not taken yet, as an error.

    Args:
        errors: rank and host-visible error words of each hosted rank; the word that is taken is cleared.
        spec: the layer.
        way_out: what the caller should know besides what that call did.
    """
    for rank, words in errors:
        for word, (argument, allowed) in enumerate(
            (("expert_ids", f"-1 to {spec.experts - 1}"), ("num_tokens", "0 to the rows of x"))
        ):
            if words[word]:
                words[word] = 0
                return InputError(
                    argument,
                    f"a value out of range on rank {rank} in an earlier call",
                    allowed,
                    f"That call skipped such routes, and took a count over the rows of x as all of them. {way_out}",
                )
    return None
