"""What the host says about a wait that expired."""

from __future__ import annotations

import re

from megamoe.cuda.faults import _PHASES
from megamoe.cuda.sources import KERNELS


def test_every_phase_of_the_kernel_has_words() -> None:
    body = re.search(r"enum class Phase : u32 \{(.*?)\};", (KERNELS / "sync.cuh").read_text(), re.DOTALL)
    assert body is not None
    names = [name.strip() for name in body[1].split(",")]
    assert names[0] == "kCounts = 1"  # the others count on
    assert list(_PHASES) == list(range(1, len(names) + 1))
    assert len(set(_PHASES.values())) == len(names)
