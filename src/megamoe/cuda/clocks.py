"""Clocks of several GPUs in one recording: how far apart they are, from what the ranks of the call told each other.

Every GPU has a timer of its own. A rank that has seen something of all ranks stamps that after each of them stamped
what it sent, so with ``stamp = time + offset of the clock`` and clocks i and j

    offset(i) - offset(j) <= first stamp on i of "seen" - last stamp on j of "sent".

Messages in both directions bound a difference from both sides, as in the exchange of time stamps of NTP (RFC 5905,
section 8). Bounds of all pairs are closed over paths first; the middles of the bounds against rank 0's clock then
contradict none of them. What is uncertain is how far the truth can be from there within the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megamoe.errors import InputError

__all__ = ["Alignment", "Exchange", "align"]


@dataclass(frozen=True)
class Exchange:
    """One thing that every rank sends to all and waits for from all.

    Attributes:
        sent: of each rank, the last stamp that is no later than its message; None: it left no such stamp.
        seen: of each rank, the first stamp that is later than all messages; None: it left no such stamp.
    """

    sent: Sequence[int | None]
    seen: Sequence[int | None]


@dataclass(frozen=True)
class Alignment:
    """How the stamps of ranks become times of one clock.

    Attributes:
        offsets: of each rank, what is taken from its stamps; 0 for ranks on rank 0's clock.
        uncertainty: by how much times of different clocks can be wrong against each other, at most.
    """

    offsets: tuple[int, ...]
    uncertainty: int


def align(clocks: Sequence[int], exchanges: Sequence[Exchange], tick: int = 0) -> Alignment:
    """The offsets of the ranks' clocks.

    Args:
        clocks: which clock each rank has.
        exchanges: what they told each other, stamped by their own clocks.
        tick: how long a clock may stand still between two values.

    Raises:
        InputError: a clock without a message to or from the others, or stamps that no offset explains.
    """
    names = list(dict.fromkeys(clocks))
    count, at = len(names), {name: n for n, name in enumerate(names)}
    bound: list[list[float]] = [[0 if i == j else math.inf for j in range(count)] for i in range(count)]
    for exchange in exchanges:
        for a, seen in enumerate(exchange.seen):
            for b, sent in enumerate(exchange.sent):
                i, j = at[clocks[a]], at[clocks[b]]
                if i != j and seen is not None and sent is not None:
                    bound[i][j] = min(bound[i][j], seen - sent + tick)
    for k in range(count):
        for i in range(count):
            for j in range(count):
                bound[i][j] = min(bound[i][j], bound[i][k] + bound[k][j])
    widths = [bound[i][j] + bound[j][i] for i in range(count) for j in range(i)]
    if math.inf in widths:
        raise InputError(
            "stamps",
            f"clocks {names} without a message between some of them",
            "the stamps of one call in which all ranks take part",
            "Record them again.",
        )
    if any(width < 0 for width in widths):
        raise InputError(
            "stamps",
            f"clocks {names} that contradict each other, whatever their offsets",
            "the stamps of one call",
            "Stamps of several calls are mixed; record them again.",
        )
    middles = [int(bound[i][0] - bound[0][i]) // 2 for i in range(count)]
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    uncertainty = max((int(bound[i][j]) - middles[i] + middles[j] for i, j in pairs), default=0)
    return Alignment(tuple(middles[at[clock]] for clock in clocks), uncertainty)
