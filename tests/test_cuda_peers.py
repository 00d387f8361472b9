"""Sharing memory between processes: whatever fails on one rank is an error that names it, and the others hear of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.cuda import peers
from megamoe.cuda.peers import Arenas, symmetric_arenas
from megamoe.errors import EngineError, MegaMoEError

NBYTES, WORD = 4096, 1024


class Group:
    """Stands for the control channel of rank 0 of 2: keeps what this rank told the other."""

    rank, size, token = 0, 2, "token"

    def __init__(self) -> None:
        self.told: list[tuple[str, MegaMoEError | None]] = []

    def agree(self, phase: str, facts: Any = None, *, error: MegaMoEError | None = None) -> None:
        self.told.append((phase, error))
        if error is not None:
            raise error


class Memory:
    """Stands for torch's symmetric memory and for the peer, which writes its word while they meet."""

    def __init__(self, words: Sequence[int], *, fails: str | None = None, error: Exception | None = None) -> None:
        self.words = words
        self.fails, self.error = fails, error
        self.tensor = torch.full((NBYTES,), 0xFF, dtype=torch.uint8)

    def empty_strided_p2p(self, shape: Any, strides: Any, dtype: Any, device: Any, name: str) -> torch.Tensor:
        if self.fails == "allocate":
            assert self.error is not None
            raise self.error
        return self.tensor

    def rendezvous(self, tensor: torch.Tensor, name: str) -> Any:
        if self.fails == "rendezvous":
            assert self.error is not None
            raise self.error
        tensor[WORD : WORD + 8].view(torch.int32).copy_(torch.tensor(self.words, dtype=torch.int32))
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr(), 1 << 40])


class Writer:
    """Stands for the driver: what is stored where."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, list[int]]] = []

    def store_words(self, ordinal: int, pointer: int, words: Sequence[int]) -> None:
        self.stored.append((pointer, list(words)))


def share(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> tuple[Arenas, Group, Writer]:
    monkeypatch.setattr(peers, "_symmetric", lambda: memory)
    monkeypatch.setattr(peers, "_register", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    group, writer = Group(), Writer()
    memory.group = group  # type: ignore[attr-defined]
    return symmetric_arenas(group, writer, 0, NBYTES, WORD), group, writer  # type: ignore[arg-type]


def test_every_rank_writes_into_every_arena_and_leaves_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory([peers._PROBE, peers._PROBE + 1])  # what ranks 0 and 1 write for rank 0
    arenas, group, writer = share(memory, monkeypatch)
    base = memory.tensor.data_ptr()
    assert arenas.addresses == [[base, 1 << 40]]
    assert writer.stored == [(base + WORD, [peers._PROBE]), ((1 << 40) + WORD, [peers._PROBE + 16])]
    assert group.told == [("allocate", None), ("rendezvous", None), ("probe", None)]
    assert not memory.tensor.any()


@pytest.mark.parametrize(
    ("memory", "phases", "message"),
    [
        (
            Memory([], fails="allocate", error=torch.OutOfMemoryError("CUDA out of memory\nmore")),
            ["allocate"],
            r"arena: got OutOfMemoryError: CUDA out of memory",
        ),
        (
            Memory([], fails="rendezvous", error=RuntimeError("pidfd_getfd: Operation not permitted\nstack")),
            ["allocate", "rendezvous"],
            r"peer access: got pidfd_getfd: Operation not permitted; allowed: GPUs whose.*SYS_PTRACE.*backend='cpu'",
        ),
        (
            Memory([], fails="rendezvous", error=RuntimeError()),  # torch's bindings may say nothing at all
            ["allocate", "rendezvous"],
            r"peer access: got RuntimeError; allowed",
        ),
        (
            Memory([peers._PROBE, 0]),
            ["allocate", "rendezvous", "probe"],
            r"peer access: got nothing arrived from rank 1",
        ),
    ],
    ids=["memory", "not-permitted", "no-message", "silent-peer"],
)
def test_what_fails_here_is_told_to_the_others(
    memory: Memory, phases: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=message) as raised:
        share(memory, monkeypatch)
    told = memory.group.told  # type: ignore[attr-defined]
    assert [phase for phase, _ in told] == phases
    assert told[-1][1] is raised.value
    assert all(error is None for _, error in told[:-1])
