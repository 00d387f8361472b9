"""Agreement between the ranks of a process group: every rank learns whether every other rank goes on.

Before anything that needs all ranks (constructing, loading, every call), each rank sends all others one small header:
the phase it is in, facts that must be equal, numbers for the phase's own use, or the error with which it refuses. So a
rank that cannot go on makes all of them raise, at once and in step, and the layer stays usable.

A group of one rank needs none of this; `Control(None)` is that case.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NoReturn
from uuid import uuid4

import torch
import torch.distributed as dist

from megamoe.errors import ClosedError, DeadlineError, InputError, MegaMoEError, PeerError

__all__ = ["DEFAULT_DEADLINE", "Control"]

DEFAULT_DEADLINE: Final = 300.0
"""Seconds that a rank waits for the others."""

_TEXT: Final = 1600
"""Characters of an error that travel; JSON may need up to six bytes for each, hence `_header_bytes`."""

_POLL: Final = 0.01
"""Seconds between two looks at whether all ranks want to connect anew."""

_RESET: Final = "Find out why on the rank that is named or missing, then call reset() on every rank."


def _header_bytes(ranks: int) -> int:
    return 10240 + 64 * ranks


class Control:
    """Headers and byte exchanges between the ranks of `group`, on connections of its own.

    A private gloo group is built over the members of `group`, so that this traffic cannot meet the user's, works
    beside a CUDA group, has its own deadline and can be rebuilt by `reset`.

    Attributes:
        rank, size: this rank, and how many there are.
        token: a hexadecimal number, equal on all ranks and unlike any other group's; empty for a single rank.
        members: the ranks in the world.

    Args:
        group: a ``torch.distributed`` process group, or None for a single rank.
        deadline: seconds to wait for another rank.

    Raises:
        InputError: `group` is not a process group, or this process is not in it.
        DeadlineError, PeerError: the other ranks did not come, or failed.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline: float = DEFAULT_DEADLINE) -> None:
        self.rank, self.size = 0, 1
        self.token = ""
        self.members: tuple[int, ...] = (0,)
        self.deadline = deadline
        self._group: Any = None
        self._broken: str | None = None
        self._generation = 0
        if group is None:
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "group",
                repr(group),
                "a group of an initialised torch.distributed, or None for one rank",
                "Call torch.distributed.init_process_group first.",
            )
        try:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise InputError("group", repr(group), "a torch.distributed process group", "Pass group.WORLD.") from error
        self.members = tuple(dist.get_process_group_ranks(group))
        if self.rank < 0:
            raise InputError("group", "a group without this process", "a group that it is in", "Pass its own group.")
        if self.size == 1:
            return
        # Not broadcast_object_list: it would wait as long as `group` does, half an hour by default.
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        token = torch.tensor(list(uuid4().bytes), dtype=torch.uint8, device=device)
        with self._waiting("construct"):
            work = dist.broadcast(token, src=dist.get_global_rank(group, 0), group=group, async_op=True)
            work.wait(timedelta(seconds=deadline))
        self.token = bytes(token.tolist()).hex()
        self._connect("construct")

    def store(self, part: str) -> Any:
        """A ``torch.distributed`` store of this group alone, under `part`."""
        c10d = dist.distributed_c10d
        return c10d.PrefixStore(f"megamoe/{self.token}/{part}", c10d._get_default_store())

    def _connect(self, phase: str) -> None:
        # Not dist.new_group: it wants every process of the world, or the same number of groups on every member.
        store = self.store(str(self._generation))
        with self._waiting(phase):
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self.deadline))

    def _meet(self) -> int:
        """Number of the attempt in which all ranks want to connect anew.

        Ranks may have tried alone, and not equally often: rank 0 numbers the attempts, the others join the newest one,
        and it counts when all have joined.
        """
        store, end = self.store("reset"), time.monotonic() + self.deadline
        attempt: int = store.add("attempt", 1 if self.rank == 0 else 0)
        while time.monotonic() < end:
            store.set(f"{attempt}/{self.rank}", "")
            if self.rank == 0 and store.check([f"{attempt}/{rank}" for rank in range(self.size)]):
                store.set(f"{attempt}/go", "")
            if attempt > self._generation and store.check([f"{attempt}/go"]):
                return attempt
            time.sleep(_POLL)
            attempt = attempt if self.rank == 0 else store.add("attempt", 0)
        raise RuntimeError("Timed out")

    @contextmanager
    def _waiting(self, phase: str) -> Iterator[None]:
        """Translate the backend's errors. After one of them the connections are out of step until `reset`."""
        try:
            yield
        except KeyboardInterrupt:  # between two ranks' halves of an exchange: out of step as well
            self._broken = phase
            raise
        except RuntimeError as error:
            # "[.../pair.cc:553] Connection closed by peer [ip]:port. This is ...": without source position and advice.
            text = re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0]).partition(". ")[0][:_TEXT]
            self._broken = phase
            if "imed out" in text or "imeout" in text:
                raise DeadlineError(
                    f"{phase} on rank {self.rank}",
                    f"no answer from another rank within {self.deadline:g} s",
                    f"all {self.size} ranks enter it within the deadline",
                    f"{_RESET} A longer deadline= helps slow peers.",
                ) from error
            raise PeerError(
                f"{phase} on rank {self.rank}",
                f"connection lost: {text}",
                f"all {self.size} ranks stay until the end",
                _RESET,
            ) from error

    def _usable(self, phase: str) -> None:
        if self._broken is not None:
            raise ClosedError(
                phase,
                f"a layer whose ranks are out of step since an error in '{self._broken}'",
                "reset() on every rank first",
                "Call reset() on every rank.",
            )

    def agree(
        self,
        phase: str,
        facts: Mapping[str, object] | None = None,
        *,
        error: MegaMoEError | None = None,
        numbers: Sequence[int] = (),
    ) -> list[list[int]]:
        """Tell all ranks how this one stands in `phase`, and wait to hear the same from them.

        Args:
            phase: what the rank is doing; all ranks must be doing the same.
            facts: must be equal on all ranks; values that JSON can hold.
            error: why this rank cannot go on; None if it can.
            numbers: anything, handed to all ranks.

        Returns:
            Every rank's `numbers`, by rank.

        Raises:
            MegaMoEError: `error` itself, on the rank that passed it.
            PeerError: another rank refused, is in another phase, or has other facts; the message names it.
            DeadlineError: a rank did not come in time.
            ClosedError: an earlier error left the ranks out of step; `reset` first.
        """
        if self._group is None:
            if error is not None:
                raise error
            return [list(numbers)]
        self._usable(phase)
        # What a refusal is about may be anything, also what JSON cannot hold: only its text travels.
        mine: dict[str, object] = {"phase": phase, "error": None if error is None else str(error)[:_TEXT]}
        mine["facts"], mine["numbers"] = ({}, []) if error is not None else (dict(facts or {}), list(numbers))
        headers = self._all_gather(phase, json.dumps(mine, ensure_ascii=False).encode(errors="replace"))
        if error is not None:
            raise error
        self._compare(phase, headers)
        return [header["numbers"] for header in headers]

    def _all_gather(self, phase: str, payload: bytes) -> list[dict[str, Any]]:
        size = _header_bytes(self.size)
        if len(payload) > size:
            raise ValueError(f"header of {len(payload)} bytes exceeds {size}")
        mine = torch.zeros(size, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with self._waiting(phase):
            self._group.allgather([everyone], [mine]).wait()
        return [json.loads(bytes(one.numpy()).rstrip(b"\0")) for one in everyone]

    def _compare(self, phase: str, headers: list[dict[str, Any]]) -> None:
        refusals = [f"rank {r}: {h['error']}" for r, h in enumerate(headers) if h["error"] is not None]
        if refusals:
            raise PeerError(
                phase,
                "; ".join(refusals),
                f"all {self.size} ranks go on together",
                "Correct it on the named rank; nothing was computed and the layer stays usable.",
            )
        phases = [h["phase"] for h in headers]
        if any(p != phase for p in phases):
            self._disagree("phase", phases, "Make the same calls in the same order on every rank.")
        for name in headers[0]["facts"]:
            self._disagree_unless_equal(name, [h["facts"].get(name) for h in headers])

    def _disagree_unless_equal(self, name: str, values: list[object]) -> None:
        if any(value != values[0] for value in values):
            self._disagree(name, values, f"Pass the same {name} on every rank.")

    def _disagree(self, name: str, values: list[object], way_out: str) -> NoReturn:
        counts = [values.count(value) for value in values]
        usual = values[counts.index(max(counts))]
        others = ", ".join(f"rank {r} has {v!r}" for r, v in enumerate(values) if v != usual)
        raise PeerError(name, others, f"equal on all ranks ({usual!r} on the rest)", way_out)

    def all_to_all(
        self, phase: str, send: torch.Tensor, rows_out: Sequence[int], rows_in: Sequence[int]
    ) -> torch.Tensor:
        """Exchange rows of bytes: uint8 `send` ``[sum(rows_out), B]``, rows for rank 0 first.

        Returns:
            uint8 ``[sum(rows_in), B]``, rows from rank 0 first.
        """
        self._usable(phase)
        received = torch.empty(sum(rows_in), send.shape[1], dtype=torch.uint8)
        with self._waiting(phase):
            self._group.alltoall_base(received, send.contiguous(), list(rows_in), list(rows_out)).wait()
        return received

    def reset(self) -> None:
        """Build the connections anew; collective. Afterwards the ranks are in step again."""
        if self.size == 1:
            return
        self._group = None
        self._broken = "reset"
        with self._waiting("reset"):
            self._generation = self._meet()
        self._connect("reset")
        self._broken = None
        self.agree("reset")

    def close(self) -> None:
        """Drop the connections. Ranks still waiting for this one fail with `PeerError`."""
        self._group = None
