"""Fixed routings: the same arrays on every machine, so that two measurements mean the same work.

All randomness comes from the raw 64-bit stream of numpy's PCG64 seeded by M (tokens on each rank). NumPy promises that
stream for good, which it does not for the distributions of `numpy.random.Generator`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from megamoe.errors import InputError

__all__ = ["ROUTINGS", "Ids", "Weights", "routing"]

Ids = npt.NDArray[np.int32]
Weights = npt.NDArray[np.float32]
_Uniform = Callable[[int, int], npt.NDArray[np.float64]]

ROUTINGS: Final = ("random", "balanced", "zipf", "hot", "all-remote")
"""random: uniform top-k without replacement. balanced: every expert gets the same number of routes, or one more.
zipf: expert e (in a shuffled order) is drawn with weight 1 / (e + 1), without replacement. hot: one expert takes a
route of every token, the others are random. all-remote: random among the experts of the other ranks."""


def _smallest(keys: npt.NDArray[np.float64], topk: int) -> npt.NDArray[np.int64]:
    """Columns of the `topk` smallest keys of each row, in ascending order of key."""
    return np.argsort(keys, axis=1, kind="stable")[:, :topk]


def routing(kind: str, *, tokens: int, ranks: int, experts: int, topk: int) -> tuple[Ids, Weights]:
    """Routes of every rank.

    Args:
        kind: one of `ROUTINGS`.
        tokens: tokens on each rank (M), also the seed.
        ranks: number of ranks R; rank r owns the experts ``[r * E/R, (r + 1) * E/R)``.
        experts: routed experts E over all ranks.
        topk: routes of a token k.

    Returns:
        Expert ids, int32 ``[R, M, k]``, distinct within a token, and route weights, float32 ``[R, M, k]``, positive
        and summing to 1 for each token.

    Raises:
        InputError: unknown `kind`, or one that these sizes do not allow.
    """
    if kind not in ROUTINGS:
        raise InputError("routing", kind, ", ".join(ROUTINGS), "Pick one of the listed names.")
    if experts % ranks:
        raise InputError("experts", experts, f"a multiple of ranks = {ranks}", "Change one of the two.")
    if topk > experts:
        raise InputError("topk", topk, f"at most experts = {experts}", "Use more experts.")
    local = experts // ranks
    if kind == "all-remote" and experts - local < topk:
        raise InputError(
            "routing",
            kind,
            f"other kinds: the other ranks hold {experts - local} experts and top-k is {topk}",
            "Use more ranks or another routing.",
        )
    bits = np.random.PCG64(tokens)

    def uniform(rows: int, columns: int) -> npt.NDArray[np.float64]:
        """Open interval (0, 1), 53 bits."""
        raw = np.asarray(bits.random_raw(rows * columns), dtype=np.uint64).reshape(rows, columns)
        result: npt.NDArray[np.float64] = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return result

    order = np.argsort(uniform(1, experts)[0], kind="stable")
    ids = np.empty((ranks, tokens, topk), dtype=np.int32)
    for rank in range(ranks):  # rank by rank: the keys of all ranks at once would take gigabytes at M = 8192
        ids[rank] = _rank_ids(kind, rank, tokens, local, experts, topk, order, uniform)
    weights = uniform(ranks * tokens, topk) + 0.5
    weights /= weights.sum(axis=1, keepdims=True)
    return ids, weights.astype(np.float32).reshape(ranks, tokens, topk)


def _rank_ids(
    kind: str,
    rank: int,
    tokens: int,
    local: int,
    experts: int,
    topk: int,
    order: npt.NDArray[np.int64],
    uniform: _Uniform,
) -> npt.NDArray[np.int64]:
    if kind == "balanced":
        first = rank * tokens * topk
        routes = np.arange(first, first + tokens * topk).reshape(tokens, topk)
        return order[routes % experts]
    keys = uniform(tokens, experts)
    if kind == "zipf":
        # The k smallest of exponential variables with rates p are k draws without replacement with weights p
        # (Efraimidis and Spirakis, 2006).
        rate = np.empty(experts)
        rate[order] = 1.0 / np.arange(1, experts + 1)
        return _smallest(-np.log(keys) / rate, topk)
    if kind == "hot":
        keys[:, order[0]] = -1.0
    elif kind == "all-remote":
        keys[:, rank * local : (rank + 1) * local] = 2.0
    return _smallest(keys, topk)
