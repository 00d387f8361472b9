"""Time stamps of real calls: the table adds up, and the clocks of two GPUs are brought together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megamoe.bench.timeline_ranks import record_ranks
from megamoe.cuda.trace import phase_times

pytestmark = pytest.mark.gpu

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
COUNTED, LAID_OUT, STORED, PEERS = 2, 3, 11, 12


@pytest.mark.parametrize(
    ("ranks", "devices"), [(1, None), (2, None), pytest.param(2, [0, 1], marks=TWO)], ids=["1", "2", "2-gpus"]
)
@pytest.mark.parametrize("tokens", [16, 512])
def test_a_recorded_call(ranks, devices, tokens):
    recording = record_ranks("qwen3", tokens, ranks=ranks, devices=devices, experts_per_rank=16)
    assert not recording.truncated
    found, alignment = recording.intervals(), recording.alignment()
    assert (found["end"] >= found["begin"]).all()
    assert found["end"].max() < 5_000_000  # ns: one call, not what lies between two
    for rank in range(ranks):
        rows = {(row.group, row.phase): row for row in phase_times(recording, rank)}
        tiles = rows["loader", "feed tile"].count
        gemms = rows["math", "first GEMM"].count + rows["math", "second GEMM"].count
        assert gemms == rows["math", "epilogue"].count == rows["store", "store rows"].count == 2 * tiles > 0
        assert sum(row.share for (group, _), row in rows.items() if group == "math") == pytest.approx(1)
    ends = found["end"]
    slack = 2 * alignment.uncertainty
    lean = ranks == 1 and tokens == 16  # such calls count nothing
    for sent, seen in ((STORED, PEERS),) if lean else ((COUNTED, LAID_OUT), (STORED, PEERS)):
        assert ends[found["event"] == sent].max() <= ends[found["event"] == seen].min() + slack
    if devices is None:
        assert alignment.uncertainty == 0
    else:
        assert len(np.unique(recording.clocks)) == 2
        assert 0 < alignment.uncertainty < 50_000
        offset = alignment.offsets[1] - alignment.offsets[0]
        print(f"\n{tokens} tokens: clocks {offset} ns apart, within {alignment.uncertainty} ns")
