"""Ranks as processes with gloo, for tests of more than one file: one life of the group, results by rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Play = Callable[[int], dict[str, Any]]


def _process(rank: int, play: Play, ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    try:
        seen = play(rank)
    except BaseException as error:
        seen = {"failed": error}
    torch.save(seen, directory / f"{rank}.pt")
    if "failed" not in seen:  # the others are told at once by this one's end
        dist.barrier()
    os._exit(0)


def play_ranks(play: Play, ranks: int, directory: Path, seconds: float = 240) -> list[dict[str, Any]]:
    """Run ``play(rank)`` in `ranks` processes that share a gloo world; what each returned, by rank.

    Raises:
        TimeoutError: the ranks did not finish in `seconds`.
        Exception: the first one that a rank raised.
    """
    processes = mp.spawn(_process, args=(play, ranks, directory), nprocs=ranks, join=False)
    assert processes is not None
    deadline = time.monotonic() + seconds
    while not processes.join(timeout=5):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            raise TimeoutError("the ranks hang")
    seen = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    for one in seen:
        if "failed" in one:
            raise one["failed"]
    return seen
