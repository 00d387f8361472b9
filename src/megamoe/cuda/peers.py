"""Where the arenas of a group's ranks lie and how each rank's GPU reaches them.

Three cases. One GPU: plain memory. Several GPUs of one process: driver memory with peer access, outside torch's
allocator. One GPU a process: torch symmetric memory, reached through a private name and store, so that the caller's
group needs no backend for GPUs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import torch

from megamoe.control import Control
from megamoe.cuda.driver import Driver
from megamoe.cuda.gpu import Gpu
from megamoe.engine import Peer
from megamoe.errors import EngineError, MegaMoEError, stated

__all__ = ["Arenas", "identity", "local_arenas", "symmetric_arenas", "unreachable"]

_log = logging.getLogger("megamoe")

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SWITCHES: Final = {
    # Devices are compared by their number in each process, which says nothing; `unreachable` compares what they are.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # Nothing here uses NVLink multicast, and setting it up can fail or wait where the rest works.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""What torch reads only from the environment, while memory is shared."""

_PROBE: Final = 0x5EED0000


@dataclass
class Arenas:
    """The arenas of the ranks of this process, zeroed.

    Attributes:
        tensors: uint8, one for each hosted rank.
        addresses: for each hosted rank, where its GPU sees the arena of every rank of the group.
        free: gives the memory back; nothing may be running.
    """

    tensors: list[torch.Tensor]
    addresses: list[list[int]]
    free: Callable[[], None]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") + 1


def identity(driver: Driver | None, ordinal: int) -> Peer:
    """What peers must know of this process to tell whether its memory can be reached: its host, and its GPU."""
    try:
        host = _BOOT_ID.read_text()  # the same in all containers of a host
    except OSError:
        host = socket.gethostname()
    return Peer(host=_number(host), gpu=0 if driver is None else _number(driver.device(ordinal).uuid))


def unreachable(peers: Sequence[Peer]) -> EngineError | None:
    """Why processes with these identities cannot share memory; None if nothing speaks against it."""
    hosts = {peer.host for peer in peers}
    if len(hosts) > 1:
        return EngineError(
            "group",
            f"ranks on {len(hosts)} hosts",
            "ranks of one host, whose GPUs reach each other over NVLink",
            "Between hosts use the split path: an all-to-all (NCCL, DeepEP) around a layer of one rank a host or GPU; "
            "or backend='cpu'.",
        )
    for rank, peer in enumerate(peers):
        same = [r for r in range(rank) if peers[r].gpu == peer.gpu]
        if peer.gpu and same:
            return EngineError(
                "group",
                f"ranks {same[0]} and {rank} on one GPU",
                "a GPU for each process",
                "Call torch.cuda.set_device(local_rank) first; several ranks share a GPU in one process only "
                "(megamoe.local_group).",
            )
        if not peer.gpu:
            return EngineError("group", f"rank {rank} without a GPU", "a GPU for each process", "Pass backend='cpu'.")
    return None


def local_arenas(driver: Driver, gpus: Sequence[Gpu], ordinals: Sequence[int], nbytes: int) -> Arenas:
    """Arenas of ranks of one process, rank r's on GPU ``ordinals[r]``.

    Raises:
        EngineError: two of the GPUs cannot reach each other (`hosting.refusal` says so before), or too little memory.
    """
    used = sorted(set(ordinals))
    for a, b in permutations(used, 2):
        driver.enable_peer(a, b)
    if len(used) == 1:
        plain = [gpu.zeros(f"arena of rank {r}", (nbytes,), torch.uint8) for r, gpu in enumerate(gpus)]
        return Arenas(plain, [[t.data_ptr() for t in plain]] * len(plain), lambda: None)
    tensors: list[torch.Tensor] = []
    frees: list[Callable[[], None]] = []

    def free_all() -> None:
        for free in frees:
            free()

    try:
        for rank, gpu in enumerate(gpus):
            tensor, free = gpu.peer_zeros(f"arena of rank {rank}", nbytes)
            tensors.append(tensor)
            frees.append(free)
    except BaseException:
        free_all()
        raise
    return Arenas(tensors, [[t.data_ptr() for t in tensors]] * len(tensors), free_all)


@functools.lru_cache(maxsize=1)
def _symmetric() -> Any:
    """torch's symmetric memory, checked for what is used of it. Raises EngineError."""
    try:
        found: Any = importlib.import_module("torch.distributed._symmetric_memory")._SymmetricMemory
        for name in ("empty_strided_p2p", "set_group_info", "rendezvous"):
            getattr(found, name)
        return found
    except (ImportError, AttributeError) as error:
        raise EngineError(
            "torch", f"{torch.__version__} ({error})", "symmetric memory as torch 2.11 has it", "Update torch."
        ) from error


def _register(found: Any, name: str, control: Control) -> Any:
    """Give torch's symmetric memory a group of this package's own to meet in: rank, size and a store, no backend.

    Versions differ in whether they look `name` up among these or among registered process groups (torch 2.11), which
    live as long as what is returned here.
    """
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    store = control.store("symmetric")
    found.set_group_info(name, control.rank, control.size, store)
    group = c10d.ProcessGroup(store, control.rank, control.size)
    c10d._register_process_group(name, group)
    return group


@contextmanager
def _switched() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _SWITCHES}
    os.environ.update(_SWITCHES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def symmetric_arenas(control: Control, driver: Driver, ordinal: int, nbytes: int, word_at: int) -> Arenas:
    """The arena of this process' rank, which all ranks of `control` can reach. Collective.

    Every rank then writes one word into every other's arena and finds what the others wrote in its own: peer access is
    seen, not assumed.

    Args:
        control: the group.
        driver: writes the words.
        ordinal: this process' GPU.
        nbytes: size of an arena.
        word_at: offset of R 32-bit words in it that may be written and are zero again afterwards.

    Raises:
        EngineError: this rank has too little memory, or does not reach a peer.
        PeerError: another rank has, or does not.
    """
    name = f"megamoe-{control.token}"
    failure: MegaMoEError | None = None
    tensor, held = torch.empty(0), []
    try:
        found = _symmetric()
        held.append(_register(found, name, control))
        with _switched():
            tensor = found.empty_strided_p2p((nbytes,), (1,), torch.uint8, torch.device("cuda", ordinal), name)
        tensor.zero_()
        torch.cuda.synchronize(ordinal)
    except Exception as error:
        failure = stated("arena", error)
    control.agree("allocate", {"arena bytes": nbytes}, error=failure)
    addresses: list[int] = []
    try:
        with _switched():
            handle = found.rendezvous(tensor, name)
        held.append(handle)
        addresses = [int(p) for p in handle.buffer_ptrs]
        for rank, address in enumerate(addresses):
            driver.store_words(ordinal, address + word_at + 4 * control.rank, [_PROBE + 16 * rank + control.rank])
    except Exception as error:
        failure = EngineError(
            "peer access",
            (str(error).splitlines() or [type(error).__name__])[0][:200],
            "GPUs whose memory the processes can share (one NVLink domain, processes of one user)",
            "Check megamoe doctor's topology; containers need one process namespace, and SYS_PTRACE where pidfd_getfd "
            "is not permitted. Or use backend='cpu'.",
        )
    control.agree("rendezvous", error=failure)
    words = tensor[word_at : word_at + 4 * control.size].view(torch.int32)
    missing = [r for r, word in enumerate(words.tolist()) if word != _PROBE + 16 * control.rank + r]
    if missing:
        failure = EngineError(
            "peer access", f"nothing arrived from rank {missing[0]}", "what it wrote", "Check the machine's NVLink."
        )
    words.zero_()
    torch.cuda.synchronize(ordinal)
    control.agree("probe", error=failure)
    _log.info("GPU engine: rank %d of %d reaches all arenas (%.1f MiB)", control.rank, control.size, nbytes / 2**20)
    return Arenas([tensor], [addresses], held.clear)
