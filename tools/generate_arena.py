"""Writes kernels/arena_gen.cuh from megamoe.cuda.arena. A test compares the file with this generator's output."""

from __future__ import annotations

from megamoe.cuda.arena import device_header
from megamoe.cuda.sources import KERNELS

if __name__ == "__main__":
    (KERNELS / "arena_gen.cuh").write_text(device_header())
